"""An encoder that remembers gives what the encoder gives, and asks it once for each text."""

from collections.abc import Sequence

import numpy as np

from benchmarks.routing_home import MemoisingEncoder
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.vector_table import EncodedTexts

TEXTS = ["sort these numbers", "the plural of fox", "sort these numbers", "a haiku"]


class Noting(LexicalEncoder):
    """An encoder that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode_for_rerank(self, texts: Sequence[str]) -> EncodedTexts:
        self.asked += texts
        return super().encode_for_rerank(texts)


def test_every_text_has_the_rows_of_the_encoder_in_its_place_and_is_encoded_once() -> None:
    encoder = Noting()
    remembering = MemoisingEncoder(encoder)
    remembering.encode(TEXTS[1:2])
    found, wanted = remembering.encode_for_rerank(TEXTS), LexicalEncoder().encode_for_rerank(TEXTS)
    np.testing.assert_array_equal(found.rows, wanted.rows, strict=True)
    np.testing.assert_array_equal(found.rerank_rows, wanted.rerank_rows, strict=True)
    assert encoder.asked == ["the plural of fox", "sort these numbers", "a haiku"]
    assert remembering.digest() == LexicalEncoder().digest()
