"""`Engine`: from a request to its text, with one budget over all memory that it takes.

Route, load what is absent, compile, prefill, decode. Every step is timed, whatever a person should
know becomes a warning, and the result is the document of ``run --json``.
"""

import threading
import time
import uuid
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertctl.digest import Progress, no_progress
from expertctl.engine.admission import Admission, Seat, pause
from expertctl.engine.budget import PURPOSES, Budget
from expertctl.engine.compat import CompatReady
from expertctl.engine.experts import local_expert
from expertctl.engine.generate import Cancelled, Generated, never
from expertctl.engine.loaded_base import TORCH_BELOW
from expertctl.engine.memory import usual_budget
from expertctl.engine.outline import local_outline
from expertctl.engine.preparation import (
    Files,
    Prepared,
    certain_needs,
    check_fits,
    needs,
    paths_of,
    plan_request,
    prepare,
    prepare_fewer,
)
from expertctl.engine.presence import Presence
from expertctl.engine.recording import check_answer, failures_of, figures_of, record
from expertctl.engine.request import RunRequest
from expertctl.engine.residents import Ready, Residents
from expertctl.engine.run_result import BytesRead, MemoryUse, RunResult
from expertctl.engine.threads import choose_threads, threads
from expertctl.engine.tiers import Tier, Tiers
from expertctl.engine.trace import Trace
from expertctl.errors import DigestError, UsageError
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.session import PlanningSession
from expertctl.telling import Tell, tell_nobody


class Engine:
    """The one owner of what is in memory: one base, the tiers of experts, what texts left.

    To stop an answer, say so by ``cancelled``. An exception that a signal raises within a run may
    hit the few microseconds in which bytes are entered or struck out; make another engine then.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        budget: int | None = None,
        progress: Progress = no_progress,
        tell: Tell = tell_nobody,
        torch_below: int = TORCH_BELOW,
    ) -> None:
        """Begin with nothing loaded.

        ``progress`` counts bytes of experts and bases, none while a run is queued; what it raises
        ends the run. ``tell`` gets what a person should know while they wait. Bases of fewer bytes
        than ``torch_below`` are run by torch.
        """
        self.budget = Budget(usual_budget() if budget is None else budget)
        self._residents = Residents(planner, self.budget, progress=progress, tell=tell)
        self._torch_below = torch_below
        self._busy = threading.Lock()
        self._presence = Presence(planner.home.engines, self.budget)
        self._admission = Admission(planner.store.paths.running, pause=self._pause)
        self._planner, self._progress, self._tell = planner, progress, tell
        self._session = PlanningSession(planner)

    def run(
        self, request: RunRequest, *, cancelled: Cancelled = never
    ) -> Generator[str, None, RunResult]:
        """Answer one prompt: yield pieces of text as they become certain, return the result.

        An answer that is ``cancelled`` ends where it is. What it needed is not kept then.

        Raises:
            ExpertError: whatever is wrong with the request, the experts, the base or the budget.
        """
        with self.lend(request) as lent:
            plan, prompt = lent.prepared.planned.result.plan, lent.prepared.prompt
            trace = Trace() if request.trace else None
            generated = yield from lent.ready.generate(prompt, plan, cancelled, trace=trace)
            memory = self._memory()
        return self._result(request, lent, generated, memory, trace)

    @contextmanager
    def lend(self, request: RunRequest) -> Iterator["Lent"]:
        """Borrow all that the answer to a request needs: all of `run` but the generation.

        Raises:
            UsageError: while another answer is not at its end.
            ExpertError: whatever is wrong with the request, the experts, the base or the budget.
        """
        clock = _Clock()
        with ExitStack() as stack:
            stack.enter_context(self._alone())
            stack.enter_context(self._presence.answering())
            self.tiers.begin_request()
            loads, moved = self.tiers.traffic[Tier.RAM].loads, self._residents.moved
            files = self._files(request, stack)
            planned = plan_request(self._session, request, files)
            clock.lap("route")
            stack.enter_context(failures_of(planned, self._planner.catalogue))
            prepared = self._prepared(request, planned, files)
            seat = stack.enter_context(self._seat(request, prepared, files))
            if seat.queued:
                clock.lap("queue")
            files = self._in_memory(request, prepared.planned, files, stack)
            count = choose_threads(prepared.base.weight_bytes)
            packed = prepared.numerics.backend == "packed"
            stack.enter_context(threads(1 if packed else count))  # kernels have their own
            borrowed = self._residents.ready(
                prepared, files, cache_key=request.cache_key, threads=count
            )
            ready = stack.enter_context(borrowed)
            seat.resize(self.budget.used)
            self._tell_what_is_held(prepared)
            clock.lap("load")
            loads = self.tiers.traffic[Tier.RAM].loads - loads
            moved = self._residents.moved.since(moved)
            moved = replace(moved, ssd=moved.ssd + _read_of(files))
            yield Lent(prepared, ready, loads, moved, count, clock)

    def plan(self, request: RunRequest) -> Planned:
        """Return the plan that a request would have; nothing but its files is read.

        Raises:
            ExpertError: whatever is wrong with the request or the experts.
        """
        return plan_request(self._session, request, self._outlines(request))

    def forget(self, cache_key: str) -> None:
        """Drop what was kept for the next request of this key."""
        self._residents.forget(cache_key)

    def close(self) -> None:
        """Let go of everything in memory; the engine can be used again.

        Raises:
            UsageError: while an answer is not at its end; nothing is let go of then.
        """
        with self._alone():
            self._residents.close()
            self._presence.close()

    @property
    def tiers(self) -> Tiers:
        """Which experts and plans are in memory."""
        return self._residents.tiers

    def check_integrity(self) -> None:
        """Assert what holds between runs."""
        self._residents.check_integrity()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse to begin an answer before another one is at its end, in whatever thread."""
        if not self._busy.acquire(blocking=False):
            raise UsageError(
                "this engine is in the middle of another answer",
                hint="take the answer to its end or close it, or have one engine for each thread",
            )
        try:
            yield
        finally:
            self._busy.release()

    def _files(self, request: RunRequest, stack: ExitStack) -> Files:
        """Read the files that a request names, or outlines where loading may have to wait."""
        if request.on_budget == "refuse":
            return self._read(paths_of(request), stack)
        return self._outlines(request)

    def _outlines(self, request: RunRequest) -> Files:
        trust = self._planner.trust
        return {path: local_outline(path, trust=trust) for path in paths_of(request)}

    def _read(self, paths: Iterable[Path], stack: ExitStack) -> Files:
        trust, progress = self._planner.trust, self._progress
        return {
            path: stack.enter_context(
                local_expert(path, trust=trust, tiers=self.tiers, progress=progress)
            )
            for path in paths
        }

    def _prepared(self, request: RunRequest, planned: Planned, files: Files) -> Prepared:
        planner, below = self._planner, self._torch_below
        if request.on_budget == "fewer":
            limit = self.budget.limit
            return prepare_fewer(planner, request, planned, files, limit=limit, torch_below=below)
        return prepare(planner, request, planned, files, torch_below=below)

    def _seat(
        self, request: RunRequest, prepared: Prepared, files: Files
    ) -> AbstractContextManager[Seat]:
        """Take a place among the runs of this home, waiting for it when that is asked for."""
        if request.on_budget != "queue":
            return self._admission.seat(sum(need.size for need in certain_needs(prepared)))
        limit = self.budget.limit
        size = check_fits(needs(self._planner, prepared, files), limit)
        return self._admission.queue(size, limit=limit, tell=self._tell)

    def _pause(self) -> None:
        """Let some time pass in the queue, unless the answer is not wanted any more."""
        self._progress(0)
        pause()

    def _in_memory(
        self, request: RunRequest, planned: Planned, files: Files, stack: ExitStack
    ) -> Files:
        """Bring the files of which there are outlines into memory, as far as they are needed."""
        if request.on_budget == "refuse":
            return files
        used = {expert.digest for expert in planned.experts}
        digests = {path: file.source.content_digest for path, file in files.items()}
        now = self._read([path for path, digest in digests.items() if digest in used], stack)
        for path, file in now.items():
            if file.source.content_digest != digests[path]:
                raise DigestError(f"{path} changed while it was read", hint="run it again")
        return now

    def _result(
        self,
        request: RunRequest,
        lent: "Lent",
        generated: Generated,
        memory: MemoryUse,
        trace: Trace | None,
    ) -> RunResult:
        """Remember a run and return what it came to, with all that a person should know."""
        prepared, ready = lent.prepared, lent.ready
        planned, timings_ms = prepared.planned, lent.clock.timings(generated)
        form, job_id = check_answer(generated, planned, request.route.prompt), uuid.uuid4().hex
        unsaved = record(
            self._planner.catalogue,
            planned,
            generated,
            job_id=job_id,
            form=form,
            prompt_tokens=len(prepared.prompt.ids),
            timings_ms=timings_ms,
            figures=figures_of(
                generated,
                kv_reused_tokens=ready.reused,
                threads=lent.threads,
                bytes_read=lent.moved,
            ),
        )
        told = (*planned.warnings, *(one.warning for one in prepared.dropped))
        told = (*told, *_alone(planned, request), *_threads_differ(request, lent))
        told = (*told, *request.message.warnings, *prepared.template.warnings, *form.warnings)
        unsaved = (*unsaved, *self._residents.take_notes())
        told = (*told, *ready.warnings, *_of_the_context(prepared, generated), *unsaved)
        return RunResult(
            job_id=job_id,
            planned=planned,
            dropped=prepared.dropped,
            generated=generated,
            validation_passed=form.passed,
            prompt_tokens=len(prepared.prompt.ids),
            timings_ms=timings_ms,
            memory=memory,
            experts_loaded=lent.loads,
            kv_reused_tokens=ready.reused,
            numerics=prepared.numerics,
            threads=lent.threads,
            warnings=told,
            bytes_read=lent.moved,
            trace=trace,
        )

    def _tell_what_is_held(self, prepared: Prepared) -> None:
        """Let `doctor --memory` know."""
        refs = (expert.ref for expert in prepared.planned.result.plan.experts)
        self._presence.holds(base=prepared.base.stored.name, experts=tuple(refs))

    def _memory(self) -> MemoryUse:
        held = {purpose: self.budget.held(purpose) for purpose in PURPOSES}
        return MemoryUse(self.budget.limit, self.budget.peak, held)


@dataclass(frozen=True, slots=True)
class Lent:
    """What one answer is made with, for as long as it is lent."""

    prepared: Prepared
    ready: Ready | CompatReady
    loads: int
    """How many experts were read for it."""
    moved: BytesRead
    threads: int
    clock: "_Clock"


class _Clock:
    """Milliseconds since the request came, and of its steps."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End a step."""
        now = time.perf_counter()
        self._laps[name], self._last = (now - self._last) * 1e3, now

    def timings(self, generated: Generated) -> dict[str, float]:
        """Return ``timings_ms``; ``ttft`` is from the request to the first token."""
        return {
            **self._laps,
            "prefill": generated.prefill_ms,
            "ttft": sum(self._laps.values()) + generated.first_token_ms,
            "decode": generated.decode_ms,
            "total": (time.perf_counter() - self._begun) * 1e3,
        }


def _read_of(files: Files) -> int:
    """Return how many bytes of packages were read that are used from their files."""
    experts = files.values()
    return sum(file.size for expert in experts for file in expert.files.digests.values())


def _threads_differ(request: RunRequest, lent: Lent) -> tuple[str, ...]:
    """Say that torch's numbers depend on how many threads it has; those of kernels do not."""
    saved = request.saved.threads if request.saved else None
    if saved in {None, lent.threads} or lent.prepared.numerics.backend == "packed":
        return ()
    told = f"the plan was saved by a run with {saved} threads, this one has {lent.threads}"
    return (f"{told}: the last bits of the numbers may differ",)


def _of_the_context(prepared: Prepared, generated: Generated) -> tuple[str, ...]:
    """What of the prompt was not read, and whether the answer ended for want of room."""
    prompt, wanted = prepared.prompt, prepared.planned.result.plan.params.max_tokens
    if generated.finish_reason != "length" or prompt.max_tokens == wanted:
        return prompt.warnings
    full = f"the answer ended where the context of {prompt.capacity} tokens is full"
    return (*prompt.warnings, full)


def _alone(planned: Planned, request: RunRequest) -> tuple[str, ...]:
    """Why the base answers alone although nobody asked for that."""
    asked = request.route.base_alone or request.saved is not None
    return () if asked or planned.result.plan.experts else planned.result.notes
