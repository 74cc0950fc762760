"""The server as a process: when it says that it is ready, and how it ends."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from expertctl.server.api_keys import ApiKeyStore
from expertctl.settings import Home
from tests.server.harness import BASE, ServedPackages
from tests.server.server_process import (
    SERVE_PROGRAM,
    START_SECONDS,
    GenerationServerProcess,
    run_server,
    start_server,
)

pytestmark = pytest.mark.all
TURNS = [{"role": "user", "content": "Sort: 3, 1, 2"}]
CHAT = "/v1/chat/completions"


def asked(tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": BASE, "messages": TURNS, "max_tokens": tokens, **more}


@pytest.fixture(scope="module")
def home(stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve") / "home"
    stock.make_home(root)
    return root


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[GenerationServerProcess]:
    with run_server(home) as server:
        yield server


def lines_of(server: GenerationServerProcess) -> list[dict[str, Any]]:
    said = server.log.read_text().splitlines()
    return [json.loads(line) for line in said if line.startswith("{")]


def test_it_is_ready_when_it_says_so_and_answers(server: GenerationServerProcess) -> None:
    assert server.request_json("GET", "/readyz") == {"ready": True, "state": "ready"}
    answer = server.request_json("POST", CHAT, asked(5))
    assert answer["usage"]["completion_tokens"] <= 5
    log = server.log.read_text()
    assert (
        0 < log.index(f"loading {BASE}, ") < log.index(f"ready on http://127.0.0.1:{server.port}")
    )


def test_on_a_terminal_it_says_where_its_pages_are(home: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", SERVE_PROGRAM, "serve", "--port", "0", "--json"]
    environment = {**os.environ, "EXPERT_HOME": str(home), "EXPERT_ENCODER": "lexical"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    try:
        while b"/status\r\n" not in said:
            said += os.read(ours, 4096)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", said.decode())
    addresses = [line.split()[-1] for line in shown.splitlines() if line.startswith("  ")]
    assert addresses == [f"{url}/v1", f"{url}/docs", f"{url}/chat", f"{url}/status"]


def test_the_process_that_listens_for_signals_has_no_torch(server: GenerationServerProcess) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps


def test_who_leaves_in_the_middle_frees_the_row_soon(server: GenerationServerProcess) -> None:
    with closing(server.connect()) as client:
        body = json.dumps(asked(2000, stream=True))
        client.request("POST", CHAT, body=body, headers={"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
    for _ in range(1000):
        text = server.send_request("GET", "/metrics")[2].decode()
        if f'vllm:num_requests_running{{engine="0",model_name="{BASE}"}} 0.0' in text:
            return
    raise AssertionError("the row is never free")


def test_a_base_that_is_not_there_ends_the_command_with_its_error(home: Path) -> None:
    with start_server(home, "--base", "nothing") as server:
        assert server.process.wait(START_SECONDS) == 3
        assert server.process.stdout
        said = json.loads(server.process.stdout.read())
    assert said["error"]["code"] == "not_found"
    assert "error: " in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_a_budget_that_is_too_small_ends_the_command_with_its_error(home: Path) -> None:
    with start_server(home, "--memory-budget", "10kB") as server:
        assert server.process.wait(START_SECONDS) == 7
    assert "Traceback" not in server.log.read_text()


def test_a_port_in_use_is_told_at_once(home: Path, server: GenerationServerProcess) -> None:
    with start_server(home, "--port", str(server.port)) as second:
        assert second.process.wait(START_SECONDS) == 6
    assert "cannot listen on" in second.log.read_text()
    assert server.send_request("GET", "/healthz")[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_0_when_told_to(home: Path, number: signal.Signals) -> None:
    with run_server(home) as server:
        children = psutil.Process(server.process.pid).children()
        server.send_request("POST", CHAT, asked(3))
        assert server.stop(number) == 0
        assert not any(child.is_running() for child in children)
    assert "Traceback" not in server.log.read_text()


def test_an_answer_that_runs_when_it_is_told_to_end_is_finished(home: Path) -> None:
    with run_server(home) as server, closing(server.connect()) as client:
        body = json.dumps(asked(300, stream=True))
        client.request("POST", CHAT, body=body, headers={"Content-Type": "application/json"})
        answer = client.getresponse()
        first = answer.readline()
        assert first.startswith(b"data: "), first
        ended = threading.Thread(target=server.stop)
        ended.start()
        rest = answer.read()
        ended.join(START_SECONDS)
        assert rest.rstrip().endswith(b"data: [DONE]"), rest[-300:]
        assert server.process.returncode == 0


def test_a_second_ctrl_c_ends_running_answers_as_far_as_they_are(home: Path) -> None:
    with run_server(home) as server, closing(server.connect()) as client:
        body = json.dumps(asked(100_000, stream=True))
        client.request("POST", CHAT, body=body, headers={"Content-Type": "application/json"})
        answer = client.getresponse()
        answer.readline()
        processes = [psutil.Process(server.process.pid)]
        processes += processes[0].children()
        for process in processes:  # as a terminal does
            process.send_signal(signal.SIGINT)
        while "stopping after 1 running requests; Ctrl-C again" not in server.log.read_text():
            time.sleep(0.05)
        assert server.process.poll() is None
        answer.readline()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        assert answer.read().rstrip().endswith(b"data: [DONE]")
        assert server.process.wait(20) == 0


def test_a_worker_that_is_killed_ends_the_command_with_an_error(home: Path) -> None:
    with run_server(home) as server:
        (worker,) = [
            child
            for child in psutil.Process(server.process.pid).children()
            if "resource_tracker" not in " ".join(child.cmdline())
        ]
        with closing(server.connect()) as client:
            body = json.dumps(asked(2000, stream=True))
            client.request("POST", CHAT, body=body, headers={"Content-Type": "application/json"})
            client.getresponse().readline()
            worker.kill()
            assert server.process.wait(START_SECONDS) == 6
    assert "a worker of the server ended by itself" in server.log.read_text()


def test_a_killed_server_leaves_no_worker_behind(home: Path) -> None:
    with run_server(home) as server:
        children = psutil.Process(server.process.pid).children()
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        psutil.wait_procs(children, timeout=START_SECONDS)
        assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("by", ["option", "setting"])
def test_an_operator_has_control_tokens_in_completions_read_as_text(
    stock: ServedPackages, tmp_path: Path, by: str
) -> None:
    home = tmp_path / "home"
    stock.make_home(home)
    words = ["--no-completions-special-tokens"] if by == "option" else []
    if by == "setting":
        (home / "config.toml").write_text('serve_completions_special_tokens = "no"\n')
    with run_server(home, *words) as server:
        body = {"model": BASE, "prompt": "<|im_end|>", "max_tokens": 1}
        as_text = server.request_json("POST", "/v1/completions", body)
        as_token = server.request_json("POST", "/v1/completions", {**body, "parse_special": True})
    counts = [one["usage"]["prompt_tokens"] for one in (as_text, as_token)]
    assert counts == [len("<|im_end|>"), 1]


def test_the_log_has_no_prompt_and_no_key(stock: ServedPackages, tmp_path: Path) -> None:
    root = tmp_path / "home"
    stock.make_home(root)
    made = ApiKeyStore(Home(root).api_keys).create("first", now=1.8e9)
    with run_server(root) as server:
        assert server.send_request("POST", CHAT, asked(3))[0] == 401
        bearer = f"Bearer {made.secret}"
        status, headers, _ = server.send_request("POST", CHAT, asked(3), Authorization=bearer)
        assert status == 200
        server.stop()
    (line,) = [line for line in lines_of(server) if line.get("status") == 200]
    assert (line["caller"], line["id"]) == (made.key.id, headers["x-request-id"])
    text = server.log.read_text()
    assert made.secret not in text
    assert "Sort" not in text


def test_a_body_that_stops_is_given_up(server: GenerationServerProcess) -> None:
    """Attack 85, slow bodies: the connection that was closed in the middle takes nothing."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000\r\n\r\n{"
    )
    for _ in range(50):
        with server.connect_socket() as connection:
            connection.sendall(head.encode())
    assert server.send_request("GET", "/healthz")[0] == 200


def test_a_thousand_connections_at_once_are_answered(
    server: GenerationServerProcess, open_files: None
) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with ExitStack() as stack:
        connections = [stack.enter_context(server.connect_socket()) for _ in range(1000)]
        for connection in connections:
            connection.sendall(head)
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert server.request_json("POST", CHAT, asked(3))["choices"]
