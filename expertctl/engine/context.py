"""Fitting a message into the context of a base; never cut unless asked, and then reported."""

from collections.abc import Callable
from dataclasses import dataclass

from expertctl.engine.chat_template import Prompt
from expertctl.errors import UsageError

Encode = Callable[[str], Prompt]


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """The tokens of a message, how many may follow, and what a person should know."""

    ids: tuple[int, ...]
    max_tokens: int
    warnings: tuple[str, ...] = ()


def fit_context(
    text: str, encode: Encode, *, context: int, max_tokens: int, truncate: bool
) -> FittedPrompt:
    """Tokenise a message so that at least one token can follow it.

    With ``truncate`` the end of a message that is too long is left out, so that a quarter of the
    context, or ``max_tokens`` if that is less, stays free.

    Raises:
        UsageError: when it does not fit and may not be cut, or nothing of it would be left.
    """
    prompt = encode(text)
    size = len(prompt.ids)
    if size < context:
        return FittedPrompt(prompt.ids, min(max_tokens, context - size), prompt.warnings)
    if not truncate:
        raise UsageError(
            f"the prompt has {size} tokens, the base reads {context} with the answer",
            hint="shorten it, or let its end be cut off with --truncate",
        )
    room = context - max(1, min(max_tokens, context // 4))
    kept = _longest(text, encode, room)
    if kept == 0:
        raise UsageError(f"nothing of the prompt fits into the {context} tokens of the base")
    cut = encode(text[:kept])
    warning = f"the prompt was cut: {kept} of {len(text)} characters were read"
    rest = context - len(cut.ids)
    return FittedPrompt(cut.ids, min(max_tokens, rest), (*cut.warnings, warning))


def _longest(text: str, encode: Encode, room: int) -> int:
    """Return how many characters of the beginning fit; more characters never have fewer tokens."""
    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(text[:middle]).ids) <= room else (low, middle - 1)
    return low
