"""`Desk`: what happens to a job before and after it is in the batch, in threads of its own.

One plans, fits the prompt into the context, and remembers what came of it. Another brings experts
into memory; where other jobs hold the memory that is missing, it waits until they give it back.
Answers are checked in further threads, since a check may take seconds.
"""

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from expertctl.engine.answer_form import Checked, excuse_cut_answer
from expertctl.engine.generate import Generated
from expertctl.engine.outcome import Outcome
from expertctl.engine.preparation import plan_request
from expertctl.engine.recording import check_answer, record_failure
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.board import LOOK_SECONDS, Board
from expertctl.engine.serving.expert_here import ExpertHere
from expertctl.engine.serving.house import House
from expertctl.engine.serving.job import Finished
from expertctl.engine.serving.ticket import Ticket
from expertctl.errors import (
    BudgetError,
    DeviceError,
    DiskFullError,
    ExpertError,
    IncompatibleError,
    NoAnswerError,
    StoreError,
    UsageError,
)
from expertctl.routing.planner import Inventory, Planned, Planner
from expertctl.routing.session import PlanningSession
from expertctl.telling import Tell

CHECKERS = 2
"""How many answers of jobs with a check of their own are checked at a time."""
_Found = TypeVar("_Found")
_REST_SECONDS = 30.0
"""How long to wait for buffers, which are given back once the current pass has ended."""


class Desk:
    """The owner of the two threads; only they plan, and only they load."""

    def __init__(self, planner: Planner, house: House, board: Board, *, tell: Tell) -> None:
        """Begin no thread before there is work."""
        self._planner, self._house, self._board, self._tell = planner, house, board, tell
        self._session = PlanningSession(planner)
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="desk")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._checking = ThreadPoolExecutor(CHECKERS, thread_name_prefix="checker")
        self._last = ""
        """What the operator was told last of files of the base."""

    def open_house(self) -> None:
        """Have the base read; raises as `House.open` does."""
        self._planning.submit(self._house.open, self._session).result()

    def plan(self, request: RunRequest) -> Future[Planned]:
        """Plan a request that is not answered, once earlier planning is done.

        A future that is cancelled before it begins no longer holds the request.
        """
        asked = [request]
        future = self._planning.submit(lambda: self._discreetly(lambda: self._planned(asked[0])))
        future.add_done_callback(lambda _: asked.clear())
        return future

    def inventory(self) -> Future[Inventory]:
        """Return the installed experts, once earlier planning is done."""
        return self._planning.submit(lambda: self._session.inventory)

    def experts(self) -> Future[tuple[ExpertHere, ...]]:
        """Return what these experts are to this server, once earlier planning is done."""
        here = self._house.expert_here
        return self._planning.submit(
            lambda: self._discreetly(lambda: tuple(map(here, self._session.inventory.experts)))
        )

    def prepare_next(self) -> None:
        """Begin to prepare jobs, as many as there may soon be rows for."""
        while (ticket := self._board.next_to_prepare()) is not None:
            self._planning.submit(self._guarded, ticket, self._plan)

    def load_again(self, ticket: Ticket) -> None:
        """Load again what a ready job gave back."""
        self._loading.submit(self._guarded, ticket, self._load)

    def conclude(self, ticket: Ticket) -> None:
        """Check the answers of a job, remember them, and tell the caller."""
        for lent in ticket.lents.values():
            lent.clock.resume()
        if ticket.job.check is None:
            self._planning.submit(self._guarded, ticket, self._check_and_remember)
        else:
            self._checking.submit(self._guarded, ticket, self._check)

    def close(self) -> None:
        """End the threads, once they have done what is queued."""
        self._loading.shutdown()
        self._checking.shutdown()
        self._planning.shutdown()

    def _guarded(self, ticket: Ticket, work: Callable[[Ticket], None]) -> None:
        """Do a stage of a job; an error fails this job alone, a failed device all jobs."""
        try:
            work(ticket)
        except DeviceError as error:
            self.fail(ticket, error)
            self._board.end_by(error)
        except ExpertError as error:
            self.fail(ticket, error)
        except Exception:  # noqa: BLE001  # a bug ends one job and is told; the server goes on
            self._tell(f"error: a job failed\n{traceback.format_exc()}")
            self.fail(ticket, ExpertError("the server failed to answer this"))
        self.prepare_next()

    def _plan(self, ticket: Ticket) -> None:
        ticket.clock.lap("queue")
        ticket.demand_wanted()
        request = ticket.job.request
        ticket.planned = self._planned(request)
        ticket.prepared = self._house.prepared(request, ticket.planned)
        ticket.planned = ticket.prepared.planned  # perhaps with fewer experts
        ticket.clock.lap("route")
        self._loading.submit(self._guarded, ticket, self._load)

    def _planned(self, request: RunRequest) -> Planned:
        return plan_request(self._session, request, self._house.files_for(request))

    def _load(self, ticket: Ticket) -> None:
        """Load the experts; where memory is missing, queue again behind jobs that may find it."""
        assert ticket.prepared is not None
        ticket.demand_wanted()
        ticket.clock.lap("queue")
        seen, again = self._board.freed, ticket.lacked is not None
        if ticket.lacked == seen and self._may_come(seen):
            self._loading.submit(self._guarded, ticket, self._load)  # nothing was given back yet
            return
        self._board.loads(ticket)
        try:
            ticket.memory = self._house.in_memory(ticket.prepared, again=again)
        except BudgetError:
            ticket.lacked = seen
            self._board.waits_for_memory(ticket)
            if not (self._may_come(seen) or self._is_rested()):
                raise
            self._loading.submit(self._guarded, ticket, self._load)
            return
        ticket.clock.lap("load")
        self._board.is_ready(ticket)

    def _may_come(self, seen: int) -> bool:
        """Wait a while for memory; False when no job holds any that could be given back."""
        board = self._board
        with board.lock:
            rows = self._house.settings.rows
            is_held = board.ready or board.is_short or board.free_rows < rows
            if is_held or board.freed != seen:
                pause = LOOK_SECONDS if board.preparing == 1 else LOOK_SECONDS / 10
                others = board.preparing
                board.changed.wait_for(
                    lambda: board.freed != seen or board.preparing > others, pause
                )
                return True
            return False

    def _is_rested(self) -> bool:
        """Have buffers of wide plans given back, while nothing runs; False if there are none."""
        board, rested = self._board, Future[bool]()

        def rest() -> None:
            idle = board.free_rows == self._house.settings.rows
            rested.set_result(idle and self._house.rest())
            with board.lock:
                board.changed.notify_all()

        with board.lock:
            board.errands.append(rest)
            board.changed.notify_all()
            board.changed.wait_for(lambda: rested.done() or board.is_done, _REST_SECONDS)
        return rested.done() and rested.result()

    def fail(self, ticket: Ticket, error: ExpertError) -> None:
        """End a job that has no text in the batch, and count it against its experts, soon."""
        if isinstance(error, DeviceError):  # its traceback is soon lost
            trace = "".join(traceback.format_exception(error))
            self._tell(f"error: {error.message}; {error.hint}\n{trace}")
        error = self._told_of(error)
        planned = ticket.planned if ticket.job.remember else None
        if self._board.fail(ticket, error) and not (
            planned is None or isinstance(error, NoAnswerError)
        ):
            catalogue = self._planner.catalogue
            self._planning.submit(record_failure, planned, catalogue, error)

    def _discreetly(self, work: Callable[[], _Found]) -> _Found:
        """Do work whose errors callers are told."""
        try:
            return work()
        except ExpertError as error:
            told = self._told_of(error)
            if told is error:
                raise
            raise told from error

    def _told_of(self, error: ExpertError) -> ExpertError:
        """Return what a caller is told of an error: only the operator may know where things lie.

        An error that ends several jobs, or each that comes, is told to the operator once.
        """
        base, said = self._house.base.stored, f"{error.message} {error.hint}"
        is_of_base = str(base.path) in said
        is_of_home = str(self._planner.home.root) in said
        if isinstance(error, UsageError) or not (is_of_base or is_of_home):
            return error
        if error.message != self._last:
            self._last = error.message
            self._tell(f"error: {error.message}")
        if is_of_base:
            return IncompatibleError(
                f"the files of {base.name} were changed or damaged while it is served",
                hint="whoever runs the server has to start it again; its log names the file",
            )
        kind = DiskFullError if isinstance(error, DiskFullError) else StoreError
        return kind(
            "a file of this server cannot be used",
            hint="its log names the file, to whoever runs the server",
        )

    def _check_and_remember(self, ticket: Ticket) -> None:
        self._remember(self._checks(ticket), ticket)

    def _check(self, ticket: Ticket) -> None:
        forms = self._checks(ticket)
        self._planning.submit(self._guarded, ticket, partial(self._remember, forms))

    def _checks(self, ticket: Ticket) -> Mapping[int, Checked]:
        forms = {n: self._checked(ticket, ticket.ended[n]) for n in sorted(ticket.ended)}
        for lent in ticket.lents.values():
            lent.clock.lap("post")
        return forms

    def _remember(self, forms: Mapping[int, Checked], ticket: Ticket) -> None:
        results = tuple(self._remembered(ticket, n, form) for n, form in forms.items())
        self._board.finish(ticket, Finished(results))

    def _checked(self, ticket: Ticket, generated: Generated) -> Checked:
        """Check the form of an answer, by what the job says or by what its prompt calls for."""
        job = ticket.job
        if ticket.stopped():
            return Checked(None)
        if job.check is not None and generated.finish_reason not in {"cancelled", "timeout"}:
            found = job.check(generated.text)
            if isinstance(found, Checked):
                return excuse_cut_answer(found, finish_reason=generated.finish_reason)
            generated = replace(generated, text=found)
        assert ticket.prepared is not None
        return check_answer(generated, ticket.prepared.planned, job.request.route.prompt)

    def _remembered(self, ticket: Ticket, number: int, form: Checked) -> RunResult:
        job, lent = ticket.job, ticket.lents[number]
        outcome = Outcome(
            job.request,
            lent,
            ticket.ended[number],
            form,
            self._house.memory,
            job_id=job.id if number == 0 else f"{job.id}-{number}",
        )
        if not job.remember:
            return outcome.result(lent.clock.timings(outcome.generated))
        self._house.tell_notes()
        return outcome.remembered(self._planner.catalogue)
