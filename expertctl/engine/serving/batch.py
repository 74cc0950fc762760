"""`Batch`: the texts that are being written on one model, each row with a plan of its own.

One pass reads a chunk of one prompt and then one token of every text that is past its prompt. Where
the model can be stopped between layers, these texts take steps there, too: they wait about one step
for a chunk, however long the prompt (`chunk_size`). One thread computes. What a text gets depends
on other texts of the batch in the last bits of floating point only, and on a base that kernels run
not at all: neither the batch nor the size of chunks changes a bit there.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from expertctl.engine.backend import Model
from expertctl.engine.decoder import PREFILL_CHUNK, PrefillResult
from expertctl.engine.generate import Reading
from expertctl.engine.serving.chunk_size import (
    LEAST_CHUNK,
    Chunk,
    choose_chunk_size,
    is_step_due,
)
from expertctl.engine.serving.text import Text
from expertctl.errors import ExpertError

RECENT_STEPS = 8
"""The duration of so many steps is known, to choose the size of chunks by."""


@dataclass(slots=True)
class Counts:
    """What was computed so far."""

    steps: int = 0
    step_rows: int = 0
    """Rows of all steps: divided by steps, how many texts shared one."""
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    step_seconds: float = 0.0


class Batch:
    """The owner of the rows."""

    def __init__(
        self,
        model: Model,
        *,
        rows: int,
        least_chunk: int = LEAST_CHUNK,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin without a text; beside others a prompt is read by ``least_chunk`` tokens at least.

        ``clock`` returns seconds.
        """
        self.rows, self.counts = rows, Counts()
        self._least_chunk, self._clock = least_chunk, clock
        self._step_seconds = deque[float](maxlen=RECENT_STEPS)
        self._stepped = self._part_begun = 0.0
        """When texts took a step or began to wait for one; when a part of a pass began."""
        self.lacking: list[Text] = []
        """Texts that could not go on in the last pass for want of memory."""
        self._model = model
        self._texts: list[Text] = []
        self._pass = 0

    @property
    def texts(self) -> Sequence[Text]:
        """The texts that are in it."""
        return tuple(self._texts)

    @property
    def free(self) -> int:
        """How many more texts there is room for."""
        return self.rows - len(self._texts)

    def add(self, text: Text) -> None:
        """Take a text in."""
        assert self.free > 0, "the caller has looked"
        text.served = self._pass
        self._texts.append(text)

    def advance(self) -> list[Text]:
        """Do one pass; return the texts that ended or failed, which are out of it now."""
        self._pass += 1
        self.lacking = []
        self._stop()
        self._read()
        self._step()
        over = [text for text in self._texts if text.is_over]
        self._texts = [text for text in self._texts if not text.is_over]
        return over

    def abandon(self, error: ExpertError) -> list[Text]:
        """Let all texts fail, and return them."""
        over, self._texts = self._texts, []
        for text in over:
            text.error = error
        return over

    def remove(self, text: Text) -> None:
        """Remove a text, if it is in."""
        self._texts = [other for other in self._texts if other is not text]

    def check_integrity(self) -> None:
        """Assert what holds between passes."""
        assert len(self._texts) <= self.rows
        assert not any(text.is_over for text in self._texts)
        assert len({id(text.reading) for text in self._texts}) == len(self._texts)

    def _stop(self) -> None:
        """End texts that are no longer wanted or took too long."""
        for text in self._texts:
            why = text.ticket.stopped()
            if why is not None:
                text.give_up(why)

    def _read(self) -> None:
        """Read a chunk of the prompt that was served longest ago."""
        waiting = [text for text in self._texts if text.is_reading and not text.is_over]
        if not waiting:
            return
        text = min(waiting, key=lambda text: text.served)
        text.served = self._pass
        before, begun, stepped = text.unread, self._clock(), self.counts.step_seconds
        if len(waiting) == len(self._texts):
            self._attempt([text], partial(text.read, PREFILL_CHUNK))
        else:
            most = self._chunk_size(text)
            self._attempt([text], partial(text.read, most, prefill=self._prefill_beside))
        stepped = self.counts.step_seconds - stepped
        text.last_chunk = chunk = Chunk(before - text.unread, self._clock() - begun - stepped)
        self.counts.prompt_tokens += chunk.tokens
        self.counts.prompt_seconds += chunk.seconds

    def _chunk_size(self, text: Text) -> int:
        """Return how many tokens of a prompt are read while other texts are decoded."""
        return choose_chunk_size(
            text.last_chunk,
            self._step_seconds,
            parts=self._model.prefill_parts,
            least=self._least_chunk,
        )

    def _prefill_beside(self, reading: Reading, ids: Sequence[int]) -> PrefillResult:
        """Read a chunk; other texts step between its layers, which is no part of its time."""
        self._stepped = self._part_begun = self._clock()
        before = self.counts.step_seconds
        result = self._model.prefill(reading, ids, between_layers=self._step_if_due)
        stepped = self.counts.step_seconds - before
        return replace(result, ms=result.ms - stepped * 1e3)

    def _step_if_due(self) -> None:
        """Between two layers of a chunk, have other texts take a step if they waited for long."""
        now = self._clock()
        part, self._part_begun = now - self._part_begun, now
        if is_step_due(waited=now - self._stepped, part=part, step_seconds=self._step_seconds):
            self._step()
            self._stepped = self._part_begun = self._clock()

    def _step(self) -> None:
        """Read one token of every text that is past its prompt, and draw the next ones."""
        written = [text for text in self._texts if _is_written(text)]
        texts = [text for text in written if text.has_room()]
        self.lacking = [text for text in written if text not in texts]
        if not texts:
            return
        begun = self._clock()
        self._attempt(texts, partial(self._step_together, texts))
        seconds = self._clock() - begun
        self._step_seconds.append(seconds)
        for text in texts:
            text.count_step(seconds * 1e3)
        self.counts.steps += 1
        self.counts.step_rows += len(texts)
        self.counts.step_seconds += seconds

    def _step_together(self, texts: Sequence[Text]) -> None:
        scores = self._model.step([(text.reading, text.last_token) for text in texts])
        for text, logits in zip(texts, scores, strict=True):
            self._attempt([text], partial(text.take, logits))

    def _attempt(self, texts: Sequence[Text], work: Callable[[], None]) -> None:
        """Do something for texts; if it fails, they fail with it."""
        try:
            work()
        except ExpertError as error:
            for text in texts:
                text.error = error


def _is_written(text: Text) -> bool:
    """Tell whether a text waits for its next token."""
    return not (text.is_reading or text.is_over or text.ticket.stopped())
