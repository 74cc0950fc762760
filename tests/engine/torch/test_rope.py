"""Rotary positions against transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from expertctl.engine.cpu import rope
from expertctl.engine.torch.functional import (
    apply_rope,
    compute_inverse_frequencies,
    compute_rope_table,
)
from expertctl.package.architectures import ConfigFields
from expertctl.package.attention_config import RopeConfig, parse_rope_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    LLAMA3,
    {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 64},
    {**LLAMA3, "low_freq_factor": 0.5, "high_freq_factor": 9.0},
    YARN,
    {**YARN, "attention_factor": 0.75},
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "beta_fast": 0.0, "beta_slow": 0.0},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
    {**YARN, "mscale": 0.7},
    {**YARN, "truncate": False, "original_max_position_embeddings": 100},
    {**YARN, "rope_theta": 4.0, "original_max_position_embeddings": 7},
    {**YARN, "original_max_position_embeddings": 6},
    {**YARN, "factor": 1.0},
]


def ours(parameters: dict[str, Any], *, dims: int = 64, positions: int = 131072) -> RopeConfig:
    fields = ConfigFields({"rope_parameters": parameters})
    found = parse_rope_config(fields, dims=dims, max_positions=positions)
    fields.raise_problems("config.json")
    return found


def theirs(parameters: dict[str, Any], *, dims: int = 64) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=dims,
        num_attention_heads=1,
        head_dim=dims,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    reference, rope = theirs(parameters), ours(parameters)
    assert rope.attention == pytest.approx(reference.attention_scaling)
    torch.testing.assert_close(
        compute_inverse_frequencies(rope), reference.inv_freq, rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("dims", [64, 80, 96, 128])
@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_frequencies_in_numpy_equal_those_of_transformers(
    parameters: dict[str, Any], dims: int
) -> None:
    found = rope.compute_inverse_frequencies(ours(parameters, dims=dims))
    assert found.dtype == np.float32
    wanted = theirs(parameters, dims=dims).inv_freq.numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_vectors_rotated_in_numpy_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    positions = torch.arange(50)[None]
    queries, keys = torch.randn(1, 3, 50, 64), torch.randn(1, 2, 50, 64)
    wanted = apply_rotary_pos_emb(queries, keys, *theirs(parameters)(queries, positions))
    table = rope.compute_rotation_table(ours(parameters), 60)
    both = torch.cat((queries, keys), dim=1)[0].transpose(0, 1).numpy()  # [tokens, heads, dims]
    before = both.copy()
    for begin, end in ((0, 50), (7, 8), (20, 50)):
        found = rope.rotate(both[begin:end], table.slice(begin, end))
        expected = torch.cat(wanted, dim=1)[0].transpose(0, 1)[begin:end].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert np.array_equal(both, before)


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_turned_vectors_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    positions = torch.arange(50)[None]
    queries, keys = torch.randn(1, 3, 50, 64), torch.randn(1, 2, 50, 64)
    cos, sin = theirs(parameters)(queries, positions)
    table = compute_rope_table(ours(parameters), 50, device="cpu")
    wanted = apply_rotary_pos_emb(queries, keys, cos, sin)
    for got, want in zip((queries, keys), wanted, strict=True):
        torch.testing.assert_close(apply_rope(got[0], *table), want[0], atol=1e-5, rtol=1e-5)
