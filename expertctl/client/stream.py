"""Answers that come piece by piece: what their events mean, and reading them in a thread."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx2

from expertctl.client.refusal import failure_of
from expertctl.client.result import InferResult, Piece, Started
from expertctl.client.server import MAX_ANSWER, Server, decoded, translated
from expertctl.errors import NoAnswerError, UnreachableError

WHAT = "POST /v1/infer"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that has become certain."""

    text: str


class Story:
    """What the events of one stream have told so far."""

    def __init__(self) -> None:
        """Begin before the first event."""
        self.started: Started | None = None
        self.result: InferResult | None = None

    def take(self, event: httpx2.ServerSentEvent) -> Chunk | None:
        """Take an event; return text if it has some.

        Raises:
            ExpertError: when it says that there is no more of the answer.
        """
        data = event.data.encode("utf-8", "replace")
        match event.event:
            case "started":
                self.started = decoded(data, Started, what=WHAT)
            case "piece":
                return Chunk(decoded(data, Piece, what=WHAT).text)
            case "finished":
                self.result = decoded(data, InferResult, what=WHAT)
            case "failed" | "error":
                raise failure_of(data)
            case _:
                pass  # what newer servers tell besides
        return None

    def demand_result(self) -> InferResult:
        """Return the whole answer.

        Raises:
            NoAnswerError: when the stream is not at its end.
        """
        if self.result is None:
            raise NoAnswerError("the answer is not whole yet", hint="read the stream to its end")
        return self.result

    def end(self) -> None:
        """Say that no more events come.

        Raises:
            UnreachableError: when the answer is not whole.
        """
        if self.result is None:
            raise UnreachableError(f"{WHAT}: the answer broke off", hint="ask again")


class InferStream:
    """An answer as it is written: iterate over its chunks, then its ``result`` is at hand.

    Leaving early, by ``close`` or the end of a ``with`` block, ends the work of the server, too.
    """

    def __init__(self, open_response: Callable[[], httpx2.Response], server: Server) -> None:
        """Send nothing before the first chunk is wanted."""
        self._story = Story()
        self._chunks = self._read(open_response, server)

    @property
    def started(self) -> Started | None:
        """The job and its plan, once the first chunk is here."""
        return self._story.started

    @property
    def result(self) -> InferResult:
        """The whole answer.

        Raises:
            NoAnswerError: when the stream was not read to its end.
        """
        return self._story.demand_result()

    def __iter__(self) -> Self:
        """Read on from here."""
        return self

    def __next__(self) -> Chunk:
        """Wait for more text.

        Raises:
            ExpertError: when it is refused, or fails on the way.
        """
        return next(self._chunks)

    def __enter__(self) -> Self:
        """Begin; nothing is sent yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave, wherever it is."""
        self.close()

    def close(self) -> None:
        """End it where it is."""
        self._chunks.close()

    def _read(
        self, open_response: Callable[[], httpx2.Response], server: Server
    ) -> Generator[Chunk, None, None]:
        response = open_response()
        try:
            with translated(WHAT, server):
                for event in httpx2.EventSource(response, max_event_size=MAX_ANSWER):
                    if chunk := self._story.take(event):
                        yield chunk
            self._story.end()
        finally:
            response.close()
