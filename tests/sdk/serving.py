"""A generation server in a process of its own, on a free port of this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WAIT = 60.0
BUDGET = "64MiB"


@dataclass
class Process:
    """A server and where it listens."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def stop(self) -> int:
        """Tell it to end; return its exit code."""
        self.process.terminate()
        return self.process.wait(WAIT)


@contextmanager
def serving_process(home: Path, *words: str) -> Iterator[Process]:
    """Serve a home as a person does, once it says where; ended whatever happens."""
    log = home.parent / f"{home.name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command("serve", "--port", "0", "--json", "--memory-budget", BUDGET), *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(home),
        )
    assert process.stdout
    try:
        line = process.stdout.readline()
        assert line, log.read_text()
        yield Process(process, json.loads(line)["url"], log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def new_key(home: Path, name: str, *words: str) -> str:
    """Make an API key as a person does, and return its secret."""
    made = subprocess.run(
        command("serve", "key", "new", name, *words, "--json"),
        capture_output=True,
        check=True,
        text=True,
        env=environment(home),
        timeout=WAIT,
    )
    return str(json.loads(made.stdout)["secret"])


def command(*words: str) -> Sequence[str]:
    """Return the command line of our program."""
    return [sys.executable, "-c", "from expertctl.cli.app import main; main()", *words]


def environment(home: Path) -> dict[str, str]:
    """Return the environment in which a home is used."""
    return {**os.environ, "EXPERT_HOME": str(home), "NO_COLOR": "1"}
