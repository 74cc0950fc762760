"""The routes of the Anthropic API, and the event stream of a message.

`BlockWriter` turns an answer into events of its content blocks while it is written: adjacent parts
of one kind form one block, each call a block of its own; reasoning is left out unless requested.
`MessageStream` wraps them: the message starts when prefill begins, with the usage so far; then come
its blocks, then the stop reason, the total usage and, beside it, the ``expertctl`` object.

The version that a client names in ``anthropic-version`` makes no difference: there is only one.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial

import msgspec
from anyio import CapacityLimiter, to_thread
from msgspec.structs import replace
from starlette.requests import Request
from starlette.routing import BaseRoute

from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import JobEvent, JobFailed, JobFinished, JobStarted
from expertctl.http.operation import Operation, ParsedBody, Reply
from expertctl.server.anthropic.message_request import (
    CountRequest,
    MessageCall,
    MessageRequest,
    build_message_call,
    build_template_input,
)
from expertctl.server.anthropic.message_response import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    Said,
    SignatureDelta,
    StreamEvent,
    TextDelta,
    Thinking,
    ThinkingDelta,
    TokenCount,
    build_extension,
    build_message,
    build_result_usage,
    build_tool_use,
    build_usage,
    find_stop_reason,
    make_signature,
)
from expertctl.server.chat_prompt import ChatTemplateTraits
from expertctl.server.output_parser import OutputParser, OutputPart
from expertctl.server.reasoning_parser import ReasoningText
from expertctl.server.request_body import (
    EXAMPLE_MESSAGE,
    build_ignored_headers,
    build_router,
)
from expertctl.server.responses import GENERATION_ERRORS, get_caller
from expertctl.server.service import Service
from expertctl.server.settings import parse_model
from expertctl.server.streaming import (
    EventStream,
    JobSubmitter,
    format_named_event,
    run_job,
    stream_job,
    while_connected,
)
from expertctl.server.tool_parser import ParsedToolCall, PlainText

_PartKind = type[PlainText] | type[ReasoningText]
BlockEvent = BlockStart | BlockDelta | BlockStop


class BlockWriter:
    """Turns the text of one answer into block events."""

    def __init__(self, call: MessageCall) -> None:
        """Start without an open block."""
        self._call = call
        self._parser = OutputParser(call.parser_config)
        self._open_kind: _PartKind | None = None
        self._index = self._calls = 0

    @property
    def calls(self) -> int:
        """Number of calls written so far."""
        return self._calls

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about what was removed from the answer."""
        return self._parser.warnings

    def push(self, text: str) -> Iterator[BlockEvent]:
        """Add the next piece of the answer; yield the events that are now certain."""
        yield from self._write_parts(self._parser.push(text))

    def finish(self) -> Iterator[BlockEvent]:
        """Yield the events of held-back text, and close the open block."""
        yield from self._write_parts(self._parser.finish())
        yield from self._close()

    def _write_parts(self, parts: Iterable[OutputPart]) -> Iterator[BlockEvent]:
        for part in parts:
            match part:
                case PlainText(text):
                    yield from self._ensure_open(PlainText, Said(text=""))
                    yield self._delta_event(TextDelta(text=text))
                case ParsedToolCall():
                    yield from self._write_call(part)
                case ReasoningText(thought) if self._call.shows_thinking:
                    yield from self._ensure_open(ReasoningText, Thinking(thinking="", signature=""))
                    yield self._delta_event(ThinkingDelta(thinking=thought))
                case ReasoningText():
                    continue

    def _ensure_open(self, kind: _PartKind, empty: Block) -> Iterator[BlockEvent]:
        if self._open_kind is kind:
            return
        yield from self._close()
        self._open_kind = kind
        yield self._start_event(empty)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open_kind is ReasoningText:
            yield self._delta_event(SignatureDelta(signature=make_signature(self._call)))
        if self._open_kind is not None:
            yield self._stop_event()
        self._open_kind = None

    def _write_call(self, call: ParsedToolCall) -> Iterator[BlockEvent]:
        yield from self._close()
        yield self._start_event(
            replace(build_tool_use(self._call, call, number=self._calls), input={})
        )
        yield self._delta_event(InputDelta(partial_json=call.arguments_json))
        yield self._stop_event()
        self._calls += 1

    def _start_event(self, block: Block) -> BlockStart:
        return BlockStart(index=self._index, content_block=block)

    def _delta_event(self, delta: Delta) -> BlockDelta:
        return BlockDelta(index=self._index, delta=delta)

    def _stop_event(self) -> BlockStop:
        self._index += 1
        return BlockStop(index=self._index - 1)


async def stream_message(jobs: JobSubmitter, call: MessageCall) -> AsyncIterator[bytes]:
    """Submit the job of a request and yield the events of its stream.

    Raises:
        ExpertError: when it is refused or fails.
    """
    stream = MessageStream(call)
    async with stream_job(jobs, call.job) as events:
        async for event in events:
            if isinstance(event, JobFinished):
                stream.reasoning_tokens = await call.count_reasoning_tokens(event.results)
            for translated in stream.translate(event):
                yield format_named_event(event_name(translated), msgspec.json.encode(translated))


class MessageStream:
    """Turns the events of one job into those of the published API."""

    def __init__(self, call: MessageCall) -> None:
        """Start before the first event."""
        self.reasoning_tokens = 0
        """Number of reasoning tokens; set before the last event."""
        self._call = call
        self._blocks = BlockWriter(call)
        self._has_started = False

    def translate(self, event: JobEvent) -> Iterator[StreamEvent]:
        """Yield the message events of a job event."""
        match event:
            case JobStarted(_, prompt, reused):
                yield from self._start_message(prompt=prompt, reused=reused)
            case OutputDelta(_, text):
                yield from self._blocks.push(text)
            case JobFinished(results):
                yield from self._start_message(prompt=results[0].prompt_tokens, reused=0)
                yield from self._blocks.finish()
                yield self._build_message_delta(results[0])
                yield MessageStop()
            case JobFailed():
                return

    def _start_message(self, *, prompt: int, reused: int) -> Iterator[StreamEvent]:
        """Start the message, once: a job can end before prefill."""
        if self._has_started:
            return
        self._has_started = True
        message = Message(
            id=self._call.id,
            role="assistant",
            model=self._call.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=build_usage(prompt=prompt, cached=reused, generated=0),
        )
        yield MessageStart(message=message)
        yield Ping()

    def _build_message_delta(self, result: RunResult) -> MessageDelta:
        return MessageDelta(
            delta=find_stop_reason(self._call, result, calls=self._blocks.calls),
            usage=build_result_usage(result, reasoning=self.reasoning_tokens),
            expertctl=build_extension(self._call, result, self._blocks.warnings),
        )


def event_name(event: StreamEvent) -> str:
    """Return the name of an event: its type."""
    return str(event.__struct_config__.tag)


MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
_MAX_COUNTS = 2
"""Maximum conversations counted at a time, each in a thread."""


def build_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the Anthropic API."""
    router = build_router(AnthropicEndpoints(service), strict=service.settings.strict_fields)
    return router.build_routes(OPERATIONS)


class AnthropicEndpoints:
    """Handles the requests of the Anthropic API."""

    def __init__(self, service: Service) -> None:
        """Generate with the engine of ``service``."""
        self._service = service
        self._counting = CapacityLimiter(_MAX_COUNTS)

    async def create_message(
        self, request: Request, body: ParsedBody[MessageRequest]
    ) -> Reply[Message] | EventStream[StreamEvent]:
        """Create a message, as in Anthropic's API."""
        service = self._service
        call = build_message_call(
            body.value,
            caller=get_caller(request),
            base_name=service.engine.base_name,
            template=self._template_traits(),
            settings=service.settings,
            ignored=body.ignored_fields,
        )
        headers = build_ignored_headers(call.ignored_fields)
        if body.value.stream:
            return EventStream(request, stream_message(service.jobs, call), headers=headers)
        outcome = await while_connected(request, run_job(service.jobs, call.job))
        thought = await call.count_reasoning_tokens(outcome.results)
        return Reply(build_message(call, outcome.results[0], reasoning_tokens=thought), headers)

    async def count_tokens(
        self, request: Request, body: ParsedBody[CountRequest]
    ) -> Reply[TokenCount]:
        """Count the tokens of a conversation."""
        service = self._service
        parse_model(
            body.value.model, base_name=service.engine.base_name, aliases=service.settings.aliases
        )
        text = self._template_traits()
        template_input = build_template_input(
            body.value, text, json_instruction=service.settings.json_instruction
        )
        counting = partial(
            text.count_tokens,
            template_input.messages,
            template_input.variables,
            end=template_input.chat_end,
            samples=template_input.samples,
            context=service.engine.context,
        )
        counted = to_thread.run_sync(counting, limiter=self._counting)
        tokens = await while_connected(request, counted)
        return Reply(TokenCount(input_tokens=tokens), build_ignored_headers(body.ignored_fields))

    def _template_traits(self) -> ChatTemplateTraits:
        return ChatTemplateTraits(self._service.engine.tokenizer)


OPERATIONS = (
    Operation(
        "POST",
        MESSAGES,
        AnthropicEndpoints.create_message,
        "anthropic",
        errors=GENERATION_ERRORS,
        example={"model": "auto", "max_tokens": 64, "messages": [EXAMPLE_MESSAGE]},
    ),
    Operation(
        "POST",
        COUNT_TOKENS,
        AnthropicEndpoints.count_tokens,
        "anthropic",
        errors=GENERATION_ERRORS,
        example={"model": "auto", "messages": [EXAMPLE_MESSAGE]},
    ),
)
