"""How likely the tokens of an answer were, in the form of each call."""

from collections.abc import Iterable, Sequence

from expertctl.engine.serving.job import Drawn, Likely
from expertctl.schema.strict_json import JsonObject, JsonValue

_NO_TEXT = "�"


def chat_logprobs(drawn: Iterable[Drawn]) -> JsonObject:
    """Return the ``logprobs`` of a choice of a chat."""
    content: list[JsonValue] = [
        {**_likely(one.chosen), "top_logprobs": [_likely(other) for other in one.likeliest]}
        for one in drawn
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(drawn: Sequence[Drawn], *, start: int) -> JsonObject:
    """Return the ``logprobs`` of a choice of a completion; ``start`` is where its text begins."""
    tokens = [one.chosen.text for one in drawn]
    offsets: list[JsonValue] = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return {
        "tokens": list[JsonValue](tokens),
        "token_logprobs": [one.chosen.logprob for one in drawn],
        "top_logprobs": [_by_text(one) for one in drawn],
        "text_offset": offsets,
    }


def _likely(one: Likely) -> JsonObject:
    return {"token": one.text, "logprob": one.logprob, "bytes": _bytes(one.text)}


def _bytes(text: str) -> list[JsonValue] | None:
    """Return the bytes of a token; None for one that is only part of a letter."""
    return None if _NO_TEXT in text else list[JsonValue](text.encode())


def _by_text(drawn: Drawn) -> JsonObject:
    """Return the likeliest by their text, and the one that was drawn among them."""
    return {one.text: one.logprob for one in (drawn.chosen, *drawn.likeliest)}
