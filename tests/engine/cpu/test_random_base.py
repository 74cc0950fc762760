"""A base that is made packed lies in memory as one that was packed does, and runs."""

from dataclasses import replace

import numpy as np
import pytest

from expertctl.engine.cpu.base_loader import (
    WEIGHT_STD,
    create_random_base,
    decode_bytes_per_token,
    list_matrices,
)
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.kernels.packed_format import PACKED_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import pack_matrix, unpack_matrix
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from tests.benchmarks.test_gguf import small_config


@pytest.mark.parametrize("scheme", PACKED_SCHEMES, ids=lambda scheme: scheme.value)
def test_matrices_are_as_large_as_packed_ones_and_as_far_apart_as_intended(scheme: Scheme) -> None:
    base = create_random_base(small_config(), scheme)
    shapes = [(256, 64), (64, 128), (320, 64), (64, 160)] * 2 + [(96, 64)]
    assert [(m.rows, m.columns) for m in list_matrices(base)] == shapes
    schemes = [*[scheme] * 8, scheme.embedding]
    zeros = [np.zeros(shape, np.float32) for shape in shapes]
    packed = [pack_matrix(each, one) for each, one in zip(zeros, schemes, strict=True)]
    assert decode_bytes_per_token(base) == sum(each.nbytes for each in packed)
    for ours, other in zip(list_matrices(base), packed, strict=True):
        assert (ours.data.shape, ours.scales.shape) == (other.data.shape, other.scales.shape)
        weights = unpack_matrix(ours)
        assert np.isfinite(weights).all()
        assert 0.9 * WEIGHT_STD < weights.std() < 1.1 * WEIGHT_STD


def test_norms_are_ones_and_biases_zeros() -> None:
    config = replace(small_config(), qkv_bias=True, output_bias=True, mlp_bias=True)
    places = create_random_base(config, Scheme.INT8).tensor_places()
    vectors = {name: place for name, place in places.items() if isinstance(place, np.ndarray)}
    biases = {name for name in vectors if name.endswith(".bias")}
    assert len(biases) == 7 * config.layers
    for name, vector in vectors.items():
        assert (vector == (0 if name in biases else 1)).all(), name


def test_a_head_of_its_own_is_read_beside_the_embedding() -> None:
    tied, untied = (
        create_random_base(replace(small_config(), tied=tied), Scheme.BFLOAT16)
        for tied in (True, False)
    )
    assert tied.head is tied.embedding
    assert untied.head is not untied.embedding
    assert untied.nbytes == tied.nbytes + untied.head.nbytes
    assert decode_bytes_per_token(untied) == decode_bytes_per_token(
        tied
    )  # a token reads one row of the embedding


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.INT4], ids=lambda scheme: scheme.value)
def test_it_runs_and_its_scores_are_numbers(scheme: Scheme) -> None:
    base, crew = create_random_base(replace(small_config(), tied=False), scheme), ThreadPool(1)
    try:
        decoder, cache = PackedDecoder(base, crew), PagedKVCache(base.config, 16)
        read = decoder.prefill([5, 7, 11], cache).logits
        next_one = decoder.decode(13, cache).logits
    finally:
        crew.close()
    assert np.isfinite(read).all()
    assert np.isfinite(next_one).all()
    assert np.abs(read - next_one).max() > 0.01


@pytest.mark.parametrize("scheme", [Scheme.BFLOAT16, Scheme.INT4], ids=lambda one: one.value)
def test_what_is_drawn_is_counted_to_the_byte(scheme: Scheme) -> None:
    counted: list[int] = []
    base = create_random_base(small_config(), scheme, progress=counted.append)
    assert sum(counted) == sum(place.nbytes for place in base.tensor_places().values())
