"""How likely tokens were, in the forms of the published API."""

import msgspec
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from expertctl.engine.serving.job import Drawn, Likely
from expertctl.server.openai.logprobs import chat_logprobs, completion_logprobs

DRAWN = (
    Drawn(Likely(1, "Hé", -0.25), (Likely(1, "Hé", -0.25), Likely(2, "He", -2.0))),
    Drawn(Likely(3, "�", -3.0), (Likely(4, "!", -0.5),)),
)


BYTES = {1: "Hé".encode(), 2: b"He", 3: b"\xc3"}


def test_a_chat_tells_tokens_their_bytes_and_the_likeliest() -> None:
    scores = chat_logprobs(DRAWN, BYTES.get)
    read = ChoiceLogprobs.model_validate(msgspec.to_builtins(scores), strict=True)
    assert read.content is not None
    assert [one.token for one in read.content] == ["Hé", "�"]
    assert read.content[0].bytes == [72, 195, 169]
    assert [(one.token, one.logprob) for one in read.content[0].top_logprobs] == [
        ("Hé", -0.25),
        ("He", -2.0),
    ]


def test_a_token_that_is_part_of_a_letter_has_bytes_where_they_are_known() -> None:
    [_, part] = chat_logprobs(DRAWN, BYTES.get).content
    assert part.bytes == [0xC3]
    assert part.top_logprobs[0].bytes is None


def test_a_completion_tells_columns_and_where_tokens_begin() -> None:
    spelled = {1: "Hé", 2: "He", 3: "bytes:\\xc3", 4: "!"}
    told = msgspec.to_builtins(completion_logprobs(DRAWN, spelled.__getitem__, start=3))
    scores = Logprobs.model_validate(told, strict=True)
    assert scores.tokens == ["Hé", "bytes:\\xc3"]
    assert scores.token_logprobs == [-0.25, -3.0]
    assert scores.text_offset == [3, 5]
    assert scores.top_logprobs == [{"Hé": -0.25, "He": -2.0}, {"bytes:\\xc3": -3.0, "!": -0.5}]
