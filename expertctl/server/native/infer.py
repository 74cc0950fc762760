"""``/v1/infer``: request bodies, jobs, answer documents and event streams.

The bodies of ``/v1/route`` and ``/v1/jobs`` are defined here, too. An unknown field is ignored and
reported, or refused if it would change the answer; ``/v1/route`` refuses all of them. Experts are
named by reference or digest and must be installed: no file or URL can be named.

An answer is the document of ``run --json`` with arrival and stage times. A stream has the events
``started``, any number of ``piece``, then ``finished`` or ``failed``.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.types import Scope

from expertctl.engine.request import RunRequest, SavedConversation
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import (
    DEFAULT_PRIORITY,
    CheckFunction,
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    JobStarted,
    TokenSink,
)
from expertctl.engine.text.answer_format import FormatCheck
from expertctl.errors import ExpertError, InvalidPackageError, UsageError
from expertctl.http.operation import Arrival, FieldError
from expertctl.reference import parse_target
from expertctl.routing.request import DEFAULT_MAX_EXPERTS, RouteRequest, check_request, parse_forced
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.output_parser import JsonExtractor, extract_json
from expertctl.server.request_body import (
    PlanDocument,
    TimeoutMs,
    compute_deadline,
    field_limits,
    format_ignored_warning,
)
from expertctl.server.response_format import (
    INSTRUCTION_WARNING,
    JsonInstruction,
    ResponseFormat,
    Validators,
    build_check,
    build_json_instruction,
    mentions_properties,
)
from expertctl.server.responses import Caller, error_body, make_cache_key
from expertctl.server.settings import ServeSettings
from expertctl.server.streaming import JobSubmitter, format_named_event, stream_job
from expertctl.user_request import (
    LIMITS,
    MAX_MESSAGES,
    MAX_PROMPT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SamplingOverrides,
    UserMessage,
)

MAX_EXCLUDED = 100
_MAX_CONTEXT = 2**31
_MAX_METADATA = 16
_NAMED_BY = "use force_experts to name experts"
_ONE_PROMPT = "this call takes a prompt; use a chat completion"
_REFUSED_FIELDS: Mapping[str, str] = {
    **dict.fromkeys(("model", "expert", "experts", "force_expert", "plan"), _NAMED_BY),
    **dict.fromkeys(("exclude", "exclude_expert"), "use exclude_experts to exclude experts"),
    **dict.fromkeys(
        ("messages", "system", "tools", "tool_choice", "functions", "suffix"), _ONE_PROMPT
    ),
}
"""Unknown fields of ``/v1/infer`` that would change the answer → why they are refused."""
_Named = TypeVar("_Named")


PromptText = Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]
ExpertName = Annotated[
    str, Meta(min_length=1, max_length=512, examples=["acme/sql", "acme/sql:0.5"])
]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Key = Annotated[str, Meta(min_length=1, max_length=512)]
_MetadataKey = Annotated[str, Meta(max_length=64)]


class RouteFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/route``: everything a plan depends on."""

    prompt: Annotated[PromptText, Meta(min_length=1)]
    temperature: Annotated[float, field_limits("temperature")] | None = None
    max_tokens: Annotated[int, field_limits("max_tokens")] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, field_limits("top_k")] | None = None
    min_p: Annotated[float, field_limits("min_p")] | None = None
    repetition_penalty: Annotated[float, field_limits("repetition_penalty")] | None = None
    force_experts: Annotated[list[ExpertName], Meta(max_length=int(LIMITS["max_experts"][1]))] = []
    exclude_experts: Annotated[list[ExpertName], Meta(max_length=MAX_EXCLUDED)] = []
    max_experts: Annotated[int, field_limits("max_experts")] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, field_limits("seed")] | None = None
    no_experts: Annotated[bool, Meta(description="Answer with the base alone.")] = False

    def to_route_request(self) -> RouteRequest:
        """Return the routing request, without forced experts.

        Raises:
            UsageError: when fields contradict each other.
            FieldError: when the name of an expert is malformed.
        """
        most = self.max_experts
        request = RouteRequest(
            prompt=self.prompt,
            exclude=_parse_each("exclude_experts", self.exclude_experts, parse_target),
            max_experts=DEFAULT_MAX_EXPERTS if most is None else most,
            base_alone=self.no_experts,
            seed=self.seed,
            sampling=self._read_sampling_options(),
        )
        check_request(request)
        return request

    def to_plan_request(self) -> RunRequest:
        """Return the request to plan; raises like `to_route_request`."""
        return RunRequest(
            message=UserMessage(prompt=self.prompt),
            route=self.to_route_request(),
            experts=_parse_each("force_experts", self.force_experts, parse_forced),
        )

    def _read_sampling_options(self) -> SamplingOverrides:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return SamplingOverrides(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=None if stop is None else tuple(stop),
        )


class EarlierMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation; the system's comes first."""

    role: Literal["system", "user", "assistant"]
    content: PromptText


class EarlierConversation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What precedes the prompt, as `chat` saves it: complete turns, and the plan of the last."""

    messages: Annotated[list[EarlierMessage], Meta(max_length=MAX_MESSAGES)]
    plan: dict[str, Any] | None = None

    def parse(self) -> SavedConversation:
        """Return the conversation; a plan of another version is ignored.

        Raises:
            FieldError: when the messages are not turns.
        """
        try:
            return SavedConversation.parse(msgspec.json.encode(self), what="conversation")
        except InvalidPackageError as error:
            raise FieldError.at("conversation", error.problems[0]) from error


class InferRequest(RouteFields, frozen=True, kw_only=True):
    """The body of ``/v1/infer``: what the answer depends on, and how it is delivered."""

    refused_fields: ClassVar[Mapping[str, str]] = _REFUSED_FIELDS

    template: PromptText | None = None
    body: PromptText | None = None
    conversation: EarlierConversation | None = None
    truncate: Annotated[
        bool, Meta(description="Cut off the oldest turns, then the end, of a prompt too long.")
    ] = False
    base: (
        Annotated[
            Key,
            Meta(
                description="The base that must answer, or `auto` for the one that a run on the "
                "server's machine would choose. If another is served, the request is refused."
            ),
        ]
        | None
    ) = None
    context_size: Annotated[int, Meta(ge=1, le=_MAX_CONTEXT)] | None = None
    response_format: ResponseFormat | None = None
    user_id: Key | None = None
    session_id: Key | None = None
    cache_key: Key | None = None
    metadata: Annotated[dict[_MetadataKey, Key], Meta(max_length=_MAX_METADATA)] | None = None
    priority: Annotated[int, field_limits("priority")] | None = None
    timeout_ms: TimeoutMs | None = None
    stream: bool = False

    def build_instruction(self) -> JsonInstruction | None:
        """Return the instruction for the requested JSON schema, if one is added to the prompt.

        A template defines everything the model reads, so nothing is added to one.
        """
        schema = self.response_format and self.response_format.prompt_schema
        if not schema or self.template is not None:
            return None
        if mentions_properties((self.prompt, self.body or ""), schema):
            return None
        return build_json_instruction(schema)

    def to_run_request(
        self, caller: Caller, *, instruction: JsonInstruction | None = None
    ) -> RunRequest:
        """Return the request to run; its prompt holds the instruction, if any.

        Raises:
            UsageError: when fields contradict each other.
            FieldError: when the name of an expert is malformed.
        """
        paragraph = instruction.paragraph if instruction else None
        body = "\n\n".join(filter(None, (self.body, paragraph))) if paragraph else self.body
        message = UserMessage(prompt=self.prompt, body=body, template=self.template)
        message.text()
        earlier = self.conversation.parse() if self.conversation else SavedConversation()
        return RunRequest(
            message=message,
            history=earlier.messages,
            before=earlier.plan,
            truncate=self.truncate,
            samples=instruction.samples if instruction else (),
            route=self.to_route_request(),
            experts=_parse_each("force_experts", self.force_experts, parse_forced),
            context_size=self.context_size,
            cache_key=self._make_cache_key(caller),
        )

    def _make_cache_key(self, caller: Caller) -> str:
        metadata = self.metadata or {}
        return make_cache_key(
            caller,
            self.cache_key,
            self.session_id,
            metadata.get("cache_key"),
            metadata.get("session_id"),
            self.user_id,
        )


def _parse_each(field: str, texts: list[str], read: Callable[[str], _Named]) -> tuple[_Named, ...]:
    return tuple(_parse_one(f"{field}[{n}]", text, read) for n, text in enumerate(texts))


def _parse_one(field: str, text: str, read: Callable[[str], _Named]) -> _Named:
    try:
        return read(text)
    except UsageError as error:
        raise FieldError.at(field, error.message, hint=error.hint) from error


class PromptTokensRead(Struct, frozen=True, kw_only=True):
    """The tokens of a prompt, and how many of them were reused from an earlier one."""

    prompt: int
    reused: int


class StartedEvent(Struct, frozen=True, kw_only=True):
    """``started``: the plan is made and prefill begins."""

    job_id: str
    submitted_at: str
    plan: PlanDocument
    tokens: PromptTokensRead


class PieceEvent(Struct, frozen=True, kw_only=True):
    """``piece``: the next part of the text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCall:
    """A parsed request: its job and what its answer needs."""

    job: GenerationJob
    arrival: Arrival
    reception_ms: float
    expects_json: bool = False
    """Whether JSON was requested, so that text around it is removed."""
    ignored_fields: tuple[str, ...] = ()
    """Ignored fields of the request."""
    warnings: tuple[str, ...] = ()
    """Warnings from parsing the request."""

    def filter_sink(self, sink: TokenSink) -> TokenSink:
        """Return a sink that passes on the job's events with the text that is returned."""
        if not self.expects_json:
            return sink
        json = JsonExtractor()

        def pass_on(event: JobEvent) -> None:
            for one in filter_event(event, json):
                sink(one)

        return pass_on

    @property
    def submitted_at(self) -> str:
        """The arrival time in RFC 3339 format."""
        return format_time(self.arrival.wall_time)


def filter_event(event: JobEvent, json: JsonExtractor) -> tuple[JobEvent, ...]:
    """Return an event with filtered text, preceded by text the filter held back."""
    match event:
        case OutputDelta():
            return (replace(event, text=json.push(event.text)),)
        case JobFinished():
            rest = json.finish()
            return (OutputDelta(0, rest), event) if rest else (event,)
        case _:
            return (event,)


def build_call(
    body: InferRequest,
    *,
    caller: Caller,
    settings: ServeSettings,
    arrival: Arrival,
    ignored: Sequence[str] = (),
) -> InferCall:
    """Build the job of a request; ``ignored`` are the fields removed from it.

    Raises:
        UsageError: when fields contradict each other.
        FieldError: when a field names something that does not exist.
    """
    instruction = body.build_instruction() if settings.json_instruction else None
    job = GenerationJob(
        id=uuid.uuid4().hex,
        request=body.to_run_request(caller, instruction=instruction),
        owner=caller.id,
        priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
        deadline=compute_deadline(body.timeout_ms, default=settings.timeout),
        check=_build_check(body, settings.validators),
    )
    form = body.response_format
    return InferCall(
        job=job,
        arrival=arrival,
        reception_ms=arrival.elapsed_ms,
        expects_json=form is not None and form.is_json,
        ignored_fields=tuple(ignored),
        warnings=(
            *format_ignored_warning(ignored),
            *([INSTRUCTION_WARNING] if instruction else []),
        ),
    )


def format_time(seconds: float) -> str:
    """Format a `time.time` in RFC 3339, in UTC, with milliseconds."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return f"{text.removesuffix('+00:00')}Z"


def _build_check(body: InferRequest, commands: Validators) -> CheckFunction | None:
    form = body.response_format
    try:
        check = build_check(form, commands=commands)
    except UsageError as error:
        raise FieldError(error.message, field="response_format", hint=error.hint) from error
    if check is None or form is None or not form.is_json:
        return check

    def check_json(text: str) -> FormatCheck | str:
        return check(extract_json(text))

    return check_json


def build_answer(call: InferCall, finished: JobFinished) -> JsonObject:
    """Return the answer document (``schemas/infer.schema.json``)."""
    [result] = finished.results
    text, warnings = _filter_text(call, result.generated.text)
    experts = result.planned.result.plan.experts
    return {
        **result.to_json(),
        "text": text,
        "warnings": [*call.warnings, *result.warnings, *warnings],
        "submitted_at": call.submitted_at,
        "tokens_generated": len(result.generated.tokens),
        "experts_used": list[JsonValue](expert.ref for expert in experts),
        "latency_ms": round(call.arrival.elapsed_ms, 3),
        "stopped_by": result.generated.stopped_by,
        "stages": _measure_stages(call, result),
    }


def build_started_event(call: InferCall, event: JobStarted) -> JsonObject:
    """Return the first event of a stream."""
    return {
        "job_id": call.job.id,
        "submitted_at": call.submitted_at,
        "plan": event.plan.to_json(),
        "tokens": {"prompt": event.prompt_tokens, "reused": event.reused_tokens},
    }


def _filter_text(call: InferCall, text: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of the answer, and warnings about what was removed from it."""
    if not call.expects_json:
        return text, ()
    json = JsonExtractor()
    return json.push(text) + json.finish(), json.warnings


def _measure_stages(call: InferCall, result: RunResult) -> JsonObject:
    """Return the milliseconds of each stage; queueing is not a stage, see ``timings_ms``."""
    took = result.timings_ms
    stages = {
        "reception": call.reception_ms,
        "reasoning": took.get("route", 0.0),
        "preparation": took.get("load", 0.0),
        "inference": took.get("prefill", 0.0) + took.get("decode", 0.0),
        "post_processing": took.get("post", 0.0),
    }
    return {name: round(ms, 3) for name, ms in stages.items()}


async def stream_infer(
    jobs: JobSubmitter, call: InferCall, scope: Scope, record: TokenSink = lambda event: None
) -> AsyncGenerator[bytes, None]:
    """Submit the job of a call and yield the events of its stream, once recorded.

    Raises:
        ExpertError: when it is refused, or fails before its first event.
    """
    started, json = False, JsonExtractor() if call.expects_json else None
    try:
        async with stream_job(jobs, call.job) as events:
            async for event in events:
                for one in (event,) if json is None else filter_event(event, json):
                    record(one)
                    if line := _encode_event(call, one):
                        yield line
                        started = True
    except ExpertError as error:
        if not started:
            raise
        yield _encode_named("failed", error_body(error, scope))


def _encode_event(call: InferCall, event: JobEvent) -> bytes:
    match event:
        case JobStarted():
            return _encode_named("started", build_started_event(call, event))
        case OutputDelta():
            return _encode_named("piece", {"text": event.text}) if event.text else b""
        case JobFinished():
            return _encode_named("finished", build_answer(call, event))
        case JobFailed():
            return b""  # raised by `stream_job`


def _encode_named(name: str, document: JsonObject) -> bytes:
    return format_named_event(name, msgspec.json.encode(document))
