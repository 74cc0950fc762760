"""`Batch`: the texts that are being written on one model, each row with a plan of its own.

One pass reads a stretch of one prompt and then one token of every text that is past its prompt, so
a long prompt delays other texts by one stretch a pass at most. One thread computes. What a text
gets depends on other texts of the batch in the last bits of floating point only, and with a
deterministic base not at all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from expertctl.engine.backend import Model
from expertctl.engine.serving.text import Text
from expertctl.errors import ExpertError

STRETCH = 512
"""How many tokens of a prompt are read at a time when no text waits for its next token."""
BESIDE = 128
"""The same when one does."""


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

    def __init__(self, model: Model, *, rows: int) -> None:
        """Begin without a text."""
        self.rows, self.counts = rows, Counts()
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
        """Read a stretch of the prompt that was served longest ago."""
        waiting = [text for text in self._texts if text.is_reading and not text.is_over]
        if not waiting:
            return
        text = min(waiting, key=lambda text: text.served)
        text.served = self._pass
        most = BESIDE if len(waiting) < len(self._texts) else STRETCH
        before, begun = text.unread, time.perf_counter()
        self._attempt([text], partial(text.read, most))
        self.counts.prompt_tokens += before - text.unread
        self.counts.prompt_seconds += time.perf_counter() - begun

    def _step(self) -> None:
        """Read one token of every text that is past its prompt, and draw the next ones."""
        written = [text for text in self._texts if not text.is_reading and not text.is_over]
        texts = [text for text in written if text.has_room()]
        self.lacking = [text for text in written if text not in texts]
        if not texts:
            return
        begun = time.perf_counter()
        self._attempt(texts, partial(self._step_together, texts))
        seconds = time.perf_counter() - begun
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
