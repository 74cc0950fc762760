"""Rows of packed embeddings, against the matrix that was packed."""

import numpy as np
import pytest

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import (
    embedding_arguments,
    embedding_kernel,
    pack_matrix,
    unpack_matrix,
)


@pytest.mark.parametrize("scheme", sorted({each.embedding.value for each in Scheme}))
@pytest.mark.parametrize(("vocabulary", "width"), [(1, 1), (16, 16), (61, 33), (40, 300)])
def test_a_row_is_what_was_packed(scheme: str, vocabulary: int, width: int) -> None:
    numbers = np.random.default_rng(0).standard_normal((vocabulary, width)).astype(np.float32)
    matrix = pack_matrix(numbers, Scheme(scheme))
    tokens = np.array([vocabulary - 1, 0, vocabulary // 2, 0])
    out = np.full((4, width + 5), np.nan, np.float32)
    arguments = embedding_arguments(matrix=matrix, tokens=tokens, out=out)
    embedding_kernel(Scheme(scheme))(1, 4, arguments.ctypes.data)
    np.testing.assert_array_equal(out[1:, :width], unpack_matrix(matrix)[tokens[1:]])
    assert np.isnan(out[0]).all()
    assert np.isnan(out[:, width:]).all()
