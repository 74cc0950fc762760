"""The request processor: plans, loads and concludes jobs outside the batch, in its own threads.

One thread plans, fits the prompt into the context, and records results. Another loads experts;
where other jobs hold the missing memory, it waits until they release it. Answers are checked in
further threads, since a check may take seconds.
"""

import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from expertctl.engine.generation import GenerationOutput
from expertctl.engine.preparation import plan_request
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.result_builder import (
    build_result,
    check_answer,
    record_failure,
    record_result,
)
from expertctl.engine.serving.model_runner import ModelRunner
from expertctl.engine.serving.request import AdapterStatus, JobFinished, RequestState
from expertctl.engine.serving.scheduler import POLL_SECONDS, Scheduler
from expertctl.engine.text.answer_format import FormatCheck, ignore_truncation
from expertctl.errors import (
    BudgetError,
    DeviceError,
    DiskFullError,
    ExpertError,
    IncompatibleError,
    NoAnswerError,
    Notify,
    StoreError,
    UsageError,
)
from expertctl.routing.planner import Inventory, PlannedPrompt, Planner
from expertctl.routing.session import PlanningSession

CHECK_WORKERS = 2
"""Number of answers with a custom check that are checked at a time."""
_Result = TypeVar("_Result")
_REST_SECONDS = 30.0
"""Maximum wait for buffers, which are freed once the current pass has ended."""


class RequestProcessor:
    """The owner of the planning and loading threads; only they plan, and only they load."""

    def __init__(
        self, planner: Planner, runner: ModelRunner, scheduler: Scheduler, *, tell: Notify
    ) -> None:
        """Start without threads, which are created on demand."""
        self._planner, self._runner, self._scheduler, self._tell = planner, runner, scheduler, tell
        self._session = PlanningSession(planner)
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="planner")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._checking = ThreadPoolExecutor(CHECK_WORKERS, thread_name_prefix="checker")
        self._last_reported = ""
        """The last error about the server's files reported to the operator."""

    def open_model(self) -> None:
        """Load the base; raises as `ServingEngine.start` does."""
        self._planning.submit(self._runner.open, self._session).result()

    def plan(self, request: RunRequest) -> Future[PlannedPrompt]:
        """Plan a request without answering it, after planning already queued.

        A future that is cancelled before it starts no longer holds the request.
        """
        requests = [request]
        future = self._planning.submit(
            lambda: self._run_redacted(lambda: self._plan_request(requests[0]))
        )
        future.add_done_callback(lambda _: requests.clear())
        return future

    def choose_base(self, request: RunRequest) -> Future[str]:
        """Return the name of the base that would answer a request that names none."""
        unbound = replace(request, base=None)
        return self._planning.submit(
            lambda: self._run_redacted(lambda: plan_request(self._session, unbound, {}).base.name)
        )

    def get_inventory(self) -> Future[Inventory]:
        """Return the installed experts, after planning already queued."""
        return self._planning.submit(lambda: self._session.inventory)

    def list_experts(self) -> Future[tuple[AdapterStatus, ...]]:
        """Return the status of all experts on this server, after planning already queued."""
        here = self._runner.get_adapter_status
        return self._planning.submit(
            lambda: self._run_redacted(lambda: tuple(map(here, self._session.inventory.experts)))
        )

    def prepare_next(self) -> None:
        """Start preparing jobs, as many as there may soon be rows for."""
        while (state := self._scheduler.take_next()) is not None:
            self._planning.submit(self._run_guarded, state, self._plan)

    def load_again(self, state: RequestState) -> None:
        """Load again what a ready job released."""
        self._loading.submit(self._run_guarded, state, self._load_experts)

    def conclude(self, state: RequestState) -> None:
        """Check the answers of a job, record them, and notify the caller."""
        for context in state.contexts.values():
            context.clock.restart_stage()
        if state.job.check is None:
            self._planning.submit(self._run_guarded, state, self._check_and_record)
        else:
            self._checking.submit(self._run_guarded, state, self._check)

    def close(self) -> None:
        """End the threads, once queued work is done."""
        self._loading.shutdown()
        self._checking.shutdown()
        self._planning.shutdown()

    def _run_guarded(self, state: RequestState, work: Callable[[RequestState], None]) -> None:
        """Run a stage of a job; an error fails this job only, a failed device all jobs."""
        try:
            work(state)
        except DeviceError as error:
            self.fail(state, error)
            self._scheduler.stop_with_error(error)
        except ExpertError as error:
            self.fail(state, error)
        except Exception:  # noqa: BLE001  # a bug ends one job and is logged; the server goes on
            self._tell(f"error: a job failed\n{traceback.format_exc()}")
            self.fail(state, ExpertError("the server failed to answer this"))
        self.prepare_next()

    def _plan(self, state: RequestState) -> None:
        state.timer.end_stage("queue")
        state.check_active()
        request = state.job.request
        state.planned = self._plan_request(request)
        state.prepared = self._runner.prepare(request, state.planned)
        state.planned = state.prepared.planned  # possibly with fewer experts
        state.timer.end_stage("route")
        self._loading.submit(self._run_guarded, state, self._load_experts)

    def _plan_request(self, request: RunRequest) -> PlannedPrompt:
        return plan_request(self._session, request, self._runner.get_files(request))

    def _load_experts(self, state: RequestState) -> None:
        """Load the experts; where memory is missing, queue again behind jobs that may find it."""
        assert state.prepared is not None
        state.check_active()
        state.timer.end_stage("queue")
        seen, again = self._scheduler.freed_count, state.missing_at_freed_count is not None
        if state.missing_at_freed_count == seen and self._wait_for_memory(seen):
            # no memory was released yet
            self._loading.submit(self._run_guarded, state, self._load_experts)
            return
        self._scheduler.mark_loading(state)
        try:
            state.memory = self._runner.load_plan(state.prepared, again=again)
        except BudgetError:
            state.missing_at_freed_count = seen
            self._scheduler.mark_waiting_for_memory(state)
            if not (self._wait_for_memory(seen) or self._free_buffers()):
                raise
            self._loading.submit(self._run_guarded, state, self._load_experts)
            return
        state.timer.end_stage("load")
        self._scheduler.mark_ready(state)

    def _wait_for_memory(self, freed_count: int) -> bool:
        """Wait a while for memory; return False when no job holds any that could be released."""
        scheduler = self._scheduler
        with scheduler.lock:
            rows = self._runner.rows
            is_held = scheduler.ready or scheduler.is_short or scheduler.free_rows < rows
            if is_held or scheduler.freed_count != freed_count:
                others = scheduler.preparing_count
                scheduler.condition.wait_for(
                    lambda: (
                        scheduler.freed_count != freed_count or scheduler.preparing_count > others
                    ),
                    POLL_SECONDS if others == 1 else POLL_SECONDS / 10,
                )
                return True
            return False

    def _free_buffers(self) -> bool:
        """Free the buffers of wide plans while nothing runs; return False if there are none."""
        scheduler, freed = self._scheduler, Future[bool]()

        def free() -> None:
            idle = scheduler.free_rows == self._runner.rows
            freed.set_result(idle and self._runner.free_wide_buffers())
            with scheduler.lock:
                scheduler.condition.notify_all()

        with scheduler.lock:
            scheduler.control_queue.append(free)
            scheduler.condition.notify_all()
            scheduler.condition.wait_for(lambda: freed.done() or scheduler.is_done, _REST_SECONDS)
        return freed.done() and freed.result()

    def fail(self, state: RequestState, error: ExpertError) -> None:
        """Fail a job without a sequence in the batch, and soon count it against its experts."""
        if isinstance(error, DeviceError):  # its traceback is soon lost
            trace = "".join(traceback.format_exception(error))
            self._tell(f"error: {error.message}; {error.hint}\n{trace}")
        error = self._redact_error(error)
        planned = state.planned if state.job.remember else None
        if self._scheduler.fail(state, error) and not (
            planned is None or isinstance(error, NoAnswerError)
        ):
            catalogue = self._planner.catalogue
            self._planning.submit(record_failure, planned, catalogue, error)

    def _run_redacted(self, work: Callable[[], _Result]) -> _Result:
        """Run work whose errors are returned to callers."""
        try:
            return work()
        except ExpertError as error:
            redacted = self._redact_error(error)
            if redacted is error:
                raise
            raise redacted from error

    def _redact_error(self, error: ExpertError) -> ExpertError:
        """Return the error for the caller: only the operator may see file paths.

        An error that ends several jobs, or every new one, is reported to the operator once.
        """
        base, text = self._runner.base.stored, f"{error.message} {error.hint}"
        is_of_base = str(base.path) in text
        is_of_home = str(self._planner.home.root) in text
        if isinstance(error, UsageError) or not (is_of_base or is_of_home):
            return error
        if error.message != self._last_reported:
            self._last_reported = error.message
            self._tell(f"error: {error.message}")
        if is_of_base:
            return IncompatibleError(
                f"the files of {base.name} were changed or damaged while it is served",
                hint="the operator has to restart the server; its log names the file",
            )
        kind = DiskFullError if isinstance(error, DiskFullError) else StoreError
        return kind(
            "a file of this server cannot be used",
            hint="the server's log names the file",
        )

    def _check_and_record(self, state: RequestState) -> None:
        self._record_results(self._check_answers(state), state)

    def _check(self, state: RequestState) -> None:
        forms = self._check_answers(state)
        self._planning.submit(self._run_guarded, state, partial(self._record_results, forms))

    def _check_answers(self, state: RequestState) -> Mapping[int, FormatCheck]:
        forms = {n: self._check_answer(state, state.outputs[n]) for n in sorted(state.outputs)}
        for context in state.contexts.values():
            context.clock.end_stage("post")
        return forms

    def _record_results(self, forms: Mapping[int, FormatCheck], state: RequestState) -> None:
        results = tuple(self._build_result(state, n, form) for n, form in forms.items())
        self._scheduler.finish(state, JobFinished(results))

    def _check_answer(self, state: RequestState, generated: GenerationOutput) -> FormatCheck:
        """Check the format of an answer, by the job's check or as its prompt requires."""
        job = state.job
        if state.find_stop_reason():
            return FormatCheck(None)
        if job.check is not None and generated.finish_reason not in {"cancelled", "timeout"}:
            found = job.check(generated.text)
            if isinstance(found, FormatCheck):
                return ignore_truncation(found, finish_reason=generated.finish_reason)
            generated = replace(generated, text=found)
        assert state.prepared is not None
        return check_answer(generated, state.prepared.planned, job.request.route.prompt)

    def _build_result(self, state: RequestState, number: int, form: FormatCheck) -> RunResult:
        job, context = state.job, state.contexts[number]
        job_id = job.id if number == 0 else f"{job.id}-{number}"
        generated, memory = state.outputs[number], self._runner.memory
        result = build_result(job.request, context, generated, form, memory, job_id=job_id)
        if not job.remember:
            return result
        self._runner.report_notes()
        return record_result(result, self._planner.catalogue)
