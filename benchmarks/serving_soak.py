"""Half an hour of load on one generation server whose experts are installed, removed and evicted.

``expertctl serve`` in its own process serves all APIs on a home of `benchmarks.soak.home`, with
memory for half of the experts. Capacity is measured in a closed loop; then requests come at random
times at ``--share`` of it, for ``--minutes``. Clients disconnect midway, some send invalid
requests, and commands change the home meanwhile. Every answer must be right, and the server must
hold no resources of requests at the end: see `benchmarks.soak.report`. The exit code is 1
otherwise.
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

from benchmarks.harness import Row, describe_machine, format_table
from benchmarks.soak import report
from benchmarks.soak.caller import CallRecord, SoakCaller
from benchmarks.soak.home import BASE, EXPERTCTL, HomeChurn, SoakHome, make_soak_home
from benchmarks.soak.monitor import ServerMonitor, ServerSample
from benchmarks.soak.report import draw_soak, write_record
from benchmarks.soak.requests import InvalidRequest, RequestGenerator, SoakRequest
from expertctl.server.native.jobs import MAX_ENDED_PER_OWNER
from expertctl.store.store import Store

ROWS = 8
BUDGET = "34MiB"
"""Base and buffers, the maximum of eight sequences, and room for about half of the experts."""
CALLERS = 16
CAPACITY_SECONDS = 60.0
IDLE_SECONDS = 60.0
SEED = 0
NextRequest = Callable[[], SoakRequest | InvalidRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """All observations of one run."""

    capacity: float
    """Requests a second."""
    experts: int
    before: ServerSample
    after: ServerSample
    samples: Sequence[ServerSample]
    told: Sequence[CallRecord]
    churn: HomeChurn
    wrong: Sequence[str]


@contextmanager
def run_soak_server(
    user_home: SoakHome, log: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Serve a home; yield its address and its process."""
    options = ("--rows", str(ROWS), "--memory-budget", BUDGET, "--base", BASE)
    environment = {**os.environ, "EXPERT_HOME": str(user_home.home.root)}
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


async def run_soak(
    user_home: SoakHome,
    url: str,
    server: int,
    *,
    minutes: float,
    share: float,
    told: list[CallRecord],
) -> SoakResult:
    """Load a running server; ``told`` gets the records of clients at 0.8 of its capacity."""
    watch, experts = ServerMonitor(url, server), user_home.expert_names
    draws, churn = (
        RequestGenerator(experts, list_prompts(user_home), seed=SEED),
        HomeChurn(user_home, seed=SEED),
    )
    async with run_churn(churn):
        capacity = await _measure_capacity(url, draws, experts)
    before = await watch.until_idle(seconds=IDLE_SECONDS)
    print(f"capacity {capacity:.1f} requests/s", file=sys.stderr, flush=True)
    looking = asyncio.create_task(watch.run())
    async with run_churn(churn), open_caller(url) as caller:
        rate = share * capacity
        await run_open_loop(caller, draws.next, rate=rate, seconds=60 * minutes, told=told)
    if looking.done():  # what is judged would have been seen for a part of the time only
        looking.result()
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    wrong = await _check_all_answer(url, user_home, churn)
    after = await watch.until_idle(seconds=IDLE_SECONDS)
    await watch.close()
    return SoakResult(
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
async def open_caller(url: str) -> AsyncIterator[SoakCaller]:
    """Yield a client with unlimited connections, all closed at the end."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=CALLERS)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        yield SoakCaller(client)


@asynccontextmanager
async def run_churn(churn: HomeChurn) -> AsyncIterator[None]:
    """Change a home meanwhile; every change is complete at the end."""
    running = asyncio.create_task(churn.run())
    try:
        yield
    finally:
        churn.stop()
        await running


async def run_closed_loop(
    caller: SoakCaller, ask: NextRequest, *, enough: Callable[[int], bool]
) -> list[CallRecord]:
    """Run `CALLERS` clients in a loop, until so many answers are enough."""
    told = list[CallRecord]()

    async def go_on() -> None:
        while not enough(len(told)):
            told.append(await caller.ask(ask()))

    await asyncio.gather(*(go_on() for _ in range(CALLERS)))
    return told


async def run_open_loop(
    caller: SoakCaller, ask: NextRequest, *, rate: float, seconds: float, told: list[CallRecord]
) -> None:
    """Send requests at random times, ``rate`` a second on average, without waiting for answers."""
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


async def _measure_capacity(url: str, draws: RequestGenerator, experts: Sequence[str]) -> float:
    """Return the maximum rate of answers per second, once stored jobs have reached their limit."""
    short = iter(
        [_make_job(experts[n % len(experts)]) for n in range(MAX_ENDED_PER_OWNER + CALLERS)]
    )
    async with open_caller(url) as caller:
        filled = await run_closed_loop(
            caller, short.__next__, enough=lambda n: n >= MAX_ENDED_PER_OWNER
        )
        assert all(one.status == httpx2.codes.ACCEPTED for one in filled), filled[0]
        end = time.monotonic() + CAPACITY_SECONDS
        told = await run_closed_loop(caller, draws.next, enough=lambda _: time.monotonic() > end)
    return len(told) / (max(one.ended for one in told) - min(one.begun for one in told))


async def _check_all_answer(url: str, user_home: SoakHome, churn: HomeChurn) -> list[str]:
    """Have each expert answer alone, one after the other: none is stuck, and each fits."""
    await churn.restore()
    async with open_caller(url) as caller:
        told = [await caller.ask(_make_job(name)) for name in user_home.expert_names]
    async with httpx2.AsyncClient(base_url=url) as client:
        listed = (await client.get("/v1/experts")).json()["experts"]
    wrong = report.describe_faults(told, churn.away)
    names = tuple(sorted({str(one["name"]) for one in listed}))
    if names != tuple(sorted(user_home.expert_names)):
        wrong.append(f"experts are {names}")
    return wrong


def _make_job(expert: str) -> SoakRequest:
    """Make a job that requests one word from an expert."""
    body: dict[str, object] = {"prompt": "Hello", "force_experts": [expert], "max_tokens": 2}
    return SoakRequest(api="jobs", body=body, experts=(expert,))


def list_prompts(user_home: SoakHome) -> list[str]:
    """Return the example prompts of the starter's experts."""
    store = Store(user_home.home.store)
    manifests = [store.read_manifest(expert) for expert in store.list_experts()]
    return [text for one in manifests for text in one.routing.examples]


def make_rows(soaked: SoakResult) -> Iterator[Row]:
    """Compare the answers with the requests, and the end with the beginning."""
    told, count = soaked.told, float(len(soaked.told))
    late = report.count_refused(told)
    faults = report.count_faults(told, soaked.churn.away)
    yield _make_row("answered as asked", count - faults, "requests", count, "", ok=not faults)
    yield _make_row("refused for want of room", late, "of", count, "", ok=late == 0)
    memory = report.measure_memory(soaked.samples)
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
        target=f"<= {1 + report.GROWTH}",
        ok=memory.growth <= report.GROWTH,
        note=f"{hourly[0]:+.1f} MB/h, standard error {hourly[1]:.1f}",
    )
    yield from _make_process_rows(soaked)
    yield from _make_load_rows(soaked)


def _make_process_rows(soaked: SoakResult) -> Iterator[Row]:
    before, after = soaked.before.processes, soaked.after.processes
    for name, spare in (("files", 0), ("threads", report.SPARE_THREADS)):
        then, now = getattr(before, name), getattr(after, name)
        yield _make_row(f"{name} at the end", now, "before", then, "", ok=now <= then + spare)


def _make_load_rows(soaked: SoakResult) -> Iterator[Row]:
    first, last = soaked.samples[0], soaked.samples[-1]
    for what, tier in (("experts", "ram"), ("plans", "device")):
        evicted, loaded, found = (
            _compute_growth(first, last, f"expertctl_expert_{name}_total", tier=tier)
            for name in ("evictions", "loads", "hits")
        )
        yield _make_row(f"{what} found in memory", found, "wanted", found + loaded, "")
        yield _make_row(f"{what} evicted", evicted, "loaded", loaded, "", ok=evicted > 0)
    seconds = last.at - first.at
    yield _make_row("load", len(soaked.told) / seconds, "capacity", soaked.capacity, "requests/s")
    left = sum(one.is_left for one in soaked.told)
    yield _make_row("callers who left", left, "requests", len(soaked.told), "")
    changes = [change for change in soaked.churn.changes if change.at >= first.at]
    yield _make_row("changes of the home", len(changes), "experts", soaked.experts, "")
    firsts = sorted(one.first for one in soaked.told if one.first is not None)
    late = firsts[int(0.99 * len(firsts))]
    yield _make_row("first token, median", 1e3 * statistics.median(firsts), "p99", 1e3 * late, "ms")


def _make_row(
    case: str, ours: float, rival: str, theirs: float, unit: str, *, ok: bool | None = None
) -> Row:
    ratio = round(ours / theirs, 4) if theirs else None
    return Row(case, round(ours, 2), rival, round(theirs, 2), unit, "lower", ratio, None, None, ok)


def _compute_growth(first: ServerSample, last: ServerSample, name: str, **labels: str) -> float:
    return last.sum_metric(name, **labels) - first.sum_metric(name, **labels)


def list_problems(soaked: SoakResult) -> list[str]:
    """Describe everything that is wrong."""
    return [
        *report.describe_faults(soaked.told, soaked.churn.away),
        *report.list_failed_changes(soaked.churn.changes),
        *report.list_leaks(soaked.before, soaked.after, soaked.told),
        *soaked.wrong,
    ]


def measure(minutes: float, share: float, log: Path) -> tuple[SoakResult, list[str]]:
    """Create a home, load its server, stop it, and inspect what is left."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "packages"
        scratch.mkdir()
        user_home = make_soak_home(Path(folder) / "home", scratch)
        with run_soak_server(user_home, log) as (url, server):
            told = list[CallRecord]()
            load = run_soak(user_home, url, server.pid, minutes=minutes, share=share, told=told)
            try:
                soaked = asyncio.run(load)
            except httpx2.HTTPError:
                print("the server is gone", *report.describe_faults(told, ()), sep="\n")
                raise
        wrong = list_problems(soaked)
        if server.returncode:
            wrong.append(f"the server ended with {server.returncode}")
        Store(user_home.home.store).check_integrity()
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
        draw_soak(soaked.samples, soaked.told, options.plot)
    rows = [asdict(row) for row in make_rows(soaked)]
    document: dict[str, object] = {
        "name": "serving_soak",
        "machine": describe_machine(),
        "rows": rows,
        "wrong": wrong,
    }
    print(json.dumps(document) if options.json else format_table(document))
    if not options.json:
        print("\n".join(wrong))
    sys.exit(1 if wrong or any(row["ok"] is False for row in rows) else 0)


if __name__ == "__main__":
    main()
