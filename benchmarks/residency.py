"""Which experts stay in memory: 100 of 20 MB for the starter base, 256 MB, 20,000 requests.

Requests are drawn from Zipf's law (1.0, seed 0), once with the same favourites all the time and
once with new ones every 2,500 requests. *Replayed* are all of them, through the tiers, the
ledger and the eviction that `run` uses, with experts whose bytes are counted and not read. *Real*
are the first of them: files are read, verified and compiled, and the operating system says what
that takes. Both must find the same experts in memory, or the replay says nothing. The rivals of
the replay get the same requests: the best set of experts that never changes, an LRU of as many as
fit, and Belady's rule, which sees the future.

*With notice*, a job is known while the one before it writes its answer, which here is a pause.
"""

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from benchmarks.harness import Row, judged, main
from benchmarks.installed import CONFIG, WEIGHTS, installed
from benchmarks.popularity import belady, best_static, drawn, lru, shifting
from expertctl.digest import Digest
from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.budget import Budget
from expertctl.engine.compose import Form
from expertctl.engine.experts import ExpertSource, Target, compiled
from expertctl.engine.gains import GainSource
from expertctl.engine.prefetch import Prefetch
from expertctl.engine.tiers import Tier, Tiers, Wanted
from expertctl.package.model_config import ModelConfig, read_config
from expertctl.store.derived import Derived

EXPERTS, EXPERT_BYTES = 100, 20_000_000
BUDGET = 256_000_000
REQUESTS, REAL, JOBS = 20_000, 1_500, 300
FAVOURITES_LAST = 2_500
SEED = 0
STARTER = Path(__file__).parent.parent / "expertctl" / "_starter" / "base"
_MB = 1e6
_LOOKS_APART = 0.002


def measure(_rounds: int) -> Sequence[Row]:
    """Replay all requests, then make the first of them, then make jobs with notice."""
    wanted = drawn(REQUESTS, experts=EXPERTS, seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf.write(Path(folder))
        replayed = replay(wanted, shelf.sizes)
        moving = shifting(REQUESTS, experts=EXPERTS, seed=SEED, every=FAVOURITES_LAST)
        followed = replay(moving, shelf.sizes)
        copies = replay(wanted, shelf.sizes, plan_bytes=EXPERT_BYTES)
        real = make(wanted[:REAL], shelf)
        told, untold = (_Jobs(shelf).make(wanted[:JOBS], notice=n) for n in (True, False))
    policy = [*_policy(wanted, replayed, copies), *_following(moving, followed)]
    return [*policy, *_reality(replayed, real), *_notice(told, untold)]


@dataclass(frozen=True, slots=True)
class Shelf:
    """Experts as files, and what they are compiled for."""

    sources: tuple[ExpertSource, ...]
    target: Target

    @classmethod
    def write(cls, folder: Path) -> "Shelf":
        """Write all experts."""
        config = read_config(STARTER)
        form = Form(config.linear_shapes(), config.hidden_size, torch.float32, torch.device("cpu"))
        gains = GainSource(Digest.of(b"no DoRA"), lambda _: torch.empty(0), Derived(folder))
        sources = tuple(_written(folder / str(n), config, n) for n in range(EXPERTS))
        return cls(sources, Target(form, gains))

    @property
    def sizes(self) -> list[int]:
        """What each expert takes in memory."""
        return [source.nbytes for source in self.sources]


def _written(directory: Path, config: ModelConfig, number: int) -> ExpertSource:
    """Write a float32 LoRA whose scale is 1, so that its plan uses it where it lies."""
    directory.mkdir()
    shapes = config.linear_shapes()
    rank = EXPERT_BYTES // (4 * sum(sum(shape) for shape in shapes.values()))
    pool = np.random.default_rng(number).random(1 << 20, dtype=np.float32)
    tensors = {}
    for module, (out, into) in shapes.items():
        for half, shape in (("A", (rank, into)), ("B", (out, rank))):
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = np.resize(pool, shape)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / CONFIG).write_text(json.dumps({**adapter, "task_type": "CAUSAL_LM"}))
    return installed(directory, base="starter")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Which requests found their expert in memory, and the most bytes that were held."""

    hits: tuple[bool, ...]
    ledger: int
    resident_set: int = 0


def replay(wanted: Sequence[int], sizes: Sequence[int], *, plan_bytes: int = 0) -> Outcome:
    """Ask the tiers for experts that are nothing but their size, and for their plans.

    A plan uses its expert where it lies, or is a copy of so many bytes.
    """
    uses_in_place = not plan_bytes
    budget = Budget(BUDGET)
    tiers, hits = Tiers(ram=budget, device=budget), []
    digests = [Digest.of(b"%d" % number) for number in range(len(sizes))]
    for number in wanted:
        tiers.begin_request()
        expert, plan = (Tier.RAM, digests[number]), (Tier.DEVICE, digests[number])
        with ExitStack() as stack:
            found = stack.enter_context(tiers.resident(plan))
            hits.append(found is not None)
            if found is None:
                bytes_of = Wanted(expert, sizes[number], "an expert", lambda: "its bytes")
                stack.enter_context(tiers.pin([bytes_of]))
                uses = (expert,) if uses_in_place else ()
                compiled_one = Wanted(plan, plan_bytes, "a plan", lambda: "compiled", uses)
                stack.enter_context(tiers.pin([compiled_one]))
    tiers.check_integrity()
    return Outcome(tuple(hits), budget.peak)


def make(wanted: Sequence[int], shelf: Shelf) -> Outcome:
    """Make requests: read, verify and compile what is absent, and watch the resident set."""
    budget, hits = Budget(BUDGET), []
    _use(Tiers(ram=budget, device=budget), shelf, wanted[0])  # what the first brings once
    budget = Budget(BUDGET)
    tiers = Tiers(ram=budget, device=budget)
    with _watched() as watch:
        for number in wanted:
            before = tiers.traffic[Tier.RAM].loads
            _use(tiers, shelf, number)
            hits.append(tiers.traffic[Tier.RAM].loads == before)
    tiers.check_integrity()
    return Outcome(tuple(hits), budget.peak, watch.grown)


def _use(tiers: Tiers, shelf: Shelf, number: int) -> None:
    with _borrowed(tiers, shelf, number):
        pass


@contextmanager
def _borrowed(tiers: Tiers, shelf: Shelf, number: int) -> Iterator[None]:
    """Borrow the plan of one expert."""
    source = shelf.sources[number]
    tiers.begin_request()
    chain = [(source, 1.0)]
    with compiled(tiers, chain, identity=source.content_digest, target=shelf.target) as plan:
        assert len(plan.deltas) == len(shelf.target.form.shapes)
        yield


@dataclass(frozen=True, slots=True)
class Job:
    """What one job went through; an expert that was there has no ``load``."""

    ready: float
    """Seconds until its plan was there."""
    waits: bool
    """Whether it waited for its expert to be read, or read it itself."""
    notice: float
    """Seconds for which its need was known before."""
    load: float | None
    """Seconds that reading its expert took."""

    @property
    def should_not_wait(self) -> bool:
        """Whether its need was known for longer than it takes to load."""
        return self.load is not None and self.notice >= self.load


@dataclass(slots=True)
class _Loads:
    """How long each expert took to read the last time, and which thread read it."""

    seconds: dict[str, tuple[float, str]] = field(default_factory=dict)

    def timed(self, source: ExpertSource) -> ExpertSource:
        """Return the same expert, its reading timed."""

        def load() -> LoadedAdapter:
            start = time.perf_counter()
            adapter = source.load()
            seconds = time.perf_counter() - start
            self.seconds[source.manifest.ref] = seconds, threading.current_thread().name
            return adapter

        return replace(source, load=load)


class _Jobs:
    """Jobs one after the other; with notice, the next is known when one begins."""

    def __init__(self, shelf: Shelf) -> None:
        budget = Budget(BUDGET)
        self.loads = _Loads()
        self.tiers = Tiers(ram=budget, device=budget)
        self.prefetch: Prefetch[LoadedAdapter] = Prefetch(self.tiers)
        self.answer = 2 * _load_seconds(shelf)
        self.shelf = replace(shelf, sources=tuple(map(self.loads.timed, shelf.sources)))

    def make(self, wanted: Sequence[int], *, notice: bool) -> list[Job]:
        """Make all of them."""
        made, known, since = [], ExitStack(), time.perf_counter()
        for number, following in zip(wanted, [*wanted[1:], None], strict=True):
            told, known, told_at, since = known, ExitStack(), since, time.perf_counter()
            if notice and following is not None:
                known.enter_context(self._expected(following))
            made.append(self._job(number, notice=since - told_at if notice else 0.0))
            told.close()
        self.prefetch.wait()
        self.prefetch.check_integrity()
        self.tiers.check_integrity()
        return made

    def _expected(self, number: int) -> AbstractContextManager[None]:
        source = self.shelf.sources[number]
        plan = (Tier.DEVICE, source.content_digest)
        return self.prefetch.expect([source.wanted], plan=plan)

    def _job(self, number: int, *, notice: float) -> Job:
        """Answer for as long as two experts take to load."""
        waits, start = self.tiers.traffic[Tier.RAM].waits, time.perf_counter()
        with _borrowed(self.tiers, self.shelf, number):
            ready = time.perf_counter() - start
            waited = self.tiers.traffic[Tier.RAM].waits > waits
            load, by = self.loads.seconds.pop(self._ref(number), (None, "prefetch"))
            time.sleep(self.answer)
        return Job(ready, waited or by != "prefetch", notice, load)

    def _ref(self, number: int) -> str:
        return self.shelf.sources[number].manifest.ref


def _load_seconds(shelf: Shelf) -> float:
    seconds = []
    for source in shelf.sources[:9]:
        start = time.perf_counter()
        source.load()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class _Watch(threading.Thread):
    """Looks again and again at how much anonymous memory this process has."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._start, self._most, self._going = _resident(), 0, True

    def run(self) -> None:
        while self._going:
            self._most = max(self._most, _resident())
            time.sleep(_LOOKS_APART)

    @property
    def grown(self) -> int:
        return self._most - self._start

    def end(self) -> None:
        self._going = False
        self.join()


@contextmanager
def _watched() -> Iterator[_Watch]:
    watch = _Watch()
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


def _resident() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def _policy(wanted: Sequence[int], replayed: Outcome, copies: Outcome) -> list[Row]:
    case, fit = f"hits of {len(wanted):,} requests, replayed", BUDGET // EXPERT_BYTES
    ours, beside = (sum(outcome.hits) / len(wanted) for outcome in (replayed, copies))
    fixed, rival = best_static(wanted, fit), f"the best {fit} that never change"
    return [
        _share(case, ours, rival, fixed, ">= 0.95"),
        _share(case, ours, f"an LRU of {fit}", lru(wanted, fit), ">= 1.2"),
        _share(case, ours, f"Belady's rule, {fit}", belady(wanted, fit), None),
        _share(f"{case}, plans are copies", beside, rival, fixed, None),
    ]


def _following(wanted: Sequence[int], replayed: Outcome) -> list[Row]:
    case, fit = f"the same, new favourites every {FAVOURITES_LAST:,}", BUDGET // EXPERT_BYTES
    ours = sum(replayed.hits) / len(wanted)
    return [
        _share(case, ours, f"an LRU of {fit}", lru(wanted, fit), ">= 1.2"),
        _share(case, ours, f"the best {fit} that never change", best_static(wanted, fit), ">= 1.2"),
        _share(case, ours, f"Belady's rule, {fit}", belady(wanted, fit), None),
    ]


def _share(case: str, ours: float, rival: str, theirs: float, target: str | None) -> Row:
    ours, theirs = round(100 * ours, 2), round(100 * theirs, 2)
    return _row(case, ours, rival, theirs, "%", "higher", target)


def _reality(replayed: Outcome, real: Outcome) -> list[Row]:
    count, limit = len(real.hits), BUDGET / _MB
    ledger, grown = replayed.ledger / _MB, real.resident_set / _MB
    same = sum(a == b for a, b in zip(real.hits, replayed.hits, strict=False))
    what = f"{count:,} requests, real"
    return [
        _row("the ledger at most, replayed", ledger, "the budget", limit, "MB", "lower", "<= 1.0"),
        _row(
            f"{what}: the ledger at most",
            real.ledger / _MB,
            "the budget",
            limit,
            "MB",
            "lower",
            "<= 1.0",
        ),
        _row(f"{what}: resident set at most", grown, "the budget", limit, "MB", "lower", "<= 1.0"),
        _row(
            f"{what}: found in memory as replayed",
            same,
            "all",
            count,
            "requests",
            "higher",
            ">= 1.0",
        ),
    ]


def _notice(told: Sequence[Job], untold: Sequence[Job]) -> list[Row]:
    in_time = [job for job in told if job.should_not_wait]
    comparable = min(len(in_time), sum(job.load is not None for job in untold))
    if not comparable:
        case = f"{len(told)} jobs with notice, real: absent experts known for long enough"
        return [_row(case, 0, "at least", 1, "jobs", "higher", ">= 1.0")]
    late = sum(job.waits for job in in_time)
    absent = [[1e3 * job.ready for job in jobs if job.load] for jobs in (told, untold)]
    ready, unready = map(statistics.median, absent)
    what = f"{len(told)} jobs with notice, real"
    return [
        _row(
            f"{what}: wait though known for longer than loading takes",
            late,
            "all such jobs whose expert was absent",
            len(in_time),
            "jobs",
            "lower",
            "<= 0.0",
        ),
        _row(
            f"{what}: an absent expert's plan is ready after",
            ready,
            "no notice",
            unready,
            "ms",
            "lower",
            None,
        ),
    ]


def _row(
    case: str, ours: float, rival: str, theirs: float, unit: str, better: str, target: str | None
) -> Row:
    ratio = round(ours / theirs, 3)
    row = Row(case, round(ours, 2), rival, round(theirs, 2), unit, better, ratio, None)
    return judged(row, target) if target else row


if __name__ == "__main__":
    main("residency", measure, rounds=1)
