"""What one answer is made with, how long its steps take, and what a person should know of it."""

import time
from dataclasses import dataclass

from expertctl.engine.answer_form import Checked
from expertctl.engine.compat import CompatReady
from expertctl.engine.generate import Generated
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.preparation import Prepared
from expertctl.engine.request import RunRequest
from expertctl.engine.residents import Ready
from expertctl.engine.run_result import BytesRead, Lap
from expertctl.routing.planner import Planned

AFTERWARDS = "post"
"""The step behind the generation."""


class Clock:
    """Milliseconds since the request came, and of its steps."""

    def __init__(self) -> None:
        """Begin."""
        self._begun = self._last = time.perf_counter()
        self._laps: list[Lap] = []

    @property
    def laps(self) -> tuple[Lap, ...]:
        """When steps went on, in order; one repeated without a break has one lap."""
        return tuple(self._laps)

    def lap(self, name: str) -> None:
        """End a step; its time counts since the last one ended."""
        began, now = self._last, time.perf_counter()
        if self._laps and (self._laps[-1].step, self._laps[-1].ended) == (name, began):
            began = self._laps.pop().began
        self._laps.append(Lap(name, began, now))
        self._last = now

    def resume(self) -> None:
        """Let the next step begin now: the time in between is reported by itself."""
        self._last = time.perf_counter()

    def timings(self, generated: Generated) -> dict[str, float]:
        """Return ``timings_ms``; ``ttft`` is from the request to the first token."""
        took: dict[str, float] = {}
        for lap in self._laps:
            took[lap.step] = took.get(lap.step, 0.0) + lap.ms
        before = (ms for name, ms in took.items() if name != AFTERWARDS)
        return {
            **took,
            "prefill": generated.prefill_ms,
            "ttft": sum(before) + generated.first_token_ms,
            "decode": generated.decode_ms,
            "total": (time.perf_counter() - self._begun) * 1e3,
        }


@dataclass(frozen=True, slots=True)
class Lent:
    """What one answer is made with, for as long as it is lent."""

    prepared: Prepared
    ready: Ready | CompatReady
    loads: int
    """How many experts were read for it."""
    moved: BytesRead
    threads: int
    clock: Clock
    routed: RoutedReport | None = None
    """What had become of routed experts before it."""
    routed_after: RoutedReport | None = None
    """What had become of them when it ended, where others may be answered before that is told."""

    @property
    def moe(self) -> RoutedReport | None:
        """What became of routed experts until it ended, or now; None where the base has none."""
        now = self.ready.routed if self.routed_after is None else self.routed_after
        return now if now is None or self.routed is None else now.since(self.routed)

    @property
    def bytes_read(self) -> BytesRead:
        """What was moved for it, with the routed experts that were read while it was computed."""
        moe = self.moe
        return self.moved if moe is None else self.moved.with_files(moe.activity.read_bytes)


def told_of(
    request: RunRequest, lent: Lent, generated: Generated, form: Checked
) -> tuple[str, ...]:
    """Return what a person should know of the plan, the prompt, the base and the answer."""
    prepared, planned = lent.prepared, lent.prepared.planned
    return (
        *planned.warnings,
        *(one.warning for one in prepared.dropped),
        *_alone(planned, request),
        *_threads_differ(request, lent),
        *request.message.warnings,
        *prepared.template.warnings,
        *form.warnings,
        *lent.ready.warnings,
        *_of_the_context(prepared, generated),
    )


def _threads_differ(request: RunRequest, lent: Lent) -> tuple[str, ...]:
    """Say that torch's numbers depend on how many threads it has; those of kernels do not."""
    saved = request.saved.threads if request.saved else None
    if saved in {None, lent.threads} or lent.prepared.numerics.backend in {"packed", "cuda"}:
        return ()
    told = f"the plan was saved by a run with {saved} threads, this one has {lent.threads}"
    return (f"{told}: the last bits of the numbers may differ",)


def _of_the_context(prepared: Prepared, generated: Generated) -> tuple[str, ...]:
    """What of the prompt was not read, and whether the answer ended for want of room."""
    prompt, wanted = prepared.prompt, prepared.planned.result.plan.params.max_tokens
    is_full = 0 < prompt.max_tokens < wanted
    if generated.finish_reason != "length" or not is_full:
        return prompt.warnings
    full = f"the answer ended where the context of {prompt.capacity} tokens is full"
    return (*prompt.warnings, full)


def _alone(planned: Planned, request: RunRequest) -> tuple[str, ...]:
    """Why the base answers alone although that was not asked for."""
    asked = request.route.base_alone or request.saved is not None
    return () if asked or planned.result.plan.experts else planned.result.notes
