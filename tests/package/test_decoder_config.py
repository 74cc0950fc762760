"""The normal form of config.json: transformers itself as oracle for every default."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import InvalidPackageError
from expertctl.package.decoder_config import DECODER_FIELDS, decoder_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]


def normal(arch: str, **config: Any) -> dict[str, Any]:
    return decoder_config({"model_type": arch, **SIZES, **config})


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_key_value_heads": 2, "head_dim": 16},
        {"rope_theta": 500000.0},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        {"tie_word_embeddings": True},
        {"sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None},
        {"max_position_embeddings": 99, "rms_norm_eps": 1e-5},
    ],
    ids=str,
)  # fmt: skip
def test_an_old_file_and_what_transformers_makes_of_it_are_the_same(
    arch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    old = {"model_type": arch, **SIZES, **config}
    (tmp_path / "config.json").write_text(json.dumps(old))
    loaded = AutoConfig.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    ours = decoder_config(old)
    assert decoder_config(new) == ours
    assert ours["num_key_value_heads"] == loaded.num_key_value_heads
    expected_dim = getattr(loaded, "head_dim", None) or SIZES["hidden_size"] // 4
    assert ours["head_dim"] == expected_dim
    assert ours["rope_parameters"]["rope_theta"] == loaded.rope_parameters["rope_theta"]
    assert ours["rope_parameters"]["rope_type"] == loaded.rope_parameters["rope_type"]
    types = getattr(loaded, "layer_types", None)
    if types is not None:
        sliding = [i for i, kind in enumerate(types) if kind == "sliding_attention"]
        assert ours["sliding_layers"] == sliding
    assert ours["max_position_embeddings"] == loaded.max_position_embeddings
    assert ours["tie_word_embeddings"] == loaded.tie_word_embeddings


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_explicit_null_means_one_head_each_and_an_even_split(arch: str) -> None:
    document = normal(arch, num_key_value_heads=None, head_dim=None)
    assert (document["num_key_value_heads"], document["head_dim"]) == (4, 8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"rope_theta": 20000.0}, "rope_parameters"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"head_dim": 16}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "sliding_layers"),
    ],
)
def test_a_field_that_the_decoder_reads_changes_the_document(
    change: dict[str, Any], field: str
) -> None:
    plain, changed = normal("qwen3"), normal("qwen3", **change)
    assert plain[field] != changed[field]


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"bos_token_id": 3}, {"use_cache": False}, {"sliding_window": 9}],
)
def test_a_field_that_it_does_not_read_changes_nothing(change: dict[str, Any]) -> None:
    assert normal("qwen3", **change) == normal("qwen3")


def test_the_document_has_exactly_the_declared_fields() -> None:
    assert tuple(normal("llama")) == DECODER_FIELDS


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type"),
        ({"model_type": 5, **SIZES}, "model_type"),
        ({"model_type": "llama", **SIZES, "hidden_size": "32"}, "hidden_size"),
        ({"model_type": "llama", **SIZES, "hidden_size": -1}, "hidden_size"),
        ({"model_type": "llama", **SIZES, "vocab_size": True}, "vocab_size"),
        ({"model_type": "llama", **SIZES, "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "qwen2", **SIZES, "max_window_layers": "x"}, "max_window_layers"),
        ({"model_type": "llama", **SIZES, "head_dim": "x"}, "head_dim"),
        ({"model_type": "llama", **SIZES, "num_key_value_heads": [1]}, "num_key_value_heads"),
        ({"model_type": "mistral", **SIZES, "sliding_window": "x"}, "sliding_window"),
    ],
)
def test_a_configuration_that_is_no_decoder_is_refused(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidPackageError, match=message):
        decoder_config(config)
