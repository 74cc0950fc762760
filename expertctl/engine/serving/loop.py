"""The engine loop: the thread that computes, allocates KV, and starts and ends sequences.

No other thread starts or ends a sequence, so between two passes it may inspect all of them.
"""

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy, deepcopy
from dataclasses import dataclass, replace

from expertctl.engine.adapters.compile import BASE_ONLY
from expertctl.engine.loaded_model import LoadedModel
from expertctl.engine.moe.usage_store import SAVE_INTERVAL
from expertctl.engine.result_builder import GenerationContext
from expertctl.engine.running_batch import MIN_CHUNK, MIN_CHUNK_FROM_DISK, RunningBatch
from expertctl.engine.running_sequence import RunningSequence
from expertctl.engine.serving.model_runner import ModelRunner
from expertctl.engine.serving.processor import RequestProcessor
from expertctl.engine.serving.request import JobStarted, RequestState
from expertctl.engine.serving.scheduler import POLL_SECONDS, Scheduler
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.errors import BudgetError, CancelledError, DeviceError, ExpertError, Notify

FailureCallback = Callable[[], None]
BUSY_SAVE_SECONDS = 600.0
"""Interval for saving expert usage while sequences are decoded, which wait for it."""
_RETRY_SECONDS = 0.05
"""Delay before a sequence that lacked memory is retried, while others are decoded."""
_MAX_RECLAIMS = 3
"""How often other jobs give their memory to one that cannot start; loading them again races it."""


_JobSequence = RunningSequence[RequestState]


@dataclass(frozen=True, slots=True)
class _SequenceResources:
    """Resources of one sequence, until the stack is closed."""

    ready: LoadedModel
    stack: ExitStack


class EngineLoop:
    """The owner of the batch and of the resources of its sequences."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        processor: RequestProcessor,
        *,
        tell: Notify,
        on_failure: FailureCallback = lambda: None,
    ) -> None:
        """Start without sequences, with a loaded base; fatal errors call ``on_failure``."""
        # each chunk may read experts from the disk: few large chunks read them least often
        least = MIN_CHUNK if runner.model.experts is None else MIN_CHUNK_FROM_DISK
        self.batch = RunningBatch[RequestState](runner.model, rows=runner.rows, min_chunk=least)
        self._runner, self._scheduler = runner, scheduler
        self._processor, self._tell = processor, tell
        self._resources: dict[_JobSequence, _SequenceResources] = {}
        self._memory_wait: tuple[RequestState | None, float] = None, 0.0
        """The job that lacked memory because of others, and when to retry it."""
        self._paused: list[_JobSequence] = []
        """Sequences that gave their memory to others, the one started first in front."""
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Return when the scheduler is closed and no job is left."""
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_working(self) -> bool:
        """Whether its thread is alive."""
        return self._thread.is_alive()

    def _run(self) -> None:
        """Run passes until all is done; an unexpected error ends all jobs, so that none waits."""
        try:
            with self._runner.base.use_threads(self._runner.threads):
                while self.wait_for_work():
                    self.run_pass()
        except Exception as error:
            self._tell(f"error: the engine ended\n{traceback.format_exc()}")
            try:
                self._scheduler.fail_all(
                    error if isinstance(error, DeviceError) else _make_internal_error()
                )
            finally:
                self._on_failure()
            raise

    def run_pass(self) -> None:
        """Run one pass, with the work due before and after it."""
        while self._scheduler.control_queue:
            self._scheduler.control_queue.popleft()()
        self._fail_expired()
        self._resume_paused()
        if not self._paused:
            self._start_sequences()
        self._compute_pass()
        interval = BUSY_SAVE_SECONDS if self.batch.sequences else SAVE_INTERVAL
        self._runner.resources.usage_store.save(interval=interval)
        self._free_memory()
        self._processor.prepare_next()

    def wait_for_work(self) -> bool:
        """Wait for work; return False when the scheduler is closed and empty."""
        scheduler = self._scheduler
        with scheduler.lock:
            is_idle = not (
                self.batch.sequences or self._paused or scheduler.ready or scheduler.control_queue
            )
            if is_idle and not scheduler.is_done:
                scheduler.condition.wait(POLL_SECONDS)
            return not scheduler.is_done

    def _fail_expired(self) -> None:
        """Fail jobs without a row that are cancelled or past their deadline."""
        with self._scheduler.lock:
            late = [state for state in self._scheduler.queue if state.find_stop_reason()]
            for state in late:
                self._scheduler.queue.remove(state)
            late += [
                t for t in self._scheduler.ready if not t.started_count and t.find_stop_reason()
            ]
        for state in late:
            self._fail_if_raises(state, state.check_active)

    def _fail_if_raises(self, state: RequestState, why: Callable[[], None]) -> None:
        try:
            why()
        except ExpertError as error:
            self._scheduler.fail(state, error)

    def _start_sequences(self) -> None:
        """Start sequences of ready jobs, as far as there are rows and memory."""
        while self.batch.free and (state := self._choose_ready()) is not None:
            was_loading = self._scheduler.is_loading
            try:
                self._start_sequence(state)
            except BudgetError as error:
                if self.batch.sequences:
                    self._memory_wait = state, time.monotonic() + _RETRY_SECONDS
                    return  # a running sequence will end and release the missing memory
                if self._reclaim_memory(state):
                    continue
                if self._wait_for_loading() or was_loading:
                    return  # check for other jobs, and for deadlines
                self._fail(state, error)
            except ExpertError as error:
                self._fail(state, error)
            except Exception:  # noqa: BLE001  # a bug ends one job and is logged; others continue
                self._tell(f"error: a sequence could not start\n{traceback.format_exc()}")
                self._fail(state, _make_internal_error())

    def _choose_ready(self) -> RequestState | None:
        """Return the job that gets the next row; None while it waits for memory.

        Answers of one job wait until its first one has read the prompt, where its KV is shared.
        """
        reading = {sequence.consumer for sequence in self._resources if sequence.is_prefilling}
        with self._scheduler.lock:
            ready = (
                one for one in self._scheduler.ready if one.find_stop_reason() or one not in reading
            )
            state = next(ready, None)
        lacked, until = self._memory_wait
        if (
            state is None
            or state is not lacked
            or state.find_stop_reason()
            or not self.batch.sequences
        ):
            return state
        return state if time.monotonic() >= until else None

    def _start_sequence(self, state: RequestState) -> None:
        """Start the next sequence of a job; a cancelled one keeps those that it has."""
        if state.started_count and state.find_stop_reason():
            self._scheduler.mark_running(state)
            self._conclude(state)
            return
        state.check_active()
        prepared, memory, number = state.prepared, state.memory, state.started_count
        assert prepared is not None
        assert memory is not None
        plan, prompt = prepared.planned.result.plan, prepared.prompt
        state.timer.end_stage("queue")
        with ExitStack() as stack:
            scores = _create_prompt_scores(state) if number == 0 else None
            lending = self._runner.open_sequence(
                prepared, memory, cache_key=state.cache_key, scores=scores
            )
            ready = stack.enter_context(lending)
            state.timer.end_stage("load")
            if number == 0:
                state.emit(JobStarted(plan, len(prompt.ids), ready.reused))
            sequence = ready.start_sequence(
                state,
                prompt,
                plan,
                number=number,
                rules=state.job.stop_rules,
                logprobs=state.job.logprobs,
                scores=scores,
            )
            made_with = memory.loads, memory.bytes_moved, self._runner.threads
            # the job's other sequences may still wait for rows
            clock = deepcopy(state.timer)
            state.contexts[number] = GenerationContext(
                prepared, ready, *made_with, clock, ready.routed
            )
            self._resources[sequence] = _SequenceResources(ready, stack.pop_all())
        self.batch.add(sequence)
        self._update_free_rows()  # first: the loader must see that a sequence holds memory
        state.started_count, state.reclaim_count = state.started_count + 1, 0
        self._memory_wait = None, 0.0
        if state.started_count == state.job.answers:
            self._scheduler.mark_running(state)

    def _reclaim_memory(self, state: RequestState | None) -> bool:
        """Take memory from ready jobs and, if idle, from buffers; False if neither has any.

        Jobs give way to one job only a few times: where a device has less memory than its budget,
        that frees nothing that the job needs.
        """
        others = self._list_unstarted(besides=state)
        if state is not None and others:
            state.reclaim_count += 1
            if state.reclaim_count > _MAX_RECLAIMS:
                others = []
        for other in others:
            self._scheduler.requeue(other)
            self._processor.load_again(other)
        return (not self.batch.sequences and self._runner.free_wide_buffers()) or bool(others)

    def _list_unstarted(self, *, besides: RequestState | None) -> list[RequestState]:
        """Return the ready jobs of which no sequence has started."""
        started = {sequence.consumer for sequence in (*self._resources, *self._paused)}
        with self._scheduler.lock:
            ready = list(self._scheduler.ready)
        return [one for one in ready if one is not besides and one not in started]

    def _wait_for_loading(self) -> bool:
        """Wait for a loading job, which may release its memory; False if there is none."""
        with self._scheduler.lock:
            if not self._scheduler.is_loading:
                return False
            self._scheduler.condition.wait(POLL_SECONDS)
            return True

    def _compute_pass(self) -> None:
        """Run one pass, and end finished sequences."""
        try:
            over = self.batch.run_pass()
        except CancelledError as error:  # the engine ends while kernels are compiled
            over = self.batch.fail_all(error)
        except Exception:  # noqa: BLE001  # a bug ends the sequences of a pass; the server goes on
            self._tell(f"error: a pass failed\n{traceback.format_exc()}")
            over = self.batch.fail_all(_make_internal_error())
            self._runner.model.check_integrity()  # or the engine ends: answers would be wrong
        for sequence in over:
            if sequence.error is not None:
                self._fail(sequence.consumer, sequence.error)
            elif sequence in self._resources:  # else another sequence of its job failed
                self._finish(sequence)
        self._update_free_rows()

    def _resume_paused(self) -> None:
        """Resume paused sequences, the one started first in front; cancelled ones end."""
        for sequence, why in [
            (sequence, sequence.consumer.find_stop_reason()) for sequence in self._paused
        ]:
            if why is not None:
                self._paused.remove(sequence)
                sequence.stop(why)
                self._finish(sequence)
        while self._paused and self.batch.free and self._resume(self._paused[0]):
            self.batch.add(self._paused.pop(0))
        with self._scheduler.lock:
            self._scheduler.is_short = bool(self._paused)
        self._update_free_rows()

    def _resume(self, sequence: _JobSequence) -> bool:
        """Allocate KV for a paused sequence; False while there is no memory."""
        state, written = sequence.consumer, sequence.writer.tokens
        prepared, memory = state.prepared, state.memory
        assert prepared is not None
        assert memory is not None
        with ExitStack() as stack:
            scores = (
                None if sequence.scores is None or sequence.scores.is_complete else sequence.scores
            )
            lending = self._runner.open_sequence(
                prepared, memory, cache_key=state.cache_key, generated=written, scores=scores
            )
            try:
                ready = stack.enter_context(lending)
            except BudgetError as error:
                if not (
                    self.batch.sequences or self._reclaim_memory(state) or self._wait_for_loading()
                ):
                    self._fail(state, error)
                return False
            ids = (*prepared.prompt.ids, *written)
            reading = ready.model.start_session(
                ready.kv.cache, ready.plan, scores=None if scores is None else scores.record
            )
            sequence.resume(reading, ready.kv.cache, ids[ready.reused :])
            state.reclaim_count = 0
            self._resources[sequence] = _SequenceResources(ready, stack.pop_all())
        return True

    def _free_memory(self) -> None:
        """Find memory for blocked sequences: from ready jobs, else from the last one added.

        Each job could run alone, so the one that started first always continues.
        """
        if not self.batch.blocked or self._reclaim_memory(None):
            return
        last = self.batch.sequences[-1]
        if len(self.batch.sequences) > 1:
            self._pause(last)
        elif not self._wait_for_loading():
            error = BudgetError("there is not enough memory for the rest of an answer")
            self._fail(last.consumer, error)

    def _pause(self, sequence: _JobSequence) -> None:
        """Remove a sequence from the batch; its KV is kept until the memory is needed."""
        prepared, written = sequence.consumer.prepared, sequence.writer.tokens
        assert prepared is not None
        self.batch.remove(sequence)
        resources = self._resources.pop(sequence)
        resources.ready.kv.complete((*prepared.prompt.ids, *written))
        sequence.pause()
        resources.stack.close()
        self._paused.insert(0, sequence)  # those paused earlier were started later
        with self._scheduler.lock:
            self._scheduler.is_short = True
            self._scheduler.totals.paused += 1
            self._scheduler.notify_freed()
        self._update_free_rows()

    def _finish(self, sequence: _JobSequence) -> None:
        """Store an answer, and keep its KV if it is complete."""
        state, generated = sequence.consumer, sequence.build_output()
        assert state.prepared is not None
        resources = self._resources.pop(sequence, None)  # none while it is paused
        if resources is not None:
            if generated.finish_reason in {"stop", "length"} and self._is_kv_reusable(state):
                resources.ready.kv.complete((*state.prepared.prompt.ids, *generated.tokens))
            sequence.release()
            resources.stack.close()
        state.outputs[sequence.number] = generated
        state.contexts[sequence.number] = _close_context(state.contexts[sequence.number])
        self._conclude(state)

    def _conclude(self, state: RequestState) -> None:
        """Pass a job to the processor when its sequences have ended and none is left to start."""
        if len(state.outputs) == state.started_count and state not in self._scheduler.ready:
            state.stage = "concluding"
            self._forget_own_cache(state)
            self._scheduler.release(state)
            self._processor.conclude(state)

    def _fail(self, state: RequestState, error: ExpertError) -> None:
        """Fail a job with all its sequences.

        Raises:
            DeviceError: when it was the cause, since it ends all other jobs, too.
        """
        self._paused = [sequence for sequence in self._paused if sequence.consumer is not state]
        for sequence in [sequence for sequence in self._resources if sequence.consumer is state]:
            self.batch.remove(sequence)
            resources = self._resources.pop(sequence)
            sequence.release()
            resources.stack.close()
        self._forget_own_cache(state)
        self._memory_wait = None, 0.0
        self._processor.fail(state, error)
        if isinstance(error, DeviceError):
            raise copy(error)

    def _is_kv_reusable(self, state: RequestState) -> bool:
        """Return whether another request, or a sequence of the job to come, may find its KV.

        What nobody can find would only replace KV that others can.
        """
        return (
            state.own_key is None
            or state in self._scheduler.ready
            or any(sequence.consumer is state for sequence in self._paused)
        )

    def _forget_own_cache(self, state: RequestState) -> None:
        """Drop KV that the answers of a job shared and no other request uses."""
        if state.own_key is not None:
            self._runner.resources.forget(state.own_key)

    def _update_free_rows(self) -> None:
        """Tell the scheduler how many sequences may start: it prepares a few more jobs."""
        free, kv_rows = self.batch.free, self._runner.free_kv_rows
        with self._scheduler.lock:
            self._scheduler.free_rows = free if kv_rows is None else min(free, kv_rows)


def _close_context(context: GenerationContext) -> GenerationContext:
    """Return the context for the result, without its plan, whose memory may be reused.

    Routed-expert statistics stop here.
    """
    ready = context.loaded
    assert isinstance(ready, LoadedModel)
    return replace(context, loaded=replace(ready, plan=BASE_ONLY), routed_after=ready.routed)


def _make_internal_error() -> ExpertError:
    return ExpertError("the server failed to answer this", hint="its log says why")


def _create_prompt_scores(state: RequestState) -> PromptLogprobs | None:
    """Return the recorder of a prompt's log-probabilities, if they are requested."""
    top, prepared = state.job.prompt_logprobs, state.prepared
    assert prepared is not None
    if top is None:
        return None
    return PromptLogprobs(prepared.prompt.ids, top=top, virtual=prepared.prompt.virtual)
