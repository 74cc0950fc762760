"""The tensors of a base by headers alone: exactly those that its configuration names."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import EMBEDDING_TENSOR, HEAD_TENSOR, read_model_config
from expertctl.package.stored_tensor import StoredTensor
from tests.factories import write_base


def tensors_of(directory: Path) -> dict[str, StoredTensor]:
    return read_base_tensors(directory, read_model_config(directory))


def rewrite(directory: Path, changes: dict[str, NDArray[np.generic] | None]) -> None:
    """Replace tensors; None removes one."""
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: array for name, array in tensors.items() if array is not None}, path)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_tensor_lies_where_it_is_said_to(arch: str, shards: int, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch=arch, shards=shards, tie=False)
    tensors = tensors_of(base)
    assert tensors.keys() == read_model_config(base).tensor_shapes().keys()
    for name, tensor in tensors.items():
        stored = load_file(tensor.path)[name]
        data = tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.size]
        assert (tensor.info.shape, data) == (stored.shape, stored.tobytes())


def test_a_tied_head_may_be_stored_and_frequencies_are_passed_over(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", tie=True)
    head = load_file(base / "model.safetensors")[EMBEDDING_TENSOR].copy()
    rewrite(base, {HEAD_TENSOR: head, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)})
    assert tensors_of(base).keys() - read_model_config(base).tensor_shapes().keys() == {HEAD_TENSOR}


def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b")
    wrong = np.zeros((2, 2), np.float32)
    changes = {
        "model.norm.weight": None,
        "model.layers.9.mlp.up_proj.weight": wrong,
        "model.layers.0.mlp.up_proj.weight": wrong,
    }
    rewrite(base, changes)
    with pytest.raises(InvalidPackageError) as caught:
        tensors_of(base)
    assert caught.value.problems == (
        "missing tensor model.norm.weight",
        "unexpected tensor model.layers.9.mlp.up_proj.weight",
        "tensor model.layers.0.mlp.up_proj.weight is [2, 2], [48, 32] by config.json",
    )


def test_a_head_of_another_shape_than_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", tie=True)
    rewrite(base, {HEAD_TENSOR: np.zeros((2, 2), np.float32)})
    with pytest.raises(InvalidPackageError, match=r"lm_head\.weight is \[2, 2\], \[259, 32\]"):
        tensors_of(base)


def test_problems_are_shortened(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b")
    path = base / "model.safetensors"
    save_file({f"transformer.{name}": array for name, array in load_file(path).items()}, path)
    with pytest.raises(InvalidPackageError) as caught:
        tensors_of(base)
    assert len(caught.value.problems) == 42
    assert {p for p in caught.value.problems if p.startswith("and ")} != set()


def test_a_bias_that_the_configuration_denies_is_unexpected(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="llama", attention_bias=True)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(InvalidPackageError, match=r"unexpected tensor .*q_proj\.bias"):
        tensors_of(base)


@pytest.mark.parametrize("kind", ["int8", "float64", "bool"])
def test_a_type_that_the_decoder_does_not_read_is_refused(kind: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b")
    rewrite(base, {"model.norm.weight": np.ones(32, kind)})
    with pytest.raises(IncompatibleError, match=r"model\.norm\.weight is ") as caught:
        tensors_of(base)
    assert "float32, float16 or bfloat16" in caught.value.hint
