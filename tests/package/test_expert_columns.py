"""Experts stored as columns, as floats and as MXFP4: read as from any other layout, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from expertctl.engine.base_files import iter_row_portions
from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.attention_config import YarnScaling
from expertctl.package.base_model import read_base, read_base_headers
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import parse_model_config, read_model_config
from expertctl.package.stored_tensor import StoredTensor
from tests.engine.family_models import build_family_model
from tests.factories import write_base, write_tokenizer
from tests.quantised_bases import edit_config, edit_tensors, store_mxfp4

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
}
EXPERTS = "model.layers.1.mlp.experts"
BIASES = ("gate_up_proj_bias", "down_proj_bias")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    build_family_model(tmp_path, "gpt_oss", **SIZES)
    write_tokenizer(tmp_path)
    return tmp_path


def tensors_of(directory: Path) -> dict[str, StoredTensor]:
    return read_base_tensors(directory, read_model_config(directory))


def decode(tensor: StoredTensor) -> Tensor:
    return torch.from_numpy(np.concatenate([part.copy() for part in iter_row_portions(tensor)]))


def split(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a base with every matrix by itself, by our names."""
    found: dict[str, Tensor] = {}
    for name, array in arrays.items():
        head, _, kind = name.partition(".experts.")
        end = "bias" if kind.endswith("_bias") else "weight"
        rows = array.transpose(1, 2) if end == "weight" and kind else array
        for number, own in enumerate(rows if kind else ()):
            module = f"{head}.experts.{number}"
            if kind.startswith("gate_up"):
                found[f"{module}.gate_proj.{end}"] = own[0::2].contiguous()
                found[f"{module}.up_proj.{end}"] = own[1::2].contiguous()
            else:
                found[f"{module}.down_proj.{end}"] = own.contiguous()
        if not kind:
            found[name.replace(".router.", ".gate.")] = array
    return found


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 61}
    ours = parse_model_config({"model_type": "gpt_oss", "num_attention_heads": 16, **sizes})
    theirs = transformers.GptOssConfig(num_attention_heads=16, **sizes)
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.max_positions, ours.norm_eps) == (131072, theirs.rms_norm_eps)
    assert ours.windows == (theirs.sliding_window, None, theirs.sliding_window)
    assert (ours.qkv_bias, ours.output_bias, ours.tied) == (True, True, False)
    assert ours.experts is not None
    assert ours.experts.count == theirs.num_local_experts
    assert ours.experts.used == theirs.num_experts_per_tok
    gate = ours.block.clamped_gate
    assert gate is not None
    assert (gate.limit, gate.alpha) == (theirs.swiglu_limit, theirs.swiglu_alpha)
    rope, parameters = ours.rope, theirs.rope_parameters
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.theta, rope.scaling.factor) == (parameters["rope_theta"], parameters["factor"])
    assert (rope.scaling.original, rope.scaling.truncate) == (4096, False)


def test_the_configuration_of_the_published_files_is_read() -> None:
    """That of gpt-oss-20b, in the notation of transformers 4."""
    kinds = ["sliding_attention", "full_attention"] * 12
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {"truncate": False, "original_max_position_embeddings": 4096}
    config = parse_model_config(
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "attention_dropout": 0.0,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "initial_context_length": 4096,
            "intermediate_size": 2880,
            "layer_types": kinds,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "rms_norm_eps": 1e-05,
            "rope_scaling": yarn,
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        }
    )
    assert config.windows == (128, None) * 12
    assert config.rope.theta == 150000
    assert config.rope.attention == pytest.approx(1 + 0.1 * np.log(32))
    assert config.count_weight_bytes(itemsize=2) == pytest.approx(2 * 20.9e9, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tensors_and_digests_do_not_depend_on_the_layout(dtype: torch.dtype, base: Path) -> None:
    edit_tensors(base, lambda found: found.update({n: t.to(dtype) for n, t in found.items()}))
    stored = load_file(base / "model.safetensors")
    apart, before, tensors = split(stored), read_base(base), tensors_of(base)
    assert tensors.keys() == apart.keys() == read_model_config(base).tensor_shapes().keys()
    for name, tensor in tensors.items():
        if ".experts." in name and (tensor.codec is not None or tensor.info.dtype == "F32"):
            assert torch.equal(decode(tensor), apart[name].float())
    total = sum(tensor.size for tensor in tensors.values())
    assert total == sum(array.nbytes for array in stored.values())
    save_file(apart, base / "model.safetensors")
    assert read_base(base) == before
    assert not read_base_headers(base).foreign


def test_numbers_of_mxfp4_are_those_of_transformers_bit_for_bit(base: Path) -> None:
    """Every code with every scale, those that overflow and the smallest included."""
    generator = torch.Generator().manual_seed(3)

    def fill(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(("_blocks", "_scales"))]:
            shape = tensors[name].shape
            codes = torch.arange(256).repeat(-(-tensors[name].numel() // 256))
            mixed = codes[torch.randperm(len(codes), generator=generator)][: tensors[name].numel()]
            tensors[name] = mixed.to(torch.uint8).reshape(shape)

    store_mxfp4(base)
    edit_tensors(base, fill)
    stored, tensors = load_file(base / "model.safetensors"), tensors_of(base)
    for layer in range(2):
        top = f"model.layers.{layer}.mlp.experts"
        for stack in ("gate_up_proj", "down_proj"):
            parts = (stored[f"{top}.{stack}_{part}"] for part in ("blocks", "scales"))
            theirs = convert_moe_packed_tensors(*parts).transpose(1, 2)  # [experts, out, in]
            for number, whole in enumerate(theirs):
                halves = {"gate_proj": whole[0::2], "up_proj": whole[1::2]}
                for module, rows in (
                    halves if stack != "down_proj" else {"down_proj": whole}
                ).items():
                    tensor = tensors[f"{top}.{number}.{module}.weight"]
                    assert (tensor.storage, tensor.decoded) == ("MXFP4", "BF16")
                    _assert_same_bits(decode(tensor), rows)
                    assert tensor.codec is not None
                    _assert_same_bits(torch.from_numpy(tensor.codec.read_rows(5, 7)), rows[5:12])


def _assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    narrow = ours.to(torch.bfloat16)
    assert torch.equal(narrow.float(), ours)
    assert torch.equal(narrow.view(torch.int16), theirs.contiguous().view(torch.int16))


def test_the_digest_of_mxfp4_covers_codes_and_scales(base: Path) -> None:
    store_mxfp4(base)
    before = read_base(base)
    assert read_base(base) == before
    total = sum(tensor.size for tensor in tensors_of(base).values())
    assert total == sum(array.nbytes for array in load_file(base / "model.safetensors").values())
    for part in ("gate_up_proj_blocks", "down_proj_scales"):

        def change(tensors: dict[str, Tensor], name: str = f"{EXPERTS}.{part}") -> None:
            tensors[name][-1, -1, -1] += 1

        edit_tensors(base, change)
        after = read_base(base)
        assert after.identity.weights != before.identity.weights
        assert after.identity.arch == before.identity.arch
        before = after


def cut(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{EXPERTS}.{name}"] = tensors[f"{EXPERTS}.{name}"][:, :-1].contiguous()


def cast(tensors: dict[str, Tensor], name: str, dtype: torch.dtype) -> None:
    tensors[f"{EXPERTS}.{name}"] = tensors[f"{EXPERTS}.{name}"].to(dtype)


def store_twice(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}.down_proj"] = torch.zeros(3, 32, 64)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda found: cut(found, "gate_up_proj_blocks"), r"_blocks is U8 \[3, 63, 2, 16\].*64"),
        (lambda found: cut(found, "down_proj_scales"), r"_scales is U8 \[3, 63, 1\].*64"),
        (lambda found: cast(found, "down_proj_scales", torch.int8), "_scales is I8"),
        (lambda found: cast(found, "down_proj_blocks", torch.float32), "_blocks is F32"),
        (lambda found: cast(found, "down_proj_bias", torch.int32), "_bias is I32"),
        (lambda found: found.pop(f"{EXPERTS}.down_proj_scales"), "missing .*down_proj_scales"),
        (lambda found: found.pop(f"{EXPERTS}.down_proj_blocks"), "missing .*down_proj_blocks"),
        (lambda found: found.pop(f"{EXPERTS}.down_proj_bias"), "missing tensor .*proj.bias"),
        (store_twice, "stored both as"),
        (
            lambda found: found.update(
                {"model.layers.7.mlp.experts.down_proj_blocks": torch.ones(1)}
            ),
            "unexpected tensor model.layers.7",
        ),
    ],
    ids=range(10),
)
def test_malformed_parts_are_refused(
    change: Callable[[dict[str, Tensor]], Any], problem: str, base: Path
) -> None:
    store_mxfp4(base)
    edit_tensors(base, change)
    with pytest.raises(InvalidPackageError, match=problem):
        tensors_of(base)


def test_malformed_stacks_of_floats_are_refused(base: Path) -> None:
    edit_tensors(base, lambda found: cast(found, "down_proj", torch.int32))
    with pytest.raises(InvalidPackageError, match=r"down_proj is I32 \[3, 32, 64\].*BF16"):
        tensors_of(base)


def test_blocks_of_a_base_that_is_not_quantised_are_unexpected(base: Path) -> None:
    store_mxfp4(base)
    edit_config(base, quantization_config=None)
    with pytest.raises(InvalidPackageError, match=r"unexpected tensor .*_blocks"):
        tensors_of(base)


def test_a_base_that_states_mxfp4_must_have_it(base: Path) -> None:
    edit_config(base, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(InvalidPackageError, match="quantised, but none is"):
        tensors_of(base)


def test_inputs_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    build_family_model(tmp_path, "gpt_oss", **{**SIZES, "intermediate_size": 48})
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("down_proj")]:
            del tensors[name]
            tensors[f"{name}_blocks"] = torch.zeros(3, 64, 1, 16, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.zeros(3, 64, 1, dtype=torch.uint8)

    edit_tensors(tmp_path, change)
    with pytest.raises(InvalidPackageError, match="48 inputs are not blocks of 32"):
        tensors_of(tmp_path)


def test_other_bases_in_mxfp4_and_gpt_oss_in_other_formats_are_refused(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = write_base(tmp_path_factory.mktemp("other"))
    edit_config(other, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(IncompatibleError, match="MXFP4 weights of qwen3 are not supported"):
        tensors_of(other)
    edit_config(base, quantization_config={"quant_method": "fp8"})
    with pytest.raises(IncompatibleError, match="quantised weights of gpt_oss"):
        tensors_of(base)


def test_fields_of_gpt_oss_change_no_digest_of_another_base(tmp_path: Path) -> None:
    """They are in the document of a base only if it has them."""
    written = json.dumps(read_model_config(write_base(tmp_path / "a", arch="olmoe")).to_json())
    build_family_model(tmp_path / "b", "gemma2", head_dim=8)
    written += json.dumps(read_model_config(tmp_path / "b").to_json())
    assert not {"sinks", "clamped_gate", "router_bias"} & set(written.replace('"', " ").split())
    build_family_model(tmp_path / "c", "gpt_oss", **SIZES)
    ours = read_model_config(tmp_path / "c").to_json()
    assert {"sinks", "clamped_gate"} <= set(ours["block"])  # type: ignore[arg-type]  # an object
