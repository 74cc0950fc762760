"""Fitting a conversation into the context of a base; never cut unless asked, and then reported.

The context holds the virtual tokens of soft prompts, the conversation and the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from expertctl.engine.chat_template import Prompt
from expertctl.engine.message import Message
from expertctl.errors import ContextLengthError, UsageError

Encode = Callable[[Sequence[Message]], Prompt]


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """The tokens of a conversation, how many may follow, and what a person should know."""

    ids: tuple[int, ...]
    max_tokens: int
    warnings: tuple[str, ...] = ()
    virtual: int = 0
    """Tokens of soft prompts that stand before the first."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, beside those that end every text of the base."""

    @property
    def capacity(self) -> int:
        """How many tokens there can be in all."""
        return self.virtual + len(self.ids) + self.max_tokens


def fit_context(
    messages: Sequence[Message],
    encode: Encode,
    *,
    context: int,
    max_tokens: int,
    truncate: bool,
    virtual: int = 0,
) -> FittedPrompt:
    """Tokenise a conversation so that at least one token can follow, if ``max_tokens`` is not 0.

    With ``truncate`` the oldest turns are left out, then the end of the last message, so that a
    quarter of the context, or ``max_tokens`` if that is less, stays free.

    Raises:
        ContextLengthError: when it does not fit and may not be cut.
        UsageError: when nothing of it would be left.
    """
    room = context - virtual
    least = min(1, max_tokens)
    free = max(least, min(max_tokens, room // 4))
    prompt = encode(messages)
    if len(prompt.ids) > room - (free if truncate and len(messages) > 1 else least):
        if not truncate:
            raise _refusal(messages, len(prompt.ids), context, virtual)
        prompt = _cut(messages, encode, room, room - free)
    left = room - len(prompt.ids)
    most = min(max_tokens, left)
    return FittedPrompt(prompt.ids, most, prompt.warnings, virtual, prompt.end_ids)


def _refusal(
    messages: Sequence[Message], size: int, context: int, virtual: int
) -> ContextLengthError:
    soft = f" and {virtual} virtual tokens of its experts" if virtual else ""
    if len(messages) > 1:
        what, hint = "conversation", "begin anew, or let its oldest turns be left out"
    else:
        what, hint = "prompt", "shorten it, or let its end be cut off"
    return ContextLengthError(
        f"the {what} has {size} tokens, the base reads {context} with the answer{soft}",
        size=size + virtual,
        most=context,
        hint=f"{hint} with --truncate",
    )


def _cut(messages: Sequence[Message], encode: Encode, room: int, most: int) -> Prompt:
    """Leave out the oldest turns, as few as will do; where that is not enough, cut the message."""
    turns = _turns(messages)
    gone = _fewest(turns, encode, most)
    prompt = encode(_joined(turns[gone:]))
    told = _left_out(gone, len(turns) - 1)
    if len(prompt.ids) >= room:
        prompt = _cut_message(turns[-1], encode, most)
    return replace(prompt, warnings=(*prompt.warnings, *told))


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Split a conversation before each message of the user."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def _joined(turns: Sequence[Sequence[Message]]) -> list[Message]:
    return [message for turn in turns for message in turn]


def _fewest(turns: Sequence[Sequence[Message]], encode: Encode, most: int) -> int:
    """Return how many of the oldest turns must go; fewer turns never have more tokens."""
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        fits = len(encode(_joined(turns[middle:])).ids) <= most
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def _left_out(gone: int, turns: int) -> tuple[str, ...]:
    if gone == 0:
        return ()
    if turns == 1:
        which = "the turn before"
    elif gone == 1:
        which = f"the oldest of {turns} turns"
    else:
        which = (
            f"all {turns} turns before" if gone == turns else f"the {gone} oldest of {turns} turns"
        )
    verb = "was" if gone == 1 else "were"
    return (f"{which} did not fit into the context and {verb} left out",)


def _cut_message(messages: Sequence[Message], encode: Encode, most: int) -> Prompt:
    """Keep the beginning of the last message that fits."""
    *before, last = messages

    def encode_part(count: int) -> Prompt:
        return encode([*before, Message(last.role, last.content[:count])])

    kept = _longest(len(last.content), encode_part, most)
    if kept == 0:
        raise UsageError(
            "nothing of the prompt fits into the context of the base",
            hint="ask for fewer new tokens (--max-tokens), or use a base with a longer context",
        )
    prompt = encode_part(kept)
    warning = f"the prompt was cut: {kept} of {len(last.content)} characters were read"
    return replace(prompt, warnings=(*prompt.warnings, warning))


def _longest(size: int, encode_part: Callable[[int], Prompt], most: int) -> int:
    """Return how many characters of the beginning fit; more characters never have fewer tokens."""
    low, high = 0, size - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode_part(middle).ids) <= most else (low, middle - 1)
    return low
