"""How fast this machine reads, computes and generates, all of it measured in turn.

Each round reads the weights and does nothing with them, computes and reads nothing, decodes, and
reads prompts, and begins with another of these. So what is compared was under the same load.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np
import torch
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.bench_result import CACHED, Measured, Series
from expertctl.engine.decoder import PREFILL_CHUNK
from expertctl.engine.decoder_programs import buffer_bytes
from expertctl.engine.kernels.cpu import sold_as
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.peak import Arithmetic
from expertctl.engine.kernels.reading import Reading
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages, pages_bytes
from expertctl.engine.memory import allocate
from expertctl.engine.packed_base import PackedBase, expert_shape
from expertctl.engine.packed_decoder import PackedDecoder
from expertctl.engine.packed_delta import PackedDeltas
from expertctl.engine.random_base import base_bytes, base_matrices
from expertctl.engine.roofline import Costs
from expertctl.engine.threads import usable_cores
from expertctl.package.model_config import ModelConfig

_READS, _SUMS = 3, 5
"""How often memory is read, and arithmetic done, in a round."""
_NUMBER_BYTES = {Scheme.FLOAT32: 4, Scheme.FLOAT16: 2, Scheme.BFLOAT16: 2, Scheme.INT8: 1}
_STEP = 7919
"""A prime, so that a prompt jumps about in the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured: a base in memory and, maybe, a plan on it; ``what`` says it in words."""

    what: str
    base: PackedBase
    kv_numbers: Scheme = Scheme.FLOAT32
    """What keys and values are stored in."""
    plan: PackedDeltas | None = None
    soft_prompt: Tensor | None = None
    """Rows that stand before every prompt, float32 [virtual tokens, hidden]."""
    warnings: tuple[str, ...] = ()

    @property
    def virtual(self) -> int:
        """How many tokens its soft prompt counts as."""
        return 0 if self.soft_prompt is None else len(self.soft_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is measured of it: steps in a round, the tokens before them, prompts, threads."""

    threads: tuple[int, ...]
    tokens: int = 32
    context: int = 128
    prompts: tuple[int, ...] = (128, 512)
    rounds: int = 5

    @property
    def longest(self) -> int:
        """How many tokens the longest text has."""
        return max(self.context + self.tokens, *self.prompts, 1)

    @property
    def runs(self) -> int:
        """How many runs of a task there are, warming up included."""
        return (self.rounds + 1) * (3 * len(self.threads) + len(self.prompts))


def thread_counts() -> tuple[int, ...]:
    """Return one, its doubles, and all the cores that may be used."""
    cores = usable_cores()
    doubles = takewhile(lambda threads: threads < cores, (1 << n for n in count()))
    return (*doubles, cores)


def kv_bytes(config: ModelConfig, wanted: Wanted, *, numbers: Scheme, virtual: int = 0) -> int:
    """Return what the keys and values of its texts take."""
    texts = (wanted.context + wanted.tokens, max(wanted.prompts, default=0))
    return sum(pages_bytes(config, virtual + text, numbers) for text in texts)


def passing_bytes(
    config: ModelConfig, scheme: Scheme, wanted: Wanted, *, plan: PackedDeltas | None = None
) -> int:
    """Return what a bench takes besides weights, keys and values."""
    width, adapters = (0, None) if plan is None else (plan.width, [plan.scheme])
    prompts = buffer_bytes(config, scheme, width=width, adapters=adapters)
    steps = buffer_bytes(config, scheme, tokens=1, width=width, adapters=adapters)
    return prompts + steps * (len(wanted.threads) - 1) + CACHED


@dataclass(frozen=True, slots=True)
class _ReadMemory:
    threads: int


@dataclass(frozen=True, slots=True)
class _Compute:
    threads: int


@dataclass(frozen=True, slots=True)
class _Decode:
    threads: int


@dataclass(frozen=True, slots=True)
class _ReadPrompt:
    tokens: int


_Task = _ReadMemory | _Compute | _Decode | _ReadPrompt


def measure(subject: Subject, wanted: Wanted, *, progress: Progress = no_progress) -> Measured:
    """Measure; ``progress`` counts ``wanted.runs`` and may raise.

    Raises:
        BudgetError: when a text is too long for its cache.
    """
    with _opened(subject, wanted) as laboratory:
        found = _rounds(laboratory, wanted, progress)
        operations = {n: work.operations for n, work in laboratory.arithmetic.items()}
        read_bytes = laboratory.reading.nbytes
    return Measured(
        what=subject.what,
        cpu=sold_as(),
        dtype=subject.base.scheme.value,
        costs=_costs(subject),
        chunk=PREFILL_CHUNK,
        context=subject.virtual + wanted.context,
        virtual=subject.virtual,
        read_bytes=read_bytes,
        memory={n: found[_ReadMemory(n)] for n in wanted.threads},
        arithmetic={n: found[_Compute(n)] for n in wanted.threads},
        arithmetic_operations=operations,
        tokens={n: found[_Decode(n)] for n in wanted.threads},
        prompts={n: found[_ReadPrompt(n)] for n in wanted.prompts},
        warnings=subject.warnings,
    )


def _rounds(laboratory: "_Laboratory", wanted: Wanted, progress: Progress) -> dict[_Task, Series]:
    tasks: list[_Task] = [
        *(kind(n) for n in wanted.threads for kind in (_ReadMemory, _Compute, _Decode)),
        *map(_ReadPrompt, wanted.prompts),
    ]
    for task in tasks:  # to compile, and to touch all memory once
        laboratory.run(task)
        progress(1)
    found: dict[_Task, list[tuple[float, ...]]] = {task: [] for task in tasks}
    for number in range(wanted.rounds):
        first = number % len(tasks)
        for task in tasks[first:] + tasks[:first]:
            found[task].append(laboratory.run(task))
            progress(1)
    return {task: Series(tuple(rounds)) for task, rounds in found.items()}


def _costs(subject: Subject) -> Costs:
    base, plan = subject.base, subject.plan
    routed = base.config.experts is not None
    read = 0 if plan is None else _read_bytes(base.config, plan)
    return Costs(
        config=base.config,
        layer_bytes=sum(matrix.nbytes for matrix in base_matrices(base)[:-1]),
        head_bytes=base.head.nbytes,
        kv_itemsize=_NUMBER_BYTES[subject.kv_numbers],
        routed_bytes=expert_shape(base.config, base.scheme).nbytes if routed else 0,
        expert_bytes=read,
        expert_numbers=0 if plan is None else read // _NUMBER_BYTES[plan.scheme],
    )


def _read_bytes(config: ModelConfig, plan: PackedDeltas) -> int:
    """Return the bytes of a plan that a token reads: of routed experts, the share that it uses."""
    routed = config.experts
    if routed is None:
        return plan.nbytes
    return plan.nbytes - plan.routed_bytes * (routed.count - routed.used) // routed.count


@dataclass(slots=True)
class _Laboratory:
    """A subject, opened with each number of threads; the largest reads prompts."""

    subject: Subject
    wanted: Wanted
    crews: dict[int, Crew]
    decoders: dict[int, PackedDecoder]
    arithmetic: dict[int, Arithmetic]
    reading: Reading
    behind: KVPages
    """Holds the context of decoding, which is read once."""
    prompt: KVPages
    scores: torch.Tensor

    def run(self, task: _Task) -> tuple[float, ...]:
        """Do a task; return how long each of its equal parts took."""
        match task:
            case _ReadMemory(threads):
                return _timed(lambda: self.reading.run(self.crews[threads]), _READS)
            case _Compute(threads):
                program = self.arithmetic[threads].program
                return _timed(lambda: self.crews[threads].run(program), _SUMS)
            case _Decode(threads):
                return self._decode(self.decoders[threads])
            case _ReadPrompt(tokens):
                self.prompt.reset()
                return _timed(lambda: self._read(tokens, self.prompt), 1)

    def read_context(self) -> None:
        """Read the context of decoding."""
        self._read(self.wanted.context, self.behind)

    def _read(self, tokens: int, cache: KVPages) -> None:
        ids = _ids(tokens, self.subject.base.config.vocab_size)
        self.decoders[max(self.decoders)].prefill(
            ids, cache, self.subject.plan, soft_prompt=self.subject.soft_prompt
        )

    def _decode(self, decoder: PackedDecoder) -> tuple[float, ...]:
        self.behind.rewind(self.subject.virtual + self.wanted.context)
        plan, scores = self.subject.plan, self.scores
        seconds = []
        for token in _ids(self.wanted.tokens, self.subject.base.config.vocab_size):
            started = time.perf_counter()
            decoder.decode(token, self.behind, plan, out=scores)
            seconds.append(time.perf_counter() - started)
        return tuple(seconds)


@contextmanager
def _opened(subject: Subject, wanted: Wanted) -> Iterator[_Laboratory]:
    base, virtual, numbers = subject.base, subject.virtual, subject.kv_numbers
    with ExitStack() as stack:
        crews = {count: Crew(count) for count in wanted.threads}
        for crew in crews.values():
            stack.callback(crew.close)
        laboratory = _Laboratory(
            subject=subject,
            wanted=wanted,
            crews=crews,
            decoders={count: PackedDecoder(base, crew) for count, crew in crews.items()},
            arithmetic={n: Arithmetic(base.scheme, workers=n) for n in wanted.threads},
            reading=Reading(_to_read(base)),
            behind=KVPages(base.config, virtual + wanted.context + wanted.tokens, numbers=numbers),
            prompt=KVPages(base.config, virtual + max(wanted.prompts, default=0), numbers=numbers),
            scores=torch.empty(base.config.vocab_size),
        )
        laboratory.read_context()
        yield laboratory


def _to_read(base: PackedBase) -> tuple[PackedMatrix, ...]:
    """Return what is read to measure memory: the weights, or more than a cache holds."""
    if base_bytes(base) >= CACHED:
        return base_matrices(base)
    data = np.frombuffer(allocate(CACHED), np.uint8)
    data[...] = 1  # else the system maps one page again and again
    return (PackedMatrix(Scheme.FLOAT32, LANES, CACHED // 64, data, np.zeros(0, np.float32)),)


def _ids(tokens: int, vocabulary: int) -> list[int]:
    return [_STEP * (number + 1) % vocabulary for number in range(tokens)]


def _timed(action: Callable[[], object], times: int) -> tuple[float, ...]:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return tuple(seconds)
