"""`MessageRequest` and `CountRequest`: request bodies, and the job of a message (`MessageCall`).

A field that would change the answer but is not implemented is accepted only with its neutral value.
The last group of fields is not Anthropic's; the other APIs of this server have the same fields.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.serving.request import DEFAULT_PRIORITY, CheckFunction, GenerationJob
from expertctl.engine.text.prompt import ChatEnd, ConversationMessage
from expertctl.errors import UsageError
from expertctl.http.operation import FieldError
from expertctl.reference import parse_target
from expertctl.routing.request import DEFAULT_MAX_EXPERTS, RouteRequest, check_request
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.anthropic.conversation import (
    MAX_TOOLS,
    CacheControl,
    OfferedTool,
    TextContent,
    ToolChoiceOption,
    Turn,
    is_single_call,
    list_strict_tools,
    read_messages,
    select_tools,
)
from expertctl.server.chat_prompt import (
    ChatTemplateTraits,
    build_parser_config,
    can_continue,
    check_tools_length,
    find_routing_text,
    normalise_call_ids,
)
from expertctl.server.output_parser import OutputParserConfig, build_answer_validator
from expertctl.server.reasoning_parser import count_reasoning_tokens
from expertctl.server.request_body import (
    TimeoutMs,
    TopK,
    compute_deadline,
    field_limits,
    format_ignored_warning,
    normalise_top_k,
    normalise_top_p,
)
from expertctl.server.response_format import (
    INSTRUCTION_WARNING,
    InstructedConversation,
    ResponseFormat,
    add_json_instruction,
    build_check,
)
from expertctl.server.responses import Caller, make_cache_key
from expertctl.server.settings import ModelSelection, ServeSettings, parse_model
from expertctl.user_request import MAX_STOP_CHARACTERS, MAX_STOPS, SamplingOverrides, UserMessage

MAX_TURNS = 10_000
MIN_THINKING_TOKENS = 1024
_MAX_KEY = 512

_Key = Annotated[str, Meta(max_length=_MAX_KEY)]
_ThinkingDisplay = Literal["summarized", "omitted"]


class _ThinkingMode(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Whether the model writes reasoning, and whether that is returned."""


class ThinkingEnabled(_ThinkingMode, frozen=True, tag="enabled"):
    """Reasoning is on; ``budget_tokens`` is not enforced, only ``max_tokens``."""

    budget_tokens: Annotated[int, Meta(ge=MIN_THINKING_TOKENS)]
    display: _ThinkingDisplay | None = None


class ThinkingAdaptive(_ThinkingMode, frozen=True, tag="adaptive"):
    """The model decides whether to write reasoning."""

    display: _ThinkingDisplay | None = None


class ThinkingDisabled(_ThinkingMode, frozen=True, tag="disabled"):
    """Reasoning is off."""


ThinkingMode = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class JsonFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The schema that an answer is checked against."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Requirements for the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    """The end user of the request; prefixes are cached for each user separately."""

    user_id: _Key | None = None


class CountRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation whose tokens are counted."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_TURNS)]
    system: TextContent | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceOption | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    @property
    def enables_thinking(self) -> bool:
        """Whether reasoning is on."""
        return isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive)

    @property
    def shows_thinking(self) -> bool:
        """Whether reasoning is part of the answer."""
        match self.thinking:
            case ThinkingEnabled(display=display) | ThinkingAdaptive(display=display):
                return display != "omitted"
            case _:
                return False


class MessageRequest(CountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation whose next message is requested."""

    max_tokens: Annotated[int, field_limits("max_tokens")]
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Meta(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, field_limits("top_p")] | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    inference_geo: None = None
    diagnostics: None = None

    seed: Annotated[int, field_limits("seed")] | None = None
    priority: Annotated[int, field_limits("priority")] | None = None
    timeout_ms: TimeoutMs | None = None
    cache_key: _Key | None = None
    session_id: _Key | None = None
    exclude_experts: Annotated[list[str], Meta(max_length=100)] | None = None
    max_experts: Annotated[int, field_limits("max_experts")] | None = None


def check_thinking_budget(request: MessageRequest) -> None:
    """Refuse a thinking budget that is not below ``max_tokens``.

    Raises:
        FieldError: names the budget.
    """
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        field = "thinking.budget_tokens"
        raise FieldError.at(field, "it must be less than max_tokens")


BUDGET_WARNING = "thinking.budget_tokens is not enforced: only max_tokens limits reasoning"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """A conversation in the form that chat templates read."""

    messages: tuple[ConversationMessage, ...]
    """The messages that the model reads."""
    samples: tuple[ConversationMessage, ...]
    """Turns that the model reads before them if they fit."""
    client_messages: tuple[ConversationMessage, ...]
    """The messages that the client sent, which routing uses."""
    tools: tuple[OfferedTool, ...]
    variables: JsonObject
    warnings: tuple[str, ...] = ()

    @property
    def chat_end(self) -> ChatEnd:
        """How the prompt ends: a last message of the assistant is continued."""
        return "continue" if can_continue(self.messages[-1]) else "new_turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCall:
    """A parsed request for a message: its job and what its answer needs."""

    job: GenerationJob
    parser_config: OutputParserConfig
    template: ChatTemplateTraits
    model: str
    shows_thinking: bool
    stop_sequences: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
    """Ignored fields of the request."""

    async def count_reasoning_tokens(self, results: Sequence[RunResult]) -> int:
        """Count the reasoning tokens of the answer."""
        opened = self.parser_config.starts_in_reasoning
        return await count_reasoning_tokens(
            results, self.template.tokenizer, starts_in_reasoning=opened
        )

    @property
    def id(self) -> str:
        """The id of the message."""
        return f"msg_{self.job.id}"


def build_template_input(
    request: CountRequest, template: ChatTemplateTraits, *, json_instruction: bool
) -> TemplateInput:
    """Return the messages, tools and template variables of the prompt.

    Raises:
        FieldError: when a field asks for something unsupported.
    """
    tools = select_tools(request.tools or (), request.tool_choice)
    if tools and not template.reads_tools:
        raise FieldError.at("tools", "the chat template of this base does not support tools")
    variables: JsonObject = {"enable_thinking": request.enables_thinking}
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    if tools:
        tool_documents = [tool.to_json() for tool in tools]
        check_tools_length(tool_documents)
        variables["tools"] = list[JsonValue](tool_documents)
    messages = normalise_call_ids(
        read_messages(request.system, request.messages), template.call_format
    )
    wanted = request.output_config.format if request.output_config else None
    shown = wanted is not None and json_instruction and not tools
    instructed = (
        add_json_instruction(messages, wanted.schema)
        if wanted and shown
        else InstructedConversation(messages)
    )
    return TemplateInput(
        messages=instructed.messages,
        samples=instructed.samples,
        client_messages=messages,
        tools=tools,
        variables=variables,
        warnings=(INSTRUCTION_WARNING,) if instructed.messages != messages else (),
    )


def build_message_call(
    request: MessageRequest,
    *,
    caller: Caller,
    base_name: str,
    template: ChatTemplateTraits,
    settings: ServeSettings,
    ignored: Sequence[str] = (),
) -> MessageCall:
    """Build the job of a request; ``ignored`` are the fields removed from it.

    Raises:
        FieldError: when a field asks for something unsupported.
        UsageError: when fields contradict each other.
        ModelNotFoundError: when there is no such model.
    """
    check_thinking_budget(request)
    choice = parse_model(request.model, base_name=base_name, aliases=settings.aliases)
    template_input = build_template_input(
        request, template, json_instruction=settings.json_instruction
    )
    parser_config = build_parser_config(
        template,
        template_input.variables,
        template_input.messages[-1],
        end=template_input.chat_end,
        tools=(tool.name for tool in template_input.tools),
        single_call=is_single_call(request.tool_choice),
        expects_json=bool(request.output_config and request.output_config.format),
    )
    job = GenerationJob(
        id=uuid.uuid4().hex,
        request=_build_run_request(request, template_input, choice, caller),
        owner=caller.id,
        priority=DEFAULT_PRIORITY if request.priority is None else request.priority,
        deadline=compute_deadline(request.timeout_ms, default=settings.timeout),
        check=build_answer_validator(
            parser_config,
            text_check=_build_format_check(request),
            tools=list_strict_tools(request.tools or ()) if parser_config.tools else (),
        ),
    )
    return MessageCall(
        job=job,
        parser_config=parser_config,
        template=template,
        model=request.model,
        shows_thinking=request.shows_thinking,
        stop_sequences=tuple(request.stop_sequences or ()),
        warnings=(
            *format_ignored_warning(ignored),
            *template_input.warnings,
            *([BUDGET_WARNING] if isinstance(request.thinking, ThinkingEnabled) else []),
        ),
        ignored_fields=tuple(ignored),
    )


def _build_run_request(
    request: MessageRequest, template_input: TemplateInput, choice: ModelSelection, caller: Caller
) -> RunRequest:
    prompt = find_routing_text(template_input.client_messages)
    most = request.max_experts
    route = RouteRequest(
        prompt=prompt,
        exclude=tuple(parse_target(one) for one in request.exclude_experts or ()),
        base_alone=choice.base_alone,
        seed=request.seed,
        sampling=_read_sampling_options(request),
        max_experts=DEFAULT_MAX_EXPERTS if most is None else most,
    )
    check_request(route)
    return RunRequest(
        message=UserMessage(prompt=prompt),
        route=route,
        experts=choice.force,
        turns=template_input.messages,
        samples=template_input.samples,
        variables=template_input.variables,
        chat_end=template_input.chat_end,
        cache_key=_make_cache_key(request, caller),
    )


def _read_sampling_options(request: MessageRequest) -> SamplingOverrides:
    """Return the sampling options of the request."""
    stop = request.stop_sequences
    return SamplingOverrides(
        temperature=request.temperature,
        top_p=normalise_top_p(request.top_p),
        top_k=normalise_top_k(request.top_k),
        max_tokens=request.max_tokens,
        stop=None if stop is None else tuple(stop),
    )


def _make_cache_key(request: MessageRequest, caller: Caller) -> str:
    user = None if request.metadata is None else request.metadata.user_id
    return make_cache_key(caller, request.cache_key, request.session_id, user)


def _build_format_check(request: MessageRequest) -> CheckFunction | None:
    wanted = request.output_config.format if request.output_config else None
    if wanted is None:
        return None
    field = "output_config.format.schema"
    try:
        return build_check(ResponseFormat(type="json_schema", schema=wanted.schema))
    except UsageError as error:
        fact = error.message.replace("response_format.schema", field)
        raise FieldError(fact, field=field, hint=error.hint) from error
