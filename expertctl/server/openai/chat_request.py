"""`ChatRequest`: the body of a chat request, its job (`ChatCall`), and the whole answer to it.

A field that would change the answer but is not implemented is accepted only with its neutral value:
ignoring it silently would mislead the client.
"""

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from msgspec import UNSET, Meta, Struct

from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import SampledToken
from expertctl.engine.serving.request import DEFAULT_PRIORITY, CheckFunction, GenerationJob
from expertctl.engine.text.prompt import ChatEnd, ConversationMessage
from expertctl.errors import UsageError
from expertctl.http.operation import FieldError
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.chat_prompt import (
    ChatTemplateTraits,
    build_parser_config,
    can_continue,
    check_tools_length,
    find_routing_text,
    normalise_call_ids,
)
from expertctl.server.openai.conversation import (
    CalledFunction,
    Name,
    Tool,
    ToolCall,
    ToolChoice,
    Turn,
    list_strict_tools,
    read_messages,
    select_tools,
)
from expertctl.server.openai.generation_request import (
    GenerationFields,
    Key,
    Tokens,
    build_route_request,
    build_stop_rules,
    check_unsupported,
)
from expertctl.server.openai.response import (
    AnsweredChoice,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    build_chat_logprobs,
    build_extension,
    build_usage,
    make_fingerprint,
    map_finish_reason,
)
from expertctl.server.output_parser import OutputParserConfig, ParsedOutput, build_answer_validator
from expertctl.server.reasoning_parser import count_reasoning_tokens
from expertctl.server.request_body import compute_deadline
from expertctl.server.response_format import (
    INSTRUCTION_WARNING,
    InstructedConversation,
    ResponseFormat,
    add_json_instruction,
    build_check,
)
from expertctl.server.responses import Caller, make_cache_key
from expertctl.server.settings import ServeSettings, parse_model
from expertctl.server.streaming import CollectedJob
from expertctl.server.tool_parser import ParsedToolCall, make_call_id
from expertctl.user_request import UserMessage

MAX_TURNS = 10_000
MAX_TOOLS = 128
_MAX_METADATA = 16
_METADATA_KEY = Annotated[str, Meta(max_length=64)]


class CacheOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How prefixes are cached; here always, while there is room."""

    mode: Literal["implicit"] | None = None
    ttl: Literal["30m"] | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """A request for chat completions."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_TURNS)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    metadata: Annotated[dict[_METADATA_KEY, Key], Meta(max_length=_MAX_METADATA)] | None = None
    prompt_cache_key: Key | None = None
    safety_identifier: Key | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Meta(max_length=64)] | None = None

    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """The maximum time a prefix may be cached; ours are cached for less."""
    modalities: list[Literal["text", "audio"]] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    prediction: Any = None
    web_search_options: Any = None


_RESERVED_VARIABLES = re.compile(
    "messages|tools|add_generation_prompt|continue_final_message|raise_exception|strftime_now"
    "|[a-z_]*_tokens?"
)
"""Template variables that the server sets from the request and the base."""

MAX_VARIABLE_CHARACTERS = 4_096
"""Maximum characters of the template variables of a request."""
MAX_CALLS_PER_ANSWER = 1 << 20
"""More tool calls than one answer can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A parsed chat request: its job and what its answers need."""

    job: GenerationJob
    parser_config: OutputParserConfig
    template: ChatTemplateTraits
    model: str
    created: int
    with_usage: bool
    with_continuous_usage: bool = False
    ignored_fields: tuple[str, ...] = ()
    """Ignored fields of the request."""
    warnings: tuple[str, ...] = ()
    """Warnings from parsing the request."""

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if unknown."""
        return self.template.tokenizer.token_bytes(token)

    async def count_reasoning_tokens(self, results: Sequence[RunResult]) -> int:
        """Count the reasoning tokens of its answers."""
        opened = self.parser_config.starts_in_reasoning
        return await count_reasoning_tokens(
            results, self.template.tokenizer, starts_in_reasoning=opened
        )

    @property
    def id(self) -> str:
        """The id of the completion."""
        return f"chatcmpl-{self.job.id}"


def build_chat_call(
    request: ChatRequest,
    *,
    caller: Caller,
    base_name: str,
    template: ChatTemplateTraits,
    settings: ServeSettings,
    ignored: Sequence[str] = (),
) -> ChatCall:
    """Build the job of a chat request; ``ignored`` are the fields removed from it.

    Raises:
        FieldError: when a field asks for something unsupported.
        UsageError: when fields contradict each other.
        ModelNotFoundError: when there is no such model.
    """
    not_done = check_unsupported(request, strict=settings.strict_fields)
    choice = parse_model(request.model, base_name=base_name, aliases=settings.aliases)
    tools = _select_tools(request, template)
    variables = _build_variables(request, tools)
    turns = normalise_call_ids(read_messages(request.messages), template.call_format)
    instructed = _add_instruction(request, turns, tools, settings)
    end = _find_chat_end(request, turns[-1])
    form = request.response_format
    parser_config = build_parser_config(
        template,
        variables,
        turns[-1],
        end=end,
        tools=(tool.function.name for tool in tools),
        single_call=request.parallel_tool_calls is False,
        expects_json=form is not None and form.is_json,
    )
    prompt = find_routing_text(turns)
    run_request = RunRequest(
        message=UserMessage(prompt=prompt),
        route=build_route_request(request, prompt, choice, max_tokens=_read_max_tokens(request)),
        experts=choice.force,
        turns=instructed.messages,
        samples=instructed.samples,
        variables=variables,
        chat_end=end,
        cache_key=_make_cache_key(request, caller),
    )
    return ChatCall(
        job=_build_job(request, run_request, parser_config, owner=caller.id, settings=settings),
        parser_config=parser_config,
        template=template,
        model=request.model,
        created=int(time.time()),
        with_usage=request.with_usage,
        with_continuous_usage=request.with_continuous_usage,
        ignored_fields=(*ignored, *not_done),
        warnings=(INSTRUCTION_WARNING,) if instructed.messages != turns else (),
    )


def _add_instruction(
    request: ChatRequest,
    turns: tuple[ConversationMessage, ...],
    tools: Sequence[Tool],
    settings: ServeSettings,
) -> InstructedConversation:
    """Return the conversation for the prompt, with the JSON instruction if it applies."""
    schema = request.response_format and request.response_format.prompt_schema
    return (
        add_json_instruction(turns, schema)
        if schema and settings.json_instruction and not tools
        else InstructedConversation(turns)
    )


def _find_chat_end(request: ChatRequest, last: ConversationMessage) -> ChatEnd:
    """Return how the prompt ends; a last assistant message is continued unless disabled."""
    wanted, opened = request.continue_final_message, request.add_generation_prompt
    if wanted and opened:
        raise FieldError.at(
            "continue_final_message", "it cannot be combined with add_generation_prompt"
        )
    if wanted and not can_continue(last):
        raise FieldError.at(
            "continue_final_message", "the last message is not text of the assistant"
        )
    if wanted or (wanted is None and opened is None and can_continue(last)):
        return "continue"
    return "as_is" if opened is False else "new_turn"


def _build_job(
    request: ChatRequest,
    run_request: RunRequest,
    parser_config: OutputParserConfig,
    *,
    owner: str,
    settings: ServeSettings,
) -> GenerationJob:
    return GenerationJob(
        id=uuid.uuid4().hex,
        request=run_request,
        owner=owner,
        priority=DEFAULT_PRIORITY if request.priority is None else request.priority,
        deadline=compute_deadline(request.timeout_ms, default=settings.timeout),
        answers=request.answer_count,
        stop_rules=build_stop_rules(request, max_tokens=_read_max_tokens(request)),
        logprobs=_read_logprobs(request),
        check=build_answer_validator(
            parser_config,
            text_check=_build_format_check(request, settings),
            tools=list_strict_tools(request.tools or ()) if parser_config.tools else (),
        ),
    )


def _select_tools(request: ChatRequest, template: ChatTemplateTraits) -> tuple[Tool, ...]:
    tools = select_tools(request.tools or (), request.tool_choice)
    if tools and not template.reads_tools:
        raise FieldError.at("tools", "the chat template of this base does not support tools")
    return tools


def _read_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise FieldError(
            f"max_tokens {old} and max_completion_tokens {new} contradict each other",
            field="max_tokens",
            hint="give max_completion_tokens alone",
        )
    return old if new is None else new


def _read_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise FieldError.at(
            "top_logprobs", "it requires logprobs", hint="set logprobs, or leave it out"
        )
    return None


def _build_format_check(request: ChatRequest, settings: ServeSettings) -> CheckFunction | None:
    try:
        return build_check(request.response_format, commands=settings.validators)
    except UsageError as error:
        raise FieldError(error.message, field="response_format", hint=error.hint) from error


def _make_cache_key(request: ChatRequest, caller: Caller) -> str:
    metadata: Mapping[str, str] = request.metadata or {}
    return make_cache_key(
        caller,
        request.cache_key,
        request.prompt_cache_key,
        request.session_id,
        metadata.get("cache_key"),
        metadata.get("session_id"),
        request.user,
        request.safety_identifier,
    )


def _build_variables(request: ChatRequest, tools: tuple[Tool, ...]) -> JsonObject:
    given = cast("JsonObject", request.chat_template_kwargs or {})
    for name in filter(_RESERVED_VARIABLES.fullmatch, given):
        field = f"chat_template_kwargs.{name}"
        raise FieldError.at(field, "it is set by the request or the base")
    _check_variables(given)
    variables: JsonObject = {}
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        variables |= {"enable_thinking": False} if request.reasoning_effort == "none" else {}
    if tools:
        tool_documents = [tool.to_json() for tool in tools]
        check_tools_length(tool_documents)
        variables["tools"] = list[JsonValue](tool_documents)
    return {**variables, **given}


def _check_variables(variables: JsonObject) -> None:
    """Check the template variables of a request; they are part of a cache key."""
    field = "chat_template_kwargs"
    if any(isinstance(value, list | dict) for value in variables.values()):
        raise FieldError.at(field, "only strings, numbers and booleans are supported")
    if (
        sum(len(name) + len(str(value)) for name, value in variables.items())
        > MAX_VARIABLE_CHARACTERS
    ):
        raise FieldError.at(field, f"over {MAX_VARIABLE_CHARACTERS} characters")


def build_chat_completion(
    call: ChatCall, collected: CollectedJob, *, reasoning_tokens: int = 0
) -> ChatCompletion:
    """Return the answer to a chat request, without choices not started before the deadline."""
    read = [call.parser_config.parse(result.generated.text) for result in collected.results]
    parts = zip(collected.results, read, collected.sampled, strict=False)
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[_build_choice(call, index, *one) for index, one in enumerate(parts)],
        usage=build_usage([collected.results], reasoning=reasoning_tokens),
        system_fingerprint=make_fingerprint(collected.results[0].planned.result.plan),
        expertctl=build_extension(
            [
                AnsweredChoice(index, result, one.warnings)
                for index, (result, one) in enumerate(zip(collected.results, read, strict=True))
            ],
            ignored=call.ignored_fields,
            warnings=call.warnings,
        ),
    )


def build_tool_call(call: ChatCall, found: ParsedToolCall, *, index: int, number: int) -> ToolCall:
    """Return a tool call of an answer; its id is unique within the job."""
    number += index * MAX_CALLS_PER_ANSWER
    return ToolCall(
        id=make_call_id("call_", job_id=call.job.id, number=number),
        function=CalledFunction(name=found.name, arguments=found.arguments_json),
    )


def _build_choice(
    call: ChatCall,
    index: int,
    result: RunResult,
    read: ParsedOutput,
    sampled: Sequence[SampledToken],
) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=_build_message(call, index, read),
        logprobs=None
        if call.job.logprobs is None
        else build_chat_logprobs(sampled, call.token_bytes),
        finish_reason=map_finish_reason(result.generated.finish_reason, calls=len(read.calls)),
    )


def _build_message(call: ChatCall, index: int, read: ParsedOutput) -> ChatMessage:
    calls = [
        build_tool_call(call, found, index=index, number=number)
        for number, found in enumerate(read.calls)
    ]
    return ChatMessage(
        role="assistant",
        content=read.text or (None if calls else ""),
        refusal=None,
        reasoning_content=read.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
