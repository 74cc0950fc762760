"""The addresses of the Anthropic API: messages, and how many tokens a conversation has.

The version that a client names in ``anthropic-version`` makes no difference: there is one.
"""

from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.server.anthropic.message_answer import message_of
from expertctl.server.anthropic.message_call import asked_of, message_call
from expertctl.server.anthropic.message_document import TokenCount
from expertctl.server.anthropic.message_request import CountRequest, MessageRequest
from expertctl.server.anthropic.message_stream import message_lines
from expertctl.server.base_text import BaseText
from expertctl.server.body import Body, read_lenient_body
from expertctl.server.caller import caller_of
from expertctl.server.generation import finished
from expertctl.server.model_name import chosen
from expertctl.server.reply import json_reply
from expertctl.server.service import Service
from expertctl.server.sse import event_stream, while_connected
from expertctl.server.unknown_fields import ignored_headers

_Kind = TypeVar("_Kind")
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
_COUNTS = 2
"""How many conversations are counted at a time, each in a thread."""


def routes(service: Service) -> list[BaseRoute]:
    """Return the addresses, on one engine."""
    wire = _Wire(service)
    return [
        Route(MESSAGES, wire.create, methods=["POST"]),
        Route(COUNT, wire.count, methods=["POST"]),
    ]


class _Wire:
    """Answers the requests of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._counting = CapacityLimiter(_COUNTS)

    async def create(self, request: Request) -> Response:
        """Answer with the next message of a conversation."""
        service = self._service
        body = await self._body(request, MessageRequest)
        call = message_call(
            body.value,
            caller=caller_of(request),
            base_name=service.engine.base_name,
            text=self._text(),
            settings=service.settings,
            ignored=body.ignored,
        )
        headers = ignored_headers(call.ignored)
        if body.value.stream:
            return event_stream(request, message_lines(service.engine, call), headers=headers)
        came = await while_connected(request, finished(service.engine, call.job))
        thought = await call.thought_tokens(came.results)
        return json_reply(message_of(call, came.results[0], thought=thought), headers=headers)

    async def count(self, request: Request) -> Response:
        """Answer with the number of tokens that the base would read."""
        body, service = await self._body(request, CountRequest), self._service
        chosen(
            body.value.model,
            base_name=service.engine.base_name,
            aliases=service.settings.aliases,
        )
        text = self._text()
        asked = asked_of(body.value, text, json_instruction=service.settings.json_instruction)
        counting = partial(text.count, asked.messages, asked.variables, end=asked.end)
        counted = to_thread.run_sync(counting, limiter=self._counting)
        tokens = await while_connected(request, counted)
        return json_reply(TokenCount(input_tokens=tokens), headers=ignored_headers(body.ignored))

    async def _body(self, request: Request, kind: type[_Kind]) -> Body[_Kind]:
        return await read_lenient_body(request, kind, strict=self._service.settings.strict_fields)

    def _text(self) -> BaseText:
        return BaseText(self._service.engine.tokenizer)
