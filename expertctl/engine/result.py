"""The result of a run, the document of ``run --json`` (``schemas/run.schema.json``).

A traced generation also records the time of each layer and the allocations of each token. Its
decode steps alternate: one times the layers, the next counts the allocations, because counting
slows Python down. The text is the same.
"""

import ctypes
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Literal, Self

from expertctl.engine.arrays import AnyArray
from expertctl.engine.backend import BackendName
from expertctl.engine.decoding import LayerTimer, PrefillResult
from expertctl.engine.generation import DecodeSession, GenerationOutput, SteppedModel
from expertctl.engine.memory.budget import PURPOSES, MemoryBudget, Purpose
from expertctl.engine.moe.counters import RoutedExpertStats
from expertctl.routing.planner import DroppedExpert, PlannedPrompt
from expertctl.schema.strict_json import JsonObject, JsonValue


@dataclass(slots=True)
class AllocationCounts:
    """Allocations made inside a `count_allocations` block; filled in when the block ends."""

    python_bytes: int = 0
    """Peak of the memory held by Python and numpy, above the level at the start."""
    compiled_arrays: int = 0
    """Number of arrays created by compiled code."""
    native_bytes: int = 0
    """Growth of the C library's heap; 0 where the library does not report it."""


class _Mallinfo2(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@contextmanager
def count_allocations() -> Iterator[AllocationCounts]:
    """Count the allocations of all threads of the process inside a ``with`` block.

    Three sources are measured: Python and numpy (through tracemalloc), arrays created by code that
    numba compiled in this process, and the heap of the C library. Measuring slows Python down, so
    it is for tests and diagnostics.
    """
    count_arrays = _start_counting_arrays()
    found = AllocationCounts()
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start(1)
    native, arrays = get_heap_bytes(), count_arrays()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield found
    finally:
        found.python_bytes = tracemalloc.get_traced_memory()[1] - before
        found.compiled_arrays = count_arrays() - arrays
        found.native_bytes = get_heap_bytes() - native
        if not already:
            tracemalloc.stop()


def _start_counting_arrays() -> Callable[[], int]:
    """Return a function that counts the arrays that compiled code has created since now."""
    if sys.modules.get("numba") is None:
        return lambda: 0
    from numba.core.runtime import _nrt_python, rtsys

    _nrt_python.memsys_enable_stats()
    return lambda: int(rtsys.get_allocation_stats().alloc)


def get_heap_bytes() -> int:
    """Return the bytes that the C library has allocated or mapped; 0 if it cannot report them."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


@dataclass(slots=True)
class GenerationTrace:
    """Measurements of one generation."""

    prefill: LayerTimer = field(default_factory=LayerTimer)
    decode: LayerTimer = field(default_factory=LayerTimer)
    timed_steps: int = 0
    allocations: list[AllocationCounts] = field(default_factory=list)

    def to_json(self) -> JsonObject:
        """Return the ``trace`` object: milliseconds of the prompt and of one token, medians."""
        return {
            "prefill_ms": self.prefill.to_json(passes=1),
            "token_ms": self.decode.to_json(passes=max(self.timed_steps, 1)),
            "timed_tokens": self.timed_steps,
            "allocations": self._format_allocations(),
        }

    def _format_allocations(self) -> JsonObject:
        return {
            "tokens": len(self.allocations),
            **{
                name: int(median([getattr(step, name) for step in self.allocations] or [0]))
                for name in AllocationCounts.__slots__
            },
        }


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model whose layers are timed and whose allocations are counted."""

    model: SteppedModel
    trace: GenerationTrace

    @property
    def prefill_parts(self) -> int:
        """Number of parts of a pass."""
        return self.model.prefill_parts

    def prefill(
        self,
        reading: DecodeSession,
        ids: Sequence[int],
        *,
        between_layers: Callable[[], None] | None = None,
    ) -> PrefillResult:
        """Read a part of a prompt."""
        with self.time_layers(self.trace.prefill):
            return self.model.prefill(reading, ids, between_layers=between_layers)

    def step(self, texts: Sequence[tuple[DecodeSession, int]]) -> AnyArray:
        """Read one more token of each sequence."""
        if self.trace.timed_steps > len(self.trace.allocations):
            with count_allocations() as found:
                logits = self.model.step(texts)
            self.trace.allocations.append(found)
            return logits
        with self.time_layers(self.trace.decode):
            logits = self.model.step(texts)
        self.trace.timed_steps += 1
        return logits

    def time_layers(self, times: LayerTimer) -> AbstractContextManager[None]:
        """Add the time of each part to ``times`` inside a ``with`` block."""
        return self.model.time_layers(times)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Reserved bytes by purpose at the end of a run, with the limit and the peak."""

    budget: int
    peak: int
    held: Mapping[Purpose, int]

    @classmethod
    def from_budget(cls, budget: MemoryBudget) -> Self:
        """Return what a budget reserves now."""
        held = {purpose: budget.reserved_bytes(purpose) for purpose in PURPOSES}
        return cls(budget.limit, budget.peak, held)

    def to_json(self) -> JsonObject:
        """Return the ``memory`` object."""
        return {
            "budget": self.budget,
            "peak": self.peak,
            **{str(p): n for p, n in self.held.items()},
        }


@dataclass(frozen=True, slots=True)
class Numerics:
    """The backend and data types: all settings on which the last bits of numbers depend."""

    backend: BackendName | Literal["transformers"]
    dtype: str
    adapter_dtype: str
    deterministic: bool
    kl_divergence: float | None = None
    """What the base loses in int8 or int4; see `QuantisationQuality`. None where unknown."""

    def to_json(self) -> JsonObject:
        """Return the ``numerics`` object."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class BytesRead:
    """Bytes read from files into memory, and bytes moved from there to the compute tier."""

    ssd: int = 0
    ram: int = 0

    def subtract(self, before: "BytesRead") -> "BytesRead":
        """Return the difference from an earlier count."""
        return BytesRead(self.ssd - before.ssd, self.ram - before.ram)

    def add_file_bytes(self, size: int) -> "BytesRead":
        """Return a copy with ``size`` more bytes read from files."""
        return BytesRead(self.ssd + size, self.ram)

    def to_json(self) -> JsonObject:
        """Return the ``bytes_read`` object."""
        return {"ssd": self.ssd, "ram": self.ram}


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One interval of a stage, in seconds of `time.perf_counter`."""

    step: str
    began: float
    ended: float

    @property
    def ms(self) -> float:
        """Duration in milliseconds."""
        return (self.ended - self.began) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one finished run."""

    job_id: str
    planned: PlannedPrompt
    dropped: tuple[DroppedExpert, ...]
    generated: GenerationOutput
    validation_passed: bool | None
    """Whether the answer has the requested format; None where none was requested."""
    prompt_tokens: int
    timings_ms: Mapping[str, float]
    memory: MemoryUsage
    experts_loaded: int
    kv_reused_tokens: int
    numerics: Numerics
    threads: int
    warnings: tuple[str, ...]
    bytes_read: BytesRead = BytesRead()
    stage_spans: tuple[StageSpan, ...] = ()
    """Intervals of the stages other than prefill and decode; `timings_ms` has their sums."""
    moe: RoutedExpertStats | None = None
    """Routed-expert statistics; on a server, of all requests answered at the same time."""
    trace: GenerationTrace | None = None
    """Time by layer and allocations by token, where requested."""

    def to_json(self) -> JsonObject:
        """Return the document."""
        dropped = list[JsonValue](one.to_json() for one in self.dropped)
        plan, warnings = self.planned.result.plan, list[JsonValue](self.warnings)
        notes = list[JsonValue](self.planned.result.notes)
        return {
            "job_id": self.job_id,
            "text": self.generated.text,
            "finish_reason": self.generated.finish_reason,
            "validation_passed": self.validation_passed,
            "plan": plan.to_json(),
            "dropped": dropped,
            "tokens": {
                "prompt": self.prompt_tokens,
                "generated": len(self.generated.tokens),
                "ids": list[JsonValue](self.generated.tokens),
            },
            "timings_ms": {name: round(ms, 3) for name, ms in self.timings_ms.items()},
            "prefill_tokens_per_s": round(self.generated.prefill_tokens_per_s, 2),
            "decode_tokens_per_s": round(self.generated.tokens_per_s, 2),
            "memory": self.memory.to_json(),
            "cache": {
                "experts_hit": len(plan.experts) - self.experts_loaded,
                "experts_loaded": self.experts_loaded,
                "kv_reused_tokens": self.kv_reused_tokens,
            },
            "numerics": self.numerics.to_json(),
            "bytes_read": self.bytes_read.to_json(),
            "threads": self.threads,
            "seed": plan.seed,
            "notes": notes,
            "warnings": warnings,
            **({} if self.moe is None else {"moe": self.moe.to_json()}),
            **({} if self.trace is None else {"trace": self.trace.to_json()}),
        }
