"""`CompletionRequest`: the body of a completion call, which continues texts as they stand.

``parse_special`` is llama.cpp's name, ``add_special_tokens`` that of vLLM.

The prompts of a completion call: texts or tokens, one or several, perhaps with a suffix.

Control tokens that a text spells are control tokens, if the server's setting and the request leave
it so; beside a suffix, prompt and suffix are the text of a file, whose letters are letters unless
the request says otherwise.

`CompletionCall`: a completion request as jobs for the engine, one for each prompt.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from expertctl.engine.generation import StopRules
from expertctl.engine.request import RunRequest
from expertctl.engine.serving.request import DEFAULT_PRIORITY, GenerationJob
from expertctl.engine.text.answer_format import FormatCheck
from expertctl.engine.text.chat_template import encode_raw_prompt, find_fim_tokens
from expertctl.engine.text.prompt import RawPrompt, UserMessage
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.routing.sampling_presets import LIMITS, MAX_PROMPT_CHARACTERS
from expertctl.server.caller import Caller, make_cache_key
from expertctl.server.model_name import ModelSelection, parse_model
from expertctl.server.openai.generation_request import (
    GenerationFields,
    build_route_request,
    build_stop_rules,
    check_unsupported,
)
from expertctl.server.request_body import FieldError, compute_deadline
from expertctl.server.settings import ServeSettings

MAX_PROMPTS = 128
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Meta(min_length=1, max_length=200_000)]
Prompts = str | Annotated[list[str | Token | Tokens], Meta(min_length=1, max_length=200_000)]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """One completion call; with ``max_tokens`` 0 the prompts are only read."""

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
        """Whether a prompt is given as tokens, whose text takes a while to read."""
        prompt = self.prompt
        return not isinstance(prompt, str) and any(not isinstance(one, str) for one in prompt)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompts' tokens are wanted."""
        return bool(self.echo) and self.logprobs is not None


MAX_PROMPT_LOGPROBS = 600_000
"""The most log-probabilities of prompts in one answer; each takes some hundred bytes."""
_ROUTING_TOKENS = 2000
"""How many tokens of a prompt that is given as tokens are read to choose experts by."""
_ROUTING_PLACEHOLDER = "?"
"""What a prompt without any text is routed by; no expert is for that."""


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt."""

    raw: RawPrompt
    routing_text: str
    """The text that experts are chosen by."""
    text: str
    """The text that ``echo`` puts before the answer: as given, or that of the tokens."""


def read_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, *, parse_special: bool
) -> list[CompletionPrompt]:
    """Read the prompts of a request; ``parse_special`` counts where the request says nothing.

    Raises:
        FieldError: naming the field that cannot be read.
        UsageError: when a text cannot be read as tokens.
    """
    given = _split_prompts(request.prompt)
    if len(given) * request.answer_count > MAX_PROMPTS:
        raise FieldError(
            f"prompt: {len(given)} prompts with n {request.answer_count} are more answers than the "
            f"{MAX_PROMPTS} that are allowed",
            field="prompt",
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
    """Return texts and lists of tokens; numbers side by side are the tokens of one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    tokens = tuple(one for one in prompt if isinstance(one, int))
    others = [one for one in prompt if not isinstance(one, int)]
    if tokens and others:
        raise FieldError(
            "prompt: numbers stand beside texts or lists of numbers",
            field="prompt",
            hint="send one text, one list of tokens, a list of texts, or a list of such lists",
        )
    return [tokens] if tokens else [one if isinstance(one, str) else tuple(one) for one in others]


def _read_prompt(
    given: str | tuple[int, ...], defaults: RawPrompt, tokenizer: Tokenizer, *, echo: bool
) -> CompletionPrompt:
    """Read one prompt; the text of tokens is needed for ``echo`` only."""
    if isinstance(given, str):
        return _read_text(given, defaults)
    if defaults.suffix is not None:
        raise FieldError(
            "suffix: it goes with a text, not with tokens",
            field="suffix",
            hint="put the fill-in-the-middle tokens of the base into the prompt yourself",
        )
    strange = next((one for one in given if one >= tokenizer.size), None)
    if strange is not None:
        raise FieldError(
            f"prompt: there is no token {strange}; the base has {tokenizer.size}", field="prompt"
        )
    routed_by = tokenizer.decode(given[:_ROUTING_TOKENS])[:MAX_PROMPT_CHARACTERS]
    raw = replace(defaults, ids=given)
    text = tokenizer.decode_raw(given) if echo else ""
    return CompletionPrompt(raw, routed_by if routed_by.strip() else _ROUTING_PLACEHOLDER, text)


def _read_text(given: str, defaults: RawPrompt) -> CompletionPrompt:
    """Read a text; with a suffix it may be empty: the middle begins the file."""
    suffix = defaults.suffix
    if suffix is None:
        return CompletionPrompt(replace(defaults, text=given), given, given)
    size = len(given) + len(suffix)
    if size > MAX_PROMPT_CHARACTERS:
        raise FieldError(
            f"suffix: it has {size} characters with the prompt, at most {MAX_PROMPT_CHARACTERS} "
            "are allowed",
            field="suffix",
        )
    texts = (one for one in (given, suffix) if one.strip())
    return CompletionPrompt(replace(defaults, text=given), next(texts, _ROUTING_PLACEHOLDER), given)


def _tokenise_scored(
    request: CompletionRequest, prompts: Sequence[CompletionPrompt], tokenizer: Tokenizer
) -> list[CompletionPrompt]:
    """Tokenise prompts whose log-probabilities are wanted, and bound how many there are."""
    read = [
        replace(one, raw=replace(one.raw, ids=encode_raw_prompt(tokenizer, one.raw).ids))
        for one in prompts
    ]
    each = (1 + (request.logprobs or 0)) * request.answer_count
    wanted = each * sum(len(one.raw.ids or ()) for one in read)
    if wanted > MAX_PROMPT_LOGPROBS:
        raise FieldError(
            f"logprobs: {wanted} log-probabilities of prompts are more than the {MAX_PROMPT_LOGPROBS} "
            "that one answer has",
            field="logprobs",
            hint="send fewer prompts in one request",
        )
    return read


def _first_given(given: bool | None, default: bool) -> bool:
    return default if given is None else given


DEFAULT_MAX_TOKENS = 16
"""The length that the published API uses if the client gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """One completion request, read."""

    jobs: tuple[GenerationJob, ...]
    prompts: tuple[CompletionPrompt, ...]
    tokenizer: Tokenizer
    model: str
    created: int
    with_usage: bool
    echo: bool
    with_continuous_usage: bool = False
    ignored_fields: tuple[str, ...] = ()
    """Fields of the request that are ignored."""

    @property
    def id(self) -> str:
        """The id of the answer."""
        return f"cmpl-{self.jobs[0].id}"

    def choice_index(self, number: int, text: int) -> int:
        """Return the index, among all choices, of an answer to a prompt."""
        return number * self.jobs[number].answers + text

    def echoed_text(self, number: int) -> str:
        """Return the text that the answers to a prompt begin with: the prompt with ``echo``."""
        return self.prompts[number].text if self.echo else ""

    @property
    def scores_prompt(self) -> bool:
        """Whether answers begin with the log-probabilities of the prompt's tokens."""
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
    """Read a completion request to a server of one base; ``ignored_fields`` fields were left out of it.

    Prompts whose log-probabilities are wanted are tokenised here, and prompts of tokens decoded,
    which may take a while.

    Raises:
        FieldError: when a field asks for what is not done here.
        UsageError: when fields do not fit together.
        ModelNotFoundError: when there is no such model.
    """
    not_done = check_unsupported(request, strict=settings.strict_fields)
    _check_suffix(request, tokenizer)
    choice = parse_model(request.model, base_name=base_name, aliases=settings.aliases)
    deadline = compute_deadline(request.timeout_ms, default=settings.timeout)
    prompts = read_prompts(request, tokenizer, parse_special=settings.completions_special_tokens)
    asked = [_build_run_request(request, one, choice, caller=caller) for one in prompts]
    rules = build_stop_rules(request, max_tokens=_find_max_tokens(request, choice))
    return CompletionCall(
        jobs=tuple(
            _build_job(request, one, rules, owner=caller.id, deadline=deadline) for one in asked
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
    """Return how long an answer may be; None where experts or the preset of the task decide."""
    if request.max_tokens is None:
        return None if choice.auto else DEFAULT_MAX_TOKENS
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


def _skip_check(_: str) -> FormatCheck:
    """Check nothing: no answer was asked for."""
    return FormatCheck(None)
