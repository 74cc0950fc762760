"""Reading a base: every tensor that its configuration names, no other, none changed.

Torch and numpy read it by the same rules.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.cpu.plain_weights import load_plain_weights, plain_weight_bytes
from expertctl.engine.torch.weights import BaseWeights, load_base_weights
from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.package.model_config import parse_model_config, read_model_config
from tests.factories import write_base

EMBEDDING = "model.embed_tokens.weight"


Load = Callable[..., BaseWeights]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> BaseWeights:
    return load_base_weights(directory, read_model_config(directory), dtype=dtype)


def load_in_numpy(directory: Path, dtype: torch.dtype = torch.float32) -> BaseWeights:
    """Read a base in plain arrays; return copies of them as tensors."""
    config, name = read_model_config(directory), "bf16" if dtype == torch.bfloat16 else "float32"
    weights = load_plain_weights(directory, config, dtype=name)
    assert weights.nbytes == plain_weight_bytes(config, name)
    assert weights.get_output_matrix().base is not None
    tensors = {n: torch.from_numpy(array.copy()) for n, array in weights.tensors.items()}
    found = {
        n: t if t.dtype == torch.float32 else t.view(torch.bfloat16) for n, t in tensors.items()
    }
    return BaseWeights(found, dtype, torch.device("cpu"), weights.warnings)


BOTH = pytest.mark.parametrize("load", [load, load_in_numpy], ids=["torch", "numpy"])


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (``__`` stands for a dot); None removes one."""
    path = directory / "model.safetensors"
    tensors: dict[str, Any] = {n: t.clone() for n, t in load_file(path).items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, path)


@BOTH
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tie", [True, False])
def test_every_tensor_is_read_as_it_is_stored(
    tmp_path: Path, shards: int, tie: bool, load: Load
) -> None:
    base = write_base(tmp_path / "base", shards=shards, tie=tie)
    stored: dict[str, torch.Tensor] = {}
    for file in base.glob("*.safetensors"):
        stored |= load_file(file)
    weights = load(base)
    assert weights.tensors.keys() == stored.keys()
    assert all(torch.equal(weights.tensors[name], stored[name]) for name in stored)
    assert weights.nbytes == sum(tensor.nbytes for tensor in stored.values())
    assert weights.warnings == ()


def test_a_tied_head_is_the_embedding_and_counts_once(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", tie=True)
    weights = load(base)
    assert weights.get_output_matrix() is weights.tensors[EMBEDDING]
    before = weights.nbytes
    rewrite(base, lm_head__weight=weights.tensors[EMBEDDING].clone())
    assert load(base).nbytes == before


@BOTH
def test_a_tied_head_that_is_another_matrix_is_refused(tmp_path: Path, load: Load) -> None:
    base = write_base(tmp_path / "base", tie=True)
    other = load(base).tensors[EMBEDDING].clone()
    other[3, 3] += 1
    rewrite(base, lm_head__weight=other)
    with pytest.raises(IncompatibleError, match=r"lm_head\.weight differs"):
        load(base)


def test_an_untied_head_is_its_own_matrix(tmp_path: Path) -> None:
    weights = load(write_base(tmp_path / "base", tie=False))
    assert not torch.equal(weights.get_output_matrix(), weights.tensors[EMBEDDING])


@BOTH
@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_narrow_weights_are_widened_exactly(tmp_path: Path, stored: str, load: Load) -> None:
    base = write_base(tmp_path / "base", dtype=stored)
    weights = load(base)
    raw = load_file(base / "model.safetensors")
    assert {t.dtype for t in weights.tensors.values()} == {torch.float32}
    assert all(torch.equal(t, raw[n].float()) for n, t in weights.tensors.items())
    assert weights.warnings == ()


@BOTH
@pytest.mark.parametrize(
    ("stored", "warnings"),
    [
        ("bfloat16", ()),
        ("float16", ("base weights stored as float16 are rounded to bfloat16",)),
        ("float32", ("base weights stored as float32 are rounded to bfloat16",)),
    ],
)
def test_rounding_is_reported_and_spares_norms_and_biases(
    tmp_path: Path, stored: str, warnings: tuple[str, ...], load: Load
) -> None:
    weights = load(write_base(tmp_path / "base", arch="qwen2", dtype=stored), torch.bfloat16)
    assert weights.warnings == warnings
    for tensor in weights.tensors.values():
        assert tensor.dtype == (torch.bfloat16 if tensor.ndim == 2 else torch.float32)
    assert weights.nbytes == sum(t.nbytes for t in weights.tensors.values())


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    seen: list[int] = []
    weights = load_base_weights(base, read_model_config(base), progress=seen.append)
    assert sum(seen) == weights.nbytes


@BOTH
def test_missing_unexpected_and_misshapen_tensors_are_all_named(tmp_path: Path, load: Load) -> None:
    base = write_base(tmp_path / "base")
    rewrite(
        base,
        model__norm__weight=None,
        model__layers__9__mlp__up_proj__weight=torch.zeros(2, 2),
        model__layers__0__mlp__up_proj__weight=torch.zeros(2, 2),
    )
    with pytest.raises(InvalidPackageError) as caught:
        load(base)
    assert caught.value.problems == (
        "missing tensor model.norm.weight",
        "unexpected tensor model.layers.9.mlp.up_proj.weight",
        "tensor model.layers.0.mlp.up_proj.weight is [2, 2], [48, 32] by config.json",
    )


def test_names_with_another_prefix_match_nothing(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    path = base / "model.safetensors"
    save_file({f"transformer.{n}": t.clone() for n, t in load_file(path).items()}, path)
    with pytest.raises(InvalidPackageError, match=f"missing tensor {EMBEDDING}") as caught:
        load(base)
    assert "unexpected tensor transformer." in caught.value.message
    assert "more" in caught.value.message


def test_a_bias_that_the_configuration_denies_is_unexpected(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", arch="llama", attention_bias=True)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(InvalidPackageError, match=r"unexpected tensor .*q_proj\.bias"):
        load(base)


@BOTH
def test_frequencies_of_old_files_are_passed_over(tmp_path: Path, load: Load) -> None:
    base = write_base(tmp_path / "base", arch="llama")
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    rewrite(base, **{name: torch.zeros(4)})
    assert load(base).tensors.keys() == read_model_config(base).tensor_shapes().keys()


@BOTH
def test_a_dtype_that_is_no_float_is_refused_by_name(tmp_path: Path, load: Load) -> None:
    base = write_base(tmp_path / "base")
    rewrite(base, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(IncompatibleError, match=r"model\.norm\.weight is I8"):
        load(base)


@BOTH
def test_a_missing_file_is_named(tmp_path: Path, load: Load) -> None:
    base = write_base(tmp_path / "base", shards=2)
    next(base.glob("*-00002-*")).unlink()
    with pytest.raises(NotFoundError, match=r"00002-of-00002\.safetensors is missing"):
        load(base)
    with pytest.raises(NotFoundError, match=r"model\.safetensors is missing"):
        load_base_weights(tmp_path, read_model_config(base))


@BOTH
@pytest.mark.parametrize(
    ("keep", "problem"),
    [
        (0, "0 bytes are too few"),
        (7, "7 bytes are too few"),
        (200, "in a file of 200"),
        (5000, "the file holds"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, keep: int, problem: str, load: Load) -> None:
    base = write_base(tmp_path / "base")
    path = base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidPackageError, match=rf"model\.safetensors: .*{problem}"):
        load(base)


def index_of(base: Path) -> tuple[Path, dict[str, Any]]:
    path = base / "model.safetensors.index.json"
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", ""]
)
def test_an_index_may_name_only_files_beside_it(tmp_path: Path, file: str) -> None:
    base = write_base(tmp_path / "base", shards=2)
    path, index = index_of(base)
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(InvalidPackageError, match="is not the name of a safetensors file"):
        load(base)


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", shards=2)
    path, index = index_of(base)
    right = dict(index["weight_map"])
    moved = {**right, "model.norm.weight": right[EMBEDDING]}
    ghost = {**right, "ghost": right[EMBEDDING]}
    for wrong, problem in ((ghost, "ghost: in no file"), (moved, r"model\.norm\.weight: in model")):
        path.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(InvalidPackageError, match=problem):
            load(base)


@pytest.mark.parametrize(
    "document", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": 1}]
)
def test_an_index_without_a_map_is_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    base = write_base(tmp_path / "base", shards=2)
    index_of(base)[0].write_text(json.dumps(document))
    with pytest.raises(InvalidPackageError, match="there is no weight_map"):
        load(base)


def test_shapes_come_from_the_configuration_not_from_the_file(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    document = json.loads((base / "config.json").read_text())
    with pytest.raises(InvalidPackageError, match=r"by config\.json"):
        load_base_weights(base, parse_model_config({**document, "intermediate_size": 50}))
