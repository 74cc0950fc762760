"""How likely the tokens of an answer were, in the form of each API call."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from expertctl.engine.serving.job import Drawn, Likely
from expertctl.server.openai.chat_document import ChatLogprobs, DrawnScore, TokenScore
from expertctl.server.openai.completion_document import CompletionLogprobs

BytesOf = Callable[[int], bytes | None]
"""Returns the bytes of a token, if they are known."""


def chat_logprobs(drawn: Iterable[Drawn], bytes_of: BytesOf) -> ChatLogprobs:
    """Return the ``logprobs`` of a choice of a chat."""
    return ChatLogprobs(content=[_drawn(one, bytes_of) for one in drawn], refusal=None)


def completion_logprobs(drawn: Sequence[Drawn], *, start: int) -> CompletionLogprobs:
    """Return the ``logprobs`` of a choice of a completion; ``start`` is where its text begins."""
    tokens = [one.chosen.text for one in drawn]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[one.chosen.logprob for one in drawn],
        top_logprobs=[_by_text(one) for one in drawn],
        text_offset=list(accumulate(map(len, tokens[:-1]), initial=start)) if tokens else [],
    )


def _drawn(one: Drawn, bytes_of: BytesOf) -> DrawnScore:
    return DrawnScore(
        token=one.chosen.text,
        logprob=one.chosen.logprob,
        bytes=_bytes(one.chosen, bytes_of),
        top_logprobs=[_score(other, bytes_of) for other in one.likeliest],
    )


def _score(one: Likely, bytes_of: BytesOf) -> TokenScore:
    return TokenScore(token=one.text, logprob=one.logprob, bytes=_bytes(one, bytes_of))


def _bytes(one: Likely, bytes_of: BytesOf) -> list[int] | None:
    found = bytes_of(one.token)
    return None if found is None else list(found)


def _by_text(drawn: Drawn) -> dict[str, float]:
    """Return the logprobs of the likeliest tokens and of the drawn one, by text."""
    return {one.text: one.logprob for one in (drawn.chosen, *drawn.likeliest)}
