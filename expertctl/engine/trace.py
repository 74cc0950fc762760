"""A generation that is looked at more closely, on request: time by layer, allocations by token.

Steps alternate: in one the layers are timed, in the next the allocations are counted, for counting
slows Python down. The text that comes out is the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

from expertctl.engine.decoder import DecodeResult, PrefillResult
from expertctl.engine.generate import Reading
from expertctl.engine.layer_times import LayerTimes
from expertctl.schema.strict_json import JsonObject

Timing = Callable[[LayerTimes], AbstractContextManager[None]]
"""Has a model add the time of what it does meanwhile."""


@dataclass(frozen=True, slots=True)
class StepAllocations:
    """What one decode step allocated."""

    python_bytes: int
    compiled_arrays: int
    native_bytes: int


@dataclass(slots=True)
class Trace:
    """What was seen of one generation."""

    prefill: LayerTimes = field(default_factory=LayerTimes)
    decode: LayerTimes = field(default_factory=LayerTimes)
    timed_steps: int = 0
    allocations: list[StepAllocations] = field(default_factory=list)

    def to_json(self) -> JsonObject:
        """Return the ``trace`` object: milliseconds of the prompt and of one token, medians."""
        return {
            "prefill_ms": self.prefill.to_json(passes=1),
            "token_ms": self.decode.to_json(passes=max(self.timed_steps, 1)),
            "timed_tokens": self.timed_steps,
            "allocations": self._allocations(),
        }

    def _allocations(self) -> JsonObject:
        return {
            "tokens": len(self.allocations),
            **{
                name: int(median([getattr(step, name) for step in self.allocations] or [0]))
                for name in StepAllocations.__slots__
            },
        }


@dataclass(frozen=True, slots=True)
class TracedReading:
    """A model in the middle of one text, looked at."""

    reading: Reading
    timing: Timing
    trace: Trace

    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        """Read a prompt."""
        with self.timing(self.trace.prefill):
            return self.reading.prefill(ids)

    def decode(self, token: int) -> DecodeResult:
        """Read one more token."""
        if self.trace.timed_steps > len(self.trace.allocations):
            return self._counted(token)
        with self.timing(self.trace.decode):
            result = self.reading.decode(token)
        self.trace.timed_steps += 1
        return result

    def _counted(self, token: int) -> DecodeResult:
        from expertctl.engine.allocations import allocations  # it brings numba

        with allocations() as found:
            result = self.reading.decode(token)
        step = StepAllocations(found.python_bytes, found.compiled_arrays, found.native_bytes)
        self.trace.allocations.append(step)
        return result
