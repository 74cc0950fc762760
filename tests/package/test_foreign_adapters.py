"""Adapters that other tools saved: each is the adapter of PEFT that it stands for."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from expertctl.errors import ExpertError, InvalidPackageError
from expertctl.package.adapter_files import AdapterFiles, read_adapter
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.package.foreign_adapter import open_adapter
from expertctl.package.pickled_weights import convert_pickle
from tests.factories import write_dora, write_lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Arrays = dict[str, np.ndarray[Any, Any]]


def read(directory: Path, **options: Any) -> tuple[AdapterFiles, Arrays, tuple[str, ...]]:
    """What is packed of a folder: the adapter, its tensors, and the notes."""
    with open_adapter(directory, **options) as (folder, notes):
        found = read_adapter(folder, weights=WEIGHTS, config=CONFIG)
        return found, load_file(folder / WEIGHTS), notes


def save_as_mlx(peft: Path, directory: Path, *, scale: float, **fields: Any) -> Path:
    """Save a LoRA or DoRA of PEFT as mlx-lm does, with matrices transposed."""
    ends = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    arrays = {}
    for name, array in load_file(peft / WEIGHTS).items():
        end = next(end for end in ends if name.endswith(end))
        own = name.removeprefix(PREFIX).removesuffix(end) + ends[end]
        arrays[own] = np.ascontiguousarray(array.T)
    directory.mkdir()
    save_file(arrays, directory / "adapters.safetensors")
    save_file(arrays, directory / "0000100_adapters.safetensors")
    config = json.loads((peft / CONFIG).read_text())
    parameters = {"rank": config["r"], "scale": scale, "dropout": 0.0}
    kind = "dora" if config.get("use_dora") else "lora"
    document = {"fine_tune_type": kind, "num_layers": 16, "lora_parameters": parameters}
    document |= {"model": "mlx-community/tiny-4bit", "iters": 1000} | fields
    (directory / CONFIG).write_text(json.dumps(document))
    return directory


@pytest.mark.parametrize("write", [write_lora, write_dora], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_adapter_of_mlx_is_the_one_of_peft(
    write: Callable[..., Path], dtype: str, base_dir: Path, tmp_path: Path
) -> None:
    """mlx-lm multiplies ``(x @ lora_a) @ lora_b`` by the scale, as PEFT by ``lora_alpha / r``."""
    peft = write(tmp_path / "peft", base_dir, rank=4, alpha=10, dtype=dtype)
    found, tensors, notes = read(save_as_mlx(peft, tmp_path / "mlx", scale=2.5))
    expected, wanted, _ = read(peft)
    assert found.spec == expected.spec
    assert tensors.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(tensors[name], array, strict=True)
    assert notes == (
        "converted from an MLX adapter of 14 modules: A and B transposed, "
        "lora_alpha = scale * rank = 10",
    )


def test_a_package_of_an_adapter_of_mlx_is_the_same_each_time(
    lora_template: Path, facts: BaseFacts, tmp_path: Path
) -> None:
    mlx = save_as_mlx(lora_template, tmp_path / "my-mlx", scale=2.0)
    (mlx / "README.md").write_text("# What it does\n")
    digests = []
    for number in range(2):
        with open_adapter(mlx) as (folder, _):
            plan = plan_build(folder, ManifestOverrides(), base=facts)
            assert str(plan.manifest.package) == "local/my-mlx"
            assert plan.paths == ("README.md", CONFIG, WEIGHTS)
            built = build_package(plan, tmp_path / f"{number}.expert")
            digests.append(built.content_digest)
        assert not folder.exists()
    assert digests[0] == digests[1]


def test_stacks_of_routed_experts_become_a_lora_for_each(tmp_path: Path) -> None:
    """``lora_a`` is [experts, rank, in] there, and not transposed."""
    folder, rng = tmp_path / "mlx", np.random.default_rng(0)
    folder.mkdir()
    a = rng.standard_normal((3, 4, 16)).astype(np.float32)
    b = rng.standard_normal((3, 24, 4)).astype(np.float32)
    module = "model.layers.1.mlp.switch_mlp.up_proj"
    save_file({f"{module}.lora_a": a, f"{module}.lora_b": b}, folder / "adapters.safetensors")
    document = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 20.0}}
    (folder / CONFIG).write_text(json.dumps(document))
    found, tensors, _ = read(folder)
    for number in range(3):
        at = f"{PREFIX}model.layers.1.mlp.experts.{number}.up_proj"
        np.testing.assert_array_equal(tensors[f"{at}.lora_A.weight"], a[number])
        np.testing.assert_array_equal(tensors[f"{at}.lora_B.weight"], b[number])
    assert {(part.rank, part.scale) for part in found.spec.parts} == {(4, 20.0)}  # type: ignore[union-attr]
    assert len(found.spec.parts) == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type 'full'"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale is missing"),
        ({"lora_parameters": {"scale": 2.0}}, "lora_parameters.rank is missing"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0, "alpha": 16}}, "both alpha and scale"),
        ({"lora_parameters": {"rank": True, "scale": "2"}}, "lora_parameters.rank is missing"),
    ],
    ids=str,
)
def test_an_adapter_of_mlx_without_a_certain_meaning_is_refused(
    change: dict[str, Any], problem: str, lora_template: Path, tmp_path: Path
) -> None:
    mlx = save_as_mlx(lora_template, tmp_path / "mlx", scale=2.0, **change)
    with pytest.raises(InvalidPackageError, match=problem), open_adapter(mlx):
        pass


@pytest.mark.parametrize("name", [CONFIG, "adapters.safetensors"])
def test_an_adapter_of_mlx_that_lacks_a_file_is_refused(
    name: str, lora_template: Path, tmp_path: Path
) -> None:
    mlx = save_as_mlx(lora_template, tmp_path / "mlx", scale=2.0)
    (mlx / name).unlink()
    with pytest.raises(ExpertError, match=name) as caught, open_adapter(mlx):
        pass
    assert str(mlx) in caught.value.message
    assert caught.value.hint


def test_problems_name_the_directory_and_not_the_copy(lora_template: Path, tmp_path: Path) -> None:
    mlx = save_as_mlx(lora_template, tmp_path / "mlx", scale=2.0)
    arrays = load_file(mlx / "adapters.safetensors")
    arrays["model.norm.extra"] = np.zeros(4, np.float32)
    save_file(arrays, mlx / "adapters.safetensors")
    with pytest.raises(InvalidPackageError, match=r"model\.norm\.extra") as caught:
        read(mlx)
    assert caught.value.message.startswith(f"{mlx}: ")


LAYER = "model.layers."
RENAMES: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda n: n.replace(LAYER, f"_orig_mod.{LAYER}"),
    "FSDP": lambda n: n.replace(LAYER, f"_fsdp_wrapped_module.{LAYER}_fsdp_wrapped_module."),
    "checkpointing": lambda n: n.replace(".self_attn", "._checkpoint_wrapped_module.self_attn"),
    "a model of PEFT in another": lambda n: n.replace(PREFIX, PREFIX * 2),
    "a label": lambda n: n.replace(".weight", ".default.weight"),
    "no prefix": lambda n: n.removeprefix(PREFIX),
    "all at once": lambda n: (
        PREFIX + n.replace(LAYER, f"_orig_mod.{LAYER}").replace(".weight", ".default.weight")
    ),
}


def rename_tensors(directory: Path, rename: Callable[[str], str]) -> None:
    arrays = load_file(directory / WEIGHTS)
    save_file({rename(name): array for name, array in arrays.items()}, directory / WEIGHTS)


@pytest.mark.parametrize("kind", list(RENAMES))
def test_names_that_a_trainer_changed_are_those_of_peft_again(
    kind: str, lora: Path, lora_template: Path
) -> None:
    rename_tensors(lora, RENAMES[kind])
    found, tensors, notes = read(lora)
    expected, wanted, none = read(lora_template)
    assert found.spec == expected.spec
    for name, array in wanted.items():
        np.testing.assert_array_equal(tensors[name], array, strict=True)
    assert none == ()
    [note] = notes
    assert note.startswith(f"{WEIGHTS}: tensors are renamed as PEFT saves them: ")


def test_a_label_of_a_magnitude_is_removed(base_dir: Path, tmp_path: Path) -> None:
    dora = write_dora(tmp_path / "dora", base_dir)
    expected, _, _ = read(dora)
    rename_tensors(
        dora,
        lambda n: (
            n.replace("_vector", "_vector.default.weight")
            .replace(".lora_A.", ".lora_A.default.")
            .replace(".lora_B.", ".lora_B.default.")
        ),
    )
    assert read(dora)[0].spec == expected.spec


def test_names_of_two_adapters_in_one_file_stay(lora: Path) -> None:
    arrays = load_file(lora / WEIGHTS)
    both = {
        name.replace(".weight", f".{label}.weight"): array
        for name, array in arrays.items()
        for label in ("default", "second")
    }
    save_file(both, lora / WEIGHTS)
    with pytest.raises(InvalidPackageError):
        read(lora)


def test_names_that_would_meet_stay(lora: Path) -> None:
    arrays = load_file(lora / WEIGHTS)
    arrays |= {name.replace(LAYER, f"_orig_mod.{LAYER}"): a for name, a in arrays.items()}
    save_file(arrays, lora / WEIGHTS)
    with pytest.raises(InvalidPackageError, match="_orig_mod"):
        read(lora)


def pickle_weights(directory: Path, value: object | None = None) -> Path:
    """Save the weights of a folder as torch does, or something else in their place."""
    arrays = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    path = directory / "adapter_model.bin"
    torch.save(tensors if value is None else value, path)
    return path


@pytest.mark.parametrize("renamed", [False, True])
def test_a_pickle_is_read_only_if_the_user_says_so(
    renamed: bool, lora: Path, lora_template: Path
) -> None:
    if renamed:
        rename_tensors(lora, RENAMES["torch.compile"])
    pickle_weights(lora)
    with pytest.raises(InvalidPackageError, match="pickles are never opened"):
        read(lora)
    found, tensors, notes = read(lora, reads_pickle=True)
    assert found.spec == read(lora_template)[0].spec
    for name, array in load_file(lora_template / WEIGHTS).items():
        np.testing.assert_array_equal(tensors[name], array, strict=True)
    assert notes[0] == "adapter_model.bin: its tensors were read in a restricted process"
    assert len(notes) == 1 + renamed


def test_a_pickle_of_every_type_of_float_is_what_torch_loads(tmp_path: Path) -> None:
    """Views of a storage, transposed ones, parameters and tensors without numbers, too."""
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "whole": whole,
        "rows": whole[1:3],
        "columns": whole[:, 2:4],
        "transposed": whole.T,
        "half": torch.randn(5).half(),
        "bfloat": torch.randn(2, 3).to(torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "empty": torch.zeros(0, 4),
        "number": torch.tensor(2.5),
    }
    torch.save(tensors, tmp_path / "weights.bin")
    convert_pickle(tmp_path / "weights.bin", tmp_path / "weights.safetensors")
    from safetensors.torch import load_file as load_tensors

    found = load_tensors(tmp_path / "weights.safetensors")
    loaded = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert found.keys() == loaded.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=0)


class Command:
    """Unpickled by an ordinary reader, it runs a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: {"a": Command(path)}, "names posix.system, which is no tensor"),
        (lambda _: {"a": np.zeros(2)}, "which is no tensor"),
        (lambda _: {"a": torch.zeros(2, dtype=torch.int64)}, "names torch.LongStorage"),
        (lambda _: {"a": [torch.zeros(2)]}, "not a dictionary of tensors"),
        (lambda _: [torch.zeros(2)], "not a dictionary of tensors"),
        (lambda _: {}, "not a dictionary of tensors"),
        (lambda _: {1: torch.zeros(2)}, "not a dictionary of tensors"),
    ],
    ids=["command", "numpy", "integers", "list in it", "list", "nothing", "number as name"],
)
def test_a_pickle_with_anything_but_tensors_is_refused(
    make: Callable[[Path], object], problem: str, lora: Path, tmp_path: Path
) -> None:
    pickle_weights(lora, make(tmp_path / "ran"))
    with pytest.raises(InvalidPackageError, match=problem):
        read(lora, reads_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0, 10, 300, -30])
def test_a_broken_pickle_is_refused(kept: int, lora: Path) -> None:
    path = pickle_weights(lora)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InvalidPackageError, match=r"adapter_model\.bin: ") as caught:
        read(lora, reads_pickle=True)
    assert "safe_serialization" in caught.value.hint


def test_an_old_pickle_without_an_archive_is_refused(lora: Path) -> None:
    (lora / WEIGHTS).unlink()
    path = lora / "adapter_model.bin"
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidPackageError, match="not a readable pickle"):
        read(lora, reads_pickle=True)


def test_weights_in_safetensors_go_before_a_pickle(lora: Path, tmp_path: Path) -> None:
    spare = Path(shutil.copytree(lora, tmp_path / "spare"))
    pickled = pickle_weights(spare, {"a": Command(tmp_path / "ran")})
    shutil.copy(pickled, lora / pickled.name)
    found, _, notes = read(lora, reads_pickle=True)
    assert (len(found.spec.parts), notes) == (14, ())
