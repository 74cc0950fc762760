"""An encoder that remembers gives what the encoder gives, and asks it once for each text."""

from collections.abc import Sequence

import numpy as np

from benchmarks.memorised import Memorised
from expertctl.routing.encoded import Encoded
from expertctl.routing.lexical import LexicalEncoder

TEXTS = ["sort these numbers", "the plural of fox", "sort these numbers", "a haiku"]


class Noting(LexicalEncoder):
    """An encoder that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode_deep(self, texts: Sequence[str]) -> Encoded:
        self.asked += texts
        return super().encode_deep(texts)


def test_every_text_has_the_rows_of_the_encoder_in_its_place_and_is_encoded_once() -> None:
    encoder = Noting()
    remembering = Memorised(encoder)
    remembering.encode(TEXTS[1:2])
    found, wanted = remembering.encode_deep(TEXTS), LexicalEncoder().encode_deep(TEXTS)
    np.testing.assert_array_equal(found.rows, wanted.rows, strict=True)
    np.testing.assert_array_equal(found.deep, wanted.deep, strict=True)
    assert encoder.asked == ["the plural of fox", "sort these numbers", "a haiku"]
    assert remembering.digest() == LexicalEncoder().digest()
