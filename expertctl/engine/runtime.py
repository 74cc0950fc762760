"""`Engine`: from a request to its text, with one budget over all memory that it takes.

Route, load what is absent, compile, prefill, decode. Every step is timed, whatever a person should
know becomes a warning, and the result is the document of ``run --json``.
"""

import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from expertctl.digest import Progress, no_progress
from expertctl.engine.admission import Admission, Seat, pause
from expertctl.engine.budget import PURPOSES, Budget
from expertctl.engine.experts import local_expert
from expertctl.engine.generate import Cancelled, never
from expertctl.engine.lent import Clock, Lent
from expertctl.engine.loaded_base import TORCH_BELOW
from expertctl.engine.memory import budget_limit, usual_budget
from expertctl.engine.moe.habit_keeper import SECONDS as HABIT_SECONDS
from expertctl.engine.moe.start import USUAL, StartWishes
from expertctl.engine.outcome import Outcome
from expertctl.engine.outline import local_outline
from expertctl.engine.preparation import (
    Files,
    Prepared,
    certain_needs,
    check_fits,
    lacking,
    naming_the_least,
    needs,
    paths_of,
    plan_request,
    prepare,
    prepare_fewer,
)
from expertctl.engine.presence import Presence
from expertctl.engine.recording import check_answer, failures_of
from expertctl.engine.request import RunRequest
from expertctl.engine.residents import Residents
from expertctl.engine.run_result import MemoryUse, RunResult
from expertctl.engine.threads import choose_threads, threads
from expertctl.engine.tiers import Tier, Tiers
from expertctl.engine.trace import Trace
from expertctl.errors import DigestError, UsageError
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.request import DeviceName
from expertctl.routing.session import PlanningSession
from expertctl.telling import WARNING, Tell, tell_nobody


class Engine:
    """The one owner of what is in memory: one base, the tiers of experts, what texts left.

    To stop an answer, say so by ``cancelled``: what is in memory stays. An exception that a signal
    raises may come in the middle of bookkeeping; the next run looks whether all adds up, and where
    it does not, begins with nothing loaded. While the traceback of such an exception is kept, what
    it refers to may be kept, too: the engine stays busy if it was raised as a ``with`` block ended.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        budget: int | None = None,
        progress: Progress = no_progress,
        tell: Tell = tell_nobody,
        torch_below: int = TORCH_BELOW,
        device: DeviceName = "cpu",
        moe: StartWishes = USUAL,
    ) -> None:
        """Begin with nothing loaded; ``budget`` is that of the memory of ``device``.

        ``progress`` counts bytes of experts and bases, none while a run is queued; what it raises
        ends the run. ``tell`` gets what a person should know while they wait. Bases of fewer bytes
        than ``torch_below`` are run by torch. ``moe`` says how routed experts begin.

        Raises:
            NotFoundError: when there is no such device.
        """
        self._device = device
        self.budget = Budget(budget_limit(budget, device))
        self._torch_below, self._moe = torch_below, moe
        self._turn = threading.Lock()
        self._answer: object | None = None
        """The answer that is not at its end."""
        self._is_doubtful = False
        self._beside = 0
        """What a run took besides its base, when slots of routed experts left too little for it."""
        self._presence = Presence(planner.home.engines, self.budget)
        self._admission = Admission(planner.store.paths.running, pause=self._pause)
        self._planner, self._progress, self._tell = planner, progress, tell
        self._session = PlanningSession(planner)
        self._residents = self._new_residents()

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
        form = check_answer(generated, lent.prepared.planned, request.route.prompt)
        outcome = Outcome(request, lent, generated, form, memory, trace=trace)
        return outcome.remembered(self._planner.catalogue, notes=self.take_notes)

    @contextmanager
    def lend(self, request: RunRequest) -> Iterator[Lent]:
        """Borrow all that the answer to a request needs: all of `run` but the generation.

        Raises:
            UsageError: while another answer is not at its end.
            ExpertError: whatever is wrong with the request, the experts, the base or the budget.
        """
        clock = Clock()
        with ExitStack() as stack:
            self._check_device(request)
            stack.enter_context(self._alone())
            stack.enter_context(self._presence.answering())
            stack.enter_context(self._noting())
            stack.enter_context(_told_when_full(self._device))
            self.tiers.begin_request()
            loads, moved = self.tiers.traffic[Tier.RAM].loads, self._residents.moved
            files = self._files(request, stack)
            planned = plan_request(self._session, request, files)
            clock.lap("route")
            stack.enter_context(failures_of(planned, self._planner.catalogue))
            prepared = self._prepared(request, planned, files)
            stack.enter_context(naming_the_least(prepared))
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
            stack.callback(self._residents.habits.keep, every=HABIT_SECONDS)  # when all is at rest
            ready = stack.enter_context(borrowed)
            seat.resize(self.budget.used)
            self._tell_what_is_held(prepared)
            clock.lap("load")
            routed = ready.routed
            loads = self.tiers.traffic[Tier.RAM].loads - loads
            moved = self._residents.moved.since(moved)
            moved = replace(moved, ssd=moved.ssd + _read_of(files))
            yield Lent(prepared, ready, loads, moved, count, clock, routed)

    def plan(self, request: RunRequest) -> Planned:
        """Return the plan that a request would have; nothing but its files is read.

        Raises:
            ExpertError: whatever is wrong with the request or the experts.
        """
        return plan_request(self._session, request, self._outlines(request))

    def forget(self, cache_key: str) -> None:
        """Drop what was kept for the next request of this key."""
        doubtful, self._is_doubtful = self._is_doubtful, True
        self._residents.forget(cache_key)
        self._is_doubtful = doubtful

    def close(self) -> None:
        """Let go of everything in memory; the engine can be used again.

        Raises:
            UsageError: while an answer is not at its end; nothing is let go of then.
        """
        with self._alone():
            self._residents.close()
            self._presence.close()

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what could not be kept on the disk; a result has it among its warnings."""
        return self._residents.take_notes()

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
        answer = object()
        try:
            with self._turn:
                if self._answer is not None:
                    raise UsageError(
                        "this engine is in the middle of another answer",
                        hint="take the answer to its end or close it, or have one engine for each "
                        "thread",
                    )
                self._answer = answer
            if self._is_doubtful and not self._residents.is_in_order:
                self._begin_anew()
            self._is_doubtful = True
            yield
            self._is_doubtful = False
        finally:
            if self._answer is answer:
                self._answer = None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """If the run fails, tell what could not be kept, for then no result tells it."""
        try:
            yield
        except Exception:
            for told in self.take_notes():
                self._tell(f"{WARNING}{told}")
            raise

    def _new_residents(self) -> Residents:
        ram = None if self._device == "cpu" else Budget(usual_budget())
        return Residents(
            self._planner,
            self.budget,
            ram=ram,
            progress=self._progress,
            tell=self._tell,
            moe=self._moe,
        )

    def _check_device(self, request: RunRequest) -> None:
        if request.route.device != self._device:
            raise UsageError(
                f"this engine computes on {self._device}, not on {request.route.device}",
                hint="make an engine for that device",
            )

    def _begin_anew(self) -> None:
        """Let go of what can be found, and have another ledger and owners that hold nothing."""
        with suppress(AssertionError, KeyError, ValueError, RuntimeError):  # of a device, too
            self._residents.close()
        self.budget = self._presence.budget = Budget(self.budget.limit)
        self._residents = self._new_residents()

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
        """Prepare a run; where slots of routed experts leave too little for it, with fewer slots.

        Later runs keep as few slots, else each would read the base anew. Where even the fewest
        leave too little, there are as many as before.
        """
        planner, limit = self._planner, self.budget.limit
        prepared = self._opened(request, planned, files, beside=self._beside)
        beside = lacking(planner, prepared, files, limit=limit)
        if beside > self._beside:
            fewer = self._opened(request, planned, files, beside=beside)
            if not lacking(planner, fewer, files, limit=limit):
                self._beside, prepared = beside, fewer
        if request.on_budget == "fewer":
            return prepare_fewer(prepared.base, planner, request, planned, files, limit=limit)
        return prepared

    def _opened(
        self, request: RunRequest, planned: Planned, files: Files, *, beside: int
    ) -> Prepared:
        return prepare(
            self._planner,
            request,
            planned,
            files,
            torch_below=self._torch_below,
            room=self.budget.limit,
            beside=beside,
            habits=self._residents.habits,
        )

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

    def _tell_what_is_held(self, prepared: Prepared) -> None:
        """Let `doctor --memory` know."""
        refs = (expert.ref for expert in prepared.planned.result.plan.experts)
        self._presence.holds(base=prepared.base.stored.name, experts=tuple(refs))

    def _memory(self) -> MemoryUse:
        held = {purpose: self.budget.held(purpose) for purpose in PURPOSES}
        return MemoryUse(self.budget.limit, self.budget.peak, held)


def _told_when_full(device: DeviceName) -> AbstractContextManager[None]:
    """Give an error of a device that is full its way out."""
    if device == "cpu":
        return nullcontext()
    from expertctl.engine.accelerator import told_when_full

    return told_when_full()


def _read_of(files: Files) -> int:
    """Return how many bytes of packages were read that are used from their files."""
    experts = files.values()
    return sum(file.size for expert in experts for file in expert.files.digests.values())
