"""Clients that read nothing, or send half of what they promised: others are served meanwhile."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from expertctl.server.app import LARGE_BODIES_BYTES
from tests.server.harness import BASE, ServedPackages
from tests.server.openai.scripted_base import make_scripted_packages
from tests.server.server_process import START_SECONDS, GenerationServerProcess, run_server

pytestmark = pytest.mark.all
CHAT = "/v1/chat/completions"
TURNS = [{"role": "user", "content": "Sort: 3, 1, 2"}]
READERS, SENDERS = 200, 1000
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def server(
    stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GenerationServerProcess]:
    """Four rows, and little patience."""
    home = tmp_path_factory.mktemp("slow") / "home"
    stock.make_home(home)
    with run_server(home, "--rows", "4", "--queue", "1000", "--behind", "2") as server:
        yield server


def asked(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": BASE, "messages": TURNS, "max_tokens": tokens, **more}


def bytes_of(body: bytes, *, sent: int | None = None) -> bytes:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body[:sent]


def deaf(server: GenerationServerProcess) -> socket.socket:
    """A connection whose other end takes no more than a little."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.connect(("127.0.0.1", server.port))
    return made


def honest_answer(server: GenerationServerProcess) -> None:
    """Somebody in a hurry is answered whatever others do."""
    answer = server.request_json("POST", CHAT, asked(5, priority=9))
    assert answer["usage"]["completion_tokens"] <= 5


def is_waited_for(sender: socket.socket) -> bool:
    """Whether the rest of its body is; who is refused is answered, or cut off while it sends."""
    sender.setblocking(False)
    try:
        sender.recv(100)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def is_idle(server: GenerationServerProcess) -> bool:
    text = server.send_request("GET", "/metrics")[2].decode()
    kinds = ("running", "waiting")
    return all(
        f'vllm:num_requests_{kind}{{engine="0",model_name="{BASE}"}} 0.0' in text for kind in kinds
    )


def test_who_reads_nothing_holds_no_row(server: GenerationServerProcess, open_files: None) -> None:
    body = json.dumps(asked(100, stream=True, logprobs=True, top_logprobs=20)).encode()
    honest_answer(server)
    with ExitStack() as stack:
        for _ in range(READERS):
            stack.enter_context(deaf(server)).sendall(bytes_of(body))
        until = time.monotonic() + START_SECONDS
        while not is_idle(server):
            honest_answer(server)
            assert time.monotonic() < until


def test_who_reads_nothing_of_a_long_answer_gets_no_more(tmp_path: Path) -> None:
    """So much is written that neither the system nor granian holds it."""
    make_scripted_packages(tmp_path / "stock").make_home(tmp_path / "home")
    said = [{"role": "user", "content": "forever"}]
    scores = {"stream": True, "logprobs": True, "top_logprobs": 20, "temperature": 0}
    body = json.dumps({"model": BASE, "messages": said, "max_tokens": 3900, **scores}).encode()
    with run_server(tmp_path / "home", "--behind", "1") as server, deaf(server) as listener:
        listener.sendall(bytes_of(body))
        until = time.monotonic() + START_SECONDS
        while "a reader is too far behind" not in server.log.read_text():
            honest_answer(server)
            assert time.monotonic() < until


def test_a_thousand_halves_of_bodies_keep_nobody_from_being_served(
    server: GenerationServerProcess, open_files: None
) -> None:
    """Half of them are large: together they would take more than there is room for."""
    small = bytes_of(b'{"model": "' + b"x" * 1000, sent=500)
    large = bytes_of(b'{"model": "' + b"x" * MEBIBYTE, sent=MEBIBYTE - 1000)
    with ExitStack() as stack:
        senders = [stack.enter_context(server.connect_socket()) for _ in range(SENDERS)]
        for number, one in enumerate(senders):
            one.settimeout(0.2)
            with suppress(OSError):  # it is not taken any more
                one.sendall(large if number % 2 else small)
        honest_answer(server)
        until, most = (
            time.monotonic() + START_SECONDS,
            LARGE_BODIES_BYTES * 1.1,
        )  # 64 KiB of each are free
        while (held := sum(map(is_waited_for, senders[1::2])) * len(large)) > most:
            assert time.monotonic() < until, held
        assert held > LARGE_BODIES_BYTES / 2
        assert all(is_waited_for(one) for one in senders[::2])
    honest_answer(server)
