"""Ctrl-C and SIGTERM, as the person at the terminal and the one who sends it see them."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from expertctl.cli.process import CancellationFlag
from expertctl.engine.memory.process_registry import MemoryAdmission
from expertctl.schema.validation import find_problems
from expertctl.store.refs import StorePaths
from tests.cli.test_chat import ChatTerminal, talkative
from tests.cli.test_run import PROMPT, Expertctl, expertctl

__all__ = ["expertctl", "talkative"]

pytestmark = pytest.mark.all

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
LONG = ("--no-experts", "--greedy", "--max-tokens", "40000")


@contextmanager
def started(*words: str, stdin: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    program = "import sys; from expertctl.cli.app import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EXPERT_ENCODER": "lexical", "TERM": "xterm"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_bytes(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 1 << 16)


def ended(process: subprocess.Popen[bytes], number: int) -> tuple[bytes, list[str]]:
    """Send a signal; return the rest of stdout, and the lines of stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    return out, err.decode().splitlines()


@BOTH
def test_what_was_written_of_an_answer_stays(talkative: None, number: int) -> None:
    with started("run", PROMPT, *LONG) as process:
        text = first_bytes(process)
        rest, told = ended(process, number)
    assert text
    assert (text + rest).endswith(b"\n"), "the prompt of a shell begins a line"
    assert "written (cancelled)" in told[-2]
    assert told[-1] == "stopped"


def test_with_json_the_document_says_that_it_was_stopped(talkative: None) -> None:
    """A trace of the engine tells when the answer has begun: with --json nothing else does."""
    change = (
        "from expertctl.cli.run import _AnswerIterator\n"
        "advance, told = _AnswerIterator.advance, []\n"
        "def stop(self):\n"
        "    advance(self)\n"
        "    told.append(self.piece)\n"
        "    if len(told) == 3: os.kill(os.getpid(), signal.SIGINT)\n"
        "_AnswerIterator.advance = stop"
    )
    said = patched(change, "run", PROMPT, *LONG, "--json")
    document = json.loads(said.stdout)
    assert find_problems(document, "run") == []
    assert document["finish_reason"] == "cancelled"
    assert document["text"]
    assert (said.returncode, said.stderr.splitlines()[-1]) == (130, "stopped")


@BOTH
def test_a_run_that_waits_for_memory_gives_up_its_place(
    talkative: None, expertctl: Expertctl, number: int
) -> None:
    running = StorePaths(Path(os.environ["EXPERT_HOME"]) / "store").running
    words = ("run", PROMPT, "--no-experts", "--max-tokens", "8", "--memory-budget", "8MB")
    with (
        MemoryAdmission(running).acquire(8_000_000),
        started(*words, "--on-budget", "queue") as process,
    ):
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"waiting for memory: ")
        assert ended(process, number) == (b"", ["stopped"])
    assert [path for path in running.iterdir() if path.is_dir()] == []


def test_a_terminal_is_as_it_was_before(talkative: None) -> None:
    """The bar hid the cursor; SIGTERM, which by itself ends a process at once, brings it back."""
    running = StorePaths(Path(os.environ["EXPERT_HOME"]) / "store").running
    words = ("run", PROMPT, "--no-experts", "--max-tokens", "8", "--memory-budget", "8MB")
    master, child = pty.openpty()
    program = "import sys; from expertctl.cli.app import main; main()"
    with MemoryAdmission(running).acquire(8_000_000):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words, "--on-budget", "queue"],
            stdin=child, stdout=child, stderr=child,
            env={**os.environ, "EXPERT_ENCODER": "lexical", "TERM": "xterm"},
        )  # fmt: skip
        os.close(child)
        seen = until(master, b"waiting for memory")
        process.terminate()
        seen += until(master, b"stopped\r\n")
        assert process.wait(60) == 130
    os.close(master)
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1


def until(master: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        assert select.select([master], [], [], 60)[0], seen
        seen += os.read(master, 1 << 16)
    return seen


def patched(change: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in which a function was replaced."""
    program = f"import os, signal, sys\nfrom expertctl.cli.app import main\n{change}\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("signals", [["SIGINT"], ["SIGTERM"], ["SIGTERM", "SIGINT"]])
def test_whatever_a_command_does_it_says_that_it_was_stopped(signals: Sequence[str]) -> None:
    sent = "; ".join(f"os.kill(os.getpid(), signal.{name})" for name in signals)
    change = (
        "from expertctl.routing.planner import Planner\n"
        f"def stop(*_, **__): {sent}\n"
        "Planner.open = stop"
    )
    said = patched(change, "route", PROMPT)
    assert (said.returncode, said.stdout, said.stderr) == (130, "", "stopped\n")


def test_who_has_sigterm_ignored_is_not_ended_by_it() -> None:
    program = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from expertctl.cli.process import install_signal_handlers\n"
        "install_signal_handlers(); print(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert said.stdout.strip() == b"True"


@BOTH
def test_a_signal_that_comes_while_c_calls_python_is_heard_after_that(number: int) -> None:
    """What a callback raises is printed and lost; LLVM has some while kernels are compiled."""
    change = (
        "import ctypes\n"
        "from expertctl.routing.planner import Planner\n"
        f"body = 'def called():\\n os.kill(os.getpid(), {int(number)})\\n for _ in [1, 2]: pass'\n"
        "exec(compile(body, '/x/llvmlite/binding.py', 'exec'), space := {'os': os})\n"
        "def work(*_, **__):\n"
        "    ctypes.CFUNCTYPE(None)(space['called'])()\n"
        "    signal.pause()\n"
        "Planner.open = work"
    )
    said = patched(change, "route", PROMPT)
    assert (said.returncode, said.stdout, said.stderr) == (130, "", "stopped\n")


def test_the_first_signal_asks_and_the_second_ends() -> None:
    ending = CancellationFlag()
    before = signal.getsignal(signal.SIGINT)
    with ending.catch_signals(signal.SIGINT):
        assert not ending()
        signal.raise_signal(signal.SIGINT)
        assert ending()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_does_not_end_by_a_signal_that_is_ignored() -> None:
    """As SIGINT is for what a script started with ``&``: it is meant for another command."""
    ending, before = CancellationFlag(), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending.catch_signals(signal.SIGINT):
            signal.raise_signal(signal.SIGINT)
        assert not ending()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@BOTH
def test_a_second_signal_that_comes_while_c_calls_python_is_not_lost(number: int) -> None:
    """In a chat kernels are compiled while its first answer is wanted, or not any more."""
    change = (
        "import ctypes\n"
        "from expertctl.cli.process import CancellationFlag\n"
        "from expertctl.routing.planner import Planner\n"
        f"once = ' os.kill(os.getpid(), {int(number)})\\n for _ in [1, 2]: pass\\n'\n"
        "body = 'def called():\\n' + once + once\n"
        "exec(compile(body, '/x/llvmlite/binding.py', 'exec'), space := {'os': os})\n"
        "def work(*_, **__):\n"
        "    with CancellationFlag().catch_signals(signal.SIGINT, signal.SIGTERM):\n"
        "        ctypes.CFUNCTYPE(None)(space['called'])()\n"
        "        signal.pause()\n"
        "Planner.open = work"
    )
    said = patched(change, "route", PROMPT)
    assert (said.returncode, said.stdout, said.stderr) == (130, "", "stopped\n")


def test_sigterm_ends_a_chat_that_waits_at_its_prompt(talkative: None) -> None:
    """It is sent until it is heard: between the prompt and its waiting, Python is deaf."""
    terminal = ChatTerminal("--no-experts")
    try:
        terminal.wait_for("> ")
        for _ in range(12):
            terminal.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                terminal.process.wait(5)
                break
        assert terminal.process.returncode == 130
        terminal.wait_for("\r\nstopped\r\n")
    finally:
        terminal.close()


@BOTH
def test_a_chat_of_a_script_keeps_the_turns_that_were_answered(
    talkative: None, number: int
) -> None:
    source, typed = os.pipe()
    words = ("chat", "--json", "--no-experts", "--greedy", "--max-tokens", "8")
    with started(*words, stdin=source) as process:
        os.close(source)
        os.write(typed, b"one\n")
        assert process.stderr is not None
        with suppress(ValueError):
            while b"tokens/s" not in process.stderr.readline():
                pass
        out, told = ended(process, number)
    os.close(typed)
    turn = json.loads(out)["turns"][0]
    run = {key: value for key, value in turn.items() if key != "prompt"}
    assert (turn["prompt"], find_problems(run, "run")) == ("one", [])
    assert told[-1] == "stopped"
