"""A base in packed matrices: every tensor is there once, with its numbers."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.cpu.packed_base import PackedBase, allocate_base, packed_base_bytes
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import (
    MatrixStack,
    PackedMatrix,
    pack_matrix,
    unpack_matrix,
)
from expertctl.engine.memory.host import allocate
from expertctl.engine.torch.weights import BaseWeights, load_base_weights
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR, read_model_config
from tests.engine.packing import pack_base
from tests.factories import write_base

WHOLE = {
    "q_proj": "inputs",
    "k_proj": "inputs",
    "v_proj": "inputs",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}
"""The matrices that have the rows of several modules."""


def loaded(directory: Path, *, held: torch.dtype = torch.float32, **config: Any) -> BaseWeights:
    write_base(directory, **{"head_dim": 16, "hidden": 48, "intermediate": 80, **config})
    return load_base_weights(directory, read_model_config(directory), dtype=held)


def unpack_all(matrix: PackedMatrix | MatrixStack) -> np.ndarray[Any, Any]:
    parts = matrix.parts if isinstance(matrix, MatrixStack) else (matrix,)
    return np.concatenate([unpack_matrix(part) for part in parts])


def tensors_of(base: PackedBase) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a base again, by its name in the files."""
    queries, keys = base.config.heads * 16, base.config.kv_heads * 16
    wide = base.config.intermediate_size
    found = {EMBEDDING_TENSOR: unpack_matrix(base.embedding), "model.norm.weight": base.norm}
    if base.head is not base.embedding:
        found[HEAD_TENSOR] = unpack_matrix(base.head)
    for number, layer in enumerate(base.layers):
        at = f"model.layers.{number}"
        found[f"{at}.input_layernorm.weight"] = layer.input_norm
        found[f"{at}.post_attention_layernorm.weight"] = layer.mlp_norm
        if layer.query_norm is not None and layer.key_norm is not None:
            found[f"{at}.self_attn.q_norm.weight"] = layer.query_norm
            found[f"{at}.self_attn.k_norm.weight"] = layer.key_norm
        parts = [
            ("self_attn", ("q_proj", "k_proj", "v_proj"), layer.inputs, layer.input_bias),
            ("self_attn", ("o_proj",), layer.output, layer.output_bias),
            ("mlp", ("gate_proj", "up_proj"), layer.mlp.gate_up, layer.mlp.gate_up_bias),
            ("mlp", ("down_proj",), layer.mlp.down, layer.mlp.down_bias),
        ]
        ends = {"q_proj": queries, "k_proj": queries + keys, "gate_proj": wide}
        for block, names, matrix, bias in parts:
            places = [ends[name] for name in names if name in ends]
            for name, rows in zip(names, np.split(unpack_all(matrix), places), strict=True):
                found[f"{at}.{block}.{name}.weight"] = rows
            if bias is not None:
                for name, numbers in zip(names, np.split(bias, places), strict=True):
                    found[f"{at}.{block}.{name}.bias"] = numbers
    return found


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("qwen3", {"tie": True}),
        ("qwen3", {"tie": False}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
    ],
)
def test_every_tensor_is_there_with_its_numbers(
    arch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    weights = loaded(tmp_path / "base", arch=arch, **config)
    found = tensors_of(pack_base(read_model_config(tmp_path / "base"), weights, Scheme.FLOAT32))
    assert found.keys() == weights.tensors.keys()
    for name, numbers in found.items():
        assert np.array_equal(numbers, weights.tensors[name].numpy()), name


def test_bfloat16_stays_what_it_is(tmp_path: Path) -> None:
    weights = loaded(tmp_path / "base", held=torch.bfloat16, dtype="bfloat16")
    found = tensors_of(pack_base(read_model_config(tmp_path / "base"), weights, Scheme.BFLOAT16))
    for name, numbers in found.items():
        assert np.array_equal(numbers, weights.tensors[name].float().numpy()), name


@pytest.mark.parametrize("hidden", [48, 40])
@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (Scheme.FLOAT32, 32),
        (Scheme.BFLOAT16, 16),
        (Scheme.INT8, 8),
        (Scheme.INT5, 5),
        (Scheme.INT4, 4),
    ],
)
def test_bytes_are_known_before_and_are_those_of_numbers_and_scales(
    scheme: Scheme, bits: int, hidden: int, tmp_path: Path
) -> None:
    """Vocabularies are filled to sixteen rows, and scales take two bytes; arrays are aligned.

    The embedding, which is the head, has eight bits at least.
    """
    weights = loaded(tmp_path / "base", tie=True, hidden=hidden)
    config = read_model_config(tmp_path / "base")
    base = pack_base(config, weights, scheme)
    total, numbers, scales = 0, Counter[str](), Counter[str]()
    for name, tensor in weights.tensors.items():
        if tensor.ndim == 1:
            total += -(-4 * len(tensor) // 64) * 64
            continue
        whole = next((name.replace(a, b) for a, b in WHOLE.items() if a in name), name)
        rows, columns = -(-tensor.shape[0] // 16) * 16, tensor.shape[1]
        each = max(bits, 8) if name == EMBEDDING_TENSOR and bits < 16 else bits
        numbers[whole] += rows * columns * each // 8
        scales[whole] += rows * -(-columns // 32) * 2 if bits <= 8 else 0
        assert tensor.shape[0] % 16 == 0 or name == EMBEDDING_TENSOR or hidden == 40
    total += sum(-(-size // 64) * 64 for size in (*numbers.values(), *scales.values()))
    assert base.nbytes == packed_base_bytes(config, scheme) == total
    assert base.head is base.embedding


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.INT8, Scheme.INT5])
def test_the_matrix_of_a_module_is_what_the_kernels_use_of_it(
    scheme: Scheme, tie: bool, tmp_path: Path
) -> None:
    weights = loaded(tmp_path / "base", tie=tie)
    base = pack_base(read_model_config(tmp_path / "base"), weights, scheme)
    for module, shape in base.config.linear_shapes().items():
        kept = scheme.embedding if module == "lm_head" else scheme
        stored = weights.tensors.get(f"{module}.weight", weights.get_output_matrix())
        used = unpack_matrix(pack_matrix(stored.numpy(), kept))
        assert base.unpack_weights(module).shape == shape
        np.testing.assert_array_equal(base.unpack_weights(module), used, strict=True)


def test_all_parts_lie_in_one_block(tmp_path: Path) -> None:
    weights = loaded(tmp_path / "base", arch="qwen2", tie=False)
    config = read_model_config(tmp_path / "base")
    memory = allocate(packed_base_bytes(config, Scheme.INT4))
    base = allocate_base(config, Scheme.INT4, memory)
    block = np.frombuffer(memory, np.uint8)
    for place in base.tensor_places().values():
        for part in (place.data, place.scales) if isinstance(place, PackedMatrix) else (place,):
            assert np.shares_memory(part, block)
            part[...] = 1
    assert base.tensor_places().keys() == weights.tensors.keys()
    arrays = [base.embedding.data, base.head.scales, base.layers[1].mlp.gate_up.parts[0].data]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"head_dim": 24}, ["head_dim is 24"]),
        ({"intermediate": 90}, ["intermediate_size is 90"]),
        ({"head_dim": 8, "intermediate": 8}, ["head_dim is 8", "intermediate_size is 8"]),
    ],
)
def test_a_base_that_does_not_fill_blocks_is_refused_with_a_way_out(
    sizes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    weights = loaded(tmp_path / "base", **sizes)
    config = read_model_config(tmp_path / "base")
    for refuse in (
        lambda: pack_base(config, weights, Scheme.FLOAT32),
        lambda: packed_base_bytes(config, Scheme.INT8),
    ):
        with pytest.raises(IncompatibleError, match="not a multiple of 16") as refused:
            refuse()
        assert all(name in str(refused.value) for name in named)
        assert "--engine transformers" in refused.value.hint
