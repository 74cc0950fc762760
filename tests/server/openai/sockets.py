"""`expertctl serve` as a process of its own, on a socket."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from tests.store.shop import House

_END_SECONDS = 60


@dataclass(frozen=True)
class Socket:
    """A server that runs."""

    url: str
    house: House

    @property
    def base_url(self) -> str:
        """What clients of the OpenAI API are given."""
        return f"{self.url}/v1"

    def metric(self, line: str) -> float:
        """The number of a line of ``/metrics``, 0 where it is not there."""
        told = httpx2.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return next((float(one.split()[-1]) for one in told if one.startswith(line)), 0.0)


@contextmanager
def socket_server(house: House, log: Path, *options: str) -> Iterator[Socket]:
    """Serve what is installed in a home; ended by a signal, which must be enough."""
    command = [sys.executable, "-m", "expertctl", "serve", "--port", "0", "--json"]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("EXPERT_")},
        "EXPERT_HOME": str(house.root),
        "EXPERT_ENCODER": "lexical",
    }
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, "--base", "tiny", "--memory-budget", "256MiB", *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            head = process.stdout.readline()
            assert head, log.read_text()
            yield Socket(json.loads(head)["url"], house)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert code == 0, log.read_text()
