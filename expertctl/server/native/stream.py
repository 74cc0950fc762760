"""The events of a stream: ``started``, ``piece`` by ``piece``, then ``finished`` or ``failed``."""

from collections.abc import AsyncIterator

import msgspec
from starlette.types import Scope

from expertctl.engine.serving.job import Event, Failed, Finished, Piece, Started
from expertctl.errors import ExpertError
from expertctl.schema.strict_json import JsonObject
from expertctl.server.error_bodies import error_body
from expertctl.server.generation import Jobs, events_of
from expertctl.server.json_filter import JsonFilter
from expertctl.server.native.answer import answer_of, piece_of, started_of
from expertctl.server.native.call import Call, given_out
from expertctl.server.sse import named_event


async def infer_lines(jobs: Jobs, call: Call, scope: Scope) -> AsyncIterator[bytes]:
    """Begin the job of a call and yield the lines of its stream.

    Raises:
        ExpertError: when it is refused, or fails before its first event was sent.
    """
    begun, json = False, JsonFilter() if call.json_asked else None
    try:
        async with events_of(jobs, call.job) as events:
            async for event in events:
                for one in (event,) if json is None else given_out(event, json):
                    if line := _line(call, one):
                        yield line
                        begun = True
    except ExpertError as error:
        if not begun:
            raise
        yield _named("failed", error_body(error, scope))


def _line(call: Call, event: Event) -> bytes:
    match event:
        case Started():
            return _named("started", started_of(call, event))
        case Piece():
            return _named("piece", piece_of(event)) if event.text else b""
        case Finished():
            return _named("finished", answer_of(call, event))
        case Failed():
            return b""  # it is raised


def _named(name: str, document: JsonObject) -> bytes:
    return named_event(name, msgspec.json.encode(document))
