"""The prompts of a completion call: texts or tokens, one or several, perhaps with a suffix.

Control tokens that a text spells are control tokens, if the server's setting and the request leave
it so; beside a suffix, prompt and suffix are the text of a file, whose letters are letters unless
the request says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertctl.engine.message import RawPrompt
from expertctl.engine.raw_prompt import encode_raw
from expertctl.engine.tokenizer import Tokenizer
from expertctl.routing.presets import MAX_PROMPT_CHARACTERS
from expertctl.server.field_error import FieldError
from expertctl.server.openai.completion_request import MAX_PROMPTS, CompletionRequest

MAX_SCORES = 600_000
"""The most log-probabilities of prompts in one answer; each takes some hundred bytes."""
_ROUTED_TOKENS = 2000
"""How many tokens of a prompt that is given as tokens are read to choose experts by."""
_NO_TEXT = "?"
"""What a prompt without any text is routed by; no expert is for that."""


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt."""

    raw: RawPrompt
    routed_by: str
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
    given = _split(request.prompt)
    if len(given) * request.texts > MAX_PROMPTS:
        raise FieldError(
            f"prompt: {len(given)} prompts with n {request.texts} are more answers than the "
            f"{MAX_PROMPTS} that are allowed",
            field="prompt",
        )
    raw = RawPrompt(
        suffix=request.suffix or None,
        parse_special=_first(request.parse_special, parse_special and not request.suffix),
        add_special_tokens=_first(request.add_special_tokens, True),
        is_continued=request.max_tokens != 0,
    )
    prompts = [_prompt(one, raw, tokenizer, echo=bool(request.echo)) for one in given]
    return _scored(request, prompts, tokenizer) if request.scores_prompt else prompts


def _split(prompt: str | Sequence[str | int | list[int]]) -> list[str | tuple[int, ...]]:
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


def _prompt(
    given: str | tuple[int, ...], usual: RawPrompt, tokenizer: Tokenizer, *, echo: bool
) -> CompletionPrompt:
    """Read one prompt; the text of tokens is needed for ``echo`` only."""
    if isinstance(given, str):
        return _text(given, usual)
    if usual.suffix is not None:
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
    routed_by = tokenizer.decode(given[:_ROUTED_TOKENS])[:MAX_PROMPT_CHARACTERS]
    raw = replace(usual, ids=given)
    text = tokenizer.decode_raw(given) if echo else ""
    return CompletionPrompt(raw, routed_by if routed_by.strip() else _NO_TEXT, text)


def _text(given: str, usual: RawPrompt) -> CompletionPrompt:
    """Read a text; with a suffix it may be empty: the middle begins the file."""
    suffix = usual.suffix
    if suffix is None:
        return CompletionPrompt(replace(usual, text=given), given, given)
    size = len(given) + len(suffix)
    if size > MAX_PROMPT_CHARACTERS:
        raise FieldError(
            f"suffix: it has {size} characters with the prompt, at most {MAX_PROMPT_CHARACTERS} "
            "are allowed",
            field="suffix",
        )
    texts = (one for one in (given, suffix) if one.strip())
    return CompletionPrompt(replace(usual, text=given), next(texts, _NO_TEXT), given)


def _scored(
    request: CompletionRequest, prompts: Sequence[CompletionPrompt], tokenizer: Tokenizer
) -> list[CompletionPrompt]:
    """Tokenise prompts whose log-probabilities are wanted, and bound how many there are."""
    read = [
        replace(one, raw=replace(one.raw, ids=encode_raw(tokenizer, one.raw).ids))
        for one in prompts
    ]
    each = (1 + (request.logprobs or 0)) * request.texts
    wanted = each * sum(len(one.raw.ids or ()) for one in read)
    if wanted > MAX_SCORES:
        raise FieldError(
            f"logprobs: {wanted} log-probabilities of prompts are more than the {MAX_SCORES} "
            "that one answer has",
            field="logprobs",
            hint="send fewer prompts in one request",
        )
    return read


def _first(given: bool | None, usual: bool) -> bool:
    return usual if given is None else given
