"""Runs commands in this process and reads what they print.

A stdin of a real descriptor: a pipe, a file, a terminal, as a shell or a service gives it.
"""

import io
import json
import os
import pty
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from expertctl.cli import app


@dataclass(frozen=True)
class CommandOutput:
    """What a command printed, and its exit code."""

    exit_code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


class CommandRunner:
    """The commands of `expertctl`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, exit_code: int = 0) -> CommandOutput:
        self._capsys.readouterr()
        actual = app.run([str(word) for word in words])
        out, err = self._capsys.readouterr()
        assert actual == exit_code, err
        assert "Traceback" not in err
        return CommandOutput(actual, out, err)


@pytest.fixture
def expertctl(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


WritePipe = Callable[[], None]


class ReplacedStdin:
    """Replaces stdin for one test; every descriptor is closed behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self._folder, self._stack = monkeypatch, folder, ExitStack()

    def pipe(self, data: bytes = b"") -> None:
        """What ``echo … |`` gives: some bytes, then the end."""
        read_end, write_end = os.pipe()
        thread = threading.Thread(target=_write_all, args=(write_end, data))
        self._stack.callback(thread.join)  # last: it ends once nobody can read any more
        self._use(read_end)
        thread.start()

    def open_pipe(self, *, is_socket: bool = False) -> Callable[[bytes], None]:
        """What a service or ssh holds open; the function writes to it and ends it."""
        if is_socket:
            ours, theirs = socket.socketpair()
            read_end, write_end = theirs.detach(), ours.detach()
        else:
            read_end, write_end = os.pipe()
        self._use(read_end)
        keeper = io.FileIO(write_end, "w")
        self._stack.callback(keeper.close)

        def write(data: bytes) -> None:
            keeper.write(data)
            keeper.close()

        return write

    def file(self, path: Path) -> None:
        """What ``< FILE`` gives."""
        self._use(os.open(path, os.O_RDONLY))

    def unreadable(self) -> None:
        """What ``nohup`` gives a command that a person starts: the null device, to write to."""
        self._use(os.open(os.devnull, os.O_WRONLY))

    def terminal(self, typed: bytes = b"") -> None:
        """A terminal at which somebody has typed."""
        parent, child = pty.openpty()
        self._stack.callback(os.close, parent)
        os.write(parent, typed)
        self._use(child)

    def closed(self) -> None:
        """What ``<&-`` gives."""
        self._monkeypatch.setattr(sys, "stdin", None)

    def close(self) -> None:
        """Give everything back."""
        self._stack.close()

    def _use(self, descriptor: int) -> None:
        stream = io.TextIOWrapper(io.BufferedReader(io.FileIO(descriptor, "r")), encoding="utf-8")
        self._stack.callback(stream.close)
        self._monkeypatch.setattr(sys, "stdin", stream)


def _write_all(descriptor: int, data: bytes) -> None:
    with io.FileIO(descriptor, "w") as stream:
        view = memoryview(data)
        while view:
            try:
                view = view[stream.write(view) :]
            except BrokenPipeError:  # the reader has had enough
                return


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ReplacedStdin]:
    given = ReplacedStdin(monkeypatch, tmp_path)
    yield given
    given.close()
