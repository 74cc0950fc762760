"""Quantised bases against the libraries themselves, where they are installed: bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.package.test_quantised_weights import FP8_CONFIG, assert_same_bits, read, write
from tests.quantised_bases import (
    BNB_CONFIG,
    BNB_INT8_CONFIG,
    MakeParts,
    QuantisedParts,
    compressed_config,
    make_fp8,
)


def bitsandbytes_parts(kind: str, *, double: bool, dtype: torch.dtype) -> MakeParts:
    functional = pytest.importorskip("bitsandbytes.functional")

    def make(weight: Tensor) -> QuantisedParts:
        codes, state = functional.quantize_4bit(
            weight.to(dtype), blocksize=64, compress_statistics=double, quant_type=kind
        )
        parts = {f".weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        matrix = functional.dequantize_4bit(codes, state).float()
        return QuantisedParts({".weight": codes, **parts}, matrix)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_have_the_bits_of_bitsandbytes(
    kind: str, double: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Its FP4 has -0 where the processor lacks AVX-512, and 0 where it does not."""
    make = bitsandbytes_parts(kind, double=double, dtype=dtype)
    expected = write(tmp_path, ({**BNB_CONFIG, "bnb_4bit_quant_type": kind}, make))
    assert_same_bits(read(tmp_path), expected, signed_zeros=kind != "fp4")


def test_eight_bits_have_the_bits_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    def make(weight: Tensor) -> QuantisedParts:
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        matrix = functional.int8_vectorwise_dequant(codes, scales)
        return QuantisedParts({".weight": codes, ".SCB": scales}, matrix)

    expected = write(tmp_path, (BNB_INT8_CONFIG, make))
    assert_same_bits(read(tmp_path), expected)


LIBRARY_SCHEMES: dict[str, dict[str, Any]] = {
    "pack-quantized, 4 bits by group": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "pack-quantized, 8 bits by row": {"num_bits": 8, "strategy": "channel"},
    "pack-quantized, 3 bits, zero points": {
        "num_bits": 3,
        "strategy": "group",
        "group_size": 64,
        "symmetric": False,
    },
    "pack-quantized, 4 bits by row, zero points": {
        "num_bits": 4,
        "strategy": "channel",
        "symmetric": False,
    },
    "int-quantized by row": {"num_bits": 8, "strategy": "channel"},
    "int-quantized, zero points": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int-quantized, one scale": {"num_bits": 8, "strategy": "tensor"},
    "float-quantized by row": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float-quantized, one scale": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "naive-quantized in blocks": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [50, 100],
    },
    "naive-quantized by group": {"num_bits": 8, "strategy": "group", "group_size": 64},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", LIBRARY_SCHEMES)
def test_weights_have_the_bits_of_compressed_tensors(
    scheme: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    form, weights = scheme.split(",")[0].split(" ")[0], LIBRARY_SCHEMES[scheme]
    make = compress_by_library(form, weights, dtype)
    expected = write(tmp_path, (compressed_config(form, **weights), make))
    assert_same_bits(read(tmp_path), expected)


def compress_by_library(form: str, weights: dict[str, Any], dtype: torch.dtype) -> MakeParts:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(form)

    def make(weight: Tensor) -> QuantisedParts:
        wide = weight.to(dtype)
        rows, columns = weight.shape
        height, width = {
            "tensor": lambda: (rows, columns),
            "channel": lambda: (1, columns),
            "group": lambda: (1, args.group_size),
            "block": lambda: tuple(args.block_structure),
        }[args.strategy]()
        blocks = [
            [wide[r : r + height, c : c + width] for c in range(0, columns, width)]
            for r in range(0, rows, height)
        ]
        low, high = (
            torch.stack([torch.stack([find(block) for block in row]) for row in blocks])
            for find in (torch.amin, torch.amax)
        )
        scales, zeros = calculate_qparams(low, high, args)
        state = {"weight": wide, "weight_scale": scales, "weight_zero_point": zeros}
        if args.strategy == "tensor":
            state |= {"weight_scale": scales.reshape(1), "weight_zero_point": zeros.reshape(1)}
        stored = library.compress(state, scheme)
        matrix = library.decompress(stored, scheme)["weight"].float()
        return QuantisedParts({f".{name}": part for name, part in stored.items()}, matrix)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(16, 32), (64, 64), None])
def test_fp8_has_the_bits_of_transformers(
    block: tuple[int, int] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    library = Fp8Dequantize(None)

    def make(weight: Tensor) -> QuantisedParts:
        parts = make_fp8(weight, block=block, dtype=dtype).parts
        scales = parts[".weight_scale_inv"]
        matrix = library._dequantize_one(parts[".weight"], scales, torch.float32)
        return QuantisedParts(parts, matrix)

    size = None if block is None else list(block)
    expected = write(tmp_path, ({**FP8_CONFIG, "weight_block_size": size}, make))
    assert_same_bits(read(tmp_path), expected)


def test_blocks_cut_off_have_the_bits_that_fp8_layers_of_transformers_use(tmp_path: Path) -> None:
    """Its function for loading takes the height of a block from the number of blocks instead."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    def make(weight: Tensor) -> QuantisedParts:
        parts = make_fp8(weight, block=(128, 100)).parts
        codes, scales = parts[".weight"], parts[".weight_scale_inv"]
        return QuantisedParts(
            parts, _dequantize_fp8_weight(codes, scales, [128, 100], torch.float32)
        )

    expected = write(tmp_path, ({**FP8_CONFIG, "weight_block_size": [128, 100]}, make))
    assert_same_bits(read(tmp_path), expected)
