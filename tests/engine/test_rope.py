"""Rotary positions against transformers, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from expertctl.engine.config_fields import Fields
from expertctl.engine.rope import (
    RopeConfig,
    inverse_frequencies,
    parse_rope,
    rotate,
    rotation_table,
)
from expertctl.errors import IncompatibleError, InvalidPackageError

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
    fields = Fields({"rope_parameters": parameters})
    rope = parse_rope(fields, dims=dims, max_positions=positions)
    fields.raise_problems("config.json")
    return rope


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
    torch.testing.assert_close(inverse_frequencies(rope), reference.inv_freq, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("parameters", CASES, ids=str)
def test_turned_vectors_equal_those_of_transformers(parameters: dict[str, Any]) -> None:
    positions = torch.arange(50)[None]
    queries, keys = torch.randn(1, 3, 50, 64), torch.randn(1, 2, 50, 64)
    cos, sin = theirs(parameters)(queries, positions)
    table = rotation_table(ours(parameters), 50, device="cpu")
    wanted = apply_rotary_pos_emb(queries, keys, cos, sin)
    for got, want in zip((queries, keys), wanted, strict=True):
        torch.testing.assert_close(rotate(got[0], *table), want[0], atol=1e-5, rtol=1e-5)


def test_both_spellings_mean_the_same() -> None:
    new = ours(LLAMA3)
    rest = {k: v for k, v in LLAMA3.items() if k not in {"rope_type", "rope_theta"}}
    for name in ("type", "rope_type"):
        old = Fields({"rope_theta": 5e5, "rope_scaling": {name: "llama3", **rest}})
        assert parse_rope(old, dims=64, max_positions=131072) == new
        assert old.problems == []


def test_the_original_length_is_found_where_transformers_looks() -> None:
    short = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert ours({**short, "factor": 2.0}, positions=500).scaling.original == 500  # type: ignore[union-attr]
    top = Fields({"rope_parameters": YARN, "original_max_position_embeddings": 77})
    rope = parse_rope(top, dims=64, max_positions=500)
    assert rope.scaling.original == 77  # type: ignore[union-attr]


def test_an_absent_yarn_factor_is_the_stretch_of_the_context() -> None:
    parameters = {"rope_type": "yarn", "original_max_position_embeddings": 32768}
    assert ours(parameters).scaling.factor == 4.0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "su", "mrope", ""])
def test_other_types_are_refused_by_name(kind: str) -> None:
    with pytest.raises(IncompatibleError, match=f"RoPE scaling '{kind}' is not supported") as error:
        ours({"rope_type": kind, "factor": 2.0})
    assert "yarn" in error.value.hint


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
        ({"rope_type": "linear", "factor": 1e9}, "factor is 1000000000.0"),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}, "mscale is not a known setting"),
        ({"rope_type": "default", "mrope_section": [16]}, "mrope_section is not a known setting"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor must be greater"),
        ({**LLAMA3, "low_freq_factor": 0}, "low_freq_factor is 0"),
        ({**YARN, "truncate": "no"}, "truncate is 'no'"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor is -1.0"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"rope_theta": 1.0}, "rope_theta is 1.0"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor below 1"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        ours(parameters)
    assert [p for p in caught.value.problems if f"rope_parameters.{problem}" in p]
