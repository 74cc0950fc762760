"""Files of families with other names and layouts: what is read, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.backend import LoadConfig
from expertctl.engine.base_files import iter_row_portions
from expertctl.engine.load_plan import choose_backend
from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.architecture_rows import ARCHITECTURES, ELSE_FOREIGN
from expertctl.package.base_model import (
    ForeignConfig,
    parse_foreign_config,
    read_base,
    read_base_config,
)
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import parse_model_config, read_model_config
from expertctl.schema.strict_json import encode_canonical
from tests.factories import VOCAB, write_safetensors
from tests.gpt2_base import LAYERS, WIDTH, edit_config, write_gpt2
from tests.package.test_model_config import JSON

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 61,
}
NEEDED: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 3},
    **{
        name: {"full_attention_interval": 3}
        for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
}
WHOLE = {"scale_attn_by_inverse_layer_idx": False}


def make_document(arch: str, **changes: Any) -> dict[str, Any]:
    """A small configuration with the keys that this architecture has."""
    row = ARCHITECTURES[arch]
    values = {row.keys.get(name, name): value for name, value in SIZES.items()}
    return {
        **values,
        "model_type": arch,
        "architectures": [row.class_name],
        **NEEDED.get(arch, {}),
        **changes,
    }


@pytest.mark.parametrize("arch", sorted(ELSE_FOREIGN))
def test_keys_of_every_family_are_read_by_their_own_names(arch: str) -> None:
    config = parse_model_config(make_document(arch))
    assert (config.hidden_size, config.layers, config.heads) == (32, 3, 4)
    assert config.intermediate_size == 48
    assert config.unlike_llama == (arch not in {"ministral", "phi3", "smollm3"})
    assert json.loads(encode_canonical(config.to_json())) == config.to_json()
    assert set(config.adapted_shapes()) >= {"lm_head"}
    name = ARCHITECTURES[arch].keys.get("hidden_size", "hidden_size")
    with pytest.raises(InvalidPackageError, match=f"{name} is -1"):
        parse_model_config(make_document(arch) | {name: -1})


def list_keys() -> list[str]:
    """Every key that a row names, and those that are read by name."""
    known = {value for row in ARCHITECTURES.values() for value in row.keys.values()}
    known |= {name for row in ARCHITECTURES.values() for name in row.refused}
    return sorted(
        {
            *known,
            *SIZES,
            "head_dim",
            "num_key_value_heads",
            "max_position_embeddings",
            "rope_parameters",
            "rope_scaling",
            "partial_rotary_factor",
            "rope_local_base_freq",
            "layer_types",
            "sliding_window",
            "sliding_window_pattern",
            "no_rope_layers",
            "no_rope_layer_interval",
            "use_sliding_window",
            "use_parallel_residual",
            "use_qk_norm",
            "qk_layernorm",
            "new_decoder_architecture",
            "multi_query",
            "parallel_attn",
            "num_ln_in_parallel_attn",
            "query_pre_attn_scalar",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "logit_scale",
            "scale_attn_weights",
            "position_embedding_type",
            "num_local_experts",
            "full_attention_interval",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_conv_kernel_dim",
        }
    )


@settings(deadline=None, max_examples=300)
@given(
    arch=st.sampled_from(sorted(ELSE_FOREIGN)),
    key=st.sampled_from(list_keys()),
    value=JSON
    | st.integers(-2, 2000)
    | st.dictionaries(
        st.sampled_from(
            ["rope_type", "type", "factor", "alpha", "short_factor", "long_factor", "rope_theta"]
        ),
        st.sampled_from(["dynamic", "longrope", "yarn", "su"]) | st.floats(0, 10) | JSON,
    ),
)
def test_any_value_in_any_place_is_read_or_refused(arch: str, key: str, value: Any) -> None:
    try:
        config = parse_model_config(make_document(arch) | {key: value})
    except (IncompatibleError, InvalidPackageError):
        return
    assert len(config.windows) == config.layers
    assert config.heads % config.kv_heads == 0
    assert config.rope.dims <= config.head_dim
    assert encode_canonical(config.to_json())
    assert config.tensor_shapes()


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("falcon", {"alibi": True}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("gemma2", {"hidden_activation": "quick_gelu"}),
        ("gpt2", {"add_cross_attention": True}),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "attention"]}),
        ("granitemoehybrid", {"num_local_experts": 4}),
        ("olmo2", {"rope_parameters": {"rope_type": "proportional"}}),
    ],
)
def test_what_the_decoder_does_not_compute_is_left_to_transformers(
    arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    document = make_document(arch, **changes)
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(IncompatibleError):
        read_model_config(tmp_path)
    assert isinstance(read_base_config(tmp_path), ForeignConfig)
    assert parse_foreign_config(document).architecture == arch


def test_a_family_that_is_also_malformed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_document("phi", vocab_size=0)))
    with pytest.raises(InvalidPackageError, match="vocab_size"):
        read_base_config(tmp_path)


def test_the_context_of_scalings_by_length_ends_where_they_change() -> None:
    longrope = {
        "type": "su",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = parse_model_config(
        make_document("phi3", rope_scaling=longrope, max_position_embeddings=131072)
    )
    assert config.max_positions == 4096
    stated = parse_model_config(
        make_document(
            "phi3",
            rope_scaling=longrope,
            max_position_embeddings=131072,
            original_max_position_embeddings=8192,
        )
    )
    assert stated.max_positions == 8192
    assert stated.rope.attention == pytest.approx((1 + np.log(16) / np.log(8192)) ** 0.5)
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    plain = make_document("stablelm", max_position_embeddings=64)
    assert parse_model_config({**plain, "rope_parameters": dynamic}) == parse_model_config(plain)
    with pytest.raises(InvalidPackageError, match="short_factor must be 4 numbers"):
        parse_model_config(make_document("phi3", rope_scaling={**longrope, "short_factor": [1.0]}))


def test_a_bare_checkpoint_is_the_base_that_it_is_with_its_head(tmp_path: Path) -> None:
    whole = read_base(write_gpt2(tmp_path / "whole", **WHOLE), name="gpt2")
    bare = read_base(write_gpt2(tmp_path / "bare", bare=True, **WHOLE), name="gpt2")
    assert not whole.foreign
    assert whole == bare
    assert whole.shapes["transformer.h.0.attn.c_attn"] == (3 * WIDTH, WIDTH)
    assert whole.shapes["lm_head"] == (VOCAB, WIDTH)


def test_a_transposed_matrix_is_read_as_our_rows(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    directory = write_gpt2(tmp_path, **WHOLE)
    config = read_model_config(directory)
    stored = load_file(directory / "model.safetensors")
    fused = stored["transformer.h.1.attn.c_attn.weight"]
    found = read_base_tensors(directory, config)["model.layers.1.self_attn.k_proj.weight"]
    rows = np.concatenate([part.copy() for part in iter_row_portions(found)])
    np.testing.assert_array_equal(rows, fused[:, WIDTH : 2 * WIDTH].T)
    np.testing.assert_array_equal(
        next(iter_row_portions(found, first=3, rows=2)), fused[:, WIDTH + 3 : WIDTH + 5].T
    )


def test_every_bit_of_the_files_counts_in_the_digest(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    before = read_base(write_gpt2(tmp_path, **WHOLE)).identity.weights
    path = tmp_path / "model.safetensors"
    for name in ("transformer.h.1.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.bias"):
        tensors = load_file(path)
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[-1] += 1
        write_safetensors(path, tensors, dtype="float32")
        after = read_base(tmp_path).identity.weights
        assert after != before
        before = after


def test_what_is_wrong_is_named_as_in_the_files(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    directory = write_gpt2(tmp_path, **WHOLE)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1), np.float32)  # a mask of old files
    write_safetensors(path, tensors, dtype="float32")
    assert len(read_base_tensors(directory, read_model_config(directory))) > LAYERS
    del tensors["transformer.h.0.attn.c_attn.weight"]
    tensors["transformer.h.1.ln_2.bias"] = np.zeros(3, np.float32)
    tensors["transformer.h.7.extra"] = np.zeros(3, np.float32)
    write_safetensors(path, tensors, dtype="float32")
    with pytest.raises(InvalidPackageError) as caught:
        read_base_tensors(directory, read_model_config(directory))
    text = str(caught.value)
    assert text.count("missing tensor transformer.h.0.attn.c_attn.weight") == 1
    assert f"tensor transformer.h.1.ln_2.bias is [3], [{WIDTH}] by config.json" in text
    assert "unexpected tensor transformer.h.7.extra" in text


def test_kernels_leave_other_blocks_to_numpy_and_refuse_what_only_they_can_do(
    tmp_path: Path,
) -> None:
    config = read_model_config(write_gpt2(tmp_path, **WHOLE))
    assert config.has_kernels
    config = replace(config, block=replace(config.block, norm="rms", own_head_norms=True))
    assert not config.has_kernels
    backend, warnings = choose_backend(config, LoadConfig("float32"))
    assert (backend.name, warnings) == ("numpy", ())
    backend, warnings = choose_backend(config, LoadConfig("bf16"), numpy_below=0)
    assert backend.name == "numpy"
    assert "numpy runs the base, which is slower: the kernels cannot run" in warnings[0]
    with pytest.raises(IncompatibleError, match="the kernels cannot run the architecture gpt2"):
        choose_backend(config, LoadConfig("int8"))


def test_an_option_that_changes_between_versions_is_seen_in_the_digest(tmp_path: Path) -> None:
    before = read_base(write_gpt2(tmp_path, **WHOLE)).identity.arch
    edit_config(tmp_path, scale_attn_weights=False)
    assert read_base(tmp_path).identity.arch != before
