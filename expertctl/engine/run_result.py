"""What a run came to: the document of ``run --json`` (``schemas/run.schema.json``)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from expertctl.engine.backend import BackendName
from expertctl.engine.budget import Purpose
from expertctl.engine.generate import Generated
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.trace import Trace
from expertctl.routing.fewer import Dropped
from expertctl.routing.planner import Planned
from expertctl.schema.strict_json import JsonObject, JsonValue


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes by purpose at the end of a run, beside the limit and the most that was held."""

    budget: int
    peak: int
    held: Mapping[Purpose, int]

    def to_json(self) -> JsonObject:
        """Return the ``memory`` object."""
        return {
            "budget": self.budget,
            "peak": self.peak,
            **{str(p): n for p, n in self.held.items()},
        }


@dataclass(frozen=True, slots=True)
class Numerics:
    """What computed, and in what: all on which the last bits of the numbers depend."""

    backend: BackendName | Literal["transformers"]
    dtype: str
    adapter_dtype: str
    deterministic: bool

    def to_json(self) -> JsonObject:
        """Return the ``numerics`` object."""
        return dict(asdict(self))


@dataclass(frozen=True, slots=True)
class BytesRead:
    """What a run moved up: from files into memory, and from there to what is computed with."""

    ssd: int = 0
    ram: int = 0

    def since(self, before: "BytesRead") -> "BytesRead":
        """Return what was added to what was known before."""
        return BytesRead(self.ssd - before.ssd, self.ram - before.ram)

    def with_files(self, size: int) -> "BytesRead":
        """Return the same, with so many bytes of files more."""
        return BytesRead(self.ssd + size, self.ram)

    def to_json(self) -> JsonObject:
        """Return the ``bytes_read`` object."""
        return {"ssd": self.ssd, "ram": self.ram}


@dataclass(frozen=True, slots=True)
class Lap:
    """One stretch of a step, in seconds of `time.perf_counter`."""

    step: str
    began: float
    ended: float

    @property
    def ms(self) -> float:
        """How long it took."""
        return (self.ended - self.began) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One finished run."""

    job_id: str
    planned: Planned
    dropped: tuple[Dropped, ...]
    generated: Generated
    validation_passed: bool | None
    """Whether the answer has the form that was called for; None where none was."""
    prompt_tokens: int
    timings_ms: Mapping[str, float]
    memory: MemoryUse
    experts_loaded: int
    kv_reused_tokens: int
    numerics: Numerics
    threads: int
    warnings: tuple[str, ...]
    bytes_read: BytesRead = BytesRead()
    laps: tuple[Lap, ...] = ()
    """When the steps besides prefill and decode went on; what `timings_ms` adds up."""
    moe: RoutedReport | None = None
    """What became of routed experts; of all that a server answers at the same time."""
    trace: Trace | None = None
    """Time by layer and allocations by token, where they were asked for."""

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
