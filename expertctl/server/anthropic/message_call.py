"""`MessageCall`: a request for a message as a job for the engine, and how its answer is read."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.engine.message import ChatEnd, Message, UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import DEFAULT_PRIORITY, Check, Job
from expertctl.errors import UsageError
from expertctl.routing.presets import DEFAULT_MAX_EXPERTS, SamplingWishes
from expertctl.routing.request import RouteRequest, check_request, parse_target
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.answer_check import answer_check
from expertctl.server.answer_reader import Reading
from expertctl.server.anthropic.conversation import messages_of
from expertctl.server.anthropic.message_request import (
    CountRequest,
    MessageRequest,
    ThinkingEnabled,
    check_thinking,
)
from expertctl.server.anthropic.tool import OfferedTool, offered, one_call, strict_tools
from expertctl.server.asked_text import (
    answer_begin,
    can_continue,
    check_tools,
    opens_thinking,
    routed_by,
    tag_begin,
)
from expertctl.server.base_text import BaseText
from expertctl.server.caller import Caller, cache_key_of
from expertctl.server.deadline import deadline_of
from expertctl.server.field_error import FieldError
from expertctl.server.json_instruction import ADDED, instruct
from expertctl.server.model_name import Choice, chosen
from expertctl.server.post_processing.check import check_of
from expertctl.server.post_processing.response_format import ResponseFormat
from expertctl.server.sampling_fields import top_k_of, top_p_of
from expertctl.server.settings import ServeSettings
from expertctl.server.thought_tokens import thought_tokens
from expertctl.server.tool_calls.earlier_calls import with_known_ids
from expertctl.server.unknown_fields import ignored_warning

NO_BUDGET = "thinking.budget_tokens is not enforced: max_tokens alone ends a thought"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A conversation in the form that the chat template takes."""

    messages: tuple[Message, ...]
    """What the model reads."""
    sent: tuple[Message, ...]
    """What the client sent, which experts are chosen by."""
    tools: tuple[OfferedTool, ...]
    variables: JsonObject
    warnings: tuple[str, ...] = ()

    @property
    def end(self) -> ChatEnd:
        """How the prompt ends: text of the assistant at the end is continued."""
        return "continue" if can_continue(self.messages[-1]) else "new_turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCall:
    """One request for a message, read."""

    job: Job
    reading: Reading
    text: BaseText
    model: str
    shows_thinking: bool
    stop_sequences: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    """Fields of the request that are ignored."""

    async def thought_tokens(self, results: Sequence[RunResult]) -> int:
        """Return how many tokens of the answer are thought."""
        opened = self.reading.opened
        return await thought_tokens(results, self.text.tokenizer, opened=opened)

    @property
    def id(self) -> str:
        """The id of the message."""
        return f"msg_{self.job.id}"


def asked_of(request: CountRequest, text: BaseText, *, json_instruction: bool) -> Asked:
    """Read the conversation, tools and variables that the model gets.

    Raises:
        FieldError: when a field asks for what is not done here.
    """
    tools = offered(request.tools or (), request.tool_choice)
    if tools and not text.reads_tools:
        raise FieldError("tools: the chat template of this base reads none", field="tools")
    variables: JsonObject = {"enable_thinking": request.thinks}
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    if tools:
        told = [tool.to_json() for tool in tools]
        check_tools(told)
        variables["tools"] = list[JsonValue](told)
    messages = with_known_ids(messages_of(request.system, request.messages), text.form)
    wanted = request.output_config.format if request.output_config else None
    shown = wanted is not None and json_instruction and not tools
    read = instruct(messages, wanted.schema) if wanted and shown else messages
    return Asked(
        messages=read,
        sent=messages,
        tools=tools,
        variables=variables,
        warnings=(ADDED,) if read != messages else (),
    )


def message_call(
    request: MessageRequest,
    *,
    caller: Caller,
    base_name: str,
    text: BaseText,
    settings: ServeSettings,
    ignored: Sequence[str] = (),
) -> MessageCall:
    """Read a request to a server of one base; ``ignored`` fields were left out of it.

    Raises:
        FieldError: when a field asks for what is not done here.
        UsageError: when fields do not fit together.
        ModelNotFoundError: when there is no such model.
    """
    check_thinking(request)
    choice = chosen(request.model, base_name=base_name, aliases=settings.aliases)
    asked = asked_of(request, text, json_instruction=settings.json_instruction)
    reading = _reading(request, asked, text)
    job = Job(
        id=uuid.uuid4().hex,
        request=_run_request(request, asked, choice, caller),
        owner=caller.id,
        priority=DEFAULT_PRIORITY if request.priority is None else request.priority,
        deadline=deadline_of(request.timeout_ms, usual=settings.timeout),
        check=_check(request, asked, reading),
    )
    return MessageCall(
        job=job,
        reading=reading,
        text=text,
        model=request.model,
        shows_thinking=request.shows_thinking,
        stop_sequences=tuple(request.stop_sequences or ()),
        warnings=(*ignored_warning(ignored), *asked.warnings, *_not_enforced(request)),
        ignored=tuple(ignored),
    )


def _check(request: MessageRequest, asked: Asked, reading: Reading) -> Check | None:
    return answer_check(
        reading,
        form=_form(request),
        tools=strict_tools(request.tools or ()) if reading.tools else (),
    )


def _not_enforced(request: MessageRequest) -> tuple[str, ...]:
    return (NO_BUDGET,) if isinstance(request.thinking, ThinkingEnabled) else ()


def _reading(request: MessageRequest, asked: Asked, text: BaseText) -> Reading:
    return Reading(
        form=text.form,
        tools=frozenset(tool.name for tool in asked.tools),
        one_call=one_call(request.tool_choice),
        thinks=text.thinks,
        opened=opens_thinking(text, asked.variables, asked.messages[-1], end=asked.end),
        json_asked=bool(request.output_config and request.output_config.format),
        before=answer_begin(asked.messages[-1], end=asked.end),
        tag_begin=tag_begin(asked.messages[-1], end=asked.end),
    )


def _run_request(
    request: MessageRequest, asked: Asked, choice: Choice, caller: Caller
) -> RunRequest:
    prompt = routed_by(asked.sent)
    most = request.max_experts
    route = RouteRequest(
        prompt=prompt,
        exclude=tuple(parse_target(one) for one in request.exclude_experts or ()),
        base_alone=choice.base_alone,
        seed=request.seed,
        wishes=_wishes(request),
        max_experts=DEFAULT_MAX_EXPERTS if most is None else most,
    )
    check_request(route)
    return RunRequest(
        message=UserMessage(prompt=prompt),
        route=route,
        experts=choice.force,
        turns=asked.messages,
        variables=asked.variables,
        chat_end=asked.end,
        cache_key=_cache_key(request, caller),
    )


def _wishes(request: MessageRequest) -> SamplingWishes:
    """Return what the request says of how tokens are drawn."""
    stop = request.stop_sequences
    return SamplingWishes(
        temperature=request.temperature,
        top_p=top_p_of(request.top_p),
        top_k=top_k_of(request.top_k),
        max_tokens=request.max_tokens,
        stop=None if stop is None else tuple(stop),
    )


def _cache_key(request: MessageRequest, caller: Caller) -> str:
    user = None if request.metadata is None else request.metadata.user_id
    return cache_key_of(caller, request.cache_key, request.session_id, user)


def _form(request: MessageRequest) -> Check | None:
    wanted = request.output_config.format if request.output_config else None
    if wanted is None:
        return None
    field = "output_config.format.schema"
    try:
        return check_of(ResponseFormat(type="json_schema", schema=wanted.schema))
    except UsageError as error:
        fact = error.message.replace("response_format.schema", field)
        raise FieldError(fact, field=field, hint=error.hint) from error
