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
from safetensors.numpy import save_file

from benchmarks.cache_policies import (
    belady_hit_rate,
    best_static_hit_rate,
    lru_hit_rate,
    make_requests,
    make_shifting_requests,
)
from benchmarks.harness import Row, judge, main
from benchmarks.inputs import CONFIG, WEIGHTS, make_source
from expertctl.engine.adapters.compile import CompileSpec
from expertctl.engine.adapters.experts import (
    CompileTarget,
    DoraScaleSource,
    ExpertSource,
    borrow_compiled_plan,
)
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.memory.adapter_cache import (
    AdapterCache,
    AdapterPrefetcher,
    CacheRequest,
    Tier,
)
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.reference import Digest
from expertctl.store.disk import DerivedData

EXPERTS, EXPERT_BYTES = 100, 20_000_000
BUDGET = 256_000_000
REQUESTS, REAL, JOBS = 20_000, 1_500, 300
DRIFT_REQUESTS = 2_500
SEED = 0
STARTER = Path(__file__).parent.parent / "expertctl" / "_starter" / "base"
_MB = 1e6
_SAMPLE_INTERVAL = 0.002


def measure(_rounds: int) -> Sequence[Row]:
    """Replay all requests, then make the first of them, then make jobs with notice."""
    wanted = make_requests(REQUESTS, experts=EXPERTS, seed=SEED)
    with tempfile.TemporaryDirectory() as folder:
        expert_files = ExpertFiles.write(Path(folder))
        replayed = replay(wanted, expert_files.sizes)
        moving = make_shifting_requests(REQUESTS, experts=EXPERTS, seed=SEED, every=DRIFT_REQUESTS)
        followed = replay(moving, expert_files.sizes)
        copies = replay(wanted, expert_files.sizes, plan_bytes=EXPERT_BYTES)
        real = load_requests(wanted[:REAL], expert_files)
        told, untold = (
            _JobRunner(expert_files).run(wanted[:JOBS], notice=n) for n in (True, False)
        )
    policy = [*_compare_policies(wanted, replayed, copies), *_compare_drift(moving, followed)]
    return [*policy, *_compare_with_reality(replayed, real), *_compare_notice(told, untold)]


@dataclass(frozen=True, slots=True)
class ExpertFiles:
    """Experts as files, and what they are compiled for."""

    sources: tuple[ExpertSource, ...]
    target: CompileTarget

    @classmethod
    def write(cls, folder: Path) -> "ExpertFiles":
        """Write all experts."""
        config = read_model_config(STARTER)
        form = CompileSpec(config.linear_shapes(), config.hidden_size)
        gains = DoraScaleSource(
            Digest.compute(b"no DoRA"), lambda _: np.empty(0), DerivedData(folder)
        )
        sources = tuple(_write_lora(folder / str(n), config, n) for n in range(EXPERTS))
        return cls(sources, CompileTarget(form, gains))

    @property
    def sizes(self) -> list[int]:
        """What each expert takes in memory."""
        return [source.nbytes for source in self.sources]


def _write_lora(directory: Path, config: ModelConfig, number: int) -> ExpertSource:
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
    return make_source(directory, base="starter")


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """Which requests found their expert in memory, and the most bytes that were held."""

    hits: tuple[bool, ...]
    ledger: int
    resident_set: int = 0


def replay(wanted: Sequence[int], sizes: Sequence[int], *, plan_bytes: int = 0) -> ReplayOutcome:
    """Ask the tiers for experts that are nothing but their size, and for their plans.

    A plan uses its expert where it lies, or is a copy of so many bytes.
    """
    uses_in_place = not plan_bytes
    budget = MemoryBudget(BUDGET)
    tiers, hits = AdapterCache(ram=budget, device=budget), []
    digests = [Digest.compute(b"%d" % number) for number in range(len(sizes))]
    for number in wanted:
        tiers.begin_request()
        expert, plan = (Tier.RAM, digests[number]), (Tier.DEVICE, digests[number])
        with ExitStack() as stack:
            found = stack.enter_context(tiers.pin_if_present(plan))
            hits.append(found is not None)
            if found is None:
                bytes_of = CacheRequest(expert, sizes[number], "an expert", lambda: "its bytes")
                stack.enter_context(tiers.pin([bytes_of]))
                uses = (expert,) if uses_in_place else ()
                compiled_one = CacheRequest(plan, plan_bytes, "a plan", lambda: "compiled", uses)
                stack.enter_context(tiers.pin([compiled_one]))
    tiers.check_integrity()
    return ReplayOutcome(tuple(hits), budget.peak)


def load_requests(wanted: Sequence[int], expert_files: ExpertFiles) -> ReplayOutcome:
    """Make requests: read, verify and compile what is absent, and watch the resident set."""
    budget, hits = MemoryBudget(BUDGET), []
    _borrow_and_release(
        AdapterCache(ram=budget, device=budget), expert_files, wanted[0]
    )  # what the first brings once
    budget = MemoryBudget(BUDGET)
    tiers = AdapterCache(ram=budget, device=budget)
    with _watch_growth() as watch:
        for number in wanted:
            before = tiers.traffic[Tier.RAM].loads
            _borrow_and_release(tiers, expert_files, number)
            hits.append(tiers.traffic[Tier.RAM].loads == before)
    tiers.check_integrity()
    return ReplayOutcome(tuple(hits), budget.peak, watch.growth)


def _borrow_and_release(tiers: AdapterCache, expert_files: ExpertFiles, number: int) -> None:
    with _borrow_plan(tiers, expert_files, number):
        pass


@contextmanager
def _borrow_plan(tiers: AdapterCache, expert_files: ExpertFiles, number: int) -> Iterator[None]:
    """Borrow the plan of one expert."""
    source = expert_files.sources[number]
    tiers.begin_request()
    chain = [(source, 1.0)]
    with borrow_compiled_plan(
        tiers, chain, identity=source.content_digest, target=expert_files.target
    ) as plan:
        assert len(plan.deltas) == len(expert_files.target.form.shapes)
        yield


@dataclass(frozen=True, slots=True)
class NoticedJob:
    """What one job went through; an expert that was there has no ``load``."""

    wait_seconds: float
    """Seconds until its plan was there."""
    has_waited: bool
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
class _LoadTimes:
    """How long each expert took to read the last time, and which thread read it."""

    seconds: dict[str, tuple[float, str]] = field(default_factory=dict)

    def wrap_source(self, source: ExpertSource) -> ExpertSource:
        """Return the same expert, its reading timed."""

        def load() -> LoadedAdapter:
            start = time.perf_counter()
            adapter = source.load()
            seconds = time.perf_counter() - start
            self.seconds[source.manifest.ref] = seconds, threading.current_thread().name
            return adapter

        return replace(source, load=load)


class _JobRunner:
    """Jobs one after the other; with notice, the next is known when one begins."""

    def __init__(self, expert_files: ExpertFiles) -> None:
        budget = MemoryBudget(BUDGET)
        self.loads = _LoadTimes()
        self.tiers = AdapterCache(ram=budget, device=budget)
        self.prefetch: AdapterPrefetcher[LoadedAdapter] = AdapterPrefetcher(self.tiers)
        self.answer = 2 * _measure_load_seconds(expert_files)
        self.expert_files = replace(
            expert_files, sources=tuple(map(self.loads.wrap_source, expert_files.sources))
        )

    def run(self, wanted: Sequence[int], *, notice: bool) -> list[NoticedJob]:
        """Make all of them."""
        made, known, since = [], ExitStack(), time.perf_counter()
        for number, following in zip(wanted, [*wanted[1:], None], strict=True):
            told, known, told_at, since = known, ExitStack(), since, time.perf_counter()
            if notice and following is not None:
                known.enter_context(self._announce(following))
            made.append(self._run_job(number, notice=since - told_at if notice else 0.0))
            told.close()
        self.prefetch.wait_until_idle()
        self.prefetch.check_integrity()
        self.tiers.check_integrity()
        return made

    def _announce(self, number: int) -> AbstractContextManager[None]:
        source = self.expert_files.sources[number]
        plan = (Tier.DEVICE, source.content_digest)
        return self.prefetch.expect([source.cache_request], plan=plan)

    def _run_job(self, number: int, *, notice: float) -> NoticedJob:
        """Answer for as long as two experts take to load."""
        waits, start = self.tiers.traffic[Tier.RAM].waits, time.perf_counter()
        with _borrow_plan(self.tiers, self.expert_files, number):
            ready = time.perf_counter() - start
            waited = self.tiers.traffic[Tier.RAM].waits > waits
            load, by = self.loads.seconds.pop(self._ref(number), (None, "prefetch"))
            time.sleep(self.answer)
        return NoticedJob(ready, waited or by != "prefetch", notice, load)

    def _ref(self, number: int) -> str:
        return self.expert_files.sources[number].manifest.ref


def _measure_load_seconds(expert_files: ExpertFiles) -> float:
    seconds = []
    for source in expert_files.sources[:9]:
        start = time.perf_counter()
        source.load()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class _ResidentSetWatch(threading.Thread):
    """Looks again and again at how much anonymous memory this process has."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._start, self._most, self._going = _read_resident_bytes(), 0, True

    def run(self) -> None:
        while self._going:
            self._most = max(self._most, _read_resident_bytes())
            time.sleep(_SAMPLE_INTERVAL)

    @property
    def growth(self) -> int:
        return self._most - self._start

    def end(self) -> None:
        self._going = False
        self.join()


@contextmanager
def _watch_growth() -> Iterator[_ResidentSetWatch]:
    watch = _ResidentSetWatch()
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


def _read_resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def _compare_policies(
    wanted: Sequence[int], replayed: ReplayOutcome, copies: ReplayOutcome
) -> list[Row]:
    case, fit = f"hits of {len(wanted):,} requests, replayed", BUDGET // EXPERT_BYTES
    ours, beside = (sum(outcome.hits) / len(wanted) for outcome in (replayed, copies))
    fixed, rival = best_static_hit_rate(wanted, fit), f"the best {fit} that never change"
    return [
        _make_share_row(case, ours, rival, fixed, ">= 0.95"),
        _make_share_row(case, ours, f"an LRU of {fit}", lru_hit_rate(wanted, fit), ">= 1.2"),
        _make_share_row(case, ours, f"Belady's rule, {fit}", belady_hit_rate(wanted, fit), None),
        _make_share_row(f"{case}, plans are copies", beside, rival, fixed, None),
    ]


def _compare_drift(wanted: Sequence[int], replayed: ReplayOutcome) -> list[Row]:
    case, fit = f"the same, new favourites every {DRIFT_REQUESTS:,}", BUDGET // EXPERT_BYTES
    ours = sum(replayed.hits) / len(wanted)
    return [
        _make_share_row(case, ours, f"an LRU of {fit}", lru_hit_rate(wanted, fit), ">= 1.2"),
        _make_share_row(
            case,
            ours,
            f"the best {fit} that never change",
            best_static_hit_rate(wanted, fit),
            ">= 1.2",
        ),
        _make_share_row(case, ours, f"Belady's rule, {fit}", belady_hit_rate(wanted, fit), None),
    ]


def _make_share_row(case: str, ours: float, rival: str, theirs: float, target: str | None) -> Row:
    ours, theirs = round(100 * ours, 2), round(100 * theirs, 2)
    return _make_row(case, ours, rival, theirs, "%", "higher", target)


def _compare_with_reality(replayed: ReplayOutcome, real: ReplayOutcome) -> list[Row]:
    count, limit = len(real.hits), BUDGET / _MB
    ledger, grown = replayed.ledger / _MB, real.resident_set / _MB
    same = sum(a == b for a, b in zip(real.hits, replayed.hits, strict=False))
    what = f"{count:,} requests, real"
    return [
        _make_row(
            "the ledger at most, replayed", ledger, "the budget", limit, "MB", "lower", "<= 1.0"
        ),
        _make_row(
            f"{what}: the ledger at most",
            real.ledger / _MB,
            "the budget",
            limit,
            "MB",
            "lower",
            "<= 1.0",
        ),
        _make_row(
            f"{what}: resident set at most", grown, "the budget", limit, "MB", "lower", "<= 1.0"
        ),
        _make_row(
            f"{what}: found in memory as replayed",
            same,
            "all",
            count,
            "requests",
            "higher",
            ">= 1.0",
        ),
    ]


def _compare_notice(told: Sequence[NoticedJob], untold: Sequence[NoticedJob]) -> list[Row]:
    in_time = [job for job in told if job.should_not_wait]
    comparable = min(len(in_time), sum(job.load is not None for job in untold))
    if not comparable:
        case = f"{len(told)} jobs with notice, real: absent experts known for long enough"
        return [_make_row(case, 0, "at least", 1, "jobs", "higher", ">= 1.0")]
    late = sum(job.has_waited for job in in_time)
    absent = [[1e3 * job.wait_seconds for job in jobs if job.load] for jobs in (told, untold)]
    ready, unready = map(statistics.median, absent)
    what = f"{len(told)} jobs with notice, real"
    return [
        _make_row(
            f"{what}: wait though known for longer than loading takes",
            late,
            "all such jobs whose expert was absent",
            len(in_time),
            "jobs",
            "lower",
            "<= 0.0",
        ),
        _make_row(
            f"{what}: an absent expert's plan is ready after",
            ready,
            "no notice",
            unready,
            "ms",
            "lower",
            None,
        ),
    ]


def _make_row(
    case: str, ours: float, rival: str, theirs: float, unit: str, better: str, target: str | None
) -> Row:
    ratio = round(ours / theirs, 3)
    row = Row(case, round(ours, 2), rival, round(theirs, 2), unit, better, ratio, None)
    return judge(row, target) if target else row


if __name__ == "__main__":
    main("residency", measure, rounds=1)
