"""``run`` and ``chat`` beside a real `serve`: found, cancelled, and left when it is gone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_interruption import ended, first_bytes
from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder
from tests.server.conftest import stock
from tests.server.harness import BASE, ServedPackages
from tests.server.server_process import create_api_key, run_server

__all__ = ["keeps_all_code", "keeps_code", "kept_folder", "stock"]

pytestmark = pytest.mark.all

PROMPT = "Sort: 3, 1, 2"
GREEDY = ("--greedy", "--max-tokens", "12")
ENDLESS = ("--no-experts", "--greedy", "--max-tokens", "3000")
OPTIONS = ("--base", BASE, "--memory-budget", "64MiB")


@pytest.fixture
def home(stock: ServedPackages, tmp_path: Path) -> Path:
    stock.make_home(tmp_path / "home")
    return tmp_path / "home"


@contextmanager
def start(home: Path, *words: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-m", "expertctl", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "EXPERT_HOME": str(home),
            "EXPERT_ENCODER": "lexical",
            "NO_COLOR": "1",
            **environment,
        },
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def call(home: Path, *words: str, code: int = 0, **environment: str) -> tuple[bytes, str]:
    with start(home, *words, **environment) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, err.decode()
    return out, err.decode()


def test_a_server_is_found_answers_and_is_gone_at_its_end(home: Path) -> None:
    with run_server(home, *OPTIONS) as server:
        [record] = (home / "servers").iterdir()
        assert record.stat().st_mode & 0o777 == 0o600
        theirs, told = call(home, "run", PROMPT, *GREEDY, "-v")
        assert f"answered by the server at {server.url} (pid {server.process.pid})" in told
        ours, told = call(home, "run", PROMPT, *GREEDY, "-v", "--local")
        assert "answered by" not in told
        assert theirs == ours
        seeded = ("--seed", "5", "--temperature", "1.2", "--max-tokens", "12")
        assert (
            call(home, "run", PROMPT, *seeded)[0]
            == (call(home, "run", PROMPT, *seeded, "--local")[0])
        )
        assert json.loads(record.read_text())["secret"] not in server.log.read_text()
        assert server.stop() == 0
        assert list((home / "servers").iterdir()) == []
    assert "answered by" not in call(home, "run", PROMPT, *GREEDY, "-v")[1]


def test_ctrl_c_cancels_the_answer_on_the_server_and_keeps_its_text(home: Path) -> None:
    with run_server(home, *OPTIONS) as server:
        with start(home, "run", PROMPT, *ENDLESS) as process:
            text = first_bytes(process)
            rest, told = ended(process, signal.SIGINT)
        assert text
        assert "written (cancelled)" in told[-2]
        assert told[-1] == "stopped"
        assert "cancelled" in server.log.read_text()
        kept = json.loads((home / "last-conversation.json").read_text())
        assert kept["messages"][-1]["content"].encode() in text + rest
        assert call(home, "run", PROMPT, *GREEDY)[0], "its row is free"


def test_a_server_that_dies_within_an_answer_is_an_error(home: Path) -> None:
    with run_server(home, *OPTIONS) as server, start(home, "run", PROMPT, *ENDLESS) as process:
        assert first_bytes(process)
        server.process.kill()
        server.process.wait()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 6, err
    assert b"the connection broke" in err or b"the answer was cut off" in err
    assert b"`--local` answers in this process" in err
    assert len(list((home / "servers").iterdir())) == 1, "nobody removed its record"
    assert call(home, "run", PROMPT, *GREEDY)[0]
    assert list((home / "servers").iterdir()) == []


def test_the_owner_needs_no_key_and_others_need_one(home: Path, tmp_path: Path) -> None:
    key = create_api_key(home, "alice")
    with run_server(home, *OPTIONS) as server:
        told = call(home, "run", PROMPT, *GREEDY, "-v")[1]
        assert "answered by the server" in told
        named = {"EXPERT_SERVER": server.url}
        elsewhere = tmp_path / "elsewhere"
        assert "an API key is required" in call(elsewhere, "run", PROMPT, code=6, **named)[1]
        out, _ = call(elsewhere, "run", PROMPT, *GREEDY, **named, EXPERT_API_KEY=key)
        assert out == call(home, "run", PROMPT, *GREEDY)[0]
        assert not (elsewhere / "store").exists()


def test_two_servers_of_one_home_answer_for_their_bases(home: Path, stock: ServedPackages) -> None:
    add = ("base", "add", str(stock.base_dir), "--name", "other")
    call(home, *add)
    with (
        run_server(home, *OPTIONS) as one,
        run_server(home, "--base", "other", "--memory-budget", "64MiB") as other,
    ):
        assert len(list((home / "servers").iterdir())) == 2
        for base, server in ((BASE, one), ("other", other)):
            told = call(home, "run", PROMPT, "--base", base, *GREEDY, "-v")[1]
            assert f"answered by the server at {server.url} " in told
        told = call(home, "run", PROMPT, "--no-experts", *GREEDY, "-v")[1]
        assert f"answered by the server at {other.url} " in told, "the newest base"


def test_a_chat_goes_on_with_a_server(home: Path) -> None:
    with run_server(home, *OPTIONS) as server:
        theirs = call(home, "chat", PROMPT, *GREEDY, "-v")
        assert f"answered by the server at {server.url} " in theirs[1]
        later = call(home, "chat", "And 9, 8?", "-c", *GREEDY)[0]
        call(home, "chat", PROMPT, *GREEDY, "--local")
        assert later == call(home, "chat", "And 9, 8?", "-c", *GREEDY, "--local")[0]
