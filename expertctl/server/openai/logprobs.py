"""How likely the tokens of an answer were, in the form of each API call."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from expertctl.engine.prompt_scores import PromptScores
from expertctl.engine.serving.job import Drawn, Likely
from expertctl.engine.tokenizer import Tokenizer
from expertctl.server.openai.chat_document import ChatLogprobs, DrawnScore, TokenScore
from expertctl.server.openai.completion_document import CompletionLogprobs

BytesOf = Callable[[int], bytes | None]
"""Returns the bytes of a token, if they are known."""
Spell = Callable[[int], str]
"""Returns how a token looks alone."""


def chat_logprobs(drawn: Iterable[Drawn], bytes_of: BytesOf) -> ChatLogprobs:
    """Return the ``logprobs`` of a choice of a chat."""
    return ChatLogprobs(content=[_drawn(one, bytes_of) for one in drawn], refusal=None)


def completion_logprobs(drawn: Sequence[Drawn], spell: Spell, *, start: int) -> CompletionLogprobs:
    """Return the ``logprobs`` of a choice of a completion; ``start`` is where its text begins."""
    tokens = [spell(one.chosen.token) for one in drawn]
    lengths = (len(one.chosen.text) for one in drawn[:-1])
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[one.chosen.logprob for one in drawn],
        top_logprobs=[_by_text(one, spell) for one in drawn],
        text_offset=list(accumulate(lengths, initial=start)) if tokens else [],
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
    """Return where tokens begin in a text; one that the text does not spell takes no room."""
    place, found = 0, list[int]()
    for piece in _pieces(ids, tokenizer):
        found.append(place)
        shown = piece.removeprefix(" ") if not text.startswith(piece, place) else piece
        place += len(shown) if text.startswith(shown, place) else 0
    return found


def _pieces(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the letters that each token completes; of a letter in several, the last has it."""
    decoder = getincrementaldecoder("utf-8")("replace")
    for token in ids:
        raw = None if token in tokenizer.added_ids else tokenizer.bytes_of(token)
        yield tokenizer.spell(token) if raw is None else decoder.decode(raw)


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
