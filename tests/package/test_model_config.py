"""Reading config.json: transformers says what it means; absurd and unknown models are refused.

What was read is also what names a base, so files that mean the same decoder must be equal.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.package.architecture_rows import ARCHITECTURES, ELSE_FOREIGN
from expertctl.package.block_config import BlockConfig
from expertctl.package.model_config import ModelConfig, parse_model_config, read_model_config
from expertctl.schema.strict_json import encode_canonical
from tests.engine import conftest, reference_models
from tests.engine.conftest import build_reference_model
from tests.factories import write_base

MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CLASSES = {**conftest.CLASSES, **reference_models.ROUTED_CLASSES}
LIKE_LLAMA = sorted(ARCHITECTURES.keys() - ELSE_FOREIGN)
DENSE = [name for name in LIKE_LLAMA if ARCHITECTURES[name].experts is None]
NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
}
"""Keys that transformers has no default for."""
SPARSE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
"""Enough heads for the number of key heads that transformers takes for an absent key."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def parse(**changes: Any) -> ModelConfig:
    kind = changes.get("model_type", MINIMAL["model_type"])
    needed = NEEDED.get(kind, {}) if isinstance(kind, str) else {}
    document = {**MINIMAL, **needed, **changes}
    if kind in ARCHITECTURES and "architectures" not in changes:
        document["architectures"] = [ARCHITECTURES[kind].class_name]
    return parse_model_config({k: v for k, v in document.items() if v != "absent"})


def theirs(arch: str, **changes: Any) -> Any:
    names = {"model_type", "architectures"}
    document = {**MINIMAL, **NEEDED.get(arch, {}), **changes}
    values = {k: v for k, v in document.items() if k not in names and v != "absent"}
    return CLASSES[arch][0](**values)


def windows_of(reference: Any) -> tuple[int | None, ...]:
    """The window of each layer: Llama reads none, Mistral has one kind of layer."""
    one_kind = reference.model_type in {"mistral", "mixtral", "qwen3_moe"}
    every = ["sliding_attention" if one_kind else "full_attention"] * reference.num_hidden_layers
    names = getattr(reference, "layer_types", None) or every
    return tuple(reference.sliding_window if n == "sliding_attention" else None for n in names)


@pytest.mark.parametrize("arch", LIKE_LLAMA)
def test_absent_keys_mean_what_they_mean_to_transformers(arch: str) -> None:
    values = {**SPARSE, **NEEDED.get(arch, {})}
    ours = parse_model_config({"model_type": arch, **values})
    reference = CLASSES[arch][0](**values)
    assert ours.kv_heads == reference.num_key_value_heads
    assert ours.head_dim == (getattr(reference, "head_dim", None) or 128 // 32)
    assert ours.max_positions == reference.max_position_embeddings
    assert ours.norm_eps == reference.rms_norm_eps
    assert ours.tied is reference.tie_word_embeddings
    assert ours.rope.theta == reference.rope_parameters["rope_theta"]
    assert ours.rope.scaling is None
    assert ours.windows == windows_of(reference)


def test_absent_key_value_heads_are_as_many_as_query_heads() -> None:
    assert parse(num_key_value_heads="absent").kv_heads == 4
    assert theirs("llama", num_key_value_heads="absent").num_key_value_heads == 4


@pytest.mark.parametrize("arch", LIKE_LLAMA)
def test_null_key_value_heads_are_as_many_as_query_heads(arch: str) -> None:
    assert parse(model_type=arch, num_key_value_heads=None).kv_heads == 4
    if arch not in {
        "mistral",
        "mixtral",
        "qwen3_moe",
        "qwen2_moe",
    }:  # transformers refuses null there
        assert theirs(arch, num_key_value_heads=None).num_key_value_heads == 4


@pytest.mark.parametrize(("arch", "wanted"), [("llama", 8), ("mistral", 8), ("qwen2", 8)])
def test_a_null_head_dim_is_an_even_split(arch: str, wanted: int) -> None:
    assert parse(model_type=arch, head_dim=None).head_dim == wanted
    if arch != "qwen2":  # transformers fails on null there
        assert theirs(arch, head_dim=None).head_dim == wanted


@pytest.mark.parametrize(
    "name",
    [
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "max_window_layers",
        "use_sliding_window",
        "layer_types",
        "quantization_config",
        "per_layer_config",
        "architectures",
    ],
)
@pytest.mark.parametrize("arch", LIKE_LLAMA)
def test_null_is_absence_where_transformers_gives_it_no_meaning(arch: str, name: str) -> None:
    absent = parse(model_type=arch, **{name: "absent"})
    assert parse(model_type=arch, **{name: None}) == absent


NO_WINDOW = {"use_sliding_window": True, "sliding_window": None}
OTHER_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
OLD_FILES: list[dict[str, Any]] = [
    {},
    OTHER_HEADS,
    {"rope_theta": 500000.0},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    {"rope_theta": 1e6, "rope_scaling": YARN},
    {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1}},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "mlp_bias": True},
    {"sliding_window": 16},
    {"sliding_window": None},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    NO_WINDOW,
    {**NO_WINDOW, "max_window_layers": 0},
    {"max_position_embeddings": 99, "rms_norm_eps": 1e-5},
]
_FAILS = {"olmoe": [OTHER_HEADS], "qwen2_moe": [NO_WINDOW, {**NO_WINDOW, "max_window_layers": 0}]}
"""What transformers makes a configuration of, and then no model that runs."""


@pytest.mark.parametrize(
    ("arch", "config"),
    [(a, c) for a in LIKE_LLAMA for c in OLD_FILES if c not in _FAILS.get(a, [])],
    ids=str,
)
def test_an_old_file_and_what_transformers_makes_of_it_are_the_same(
    arch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    old = {"model_type": arch, **SPARSE, **NEEDED.get(arch, {}), **config}
    (tmp_path / "config.json").write_text(json.dumps(old))
    loaded = AutoConfig.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path)
    ours = parse_model_config(old)
    assert read_model_config(tmp_path) == ours
    assert read_model_config(tmp_path).to_json() == ours.to_json()
    assert ours.kv_heads == loaded.num_key_value_heads
    assert ours.head_dim == (getattr(loaded, "head_dim", None) or 128 // 32)
    assert ours.rope.theta == loaded.rope_parameters["rope_theta"]
    kind = "default" if ours.rope.scaling is None else ours.rope.scaling.rope_type
    assert kind == loaded.rope_parameters["rope_type"]
    assert ours.windows == windows_of(loaded)
    assert ours.max_positions == loaded.max_position_embeddings
    assert ours.norm_eps == loaded.rms_norm_eps
    assert ours.tied == loaded.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rms_norm_eps": 1e-5}, "norm_eps"),
        ({"rope_theta": 20000.0}, "rope"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope"),
        ({"tie_word_embeddings": True}, "tied"),
        ({"head_dim": 16}, "head_dim"),
        ({"attention_bias": True}, "qkv_bias"),
        ({"attention_bias": True}, "output_bias"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "windows"),
        ({"max_position_embeddings": 65}, "max_positions"),
        ({"model_type": "qwen2"}, "architecture"),
        ({"model_type": "qwen2"}, "qk_norm"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_a_field_that_the_decoder_reads_changes_the_document(
    change: dict[str, Any], field: str
) -> None:
    plain = parse(model_type="qwen3").to_json()
    changed = parse(**{"model_type": "qwen3", **change}).to_json()
    assert plain[field] != changed[field]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"bos_token_id": 3},
        {"use_cache": False},
        {"sliding_window": 9},
        {"mlp_bias": True},
        {"max_window_layers": 1},
    ],
    ids=str,
)
def test_a_field_that_it_does_not_read_changes_nothing(change: dict[str, Any]) -> None:
    assert parse(model_type="qwen3", **change) == parse(model_type="qwen3")


@pytest.mark.parametrize("arch", LIKE_LLAMA)
def test_the_document_holds_every_field_and_all_of_it_is_plain_json(arch: str) -> None:
    for changes in ({}, {"rope_scaling": LLAMA3}, {"rope_scaling": YARN}):
        config = parse(model_type=arch, **changes)
        document = config.to_json()
        names = [field.name for field in fields(ModelConfig)]
        assert list(document) == [name for name in names if name not in _unsaid(config)]
        assert json.loads(encode_canonical(document)) == document


def _unsaid(config: ModelConfig) -> set[str]:
    """Fields that documents of dense bases never had, and their digests must not change."""
    experts = {"experts"} if config.experts is None else set()
    block = {"block"} if config.block == BlockConfig() else set()
    norm = set() if config.projection_norm else {"projection_norm"}
    delta_net = {"delta_net"} if config.delta_net is None else set()
    return experts | block | norm | delta_net


def test_the_document_of_a_dense_base_is_what_it_always_was() -> None:
    assert parse(model_type="qwen3").to_json() == {
        "architecture": "qwen3",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 128,
        "max_positions": 64,
        "norm_eps": 1e-6,
        "rope": {"theta": 10000.0, "dims": 128, "scaling": None},
        "windows": [None] * 3,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": True,
        "tied": False,
    }


def test_scaling_types_with_equal_settings_are_not_equal_documents() -> None:
    """Which formula is meant is part of the document, not to be guessed from the keys."""
    kinds = {"linear": {"type": "linear", "factor": 8.0}, "llama3": LLAMA3, "yarn": YARN}
    for kind, scaling in kinds.items():
        rope = parse(rope_scaling=scaling).to_json()["rope"]
        assert isinstance(rope, dict)
        assert isinstance(rope["scaling"], dict)
        assert rope["scaling"]["rope_type"] == kind


@pytest.mark.parametrize("arch", DENSE)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True, "attention_bias": True},
    ],
    ids=str,
)
def test_tensor_names_and_shapes_are_those_of_the_saved_model(
    arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = build_reference_model(tmp_path / "model", arch, **changes)
    config = read_model_config(model.directory)
    saved = {
        name: tuple(parameter.shape)
        for name, parameter in model.model.state_dict().items()
        if not (config.tied and name == "lm_head.weight")
    }
    assert config.tensor_shapes() == saved
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in model.model.named_modules()
        if type(module).__name__ == "Linear"
    }
    assert config.linear_shapes() == linears


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 9},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_windows_of_qwen_are_those_of_transformers(arch: str, changes: dict[str, Any]) -> None:
    reference = theirs(arch, **changes)
    assert parse(model_type=arch, **changes).windows == windows_of(reference)


@pytest.mark.parametrize(
    ("window", "wanted"), [("absent", (4096,) * 3), (None, (None,) * 3), (7, (7,) * 3)]
)
def test_windows_of_mistral_are_those_of_transformers(window: Any, wanted: tuple[Any, ...]) -> None:
    assert theirs("mistral", sliding_window=window).sliding_window == wanted[0]
    assert parse(model_type="mistral", sliding_window=window).windows == wanted


def test_a_base_of_every_architecture_is_read_from_its_directory(tmp_path: Path) -> None:
    for arch in LIKE_LLAMA:
        config = read_model_config(write_base(tmp_path / arch, arch=arch))
        assert (config.architecture, config.layers, config.kv_heads) == (arch, 2, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "opt"}, "'opt'"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'"),
        ({"model_type": "Llama"}, "'Llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "Evil"]}, "Evil"),
        ({"architectures": "LlamaForCausalLM"}, "LlamaForCausalLM"),
        ({"hidden_act": "quick_gelu"}, "activation 'quick_gelu'"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ({"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "'proportional'"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_do_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(IncompatibleError, match="not supported") as caught:
        parse(**changes)
    assert named in caught.value.message
    assert "supported" in caught.value.hint or "float" in caught.value.hint


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(IncompatibleError) as caught:
        parse(model_type="mamba")
    assert all(name in caught.value.hint for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 3.0}, "num_hidden_layers is 3.0"),
        ({"model_type": 5}, "model_type is 5"),
        ({"model_type": "absent", "architectures": None}, "model_type is missing"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_key_value_heads": [1]}, "num_key_value_heads is a list"),
        ({"head_dim": "x"}, "head_dim is 'x'"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "max_window_layers is 'x'"),
        ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window is 'x'"),
        ({"rope_scaling": 0}, "rope_scaling is 0"),
        ({"num_attention_heads": -4}, "num_attention_heads is -4"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 3}, "num_attention_heads is not a multiple"),
        ({"head_dim": 7}, "head_dim is odd"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"intermediate_size": []}, "intermediate_size is a list"),
        ({"max_position_embeddings": 2**60}, "max_position_embeddings is"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_parameters.rope_type is 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor below 1"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 3}, "layer_types is not"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "layer_types must be 3 times",
        ),
        ({"model_type": "qwen2", "layer_types": [[], {}, 1]}, "layer_types must be 3 times"),
        ({"model_type": "qwen3", "layer_types": {"a": 1}}, "layer_types must be 3 times"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3},
            "use_sliding_window is not set",
        ),
    ],
    ids=str,
)
def test_malformed_and_absurd_values_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse(**changes)
    assert any(problem in line for line in caught.value.problems), caught.value.problems


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InvalidPackageError) as caught:
        parse(vocab_size=0, head_dim=9, tie_word_embeddings=None, rms_norm_eps="small")
    assert len(caught.value.problems) == 3


def test_a_directory_without_config_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json") as caught:
        read_model_config(tmp_path)
    assert "Hugging Face" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 1, "a": 2}', '{"vocab_size": NaN}', "\ufeff{}", '"llama"', "null"],
)
def test_a_config_that_is_not_strict_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidPackageError, match=r"config\.json"):
        read_model_config(tmp_path)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(
    arch=st.sampled_from(LIKE_LLAMA),
    key=st.sampled_from(
        [
            *MINIMAL,
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "layer_types",
            "sliding_window",
            "use_sliding_window",
            "max_window_layers",
            "tie_word_embeddings",
            "attention_bias",
            "hidden_act",
            "original_max_position_embeddings",
            "clip_qkv",
            "decoder_sparse_step",
            "first_k_dense_replace",
            "mlp_only_layers",
            "moe_intermediate_size",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "qkv_bias",
            "routed_scaling_factor",
            "shared_expert_intermediate_size",
        ]
    ),
    value=JSON | st.integers(-2, 2000),
)
def test_any_value_in_any_place_is_read_or_refused(arch: str, key: str, value: Any) -> None:
    document = {**MINIMAL, **NEEDED.get(arch, {}), "model_type": arch}
    document["architectures"] = [ARCHITECTURES[arch].class_name]
    try:
        config = parse_model_config({**document, key: value})
    except (IncompatibleError, InvalidPackageError):
        return
    assert len(config.windows) == config.layers
    assert config.heads % config.kv_heads == 0
    assert json.dumps(sorted(config.linear_shapes()))
    assert encode_canonical(config.to_json())
