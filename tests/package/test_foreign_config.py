"""Bases that our decoder does not run: how they are named, and what of them is refused."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.package.adapter import AdapterSpec, Ia3, Lora, Part, SoftPrompt
from expertctl.package.base_model import (
    BaseFacts,
    ForeignConfig,
    parse_foreign_config,
    read_base,
    read_base_config,
)
from expertctl.package.compatibility import check_tensors
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import encode_canonical
from tests.factories import VOCAB, write_base
from tests.gpt2_base import LAYERS, WIDTH, edit_config, gpt2_config, gpt2_shapes, write_gpt2

DROPPED = ("_name_or_path", "dtype", "transformers_version", "use_cache")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return write_gpt2(tmp_path / "gpt2")


def digests(facts: BaseFacts) -> tuple[str, str, str]:
    identity = facts.identity
    return str(identity.arch), str(identity.weights), str(identity.tokenizer)


def test_the_digests_are_those_of_the_definition(gpt2: Path) -> None:
    facts = read_base(gpt2)
    values = {k: v for k, v in gpt2_config().items() if k not in DROPPED}
    shapes = [[name, list(shape)] for name, shape in sorted(gpt2_shapes().items())]
    config = {"engine": "transformers", "values": values}
    arch = encode_canonical({"config": config, "tensors": shapes})
    assert facts.identity.arch.hex == hashlib.sha256(arch).hexdigest()
    tensors = load_file(gpt2 / "model.safetensors")
    rows = [[n, "F32", hashlib.sha256(tensors[n].tobytes()).hexdigest()] for n in sorted(tensors)]
    assert facts.identity.weights is not None
    assert facts.identity.weights.hex == hashlib.sha256(encode_canonical(rows)).hexdigest()
    tokenizer = (gpt2 / "tokenizer.json").read_bytes()
    assert facts.identity.tokenizer.hex == hashlib.sha256(tokenizer).hexdigest()
    assert facts.foreign


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "/somewhere/else"},
        {"transformers_version": "4.40.0"},
        {"dtype": None, "torch_dtype": "float16"},
        {"use_cache": False},
        {"attn_implementation": "somebody/kernel"},
        {"_attn_implementation": "eager"},
    ],
    ids=str,
)
def test_what_nothing_is_computed_by_does_not_change_the_architecture(
    change: dict[str, Any], gpt2: Path
) -> None:
    before = digests(read_base(gpt2))
    edit_config(gpt2, **change)
    assert digests(read_base(gpt2)) == before


@pytest.mark.parametrize("change", [{"n_head": 4}, {"activation_function": "relu"}], ids=str)
def test_another_configuration_is_another_architecture(change: dict[str, Any], gpt2: Path) -> None:
    before = read_base(gpt2).identity
    edit_config(gpt2, **change)
    after = read_base(gpt2).identity
    assert after.arch != before.arch
    assert after.weights == before.weights


def test_a_matrix_stored_the_other_way_round_is_told_by_its_bias(gpt2: Path) -> None:
    shapes = read_base(gpt2).shapes
    assert shapes["transformer.h.0.attn.c_attn"] == (3 * WIDTH, WIDTH)
    assert shapes["transformer.h.1.attn.c_proj"] == (WIDTH, WIDTH)
    assert shapes["transformer.h.1.mlp.c_proj"] == (WIDTH, 4 * WIDTH)
    assert len(shapes) == 4 * LAYERS + 3


def test_a_tied_head_is_as_wide_as_the_tokens(gpt2: Path) -> None:
    assert read_base(gpt2).shapes["lm_head"] == (VOCAB, WIDTH)


def test_linear_layers_are_stored_as_they_are() -> None:
    config = ForeignConfig("gpt_neox", {})
    tensors = {"a.dense.weight": (48, 16), "a.dense.bias": (48,), "embed_out.weight": (61, 16)}
    assert config.linear_shapes(tensors) == {"a.dense": (48, 16), "embed_out": (61, 16)}


def test_a_checkpoint_without_its_head_has_the_modules_of_one_with_it(tmp_path: Path) -> None:
    whole = read_base(write_gpt2(tmp_path / "whole"))
    bare = read_base(write_gpt2(tmp_path / "bare", bare=True))
    assert bare.shapes == whole.shapes
    assert bare.identity.arch != whole.identity.arch


def test_an_adapter_is_checked_against_the_layer_and_not_how_it_is_stored(gpt2: Path) -> None:
    shapes = read_base(gpt2).shapes
    module, narrow, wide = "transformer.h.0.mlp.c_fc", WIDTH, 4 * WIDTH

    def misfits(part: Part) -> list[str]:
        spec = AdapterSpec("lora", (part,), "float32", 2, None, 2)
        return check_tensors(spec, shapes)

    fitting = Lora(module, "a", "b", 2, 1.0, (2, narrow), (wide, 2))
    assert misfits(fitting) == []
    assert misfits(replace(fitting, a_shape=(2, wide), b_shape=(narrow, 2)))
    assert misfits(replace(fitting, module="transformer.h.9.mlp.c_fc"))
    assert misfits(Ia3(module, "l", on_input=True, size=narrow)) == []
    assert misfits(Ia3(module, "l", on_input=False, size=narrow))
    assert misfits(SoftPrompt("prompt_embeddings", 3, WIDTH)) == []
    assert misfits(SoftPrompt("prompt_embeddings", 3, WIDTH + 1))


def test_masks_that_old_files_hold_are_no_weights(gpt2: Path) -> None:
    path = gpt2 / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), np.bool_)}, path)
    assert read_base(gpt2).shapes.keys() == read_base(write_gpt2(gpt2)).shapes.keys()
    tensors["transformer.h.0.mlp.c_fc.weight"] = np.ones((16, 64), np.int8)
    save_file(tensors, path)
    with pytest.raises(IncompatibleError, match=r"c_fc\.weight is I8"):
        read_base(gpt2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
        ({"auto_map": {}}, "auto_map"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}, "auto_map"),
        ({"parts": [{"custom_pipelines": {"x": "y"}}]}, "custom_pipelines"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"transformers_weights": "../other.safetensors"}, "other weights"),
        ({"fusion_config": {"a": "b"}}, "fusion_config"),
        ({"kernel_config": {"a": "b"}}, "kernel_config"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "causal language model"),
        ({"architectures": ["GPT2LMHeadModel", "Other"]}, "not supported"),
        ({"architectures": [3]}, "not supported"),
    ],
    ids=str,
)
def test_a_configuration_that_would_do_more_than_compute_is_refused(
    change: dict[str, Any], words: str, gpt2: Path
) -> None:
    edit_config(gpt2, **change)
    with pytest.raises(IncompatibleError) as caught:
        read_base(gpt2)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_null_is_what_a_default_looks_like() -> None:
    nulls: dict[str, Any] = {"auto_map": None, "quantization_config": None}
    spelled, plain = parse_foreign_config(gpt2_config(**nulls)), parse_foreign_config(gpt2_config())
    assert spelled == replace(plain, values={**plain.values, **nulls})


@pytest.mark.parametrize("change", [{"architectures": None}, {"model_type": 3}], ids=str)
def test_a_configuration_that_does_not_say_what_it_is_is_malformed(
    change: dict[str, Any], gpt2: Path
) -> None:
    edit_config(gpt2, **change)
    with pytest.raises(InvalidPackageError):
        read_base(gpt2)


def test_pickled_weights_are_never_opened(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").rename(gpt2 / "pytorch_model.bin")
    with pytest.raises(NotFoundError) as caught:
        read_base(gpt2)
    assert "pickles are never opened" in caught.value.hint


def test_a_base_without_a_fast_tokenizer_is_refused(gpt2: Path) -> None:
    (gpt2 / "tokenizer.json").unlink()
    (gpt2 / "vocab.json").write_text("{}")
    with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
        read_base(gpt2)


def test_what_our_decoder_knows_is_read_strictly(tmp_path: Path) -> None:
    directory = write_base(tmp_path / "base")
    assert isinstance(read_base_config(directory), ModelConfig)
    assert not read_base(directory).foreign
    document = json.loads((directory / "config.json").read_text())
    edit_config(directory, hidden_act="quick_gelu")
    with pytest.raises(IncompatibleError, match="'quick_gelu'"):
        read_base_config(directory)
    assert parse_foreign_config(document).architecture == "qwen3"
