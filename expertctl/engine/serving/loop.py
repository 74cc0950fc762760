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
from expertctl.engine.generation import OutputWriter
from expertctl.engine.moe.usage_store import SAVE_INTERVAL
from expertctl.engine.resources import LoadedModel
from expertctl.engine.result_builder import GenerationContext
from expertctl.engine.serving.model_runner import ModelRunner
from expertctl.engine.serving.processor import RequestProcessor
from expertctl.engine.serving.request import (
    MIN_CHUNK,
    MIN_CHUNK_FROM_DISK,
    JobStarted,
    RequestState,
    RunningSequence,
)
from expertctl.engine.serving.running_batch import RunningBatch
from expertctl.engine.serving.scheduler import POLL_SECONDS, Scheduler
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.errors import BudgetError, CancelledError, DeviceError, ExpertError, Notify

FailureCallback = Callable[[], None]
BUSY_SAVE_SECONDS = 600.0
"""Interval for saving expert usage while sequences are decoded, which wait for it."""
_RETRY_SECONDS = 0.05
"""Delay before a sequence that lacked memory is retried, while others are decoded."""


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
        self.batch = RunningBatch(runner.model, rows=runner.rows, min_chunk=least)
        self._runner, self._scheduler = runner, scheduler
        self._processor, self._tell = processor, tell
        self._resources: dict[RunningSequence, _SequenceResources] = {}
        self._memory_wait: tuple[RequestState | None, float] = None, 0.0
        """The job that lacked memory because of others, and when to retry it."""
        self._paused: list[RunningSequence] = []
        """Sequences that gave their memory to others, the one started first in front."""
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="press", daemon=True)

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
            late = [ticket for ticket in self._scheduler.queue if ticket.find_stop_reason()]
            for ticket in late:
                self._scheduler.queue.remove(ticket)
            late += [
                t for t in self._scheduler.ready if not t.started_count and t.find_stop_reason()
            ]
        for ticket in late:
            self._fail_if_raises(ticket, ticket.check_active)

    def _fail_if_raises(self, ticket: RequestState, why: Callable[[], None]) -> None:
        try:
            why()
        except ExpertError as error:
            self._scheduler.fail(ticket, error)

    def _start_sequences(self) -> None:
        """Start sequences of ready jobs, as far as there are rows and memory."""
        while self.batch.free and (ticket := self._choose_ready()) is not None:
            was_loading = self._scheduler.is_loading
            try:
                self._start_sequence(ticket)
            except BudgetError as error:
                if self.batch.sequences:
                    self._memory_wait = ticket, time.monotonic() + _RETRY_SECONDS
                    return  # a running sequence will end and release the missing memory
                if self._reclaim_memory(ticket):
                    continue
                if self._wait_for_loading() or was_loading:
                    return  # check for other jobs, and for deadlines
                self._fail(ticket, error)
            except ExpertError as error:
                self._fail(ticket, error)
            except Exception:  # noqa: BLE001  # a bug ends one job and is logged; others continue
                self._tell(f"error: a text could not begin\n{traceback.format_exc()}")
                self._fail(ticket, _make_internal_error())

    def _choose_ready(self) -> RequestState | None:
        """Return the job that gets the next row; None while it waits for memory.

        Answers of one job wait until its first one has read the prompt, where its KV is shared.
        """
        shares = self._runner.base.backend.name != "cuda"
        reading = (
            {text.ticket for text in self._resources if text.is_prefilling} if shares else set()
        )
        with self._scheduler.lock:
            ready = (
                one for one in self._scheduler.ready if one.find_stop_reason() or one not in reading
            )
            ticket = next(ready, None)
        lacked, until = self._memory_wait
        if (
            ticket is None
            or ticket is not lacked
            or ticket.find_stop_reason()
            or not self.batch.sequences
        ):
            return ticket
        return ticket if time.monotonic() >= until else None

    def _start_sequence(self, ticket: RequestState) -> None:
        """Start the next sequence of a job; a cancelled one keeps those that it has."""
        if ticket.started_count and ticket.find_stop_reason():
            self._scheduler.mark_running(ticket)
            self._conclude(ticket)
            return
        ticket.check_active()
        prepared, memory, number = ticket.prepared, ticket.memory, ticket.started_count
        assert prepared is not None
        assert memory is not None
        plan, prompt = prepared.planned.result.plan, prepared.prompt
        ticket.timer.end_stage("queue")
        with ExitStack() as stack:
            scores = _create_prompt_scores(ticket) if number == 0 else None
            lending = self._runner.open_sequence(
                prepared, memory, cache_key=ticket.cache_key, scores=scores
            )
            ready = stack.enter_context(lending)
            ticket.timer.end_stage("load")
            if number == 0:
                ticket.emit(JobStarted(plan, len(prompt.ids), ready.reused))
            text = _build_sequence(ticket, ready, number, scores)
            made_with = memory.loads, memory.bytes_moved, self._runner.threads
            # the job's other sequences may still wait for rows
            clock = deepcopy(ticket.timer)
            ticket.contexts[number] = GenerationContext(
                prepared, ready, *made_with, clock, ready.routed
            )
            self._resources[text] = _SequenceResources(ready, stack.pop_all())
        self.batch.add(text)
        self._update_free_rows()  # first: the loader must see that a sequence holds memory
        ticket.started_count += 1
        self._memory_wait = None, 0.0
        if ticket.started_count == ticket.job.answers:
            self._scheduler.mark_running(ticket)

    def _reclaim_memory(self, ticket: RequestState | None) -> bool:
        """Take memory from ready jobs and, if idle, from buffers; False if neither has any."""
        started = {text.ticket for text in (*self._resources, *self._paused)}
        with self._scheduler.lock:
            others = [
                one for one in self._scheduler.ready if one is not ticket and one not in started
            ]
        for other in others:
            self._scheduler.requeue(other)
            self._processor.load_again(other)
        return (not self.batch.sequences and self._runner.free_wide_buffers()) or bool(others)

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
        for text in over:
            if text.error is not None:
                self._fail(text.ticket, text.error)
            elif text in self._resources:  # else another sequence of its job failed
                self._finish(text)
        self._update_free_rows()

    def _resume_paused(self) -> None:
        """Resume paused sequences, the one started first in front; cancelled ones end."""
        for text, why in [(text, text.ticket.find_stop_reason()) for text in self._paused]:
            if why is not None:
                self._paused.remove(text)
                text.stop(why)
                self._finish(text)
        while self._paused and self.batch.free and self._resume(self._paused[0]):
            self.batch.add(self._paused.pop(0))
        with self._scheduler.lock:
            self._scheduler.is_short = bool(self._paused)
        self._update_free_rows()

    def _resume(self, text: RunningSequence) -> bool:
        """Allocate KV for a paused sequence; False while there is no memory."""
        ticket, written = text.ticket, text.writer.tokens
        prepared, memory = ticket.prepared, ticket.memory
        assert prepared is not None
        assert memory is not None
        with ExitStack() as stack:
            scores = None if text.scores is None or text.scores.is_complete else text.scores
            lending = self._runner.open_sequence(
                prepared, memory, cache_key=ticket.cache_key, generated=written, scores=scores
            )
            try:
                ready = stack.enter_context(lending)
            except BudgetError as error:
                if not (
                    self.batch.sequences or self._reclaim_memory(ticket) or self._wait_for_loading()
                ):
                    self._fail(ticket, error)
                return False
            ids = (*prepared.prompt.ids, *written)
            reading = ready.model.start_session(
                ready.kv.cache, ready.plan, scores=None if scores is None else scores.record
            )
            text.resume(reading, ready.kv.cache, ids[ready.reused :])
            self._resources[text] = _SequenceResources(ready, stack.pop_all())
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
            self._fail(last.ticket, error)

    def _pause(self, text: RunningSequence) -> None:
        """Remove a sequence from the batch; its KV is kept until the memory is needed."""
        assert text.ticket.prepared is not None
        self.batch.remove(text)
        resources = self._resources.pop(text)
        resources.ready.kv.complete((*text.ticket.prepared.prompt.ids, *text.writer.tokens))
        text.pause()
        resources.stack.close()
        self._paused.insert(0, text)  # those paused earlier were started later
        with self._scheduler.lock:
            self._scheduler.is_short = True
            self._scheduler.totals.paused += 1
            self._scheduler.notify_freed()
        self._update_free_rows()

    def _finish(self, text: RunningSequence) -> None:
        """Store an answer, and keep its KV if it is complete."""
        ticket, generated = text.ticket, text.build_output()
        assert ticket.prepared is not None
        resources = self._resources.pop(text, None)  # none while it is paused
        if resources is not None:
            if generated.finish_reason in {"stop", "length"}:
                resources.ready.kv.complete((*ticket.prepared.prompt.ids, *generated.tokens))
            resources.stack.close()
        ticket.outputs[text.number] = generated
        ticket.contexts[text.number] = _close_context(ticket.contexts[text.number])
        self._conclude(ticket)

    def _conclude(self, ticket: RequestState) -> None:
        """Pass a job to the processor when its sequences have ended and none is left to start."""
        if len(ticket.outputs) == ticket.started_count and ticket not in self._scheduler.ready:
            ticket.stage = "concluding"
            self._forget_own_cache(ticket)
            self._scheduler.release(ticket)
            self._processor.conclude(ticket)

    def _fail(self, ticket: RequestState, error: ExpertError) -> None:
        """Fail a job with all its sequences.

        Raises:
            DeviceError: when it was the cause, since it ends all other jobs, too.
        """
        self._paused = [text for text in self._paused if text.ticket is not ticket]
        for text in [text for text in self._resources if text.ticket is ticket]:
            self.batch.remove(text)
            self._resources.pop(text).stack.close()
        self._forget_own_cache(ticket)
        self._memory_wait = None, 0.0
        self._processor.fail(ticket, error)
        if isinstance(error, DeviceError):
            raise copy(error)

    def _forget_own_cache(self, ticket: RequestState) -> None:
        """Drop KV that the answers of a job shared and no other request uses."""
        if ticket.own_key is not None:
            self._runner.resources.forget(ticket.own_key)

    def _update_free_rows(self) -> None:
        with self._scheduler.lock:
            self._scheduler.free_rows = self.batch.free


def _close_context(context: GenerationContext) -> GenerationContext:
    """Return the context for the result, without its plan, whose memory may be reused.

    Routed-expert statistics stop here.
    """
    ready = context.loaded
    assert isinstance(ready, LoadedModel)
    return replace(context, loaded=replace(ready, plan=BASE_ONLY), routed_after=ready.routed)


def _make_internal_error() -> ExpertError:
    return ExpertError("the server failed to answer this", hint="its log says why")


def _build_sequence(
    ticket: RequestState, ready: LoadedModel, number: int, scores: PromptLogprobs | None
) -> RunningSequence:
    """Return an answer of a job, whose prompt is read from the end of the reused KV."""
    assert ticket.prepared is not None
    plan, prompt = ticket.prepared.planned.result.plan, ticket.prepared.prompt
    tokenizer, take = ready.base.tokenizer, None if scores is None else scores.record
    return RunningSequence(
        ticket,
        number,
        ready.model.start_session(ready.kv.cache, ready.plan, scores=take),
        OutputWriter(
            tokenizer,
            plan.params,
            seed=plan.seed + number,
            max_tokens=prompt.max_tokens,
            rules=ticket.job.stop_rules,
            end_ids=prompt.end_ids,
        ),
        cache=ready.kv.cache,
        unread=prompt.ids[ready.reused :],
        tokenizer=tokenizer,
        scores=scores,
    )


def _create_prompt_scores(ticket: RequestState) -> PromptLogprobs | None:
    """Return the recorder of a prompt's log-probabilities, if they are requested."""
    top, prepared = ticket.job.prompt_logprobs, ticket.prepared
    assert prepared is not None
    if top is None:
        return None
    return PromptLogprobs(prepared.prompt.ids, top=top, virtual=prepared.prompt.virtual)
