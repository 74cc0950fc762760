"""Custom validators: programs of the operator that read an answer and exit with 0 if it passes.

Programs are set when the server starts, never by a request, and run without a shell. A program gets
the answer on stdin and none of the server's secrets in its environment. Its stderr is the reason
shown to users. It is killed when its time is up.
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import IO

from expertctl.engine.text.answer_format import MAX_CHARACTERS, FormatCheck
from expertctl.errors import NotFoundError, UsageError, to_single_line

DEFAULT_TIMEOUT = 5.0
"""Default time limit of a validator, in seconds."""
MAX_OUTPUT = 2000
"""Bytes of stderr that are kept; the rest is read and discarded."""
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT")


@dataclass(frozen=True, slots=True)
class ValidatorCommand:
    """A program with its arguments and its time limit in seconds."""

    arguments: tuple[str, ...]
    timeout: float = DEFAULT_TIMEOUT

    def check(self, name: str, text: str) -> FormatCheck:
        """Run the program on an answer; without a result, the answer neither passes nor fails."""
        if len(text) > MAX_CHARACTERS:
            return FormatCheck(None, f"the answer is not checked: over {MAX_CHARACTERS} characters")
        try:
            code, output = self._run(text)
        except subprocess.TimeoutExpired:
            return FormatCheck(
                None, f"the validator {name} took longer than {self.timeout:g} seconds"
            )
        except OSError as error:
            return FormatCheck(None, f"the validator {name} could not be started: {error.strerror}")
        if code < 0:
            return FormatCheck(None, f"the validator {name} was killed by signal {-code}")
        if code > 0:
            return FormatCheck(False, f"the validator {name} rejected the answer: {output or code}")
        return FormatCheck(True)

    def _run(self, text: str) -> tuple[int, str]:
        """Return the exit code, and stderr as one line."""
        with tempfile.TemporaryFile() as stdin:
            stdin.write(text.encode("utf-8", "replace"))
            stdin.seek(0)
            process = subprocess.Popen(  # noqa: S603  # the operator's own command, without a shell
                self.arguments,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
                start_new_session=True,
            )
        assert process.stderr is not None
        hearing = _StderrReader(process.stderr)
        try:
            return process.wait(self.timeout), hearing.read_line()
        except subprocess.TimeoutExpired:
            _kill(process)
            raise


class _StderrReader:
    """Reads stderr in a thread, so that the program never blocks on it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def read_line(self) -> str:
        """Return stderr as one printable line."""
        self._thread.join(1.0)  # a child process outside the group may keep the pipe open
        words = self._kept.decode("utf-8", "replace").split()
        return to_single_line(" ".join(words), "?")

    def _read(self) -> None:
        with self._stream as stream:
            self._kept = stream.read(MAX_OUTPUT)
            while stream.read(65536):
                pass


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and the processes it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)  # still valid: the leader is not reaped yet
    process.kill()
    process.wait()


def parse_validators(options: Iterable[str]) -> Mapping[str, ValidatorCommand]:
    """Parse ``NAME=PROGRAM [ARGUMENT…]`` options, split into words as by a shell.

    Raises:
        UsageError: when one is malformed, or a name is given twice.
        NotFoundError: when there is no such program.
    """
    commands = dict[str, ValidatorCommand]()
    for option in options:
        name, words = _parse_option(option)
        if name in commands:
            raise UsageError(f"there are two validators {name!r}", hint="give them different names")
        commands[name] = ValidatorCommand((_find_program(words[0]), *words[1:]))
    return commands


def _parse_option(option: str) -> tuple[str, list[str]]:
    name, _, line = option.partition("=")
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"the validator {option[:80]!r}: {error}") from error
    if not words or not name or len(name) > 64 or not name.isprintable():
        raise UsageError(
            f"{option[:80]!r} is not a validator",
            hint="write NAME=PROGRAM, such as iban=/usr/local/bin/check-iban",
        )
    return name, words


def _find_program(word: str) -> str:
    found = shutil.which(word)
    if found is None:
        raise NotFoundError(
            f"the validator {word[:200]!r} is not a program",
            hint="give its path, and make it executable",
        )
    return str(os.path.abspath(found))  # noqa: PTH100  # symbolic links are kept
