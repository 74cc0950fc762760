"""Memory of one generation server under load, against the bound that it states at the start.

``expertctl serve`` in its own process, on a base of 135M parameters without experts: random weights
as in `serving_gaps`, or a directory given by ``--base``. For ``--minutes``, clients send their next
request as soon as the last is answered. Every prompt is new, but ``user`` names repeat, so that
keys and values are cached for all of them. Once a second, the resident set of the process that
computes is sampled, and its ledger of base, buffers, keys and values. The bound is read from the
line that the server logs before it is ready.

Growth of memory is measured by means over a minute, or over a third of the time: one sample may be
taken just before or after many sequences end, whose memory is returned to the system within 20
seconds. The last sample is taken after that. The first third is warm-up: the caches are filled, and
what the ledger counts from the start is written for the first time.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import httpx2
import psutil

from benchmarks.harness import Row, describe_machine, format_table
from benchmarks.served.server import END_SECONDS, EXPERTCTL, ServerMetrics
from benchmarks.served_home import write_small_base
from expertctl.settings import Home, parse_size
from expertctl.store.bases import BaseStore

NAME = "measured"
BUDGET = "1200MB"
CALLERS = 8
EVERY_SECONDS, REST_SECONDS = 1.0, 45.0
GROWTH = 1.01
"""By how much the resident set of the last third of the time may exceed that of the second."""
STATED_BOUND = re.compile(r"memory: at most ([0-9.]+ [kMG]?B);")
_VOCABULARY = ("time", "people", "water", "day", "part", "work", "place", "year", "thing", "form")


@dataclass(frozen=True, slots=True)
class TrafficMix:
    """The requests of clients: prompt and answer have one of these lengths."""

    words: Sequence[int]
    answers: Sequence[int]
    """Tokens."""
    keys: int
    """Number of ``user`` names of each client."""


USUAL_TRAFFIC = TrafficMix(words=(50, 200, 400, 800), answers=(16, 48), keys=5)
SHORT_TRAFFIC = TrafficMix(words=(20, 60, 120), answers=(2, 4), keys=400)
"""Many answers, to find out how much memory stays allocated per answer."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """One sample, in bytes."""

    at: float
    resident: int
    entered: int
    """By the ledger: base, experts, keys and values, buffers; some of it is not yet written."""
    kept: int
    """Keys and values that belong to no running sequence."""
    kept_limit: int


class MemoryLoad:
    """Clients of a server, and samples of its memory."""

    def __init__(
        self, url: str, process: psutil.Process, traffic: TrafficMix, *, minutes: float
    ) -> None:
        """Use a server; ``process`` is the one that computes."""
        self._traffic = traffic
        self._url, self._process, self._end = url, process, time.monotonic() + 60 * minutes
        self._drawn = random.Random(0)  # prompts are no secret
        self.samples: list[MemorySample] = []
        self.at_rest: MemorySample | None = None
        """After all answers."""
        self.answers = 0

    async def run(self) -> None:
        """Send requests until the time is over."""
        async with httpx2.AsyncClient(base_url=self._url, timeout=600) as client:
            watching = asyncio.create_task(self._sample_memory(client))
            await asyncio.gather(*(self._run_caller(client, number) for number in range(CALLERS)))
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await asyncio.sleep(REST_SECONDS)
            self.at_rest = await self._take_sample(client)

    async def _run_caller(self, client: httpx2.AsyncClient, number: int) -> None:
        traffic = self._traffic
        while time.monotonic() < self._end:
            said = " ".join(self._drawn.choices(_VOCABULARY, k=self._drawn.choice(traffic.words)))
            body = {
                "model": NAME,
                "prompt": said,
                "max_tokens": self._drawn.choice(traffic.answers),
                "user": f"{number}-{self._drawn.randrange(traffic.keys)}",
            }
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            self.answers += 1

    async def _sample_memory(self, client: httpx2.AsyncClient) -> None:
        while True:
            self.samples.append(await self._take_sample(client))
            await asyncio.sleep(EVERY_SECONDS)

    async def _take_sample(self, client: httpx2.AsyncClient) -> MemorySample:
        figures = ServerMetrics.read((await client.get("/metrics")).raise_for_status().text)
        owners = ("base", "experts", "kv", "buffers")
        return MemorySample(
            at=time.monotonic(),
            resident=self._process.memory_info().rss,
            entered=int(sum(figures.get("memory_bytes", owner=owner) for owner in owners)),
            kept=int(figures.get("kv_kept_bytes")),
            kept_limit=int(figures.get("kv_kept_limit_bytes")),
        )


@contextmanager
def run_measured_server(home: Home, budget: str, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server; yield its address and the process that computes."""
    command = [EXPERTCTL, "serve", "--port", "0", "--json", "--base", NAME]
    command += ["--memory-budget", budget]
    environment = {**os.environ, "EXPERT_HOME": str(home.root)}
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as server,
    ):
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise SystemExit(f"serving_memory: the server ended; see {log}")
            below = psutil.Process(server.pid).children(recursive=True)
            worker = max(below, key=lambda one: int(one.memory_info().rss))
            yield json.loads(line)["url"], worker
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(END_SECONDS)


def parse_stated_bound(log: str) -> int:
    """Return the maximum of memory that a server states in its log, in bytes.

    Raises:
        SystemExit: when the log does not state it.
    """
    found = STATED_BOUND.search(log)
    if found is None:
        raise SystemExit("serving_memory: the server states no bound in its log")
    number, unit = found[1].split()
    return int(float(number) * parse_size(f"1{unit}"))


def make_rows(load: MemoryLoad, *, bound: int, what: str) -> Iterator[Row]:
    """Compare the resident set with the bound and over time, and the cache with its limit."""
    samples: Sequence[MemorySample] = load.samples
    most = max(samples, key=lambda one: one.resident)
    kept = max(samples, key=lambda one: one.kept)
    minutes = (samples[-1].at - samples[0].at) / 60
    rest = load.at_rest or samples[-1]
    note = (
        f"{load.answers} answers in {minutes:.1f} minutes; by minute: resident "
        f"{_average_by_minute(samples, lambda one: one.resident)} MB, of that not accounted for "
        f"{_average_by_minute(samples, lambda one: one.resident - one.entered)} MB; "
        f"at rest {rest.resident / 1e6:.0f} and {(rest.resident - rest.entered) / 1e6:.0f} MB"
    )
    yield _make_row(
        f"resident set at most, {what}", most.resident, "stated at the start", bound, note
    )
    third = len(samples) // 3
    second, last = (
        fmean(one.resident for one in part) for part in _split_last_parts(samples, third)
    )
    yield _make_row("resident set, last third", last, "second third", second, most=GROWTH)
    yield _make_row("keys and values kept at most", kept.kept, "their limit", kept.kept_limit)


def _split_last_parts(
    samples: Sequence[MemorySample], size: int
) -> tuple[Sequence[MemorySample], Sequence[MemorySample]]:
    return samples[-2 * size : -size], samples[-size:]


def _average_by_minute(
    samples: Sequence[MemorySample], figure: Callable[[MemorySample], int]
) -> str:
    """Return the mean of a figure in each minute, in MB."""
    minutes: dict[int, list[int]] = {}
    for one in samples:
        minutes.setdefault(int((one.at - samples[0].at) / 60), []).append(figure(one))
    return ", ".join(f"{fmean(minute) / 1e6:.0f}" for minute in minutes.values())


def _make_row(
    case: str,
    ours: float,
    rival: str,
    theirs: float,
    note: str | None = None,
    *,
    most: float = 1.0,
) -> Row:
    ratio = round(ours / theirs, 3) if theirs else None
    mine, other = round(ours / 1e6, 1), round(theirs / 1e6, 1)
    ok = ours <= most * theirs
    return Row(case, mine, rival, other, "MB", "lower", ratio, None, f"<= {most:g}", ok, note)


def main() -> None:
    """The command line: that of every benchmark, and the load and the base."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_memory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--base", type=Path, metavar="DIR")
    parser.add_argument("--budget", default=BUDGET, metavar="SIZE")
    parser.add_argument("--short", action="store_true", help="short texts, so many more answers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = options.base or write_small_base(Path(folder, "base"))
        home, log = Home(Path(folder, "home")), Path(folder, "log")
        BaseStore(home.bases).add(base, name=NAME)
        with run_measured_server(home, options.budget, log) as (url, worker):
            bound = parse_stated_bound(log.read_text(encoding="utf-8"))
            print(f"stated: {bound / 1e6:.0f} MB", file=sys.stderr, flush=True)
            load = MemoryLoad(
                url,
                worker,
                SHORT_TRAFFIC if options.short else USUAL_TRAFFIC,
                minutes=options.minutes,
            )
            asyncio.run(load.run())
    what = "random weights in the shape of SmolLM2-135M" if options.base is None else base.name
    rows = list(make_rows(load, bound=bound, what=f"{what}, a budget of {options.budget}"))
    document: dict[str, object] = {
        "name": "serving_memory",
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(document) if options.json else format_table(document))


if __name__ == "__main__":
    main()
