"""One name for each module of a layer with routed experts, whatever others call it."""

import pytest

from expertctl.package.base_tensors import canonicalise_name, explain_absent_module, find_base_name

LAYER = "model.layers.12"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("block_sparse_moe.experts.3.w1", "mlp.experts.3.gate_proj"),
        ("block_sparse_moe.experts.3.w2.weight", "mlp.experts.3.down_proj.weight"),
        ("block_sparse_moe.experts.11.w3.bias", "mlp.experts.11.up_proj.bias"),
        ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("mlp.shared_experts.up_proj.weight", "mlp.shared_expert.up_proj.weight"),
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
    ],
)
def test_what_others_call_a_module_is_called_as_ours(name: str, ours: str) -> None:
    assert canonicalise_name(f"{LAYER}.{name}") == f"{LAYER}.{ours}"


@pytest.mark.parametrize(
    "name",
    [
        "lm_head",
        "model.norm.weight",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.3.down_proj",
        "model.layers.0.mlp.experts.3.w4",
        "model.layers.0.mlp.experts.3.w11",
        "model.layers.0.mlp.shared_experts_of_another_kind",
        "model.layers.x.block_sparse_moe.experts.0.w1",
        "decoder.layers.0.block_sparse_moe.experts.0.w1",
        "model.layers.0.other.experts.0.w1",
    ],
)
def test_every_other_name_stays_as_it_is(name: str) -> None:
    assert canonicalise_name(name) == name


def test_the_own_names_of_a_base_go_first() -> None:
    name = f"{LAYER}.mlp.shared_experts.up_proj"
    assert find_base_name(name, {name}) == name
    assert find_base_name(name, {canonicalise_name(name)}) == canonicalise_name(name)


def test_a_router_is_named_as_what_it_is_where_there_is_one() -> None:
    known = {f"{LAYER}.mlp.experts.0.gate_proj"}
    for name in ("mlp.gate", "block_sparse_moe.gate"):
        assert "no adapter may change" in explain_absent_module(f"{LAYER}.{name}", known)
    dense = {f"{LAYER}.mlp.gate_proj"}
    assert explain_absent_module(f"{LAYER}.mlp.gate", dense) == "the base has no such linear layer"
    assert (
        explain_absent_module("model.layers.0.mlp.gate", known)
        == "the base has no such linear layer"
    )
