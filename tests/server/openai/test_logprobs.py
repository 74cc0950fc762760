"""How likely tokens were, in the forms of the published API."""

import msgspec
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from expertctl.engine.running_sequence import SampledToken, TokenLogprob
from expertctl.server.openai.response import (
    TokenOffsets,
    build_chat_logprobs,
    build_completion_logprobs,
)
from tests.server.harness import ServerHarness

DRAWN = (
    SampledToken(
        TokenLogprob(1, "Hé", -0.25), (TokenLogprob(1, "Hé", -0.25), TokenLogprob(2, "He", -2.0))
    ),
    SampledToken(TokenLogprob(3, "�", -3.0), (TokenLogprob(4, "!", -0.5),)),
)


BYTES = {1: "Hé".encode(), 2: b"He", 3: b"\xc3"}


def test_a_chat_tells_tokens_their_bytes_and_the_likeliest() -> None:
    scores = build_chat_logprobs(DRAWN, BYTES.get)
    read = ChoiceLogprobs.model_validate(msgspec.to_builtins(scores), strict=True)
    assert read.content is not None
    assert [one.token for one in read.content] == ["Hé", "�"]
    assert read.content[0].bytes == [72, 195, 169]
    assert [(one.token, one.logprob) for one in read.content[0].top_logprobs] == [
        ("Hé", -0.25),
        ("He", -2.0),
    ]


def test_a_token_that_is_part_of_a_letter_has_bytes_where_they_are_known() -> None:
    [_, part] = build_chat_logprobs(DRAWN, BYTES.get).content
    assert part.bytes == [0xC3]
    assert part.top_logprobs[0].bytes is None


def test_a_completion_tells_columns_and_where_tokens_begin(served: ServerHarness) -> None:
    tokenizer = served.engine.tokenizer
    ids = tokenizer.encode("Hé!")
    drawn = [
        SampledToken(TokenLogprob(token, "", -float(n)), (TokenLogprob(0, "", -9.0),))
        for n, token in enumerate(ids)
    ]
    places = TokenOffsets(tokenizer, start=3)
    told = msgspec.to_builtins(build_completion_logprobs(drawn, tokenizer.token_text, places))
    scores = Logprobs.model_validate(told, strict=True)
    assert scores.tokens == ["H", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert scores.token_logprobs == [0.0, -1.0, -2.0, -3.0]
    assert scores.text_offset == [3, 4, 4, 5]
    assert scores.top_logprobs is not None
    assert scores.top_logprobs[0] == {"H": 0.0, tokenizer.token_text(0): -9.0}
