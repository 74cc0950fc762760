"""`CompletionCall`: a completion request as jobs for the engine, one for each prompt."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.job import DEFAULT_PRIORITY, Job
from expertctl.server.caller import Caller, cache_key_of
from expertctl.server.deadline import deadline_of
from expertctl.server.field_error import FieldError
from expertctl.server.model_name import Choice, chosen
from expertctl.server.openai.completion_request import MAX_PROMPTS, CompletionRequest
from expertctl.server.openai.neutral_values import check_neutral
from expertctl.server.openai.shared_fields import route_of, stop_rules
from expertctl.server.settings import ServeSettings

MAX_TOKENS = 16
"""The length that the published API uses if the client gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """One completion request, read."""

    jobs: tuple[Job, ...]
    model: str
    created: int
    with_usage: bool
    echo: bool
    with_running_usage: bool = False
    ignored: tuple[str, ...] = ()
    """Fields of the request that are ignored."""

    @property
    def id(self) -> str:
        """The id of the answer."""
        return f"cmpl-{self.jobs[0].id}"

    def index(self, number: int, text: int) -> int:
        """Return the index, among all choices, of an answer to a prompt."""
        return number * self.jobs[number].texts + text

    def head(self, number: int) -> str:
        """Return the text that the answers to a prompt begin with: the prompt with ``echo``."""
        return self.jobs[number].request.message.prompt if self.echo else ""


def completion_call(
    request: CompletionRequest,
    *,
    caller: Caller,
    base_name: str,
    settings: ServeSettings,
    ignored: Sequence[str] = (),
) -> CompletionCall:
    """Read a completion request to a server of one base; ``ignored`` fields were left out of it.

    Raises:
        FieldError: when a field asks for what is not done here.
        UsageError: when fields do not fit together.
        ModelNotFoundError: when there is no such model.
    """
    not_done = check_neutral(request, strict=settings.strict_fields)
    _check_echo(request)
    choice = chosen(request.model, base_name=base_name, aliases=settings.aliases)
    deadline = deadline_of(request.timeout_ms, usual=settings.timeout)
    asked = [_run_request(request, one, choice, caller=caller) for one in _prompts(request)]
    return CompletionCall(
        jobs=tuple(_job(request, one, owner=caller.id, deadline=deadline) for one in asked),
        model=request.model,
        created=int(time.time()),
        with_usage=request.with_usage,
        with_running_usage=request.with_running_usage,
        echo=bool(request.echo),
        ignored=(*ignored, *not_done),
    )


def _job(
    request: CompletionRequest, asked: RunRequest, *, owner: str, deadline: float | None
) -> Job:
    return Job(
        id=uuid.uuid4().hex,
        request=asked,
        owner=owner,
        priority=DEFAULT_PRIORITY if request.priority is None else request.priority,
        deadline=deadline,
        texts=request.texts,
        stop_rules=stop_rules(request, max_tokens=request.max_tokens or MAX_TOKENS),
        logprobs=request.logprobs,
    )


def _run_request(
    request: CompletionRequest, prompt: str, choice: Choice, *, caller: Caller
) -> RunRequest:
    usual = None if choice.auto else MAX_TOKENS
    max_tokens = usual if request.max_tokens is None else request.max_tokens
    return RunRequest(
        message=UserMessage(prompt=prompt),
        route=route_of(request, prompt, choice, max_tokens=max_tokens),
        experts=choice.force,
        plain=True,
        cache_key=cache_key_of(caller, request.cache_key, request.session_id, request.user),
    )


def _prompts(request: CompletionRequest) -> list[str]:
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    prompts = [prompt for prompt in given if isinstance(prompt, str)]
    if len(prompts) < len(given):
        raise FieldError(
            "prompt: numbers of tokens are not read, only texts",
            field="prompt",
            hint="send the text that they stand for",
        )
    if len(prompts) * request.texts > MAX_PROMPTS:
        raise FieldError(
            f"prompt: {len(prompts)} prompts with n {request.texts} are more answers than the "
            f"{MAX_PROMPTS} that are allowed",
            field="prompt",
        )
    return prompts


def _check_echo(request: CompletionRequest) -> None:
    if request.echo and request.logprobs is not None:
        raise FieldError(
            "echo: the tokens of the prompt have no logprobs here",
            field="echo",
            hint="leave out the one or the other",
        )
