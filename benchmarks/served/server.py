"""`GenerationServer`: ``expertctl serve`` in its own process, and its metrics."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.served_home import BASE
from expertctl.settings import Home

EXPERTCTL = str(Path(sys.executable).with_name("expertctl"))
END_SECONDS = 300
REST_SECONDS = 60
PAUSE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """The content of ``/metrics`` at one time."""

    series: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def read(cls, text: str) -> "ServerMetrics":
        """Parse the text format of Prometheus."""
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples)
        return cls({(one.name, frozenset(one.labels.items())): one.value for one in samples})

    def get(self, name: str, **labels: str) -> float:
        """Return one of our metrics; one that was never counted is 0."""
        return self.series.get((f"expertctl_{name}", frozenset(labels.items())), 0.0)


class GenerationServer:
    """A running server."""

    def __init__(self, url: str, pid: int) -> None:
        """Use the server at this address; ``pid`` is its process."""
        self.url, self.pid = url, pid

    def read_metrics(self) -> ServerMetrics:
        """Read its metrics."""
        return ServerMetrics.read(httpx2.get(f"{self.url}/metrics").raise_for_status().text)

    def wait_until_idle(self) -> None:
        """Wait until nothing is generated and no job waits.

        Raises:
            SystemExit: when that takes too long.
        """
        end = time.monotonic() + REST_SECONDS
        while time.monotonic() < end:
            now = self.read_metrics()
            if not any(now.get(n) for n in ("queue_jobs", "preparing_jobs", "batch_texts")):
                return
            time.sleep(PAUSE_SECONDS)
        raise SystemExit(f"serving: the server is not at rest after {REST_SECONDS} s")


@contextmanager
def run_generation_server(
    home: Home, *options: str, base: str = BASE
) -> Iterator[GenerationServer]:
    """Run a server on a home.

    Raises:
        SystemExit: when it ends before it is ready.
    """
    command = [EXPERTCTL, "serve", "--port", "0", "--json", "--base", base, *options]
    environment = {**os.environ, "EXPERT_HOME": str(home.root)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"serving: `{' '.join(command)}` ended before it was ready")
            yield GenerationServer(json.loads(line)["url"], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(END_SECONDS)
