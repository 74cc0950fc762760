"""The samples of every second: the processes of a server, and its own metrics."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import httpx2
import psutil

EVERY_SECONDS = 1.0
_RECORDED_METRICS = (
    "expertctl_queue_jobs",
    "expertctl_preparing_jobs",
    "expertctl_batch_texts",
    "expertctl_requests_running",
    "expertctl_memory_bytes",
    "expertctl_memory_limit_bytes",
    "expertctl_memory_peak_bytes",
    "expertctl_kv_bytes",
    "expertctl_expert_evictions_total",
    "expertctl_expert_loads_total",
    "expertctl_expert_hits_total",
    "expertctl_jobs_total",
    "expertctl_tokens_total",
)


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The totals of the processes of a server at one moment."""

    ids: tuple[int, ...]
    resident: int
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class ServerSample:
    """One sample; ``metrics`` are by name and labels, as the server writes them."""

    at: float
    processes: ProcessUsage
    metrics: Mapping[str, float]

    def sum_metric(self, name: str, **labels: str) -> float:
        """Return the sum of all series of a name with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            value
            for series, value in self.metrics.items()
            if series.partition("{")[0] == name and all(one in series for one in wanted)
        )


def measure_processes(server: int) -> ProcessUsage:
    """Sample a server and all its child processes."""
    parent = psutil.Process(server)
    alive = [parent, *parent.children(recursive=True)]
    return ProcessUsage(
        ids=tuple(sorted(one.pid for one in alive)),
        resident=sum(one.memory_info().rss for one in alive),
        files=sum(one.num_fds() for one in alive),
        threads=sum(one.num_threads() for one in alive),
    )


class ServerMonitor:
    """Samples one server."""

    def __init__(self, url: str, server: int) -> None:
        """Use a separate connection."""
        self.samples = deque[ServerSample]()
        self._client, self._server = httpx2.AsyncClient(base_url=url, timeout=60), server

    async def sample(self) -> ServerSample:
        """Return a sample."""
        text = (await self._client.get("/metrics")).raise_for_status().text
        return ServerSample(time.monotonic(), measure_processes(self._server), parse_metrics(text))

    async def run(self) -> None:
        """Record a sample every second, until cancelled."""
        while True:
            self.samples.append(await self.sample())
            await asyncio.sleep(EVERY_SECONDS - time.monotonic() % EVERY_SECONDS)

    async def until_idle(self, *, seconds: float) -> ServerSample:
        """Sample until no request runs or waits; return the last sample, idle or not."""
        end = time.monotonic() + seconds
        while not is_idle(now := await self.sample()) and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return now

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()


def is_idle(now: ServerSample) -> bool:
    """Return whether the server does nothing except answer this monitor."""
    waits = ("queue_jobs", "preparing_jobs", "batch_texts", "kv_bytes")
    return not any(now.sum_metric(f"expertctl_{name}") for name in waits) and (
        now.sum_metric("expertctl_requests_running") <= 1
    )


def parse_metrics(text: str) -> dict[str, float]:
    """Parse those series of the text format that are recorded."""
    series = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {
        name: float(value)
        for name, _, value in series
        if name.partition("{")[0] in _RECORDED_METRICS
    }
