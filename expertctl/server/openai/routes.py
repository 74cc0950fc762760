"""The routes of the OpenAI API, and the streams of chat and completion requests.

A chat stream sends the role of each answer, then its text, reasoning and calls, then its finish
reason. A completion chunk looks like the whole answer. In both, the last chunk contains the
``expertctl`` object, and the usage if requested.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial

import msgspec
from msgspec import UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.routing import BaseRoute

from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta, SampledToken
from expertctl.engine.serving.request import JobEvent, JobFailed, JobFinished, JobStarted
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.http.operation import Operation, ParsedBody, Reply, run_in_turn
from expertctl.routing.plan import Plan
from expertctl.server import models
from expertctl.server.chat_prompt import ChatTemplateTraits
from expertctl.server.openai.chat_request import (
    ChatCall,
    ChatRequest,
    build_chat_call,
    build_chat_completion,
    build_tool_call,
)
from expertctl.server.openai.completion_request import (
    CompletionCall,
    CompletionRequest,
    build_call_extension,
    build_completion,
    build_completion_call,
)
from expertctl.server.openai.response import (
    AnsweredChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChunkCall,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    OpenAIFinishReason,
    PromptExtensions,
    RunningUsage,
    TokenOffsets,
    Usage,
    build_chat_logprobs,
    build_completion_logprobs,
    build_extension,
    build_prompt_logprobs,
    build_usage,
    make_fingerprint,
    map_finish_reason,
)
from expertctl.server.output_parser import OutputParser, OutputPart
from expertctl.server.reasoning_parser import ReasoningText
from expertctl.server.request_body import (
    EXAMPLE_MESSAGE,
    EXAMPLE_PROMPT,
    build_ignored_headers,
    build_router,
)
from expertctl.server.responses import GENERATION_ERRORS, get_caller
from expertctl.server.service import Service
from expertctl.server.streaming import (
    EventStream,
    JobSubmitter,
    format_event,
    run_jobs,
    stream_job,
    stream_jobs,
    while_connected,
)
from expertctl.server.tool_parser import ParsedToolCall, PlainText

DONE_EVENT = format_event(b"[DONE]")


async def stream_chat(jobs: JobSubmitter, call: ChatCall) -> AsyncIterator[bytes]:
    """Submit the job of a call and yield the events of its stream.

    Raises:
        ExpertError: when it is refused or fails.
    """
    stream = ChatStream(call)
    async with stream_job(jobs, call.job) as events:
        async for event in events:
            if isinstance(event, JobFinished):
                stream.reasoning_tokens = await call.count_reasoning_tokens(event.results)
            for chunk in stream.chunks(event):
                yield format_event(msgspec.json.encode(chunk))
    yield DONE_EVENT


class ChatStream:
    """Turns the events of one job into chunks."""

    def __init__(self, call: ChatCall) -> None:
        """Start before the first event."""
        self.reasoning_tokens = 0
        """Number of reasoning tokens; set before the last event."""
        self._call = call
        self._parsers = [OutputParser(call.parser_config) for _ in range(call.job.answers)]
        self._calls = [0] * call.job.answers
        self._fingerprint: str | None = None
        self._usage = RunningUsage(call.with_usage, call.with_continuous_usage)

    def chunks(self, event: JobEvent) -> Iterator[ChatChunk]:
        """Yield the chunks of a job event."""
        match event:
            case JobStarted(plan, prompt, reused):
                self._usage.count_prompt(prompt=prompt, cached=reused)
                yield from self._start_answers(plan)
            case OutputDelta(index, text, drawn, written):
                self._usage.generated[index] = written
                yield from self._part_chunks(index, self._parsers[index].push(text), drawn)
            case JobFinished(results):
                counts = (len(result.generated.tokens) for result in results)
                self._usage.generated = dict(enumerate(counts))
                yield from self._start_answers(results[0].planned.result.plan)
                yield from self._end_chunks(results)
            case JobFailed():
                return

    def _start_answers(self, plan: Plan) -> Iterator[ChatChunk]:
        """Start each answer, once: a job can end before prefill."""
        if self._fingerprint is not None:
            return
        self._fingerprint = make_fingerprint(plan)
        for index in range(self._call.job.answers):
            yield self._delta_chunk(index, ChatDelta(role="assistant", content=""))

    def _part_chunks(
        self, index: int, read: Iterable[OutputPart], sampled: Iterable[SampledToken] = ()
    ) -> Iterator[ChatChunk]:
        """Yield a chunk per part; logprobs go with the first, or in a chunk of their own."""
        scores = build_chat_logprobs(sampled, self._call.token_bytes) if sampled else None
        deltas = [self._build_delta(index, part) for part in read]
        for delta in deltas or ([ChatDelta()] if scores else []):
            yield self._delta_chunk(index, delta, scores=scores)
            scores = None

    def _build_delta(self, index: int, part: OutputPart) -> ChatDelta:
        match part:
            case PlainText(text):
                return ChatDelta(content=text)
            case ReasoningText(text):
                return ChatDelta(reasoning_content=text)
            case ParsedToolCall():
                number = self._calls[index]
                self._calls[index] += 1
                found = build_tool_call(self._call, part, index=index, number=number)
                return ChatDelta(
                    tool_calls=[ChunkCall(id=found.id, function=found.function, index=number)]
                )

    def _end_chunks(self, results: tuple[RunResult, ...]) -> Iterator[ChatChunk]:
        for index in range(len(results)):
            yield from self._part_chunks(index, self._parsers[index].finish())
        ends = [self._end_chunk(index, result) for index, result in enumerate(results)]
        late = range(len(results), self._call.job.answers)  # they missed the deadline
        ends += [self._delta_chunk(index, ChatDelta(), reason="length") for index in late]
        if self._call.with_usage:
            ends.append(
                self._chunk([], usage=build_usage([results], reasoning=self.reasoning_tokens))
            )
        *others, last = ends
        yield from others
        answered = [AnsweredChoice(i, r, self._parsers[i].warnings) for i, r in enumerate(results)]
        call = self._call
        extension = build_extension(answered, ignored=call.ignored_fields, warnings=call.warnings)
        yield replace(last, expertctl=extension)

    def _end_chunk(self, index: int, result: RunResult) -> ChatChunk:
        calls = self._parsers[index].calls
        reason = map_finish_reason(result.generated.finish_reason, calls=calls)
        return self._delta_chunk(index, ChatDelta(), reason=reason)

    def _delta_chunk(
        self,
        index: int,
        delta: ChatDelta,
        *,
        scores: ChatLogprobs | None = None,
        reason: OpenAIFinishReason | None = None,
    ) -> ChatChunk:
        choice = ChunkChoice(index=index, delta=delta, logprobs=scores, finish_reason=reason)
        return self._chunk([choice], usage=self._usage.for_chunk())

    def _chunk(self, choices: list[ChunkChoice], *, usage: Usage | UnsetType | None) -> ChatChunk:
        return ChatChunk(
            id=self._call.id,
            created=self._call.created,
            model=self._call.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=usage,
        )


async def stream_completion(jobs: JobSubmitter, call: CompletionCall) -> AsyncIterator[bytes]:
    """Submit the jobs of a call and yield the events of its stream.

    Raises:
        ExpertError: when one is refused or fails.
    """
    stream = CompletionStream(call)
    async with stream_jobs(jobs, call.jobs) as events:
        async for number, event in events:
            encode = partial(_encode_chunks, stream, number, event)
            is_large = isinstance(event, OutputDelta) and event.prompt is not None
            for chunk in await run_in_turn(encode) if is_large else encode():
                yield chunk
    yield DONE_EVENT


def _encode_chunks(stream: "CompletionStream", number: int, event: JobEvent) -> list[bytes]:
    """Return the chunks of an event; those of a scored prompt take a while."""
    return [format_event(msgspec.json.encode(chunk)) for chunk in stream.chunks(number, event)]


class CompletionStream:
    """Turns the events of a completion request's jobs into chunks."""

    def __init__(self, call: CompletionCall) -> None:
        """Start before the first event."""
        self._call = call
        self._fingerprint: str | None = None
        self._started: set[int] = set()
        self._pending_pieces: dict[int, list[OutputDelta]] = {}
        """Deltas of jobs whose prompt log-probabilities, which come first, are not known yet."""
        self._offsets: dict[int, TokenOffsets] = {}
        """Index of an answer → offset of its next token."""
        self._results: dict[int, tuple[RunResult, ...]] = {}
        self._usage = RunningUsage(call.with_usage, call.with_continuous_usage)

    def chunks(self, number: int, event: JobEvent) -> Iterator[Completion]:
        """Yield the chunks of an event of the job ``number``."""
        match event:
            case JobStarted(plan, prompt, reused):
                self._usage.count_prompt(prompt=prompt, cached=reused)
                yield from self._start_answers(number, plan)
            case OutputDelta():
                yield from self._piece_chunks(number, event)
            case JobFinished(results):
                yield from self._start_answers(number, results[0].planned.result.plan)
                yield from self._flush_pending(number, None)
                yield from self._end_chunks(number, results)
            case JobFailed():
                return

    def _start_answers(self, number: int, plan: Plan) -> Iterator[Completion]:
        """Yield the echoed prompt of each answer, once; a scored prompt comes later."""
        if number in self._started:
            return
        self._started.add(number)
        self._fingerprint = self._fingerprint or make_fingerprint(plan)
        if self._call.scores_prompt:
            self._pending_pieces[number] = []
        else:
            yield from self._echo_chunks(number, None)

    def _echo_chunks(self, number: int, scores: PromptLogprobs | None) -> Iterator[Completion]:
        if not (head := self._call.echoed_text(number)):
            return
        logprobs = (
            None if scores is None else build_prompt_logprobs(scores, head, self._call.tokenizer)
        )
        for index in range(self._call.jobs[number].answers):
            place = self._call.choice_index(number, index)
            self._offsets[place] = TokenOffsets(self._call.tokenizer, start=len(head))
            yield self._delta_chunk(place, head, scores=logprobs)

    def _piece_chunks(self, number: int, piece: OutputDelta) -> Iterator[Completion]:
        if number not in self._pending_pieces:
            yield from self._text_chunks(number, piece)
            return
        self._pending_pieces[number].append(piece)
        if piece.prompt is not None:
            yield from self._flush_pending(number, piece.prompt)

    def _flush_pending(self, number: int, scores: PromptLogprobs | None) -> Iterator[Completion]:
        """Yield the echoed prompt of each answer, then the held-back deltas."""
        if number in self._pending_pieces:
            yield from self._echo_chunks(number, scores)
            for piece in self._pending_pieces.pop(number):
                yield from self._text_chunks(number, piece)

    def _text_chunks(self, number: int, piece: OutputDelta) -> Iterator[Completion]:
        if not (piece.text or piece.sampled):
            return
        place = self._call.choice_index(number, piece.number)
        self._usage.generated[place] = piece.token_count
        scores = None
        if piece.sampled:
            places = self._offsets.setdefault(place, TokenOffsets(self._call.tokenizer))
            scores = build_completion_logprobs(
                piece.sampled, self._call.tokenizer.token_text, places
            )
        yield self._delta_chunk(place, piece.text, scores=scores)

    def _end_chunks(self, number: int, results: tuple[RunResult, ...]) -> Iterator[Completion]:
        self._results[number] = results
        for index, result in enumerate(results):
            written = len(result.generated.tokens)
            self._usage.generated[self._call.choice_index(number, index)] = written
        ends = [
            self._delta_chunk(
                self._call.choice_index(number, index),
                "",
                reason=map_finish_reason(result.generated.finish_reason),
            )
            for index, result in enumerate(results)
        ]
        late = range(len(results), self._call.jobs[number].answers)  # they missed a deadline
        ends += [
            self._delta_chunk(self._call.choice_index(number, i), "", reason="length") for i in late
        ]
        if len(self._results) == len(self._call.jobs):
            ends = self._add_usage_and_extension(ends)
        yield from ends

    def _add_usage_and_extension(self, ends: list[Completion]) -> list[Completion]:
        """Add the usage and the ``expertctl`` object to the last chunk."""
        results = [self._results[number] for number in range(len(self._call.jobs))]
        if self._call.with_usage:
            ends = [*ends, self._chunk([], usage=build_usage(results))]
        *others, last = ends
        return [*others, replace(last, expertctl=build_call_extension(self._call, results))]

    def _delta_chunk(
        self,
        place: int,
        text: str,
        *,
        scores: CompletionLogprobs | None = None,
        reason: OpenAIFinishReason | None = None,
    ) -> Completion:
        choice = CompletionChoice(index=place, text=text, logprobs=scores, finish_reason=reason)
        return self._chunk([choice], usage=self._usage.for_chunk())

    def _chunk(
        self, choices: list[CompletionChoice], *, usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self._call.id,
            created=self._call.created,
            model=self._call.model,
            choices=choices,
            system_fingerprint=self._fingerprint,
            usage=usage,
        )


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def build_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the OpenAI API."""
    router = build_router(OpenAIEndpoints(service), strict=service.settings.strict_fields)
    return [*router.build_routes(OPERATIONS), *models.build_routes(service)]


class OpenAIEndpoints:
    """Handles the requests of the OpenAI API."""

    def __init__(self, service: Service) -> None:
        """Generate with the engine of ``service``."""
        self._service = service

    async def create_chat_completion(
        self, request: Request, body: ParsedBody[ChatRequest]
    ) -> Reply[ChatCompletion] | EventStream[ChatChunk]:
        """Create a chat completion, as in OpenAI's API."""
        engine, jobs = self._service.engine, self._service.jobs
        call = build_chat_call(
            body.value,
            ignored=body.ignored_fields,
            caller=get_caller(request),
            base_name=engine.base_name,
            template=ChatTemplateTraits(engine.tokenizer),
            settings=self._service.settings,
        )
        headers = build_ignored_headers(call.ignored_fields)
        if body.value.stream:
            return EventStream(request, stream_chat(jobs, call), headers=headers)
        [outcome] = await while_connected(request, run_jobs(jobs, [call.job]))
        thought = await call.count_reasoning_tokens(outcome.results)
        return Reply(build_chat_completion(call, outcome, reasoning_tokens=thought), headers)

    async def create_completion(
        self, request: Request, body: ParsedBody[CompletionRequest]
    ) -> Reply[Completion] | EventStream[Completion]:
        """Complete texts, as in OpenAI's API."""
        engine, jobs = self._service.engine, self._service.jobs
        read = partial(
            build_completion_call,
            body.value,
            ignored=body.ignored_fields,
            caller=get_caller(request),
            base_name=engine.base_name,
            tokenizer=engine.tokenizer,
            settings=self._service.settings,
        )
        takes_long = body.value.scores_prompt or body.value.has_token_prompts
        call = await run_in_turn(read) if takes_long else read()
        headers = build_ignored_headers(call.ignored_fields)
        if body.value.stream:
            return EventStream(request, stream_completion(jobs, call), headers=headers)
        outcomes = await while_connected(request, run_jobs(jobs, call.jobs))
        answer = partial(build_completion, call, outcomes)
        document = await run_in_turn(answer) if body.value.scores_prompt else answer()
        return Reply(document, headers)


OPERATIONS = (
    Operation(
        "POST",
        CHAT,
        OpenAIEndpoints.create_chat_completion,
        "openai",
        errors=GENERATION_ERRORS,
        example={"model": "auto", "messages": [EXAMPLE_MESSAGE]},
    ),
    Operation(
        "POST",
        COMPLETIONS,
        OpenAIEndpoints.create_completion,
        "openai",
        errors=GENERATION_ERRORS,
        referenced_types=(PromptExtensions,),
        example={"model": "auto", "prompt": EXAMPLE_PROMPT, "max_tokens": 16},
    ),
)
