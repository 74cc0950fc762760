"""`CompletionCall`: a completion request as jobs for the engine, one for each prompt."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.engine.answer_form import Checked
from expertctl.engine.fim import find_fim_tokens
from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.job import DEFAULT_PRIORITY, Job
from expertctl.engine.stop import StopRules
from expertctl.engine.tokenizer import Tokenizer
from expertctl.server.caller import Caller, cache_key_of
from expertctl.server.deadline import deadline_of
from expertctl.server.field_error import FieldError
from expertctl.server.model_name import Choice, chosen
from expertctl.server.openai.completion_prompt import CompletionPrompt, read_prompts
from expertctl.server.openai.completion_request import CompletionRequest
from expertctl.server.openai.neutral_values import check_neutral
from expertctl.server.openai.shared_fields import route_of, stop_rules
from expertctl.server.settings import ServeSettings

MAX_TOKENS = 16
"""The length that the published API uses if the client gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """One completion request, read."""

    jobs: tuple[Job, ...]
    prompts: tuple[CompletionPrompt, ...]
    tokenizer: Tokenizer
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
        return self.prompts[number].text if self.echo else ""

    @property
    def scores_prompt(self) -> bool:
        """Whether answers begin with the log-probabilities of the prompt's tokens."""
        return self.jobs[0].prompt_logprobs is not None


def completion_call(
    request: CompletionRequest,
    *,
    caller: Caller,
    base_name: str,
    tokenizer: Tokenizer,
    settings: ServeSettings,
    ignored: Sequence[str] = (),
) -> CompletionCall:
    """Read a completion request to a server of one base; ``ignored`` fields were left out of it.

    Prompts whose log-probabilities are wanted are tokenised here, and prompts of tokens decoded,
    which may take a while.

    Raises:
        FieldError: when a field asks for what is not done here.
        UsageError: when fields do not fit together.
        ModelNotFoundError: when there is no such model.
    """
    not_done = check_neutral(request, strict=settings.strict_fields)
    _check_suffix(request, tokenizer)
    choice = chosen(request.model, base_name=base_name, aliases=settings.aliases)
    deadline = deadline_of(request.timeout_ms, usual=settings.timeout)
    prompts = read_prompts(request, tokenizer, parse_special=settings.completions_special_tokens)
    asked = [_run_request(request, one, choice, caller=caller) for one in prompts]
    rules = stop_rules(request, max_tokens=_max_tokens(request, choice))
    return CompletionCall(
        jobs=tuple(_job(request, one, rules, owner=caller.id, deadline=deadline) for one in asked),
        prompts=tuple(prompts),
        tokenizer=tokenizer,
        model=request.model,
        created=int(time.time()),
        with_usage=request.with_usage,
        with_running_usage=request.with_running_usage,
        echo=bool(request.echo),
        ignored=(*ignored, *not_done),
    )


def _job(
    request: CompletionRequest,
    asked: RunRequest,
    rules: StopRules,
    *,
    owner: str,
    deadline: float | None,
) -> Job:
    is_only_read = request.max_tokens == 0
    return Job(
        id=uuid.uuid4().hex,
        request=asked,
        owner=owner,
        priority=DEFAULT_PRIORITY if request.priority is None else request.priority,
        deadline=deadline,
        texts=request.texts,
        stop_rules=rules,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.scores_prompt else None,
        remember=not is_only_read,
        check=_pass if is_only_read else None,
    )


def _run_request(
    request: CompletionRequest, prompt: CompletionPrompt, choice: Choice, *, caller: Caller
) -> RunRequest:
    most = _max_tokens(request, choice)
    max_tokens = None if most is None else max(1, most)
    return RunRequest(
        message=UserMessage(prompt=prompt.routed_by),
        route=route_of(request, prompt.routed_by, choice, max_tokens=max_tokens),
        experts=choice.force,
        raw=prompt.raw,
        cache_key=cache_key_of(caller, request.cache_key, request.session_id, request.user),
    )


def _max_tokens(request: CompletionRequest, choice: Choice) -> int | None:
    """Return how long an answer may be; None where experts or the preset of the task decide."""
    if request.max_tokens is None:
        return None if choice.auto else MAX_TOKENS
    return request.max_tokens


def _check_suffix(request: CompletionRequest, tokenizer: Tokenizer) -> None:
    if not request.suffix:
        return
    if find_fim_tokens(tokenizer) is None:
        raise FieldError(
            "suffix: this base has no fill-in-the-middle tokens",
            field="suffix",
            hint="leave it out, or ask a server of a base that was trained for it",
        )
    if request.echo:
        raise FieldError(
            "echo: it does not go with suffix, behind which nothing is written",
            field="echo",
            hint="leave out the one or the other",
        )


def _pass(_: str) -> Checked:
    """Check nothing: no answer was asked for."""
    return Checked(None)
