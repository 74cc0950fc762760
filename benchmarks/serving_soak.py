"""Half an hour of load on one generation server whose experts come, go and are evicted.

``expertctl serve`` in a process of its own answers all APIs on a home of `benchmarks.soak.house`,
where half of the experts have room. Capacity is measured in a closed loop; then requests come at
random times at ``--share`` of it, for ``--minutes``. Callers leave midway, some send wrong
requests, and commands change the home meanwhile. No caller may get a wrong answer, and the server
may keep nothing at the end: see `benchmarks.soak.findings`. Exits 1 where that is not so.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx2

from benchmarks.harness import Row, as_table, machine
from benchmarks.soak import findings
from benchmarks.soak.caller import Caller, Told
from benchmarks.soak.churn import EXPERTCTL, Churn
from benchmarks.soak.house import BASE, House, furnish
from benchmarks.soak.mistake import Mistake
from benchmarks.soak.plot import plot
from benchmarks.soak.record import write_record
from benchmarks.soak.request import Draws, Request
from benchmarks.soak.watch import Sample, Watch
from expertctl.server.native.job_store import KEPT_PER_OWNER
from expertctl.store.store import Store

ROWS = 8
BUDGET = "34MiB"
"""Base and buffers, what eight texts take at most, and room for about half of the experts."""
CALLERS = 16
CAPACITY_SECONDS = 60.0
IDLE_SECONDS = 60.0
SEED = 0
Ask = Callable[[], Request | Mistake]


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """All that was seen of one run."""

    capacity: float
    """Requests a second."""
    experts: int
    before: Sample
    after: Sample
    samples: Sequence[Sample]
    told: Sequence[Told]
    churn: Churn
    wrong: Sequence[str]


@contextmanager
def serving(house: House, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve a home; give its address and its process."""
    options = ("--rows", str(ROWS), "--memory-budget", BUDGET, "--base", BASE)
    environment = {**os.environ, "EXPERT_HOME": str(house.home.root)}
    command = [EXPERTCTL, "serve", "--port", "0", "--json", *options]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as server,
    ):
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())["url"], server
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(IDLE_SECONDS)


async def soak(
    house: House, url: str, server: int, *, minutes: float, share: float, told: list[Told]
) -> Soaked:
    """Load a server that runs; ``told`` gets what callers were told at 0.8 of its capacity."""
    watch, experts = Watch(url, server), house.experts
    draws, churn = Draws(experts, prompts_of(house), seed=SEED), Churn(house, seed=SEED)
    async with changing(churn):
        capacity = await _capacity(url, draws, experts)
    before = await watch.until_idle(seconds=IDLE_SECONDS)
    print(f"capacity {capacity:.1f} requests/s", file=sys.stderr, flush=True)
    looking = asyncio.create_task(watch.run())
    async with changing(churn), calling(url) as caller:
        rate = share * capacity
        await open_loop(caller, draws.next, rate=rate, seconds=60 * minutes, told=told)
    if looking.done():  # what is judged would have been seen for a part of the time only
        looking.result()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    wrong = await _all_answer(url, house, churn)
    after = await watch.until_idle(seconds=IDLE_SECONDS)
    await watch.close()
    return Soaked(
        capacity=capacity,
        experts=len(experts),
        before=before,
        after=after,
        samples=list(watch.samples),
        told=told,
        churn=churn,
        wrong=wrong,
    )


@asynccontextmanager
async def calling(url: str) -> AsyncIterator[Caller]:
    """Give a caller with as many connections as it wants, all closed at the end."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=CALLERS)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        yield Caller(client)


@asynccontextmanager
async def changing(churn: Churn) -> AsyncIterator[None]:
    """Let a home change meanwhile; nothing is half done at the end."""
    running = asyncio.create_task(churn.run())
    try:
        yield
    finally:
        churn.end()
        await running


async def closed_loop(caller: Caller, ask: Ask, *, enough: Callable[[int], bool]) -> list[Told]:
    """Let `CALLERS` ask again and again, until so many answers are enough."""
    told = list[Told]()

    async def go_on() -> None:
        while not enough(len(told)):
            told.append(await caller.ask(ask()))

    await asyncio.gather(*(go_on() for _ in range(CALLERS)))
    return told


async def open_loop(
    caller: Caller, ask: Ask, *, rate: float, seconds: float, told: list[Told]
) -> None:
    """Ask at random times, ``rate`` a second on average, whether or not answers have come."""
    drawn, at, begun = random.Random(SEED), 0.0, time.monotonic()  # arrivals are no secret
    asking = set[asyncio.Task[None]]()

    async def once() -> None:
        told.append(await caller.ask(ask()))

    while (at := at + drawn.expovariate(rate)) < seconds:
        await asyncio.sleep(max(begun + at - time.monotonic(), 0))
        task = asyncio.create_task(once())
        asking.add(task)
        task.add_done_callback(asking.discard)
    await asyncio.gather(*asking)


async def _capacity(url: str, draws: Draws, experts: Sequence[str]) -> float:
    """Return how many requests a second are answered at most, once kept jobs fill their room."""
    short = iter([_job(experts[n % len(experts)]) for n in range(KEPT_PER_OWNER + CALLERS)])
    async with calling(url) as caller:
        filled = await closed_loop(caller, short.__next__, enough=lambda n: n >= KEPT_PER_OWNER)
        assert all(one.status == httpx2.codes.ACCEPTED for one in filled), filled[0]
        end = time.monotonic() + CAPACITY_SECONDS
        told = await closed_loop(caller, draws.next, enough=lambda _: time.monotonic() > end)
    return len(told) / (max(one.ended for one in told) - min(one.begun for one in told))


async def _all_answer(url: str, house: House, churn: Churn) -> list[str]:
    """Have each expert answer alone, one after the other: none is stuck, each finds room."""
    await churn.restore()
    async with calling(url) as caller:
        told = [await caller.ask(_job(name)) for name in house.experts]
    async with httpx2.AsyncClient(base_url=url) as client:
        listed = (await client.get("/v1/experts")).json()["experts"]
    wrong = findings.not_asked_for(told, churn.away)
    names = tuple(sorted({str(one["name"]) for one in listed}))
    if names != tuple(sorted(house.experts)):
        wrong.append(f"experts are {names}")
    return wrong


def _job(expert: str) -> Request:
    """Ask an expert for a word, as a job."""
    body: dict[str, object] = {"prompt": "Hello", "force_experts": [expert], "max_tokens": 2}
    return Request(api="jobs", body=body, experts=(expert,))


def prompts_of(house: House) -> list[str]:
    """Return the example prompts of the starter's experts."""
    store = Store(house.home.store)
    manifests = [store.manifest(expert) for expert in store.experts()]
    return [text for one in manifests for text in one.routing.examples]


def rows_of(soaked: Soaked) -> Iterator[Row]:
    """Compare what came with what was asked for, and the end with the beginning."""
    told, count = soaked.told, float(len(soaked.told))
    late = findings.refused(told)
    faults = findings.faults(told, soaked.churn.away)
    yield _row("answered as asked", count - faults, "requests", count, "", ok=not faults)
    yield _row("refused for want of room", late, "of", count, "", ok=late == 0)
    memory = findings.memory_of(soaked.samples)
    hourly = [3600 * part / 1e6 for part in (memory.per_second.slope, memory.per_second.error)]
    yield Row(
        case="resident set, last third",
        ours=round(memory.last_third / 1e6, 2),
        rival="second third",
        theirs=round(memory.second_third / 1e6, 2),
        unit="MB",
        better="lower",
        ratio=round(1 + memory.growth, 4),
        spread=None,
        target=f"<= {1 + findings.GROWTH}",
        ok=memory.growth <= findings.GROWTH,
        note=f"{hourly[0]:+.1f} MB/h, standard error {hourly[1]:.1f}",
    )
    yield from _of_the_processes(soaked)
    yield from _of_the_load(soaked)


def _of_the_processes(soaked: Soaked) -> Iterator[Row]:
    before, after = soaked.before.processes, soaked.after.processes
    for name, spare in (("files", 0), ("threads", findings.SPARE_THREADS)):
        then, now = getattr(before, name), getattr(after, name)
        yield _row(f"{name} at the end", now, "before", then, "", ok=now <= then + spare)


def _of_the_load(soaked: Soaked) -> Iterator[Row]:
    first, last = soaked.samples[0], soaked.samples[-1]
    for what, tier in (("experts", "ram"), ("plans", "device")):
        evicted, loaded, found = (
            _grown(first, last, f"expertctl_expert_{name}_total", tier=tier)
            for name in ("evictions", "loads", "hits")
        )
        yield _row(f"{what} found in memory", found, "wanted", found + loaded, "")
        yield _row(f"{what} evicted", evicted, "loaded", loaded, "", ok=evicted > 0)
    seconds = last.at - first.at
    yield _row("load", len(soaked.told) / seconds, "capacity", soaked.capacity, "requests/s")
    left = sum(one.is_left for one in soaked.told)
    yield _row("callers who left", left, "requests", len(soaked.told), "")
    changes = [change for change in soaked.churn.changes if change.at >= first.at]
    yield _row("changes of the home", len(changes), "experts", soaked.experts, "")
    firsts = sorted(one.first for one in soaked.told if one.first is not None)
    late = firsts[int(0.99 * len(firsts))]
    yield _row("first token, median", 1e3 * statistics.median(firsts), "p99", 1e3 * late, "ms")


def _row(
    case: str, ours: float, rival: str, theirs: float, unit: str, *, ok: bool | None = None
) -> Row:
    ratio = round(ours / theirs, 4) if theirs else None
    return Row(case, round(ours, 2), rival, round(theirs, 2), unit, "lower", ratio, None, None, ok)


def _grown(first: Sample, last: Sample, name: str, **labels: str) -> float:
    return last.metric(name, **labels) - first.metric(name, **labels)


def wrong_with(soaked: Soaked) -> list[str]:
    """Say all that should not have been."""
    return [
        *findings.not_asked_for(soaked.told, soaked.churn.away),
        *findings.failed_changes(soaked.churn.changes),
        *findings.kept_at_end(soaked.before, soaked.after, soaked.told),
        *soaked.wrong,
    ]


def measure(minutes: float, share: float, log: Path) -> tuple[Soaked, list[str]]:
    """Furnish a home, load its server, end it, and look at all that is left."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "packages"
        scratch.mkdir()
        house = furnish(Path(folder) / "home", scratch)
        with serving(house, log) as (url, server):
            told = list[Told]()
            load = soak(house, url, server.pid, minutes=minutes, share=share, told=told)
            try:
                soaked = asyncio.run(load)
            except httpx2.HTTPError:
                print("the server is gone", *findings.not_asked_for(told, ()), sep="\n")
                raise
        wrong = wrong_with(soaked)
        if server.returncode:
            wrong.append(f"the server ended with {server.returncode}")
        Store(house.home.store).check_integrity()
    return soaked, wrong


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_soak")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the capacity")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--record", type=Path, metavar="FILE", help="all that was seen")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", default=Path(os.devnull), help="of the server"
    )
    options = parser.parse_args()
    soaked, wrong = measure(options.minutes, options.share, options.log or Path(os.devnull))
    if options.record:
        write_record(soaked.samples, soaked.told, options.record)
    if options.plot:
        plot(soaked.samples, soaked.told, options.plot)
    rows = [asdict(row) for row in rows_of(soaked)]
    document: dict[str, object] = {
        "name": "serving_soak",
        "machine": machine(),
        "rows": rows,
        "wrong": wrong,
    }
    print(json.dumps(document) if options.json else as_table(document))
    if not options.json:
        print("\n".join(wrong))
    sys.exit(1 if wrong or any(row["ok"] is False for row in rows) else 0)


if __name__ == "__main__":
    main()
