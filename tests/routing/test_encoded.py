import numpy as np

from expertctl.routing.encoded import Encoded
from expertctl.routing.lexical import LexicalEncoder


def test_flat_rows_are_their_own_deep_rows() -> None:
    rows = np.eye(3, dtype=np.float32)
    assert Encoded.flat(rows).rows is Encoded.flat(rows).deep is rows


def test_the_lexical_encoder_sees_nothing_beyond_its_rows() -> None:
    encoder = LexicalEncoder()
    encoded = encoder.encode_deep(["sort these numbers", ""])
    assert encoded.deep.shape == (2, encoder.deep_dimensions)
    assert np.array_equal(encoded.deep, encoder.encode(["sort these numbers", ""]))
    assert np.array_equal(encoded.rows, encoded.deep)
