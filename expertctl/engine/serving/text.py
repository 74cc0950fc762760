"""`Text`: one answer that is being written, in its row of the batch."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from expertctl.engine.decoder import PrefillResult
from expertctl.engine.generate import Generated, Reading, Writer
from expertctl.engine.kv_room import KVRoom
from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.serving.chunk_size import Chunk
from expertctl.engine.serving.job import Drawn, Likely, Piece
from expertctl.engine.serving.ticket import Stopped, Ticket
from expertctl.engine.tokenizer import Tokenizer
from expertctl.errors import BudgetError, ExpertError

Prefill = Callable[[Reading, Sequence[int]], PrefillResult]


def prefill_at_once(reading: Reading, ids: Sequence[int]) -> PrefillResult:
    """Read a part of a prompt in one go."""
    return reading.prefill(ids)


class Text:
    """First its prompt is read, a stretch at a time, then it is written, token by token."""

    def __init__(
        self,
        ticket: Ticket,
        number: int,
        reading: Reading,
        writer: Writer,
        *,
        room: KVRoom,
        unread: Sequence[int],
        tokenizer: Tokenizer,
        scores: PromptScores | None = None,
    ) -> None:
        """Begin with ``unread`` tokens of the prompt, at least one.

        ``scores`` is filled in by ``reading``, and told with the first piece.
        """
        self.ticket, self.number, self.writer = ticket, number, writer
        self.go_on(reading, room, unread)
        self.served = 0
        """In which pass it was served last."""
        self.last_chunk: Chunk | None = None
        """What of its prompt was read last."""
        self.error: ExpertError | None = None
        """Why it cannot go on."""
        self.scores = scores
        self._untold = scores
        self._tokenizer, self._is_again = tokenizer, False
        self._begun = time.perf_counter()
        self._prefilled, self._prefill_ms = 0, 0.0
        self._first_ms: float | None = None
        self._decode_ms, self._steps = 0.0, 0

    def go_on(self, reading: Reading, room: KVRoom, unread: Sequence[int]) -> None:
        """Take keys and values of all tokens but ``unread``, of which there is one at least."""
        assert unread, "at least one token is read, for its scores"
        self.reading, self.room, self._unread = reading, room, list(unread)

    def pause(self) -> None:
        """Let go of its keys and values; what it reads again is counted as writing."""
        del self.reading, self.room
        self._unread, self._is_again = [], bool(self.writer.tokens)

    def has_room(self) -> bool:
        """Take memory for the next token; tell whether there is enough."""
        try:
            self.room.require(1)
        except BudgetError:
            return False
        return True

    @property
    def is_reading(self) -> bool:
        """Whether part of its prompt is still unread."""
        return bool(self._unread)

    @property
    def unread(self) -> int:
        """How many tokens of its prompt are left."""
        return len(self._unread)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is written."""
        return self.writer.finish_reason is not None or self.error is not None

    @property
    def last_token(self) -> int:
        """The token that is read next, while the text is written."""
        return self.writer.tokens[-1]

    def read(self, most: int, *, prefill: Prefill = prefill_at_once) -> None:
        """Read so many tokens of the prompt at most; after its last, draw the first of the answer.

        Raises:
            ExpertError: when its scores are not numbers.
        """
        result = prefill(self.reading, self._unread[:most])  # it is being read meanwhile
        self._unread = self._unread[most:]
        if self._is_again:
            self._decode_ms += result.ms
        else:
            self._prefilled += result.tokens
            self._prefill_ms += result.ms
        if self._unread:
            return
        if self.writer.max_tokens == 0:
            self.writer.end_unwritten()
            self._tell("", ())
        else:
            self.take(result.logits)
        self._first_ms = self._first_ms or self._ms()

    def count_step(self, ms: float) -> None:
        """Count a step that it took part in."""
        self._decode_ms, self._steps = self._decode_ms + ms, self._steps + 1

    def take(self, logits: Tensor) -> None:
        """Draw the next token from scores [vocab], and tell what is certain now.

        Raises:
            IncompatibleError: when they are not numbers.
        """
        wanted, known = self.ticket.job.logprobs, len(self.writer.tokens)
        text = self.writer.take(logits)
        drawn: tuple[Drawn, ...] = ()
        if wanted is not None and len(self.writer.tokens) > known:
            drawn = (_drawn(self.writer.tokens[-1], logits, wanted, self._tokenizer),)
        self._tell(text, drawn)

    def give_up(self, why: Stopped) -> None:
        """End it where it is."""
        self._unread = []
        self._tell(self.writer.give_up(why), ())

    def generated(self) -> Generated:
        """Return what came of it, once it has ended."""
        reason, first_ms = self.writer.finish_reason, self._first_ms
        assert reason is not None, "a text that goes on is not generated"
        return Generated(
            text="".join(self.writer.pieces),
            tokens=tuple(self.writer.tokens),
            finish_reason=reason,
            prefill_tokens=self._prefilled,
            prefill_ms=self._prefill_ms,
            first_token_ms=self._ms() if first_ms is None else first_ms,
            decode_ms=self._decode_ms,
            decode_steps=self._steps,
            stopped_by=self.writer.stopped_by,
        )

    def _ms(self) -> float:
        """Milliseconds since it began."""
        return (time.perf_counter() - self._begun) * 1e3

    def _tell(self, text: str, drawn: tuple[Drawn, ...]) -> None:
        prompt = self._untold if self.scores is not None and self.scores.is_complete else None
        if text or drawn or prompt is not None:
            self.ticket.tell(Piece(self.number, text, drawn, len(self.writer.tokens), prompt))
        if prompt is not None:
            self._untold = None


def _drawn(token: int, logits: Tensor, most: int, tokenizer: Tokenizer) -> Drawn:
    """Return a token with its probability, by the model alone: before temperature and penalties."""
    scores: np.ndarray[Any, Any] = logits.float().numpy().astype(np.float64)
    best = scores.max()
    scores -= best + np.log(np.exp(scores - best).sum())
    top = np.argpartition(scores, -most)[-most:].tolist() if most else []
    order = sorted(top, key=lambda other: (-scores[other], other))

    def likely(one: int) -> Likely:
        return Likely(one, tokenizer.decode([one]), float(scores[one]))

    return Drawn(likely(token), tuple(likely(one) for one in order))
