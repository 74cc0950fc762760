"""A base that is made packed lies in memory as one that was packed does."""

import numpy as np
import pytest

from benchmarks.gguf import SPREAD
from benchmarks.random_base import base_bytes, base_matrices, random_base
from expertctl.engine.kernels.packed import pack, unpack
from expertctl.engine.kernels.scheme import Scheme
from tests.benchmarks.test_gguf import small_config


@pytest.mark.parametrize("scheme", list(Scheme), ids=lambda scheme: scheme.value)
def test_matrices_are_as_large_as_packed_ones_and_as_far_apart_as_intended(scheme: Scheme) -> None:
    base = random_base(small_config(), scheme)
    shapes = [(256, 64), (64, 128), (320, 64), (64, 160)] * 2 + [(96, 64)]
    assert [(m.rows, m.columns) for m in base_matrices(base)] == shapes
    packed = [pack(np.zeros(shape, np.float32), scheme) for shape in shapes]
    assert base_bytes(base) == sum(each.nbytes for each in packed)
    for ours, other in zip(base_matrices(base), packed, strict=True):
        assert (ours.data.shape, ours.scales.shape) == (other.data.shape, other.scales.shape)
        weights = unpack(ours)
        assert np.isfinite(weights).all()
        assert 0.9 * SPREAD < weights.std() < 1.1 * SPREAD
