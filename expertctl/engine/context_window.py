"""Fit a conversation into the context of a base; it is cut only on request, with a warning.

The context holds the virtual tokens of soft prompts, the conversation and the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from expertctl.engine.text.chat_template import EncodedPrompt
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import ContextLengthError, ExpertError, UsageError

Encode = Callable[[Sequence[ConversationMessage]], EncodedPrompt]
SAMPLE_FRACTION = 8
"""Sample turns may take one part in so many of the context."""


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """The tokens of a conversation, the number that may follow, and warnings for the user."""

    ids: tuple[int, ...]
    max_tokens: int
    warnings: tuple[str, ...] = ()
    virtual: int = 0
    """Virtual tokens of soft prompts that precede the first token."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer, in addition to the base's own end tokens."""

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of the sequence, answer included."""
        return self.virtual + len(self.ids) + self.max_tokens


def insert_samples(
    messages: Sequence[ConversationMessage],
    samples: Sequence[ConversationMessage],
    encode: Encode,
    *,
    room: int,
    max_tokens: int,
) -> Sequence[ConversationMessage]:
    """Return a conversation with sample turns after its system messages, or unchanged.

    The samples are left out where the chat template accepts no such conversation, or there is no
    template, where they take more than an eighth of ``room``, the tokens of prompt and answer, and
    where less than ``max_tokens`` or a quarter of the room would be left for the answer.
    """
    if not samples:
        return messages
    first = _count_system_messages(messages)
    extended = (*messages[:first], *samples, *messages[first:])
    alone = len(encode(messages).ids)
    try:
        size = len(encode(extended).ids)
    except ExpertError:  # the conversation alone is accepted
        return messages
    fits = size + min(max_tokens, room // 4) <= room
    return extended if fits and size - alone <= room // SAMPLE_FRACTION else messages


def fit_to_context(
    messages: Sequence[ConversationMessage],
    encode: Encode,
    *,
    context: int,
    max_tokens: int,
    truncate: bool,
    virtual: int = 0,
) -> FittedPrompt:
    """Tokenise a conversation so that at least one token can follow, if ``max_tokens`` is not 0.

    With ``truncate`` the oldest turns are dropped, then the end of the last message is cut, so that
    a quarter of the context, or ``max_tokens`` if that is less, stays free.

    Raises:
        ContextLengthError: when it does not fit and may not be cut.
        UsageError: when it has no tokens, or nothing of it would be left.
    """
    room = context - virtual
    least = min(1, max_tokens)
    free = max(least, min(max_tokens, room // 4))
    prompt = encode(messages)
    if not prompt.ids:
        raise UsageError(
            "the prompt has no tokens", hint="give a prompt that is not empty, or another template"
        )
    if len(prompt.ids) > room - (free if truncate and len(messages) > 1 else least):
        if not truncate:
            raise _make_context_error(messages, len(prompt.ids), context, virtual)
        prompt = _truncate(messages, encode, room, room - free)
    left = room - len(prompt.ids)
    most = min(max_tokens, left)
    return FittedPrompt(prompt.ids, most, prompt.warnings, virtual, prompt.end_ids)


def _make_context_error(
    messages: Sequence[ConversationMessage], size: int, context: int, virtual: int
) -> ContextLengthError:
    soft = f" and {virtual} virtual tokens of its experts" if virtual else ""
    if len(messages) > 1:
        what, hint = "conversation", "start a new conversation, or drop its oldest turns"
    else:
        what, hint = "prompt", "shorten it, or cut its end off"
    return ContextLengthError(
        f"the {what} has {size} tokens, the context of the base is {context} tokens with the "
        f"answer{soft}",
        size=size + virtual,
        limit=context,
        hint=f"{hint} with --truncate",
    )


def _truncate(
    messages: Sequence[ConversationMessage], encode: Encode, room: int, max_tokens: int
) -> EncodedPrompt:
    """Drop as few of the oldest turns as necessary; if that is not enough, cut the last message.

    System messages at the beginning stay.
    """
    first = min(_count_system_messages(messages), len(messages) - 1)
    system, turns = messages[:first], _split_turns(messages[first:])

    def encode_turns(turns: Sequence[ConversationMessage]) -> EncodedPrompt:
        return encode([*system, *turns])

    gone = _count_dropped_turns(turns, encode_turns, max_tokens)
    prompt = encode_turns(_join_turns(turns[gone:]))
    warnings = _build_truncation_warnings(gone, len(turns) - 1)
    if len(prompt.ids) >= room:
        prompt = _truncate_message(turns[-1], encode_turns, max_tokens)
    return replace(prompt, warnings=(*prompt.warnings, *warnings))


def _count_system_messages(messages: Sequence[ConversationMessage]) -> int:
    """Return how many system messages a conversation begins with."""
    return next((n for n, each in enumerate(messages) if each.role != "system"), len(messages))


def _split_turns(messages: Sequence[ConversationMessage]) -> list[list[ConversationMessage]]:
    """Split a conversation before each message of the user."""
    turns: list[list[ConversationMessage]] = []
    for message in messages:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def _join_turns(turns: Sequence[Sequence[ConversationMessage]]) -> list[ConversationMessage]:
    return [message for turn in turns for message in turn]


def _count_dropped_turns(
    turns: Sequence[Sequence[ConversationMessage]], encode: Encode, max_tokens: int
) -> int:
    """Return how many of the oldest turns must go; fewer turns never have more tokens."""
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        fits = len(encode(_join_turns(turns[middle:])).ids) <= max_tokens
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def _build_truncation_warnings(dropped: int, turns: int) -> tuple[str, ...]:
    if dropped == 0:
        return ()
    if turns == 1:
        which = "the turn before"
    elif dropped == 1:
        which = f"the oldest of {turns} turns"
    else:
        which = (
            f"all {turns} turns before"
            if dropped == turns
            else f"the {dropped} oldest of {turns} turns"
        )
    verb = "was" if dropped == 1 else "were"
    return (f"{which} did not fit into the context and {verb} dropped",)


def _truncate_message(
    messages: Sequence[ConversationMessage], encode: Encode, max_tokens: int
) -> EncodedPrompt:
    """Keep the longest beginning of the last message that fits."""
    *before, last = messages

    def encode_part(count: int) -> EncodedPrompt:
        return encode([*before, ConversationMessage(last.role, last.content[:count])])

    kept = _find_longest_prefix(len(last.content), encode_part, max_tokens)
    if kept == 0:
        raise UsageError(
            "no part of the prompt fits into the context of the base",
            hint="ask for fewer new tokens (--max-tokens), or use a base with a longer context",
        )
    prompt = encode_part(kept)
    warning = f"the prompt was cut: {kept} of {len(last.content)} characters were read"
    return replace(prompt, warnings=(*prompt.warnings, warning))


def _find_longest_prefix(
    size: int, encode_part: Callable[[int], EncodedPrompt], max_tokens: int
) -> int:
    """Return how many leading characters fit; more characters never have fewer tokens."""
    low, high = 0, size - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if len(encode_part(middle).ids) <= max_tokens else (low, middle - 1)
        )
    return low
