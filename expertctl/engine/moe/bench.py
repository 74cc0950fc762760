"""Measure a base of routed experts with all of them in memory, and with a share of them.

The cases are measured one after the other: each reads and writes the same texts for some rounds.
The first round fills the slots and counts only for the timeline. Random texts are given, token by
token; prompts are continued greedily, the same wherever nothing is skipped. The usage learnt from
earlier runs is not used; a profile that the user names is.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.engine.adapters.compile import BASE_ONLY
from expertctl.engine.bench_result import TimingSeries
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.devices import choose_thread_count, get_device_name, translate_device_errors
from expertctl.engine.generation import DecodeSession
from expertctl.engine.kernels.jit import cpu_model_name
from expertctl.engine.kv.sequence_cache import KVRequest
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.memory.host import find_budget_limit, find_default_budget
from expertctl.engine.model.backends import RunnableModel
from expertctl.engine.model.cuda_backend import CudaBackend
from expertctl.engine.model.load_plan import LoadConfig, OpenBase, open_base
from expertctl.engine.moe.bench_result import (
    CounterSample,
    HitRateTimeline,
    ResidencyCase,
    RoutedBenchResult,
    RoutedBenchRow,
)
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import CounterSnapshot, LayerCounts
from expertctl.engine.moe.stats import RoutedExpertStats
from expertctl.engine.moe.usage_profile import TopPins, read_expert_usage
from expertctl.engine.moe.warmup import COLD_START, WarmupConfig, WarmupPlan
from expertctl.engine.resources import ResourceManager
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.messages import Notify, ignore_notification
from expertctl.package.architectures import ExpertsConfig
from expertctl.routing.numerics import choose_dtype
from expertctl.routing.planner import Planner
from expertctl.routing.request import DeviceName, Dtype, MoeColdOption, MoeMiss


def make_warmup_plan(wishes: WarmupConfig, routed: ExpertsConfig) -> WarmupPlan:
    """Return how each case starts.

    Raises:
        ExpertError: when a profile cannot be read, or is of another base.
        UsageError: when there is no profile by which to pin or swap.
    """
    if wishes.profile is not None:
        return WarmupPlan(wishes, read_expert_usage(wishes.profile, routed))
    if wishes.pins is not None or wishes.exchange:
        option = "--moe-exchange" if wishes.pins is None else "--moe-pin"
        raise UsageError(
            f"{option}: by no profile; what was learnt of a base has no part in what is measured",
            hint="give --moe-profile FILE; `expertctl base profile export` writes what was learnt",
        )
    return WarmupPlan(wishes)


def configure_backend(
    base: OpenBase, case: ResidencyCase, start: WarmupPlan, *, cap: float, cold: MoeColdOption
) -> PackedBackend | CudaBackend:
    """Return a backend that holds the case's share of the experts of each layer, at least one.

    Raises:
        UsageError: when more are pinned than a layer has slots.
    """
    backend, config = base.backend, base.config
    assert isinstance(backend, PackedBackend | CudaBackend)
    assert config.experts is not None
    if case.is_whole:
        return backend
    count = config.experts.count
    plan = CachePlan(
        layers=len(config.experts.layers),
        experts=count,
        slots=min(max(round(case.share * count), 1), count),
        miss=case.miss,
        cap=cap,
        cold=cold,
    )
    _require_slots(start, plan, case)
    if isinstance(backend, CudaBackend):
        return replace(backend, cache=plan).with_warmup(lambda _: start)
    blocks = plan.blocks * make_expert_shape(config, backend.scheme).nbytes
    packed = replace(backend, cache=plan, weight_bytes=backend.min_weight_bytes + blocks)
    return packed.with_warmup(lambda _: start)


def _require_slots(start: WarmupPlan, plan: CachePlan, case: ResidencyCase) -> None:
    pins = start.config.pins
    if isinstance(pins, TopPins) and pins.count > plan.slots:
        raise UsageError(
            f"--moe-pin {pins.count}: with {case.share:.0%} resident a layer has "
            f"{plan.slots} slots",
            hint="pin fewer experts, or leave that share out of --resident",
        )


MAX_SAMPLES = 60
"""Most columns of the timeline."""
MIN_SAMPLE_TOKENS = 4
"""Fewest tokens of a column: a token of one layer chooses few experts."""
_OTHER_BASE = "choose another --base: one whose layers have routed experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedBenchConfig:
    """The cases to measure, and the texts."""

    shares: tuple[float, ...] = (1.0, 0.6, 0.4)
    misses: tuple[MoeMiss, ...] = ("exact", "skip")
    cap: float = 0.5
    """The largest share of a token's weight that may be skipped."""
    prompts: tuple[str, ...] = ()
    """Empty: random tokens."""
    prompt_tokens: int = 64
    """Of a random text."""
    tokens: int = 64
    rounds: int = 3
    seed: int = 0
    dtype: Dtype | None = None
    threads: int | None = None
    cold: MoeColdOption = "auto"
    """How experts without a slot are read from disk."""
    device: DeviceName = "cpu"
    start: WarmupConfig = COLD_START
    """How each case starts; usage learnt from earlier runs is not used."""

    @property
    def cases(self) -> tuple[ResidencyCase, ...]:
        """All shares and miss policies; with all experts in memory nothing is missed."""
        found: list[ResidencyCase] = []
        for share in self.shares:
            misses: tuple[MoeMiss, ...] = ("exact",) if share >= 1 else self.misses
            found += [ResidencyCase(share, miss) for miss in misses]
        return tuple(dict.fromkeys(found))

    @property
    def run_count(self) -> int:
        """How many texts are run: the total of ``progress``."""
        return len(self.cases) * self.rounds * max(len(self.prompts), 1)


@dataclass(frozen=True, slots=True)
class _BenchText:
    """A prompt; and what follows it, unless the base chooses that itself."""

    ids: tuple[int, ...]
    follows: tuple[int, ...] = ()


def measure_routed(
    planner: Planner,
    wanted: RoutedBenchConfig,
    *,
    base: str,
    budget: int | None = None,
    progress: Progress = ignore_progress,
    tell: Notify = ignore_notification,
) -> RoutedBenchResult:
    """Measure a base of the store; ``progress`` counts up to ``run_count`` and may raise.

    Cases that do not fit into the memory are left out, with a warning.

    Raises:
        NotFoundError: when there is no such base, or no such device.
        IncompatibleError: when it has no routed experts, or kernels do not support its sizes.
        UsageError: when texts are longer than its context.
        BudgetError: when no case fits.
    """
    limit = find_budget_limit(budget, wanted.device)
    opened = _open_base(planner, base, wanted)
    config = opened.config.experts
    assert config is not None
    start = make_warmup_plan(wanted.start, config)
    texts = _load_texts(opened, wanted)
    threads = wanted.threads or choose_thread_count(opened.weight_bytes)
    laboratory = _RoutedBench(planner, opened, wanted, start, texts, threads, limit, progress, tell)
    with translate_device_errors():
        rows, left_out = laboratory.measure_all()
    return RoutedBenchResult(
        what=f"base {opened.stored.name}",
        cpu=cpu_model_name(),
        device=get_device_name(wanted.device),
        dtype=opened.backend.dtype,
        threads=threads,
        texts=_describe_texts(wanted),
        start=wanted.start,
        cold=wanted.cold,
        skip_cap=wanted.cap if any(row.case.miss == "skip" for row in rows) else None,
        seed=None if wanted.prompts else wanted.seed,
        experts=config.count,
        used=config.used,
        layers=len(config.layers),
        rows=rows,
        warnings=(*opened.warnings, *left_out),
    )


def _open_base(planner: Planner, name: str, wanted: RoutedBenchConfig) -> OpenBase:
    stored = planner.bases.find(name)
    wish = LoadConfig(dtype=choose_dtype(stored, wanted.dtype), device=wanted.device)
    opened = open_base(planner.bases, stored, wish, rehash=False, torch_below=0)
    if opened.config.experts is None:
        raise IncompatibleError(f"{name} has no routed experts", hint=_OTHER_BASE)
    if not isinstance(opened.backend, PackedBackend | CudaBackend):
        why = "; ".join(opened.warnings)
        raise IncompatibleError(f"bench measures what kernels do: {why}", hint=_OTHER_BASE)
    return opened


def _load_texts(opened: OpenBase, wanted: RoutedBenchConfig) -> list[_BenchText]:
    encode, vocabulary = opened.tokenizer.encode, opened.config.vocab_size
    texts = [_BenchText(tuple(encode(prompt))) for prompt in wanted.prompts]
    if not texts:
        drawn = np.random.default_rng(wanted.seed)
        ids = drawn.integers(vocabulary, size=wanted.prompt_tokens + wanted.tokens).tolist()
        texts = [_BenchText(tuple(ids[: wanted.prompt_tokens]), tuple(ids[wanted.prompt_tokens :]))]
    longest = max(len(text.ids) for text in texts) + wanted.tokens
    if longest > opened.context:
        raise UsageError(
            f"texts of {longest} tokens are longer than the {opened.context} that the base reads",
            hint="lower --prompt-tokens or --tokens, or give a shorter --prompt",
        )
    if not all(text.ids for text in texts):
        raise UsageError("a prompt has no tokens", hint="give a --prompt with some words")
    return texts


def _describe_texts(wanted: RoutedBenchConfig) -> str:
    count = len(wanted.prompts)
    read = f"{wanted.prompt_tokens} random tokens"
    if count:
        read = "a prompt" if count == 1 else f"{count} prompts"
    often = "once" if wanted.rounds == 1 else f"{wanted.rounds} times"
    return f"{read}, then {wanted.tokens} tokens more, {often}"


def _explain_refusal(refused: Mapping[ResidencyCase, BudgetError]) -> BudgetError:
    """Return an error that names the case with the fewest experts in memory.

    An error of the device itself is returned as it is: a smaller share would not help.
    """
    least = min(refused, key=lambda holding: holding.share)
    if refused[least].__cause__ is not None:
        return refused[least]
    return BudgetError(
        f"{least.label}: {refused[least].message}",
        hint="raise --memory-budget, give --resident a smaller share, or --dtype a narrower one",
    )


@dataclass(frozen=True, slots=True)
class _RoutedBench:
    """A base, and the texts by which each case is measured."""

    planner: Planner
    base: OpenBase
    wanted: RoutedBenchConfig
    start: WarmupPlan
    texts: list[_BenchText]
    threads: int
    limit: int
    """Of the memory that computes."""
    progress: Progress
    tell: Notify

    def measure_all(self) -> tuple[tuple[RoutedBenchRow, ...], list[str]]:
        """Measure the cases that fit; return warnings about the others.

        Raises:
            BudgetError: when none fits.
            UsageError: when more experts are pinned than some case has slots.
        """
        rows: list[RoutedBenchRow] = []
        refused: dict[ResidencyCase, BudgetError] = {}
        ways = [(each, self._configure(each)) for each in self.wanted.cases]
        for holding, base in ways:
            try:
                rows.append(self._measure_case(holding, base))
            except BudgetError as error:
                refused[holding] = error
        if not rows:
            raise _explain_refusal(refused)
        return tuple(rows), [f"left out: {h.label}: {e.message}" for h, e in refused.items()]

    def _configure(self, holding: ResidencyCase) -> OpenBase:
        wanted = self.wanted
        backend = configure_backend(
            self.base, holding, self.start, cap=wanted.cap, cold=wanted.cold
        )
        return replace(self.base, backend=backend)

    def _measure_case(self, holding: ResidencyCase, base: OpenBase) -> RoutedBenchRow:
        with _load_model(self, base) as (model, read):
            course = _RunRecorder(model, self.wanted)
            for number in range(self.wanted.rounds):
                if number == min(1, self.wanted.rounds - 1):
                    course.start_counting()
                for text in self.texts:
                    with read(text) as reading:
                        course.run_text(reading, text)
                    self.progress(1)
                course.end_round()
            return course.make_row(holding, memory=base.weight_bytes)


_Read = Callable[[_BenchText], AbstractContextManager[DecodeSession]]


@contextmanager
def _load_model(laboratory: _RoutedBench, base: OpenBase) -> Iterator[tuple[RunnableModel, _Read]]:
    """Load a base, and yield it with a context manager that runs a text; nothing is kept."""
    wanted = laboratory.wanted
    residents = ResourceManager(
        laboratory.planner,
        MemoryBudget(laboratory.limit),
        ram=None if wanted.device == "cpu" else MemoryBudget(find_default_budget()),
        progress=ignore_progress,
        tell=laboratory.tell,
        warmup=COLD_START,
    )
    longest = max(len(text.ids) for text in laboratory.texts) + wanted.tokens
    buffers = base.buffer_bytes(longest)
    try:
        model = residents.load_base(base, threads=laboratory.threads)

        @contextmanager
        def read(text: _BenchText) -> Iterator[DecodeSession]:
            room = KVRequest(
                cache_key=None,
                identity=_NO_PLAN,
                config=base.config,
                ids=text.ids,
                virtual_tokens=0,
                capacity=len(text.ids) + wanted.tokens,
            )
            with residents.get_kv_store(base.backend).allocate(room) as kv:
                model.prepare(kv.cache, BASE_ONLY, tokens=len(text.ids))
                yield model.start_session(kv.cache, BASE_ONLY)

        with residents.tiers.reserve_during(Tier.DEVICE, "buffers", buffers, what="buffers"):
            yield model, read
            model.free_buffers()
    finally:
        residents.close()


class _RunRecorder:
    """Records times and counters while texts are run."""

    def __init__(self, model: RunnableModel, wanted: RoutedBenchConfig) -> None:
        """Start before the first text."""
        self._model, self._wanted = model, wanted
        self._moments: list[CounterSample] = []
        self._written_tokens, self._stretch = 0, _choose_sample_interval(wanted)
        self._steps: list[tuple[float, ...]] = []
        self._now: list[float] = []
        self._prompts: list[tuple[int, float]] = []
        self._waited_reading = 0.0
        self._before = self._read_report()
        self._counted: CounterSnapshot | None = None
        self._counted_from = 0
        self._sample()

    def start_counting(self) -> None:
        """Discard what was recorded, except the timeline."""
        self._counted_from = self._written_tokens
        self._steps, self._now, self._prompts = [], [], []
        self._waited_reading = 0.0
        self._before = self._read_report()
        self._counted = self._observe()

    def run_text(self, reading: DecodeSession, text: _BenchText) -> None:
        """Prefill a text, and decode the tokens after it."""
        waited = self._read_waited_ms()
        started = time.perf_counter()
        scores = reading.prefill(text.ids).logits
        self._prompts.append((len(text.ids), time.perf_counter() - started))
        self._waited_reading += self._read_waited_ms() - waited
        for place in range(self._wanted.tokens):
            token = text.follows[place] if text.follows else int(scores.argmax())
            started = time.perf_counter()
            scores = reading.decode(token).logits
            self._now.append(time.perf_counter() - started)
            self._count_token()

    def end_round(self) -> None:
        """Collect the steps of a round."""
        self._steps.append(tuple(self._now))
        self._now = []

    def make_row(self, holding: ResidencyCase, *, memory: int) -> RoutedBenchRow:
        """Return the row of a case."""
        if self._moments and self._moments[-1].tokens < self._written_tokens:
            self._sample()
        return RoutedBenchRow(
            case=holding,
            steps=TimingSeries(tuple(self._steps)),
            prompts=tuple(self._prompts),
            report=self._read_report().since(self._before),
            layers=self._layer_deltas(),
            timeline=HitRateTimeline.from_samples(self._moments),
            first_counted_token=self._counted_from,
            prefill_wait_ms=self._waited_reading,
            memory=memory,
        )

    def _count_token(self) -> None:
        self._written_tokens += 1
        if self._written_tokens % self._stretch == 0:
            self._sample()

    def _sample(self) -> None:
        if (seen := self._observe()) is not None:
            self._moments.append(CounterSample(self._written_tokens, seen))

    def _read_report(self) -> RoutedExpertStats:
        report = self._model.routed
        assert report is not None, "a base of routed experts"
        return report

    def _read_waited_ms(self) -> float:
        """Return how many milliseconds passes waited for experts so far."""
        return self._read_report().activity.waited_ms

    def _observe(self) -> CounterSnapshot | None:
        """Return the counters; None if all experts are in memory, where none can be missed."""
        counters = self._model.counters
        return (
            None
            if counters is None or self._model.experts is None
            else counters.observed_snapshot()
        )

    def _layer_deltas(self) -> dict[int, LayerCounts]:
        now, before = self._observe(), self._counted
        if now is None or before is None:
            return {}
        return {number: found.since(before.layers[number]) for number, found in now.layers.items()}


def _choose_sample_interval(wanted: RoutedBenchConfig) -> int:
    """Return the number of tokens of a column of the timeline."""
    total = wanted.tokens * wanted.rounds * max(len(wanted.prompts), 1)
    return max(MIN_SAMPLE_TOKENS, -(-total // MAX_SAMPLES))


_NO_PLAN = Digest.compute(b"bench moe")
"""Identity of a plan under which nothing is cached."""
