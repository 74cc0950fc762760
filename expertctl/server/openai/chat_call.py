"""`ChatCall`: a chat request as a job for the engine, and how its answers are to be read."""

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from expertctl.engine.message import ChatEnd, Message, UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import DEFAULT_PRIORITY, Check, Job
from expertctl.errors import UsageError
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.answer_check import answer_check
from expertctl.server.answer_reader import Reading
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
from expertctl.server.model_name import chosen
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.conversation import messages_of
from expertctl.server.openai.neutral_values import check_neutral
from expertctl.server.openai.shared_fields import route_of, stop_rules
from expertctl.server.openai.tool import Tool, offered, strict_tools
from expertctl.server.post_processing.check import check_of
from expertctl.server.settings import ServeSettings
from expertctl.server.thought_tokens import thought_tokens
from expertctl.server.tool_calls.earlier_calls import with_known_ids

_OURS = re.compile(
    "messages|tools|add_generation_prompt|continue_final_message|raise_exception|strftime_now"
    "|[a-z_]*_tokens?"
)
"""Variables of the chat template that the server sets from the call and the base."""

MAX_GIVEN = 4_096
"""Characters that a call may pass to the chat template besides messages and tools."""
MAX_CALLS = 1 << 20
"""More tool calls than one answer can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One chat request, read."""

    job: Job
    reading: Reading
    text: BaseText
    model: str
    created: int
    with_usage: bool
    with_running_usage: bool = False
    ignored: tuple[str, ...] = ()
    """Fields of the request that are ignored."""
    warnings: tuple[str, ...] = ()
    """Warnings of reading the request."""

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they cannot be known."""
        return self.text.tokenizer.bytes_of(token)

    async def thought_tokens(self, results: Sequence[RunResult]) -> int:
        """Return how many tokens of its answers are thought."""
        opened = self.reading.opened
        return await thought_tokens(results, self.text.tokenizer, opened=opened)

    @property
    def id(self) -> str:
        """The id of the answer."""
        return f"chatcmpl-{self.job.id}"


def chat_call(
    request: ChatRequest,
    *,
    caller: Caller,
    base_name: str,
    text: BaseText,
    settings: ServeSettings,
    ignored: Sequence[str] = (),
) -> ChatCall:
    """Read a chat request to a server of one base; ``ignored`` fields were left out of it.

    Raises:
        FieldError: when a field asks for what is not done here.
        UsageError: when fields do not fit together.
        ModelNotFoundError: when there is no such model.
    """
    not_done = check_neutral(request, strict=settings.strict_fields)
    choice = chosen(request.model, base_name=base_name, aliases=settings.aliases)
    tools = _tools(request, text)
    variables = _variables(request, tools)
    turns = with_known_ids(messages_of(request.messages), text.form)
    told = _told(request, turns, tools, settings)
    end = _chat_end(request, turns[-1])
    reading = _reading(
        request,
        text,
        tools,
        opened=opens_thinking(text, variables, turns[-1], end=end),
        before=answer_begin(turns[-1], end=end),
        tag_begin=tag_begin(turns[-1], end=end),
    )
    prompt = routed_by(turns)
    asked = RunRequest(
        message=UserMessage(prompt=prompt),
        route=route_of(request, prompt, choice, max_tokens=_max_tokens(request)),
        experts=choice.force,
        turns=told,
        variables=variables,
        chat_end=end,
        cache_key=_cache_key(request, caller),
    )
    return ChatCall(
        job=_job(request, asked, reading, owner=caller.id, settings=settings),
        reading=reading,
        text=text,
        model=request.model,
        created=int(time.time()),
        with_usage=request.with_usage,
        with_running_usage=request.with_running_usage,
        ignored=(*ignored, *not_done),
        warnings=(ADDED,) if told != turns else (),
    )


def _told(
    request: ChatRequest,
    turns: tuple[Message, ...],
    tools: Sequence[Tool],
    settings: ServeSettings,
) -> tuple[Message, ...]:
    """Return the conversation that is read; it may say the form of JSON that is asked for."""
    schema = request.response_format and request.response_format.shown_schema
    return instruct(turns, schema) if schema and settings.json_instruction and not tools else turns


def _reading(
    request: ChatRequest,
    text: BaseText,
    tools: Sequence[Tool],
    *,
    opened: bool,
    before: str,
    tag_begin: str,
) -> Reading:
    form = request.response_format
    return Reading(
        form=text.form,
        tools=frozenset(tool.function.name for tool in tools),
        one_call=request.parallel_tool_calls is False,
        thinks=text.thinks,
        opened=opened,
        json_asked=form is not None and form.is_json,
        before=before,
        tag_begin=tag_begin,
    )


def _chat_end(request: ChatRequest, last: Message) -> ChatEnd:
    """Return how the prompt ends; text of the assistant at the end is continued unless refused."""
    wanted, opened = request.continue_final_message, request.add_generation_prompt
    if wanted and opened:
        raise FieldError(
            "continue_final_message: it cannot be given with add_generation_prompt",
            field="continue_final_message",
        )
    if wanted and not can_continue(last):
        raise FieldError(
            "continue_final_message: the last message is no text of the assistant",
            field="continue_final_message",
        )
    if wanted or (wanted is None and opened is None and can_continue(last)):
        return "continue"
    return "as_is" if opened is False else "new_turn"


def _job(
    request: ChatRequest,
    asked: RunRequest,
    reading: Reading,
    *,
    owner: str,
    settings: ServeSettings,
) -> Job:
    return Job(
        id=uuid.uuid4().hex,
        request=asked,
        owner=owner,
        priority=DEFAULT_PRIORITY if request.priority is None else request.priority,
        deadline=deadline_of(request.timeout_ms, usual=settings.timeout),
        texts=request.texts,
        stop_rules=stop_rules(request, max_tokens=_max_tokens(request)),
        logprobs=_logprobs(request),
        check=answer_check(
            reading,
            form=_form(request, settings),
            tools=strict_tools(request.tools or ()) if reading.tools else (),
        ),
    )


def _tools(request: ChatRequest, text: BaseText) -> tuple[Tool, ...]:
    tools = offered(request.tools or (), request.tool_choice)
    if tools and not text.reads_tools:
        raise FieldError("tools: the chat template of this base reads none", field="tools")
    return tools


def _max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise FieldError(
            f"max_tokens {old} and max_completion_tokens {new} say different things",
            field="max_tokens",
            hint="give max_completion_tokens alone",
        )
    return old if new is None else new


def _logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise FieldError(
            "top_logprobs: it is for answers with logprobs only",
            field="top_logprobs",
            hint="give logprobs, too",
        )
    return None


def _form(request: ChatRequest, settings: ServeSettings) -> Check | None:
    try:
        return check_of(request.response_format, commands=settings.validators)
    except UsageError as error:
        raise FieldError(error.message, field="response_format", hint=error.hint) from error


def _cache_key(request: ChatRequest, caller: Caller) -> str:
    metadata: Mapping[str, str] = request.metadata or {}
    return cache_key_of(
        caller,
        request.cache_key,
        request.prompt_cache_key,
        request.session_id,
        metadata.get("cache_key"),
        metadata.get("session_id"),
        request.user,
        request.safety_identifier,
    )


def _variables(request: ChatRequest, tools: tuple[Tool, ...]) -> JsonObject:
    given = cast("JsonObject", request.chat_template_kwargs or {})
    for name in filter(_OURS.fullmatch, given):
        field = f"chat_template_kwargs.{name}"
        raise FieldError(f"{field}: the call or the base says that", field=field)
    _check_given(given)
    said: JsonObject = {}
    if request.reasoning_effort is not None:
        said["reasoning_effort"] = request.reasoning_effort
        said |= {"enable_thinking": False} if request.reasoning_effort == "none" else {}
    if tools:
        told = [tool.to_json() for tool in tools]
        check_tools(told)
        said["tools"] = list[JsonValue](told)
    return {**said, **given}


def _check_given(given: JsonObject) -> None:
    """Bound the variables of a request; they are part of the key of a cache."""
    field = "chat_template_kwargs"
    if any(isinstance(value, list | dict) for value in given.values()):
        raise FieldError(f"{field}: only words, numbers and truth values are taken", field=field)
    if sum(len(name) + len(str(value)) for name, value in given.items()) > MAX_GIVEN:
        raise FieldError(f"{field}: over {MAX_GIVEN} characters", field=field)
