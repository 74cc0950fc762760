import numpy as np

from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.vector_table import EncodedTexts


def test_flat_rows_are_their_own_deep_rows() -> None:
    rows = np.eye(3, dtype=np.float32)
    assert EncodedTexts.from_rows(rows).rows is EncodedTexts.from_rows(rows).rerank_rows is rows


def test_the_lexical_encoder_sees_nothing_beyond_its_rows() -> None:
    encoder = LexicalEncoder()
    encoded = encoder.encode_for_rerank(["sort these numbers", ""])
    assert encoded.rerank_rows.shape == (2, encoder.rerank_dimensions)
    assert np.array_equal(encoded.rerank_rows, encoder.encode(["sort these numbers", ""]))
    assert np.array_equal(encoded.rows, encoded.rerank_rows)
