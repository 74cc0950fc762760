"""Measure memory bandwidth, arithmetic throughput, decoding and prefill on this machine.

Each round reads the weights without computing, computes without reading memory, decodes, and reads
prompts; each round starts with a different task. So the figures that are compared were measured
under the same load.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.arrays import AnyArray
from expertctl.engine.bench_result import CACHE_BYTES, BenchResult, ModelCosts, TimingSeries
from expertctl.engine.cpu.base_loader import decode_bytes_per_token, list_matrices
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.packed_base import PackedBase, make_expert_shape
from expertctl.engine.cpu.program_cache import estimate_buffer_bytes
from expertctl.engine.decoding import PREFILL_CHUNK
from expertctl.engine.kernels.machine_code import cpu_model_name
from expertctl.engine.kernels.microbenchmarks import MemoryReadBenchmark, PeakArithmetic
from expertctl.engine.kernels.packed_format import LANES, PackedDeltas, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import (
    InterleavedPages,
    PagedKVCache,
    PageLayout,
    estimate_pages_bytes,
)
from expertctl.engine.memory.host import allocate, count_usable_cores
from expertctl.package.model_config import ModelConfig

_READ_RUNS, _COMPUTE_RUNS = 3, 5
"""Repetitions of the memory read and of the arithmetic in one round."""
_NUMBER_BYTES = {Scheme.FLOAT32: 4, Scheme.FLOAT16: 2, Scheme.BFLOAT16: 2, Scheme.INT8: 1}
_TOKEN_STRIDE = 7919
"""A prime, so that the tokens of a prompt are spread over the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSubject:
    """A base in memory, and optionally a plan on it, to be measured."""

    description: str
    base: PackedBase
    kv_scheme: Scheme = Scheme.FLOAT32
    """Number format of keys and values."""
    plan: PackedDeltas | None = None
    soft_prompt: AnyArray | None = None
    """Rows that precede every prompt, float32 [virtual tokens, hidden]."""
    warnings: tuple[str, ...] = ()

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens of the soft prompt."""
        return 0 if self.soft_prompt is None else len(self.soft_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Thread counts, decode steps per round, tokens before them, prompt lengths and rounds."""

    threads: tuple[int, ...]
    tokens: int = 32
    context: int = 128
    prompts: tuple[int, ...] = (128, 512)
    rounds: int = 5

    @property
    def longest_text(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(self.context + self.tokens, *self.prompts, 1)

    @property
    def run_count(self) -> int:
        """Number of task runs, including warm-up."""
        return (self.rounds + 1) * (3 * len(self.threads) + len(self.prompts))


def list_thread_counts() -> tuple[int, ...]:
    """Return the powers of two below the number of usable cores, and that number."""
    cores = count_usable_cores()
    doubles = takewhile(lambda threads: threads < cores, (1 << n for n in count()))
    return (*doubles, cores)


def bench_kv_bytes(
    config: ModelConfig, settings: BenchSettings, *, layout: PageLayout, virtual: int = 0
) -> int:
    """Return the bytes of the keys and values of both sequences of a bench."""
    texts = (settings.context + settings.tokens, max(settings.prompts, default=0))
    return sum(estimate_pages_bytes(config, virtual + text, layout) for text in texts)


def bench_buffer_bytes(
    config: ModelConfig,
    scheme: Scheme,
    settings: BenchSettings,
    *,
    plan: PackedDeltas | None = None,
) -> int:
    """Return the bytes of memory that a bench takes besides weights, keys and values."""
    width, adapters = (0, None) if plan is None else (plan.width, [plan.scheme])
    prompts = estimate_buffer_bytes(config, scheme, width=width, adapters=adapters)
    steps = estimate_buffer_bytes(config, scheme, tokens=1, width=width, adapters=adapters)
    return prompts + steps * (len(settings.threads) - 1) + CACHE_BYTES


@dataclass(frozen=True, slots=True)
class _ReadMemoryTask:
    threads: int


@dataclass(frozen=True, slots=True)
class _ComputeTask:
    threads: int


@dataclass(frozen=True, slots=True)
class _DecodeTask:
    threads: int


@dataclass(frozen=True, slots=True)
class _PrefillTask:
    tokens: int


_Task = _ReadMemoryTask | _ComputeTask | _DecodeTask | _PrefillTask


def run_bench(
    subject: BenchSubject, settings: BenchSettings, *, progress: Progress = ignore_progress
) -> BenchResult:
    """Run all measurements; ``progress`` is called once for each of ``settings.run_count`` runs.

    It may raise to end the bench.

    Raises:
        BudgetError: when a sequence is too long for its cache.
    """
    with _open_session(subject, settings) as session:
        found = _run_rounds(session, settings, progress)
        operations = {n: work.operations for n, work in session.arithmetic.items()}
        read_bytes = session.reading.nbytes
    return BenchResult(
        what=subject.description,
        cpu=cpu_model_name(),
        dtype=_name_dtype(subject.base.scheme),
        costs=_model_costs(subject),
        chunk=PREFILL_CHUNK,
        context=subject.virtual_tokens + settings.context,
        virtual=subject.virtual_tokens,
        read_bytes=read_bytes,
        memory={n: found[_ReadMemoryTask(n)] for n in settings.threads},
        arithmetic={n: found[_ComputeTask(n)] for n in settings.threads},
        arithmetic_operations=operations,
        tokens={n: found[_DecodeTask(n)] for n in settings.threads},
        prompts={n: found[_PrefillTask(n)] for n in settings.prompts},
        warnings=subject.warnings,
    )


def _name_dtype(scheme: Scheme) -> str:
    """Return a scheme as users know it: five bits are what int4 is in small bases."""
    return Scheme.INT4.value if scheme is Scheme.INT5 else scheme.value


def _run_rounds(
    session: "_BenchSession", settings: BenchSettings, progress: Progress
) -> dict[_Task, TimingSeries]:
    tasks: list[_Task] = [
        *(
            kind(n)
            for n in settings.threads
            for kind in (_ReadMemoryTask, _ComputeTask, _DecodeTask)
        ),
        *map(_PrefillTask, settings.prompts),
    ]
    for task in tasks:  # warm-up: compiles the kernels and touches all memory
        session.run(task)
        progress(1)
    found: dict[_Task, list[tuple[float, ...]]] = {task: [] for task in tasks}
    for number in range(settings.rounds):
        first = number % len(tasks)
        for task in tasks[first:] + tasks[:first]:
            found[task].append(session.run(task))
            progress(1)
    return {task: TimingSeries(tuple(rounds)) for task, rounds in found.items()}


def _model_costs(subject: BenchSubject) -> ModelCosts:
    base, plan = subject.base, subject.plan
    routed = base.config.experts is not None
    read = 0 if plan is None else _plan_bytes_per_token(base.config, plan)
    return ModelCosts(
        config=base.config,
        layer_bytes=sum(matrix.nbytes for matrix in list_matrices(base)[:-1]),
        head_bytes=base.head.nbytes,
        kv_itemsize=_NUMBER_BYTES[subject.kv_scheme],
        routed_bytes=make_expert_shape(base.config, base.scheme).nbytes if routed else 0,
        expert_bytes=read,
        expert_numbers=0 if plan is None else read // _NUMBER_BYTES[plan.scheme],
    )


def _plan_bytes_per_token(config: ModelConfig, plan: PackedDeltas) -> int:
    """Return the bytes of a plan read per token; of routed experts, only those in use count."""
    routed = config.experts
    if routed is None:
        return plan.nbytes
    return plan.nbytes - plan.routed_bytes * (routed.count - routed.used) // routed.count


@dataclass(slots=True)
class _BenchSession:
    """A subject opened once per thread count; the decoder with the most threads reads prompts."""

    subject: BenchSubject
    settings: BenchSettings
    pools: dict[int, ThreadPool]
    decoders: dict[int, PackedDecoder]
    arithmetic: dict[int, PeakArithmetic]
    reading: MemoryReadBenchmark
    decode_cache: PagedKVCache
    """Holds the context that precedes the decoded tokens; it is read once."""
    prefill_cache: PagedKVCache
    scores: AnyArray

    def run(self, task: _Task) -> tuple[float, ...]:
        """Run a task; return the seconds taken by each of its equal parts."""
        match task:
            case _ReadMemoryTask(threads):
                return _time_action(lambda: self.reading.run(self.pools[threads]), _READ_RUNS)
            case _ComputeTask(threads):
                program = self.arithmetic[threads].program
                return _time_action(lambda: self.pools[threads].run(program), _COMPUTE_RUNS)
            case _DecodeTask(threads):
                return self._decode(self.decoders[threads])
            case _PrefillTask(tokens):
                self.prefill_cache.reset()
                return _time_action(lambda: self._read(tokens, self.prefill_cache), 1)

    def read_context(self) -> None:
        """Fill the cache with the context that precedes the decoded tokens."""
        self._read(self.settings.context, self.decode_cache)

    def _read(self, tokens: int, cache: PagedKVCache) -> None:
        ids = _make_ids(tokens, self.subject.base.config.vocab_size)
        self.decoders[max(self.decoders)].prefill(
            ids, cache, self.subject.plan, soft_prompt=self.subject.soft_prompt
        )

    def _decode(self, decoder: PackedDecoder) -> tuple[float, ...]:
        self.decode_cache.rewind(self.subject.virtual_tokens + self.settings.context)
        plan, scores = self.subject.plan, self.scores
        seconds = []
        for token in _make_ids(self.settings.tokens, self.subject.base.config.vocab_size):
            started = time.perf_counter()
            decoder.decode(token, self.decode_cache, plan, out=scores)
            seconds.append(time.perf_counter() - started)
        return tuple(seconds)


@contextmanager
def _open_session(subject: BenchSubject, settings: BenchSettings) -> Iterator[_BenchSession]:
    base, virtual = subject.base, subject.virtual_tokens
    layout = InterleavedPages(subject.kv_scheme)
    with ExitStack() as stack:
        pools = {count: ThreadPool(count) for count in settings.threads}
        for pool in pools.values():
            stack.callback(pool.close)
        session = _BenchSession(
            subject=subject,
            settings=settings,
            pools=pools,
            decoders={count: PackedDecoder(base, pool) for count, pool in pools.items()},
            arithmetic={n: PeakArithmetic(base.scheme, workers=n) for n in settings.threads},
            reading=MemoryReadBenchmark(_matrices_to_read(base)),
            decode_cache=PagedKVCache(
                base.config, virtual + settings.context + settings.tokens, layout=layout
            ),
            prefill_cache=PagedKVCache(
                base.config, virtual + max(settings.prompts, default=0), layout=layout
            ),
            scores=np.empty(base.config.vocab_size, np.float32),
        )
        session.read_context()
        yield session


def _matrices_to_read(base: PackedBase) -> tuple[PackedMatrix, ...]:
    """Return the weights, or a block larger than the caches, as the memory to read."""
    if decode_bytes_per_token(base) >= CACHE_BYTES:
        return list_matrices(base)
    data = np.frombuffer(allocate(CACHE_BYTES), np.uint8)
    data[...] = 1  # otherwise the system maps one zero page many times
    return (PackedMatrix(Scheme.FLOAT32, LANES, CACHE_BYTES // 64, data, np.zeros(0, np.uint16)),)


def _make_ids(tokens: int, vocabulary: int) -> list[int]:
    return [_TOKEN_STRIDE * (number + 1) % vocabulary for number in range(tokens)]


def _time_action(action: Callable[[], object], times: int) -> tuple[float, ...]:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return tuple(seconds)
