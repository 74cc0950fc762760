"""Measure a base of routed experts with all of them in memory, and with a share of them.

The cases are measured one after the other: each reads and writes the same texts for some rounds.
The first round fills the slots and counts only for the timeline. Random texts are given, token by
token; prompts are continued greedily, the same wherever nothing is skipped. The usage learnt from
earlier runs is not used; a profile that the user names is.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.engine.adapters.compile import BASE_ONLY
from expertctl.engine.backend import Backend, LoadConfig, RunnableModel, translate_errors
from expertctl.engine.bench_result import TimingSeries
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.generation import DecodeSession
from expertctl.engine.kernels.machine_code import cpu_model_name
from expertctl.engine.kv.kv_cache import KVRequest
from expertctl.engine.load_plan import OpenBase, open_base
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.memory.budget import MemoryBudget, find_budget_limit
from expertctl.engine.memory.host import choose_thread_count
from expertctl.engine.moe.bench_result import (
    CounterSample,
    HitRateTimeline,
    ResidencyCase,
    RoutedBenchResult,
    RoutedBenchRow,
)
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.counters import CounterSnapshot, LayerCounts, RoutedExpertStats
from expertctl.engine.moe.profile_codecs import read_profile
from expertctl.engine.moe.warmup import WarmupPlan
from expertctl.engine.resources import ResourceManager
from expertctl.engine_config import (
    COLD_START,
    DeviceName,
    EngineConfig,
    MoeMiss,
    TopPins,
    WarmupConfig,
)
from expertctl.errors import BudgetError, IncompatibleError, Notify, UsageError, ignore_notification
from expertctl.package.architectures import ExpertsConfig
from expertctl.routing.base_dtype import choose_dtype
from expertctl.routing.planner import Planner


def make_warmup_plan(config: WarmupConfig, routed: ExpertsConfig) -> WarmupPlan:
    """Return how each case starts.

    Raises:
        ExpertError: when a profile cannot be read, or is of another base.
        UsageError: when there is no profile by which to pin or swap.
    """
    if config.profile is not None:
        return WarmupPlan(config, read_profile(config.profile, routed))
    if config.pins is not None or config.exchange:
        option = "--moe-exchange" if config.pins is None else "--moe-pin"
        raise UsageError(
            f"{option} needs a profile: a benchmark does not use the learnt usage of a base",
            hint="give --moe-profile FILE; `expertctl base profile export` writes the learnt one",
        )
    return WarmupPlan(config)


def configure_backend(
    base: OpenBase, case: ResidencyCase, start: WarmupPlan, engine: EngineConfig
) -> Backend:
    """Return a backend that holds the case's share of the experts of each layer, at least one.

    Raises:
        UsageError: when more are pinned than a layer has slots.
    """
    backend, config = base.backend, base.config
    assert config.experts is not None
    if case.is_whole:
        return backend
    count = config.experts.count
    plan = CachePlan(
        layers=len(config.experts.layers),
        experts=count,
        slots=min(max(round(case.share * count), 1), count),
        miss=case.miss,
        cap=engine.moe_skip_cap,
        cold=engine.moe_cold,
    )
    _require_slots(start, plan, case)
    if not isinstance(backend, PackedBackend):
        return _configure_cuda_backend(backend, plan, start)
    blocks = plan.blocks * make_expert_shape(config, backend.scheme).nbytes
    packed = replace(backend, cache=plan, weight_bytes=backend.min_weight_bytes + blocks)
    return packed.with_warmup(lambda _: start)


def _configure_cuda_backend(backend: Backend, plan: CachePlan, start: WarmupPlan) -> Backend:
    from expertctl.engine.torch.cuda_backend import CudaBackend  # imports torch

    assert isinstance(backend, CudaBackend)
    return replace(backend, cache=plan).with_warmup(lambda _: start)


def _require_slots(start: WarmupPlan, plan: CachePlan, case: ResidencyCase) -> None:
    pins = start.config.pins
    if isinstance(pins, TopPins) and pins.count > plan.slots:
        raise UsageError(
            f"--moe-pin {pins.count}: with {case.share:.0%} resident a layer has only "
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

    engine: EngineConfig = field(default=EngineConfig(moe_skip_cap=0.5, moe=COLD_START))
    """Each case starts with its profile; usage learnt from earlier runs is not used."""
    shares: tuple[float, ...] = (1.0, 0.6, 0.4)
    misses: tuple[MoeMiss, ...] = ("exact", "skip")
    prompts: tuple[str, ...] = ()
    """Empty: random tokens."""
    prompt_tokens: int = 64
    """Of a random text."""
    tokens: int = 64
    rounds: int = 3
    seed: int = 0
    threads: int | None = None

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
    config: RoutedBenchConfig,
    *,
    base: str,
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
    engine = config.engine
    limit = find_budget_limit(engine.memory_budget, engine.device)
    opened = _open_base(planner, base, config)
    routed = opened.config.experts
    assert routed is not None
    start = make_warmup_plan(engine.moe, routed)
    texts = _load_texts(opened, config)
    threads = config.threads or choose_thread_count(opened.weight_bytes)
    bench = _RoutedBench(planner, opened, config, start, texts, threads, limit, progress, tell)
    with translate_errors(engine.device):
        rows, left_out = bench.measure_all()
    return RoutedBenchResult(
        what=f"base {opened.stored.name}",
        cpu=cpu_model_name(),
        device=_find_device_name(engine.device),
        dtype=opened.backend.dtype,
        threads=threads,
        texts=_describe_texts(config),
        start=engine.moe,
        cold=engine.moe_cold,
        skip_cap=engine.moe_skip_cap if any(row.case.miss == "skip" for row in rows) else None,
        seed=None if config.prompts else config.seed,
        experts=routed.count,
        used=routed.used,
        layers=len(routed.layers),
        rows=rows,
        warnings=(*opened.warnings, *left_out),
    )


def _find_device_name(device: DeviceName) -> str | None:
    """Return the product name of a device; None for the processor."""
    if device == "cpu":
        return None
    from expertctl.engine.torch.devices import get_device_name

    return get_device_name()


def _open_base(planner: Planner, name: str, config: RoutedBenchConfig) -> OpenBase:
    stored, engine = planner.bases.find(name), config.engine
    load_config = LoadConfig(choose_dtype(stored, engine.dtype, device=engine.device), engine)
    opened = open_base(planner.bases, stored, load_config, rehash=False, numpy_below=0)
    if opened.config.experts is None:
        raise IncompatibleError(f"{name} has no routed experts", hint=_OTHER_BASE)
    if opened.backend.name not in {"packed", "cuda"}:
        why = "; ".join(opened.warnings)
        raise IncompatibleError(
            f"bench measures kernels, which cannot run this base: {why}", hint=_OTHER_BASE
        )
    return opened


def _load_texts(opened: OpenBase, config: RoutedBenchConfig) -> list[_BenchText]:
    encode, vocabulary = opened.tokenizer.encode, opened.config.vocab_size
    texts = [_BenchText(tuple(encode(prompt))) for prompt in config.prompts]
    if not texts:
        drawn = np.random.default_rng(config.seed)
        ids = drawn.integers(vocabulary, size=config.prompt_tokens + config.tokens).tolist()
        texts = [_BenchText(tuple(ids[: config.prompt_tokens]), tuple(ids[config.prompt_tokens :]))]
    longest = max(len(text.ids) for text in texts) + config.tokens
    if longest > opened.context:
        raise UsageError(
            f"texts of {longest} tokens exceed the context of the base, {opened.context} tokens",
            hint="lower --prompt-tokens or --tokens, or give a shorter --prompt",
        )
    if not all(text.ids for text in texts):
        raise UsageError("a prompt has no tokens", hint="give a --prompt with some words")
    return texts


def _describe_texts(config: RoutedBenchConfig) -> str:
    count = len(config.prompts)
    read = f"{config.prompt_tokens} random tokens"
    if count:
        read = "a prompt" if count == 1 else f"{count} prompts"
    times = "once" if config.rounds == 1 else f"{config.rounds} times"
    return f"{read}, then {config.tokens} tokens more, {times}"


def _explain_refusal(refused: Mapping[ResidencyCase, BudgetError]) -> BudgetError:
    """Return an error that names the case with the fewest experts in memory.

    An error of the device itself is returned as it is: a smaller share would not help.
    """
    least = min(refused, key=lambda case: case.share)
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
    config: RoutedBenchConfig
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
        cases = [(each, self._configure(each)) for each in self.config.cases]
        for case, base in cases:
            try:
                rows.append(self._measure_case(case, base))
            except BudgetError as error:
                refused[case] = error
        if not rows:
            raise _explain_refusal(refused)
        return tuple(rows), [f"left out: {h.label}: {e.message}" for h, e in refused.items()]

    def _configure(self, case: ResidencyCase) -> OpenBase:
        backend = configure_backend(self.base, case, self.start, self.config.engine)
        return replace(self.base, backend=backend)

    def _measure_case(self, case: ResidencyCase, base: OpenBase) -> RoutedBenchRow:
        with _load_model(self, base) as (model, start_session):
            recorder = _RunRecorder(model, self.config)
            for number in range(self.config.rounds):
                if number == min(1, self.config.rounds - 1):
                    recorder.start_counting()
                for text in self.texts:
                    with start_session(text) as session:
                        recorder.run_text(session, text)
                    self.progress(1)
                recorder.end_round()
            return recorder.make_row(case, memory=base.weight_bytes)


_StartSession = Callable[[_BenchText], AbstractContextManager[DecodeSession]]


@contextmanager
def _load_model(
    bench: _RoutedBench, base: OpenBase
) -> Iterator[tuple[RunnableModel, _StartSession]]:
    """Load a base, and yield it with a context manager that runs a text; nothing is kept."""
    config = bench.config
    residents = ResourceManager(
        bench.planner,
        MemoryBudget(bench.limit),
        device=config.engine.device,
        tell=bench.tell,
        warmup=COLD_START,
    )
    longest = max(len(text.ids) for text in bench.texts) + config.tokens
    buffers = base.buffer_bytes(longest)
    try:
        model = residents.load_base(base, threads=bench.threads)

        @contextmanager
        def start_session(text: _BenchText) -> Iterator[DecodeSession]:
            request = KVRequest(
                cache_key=None,
                identity=_NO_PLAN,
                config=base.config,
                ids=text.ids,
                virtual_tokens=0,
                capacity=len(text.ids) + config.tokens,
            )
            with residents.get_kv_store(base.backend).allocate(request) as kv:
                model.prepare(kv.cache, BASE_ONLY, tokens=len(text.ids))
                yield model.start_session(kv.cache, BASE_ONLY)

        with residents.tiers.reserve_during(Tier.DEVICE, "buffers", buffers, what="buffers"):
            yield model, start_session
            model.free_buffers()
    finally:
        residents.close()


class _RunRecorder:
    """Records times and counters while texts are run."""

    def __init__(self, model: RunnableModel, config: RoutedBenchConfig) -> None:
        """Start before the first text."""
        self._model, self._config = model, config
        self._samples: list[CounterSample] = []
        self._written_tokens, self._sample_interval = 0, _choose_sample_interval(config)
        self._steps: list[tuple[float, ...]] = []
        self._round_steps: list[float] = []
        self._prompts: list[tuple[int, float]] = []
        self._prefill_wait_ms = 0.0
        self._before = self._read_report()
        self._counted: CounterSnapshot | None = None
        self._counted_from = 0
        self._sample()

    def start_counting(self) -> None:
        """Discard what was recorded, except the timeline."""
        self._counted_from = self._written_tokens
        self._steps, self._round_steps, self._prompts = [], [], []
        self._prefill_wait_ms = 0.0
        self._before = self._read_report()
        self._counted = self._observe()

    def run_text(self, session: DecodeSession, text: _BenchText) -> None:
        """Prefill a text, and decode the tokens after it."""
        waited = self._read_waited_ms()
        started = time.perf_counter()
        scores = session.prefill(text.ids).logits
        self._prompts.append((len(text.ids), time.perf_counter() - started))
        self._prefill_wait_ms += self._read_waited_ms() - waited
        for place in range(self._config.tokens):
            token = text.follows[place] if text.follows else int(scores.argmax())
            started = time.perf_counter()
            scores = session.decode(token).logits
            self._round_steps.append(time.perf_counter() - started)
            self._count_token()

    def end_round(self) -> None:
        """Collect the steps of a round."""
        self._steps.append(tuple(self._round_steps))
        self._round_steps = []

    def make_row(self, case: ResidencyCase, *, memory: int) -> RoutedBenchRow:
        """Return the row of a case."""
        if self._samples and self._samples[-1].tokens < self._written_tokens:
            self._sample()
        return RoutedBenchRow(
            case=case,
            steps=TimingSeries(tuple(self._steps)),
            prompts=tuple(self._prompts),
            report=self._read_report().since(self._before),
            layers=self._layer_deltas(),
            timeline=HitRateTimeline.from_samples(self._samples),
            first_counted_token=self._counted_from,
            prefill_wait_ms=self._prefill_wait_ms,
            memory=memory,
        )

    def _count_token(self) -> None:
        self._written_tokens += 1
        if self._written_tokens % self._sample_interval == 0:
            self._sample()

    def _sample(self) -> None:
        if (seen := self._observe()) is not None:
            self._samples.append(CounterSample(self._written_tokens, seen))

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


def _choose_sample_interval(config: RoutedBenchConfig) -> int:
    """Return the number of tokens of a column of the timeline."""
    total = config.tokens * config.rounds * max(len(config.prompts), 1)
    return max(MIN_SAMPLE_TOKENS, -(-total // MAX_SAMPLES))


_NO_PLAN = Digest.compute(b"bench moe")
"""Identity of a plan under which nothing is cached."""
