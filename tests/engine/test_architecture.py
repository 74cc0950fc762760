"""Reading config.json: transformers says what it means; absurd and unknown models are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.architecture import ARCHITECTURES, ModelConfig, parse_config, read_config
from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from tests.engine.conftest import CLASSES, MakeOracle
from tests.factories import write_base

MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def parse(**changes: Any) -> ModelConfig:
    document = {**MINIMAL, **changes}
    kind = document["model_type"]
    if kind in ARCHITECTURES and "architectures" not in changes:
        document["architectures"] = [ARCHITECTURES[kind].class_name]
    return parse_config({k: v for k, v in document.items() if v != "absent"})


def theirs(arch: str, **changes: Any) -> Any:
    names = {"model_type", "architectures"}
    values = {k: v for k, v in {**MINIMAL, **changes}.items() if k not in names and v != "absent"}
    return CLASSES[arch][0](**values)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_absent_keys_mean_what_they_mean_to_transformers(arch: str) -> None:
    ours, reference = (
        parse(model_type=arch, num_key_value_heads=2),
        theirs(arch, num_key_value_heads=2),
    )
    assert ours.head_dim == getattr(reference, "head_dim", 32 // 4)
    assert ours.norm_eps == reference.rms_norm_eps
    assert ours.tied is reference.tie_word_embeddings
    assert ours.rope.theta == reference.rope_parameters["rope_theta"]
    assert ours.rope.scaling is None
    assert ours.windows == (getattr(reference, "sliding_window", None),) * 3


def test_absent_key_value_heads_are_as_many_as_query_heads() -> None:
    assert parse().kv_heads == theirs("llama").num_key_value_heads == 4


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
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
    oracle: MakeOracle, arch: str, changes: dict[str, Any]
) -> None:
    model = oracle(arch, **changes)
    config = read_config(model.directory)
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
    wanted = tuple(
        reference.sliding_window if kind == "sliding_attention" else None
        for kind in reference.layer_types
    )
    assert parse(model_type=arch, **changes).windows == wanted


@pytest.mark.parametrize(
    ("window", "wanted"), [("absent", (4096,) * 3), (None, (None,) * 3), (7, (7,) * 3)]
)
def test_windows_of_mistral_are_those_of_transformers(window: Any, wanted: tuple[Any, ...]) -> None:
    assert theirs("mistral", sliding_window=window).sliding_window == wanted[0]
    assert parse(model_type="mistral", sliding_window=window).windows == wanted


def test_a_base_of_every_architecture_is_read_from_its_directory(tmp_path: Path) -> None:
    for arch in ARCHITECTURES:
        config = read_config(write_base(tmp_path / arch, arch=arch))
        assert (config.architecture, config.layers, config.kv_heads) == (arch, 2, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"model_type": "qwen3_moe"}, "'qwen3_moe'"),
        ({"model_type": "Llama"}, "'Llama'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["LlamaForCausalLM", "Evil"]}, "Evil"),
        ({"architectures": "LlamaForCausalLM"}, "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
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
        read_config(tmp_path)
    assert "Hugging Face" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 1, "a": 2}', '{"vocab_size": NaN}', "\ufeff{}", '"llama"', "null"],
)
def test_a_config_that_is_not_strict_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidPackageError, match=r"config\.json"):
        read_config(tmp_path)


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
    arch=st.sampled_from(sorted(ARCHITECTURES)),
    key=st.sampled_from(
        [
            *MINIMAL,
            "num_key_value_heads",
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
        ]
    ),
    value=JSON,
)
def test_any_value_in_any_place_is_read_or_refused(arch: str, key: str, value: Any) -> None:
    document = {**MINIMAL, "model_type": arch, "architectures": [ARCHITECTURES[arch].class_name]}
    try:
        config = parse_config({**document, key: value})
    except (IncompatibleError, InvalidPackageError):
        return
    assert len(config.windows) == config.layers
    assert config.heads % config.kv_heads == 0
    assert json.dumps(sorted(config.linear_shapes()))
