"""Routed experts in every layout of files: the same tensors, the same digests, never a mixture."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from expertctl.errors import InvalidPackageError
from expertctl.package.base_model import read_base
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import read_model_config
from expertctl.package.stored_tensor import StoredTensor
from expertctl.schema.strict_json import encode_canonical
from tests.factories import write_base
from tests.tensor_shapes import CLASSES, to_canonical_name

Arrays = dict[str, NDArray[np.float32]]
LAYER = "model.layers.1.mlp"
FILE = "model.safetensors"


def tensors_of(directory: Path) -> dict[str, StoredTensor]:
    return read_base_tensors(directory, read_model_config(directory))


def data_of(tensor: StoredTensor) -> NDArray[np.float32]:
    data = tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.size]
    return np.frombuffer(data, np.float32).reshape(tensor.info.shape)


def our_arrays(directory: Path) -> Arrays:
    """The tensors of a base as its publisher names them, by our names."""
    return {to_canonical_name(name): array for name, array in load_file(directory / FILE).items()}


def stacked(arrays: Arrays) -> Arrays:
    """What transformers 5 has in memory, and may save: a stack for all experts of a layer."""
    apart = {n: a for n, a in arrays.items() if ".experts." in n}
    found = {n: a for n, a in arrays.items() if n not in apart}
    for top in {name.split(".experts.")[0] for name in apart}:
        numbers = range(len({n for n in apart if n.startswith(top) and "gate_proj" in n}))
        gate, up, down = (
            [apart[f"{top}.experts.{number}.{name}_proj.weight"] for number in numbers]
            for name in ("gate", "up", "down")
        )
        halves = [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
        found[f"{top}.experts.gate_up_proj"] = np.stack(halves)
        found[f"{top}.experts.down_proj"] = np.stack(down)
    return found


def rewrite(directory: Path, changes: dict[str, NDArray[np.float32] | None]) -> None:
    """Replace tensors; None removes one."""
    tensors = {**load_file(directory / FILE), **changes}
    save_file({n: a for n, a in tensors.items() if a is not None}, directory / FILE)


@pytest.mark.parametrize("arch", sorted(CLASSES))
def test_every_tensor_lies_where_it_is_said_to_in_every_layout(arch: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch=arch)
    arrays = our_arrays(base)
    for written in (load_file(base / FILE), arrays, stacked(arrays)):
        save_file(written, base / FILE)
        tensors = tensors_of(base)
        assert tensors.keys() == arrays.keys() == read_model_config(base).tensor_shapes().keys()
        assert all(np.array_equal(data_of(tensors[n]), arrays[n]) for n in arrays)


@pytest.mark.parametrize("arch", sorted(CLASSES))
def test_the_digests_of_a_base_do_not_depend_on_its_layout(arch: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch=arch, tie=False)
    before = read_base(base)
    arrays = our_arrays(base)
    for written in (arrays, stacked(arrays)):
        save_file(written, base / FILE)
        assert read_base(base) == before


def test_the_digests_are_those_of_the_definition(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="olmoe")
    identity, arrays = read_base(base).identity, our_arrays(base)
    shapes = [[name, list(arrays[name].shape)] for name in sorted(arrays)]
    config = read_model_config(base).to_json()
    arch = encode_canonical({"config": config, "tensors": shapes})
    assert identity.arch.hex == hashlib.sha256(arch).hexdigest()
    rows = [[n, "F32", hashlib.sha256(arrays[n].tobytes()).hexdigest()] for n in sorted(arrays)]
    assert identity.weights is not None
    assert identity.weights.hex == hashlib.sha256(encode_canonical(rows)).hexdigest()


def test_a_base_in_several_files_is_read_as_one_in_one(tmp_path: Path) -> None:
    one, many = (
        write_base(tmp_path / f"b{shards}", arch="qwen2_moe", shards=shards) for shards in (1, 4)
    )
    whole, parts = read_base(one, name="b"), read_base(many, name="b")
    assert whole == parts


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        ("gate_up_proj", "stacked .* and separately"),
        ("down_proj", "stacked .* and separately"),
    ],
)
def test_a_mixture_of_layouts_is_refused(kept: str, named: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="qwen3_moe")
    stacks = stacked(our_arrays(base))
    name = f"{LAYER}.experts.{kept}"
    rewrite(base, {name: stacks[name]})
    with pytest.raises(
        InvalidPackageError, match=f"experts are stored {named}.*one layout is required"
    ):
        tensors_of(base)


def test_two_ways_of_naming_in_one_base_are_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="mixtral")
    renamed = our_arrays(base)[f"{LAYER}.experts.0.gate_proj.weight"]
    old = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    rewrite(base, {old: None, f"{LAYER}.experts.0.gate_proj.weight": renamed})
    with pytest.raises(InvalidPackageError, match=r"as w1, w2 and w3 .* and separately"):
        tensors_of(base)


def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="mixtral")
    router = our_arrays(base)[f"{LAYER}.gate.weight"]
    rewrite(base, {f"{LAYER}.gate.weight": router})
    with pytest.raises(
        InvalidPackageError, match=r"stored both as .*block_sparse_moe\.gate.* and as"
    ):
        tensors_of(base)


@pytest.mark.parametrize(
    "absent",
    [
        "experts.3.up_proj.weight",
        "gate.weight",
        "shared_expert_gate.weight",
        "shared_expert.down_proj.weight",
    ],
)
def test_what_is_missing_is_named(absent: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="qwen2_moe")
    rewrite(base, {f"{LAYER}.{absent}": None})
    with pytest.raises(InvalidPackageError) as caught:
        tensors_of(base)
    assert caught.value.problems == (f"missing tensor {LAYER}.{absent}",)


def test_half_a_stack_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="olmoe")
    save_file(stacked(our_arrays(base)), base / FILE)
    rewrite(base, {f"{LAYER}.experts.down_proj": None})
    with pytest.raises(InvalidPackageError) as caught:
        tensors_of(base)
    missing = [f"missing tensor {LAYER}.experts.{n}.down_proj.weight" for n in range(4)]
    assert list(caught.value.problems) == missing


@pytest.mark.parametrize(
    "shape", [(3, 96, 32), (4, 32, 96), (4, 96, 32, 1), (384, 32), (4, 48, 32)]
)
def test_a_stack_of_another_shape_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="olmoe")
    save_file(stacked(our_arrays(base)), base / FILE)
    name = f"{LAYER}.experts.gate_up_proj"
    rewrite(base, {name: np.zeros(shape, np.float32)})
    with pytest.raises(InvalidPackageError) as caught:
        tensors_of(base)
    assert caught.value.problems == (f"tensor {name} is {list(shape)}, [4, 96, 32] by config.json",)


def test_more_experts_than_the_configuration_has_are_unexpected(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="olmoe")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "num_experts": 3}))
    with pytest.raises(InvalidPackageError, match=r"unexpected tensor .*experts\.3\.down_proj"):
        tensors_of(base)


def test_a_stack_in_a_dense_layer_is_unexpected(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="dots1", first_k_dense_replace=1)
    save_file(stacked(our_arrays(base)), base / FILE)
    stack = load_file(base / FILE)[f"{LAYER}.experts.down_proj"]
    rewrite(base, {"model.layers.0.mlp.experts.down_proj": stack})
    with pytest.raises(InvalidPackageError, match=r"unexpected tensor model\.layers\.0\.mlp"):
        tensors_of(base)


@pytest.mark.parametrize("layer", ["2", "00", "1" * 100])
def test_a_stack_of_a_layer_that_is_not_there_is_one_unexpected_tensor(
    layer: str, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "b", arch="olmoe")
    save_file(stacked(our_arrays(base)), base / FILE)
    stack = load_file(base / FILE)[f"{LAYER}.experts.down_proj"]
    name = f"model.layers.{layer}.mlp.experts.down_proj"
    rewrite(base, {name: stack})
    with pytest.raises(InvalidPackageError) as caught:
        tensors_of(base)
    assert caught.value.problems == (f"unexpected tensor {name}",)


def test_names_of_routed_experts_mean_nothing_in_a_dense_base(tmp_path: Path) -> None:
    base = write_base(tmp_path / "b", arch="llama")
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    rewrite(base, {name: np.zeros((2, 2), np.float32)})
    with pytest.raises(InvalidPackageError) as caught:
        tensors_of(base)
    assert caught.value.problems == (f"unexpected tensor {name}",)
