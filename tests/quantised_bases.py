"""Quantised weights as the files of their libraries hold them, for tests.

`quantise_base` rewrites a base that `tests.factories.write_base` made. Every function that makes
parts follows the published layout with plain loops over torch tensors, and also returns the matrix
that the library gives for them; where a library is installed, tests compare with it, too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each nibble of a word holds, from the lowest nibble on."""
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class QuantisedParts:
    """The stored parts of a weight by their suffix, and the matrix that they stand for."""

    parts: dict[str, Tensor]
    matrix: Tensor


MakeParts = Callable[[Tensor], QuantisedParts]


def quantise_base(
    directory: Path, config: dict[str, Any], make_parts: MakeParts
) -> dict[str, Tensor]:
    """Quantise the linear layers of a base in place, and return its tensors as decoded."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    stored: dict[str, Tensor] = {}
    decoded = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            quantised = make_parts(weight)
            module = name.removesuffix(".weight")
            stored |= {f"{module}{end}": part for end, part in quantised.parts.items()}
            decoded[name] = quantised.matrix
        else:
            stored[name] = weight
    save_file({n: t.contiguous() for n, t in stored.items()}, path, metadata={"format": "pt"})
    edit_config(directory, quantization_config=config)
    return decoded


def edit_config(directory: Path, **changes: object) -> None:
    """Change fields of a base's ``config.json``."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the stored tensors of a base of one file."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


BNB_CONFIG: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": "float32",
}
BNB_INT8_CONFIG = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
NF4_TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def make_nf4(
    weight: Tensor, *, blocksize: int = 64, double: bool = False, dtype: str = "bfloat16"
) -> QuantisedParts:
    """NF4 as bitsandbytes stores it; the outer table of double quantisation is a plain one."""
    table = torch.tensor(NF4_TABLE)
    flat = weight.float().reshape(-1)
    blocks = -(-len(flat) // blocksize)
    absmax = torch.stack(
        [flat[n * blocksize : (n + 1) * blocksize].abs().max() for n in range(blocks)]
    )
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "dtype": dtype}
    state["shape"] = list(weight.shape)
    parts = {".weight.quant_map": table.clone()}
    if double:
        outer, offset = torch.linspace(-1, 1, 256), absmax.mean()
        outer_blocks = -(-blocks // 256)
        rest = absmax - offset
        scale = torch.stack(
            [rest[n * 256 : (n + 1) * 256].abs().max() for n in range(outer_blocks)]
        )
        spread = scale.repeat_interleave(256)[:blocks]
        codes = (rest[:, None] / spread[:, None] - outer).abs().argmin(1)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32"}
        state["nested_offset"] = offset.item()
        parts |= {".weight.absmax": codes.to(torch.uint8), ".weight.nested_absmax": scale}
        parts[".weight.nested_quant_map"] = outer
        absmax = outer[codes] * spread + offset
    else:
        parts[".weight.absmax"] = absmax
    spread = absmax.repeat_interleave(blocksize)[: len(flat)]
    codes = (flat[:, None] / spread[:, None] - table).abs().argmin(1)
    matrix = (table[codes] * spread).to(getattr(torch, dtype)).float().reshape(weight.shape)
    even = torch.cat((codes, codes.new_zeros(len(codes) % 2)))
    parts[".weight"] = (even[0::2] * 16 + even[1::2]).to(torch.uint8).reshape(-1, 1)
    text = json.dumps(state).encode()
    parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return QuantisedParts(parts, matrix)


def make_bnb_int8(weight: Tensor) -> QuantisedParts:
    """INT8 with a scale for each row, as bitsandbytes stores it."""
    scales = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / scales[:, None]).round().to(torch.int8)
    parts = {".weight": codes, ".SCB": scales, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return QuantisedParts(parts, codes * scales[:, None] * 7.874015718698502e-3)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack the last axis of codes into streams of 32-bit words, the lowest bits first."""
    rows = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        size = -(-len(row) * bits // 32)
        words = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(size)]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32).reshape(*codes.shape[:-1], -1)


def _quantise_groups(
    weight: Tensor, bits: int, index: Tensor, dtype: torch.dtype, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in], and zero points and scales [out, groups]."""
    groups, top = int(index.max()) + 1, (1 << bits) - 1
    scales, zeros = [], []
    for group in range(groups):
        part = weight.float()[:, index == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        step = ((high - low) / top).clamp(min=1e-5).to(dtype)
        zero = torch.full_like(step, (top + 1) // 2) if symmetric else -low / step.float()
        scales.append(step)
        zeros.append(zero.float().round().clamp(0, top).int())
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight.float() / scale.float()[:, index] + zero[:, index]).round().clamp(0, top)
    return codes.int(), zero, scale


def make_gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    shuffled: bool = False,
    version: int = 1,
    dtype: torch.dtype = torch.float16,
) -> QuantisedParts:
    """GPTQ; ``shuffled`` inputs belong to groups in any order, as with ``desc_act``."""
    index = torch.arange(weight.shape[1]) // group
    if shuffled:
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(7))]
    codes, zeros, scales = _quantise_groups(weight, bits, index, dtype, symmetric=symmetric)
    matrix = scales[:, index] * (codes - zeros[:, index]).to(torch.int8)
    stored = (zeros - 1) & ((1 << bits) - 1) if version == 1 else zeros
    parts = {
        ".qweight": pack_words(codes, bits).T.contiguous(),
        ".qzeros": pack_words(stored.T, bits),
        ".scales": scales.T.contiguous(),
        ".g_idx": index.int(),
    }
    return QuantisedParts(parts, matrix.float())


def make_awq(weight: Tensor, *, group: int = 32) -> QuantisedParts:
    """AWQ in the layout GEMM."""
    index = torch.arange(weight.shape[1]) // group
    codes, zeros, scales = _quantise_groups(weight, 4, index, torch.float16, symmetric=False)
    matrix = (codes - zeros[:, index]).to(torch.int8) * scales[:, index]
    parts = {".scales": scales.T.contiguous()}
    for name, numbers in ((".qweight", codes.T), (".qzeros", zeros.T)):
        ordered = numbers.reshape(len(numbers), -1, 8)[:, :, AWQ_ORDER].reshape(len(numbers), -1)
        parts[name] = pack_words(ordered, 4)
    return QuantisedParts(parts, matrix.float())


def make_fp8(
    weight: Tensor,
    *,
    block: tuple[int, int] | None = (16, 32),
    suffix: str = "_inv",
    dtype: torch.dtype = torch.float32,
) -> QuantisedParts:
    """FP8 with a scale for each block, or one."""
    rows, columns = weight.shape
    height, width = block or (rows, columns)
    scales = torch.empty(-(-rows // height), -(-columns // width))
    for row, column in ((r, c) for r in range(scales.shape[0]) for c in range(scales.shape[1])):
        part = weight[row * height : (row + 1) * height, column * width : (column + 1) * width]
        scales[row, column] = part.float().abs().max() / 448
    scales = scales.to(dtype)
    wide = scales.float().repeat_interleave(height, 0)[:rows]
    wide = wide.repeat_interleave(width, 1)[:, :columns]
    codes = (weight.float() / wide).to(FP8)
    stored = scales if block else scales.reshape(())
    return QuantisedParts(
        {".weight": codes, f".weight_scale{suffix}": stored}, codes.float() * wide
    )


def make_compressed(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int | None = 32,
    symmetric: bool = True,
    packed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantisedParts:
    """Integers of compressed-tensors, by group or by row."""
    size = group or weight.shape[1]
    index = torch.arange(weight.shape[1]) // size
    codes, zeros, scales = _quantise_groups(weight, bits, index, dtype, symmetric=symmetric)
    matrix = ((codes - zeros[:, index]).to(dtype) * scales[:, index]).float()
    half = 1 << (bits - 1)
    parts = {".weight_scale": scales}
    if packed:
        parts |= {".weight_packed": pack_words(codes, bits)}
        parts |= {".weight_shape": torch.tensor(weight.shape)}
        stored = pack_words(zeros.T, bits).T.contiguous()
    else:
        parts |= {".weight": (codes - half).to(torch.int8)}
        stored = (zeros - half).to(torch.int8)
    if not symmetric:
        parts[".weight_zero_point"] = stored
    return QuantisedParts(parts, matrix)


def compressed_config(form: str, **weights: object) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights},
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def make_mxfp4(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of MXFP4 for matrices [experts, out, in], as gpt-oss stores them."""
    grouped = matrices.float().unflatten(-1, (-1, 32))
    exponents = grouped.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    scaled = grouped / exponents.exp2()[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    packed = codes[..., 0::2] + 16 * codes[..., 1::2]
    return packed.to(torch.uint8), (exponents + 127).to(torch.uint8)


def store_mxfp4(directory: Path) -> None:
    """Quantise the experts of a gpt-oss base in place."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
            blocks, scales = make_mxfp4(tensors.pop(name).transpose(1, 2))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    edit_tensors(directory, change)
    edit_config(directory, quantization_config={"quant_method": "mxfp4"})
