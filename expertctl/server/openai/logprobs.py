"""How likely the tokens of an answer were, in the form of each API call."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.serving.job import Drawn, Likely
from expertctl.engine.tokenizer import TextStream, Tokenizer
from expertctl.server.openai.chat_document import ChatLogprobs, DrawnScore, TokenScore
from expertctl.server.openai.completion_document import CompletionLogprobs

BytesOf = Callable[[int], bytes | None]
"""Returns the bytes of a token, if they are known."""
Spell = Callable[[int], str]
"""Returns how a token looks alone."""


def chat_logprobs(drawn: Iterable[Drawn], bytes_of: BytesOf) -> ChatLogprobs:
    """Return the ``logprobs`` of a choice of a chat."""
    return ChatLogprobs(content=[_drawn(one, bytes_of) for one in drawn], refusal=None)


class TextPlaces:
    """Where the tokens of an answer begin in its text, counted in characters, as they come.

    The tokens of one character begin where it does, and control tokens take no room.
    """

    def __init__(self, tokenizer: Tokenizer, *, start: int = 0) -> None:
        """Begin at ``start``."""
        self._stream, self._place = TextStream(tokenizer), start

    def pass_token(self, token: int) -> int:
        """Return where a token begins, and go on behind it."""
        place = self._place
        self._place += len(self._stream.push(token))
        return place


def completion_logprobs(
    drawn: Sequence[Drawn], spell: Spell, places: TextPlaces
) -> CompletionLogprobs:
    """Return the ``logprobs`` of a choice of a completion, or of what it grows by."""
    return CompletionLogprobs(
        tokens=[spell(one.chosen.token) for one in drawn],
        token_logprobs=[one.chosen.logprob for one in drawn],
        top_logprobs=[_by_text(one, spell) for one in drawn],
        text_offset=[places.pass_token(one.chosen.token) for one in drawn],
    )


def prompt_logprobs(scores: PromptScores, text: str, tokenizer: Tokenizer) -> CompletionLogprobs:
    """Return the same for the tokens of a prompt, which stand in ``text``."""
    spell, ids = cache(tokenizer.spell), scores.ids
    tops: list[dict[str, float] | None] = [None]
    for place in range(1, len(ids)):
        chosen = (ids[place], scores.logprob(place) or 0.0)
        pairs = (chosen, *scores.likeliest(place))
        tops.append({spell(token): logprob for token, logprob in pairs})
    return CompletionLogprobs(
        tokens=[spell(token) for token in ids],
        token_logprobs=[scores.logprob(place) for place in range(len(ids))],
        top_logprobs=tops,
        text_offset=_offsets(ids, text, tokenizer),
    )


def joined(one: CompletionLogprobs, other: CompletionLogprobs) -> CompletionLogprobs:
    """Return the columns of a prompt with those of its continuation behind them."""
    return CompletionLogprobs(
        tokens=one.tokens + other.tokens,
        token_logprobs=one.token_logprobs + other.token_logprobs,
        top_logprobs=one.top_logprobs + other.top_logprobs,
        text_offset=one.text_offset + other.text_offset,
    )


def _offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return where tokens begin in a text; a control token that it does not spell takes no room.

    Where a tokenizer changes a text, by lower case say, other tokens take the room of their own
    characters.
    """
    stream, place, found = TextStream(tokenizer, raw=True), 0, list[int]()
    for token in ids:
        found.append(place)
        piece = stream.push(token)
        shown = piece if text.startswith(piece, place) else piece.removeprefix(" ")
        if text.startswith(shown, place) or token not in tokenizer.control_ids:
            place = min(place + len(shown), len(text))
    return found


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


def _by_text(drawn: Drawn, spell: Spell) -> dict[str, float]:
    """Return the logprobs of the likeliest tokens and of the drawn one, by spelling."""
    return {spell(one.token): one.logprob for one in (drawn.chosen, *drawn.likeliest)}
