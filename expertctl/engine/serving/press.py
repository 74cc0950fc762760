"""`Press`: the thread that computes. It lends keys and values, runs the batch, and ends texts.

No other thread begins or ends a text, so between two passes it may look at all of them.
"""

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy, deepcopy
from dataclasses import dataclass, replace

from expertctl.engine.compose import BASE_ALONE
from expertctl.engine.generate import Writer
from expertctl.engine.lent import Lent
from expertctl.engine.moe.habit_keeper import SECONDS as IDLE_SECONDS
from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.residents import Ready
from expertctl.engine.serving.batch import Batch
from expertctl.engine.serving.board import LOOK_SECONDS, Board
from expertctl.engine.serving.chunk_size import LEAST_CHUNK, LEAST_CHUNK_FROM_DISK
from expertctl.engine.serving.desk import Desk
from expertctl.engine.serving.house import House
from expertctl.engine.serving.job import Started
from expertctl.engine.serving.text import Text
from expertctl.engine.serving.ticket import Ticket
from expertctl.engine.threads import threads
from expertctl.errors import BudgetError, CancelledError, DeviceError, ExpertError
from expertctl.telling import Tell

Broke = Callable[[], None]
BUSY_SECONDS = 600.0
"""How often the habits of a base are kept while texts are written, which wait for that."""
_PAUSE_SECONDS = 0.05
"""How soon a text that lacked memory is tried again, while others are written."""


@dataclass(frozen=True, slots=True)
class _Loan:
    """What one text is written with, until the stack is closed."""

    ready: Ready
    stack: ExitStack


class Press:
    """The owner of the batch and of what is lent to its texts."""

    def __init__(
        self, house: House, board: Board, desk: Desk, *, tell: Tell, broke: Broke = lambda: None
    ) -> None:
        """Begin without a text; the base is in memory. ``broke`` is called if it cannot go on."""
        # each chunk may have experts read from the disk: few large ones read them least often
        least = LEAST_CHUNK if house.model.experts is None else LEAST_CHUNK_FROM_DISK
        self.batch = Batch(house.model, rows=house.settings.rows, least_chunk=least)
        self._house, self._board, self._desk, self._tell = house, board, desk, tell
        self._lent: dict[Text, _Loan] = {}
        self._lacked: tuple[Ticket | None, float] = None, 0.0
        """The job that found too little memory beside others, and when to try it again."""
        self._paused: list[Text] = []
        """Texts that gave their memory to others, the one that began first in front."""
        self._broke = broke
        self._thread = threading.Thread(target=self._work, name="press", daemon=True)

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def join(self) -> None:
        """Return when the board is closed and no job is left."""
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_working(self) -> bool:
        """Whether its thread is alive."""
        return self._thread.is_alive()

    def _work(self) -> None:
        """Go round until all is done; an unforeseen error ends all jobs, so that none waits."""
        packed = self._house.base.backend.name == "packed"
        try:
            with threads(1 if packed else self._house.threads):  # kernels have threads of their own
                self._go_round()
        except Exception as error:
            self._tell(f"error: the engine ended\n{traceback.format_exc()}")
            try:
                self._board.abandon(error if isinstance(error, DeviceError) else _failure())
            finally:
                self._broke()
            raise

    def _go_round(self) -> None:
        while self.has_work():
            self.turn()

    def turn(self) -> None:
        """Do one pass, and what is due before and after it."""
        while self._board.errands:
            self._board.errands.popleft()()
        self._expire()
        self._go_on()
        if not self._paused:
            self._begin_texts()
        self._compute()
        self._house.residents.habits.keep(every=IDLE_SECONDS if self._is_idle else BUSY_SECONDS)
        self._make_room()
        self._desk.prepare_next()

    def has_work(self) -> bool:
        """Wait for something to do; False when the board is closed and empty."""
        board = self._board
        with board.lock:
            is_idle = not (self.batch.texts or self._paused or board.ready or board.errands)
            if is_idle and not board.is_done:
                board.changed.wait(LOOK_SECONDS)
            return not board.is_done

    @property
    def _is_idle(self) -> bool:
        return not self.batch.texts

    def _expire(self) -> None:
        """End jobs without a row that are out of time or no longer wanted."""
        with self._board.lock:
            late = [ticket for ticket in self._board.line if ticket.stopped()]
            for ticket in late:
                self._board.line.remove(ticket)
            late += [t for t in self._board.ready if not t.begun and t.stopped()]
        for ticket in late:
            self._refuse(ticket, ticket.demand_wanted)

    def _refuse(self, ticket: Ticket, why: Callable[[], None]) -> None:
        try:
            why()
        except ExpertError as error:
            self._board.fail(ticket, error)

    def _begin_texts(self) -> None:
        """Give rows to texts of jobs that are ready, as far as there are rows and memory."""
        while self.batch.free and (ticket := self._next_ready()) is not None:
            was_loading = self._board.is_loading
            try:
                self._begin(ticket)
            except BudgetError as error:
                if self.batch.texts:
                    self._lacked = ticket, time.monotonic() + _PAUSE_SECONDS
                    return  # a text of the batch ends and gives back what is missing
                if self._made_room(ticket):
                    continue
                if self._awaits_loading() or was_loading:
                    return  # look for others, and for jobs whose time is over
                self._put_out(ticket, error)
            except ExpertError as error:
                self._put_out(ticket, error)
            except Exception:  # noqa: BLE001  # a bug ends one job and is told; the server goes on
                self._tell(f"error: a text could not begin\n{traceback.format_exc()}")
                self._put_out(ticket, _failure())

    def _next_ready(self) -> Ticket | None:
        """Return the job that gets a row next; None while it has to wait for memory.

        Answers of one job wait until its first one has read the prompt, where that is shared.
        """
        shares = self._house.base.backend.name == "packed"
        reading = {text.ticket for text in self._lent if text.is_reading} if shares else set()
        with self._board.lock:
            ready = (one for one in self._board.ready if one.stopped() or one not in reading)
            ticket = next(ready, None)
        lacked, until = self._lacked
        if ticket is None or ticket is not lacked or ticket.stopped() or not self.batch.texts:
            return ticket
        return ticket if time.monotonic() >= until else None

    def _begin(self, ticket: Ticket) -> None:
        """Begin the next text of a job; one that is no longer wanted keeps those that it has."""
        if ticket.begun and ticket.stopped():
            self._board.has_begun(ticket)
            self._conclude(ticket)
            return
        ticket.demand_wanted()
        prepared, memory, number = ticket.prepared, ticket.memory, ticket.begun
        assert prepared is not None
        assert memory is not None
        plan, prompt = prepared.planned.result.plan, prepared.prompt
        ticket.clock.lap("queue")
        with ExitStack() as stack:
            scores = _scores_of(ticket) if number == 0 else None
            lending = self._house.lent(prepared, memory, cache_key=ticket.cache_key, scores=scores)
            ready = stack.enter_context(lending)
            ticket.clock.lap("load")
            if number == 0:
                ticket.tell(Started(plan, len(prompt.ids), ready.reused))
            text = _new_text(ticket, ready, number, scores)
            made_with = memory.loads, memory.moved, self._house.threads
            # the job's other texts may still wait for rows
            clock = deepcopy(ticket.clock)
            ticket.lents[number] = Lent(prepared, ready, *made_with, clock, ready.routed)
            self._lent[text] = _Loan(ready, stack.pop_all())
        self.batch.add(text)
        self._count_rows()  # first: the loader must see that a text holds memory
        ticket.begun += 1
        self._lacked = None, 0.0
        if ticket.begun == ticket.job.texts:
            self._board.has_begun(ticket)

    def _made_room(self, ticket: Ticket | None) -> bool:
        """Take memory from ready jobs, if idle from buffers, too; False if neither gives any."""
        begun = {text.ticket for text in (*self._lent, *self._paused)}
        with self._board.lock:
            others = [one for one in self._board.ready if one is not ticket and one not in begun]
        for other in others:
            self._board.send_back(other)
            self._desk.load_again(other)
        return (not self.batch.texts and self._house.rest()) or bool(others)

    def _awaits_loading(self) -> bool:
        """Wait for a job that is loading, which may give its memory back; False if none is."""
        with self._board.lock:
            if not self._board.is_loading:
                return False
            self._board.changed.wait(LOOK_SECONDS)
            return True

    def _compute(self) -> None:
        """Do one pass, and end the texts that are over."""
        try:
            over = self.batch.advance()
        except CancelledError as error:  # the engine ends while kernels are compiled
            over = self.batch.abandon(error)
        except Exception:  # noqa: BLE001  # a bug ends the texts of a pass; the server goes on
            self._tell(f"error: a pass failed\n{traceback.format_exc()}")
            over = self.batch.abandon(_failure())
            self._house.model.check_integrity()  # or the engine ends: answers would be wrong
        for text in over:
            if text.error is not None:
                self._put_out(text.ticket, text.error)
            elif text in self._lent:  # else another text of its job failed
                self._end(text)
        self._count_rows()

    def _go_on(self) -> None:
        """Let paused texts go on, the first one first; those that are no longer wanted end."""
        for text, why in [(text, text.ticket.stopped()) for text in self._paused]:
            if why is not None:
                self._paused.remove(text)
                text.give_up(why)
                self._end(text)
        while self._paused and self.batch.free and self._goes_on(self._paused[0]):
            self.batch.add(self._paused.pop(0))
        with self._board.lock:
            self._board.is_short = bool(self._paused)
        self._count_rows()

    def _goes_on(self, text: Text) -> bool:
        """Give a text keys and values again; False while there is no memory for them."""
        ticket, written = text.ticket, text.writer.tokens
        prepared, memory = ticket.prepared, ticket.memory
        assert prepared is not None
        assert memory is not None
        with ExitStack() as stack:
            scores = None if text.scores is None or text.scores.is_complete else text.scores
            lending = self._house.lent(
                prepared, memory, cache_key=ticket.cache_key, written=written, scores=scores
            )
            try:
                ready = stack.enter_context(lending)
            except BudgetError as error:
                if not (self.batch.texts or self._made_room(ticket) or self._awaits_loading()):
                    self._put_out(ticket, error)
                return False
            ids = (*prepared.prompt.ids, *written)
            reading = ready.model.reading(
                ready.kv.cache, ready.plan, scores=None if scores is None else scores.take
            )
            text.go_on(reading, ready.kv.cache, ids[ready.reused :])
            self._lent[text] = _Loan(ready, stack.pop_all())
        return True

    def _make_room(self) -> None:
        """Find memory for texts that could not go on: from ready jobs, else the text added last.

        Each job could run alone, so the one that began first goes on in any case.
        """
        if not self.batch.lacking or self._made_room(None):
            return
        last = self.batch.texts[-1]
        if len(self.batch.texts) > 1:
            self._pause(last)
        elif not self._awaits_loading():
            self._put_out(last.ticket, BudgetError("there is no memory for the rest of an answer"))

    def _pause(self, text: Text) -> None:
        """Take a text out of the batch; what it has read is kept until the memory is needed."""
        assert text.ticket.prepared is not None
        self.batch.remove(text)
        loan = self._lent.pop(text)
        loan.ready.kv.complete((*text.ticket.prepared.prompt.ids, *text.writer.tokens))
        text.pause()
        loan.stack.close()
        self._paused.insert(0, text)  # texts that paused before began after it
        with self._board.lock:
            self._board.is_short = True
            self._board.totals.paused += 1
            self._board.tell_freed()
        self._count_rows()

    def _end(self, text: Text) -> None:
        """Take an answer, and keep its keys and values if it is complete."""
        ticket, generated = text.ticket, text.generated()
        assert ticket.prepared is not None
        loan = self._lent.pop(text, None)  # none while it pauses
        if loan is not None:
            if generated.finish_reason in {"stop", "length"}:
                loan.ready.kv.complete((*ticket.prepared.prompt.ids, *generated.tokens))
            loan.stack.close()
        ticket.ended[text.number] = generated
        ticket.lents[text.number] = _ended(ticket.lents[text.number])
        self._conclude(ticket)

    def _conclude(self, ticket: Ticket) -> None:
        """Hand a job to the desk when all its texts have ended and none is still to begin."""
        if len(ticket.ended) == ticket.begun and ticket not in self._board.ready:
            ticket.stage = "concluding"
            self._forget_own(ticket)
            self._board.give_back(ticket)
            self._desk.conclude(ticket)

    def _put_out(self, ticket: Ticket, error: ExpertError) -> None:
        """End a job with all its texts.

        Raises:
            DeviceError: when that ended it, for it ends all other jobs, too.
        """
        self._paused = [text for text in self._paused if text.ticket is not ticket]
        for text in [text for text in self._lent if text.ticket is ticket]:
            self.batch.remove(text)
            self._lent.pop(text).stack.close()
        self._forget_own(ticket)
        self._lacked = None, 0.0
        self._desk.fail(ticket, error)
        if isinstance(error, DeviceError):
            raise copy(error)

    def _forget_own(self, ticket: Ticket) -> None:
        """Drop what the answers of a job shared and no other request asks for."""
        if ticket.own_key is not None:
            self._house.residents.forget(ticket.own_key)

    def _count_rows(self) -> None:
        with self._board.lock:
            self._board.free_rows = self.batch.free


def _ended(lent: Lent) -> Lent:
    """Return what is told of an answer, without its plan, whose memory others may have now.

    What becomes of routed experts from now on is not told of it.
    """
    ready = lent.ready
    assert isinstance(ready, Ready)
    return replace(lent, ready=replace(ready, plan=BASE_ALONE), routed_after=ready.routed)


def _failure() -> ExpertError:
    return ExpertError("the server failed to answer this", hint="its log says why")


def _new_text(ticket: Ticket, ready: Ready, number: int, scores: PromptScores | None) -> Text:
    """Return an answer of a job, whose prompt is read from where kept keys and values end."""
    assert ticket.prepared is not None
    plan, prompt = ticket.prepared.planned.result.plan, ticket.prepared.prompt
    tokenizer, take = ready.base.tokenizer, None if scores is None else scores.take
    return Text(
        ticket,
        number,
        ready.model.reading(ready.kv.cache, ready.plan, scores=take),
        Writer(
            tokenizer,
            plan.params,
            seed=plan.seed + number,
            max_tokens=prompt.max_tokens,
            rules=ticket.job.stop_rules,
            end_ids=prompt.end_ids,
        ),
        room=ready.kv.cache,
        unread=prompt.ids[ready.reused :],
        tokenizer=tokenizer,
        scores=scores,
    )


def _scores_of(ticket: Ticket) -> PromptScores | None:
    """Return what the log-probabilities of a prompt are recorded in, if they are wanted."""
    top, prepared = ticket.job.prompt_logprobs, ticket.prepared
    assert prepared is not None
    if top is None:
        return None
    return PromptScores(prepared.prompt.ids, top=top, virtual=prepared.prompt.virtual)
