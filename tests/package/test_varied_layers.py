"""Layers of different sizes, as those of Gemma 4: read as transformers reads them, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, parse_model_config, read_model_config
from expertctl.package.varied_layers import ProportionalScaling, VariedLayers
from tests.engine.family_models import build_family_model
from tests.quantised_bases import edit_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
KINDS = ["sliding_attention", "full_attention"]


def parse(**changes: Any) -> ModelConfig:
    return parse_model_config({"model_type": "gemma4_text", **SIZES, **changes})


def layers_of(config: ModelConfig) -> VariedLayers:
    assert config.block.varied is not None
    return config.block.varied


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_head_dim": 128, "head_dim": 64},
        {"num_global_key_value_heads": 2},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
        {"num_kv_shared_layers": 3, "layer_types": KINDS * 4, "use_double_wide_mlp": True},
        {"layer_types": [*KINDS, *KINDS[:1] * 6]},
        {"num_hidden_layers": 12},
        {"head_dim": 64, "global_head_dim": 64},
    ],
    ids=str,
)
def test_sizes_are_those_of_transformers_however_they_are_written(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    copied = {n: list(v) if isinstance(v, list) else v for n, v in changes.items()}
    theirs = transformers.Gemma4TextConfig(**{**SIZES, **copied})
    theirs.architectures = ["Gemma4ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = parse(**changes)
    assert ours.to_json() == read_model_config(tmp_path).to_json()
    wide = {n for n, kind in enumerate(theirs.layer_types) if kind == "full_attention"}
    assert {n for n, window in enumerate(ours.windows) if window is None} == wide
    for number, sizes in enumerate(layers_of(ours).sizes):
        own = theirs.per_layer_config[number] if theirs.per_layer_config else theirs
        assert (sizes.head_dim, sizes.kv_heads) == (own.head_dim, own.num_key_value_heads)
        assert (sizes.source is not None) is (theirs.kv_sharing_modes[number] == "reuse")
        assert sizes.has_values is not (theirs.attention_k_eq_v and number in wide)
    rope, local = ours.rope, ours.block.local_rope
    assert local is not None
    assert (rope.theta, local.theta, local.scaling) == (1_000_000.0, 10_000.0, None)
    dims = layers_of(ours).sizes[-1].head_dim
    assert rope.scaling == ProportionalScaling(dims // 8, 1.0)
    assert (rope.dims, local.dims) == (dims, layers_of(ours).sizes[0].head_dim)


def test_layers_read_the_last_keys_of_their_kind() -> None:
    sizes = layers_of(parse(num_kv_shared_layers=3, layer_types=KINDS * 4)).sizes
    assert [size.source for size in sizes] == [None] * 5 + [3, 4, 3]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 8}, "no layer before has the window of 0"),
        ({"num_kv_shared_layers": 3}, "no layer before has the window of 7"),
        ({"global_head_dim": 63}, "global_head_dim is odd"),
        ({"vocab_size_per_layer_input": 60}, "fewer than the 61 tokens"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 0}, "num_global_key_value_heads"),
        ({"per_layer_config": {"5": 3, "7": 3}}, "must be an object"),
        ({"per_layer_config": {"5": {"head_dim": 3}, "7": {"head_dim": 3}}}, "odd"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"per_layer_config": 5}, "per_layer_config"),
        ({"head_dim": 7, "global_head_dim": 16}, "head_dim is odd"),
        (
            {"num_key_value_heads": 8, "num_global_key_value_heads": 3, "attention_k_eq_v": True},
            "not a multiple of num_key_value_heads",
        ),
    ],
    ids=str,
)
def test_malformed_sizes_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse(**changes)
    assert any(problem in found for found in caught.value.problems)


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_moe_block": True},
        {"use_bidirectional_attention": "all"},
        {"per_layer_config": {"0": {"head_dim": 16}}},
        {"per_layer_config": {"5": {"head_dim": 16}, "07": {"head_dim": 16}, "7": {}}},
        {"per_layer_config": {"5": {"head_dim": 16}, "7": {"head_dim": 32}}},
        {"per_layer_config": {"5": {"hidden_act": "relu"}, "7": {"hidden_act": "relu"}}},
    ],
    ids=str,
)
def test_layers_that_differ_otherwise_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(IncompatibleError, match="not supported"):
        parse(**changes)


def test_biases_of_attention_are_no_biases_of_its_other_layers() -> None:
    shapes = parse(attention_bias=True, hidden_size_per_layer_input=8).tensor_shapes()
    biases = {name.rpartition(".layers.0.")[2] for name in shapes if name.endswith(".bias")}
    own = {name for name in biases if "layers" not in name}
    assert own == {f"self_attn.{name}_proj.bias" for name in "qkvo"}


def test_tensors_that_a_layer_does_not_use_are_left_out(tmp_path: Path) -> None:
    """Published files have keys and values of all layers."""
    sizes = {"head_dim": 8, "global_head_dim": 16, "vocab_size_per_layer_input": 259}
    build_family_model(
        tmp_path,
        "gemma4_text",
        layer_types=KINDS * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=6,
        **sizes,
    )
    config = read_model_config(tmp_path)
    before = read_base_tensors(tmp_path, config)
    assert before.keys() == config.tensor_shapes().keys()

    def add(name: str) -> None:
        def change(tensors: dict[str, Tensor]) -> None:
            tensors[name] = torch.ones(16, 32)

        edit_tensors(tmp_path, change)

    add("model.layers.3.self_attn.v_proj.weight")
    add("model.layers.2.self_attn.k_norm.weight")
    assert read_base_tensors(tmp_path, config).keys() == before.keys()
    add("model.layers.3.mlp.v_proj.weight")
    with pytest.raises(InvalidPackageError, match=r"unexpected tensor model.layers.3.mlp.v_proj"):
        read_base_tensors(tmp_path, config)
