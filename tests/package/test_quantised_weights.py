"""Quantised bases: the numbers of their libraries bit for bit, and refusals of damaged parts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.base_model import read_base
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import read_model_config
from expertctl.package.quantised_codecs import _list_fp8
from expertctl.package.stored_tensor import StoredTensor
from tests.factories import write_base
from tests.quantised_bases import (
    BNB_CONFIG,
    BNB_INT8_CONFIG,
    FP8,
    MakeParts,
    QuantisedParts,
    compressed_config,
    edit_config,
    edit_tensors,
    make_awq,
    make_bnb_int8,
    make_compressed,
    make_fp8,
    make_gptq,
    make_nf4,
    quantise_base,
)

SIZES: dict[str, Any] = {"hidden": 128, "intermediate": 192, "heads": 4, "head_dim": 32}
LAYER = "model.layers.1.mlp.down_proj"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
Method = tuple[dict[str, Any], MakeParts]
METHODS: dict[str, Method] = {
    "NF4": (BNB_CONFIG, make_nf4),
    "NF4, double": (BNB_CONFIG, lambda w: make_nf4(w, double=True)),
    "NF4, float16": (BNB_CONFIG, lambda w: make_nf4(w, dtype="float16")),
    "NF4, blocks over rows": (BNB_CONFIG, lambda w: make_nf4(w, blocksize=512)),
    "INT8": (BNB_INT8_CONFIG, make_bnb_int8),
    **{
        f"GPTQ, {bits} bits": ({**GPTQ, "bits": bits}, lambda w, b=bits: make_gptq(w, bits=b))
        for bits in (2, 3, 4, 8)
    },
    "GPTQ, zero points": (GPTQ, lambda w: make_gptq(w, symmetric=False)),
    "GPTQ, shuffled": (GPTQ, lambda w: make_gptq(w, shuffled=True, symmetric=False)),
    "GPTQ, 3 bits, zero points": (
        {**GPTQ, "bits": 3},
        lambda w: make_gptq(w, bits=3, symmetric=False),
    ),
    "GPTQ, version 2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda w: make_gptq(w, symmetric=False, version=2),
    ),
    "GPTQ, one group": ({**GPTQ, "group_size": -1}, lambda w: make_gptq(w, group=w.shape[1])),
    "GPTQ, bfloat16": (GPTQ, lambda w: make_gptq(w, dtype=torch.bfloat16)),
    "AWQ": (AWQ, make_awq),
    "FP8, blocks": ({**FP8_CONFIG, "weight_block_size": [16, 32]}, make_fp8),
    "FP8, blocks cut off": (
        {**FP8_CONFIG, "weight_block_size": [50, 100]},
        lambda w: make_fp8(w, block=(50, 100)),
    ),
    "FP8, one scale": (FP8_CONFIG, lambda w: make_fp8(w, block=None, suffix="")),
    "packed by group": (
        compressed_config("pack-quantized", strategy="group", group_size=32),
        make_compressed,
    ),
    "packed by row": (
        compressed_config("pack-quantized", strategy="channel", num_bits=8),
        lambda w: make_compressed(w, bits=8, group=None),
    ),
    "packed, 3 bits, zero points": (
        compressed_config(
            "pack-quantized", strategy="group", group_size=32, num_bits=3, symmetric=False
        ),
        lambda w: make_compressed(w, bits=3, symmetric=False),
    ),
    "packed, zero points": (
        compressed_config("pack-quantized", strategy="group", group_size=64, symmetric=False),
        lambda w: make_compressed(w, group=64, symmetric=False, dtype=torch.float16),
    ),
    "int8 by row": (
        compressed_config("int-quantized", strategy="channel", num_bits=8),
        lambda w: make_compressed(w, bits=8, group=None, packed=False),
    ),
    "int8 with zero points": (
        compressed_config("int-quantized", strategy="channel", num_bits=8, symmetric=False),
        lambda w: make_compressed(w, bits=8, group=None, packed=False, symmetric=False),
    ),
    "FP8 of compressed-tensors": (
        compressed_config("float-quantized", strategy="tensor", num_bits=8, type="float"),
        lambda w: make_fp8(w, block=None, suffix=""),
    ),
    "FP8 by row": (
        compressed_config("float-quantized", strategy="channel", num_bits=8, type="float"),
        lambda w: make_fp8(w, block=(1, w.shape[1]), suffix=""),
    ),
}


def read(directory: Path) -> dict[str, StoredTensor]:
    return read_base_tensors(directory, read_model_config(directory))


def write(directory: Path, method: Method, **config: Any) -> dict[str, Tensor]:
    """Write a quantised base, and return its tensors as decoded."""
    return quantise_base(write_base(directory, **{**SIZES, **config}), *method)


def decode(tensor: StoredTensor, height: int) -> np.ndarray[Any, Any]:
    assert tensor.codec is not None
    rows = tensor.info.shape[0]
    parts = [
        tensor.codec.read_rows(first, min(height, rows - first)) for first in range(0, rows, height)
    ]
    return np.concatenate(parts)


def assert_same_bits(
    tensors: dict[str, StoredTensor], expected: dict[str, Tensor], *, signed_zeros: bool = True
) -> None:
    """Compare all numbers bit by bit; without ``signed_zeros``, -0 is 0."""
    decoded = {name: tensor for name, tensor in tensors.items() if tensor.codec is not None}
    assert len(decoded) == 14
    for name, tensor in decoded.items():
        # both layers have the same shapes, so the rows of one are cut in every way
        for height in (1 << 20, 7, 1) if ".layers.0." in name else (1 << 20,):
            found = decode(tensor, height)
            assert found.shape == tensor.info.shape == tuple(expected[name].shape)
            wanted = expected[name].numpy()
            if not signed_zeros:
                found, wanted = found + np.float32(0), wanted + np.float32(0)
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32)), (name, height)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_weights_have_the_bits_that_the_formula_gives(method: Method, tmp_path: Path) -> None:
    expected = write(tmp_path / "base", method)
    assert_same_bits(read(tmp_path / "base"), expected)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_quantised_base_has_the_architecture_of_the_plain_one(
    method: Method, tmp_path: Path
) -> None:
    plain = read_base(write_base(tmp_path / "plain", **SIZES)).identity
    write(tmp_path / "base", method)
    found = read_base(tmp_path / "base").identity
    assert found.arch == plain.arch
    assert found.weights != plain.weights


def test_the_digest_of_a_base_covers_how_it_is_decoded(tmp_path: Path) -> None:
    write(tmp_path / "base", METHODS["GPTQ, 4 bits"])
    before = read_base(tmp_path / "base").identity
    edit_config(tmp_path / "base", quantization_config={**GPTQ, "checkpoint_format": "gptq_v2"})
    after = read_base(tmp_path / "base").identity
    assert (after.arch, after.weights != before.weights) == (before.arch, True)


def test_the_digest_of_a_base_covers_the_dtypes_of_its_parts(tmp_path: Path) -> None:
    """The same bytes are other scales in bfloat16."""
    write(tmp_path / "base", METHODS["GPTQ, 4 bits"])
    before = read_base(tmp_path / "base").identity

    def reinterpret(tensors: dict[str, Tensor]) -> None:
        for name, part in tensors.items():
            if name.endswith(".scales"):
                assert part.dtype is torch.float16
                tensors[name] = part.view(torch.bfloat16)

    edit_tensors(tmp_path / "base", reinterpret)
    after = read_base(tmp_path / "base").identity
    assert (after.arch, after.weights != before.weights) == (before.arch, True)


def test_rows_in_tiles_are_refused(tmp_path: Path) -> None:
    """Older versions of bitsandbytes could save int8 in the order of a device."""
    write_base(tmp_path / "base")
    quantise_base(tmp_path / "base", BNB_INT8_CONFIG, make_bnb_int8)
    read(tmp_path / "base")

    def arrange(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.weight_format"] = torch.tensor(2, dtype=torch.uint8)

    edit_tensors(tmp_path / "base", arrange)
    with pytest.raises(InvalidPackageError, match="rows are in tiles"):
        read(tmp_path / "base")


def test_codes_of_fp8_have_the_numbers_of_torch() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()
    assert np.array_equal(_list_fp8(), expected, equal_nan=True)


def test_routed_experts_are_decoded_under_their_canonical_names(tmp_path: Path) -> None:
    write_base(tmp_path, arch="mixtral", num_local_experts=4, num_experts_per_tok=2, **SIZES)
    edit_tensors(tmp_path, _rename_experts)
    expected: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            made = make_nf4(tensors.pop(name))
            module = name.removesuffix(".weight")
            tensors.update({f"{module}{end}": part for end, part in made.parts.items()})
            expected[name] = made.matrix

    edit_tensors(tmp_path, quantise)
    edit_config(tmp_path, quantization_config=BNB_CONFIG)
    tensor = read(tmp_path)["model.layers.1.mlp.experts.3.down_proj.weight"]
    wanted = expected["model.layers.1.block_sparse_moe.experts.3.w2.weight"].numpy()
    assert np.array_equal(decode(tensor, 16), wanted)


def _rename_experts(tensors: dict[str, Tensor]) -> None:
    names = {".gate_proj": ".w1", ".down_proj": ".w2", ".up_proj": ".w3"}
    for name in [n for n in tensors if ".mlp." in n]:
        new = name.replace(".mlp.", ".block_sparse_moe.")
        for long, short in names.items():
            new = new.replace(long, short)
        tensors[new] = tensors.pop(name)


def test_codes_of_four_bits_may_be_stored_as_floats(tmp_path: Path) -> None:
    """As ``bnb_4bit_quant_storage`` says, for training with FSDP."""

    def make(weight: Tensor) -> QuantisedParts:
        made = make_nf4(weight)
        codes = made.parts[".weight"].reshape(-1).view(torch.bfloat16).reshape(-1, 1)
        return QuantisedParts({**made.parts, ".weight": codes}, made.matrix)

    config = {**BNB_CONFIG, "bnb_4bit_quant_storage": "bfloat16"}
    expected = write(tmp_path, (config, make))
    assert_same_bits(read(tmp_path), expected)


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    expected = write(tmp_path / "base", METHODS["FP8, one scale"])
    edit_tensors(
        tmp_path / "base",
        lambda t: t.update(
            {
                f"{LAYER}.input_scale": torch.ones(()),
                "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1),
            }
        ),
    )
    assert_same_bits(read(tmp_path / "base"), expected)


def test_a_bias_of_zeros_that_autogptq_writes_is_left_out(tmp_path: Path) -> None:
    expected = write(tmp_path / "base", METHODS["GPTQ, 4 bits"])
    edit_tensors(tmp_path / "base", lambda t: t.update({f"{LAYER}.bias": torch.zeros(128)}))
    assert_same_bits(read(tmp_path / "base"), expected)
    edit_tensors(tmp_path / "base", lambda t: t.update({f"{LAYER}.bias": torch.ones(128)}))
    with pytest.raises(InvalidPackageError, match=r"unexpected tensor model.*down_proj\.bias"):
        read(tmp_path / "base")


Change = Callable[[dict[str, Tensor]], None]


def cut(suffix: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[LAYER + suffix] = tensors[LAYER + suffix][:-1].clone()

    return change


def drop(suffix: str) -> Change:
    return lambda tensors: tensors.__delitem__(LAYER + suffix)


def retype(suffix: str, dtype: torch.dtype) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[LAYER + suffix] = tensors[LAYER + suffix].to(dtype)

    return change


def restate(**values: object) -> Change:
    """Change fields of the JSON that bitsandbytes keeps for a weight."""
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"

    def change(tensors: dict[str, Tensor]) -> None:
        state = {**json.loads(bytes(tensors[name].tolist())), **values}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


STATE = ".weight.quant_state.bitsandbytes__nf4"
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "codes cut": ("NF4", cut(".weight"), "bytes"),
    "absmax cut": ("NF4", cut(".weight.absmax"), "absmax is F32"),
    "outer absmax gone": ("NF4, double", drop(".weight.nested_absmax"), "absmax is U8"),
    "outer table cut": ("NF4, double", cut(".weight.nested_quant_map"), "nested_quant_map is"),
    "no absmax": ("NF4", drop(".weight.absmax"), "missing tensor"),
    "absurd blocks": ("NF4", restate(blocksize=1 << 40), "blocksize"),
    "odd blocks": ("NF4", restate(blocksize=100), "blocksize is not one of"),
    "no blocks": ("NF4", restate(blocksize=0), "blocksize"),
    "outer blocks of text": ("NF4, double", restate(nested_blocksize="9"), "nested_blocksize"),
    "another shape": ("NF4", restate(shape=[128, 193]), r"shape is not \[128, 192\]"),
    "another kind": ("NF4", restate(quant_type="fp4"), "quant_type is not nf4"),
    "an integer dtype": ("NF4", restate(dtype="int8"), "dtype is not one of"),
    "an infinite offset": ("NF4, double", restate(nested_offset=1e31), "nested_offset"),
    "state of text": (
        "NF4",
        lambda t: t.update({LAYER + STATE: torch.full((9,), 65, dtype=torch.uint8)}),
        "quant_state",
    ),
    "a large state": (
        "NF4",
        lambda t: t.update({LAYER + STATE: torch.full((5000,), 32, dtype=torch.uint8)}),
        "at most 4096",
    ),
    "scales of rows cut": ("INT8", cut(".SCB"), "SCB is F32"),
    "GPTQ codes cut": ("GPTQ, 4 bits", cut(".qweight"), "qweight is I32"),
    "GPTQ zeros cut": ("GPTQ, 4 bits", cut(".qzeros"), "qzeros is I32"),
    "GPTQ scales of integers": ("GPTQ, 4 bits", retype(".scales", torch.int32), "scales is I32"),
    "GPTQ groups cut": ("GPTQ, 4 bits", cut(".g_idx"), "g_idx is I32"),
    "no GPTQ scales": ("GPTQ, 4 bits", drop(".scales"), "missing tensor"),
    "AWQ codes cut": ("AWQ", cut(".qweight"), "qweight is I32"),
    "AWQ scales cut": ("AWQ", cut(".scales"), "scales is F16"),
    "FP8 scales cut": ("FP8, blocks", cut(".weight_scale_inv"), "weight_scale_inv is F32"),
    "FP8 codes of integers": ("FP8, blocks", retype(".weight", torch.int8), "weight is I8"),
    "packed codes cut": ("packed by group", cut(".weight_packed"), "weight_packed is I32"),
    "packed shape": (
        "packed by group",
        lambda t: t.update({f"{LAYER}.weight_shape": torch.tensor([128, 191])}),
        r"states \[128, 191\]",
    ),
    "packed zeros gone": ("packed, zero points", drop(".weight_zero_point"), "missing tensor"),
    "packed zeros cut": ("packed, zero points", cut(".weight_zero_point"), "weight_zero_point is"),
}


@pytest.mark.parametrize(("method", "change", "words"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_parts_are_refused_before_they_are_used(
    method: str, change: Change, words: str, tmp_path: Path
) -> None:
    write(tmp_path / "base", METHODS[method])
    edit_tensors(tmp_path / "base", change)
    with pytest.raises(InvalidPackageError, match=words):
        read(tmp_path / "base")


@pytest.mark.parametrize("group", [-1, 6, 1 << 30])
def test_a_group_that_does_not_exist_is_refused(group: int, tmp_path: Path) -> None:
    write(tmp_path / "base", METHODS["GPTQ, shuffled"])

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.g_idx"][5] = group

    edit_tensors(tmp_path / "base", change)
    codec = read(tmp_path / "base")[f"{LAYER}.weight"].codec
    assert codec is not None
    with pytest.raises(InvalidPackageError, match=r"there are 6"):
        codec.read_rows(3, 4)


@pytest.mark.parametrize("method", ["NF4", "FP8, blocks", "GPTQ, 4 bits"])
def test_a_scale_that_is_not_a_number_gives_no_warning(method: str, tmp_path: Path) -> None:
    write(tmp_path / "base", METHODS[method])
    suffix = {"N": ".weight.absmax", "F": ".weight_scale_inv", "G": ".scales"}[method[0]]

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[LAYER + suffix].view(-1)[0] = torch.nan

    edit_tensors(tmp_path / "base", change)
    assert np.isnan(decode(read(tmp_path / "base")[f"{LAYER}.weight"], 9)).any()


@pytest.mark.parametrize("method", ["NF4", "GPTQ, 4 bits", "packed by group"])
def test_a_file_that_was_cut_meanwhile_is_refused(method: str, tmp_path: Path) -> None:
    write(tmp_path / "base", METHODS[method])
    codec = read(tmp_path / "base")[f"{LAYER}.weight"].codec
    assert codec is not None
    path = tmp_path / "base" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(InvalidPackageError, match="changed"):
        codec.read_rows(0, 128)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"quant_method": "hqq"}, "the method 'hqq'"),
    "no method": ({"bits": 4}, "quant_method is missing"),
    "neither width": ({"quant_method": "bitsandbytes"}, "exactly one"),
    "int4 of bitsandbytes": ({**BNB_CONFIG, "bnb_4bit_quant_type": "int4"}, "int4"),
    "5 bits": ({**GPTQ, "bits": 5}, "bits '5'"),
    "text for bits": ({**GPTQ, "bits": "4"}, "bits is '4'"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
    "no group": ({**GPTQ, "group_size": 0}, "group_size is 0"),
    "absurd groups": ({**GPTQ, "group_size": 1 << 40}, "group_size"),
    "gemv": ({**AWQ, "version": "GEMV"}, "gemv"),
    "AWQ without zero points": ({**AWQ, "zero_point": False}, "zero_point"),
    "blocks of text": ({**FP8_CONFIG, "weight_block_size": "many"}, "weight_block_size"),
    "empty blocks": ({**FP8_CONFIG, "weight_block_size": [0, 128]}, "weight_block_size"),
    "E5M2": ({**FP8_CONFIG, "fmt": "e5m2"}, "e5m2"),
    "nvfp4": (compressed_config("nvfp4-pack-quantized", type="float"), "nvfp4"),
    "9 bits": (compressed_config("pack-quantized", num_bits=9), "num_bits '9'"),
    "sparse": (
        {**compressed_config("pack-quantized"), "sparsity_config": {"format": "sparse-bitmask"}},
        "sparsity_config",
    ),
    "rotated": (
        {**compressed_config("pack-quantized"), "transform_config": {"config_groups": {}}},
        "transform_config",
    ),
    "no groups": ({**compressed_config("pack-quantized"), "config_groups": {}}, "no scheme"),
}


@pytest.mark.parametrize(("config", "words"), REFUSED.values(), ids=REFUSED)
def test_other_quantisation_is_refused_by_name(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_base(tmp_path, **SIZES, quantization_config=config)
    with pytest.raises((IncompatibleError, InvalidPackageError), match=words):
        read(tmp_path)


def test_a_configuration_without_quantised_weights_is_refused(tmp_path: Path) -> None:
    """The library would quantise the weights while it loads them."""
    write_base(tmp_path, **SIZES, quantization_config=BNB_CONFIG)
    with pytest.raises(InvalidPackageError, match="but none is"):
        read(tmp_path)


def test_two_schemes_are_refused(tmp_path: Path) -> None:
    config = compressed_config("pack-quantized")
    other = compressed_config("pack-quantized", num_bits=8)["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = other
    write_base(tmp_path, **SIZES, quantization_config=config)
    with pytest.raises(IncompatibleError, match="more than one scheme"):
        read(tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_random_damage_to_a_configuration_gives_an_error_of_ours(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    odd: list[Any] = [None, True, -1, 0, 3, 1 << 70, 0.5, "x", "", [], {}, [1], {"a": 1}]
    write_base(tmp_path, **SIZES)
    for config, _ in METHODS.values():
        changed = json.loads(json.dumps(config))
        place = changed
        for _ in range(int(generator.integers(4))):
            inner = [value for value in place.values() if isinstance(value, dict) and value]
            place = inner[0] if inner else place
        place[str(generator.choice(list(place)))] = odd[int(generator.integers(len(odd)))]
        edit_config(tmp_path, quantization_config=changed)
        try:
            read(tmp_path)
        except (IncompatibleError, InvalidPackageError):
            continue
