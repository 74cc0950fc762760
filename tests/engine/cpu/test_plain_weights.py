"""Plain arrays of a base: neighbours are one matrix, bits are those of torch, memory is small."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.cpu import plain_weights
from expertctl.engine.cpu.plain_weights import (
    PlainWeights,
    check_plain_dtype,
    load_plain_weights,
    loading_scratch_bytes,
    plain_weight_bytes,
)
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import HEAD_TENSOR, read_model_config
from tests.engine.conftest import MakeReferenceModel, ReferenceModel
from tests.engine.reference_models import ROUTED_CLASSES
from tests.factories import write_base


def load(directory: Path, dtype: str = "float32", **options: Any) -> PlainWeights:
    return load_plain_weights(directory, read_model_config(directory), dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("arch", ["qwen2", *ROUTED_CLASSES])
def test_layers_with_the_same_input_are_one_matrix(
    arch: str, dtype: str, oracle: MakeReferenceModel
) -> None:
    model = oracle(arch)
    weights = load(model.directory, dtype)
    config = read_model_config(model.directory)
    groups = [
        [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"],
        *(
            [module, module.replace("gate_proj", "up_proj")]
            for module in config.linear_shapes()
            if module.endswith("gate_proj")
        ),
    ]
    for modules in groups:
        for part in ("weight", "bias"):
            names = [f"{module}.{part}" for module in modules]
            if names[0] in weights.tensors:
                whole = weights.stack(names)
                apart = np.concatenate([weights.tensors[name] for name in names])
                assert np.array_equal(whole, apart)
                assert np.shares_memory(whole, weights.tensors[names[-1]])


@pytest.mark.parametrize("arch", sorted(ROUTED_CLASSES))
def test_stacks_that_transformers_saves_are_read_as_matrices_apart(
    arch: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle(arch)
    stacked = ReferenceModel(tmp_path / "stacked", model.model)
    model.model.save_pretrained(stacked.directory, save_original_format=False)
    ours, theirs = (load(one.directory).tensors for one in (stacked, model))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_rounded_matrices_have_the_bits_of_torch(stored: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", arch="qwen2", dtype=stored)
    written = load_file(base / "model.safetensors")
    weights = load(base, "bf16")
    for name, tensor in weights.tensors.items():
        expected = written[name].to(torch.bfloat16 if tensor.ndim == 2 else torch.float32)
        found = torch.from_numpy(tensor.copy())
        assert torch.equal(found.view(expected.dtype), expected)


def test_a_tied_head_may_be_stored_in_another_dtype(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tie=True, dtype="bfloat16")
    path = base / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].float()
    save_file({**tensors, HEAD_TENSOR: head}, path)
    assert load(base).get_output_matrix().shape == head.shape
    head[-1, -1] += 1
    save_file({**tensors, HEAD_TENSOR: head}, path)
    with pytest.raises(IncompatibleError, match=r"lm_head\.weight differs"):
        load(base)


def test_nothing_writes_to_the_weights(tmp_path: Path) -> None:
    weights = load(write_base(tmp_path / "base"))
    for tensor in weights.tensors.values():
        with pytest.raises(ValueError, match="read-only"):
            tensor[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        weights.stack(["model.layers.0.mlp.gate_proj.weight"])[...] = 0


def test_progress_and_what_was_read_count_every_byte(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype="bfloat16")
    seen: list[int] = []
    weights = load(base, progress=seen.append)
    config = read_model_config(base)
    assert sum(seen) == weights.nbytes == plain_weight_bytes(config, "float32")
    assert weights.read_bytes == sum(t.size for t in read_base_tensors(base, config).values())


def measure_loading(directory: Path, dtype: str) -> int:
    """The most memory in use while a base is read, besides the weights, which are not traced."""
    load(directory, dtype)  # imports
    tracemalloc.start()
    try:
        load(directory, dtype)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_loading_needs_no_more_memory_than_it_says(stored: str, dtype: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=stored, hidden=64, intermediate=20_000, vocab=9000)
    peak = measure_loading(base, dtype)
    assert peak <= loading_scratch_bytes(read_model_config(base), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
@pytest.mark.parametrize("head", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_tied_head_that_is_stored_needs_no_more_memory(
    stored: str, head: str, dtype: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", tie=True, dtype=stored, hidden=64, vocab=9000)
    path = base / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    embedding.copy_(embedding.to(torch.bfloat16).clamp(-1, 1).mul(64).round() / 64)
    save_file({**tensors, HEAD_TENSOR: embedding.to(getattr(torch, head), copy=True)}, path)
    peak = measure_loading(base, dtype)
    assert peak <= loading_scratch_bytes(read_model_config(base), dtype)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_a_tied_head_is_compared_by_numbers_not_by_bits(stored: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tie=True, dtype=stored)
    path = base / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[-1, -1] = 0
    head = embedding.clone()
    head[-1, -1] = -0.0
    save_file({**tensors, HEAD_TENSOR: head}, path)
    load(base)
    embedding[-1, -1] = head[-1, -1] = float("nan")
    save_file({**tensors, HEAD_TENSOR: head}, path)
    with pytest.raises(IncompatibleError, match=r"lm_head\.weight differs"):
        load(base)


def test_a_file_that_ends_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base")
    path = base / "model.safetensors"
    allocate = plain_weights.allocate

    def cut_file(size: int) -> memoryview:
        path.write_bytes(path.read_bytes()[:-1])
        return allocate(size)

    monkeypatch.setattr(plain_weights, "allocate", cut_file)
    with pytest.raises(InvalidPackageError, match=r"model\.safetensors"):
        load(base)


def test_a_dtype_without_plain_arrays_is_refused() -> None:
    for dtype in ("float32", "bf16"):
        check_plain_dtype(dtype)
    with pytest.raises(UsageError, match="numpy does not hold a base in 'int8'"):
        check_plain_dtype("int8")
