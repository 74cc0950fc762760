"""``run`` and ``chat`` with servers that fail, hang or are not what they should be."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from pathlib import Path

import pytest

from expertctl.cli import remote
from expertctl.cli.remote_question import KeptConversation, RemoteQuestion
from expertctl.errors import CancelledError
from expertctl.settings import load_settings
from tests.cli.command_runner import CommandRunner, expertctl, stdin
from tests.cli.remote_servers import Answer, RecordedServer, Said, listen, record_stranger
from tests.cli.test_chat import ChatTerminal
from tests.cli.test_remote import GREEDY, PROMPT, PROVED, SECRET, home, prove, served, server
from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder
from tests.server.conftest import stock
from tests.server.harness import ServerHarness

__all__ = [
    "expertctl",
    "home",
    "keeps_all_code",
    "keeps_code",
    "kept_folder",
    "served",
    "server",
    "stdin",
    "stock",
]

INFER = "/v1/infer"
KIND = "application/json"


def fail(status: int, code: str, message: str) -> Said:
    error = {"code": code, "message": message, "hint": ""}
    return status, KIND, json.dumps({"error": error}).encode()


def forward(served: ServerHarness, path: str, body: bytes) -> Said:
    """What the server of the record answers."""
    answer = served.client().post(path, content=body, headers={"Content-Type": KIND})
    return answer.status_code, answer.headers["Content-Type"], answer.content


def prove_then(served: ServerHarness, answer: Callable[[str, bytes], Said]) -> Answer:
    """Prove to be the server of the record, then answer otherwise."""

    def reply(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        return prove(served, body) if path == PROVED else answer(path, body)

    return reply


def say_slowly(text: bytes) -> Iterator[bytes]:
    """Say one byte after the other, with pauses."""
    for byte in text:
        threading.Event().wait(0.05)
        yield bytes([byte])


@pytest.mark.parametrize(
    "proof",
    [
        b"",
        b'{"proof": "\xff"}',
        b'{"proof": 7}',
        b"[" * 4000,
        b"x" * 5000,
        b'{"proof": "' + b"\xc3\xa9" * 32 + b'"}',
    ],
)
def test_what_is_no_proof_is_left(
    server: RecordedServer, expertctl: CommandRunner, proof: bytes
) -> None:
    with record_stranger(lambda *_: (200, KIND, proof), server) as other:
        told = expertctl("run", PROMPT, *GREEDY)
    assert f"the server at {other.url}" in told.err
    assert "is not used" in told.err
    assert (bool(told.out), other.paths) == (True, [PROVED])


def test_a_proof_that_never_ends_is_not_waited_for(
    served: ServerHarness,
    server: RecordedServer,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No pause is longer than what is waited for at all."""
    monkeypatch.setattr(remote, "PROOF_SECONDS", 0.5)

    def drip(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        assert path == PROVED
        _, kind, proof = prove(served, body)
        return 200, kind, say_slowly(proof)

    with record_stranger(drip, server) as slow:
        told = expertctl("run", PROMPT, *GREEDY)
    assert "is not used" in told.err
    assert (bool(told.out), slow.paths) == (True, [PROVED])


def test_a_busy_server_may_take_longer_to_prove_itself_than_to_connect(
    served: ServerHarness,
    server: RecordedServer,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "CONNECT_SECONDS", 0.2)

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        if path == PROVED:
            threading.Event().wait(0.5)
        return forward(served, path, body)

    with record_stranger(answer, server) as busy:
        assert expertctl("run", PROMPT, *GREEDY).out
    assert busy.answered == 1


def test_a_server_that_is_about_to_end_is_left(
    served: ServerHarness, server: RecordedServer, expertctl: CommandRunner
) -> None:
    ends = prove_then(served, lambda *_: fail(503, "store", "the server is shutting down"))
    with record_stranger(ends, server) as other:
        told = expertctl("run", PROMPT, *GREEDY)
    assert "is not used: the server is shutting down" in told.err
    assert (bool(told.out), other.paths) == (True, [PROVED, INFER])


def test_a_named_server_that_is_about_to_end_is_an_error(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with listen(lambda *_: fail(503, "store", "shutting down"), SECRET, tmp_path) as named:
        monkeypatch.setenv("EXPERT_SERVER", named.url)
        told = expertctl("run", PROMPT, *GREEDY, exit_code=6).err
    assert "shutting down" in told
    assert "`--local` answers in this process" in told


def begin(prompt: str = PROMPT) -> remote.RemoteStream:
    engine = remote.choose_server(load_settings(), ())
    assert engine is not None
    begun = engine.start(
        RemoteQuestion(
            prompt=prompt,
            body=None,
            template=None,
            options={"max_tokens": 9, "temperature": 0.0},
            earlier=KeptConversation(),
            is_own=True,
        )
    )
    assert begun is not None
    return begun


def test_what_cannot_be_cancelled_is_broken_off(
    served: ServerHarness, server: RecordedServer
) -> None:
    def answer(path: str, body: bytes) -> Said:
        return forward(served, path, body) if path == INFER else fail(503, "store", "no more")

    with record_stranger(prove_then(served, answer), server) as other:
        pieces = begin().read(lambda: True)
        said = [next(pieces), next(pieces)]
        with pytest.raises(CancelledError, match="it could not be cancelled: no more"):
            next(pieces)
    assert all(said)
    assert other.paths[-1].startswith("/v1/jobs/")


def test_an_answer_that_ended_when_it_was_to_be_cancelled_is_whole(
    server: RecordedServer, expertctl: CommandRunner
) -> None:
    """The server of these tests sends an answer as a whole, so its job is over."""
    assert "".join(begin().read(lambda: True)) == "".join(begin().read(lambda: False))
    assert [status for path, _, status in server.requests if "/v1/jobs/" in path] == [404]


def test_the_key_of_the_environment_goes_to_the_server_of_the_environment_only(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = list[str | None]()

    def note_key(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Said:
        keys.append(headers.get("Authorization"))
        return fail(401, "unauthenticated", "an API key is required")

    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "empty"))
    monkeypatch.setenv("EXPERT_API_KEY", "xpk_mine")
    with listen(note_key, SECRET, tmp_path) as named:
        expertctl("config", "set", "server", named.url)
        told = expertctl("run", PROMPT, exit_code=6).err
        monkeypatch.setenv("EXPERT_SERVER", named.url)
        expertctl("run", PROMPT, exit_code=6)
    assert keys == [None, "Bearer xpk_mine"]
    assert "EXPERT_API_KEY" in told


@pytest.mark.parametrize("place", ["127.0.0.1:1", "127.0.0.1:x", "127.0.0.1:1/?key=hunter2"])
@pytest.mark.parametrize("words", [(), ("--dtype", "int8")])
def test_a_password_in_the_address_is_not_repeated(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch, place: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("EXPERT_SERVER", f"http://me:hunter2@{place}")
    told = expertctl("run", PROMPT, *words, exit_code=2).err
    assert "127.0.0.1" in told
    assert "hunter2" not in told


@pytest.mark.all
def test_ctrl_c_ends_the_waiting_for_a_server_and_the_chat_goes_on(
    served: ServerHarness, server: RecordedServer
) -> None:
    asked, over = threading.Event(), threading.Event()

    def keep_alive() -> Iterator[bytes]:
        asked.set()
        for _ in repeat(None):
            if over.wait(0.1):
                return
            yield b": waiting\n\n"

    waits = prove_then(served, lambda *_: (200, "text/event-stream", keep_alive()))
    with record_stranger(waits, server):
        terminal = ChatTerminal("--greedy", "--max-tokens", "9")
        try:
            terminal.wait_for("> ")
            terminal.type("tell me\n")
            assert asked.wait(60)
            terminal.interrupt()
            terminal.wait_for("[interrupted before the first word]")
            terminal.wait_for("> ")
            terminal.type("/bye\n")
            assert terminal.process.wait(60) == 0
        finally:
            over.set()
            terminal.close()
