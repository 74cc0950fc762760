"""A base that is made packed lies in memory as one that was packed does, and runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.packed import pack, unpack
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.packed_decoder import PackedDecoder
from expertctl.engine.random_base import SPREAD, base_bytes, base_matrices, random_base
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


def test_norms_are_ones_and_biases_zeros() -> None:
    config = replace(small_config(), qkv_bias=True, output_bias=True, mlp_bias=True)
    places = random_base(config, Scheme.INT8).places()
    vectors = {name: place for name, place in places.items() if isinstance(place, np.ndarray)}
    biases = {name for name in vectors if name.endswith(".bias")}
    assert len(biases) == 7 * config.layers
    for name, vector in vectors.items():
        assert (vector == (0 if name in biases else 1)).all(), name


def test_a_head_of_its_own_is_read_beside_the_embedding() -> None:
    tied, untied = (
        random_base(replace(small_config(), tied=tied), Scheme.BFLOAT16) for tied in (True, False)
    )
    assert tied.head is tied.embedding
    assert untied.head is not untied.embedding
    assert untied.nbytes == tied.nbytes + untied.head.nbytes
    assert base_bytes(untied) == base_bytes(tied)  # a token reads one row of the embedding


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.INT4], ids=lambda scheme: scheme.value)
def test_it_runs_and_its_scores_are_numbers(scheme: Scheme) -> None:
    base, crew = random_base(replace(small_config(), tied=False), scheme), Crew(1)
    try:
        decoder, cache = PackedDecoder(base, crew), KVPages(base.config, 16)
        read = decoder.prefill([5, 7, 11], cache).logits.clone()
        next_one = decoder.decode(13, cache).logits
    finally:
        crew.close()
    assert torch.isfinite(read).all()
    assert torch.isfinite(next_one).all()
    assert float((read - next_one).abs().max()) > 0.01


@pytest.mark.parametrize("scheme", [Scheme.BFLOAT16, Scheme.INT4], ids=lambda one: one.value)
def test_what_is_drawn_is_counted_to_the_byte(scheme: Scheme) -> None:
    counted: list[int] = []
    base = random_base(small_config(), scheme, progress=counted.append)
    assert sum(counted) == sum(place.nbytes for place in base.places().values())
