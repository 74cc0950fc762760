"""Routed experts as config.json describes them: as transformers reads it, and nothing absurd."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.architecture_rows import ARCHITECTURES, ELSE_FOREIGN
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import ModelConfig, parse_model_config, read_model_config
from tests.engine.conftest import build_reference_model
from tests.engine.reference_models import ROUTED_CLASSES, ROUTED_CONFIGS
from tests.tensor_shapes import to_canonical_name

LIKE_LLAMA = ARCHITECTURES.keys() - ELSE_FOREIGN
ROUTED = sorted(name for name in LIKE_LLAMA if ARCHITECTURES[name].experts is not None)
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
}
NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 3, "num_experts_per_tok": 2}
}
COUNTS = {"mixtral": "num_local_experts", "dots1": "n_routed_experts"}


def parse(arch: str, **changes: Any) -> ModelConfig:
    return parse_model_config({"model_type": arch, **SIZES, **NEEDED.get(arch, {}), **changes})


def experts(arch: str, **changes: Any) -> ExpertsConfig:
    found = parse(arch, **changes).experts
    assert found is not None
    return found


def theirs(arch: str, **changes: Any) -> Any:
    return ROUTED_CLASSES[arch][0](**{**SIZES, **NEEDED.get(arch, {}), **changes})


@pytest.mark.parametrize("arch", ROUTED)
def test_absent_keys_mean_what_they_mean_to_transformers(arch: str) -> None:
    ours, reference = experts(arch), theirs(arch)
    assert ours.count == getattr(reference, COUNTS.get(arch, "num_experts"))
    assert ours.used == reference.num_experts_per_tok
    size = getattr(reference, "moe_intermediate_size", reference.intermediate_size)
    assert ours.intermediate_size == size
    assert ours.normalised is (arch == "mixtral" or reference.norm_topk_prob)
    assert ours.scoring == ("sigmoid" if arch == "dots1" else "softmax")
    assert ours.choice_bias is (arch == "dots1")
    assert ours.scale == getattr(reference, "routed_scaling_factor", 1.0)
    assert ours.layers == tuple(range(6))
    shared = {"qwen2_moe": 5632, "dots1": 3 * size}
    assert ours.shared_size == shared.get(arch, 0)
    assert ours.shared_gate is (arch == "qwen2_moe")


@pytest.mark.parametrize("arch", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    "changes",
    [
        {"decoder_sparse_step": 2},
        {"decoder_sparse_step": 6},
        {"mlp_only_layers": [0, 3, 77, -1]},
        {"mlp_only_layers": [1], "decoder_sparse_step": 2},
        {"mlp_only_layers": None},
    ],
    ids=str,
)
def test_layers_of_qwen_are_those_of_transformers(arch: str, changes: dict[str, Any]) -> None:
    model = ROUTED_CLASSES[arch][1](theirs(arch, num_experts=2, num_experts_per_tok=1, **changes))
    layers = model.model.layers
    routed = tuple(n for n, layer in enumerate(layers) if hasattr(layer.mlp, "experts"))
    assert experts(arch, **changes).layers == routed


def test_the_first_layers_of_dots1_may_be_dense() -> None:
    assert experts("dots1", first_k_dense_replace=4).layers == (4, 5)
    assert experts("dots1", first_k_dense_replace=None).layers == tuple(range(6))


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "olmoe"])
def test_both_spellings_of_how_many_there_are_count(arch: str) -> None:
    for name in ("num_experts", "num_local_experts"):
        assert experts(arch, **{name: 9}).count == 9
        assert getattr(theirs(arch, **{name: 9}), name) == 9
    with pytest.raises(InvalidPackageError, match="are not the same number"):
        parse(arch, num_experts=9, num_local_experts=10)


@pytest.mark.parametrize("arch", ROUTED)
def test_what_transformers_saves_is_read_as_what_it_was_made_of(arch: str, tmp_path: Path) -> None:
    changes = {**ROUTED_CONFIGS[arch], "norm_topk_prob": True}
    config = theirs(arch, **changes)
    config.architectures = [ARCHITECTURES[arch].class_name]
    config.save_pretrained(tmp_path)
    assert read_model_config(tmp_path).to_json() == parse(arch, **changes).to_json()


@pytest.mark.parametrize("arch", ROUTED)
def test_tensor_names_and_shapes_are_those_of_the_saved_model_by_our_names(
    arch: str, tmp_path: Path
) -> None:
    model = build_reference_model(tmp_path / "model", arch)
    saved = load_file(model.directory / "model.safetensors")
    ours = {to_canonical_name(name): array.shape for name, array in saved.items()}
    assert read_model_config(model.directory).tensor_shapes() == ours


@pytest.mark.parametrize("arch", ROUTED)
def test_every_matrix_of_a_layer_but_its_router_is_a_linear_layer(arch: str) -> None:
    config = parse(arch, **ROUTED_CONFIGS[arch])
    matrices = {n.removesuffix(".weight") for n, s in config.tensor_shapes().items() if len(s) == 2}
    routers = {f"model.layers.{layer}.mlp.gate" for layer in config.experts.layers}  # type: ignore[union-attr]  # it has experts
    assert routers <= matrices
    assert set(config.linear_shapes()) == matrices - routers - {"model.embed_tokens"}


@pytest.mark.parametrize(
    ("arch", "change"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 3}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"num_experts": 16}),
        ("qwen3_moe", {"moe_intermediate_size": 16}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 16}),
        ("dots1", {"routed_scaling_factor": 2.0}),
    ],
    ids=str,
)
def test_what_the_decoder_reads_changes_the_document(arch: str, change: dict[str, Any]) -> None:
    plain, changed = (parse(arch, **values).to_json()["experts"] for values in ({}, change))
    assert plain != changed
    assert json.loads(json.dumps(changed)) == changed


@pytest.mark.parametrize(
    ("arch", "changes", "problem"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("olmoe", {"num_experts": -8}, "num_experts is -8"),
        ("olmoe", {"num_experts": 10**9}, "num_experts is 1000000000"),
        ("olmoe", {"num_experts": True}, "num_experts is True"),
        ("olmoe", {"num_experts": 8.0}, "num_experts is 8.0"),
        ("olmoe", {"num_experts": "8"}, "num_experts is '8'"),
        ("olmoe", {"num_experts": 4}, "num_experts_per_tok is 8, more than the 4 that there are"),
        ("olmoe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("olmoe", {"num_experts_per_tok": 65}, "is 65, more than the 64 that there are"),
        ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ("olmoe", {"head_dim": 4}, "head_dim is not hidden_size / num_attention_heads"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ("qwen3_moe", {"moe_intermediate_size": 2**40}, "moe_intermediate_size is 1099511627776"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"decoder_sparse_step": 7}, "no layer has routed experts"),
        ("qwen3_moe", {"mlp_only_layers": list(range(6))}, "no layer has routed experts"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is"),
        ("qwen2_moe", {"qkv_bias": 1}, "qkv_bias is 1"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is missing"),
        ("dots1", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts is missing"),
        ("dots1", {"n_group": 0}, "n_group is 0"),
        ("dots1", {"first_k_dense_replace": 6}, "no layer has routed experts"),
        ("dots1", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("dots1", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0"),
        ("dots1", {"routed_scaling_factor": 1e300}, "routed_scaling_factor is 1e+300"),
        (
            "olmoe",
            {"num_experts": 1024, "num_hidden_layers": 1024},
            "with 1024 experts in each, that is too many",
        ),
    ],
    ids=str,
)
def test_absurd_numbers_are_refused(arch: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse(arch, **changes)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_one_wrong_number_is_one_problem() -> None:
    """What is read instead of a wrong number is compared to nothing."""
    for changes in ({"num_experts": {}}, {"num_experts": 0}, {"num_local_experts": 2.5}):
        with pytest.raises(InvalidPackageError) as caught:
            parse("olmoe", **changes)
        [problem] = caught.value.problems
        assert problem.endswith("it must be a whole number from 1 to 1024")
    with pytest.raises(InvalidPackageError, match="num_experts is an object, it must be"):
        parse("olmoe", num_experts={})


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("dots1", {"n_group": 4, "topk_group": 2}, "n_group 4"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    arch: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(IncompatibleError, match="not supported") as caught:
        parse(arch, **changes)
    assert named in caught.value.message
    assert "supported is" in caught.value.hint


def test_a_key_of_another_architecture_means_nothing() -> None:
    for change in ({"n_group": 4}, {"clip_qkv": 8.0}, {"routed_scaling_factor": 9.0}):
        assert parse("qwen3_moe", **change) == parse("qwen3_moe")
