"""Adapters that other tools saved: each is the adapter of PEFT that it stands for."""

import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from expertctl.errors import ExpertError, InvalidPackageError
from expertctl.package.adapter_files import AdapterFiles, read_adapter
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import build_package, draft_manifest, plan_build
from expertctl.package.directory import SourceFile, find_source_file
from expertctl.package.draft import ManifestOverrides
from expertctl.package.foreign_adapter import open_adapter
from expertctl.package.pickled_weights import convert_pickle
from tests.factories import write_dora, write_lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Arrays = dict[str, np.ndarray[Any, Any]]


def read(directory: Path, **options: Any) -> tuple[AdapterFiles, Arrays, tuple[str, ...]]:
    """What is packed of a folder: the adapter, its tensors, and the notes."""
    with open_adapter(directory, **options) as (converted, notes):
        found = read_adapter(directory, weights=WEIGHTS, config=CONFIG, converted=converted)
        return found, load_file((converted or directory) / WEIGHTS), notes


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
            assert folder is not None
            plan = plan_build(mlx, ManifestOverrides(), base=facts, converted=folder)
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
        (
            {"lora_parameters": {"rank": 4, "scale": -2.0}},
            "lora_parameters.scale is -2, not above 0",
        ),
        ({"lora_parameters": {"rank": 4, "scale": 1e308}}, "scale is 1e"),
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


def test_problems_name_the_directory_of_the_user(lora_template: Path, tmp_path: Path) -> None:
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


def test_a_label_of_some_modules_alone_stays(lora: Path) -> None:
    rename_tensors(lora, lambda n: n.replace(".weight", ".second.weight") if "v_proj" in n else n)
    with pytest.raises(InvalidPackageError):
        read(lora)


def test_a_wrapper_is_a_whole_part_of_a_name(lora: Path) -> None:
    rename_tensors(lora, lambda n: n.replace("q_proj", "my_orig_mod.q_proj"))
    with pytest.raises(InvalidPackageError, match="my_orig_mod"):
        read(lora)


def test_a_converted_adapter_keeps_what_is_beside_it(
    lora: Path, facts: BaseFacts, base_dir: Path
) -> None:
    """Also a second adapter and a template that expert.json names, and what is left out."""
    rename_tensors(lora, RENAMES["a label"])
    second = write_lora(lora.parent / "second", base_dir, seed=3)
    shutil.copy(second / WEIGHTS, lora / "b.safetensors")
    shutil.copy(second / CONFIG, lora / "b.json")
    (lora / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (lora / "optimizer.pt").write_bytes(b"x")
    with open_adapter(lora) as (converted, _):
        document: Any = draft_manifest(lora, ManifestOverrides(), base=facts, converted=converted)
    other = {**document["adapters"][0], "path": "b.safetensors", "config": "b.json"}
    document["adapters"].append(other)
    document["decoding"] = {"chat_template": "chat_template.jinja"}
    (lora / "expert.json").write_text(json.dumps(document))
    with open_adapter(lora) as (converted, _):
        plan = plan_build(lora, ManifestOverrides(), base=facts, converted=converted)
    assert {"b.json", "b.safetensors", "chat_template.jinja"} < set(plan.paths)
    assert plan.left_out == ("optimizer.pt",)


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
    convert_pickle(find_file(tmp_path / "weights.bin"), tmp_path / "weights.safetensors")
    from safetensors.torch import load_file as load_tensors

    found = load_tensors(tmp_path / "weights.safetensors")
    loaded = torch.load(tmp_path / "weights.bin", weights_only=True)
    assert found.keys() == loaded.keys()
    for name, tensor in loaded.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=0, atol=0)


def find_file(path: Path) -> SourceFile:
    found = find_source_file(path.parent, path.name)
    assert found is not None
    return found


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


class Storage:
    """The storage of a tensor, as torch refers to it."""

    def __init__(self, length: int) -> None:
        self.length = length


class Named:
    """Something that a pickle names."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Built:
    """What a function that a pickle names returns, and the state that is set on it afterwards."""

    def __init__(self, module: str, name: str, *arguments: object, state: object = None) -> None:
        self.made, self.arguments, self.state = Named(module, name), arguments, state


class HandPickler(pickle._Pickler):  # type: ignore[misc,name-defined]  # the one in Python
    """Writes the three above by opcodes, and all else as an ordinary pickle."""

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        match value:
            case Storage():
                dtype = Named("torch", "FloatStorage")
                super().save(("storage", dtype, "0", "cpu", value.length), False)
                self.write(pickle.BINPERSID)
            case Named():
                self.write(f"c{value.module}\n{value.name}\n".encode())
            case Built():
                self.save(value.made)
                self.save(value.arguments)
                self.write(pickle.REDUCE)
                if value.state is not None:
                    self.save(value.state)
                    self.write(pickle.BUILD)
            case _:
                super().save(value, save_persistent_id)


def write_archive(path: Path, value: object, numbers: int = 4) -> None:
    """Write an archive of torch by hand, with one storage of so many float32."""
    data = BytesIO()
    HandPickler(data, protocol=2).dump(value)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data.getvalue())
        archive.writestr("archive/data/0", np.arange(numbers, dtype="<f4").tobytes())


def tensor_of(*shape: int, state: object = None, offset: int = 0, length: int = 4) -> Built:
    strides = tuple(int(np.prod(shape[n + 1 :])) for n in range(len(shape)))
    arguments = (Storage(length), offset, shape, strides, False, {})
    return Built("torch._utils", "_rebuild_tensor_v2", *arguments, state=state)


LARGE = {"storage": Storage(4), "offset": 0, "shape": (2, 600), "strides": (600, 1)}
OTHER = Built("collections", "OrderedDict", state=LARGE)


def test_the_archives_written_by_hand_are_those_of_torch(tmp_path: Path) -> None:
    write_archive(tmp_path / "a.bin", {"a": tensor_of(2, 2)})
    convert_pickle(find_file(tmp_path / "a.bin"), tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(found["a"], np.arange(4, dtype=np.float32).reshape(2, 2))


@pytest.mark.parametrize(
    "value",
    [
        {"a": tensor_of(2, 600)},
        {"a": tensor_of(2, 2, offset=1)},
        {"a": tensor_of(2, 2, length=8)},
        {"a": tensor_of(2, 2, state=[Storage(4), 0, (2, 600), (600, 1)])},
        {"a": tensor_of(2, 2, state=(None, {"shape": (2, 600), "strides": (600, 1)}))},
        {"a": OTHER},
        Built(
            "collections",
            "OrderedDict",
            [("a", OTHER)],
            state={"items": Named("collections", "OrderedDict")},
        ),
    ],
    ids=["shape", "offset", "storage", "state", "slots", "other", "items"],
)
def test_a_tensor_that_is_larger_than_its_storage_is_refused(value: object, tmp_path: Path) -> None:
    write_archive(tmp_path / "adapter_model.bin", value)
    with pytest.raises(InvalidPackageError):
        convert_pickle(find_file(tmp_path / "adapter_model.bin"), tmp_path / "a.safetensors")


def test_a_negated_view_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch._neg_view(torch.ones(2))}, tmp_path / "a.bin")
    with pytest.raises(InvalidPackageError, match="negated view"):
        convert_pickle(find_file(tmp_path / "a.bin"), tmp_path / "a.safetensors")


def test_a_compressed_or_doubled_entry_is_refused(tmp_path: Path) -> None:
    for number, compression in enumerate((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)):
        path = tmp_path / f"{number}.bin"
        write_archive(path, {"a": tensor_of(2, 2)})
        with zipfile.ZipFile(path) as archive:
            entries = {n: archive.read(n) for n in archive.namelist()}
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
            warnings.simplefilter("ignore")
            for name, data in [*entries.items(), *(entries.items() if number == 0 else ())]:
                archive.writestr(name, data)
        with pytest.raises(InvalidPackageError, match="archive"):
            convert_pickle(find_file(path), tmp_path / f"{number}.safetensors")


def test_no_module_of_the_current_folder_is_imported(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickle_weights(lora)
    for name in ("zipfile", "numpy", "resource", "expertctl"):
        (lora / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(lora)
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
    with pytest.raises(InvalidPackageError, match=r"cannot be read|not a readable pickle"):
        read(lora, reads_pickle=True)


def test_weights_in_safetensors_go_before_a_pickle(lora: Path, tmp_path: Path) -> None:
    spare = Path(shutil.copytree(lora, tmp_path / "spare"))
    pickled = pickle_weights(spare, {"a": Command(tmp_path / "ran")})
    shutil.copy(pickled, lora / pickled.name)
    found, _, notes = read(lora, reads_pickle=True)
    assert (len(found.spec.parts), notes) == (14, ())
