"""A process that has loaded the command and copies itself for each run, so that runs begin at once.

As a program it reads one job per line and answers with the exit code, negative for a signal.
"""

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertctl.cli import app, install

KILLED_EXIT_CODE = -signal.SIGKILL
MAX_COMMAND_SECONDS = 60.0
"""Seconds after which a command that hangs says where, and ends."""


@dataclass(frozen=True)
class CommandForkServer:
    """Such a process."""

    process: subprocess.Popen[str]
    log: Path

    def run(self, home: Path, *words: str, seconds: float | None = None) -> int:
        """Run a command in a home; kill it after some time."""
        job = {"home": str(home), "words": words, "seconds": seconds, "log": str(self.log)}
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


@contextmanager
def run_fork_server(log: Path, **environment: str) -> Iterator[CommandForkServer]:
    """Start one; what commands print goes to the log, that of the last one stays there."""
    with subprocess.Popen(
        [sys.executable, "-B", __file__],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield CommandForkServer(process, log)
        finally:
            process.kill()


def serve_jobs() -> None:
    """Do the jobs on stdin."""
    assert install, "loaded once, here"
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            _run_job(job)
        print(_wait_or_kill(child, job["seconds"]), flush=True)


def _run_job(job: Mapping[str, Any]) -> None:
    os.environ["EXPERT_HOME"] = job["home"]
    os.chdir(job["home"])
    said = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    faulthandler.dump_traceback_later(MAX_COMMAND_SECONDS, exit=True)
    os._exit(app.run(job["words"]))


def _wait_or_kill(child: int, seconds: float | None) -> int:
    """Wait for a child, or kill it when its time is over."""
    watch = os.pidfd_open(child)
    ended, _, _ = select.select([watch], [], [], seconds)
    os.close(watch)
    if not ended:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        serve_jobs()
