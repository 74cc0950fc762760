"""The addresses of the OpenAI API: chat completions, completions, models."""

from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.server import model_routes
from expertctl.server.base_text import BaseText
from expertctl.server.body import Body, in_turn, read_lenient_body
from expertctl.server.caller import caller_of
from expertctl.server.openai.chat_answer import chat_completion
from expertctl.server.openai.chat_call import chat_call
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.chat_stream import chat_lines
from expertctl.server.openai.completion_answer import completion
from expertctl.server.openai.completion_call import completion_call
from expertctl.server.openai.completion_request import CompletionRequest
from expertctl.server.openai.completion_stream import completion_lines
from expertctl.server.openai.several_jobs import collected
from expertctl.server.reply import json_reply
from expertctl.server.service import Service
from expertctl.server.sse import event_stream, while_connected
from expertctl.server.unknown_fields import ignored_headers

_Kind = TypeVar("_Kind")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def routes(service: Service) -> list[BaseRoute]:
    """Return the addresses, on one engine."""
    wire = _Wire(service)
    return [
        Route(CHAT, wire.chat, methods=["POST"]),
        Route(COMPLETIONS, wire.complete, methods=["POST"]),
        *model_routes.routes(service),
    ]


class _Wire:
    """Answers the requests of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """Answer with the next message of a conversation."""
        body = await self._body(request, ChatRequest)
        engine = self._service.engine
        call = chat_call(
            body.value,
            ignored=body.ignored,
            caller=caller_of(request),
            base_name=engine.base_name,
            text=BaseText(engine.tokenizer),
            settings=self._service.settings,
        )
        headers = ignored_headers(call.ignored)
        if body.value.stream:
            return event_stream(request, chat_lines(engine, call), headers=headers)
        [came] = await while_connected(request, collected(engine, [call.job]))
        thought = await call.thought_tokens(came.results)
        return json_reply(chat_completion(call, came, thought=thought), headers=headers)

    async def complete(self, request: Request) -> Response:
        """Answer with the continuation of one or several prompts."""
        body = await self._body(request, CompletionRequest)
        engine = self._service.engine
        read = partial(
            completion_call,
            body.value,
            ignored=body.ignored,
            caller=caller_of(request),
            base_name=engine.base_name,
            tokenizer=engine.tokenizer,
            settings=self._service.settings,
        )
        takes_long = body.value.scores_prompt or body.value.has_token_prompts
        call = await in_turn(read) if takes_long else read()
        headers = ignored_headers(call.ignored)
        if body.value.stream:
            return event_stream(request, completion_lines(engine, call), headers=headers)
        came = await while_connected(request, collected(engine, call.jobs))
        answer = partial(completion, call, came)
        document = await in_turn(answer) if body.value.scores_prompt else answer()
        return json_reply(document, headers=headers)

    async def _body(self, request: Request, kind: type[_Kind]) -> Body[_Kind]:
        return await read_lenient_body(request, kind, strict=self._service.settings.strict_fields)
