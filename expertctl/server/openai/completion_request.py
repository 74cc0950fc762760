"""`CompletionRequest`: the body of a completion request, its prompts, jobs and whole answer.

Prompts are texts or tokens, one or several, possibly with a suffix; each becomes one job. Control
tokens spelled in a text are control tokens if the server's setting and the request allow it; with a
suffix, prompt and suffix are the text of a file and are taken literally unless the request says
otherwise. ``parse_special`` is llama.cpp's name, ``add_special_tokens`` vLLM's.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from expertctl.engine.generation import StopRules
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import SampledToken
from expertctl.engine.serving.request import DEFAULT_PRIORITY, GenerationJob
from expertctl.engine.text.answer_format import FormatCheck
from expertctl.engine.text.chat_template import encode_raw_prompt, find_fim_tokens
from expertctl.engine.text.prompt import RawPrompt
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.http.operation import FieldError
from expertctl.server.openai.generation_request import (
    GenerationFields,
    build_route_request,
    build_stop_rules,
    check_unsupported,
)
from expertctl.server.openai.response import (
    AnsweredChoice,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Extension,
    PromptExtensions,
    TokenOffsets,
    build_completion_logprobs,
    build_extension,
    build_prompt_logprobs,
    build_usage,
    join_logprobs,
    make_fingerprint,
    map_finish_reason,
)
from expertctl.server.request_body import compute_deadline
from expertctl.server.responses import Caller, make_cache_key
from expertctl.server.settings import ModelSelection, ServeSettings, parse_model
from expertctl.server.streaming import CollectedJob
from expertctl.user_request import LIMITS, MAX_PROMPT_CHARACTERS, UserMessage

MAX_PROMPTS = 128
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Meta(min_length=1, max_length=200_000)]
Prompts = str | Annotated[list[str | Token | Tokens], Meta(min_length=1, max_length=200_000)]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """A request for completions; with ``max_tokens`` 0 the prompts are only read."""

    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=LIMITS["max_tokens"][1])] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def has_token_prompts(self) -> bool:
        """Whether a prompt is given as tokens, which takes a while to decode."""
        prompt = self.prompt
        return not isinstance(prompt, str) and any(not isinstance(one, str) for one in prompt)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt tokens are requested."""
        return bool(self.echo) and self.logprobs is not None


MAX_PROMPT_LOGPROBS = 600_000
"""Maximum prompt log-probabilities in one answer; each takes some hundred bytes."""
_ROUTING_TOKENS = 2000
"""Number of tokens that routing uses of a prompt given as tokens."""
_ROUTING_PLACEHOLDER = "?"
"""Routing text of a prompt without text; no expert matches it."""


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """A prompt of a request."""

    raw: RawPrompt
    routing_text: str
    """The text that routing uses."""
    text: str
    """The text that ``echo`` puts before the answer: as given, or decoded from tokens."""


def read_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, *, parse_special: bool
) -> list[CompletionPrompt]:
    """Read the prompts of a request; ``parse_special`` is the default for the request's field.

    Raises:
        FieldError: names the invalid field.
        UsageError: when a text cannot be tokenised.
    """
    given = _split_prompts(request.prompt)
    if len(given) * request.answer_count > MAX_PROMPTS:
        raise FieldError.at(
            "prompt",
            f"{len(given)} prompts with n {request.answer_count} are more answers than the "
            f"{MAX_PROMPTS} that are allowed",
        )
    raw = RawPrompt(
        suffix=request.suffix or None,
        parse_special=_first_given(request.parse_special, parse_special and not request.suffix),
        add_special_tokens=_first_given(request.add_special_tokens, True),
        is_continued=request.max_tokens != 0,
    )
    prompts = [_read_prompt(one, raw, tokenizer, echo=bool(request.echo)) for one in given]
    return _tokenise_scored(request, prompts, tokenizer) if request.scores_prompt else prompts


def _split_prompts(prompt: str | Sequence[str | int | list[int]]) -> list[str | tuple[int, ...]]:
    """Return texts and token lists; a flat list of numbers is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    tokens = tuple(one for one in prompt if isinstance(one, int))
    others = [one for one in prompt if not isinstance(one, int)]
    if tokens and others:
        raise FieldError.at(
            "prompt",
            "numbers are mixed with texts or lists of numbers",
            hint="send one text, one list of tokens, a list of texts, or a list of such lists",
        )
    return [tokens] if tokens else [one if isinstance(one, str) else tuple(one) for one in others]


def _read_prompt(
    given: str | tuple[int, ...], defaults: RawPrompt, tokenizer: Tokenizer, *, echo: bool
) -> CompletionPrompt:
    """Read one prompt; tokens are decoded to text only for ``echo``."""
    if isinstance(given, str):
        return _read_text(given, defaults)
    if defaults.suffix is not None:
        raise FieldError.at(
            "suffix",
            "it requires a text prompt, not tokens",
            hint="put the fill-in-the-middle tokens of the base into the prompt yourself",
        )
    strange = next((one for one in given if one >= tokenizer.size), None)
    if strange is not None:
        raise FieldError.at("prompt", f"there is no token {strange}; the base has {tokenizer.size}")
    routed_by = tokenizer.decode(given[:_ROUTING_TOKENS])[:MAX_PROMPT_CHARACTERS]
    raw = replace(defaults, ids=given)
    text = tokenizer.decode_raw(given) if echo else ""
    return CompletionPrompt(raw, routed_by if routed_by.strip() else _ROUTING_PLACEHOLDER, text)


def _read_text(given: str, defaults: RawPrompt) -> CompletionPrompt:
    """Read a text prompt; with a suffix it may be empty: the middle begins the file."""
    suffix = defaults.suffix
    if suffix is None:
        return CompletionPrompt(replace(defaults, text=given), given, given)
    size = len(given) + len(suffix)
    if size > MAX_PROMPT_CHARACTERS:
        raise FieldError.at(
            "suffix",
            f"it has {size} characters with the prompt, at most {MAX_PROMPT_CHARACTERS} "
            "are allowed",
        )
    texts = (one for one in (given, suffix) if one.strip())
    return CompletionPrompt(replace(defaults, text=given), next(texts, _ROUTING_PLACEHOLDER), given)


def _tokenise_scored(
    request: CompletionRequest, prompts: Sequence[CompletionPrompt], tokenizer: Tokenizer
) -> list[CompletionPrompt]:
    """Tokenise prompts whose log-probabilities are requested, and check their number."""
    read = [
        replace(one, raw=replace(one.raw, ids=encode_raw_prompt(tokenizer, one.raw).ids))
        for one in prompts
    ]
    each = (1 + (request.logprobs or 0)) * request.answer_count
    wanted = each * sum(len(one.raw.ids or ()) for one in read)
    if wanted > MAX_PROMPT_LOGPROBS:
        raise FieldError.at(
            "logprobs",
            f"{wanted} log-probabilities of prompts are more than the "
            f"{MAX_PROMPT_LOGPROBS} that one answer has",
            hint="send fewer prompts in one request",
        )
    return read


def _first_given(given: bool | None, default: bool) -> bool:
    return default if given is None else given


DEFAULT_MAX_TOKENS = 16
"""The default length of the published API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A parsed completion request: its jobs and what their answers need."""

    jobs: tuple[GenerationJob, ...]
    prompts: tuple[CompletionPrompt, ...]
    tokenizer: Tokenizer
    model: str
    created: int
    with_usage: bool
    echo: bool
    with_continuous_usage: bool = False
    ignored_fields: tuple[str, ...] = ()
    """Ignored fields of the request."""

    @property
    def id(self) -> str:
        """The id of the completion."""
        return f"cmpl-{self.jobs[0].id}"

    def choice_index(self, number: int, text: int) -> int:
        """Return the index among all choices of an answer to a prompt."""
        return number * self.jobs[number].answers + text

    def echoed_text(self, number: int) -> str:
        """Return the text before the answers to a prompt: the prompt with ``echo``, else empty."""
        return self.prompts[number].text if self.echo else ""

    @property
    def scores_prompt(self) -> bool:
        """Whether answers include the log-probabilities of the prompt tokens."""
        return self.jobs[0].prompt_logprobs is not None


def build_completion_call(
    request: CompletionRequest,
    *,
    caller: Caller,
    base_name: str,
    tokenizer: Tokenizer,
    settings: ServeSettings,
    ignored: Sequence[str] = (),
) -> CompletionCall:
    """Build the jobs of a completion request; ``ignored`` are the fields removed from it.

    Tokenising prompts for log-probabilities, and decoding prompts of tokens, may take a while.

    Raises:
        FieldError: when a field asks for something unsupported.
        UsageError: when fields contradict each other.
        ModelNotFoundError: when there is no such model.
    """
    not_done = check_unsupported(request, strict=settings.strict_fields)
    _check_suffix(request, tokenizer)
    choice = parse_model(request.model, base_name=base_name, aliases=settings.aliases)
    deadline = compute_deadline(request.timeout_ms, default=settings.timeout)
    prompts = read_prompts(request, tokenizer, parse_special=settings.completions_special_tokens)
    run_requests = [_build_run_request(request, one, choice, caller=caller) for one in prompts]
    rules = build_stop_rules(request, max_tokens=_find_max_tokens(request, choice))
    return CompletionCall(
        jobs=tuple(
            _build_job(request, one, rules, owner=caller.id, deadline=deadline)
            for one in run_requests
        ),
        prompts=tuple(prompts),
        tokenizer=tokenizer,
        model=request.model,
        created=int(time.time()),
        with_usage=request.with_usage,
        with_continuous_usage=request.with_continuous_usage,
        echo=bool(request.echo),
        ignored_fields=(*ignored, *not_done),
    )


def _build_job(
    request: CompletionRequest,
    run_request: RunRequest,
    rules: StopRules,
    *,
    owner: str,
    deadline: float | None,
) -> GenerationJob:
    is_only_read = request.max_tokens == 0
    return GenerationJob(
        id=uuid.uuid4().hex,
        request=run_request,
        owner=owner,
        priority=DEFAULT_PRIORITY if request.priority is None else request.priority,
        deadline=deadline,
        answers=request.answer_count,
        stop_rules=rules,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.scores_prompt else None,
        remember=not is_only_read,
        check=_skip_check if is_only_read else None,
    )


def _build_run_request(
    request: CompletionRequest, prompt: CompletionPrompt, choice: ModelSelection, *, caller: Caller
) -> RunRequest:
    most = _find_max_tokens(request, choice)
    max_tokens = None if most is None else max(1, most)
    return RunRequest(
        message=UserMessage(prompt=prompt.routing_text),
        route=build_route_request(request, prompt.routing_text, choice, max_tokens=max_tokens),
        experts=choice.force,
        raw=prompt.raw,
        cache_key=make_cache_key(caller, request.cache_key, request.session_id, request.user),
    )


def _find_max_tokens(request: CompletionRequest, choice: ModelSelection) -> int | None:
    """Return the answer's maximum length; None: experts or the preset decide."""
    if request.max_tokens is None:
        return None if choice.auto else DEFAULT_MAX_TOKENS
    return request.max_tokens


def _check_suffix(request: CompletionRequest, tokenizer: Tokenizer) -> None:
    if not request.suffix:
        return
    if find_fim_tokens(tokenizer) is None:
        raise FieldError.at(
            "suffix",
            "this base has no fill-in-the-middle tokens",
            hint="leave it out, or use a base trained for it",
        )
    if request.echo:
        raise FieldError.at(
            "echo", "it cannot be combined with suffix", hint="leave out one of them"
        )


def _skip_check(_: str) -> FormatCheck:
    """Check nothing: no answer was requested."""
    return FormatCheck(None)


def build_completion(call: CompletionCall, collected: Sequence[CollectedJob]) -> Completion:
    """Return the answer to a completion request: for each prompt in order, all its answers."""
    results = [one.results for one in collected]
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[
            one
            for number, each in enumerate(collected)
            for one in _build_choices(call, number, each)
        ],
        usage=build_usage(results),
        system_fingerprint=make_fingerprint(results[0][0].planned.result.plan),
        expertctl=build_call_extension(call, results),
    )


def build_call_extension(
    call: CompletionCall, results: Sequence[Sequence[RunResult]]
) -> Extension | PromptExtensions:
    """Return the ``expertctl`` object, per prompt if there are several."""
    each = [
        build_extension(
            [AnsweredChoice(call.choice_index(number, i), r) for i, r in enumerate(one)],
            ignored=call.ignored_fields,
        )
        for number, one in enumerate(results)
    ]
    return each[0] if len(each) == 1 else PromptExtensions(prompts=each)


def _build_choices(
    call: CompletionCall, number: int, collected: CollectedJob
) -> list[CompletionChoice]:
    head = call.echoed_text(number)
    prompt = (
        None
        if collected.prompt is None
        else build_prompt_logprobs(collected.prompt, head, call.tokenizer)
    )
    return [
        CompletionChoice(
            index=call.choice_index(number, i),
            text=head + result.generated.text,
            logprobs=_build_logprobs(call, tokens, prompt, start=len(head)),
            finish_reason=map_finish_reason(result.generated.finish_reason),
        )
        for i, (result, tokens) in enumerate(
            zip(collected.results, collected.sampled, strict=False)
        )
    ]


def _build_logprobs(
    call: CompletionCall,
    sampled: Sequence[SampledToken],
    prompt: CompletionLogprobs | None,
    *,
    start: int,
) -> CompletionLogprobs | None:
    """Return the logprobs of the prompt and an answer; None if not requested.

    If the deadline passed before the whole prompt was read, there are none either.
    """
    if call.jobs[0].logprobs is None or (call.scores_prompt and prompt is None):
        return None
    places = TokenOffsets(call.tokenizer, start=start)
    scores = build_completion_logprobs(sampled, call.tokenizer.token_text, places)
    return scores if prompt is None else join_logprobs(prompt, scores)
