"""Loading: every byte verified before use, read once, and used from where it was read."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from expertctl.digest import FileDigest, hash_file
from expertctl.engine.adapter_load import (
    CHUNK,
    SLACK,
    StoredFiles,
    adapter_bytes,
    load_adapter,
    read_verified,
)
from expertctl.errors import (
    DigestError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
)
from tests.engine.adapter_files import CONFIG, WEIGHTS, files_of, load, manifest_of
from tests.factories import write_base, write_lora


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def lora(tmp_path: Path, base: Path) -> Path:
    return write_lora(tmp_path / "lora", base, rank=4, alpha=6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_are_those_of_the_safetensors_library(
    dtype: str, tmp_path: Path, base: Path
) -> None:
    directory = write_lora(tmp_path / dtype, base, dtype=dtype)
    adapter = load_adapter(manifest_of(directory, dtype=dtype), files_of(directory))
    expected = safetensors.torch.load_file(directory / WEIGHTS)
    assert adapter.tensors == len(expected) == 2 * len(adapter.modules) == 28
    for module, tensors in adapter.modules.items():
        for half, tensor in (("A", tensors.a), ("B", tensors.b)):
            name = f"base_model.model.{module}.lora_{half}.weight"
            assert tensor.dtype == getattr(torch, dtype)
            assert torch.equal(tensor, expected[name])
        assert (tensors.rank, tensors.scale) == (4, 2.0)


def test_all_tensors_lie_in_the_one_buffer_that_was_counted(lora: Path) -> None:
    adapter = load(lora)
    storages = {
        t.untyped_storage().data_ptr() for m in adapter.modules.values() for t in (m.a, m.b)
    }
    [tensor, *_] = [m.a for m in adapter.modules.values()]
    assert len(storages) == 1
    assert tensor.untyped_storage().nbytes() == adapter.nbytes
    sizes = {name: file.size for name, (_, file) in files_of(lora).paths.items()}
    assert adapter.nbytes == adapter_bytes(manifest_of(lora), sizes)


@pytest.mark.parametrize("extra", range(1, 8))
def test_a_header_of_any_length_gives_the_same_tensors(extra: int, lora: Path) -> None:
    expected = {module: (t.a.clone(), t.b.clone()) for module, t in load(lora).modules.items()}
    path = lora / WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip(b" ")
    header += b" " * ((extra - len(header)) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert len(header) % 8 == extra
    found = load(lora).modules
    for module, (a, b) in expected.items():
        assert torch.equal(found[module].a, a)
        assert torch.equal(found[module].b, b)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_a_file_of_any_size_is_read_whole_and_hashed(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(size).bytes(size))
    seen: list[int] = []
    file = FileDigest("w", *hash_file(path))
    buffer = read_verified(path, file, owner="acme/sql@1.0.0", progress=seen.append)
    assert bytes(buffer[: len(buffer) - SLACK]) == path.read_bytes()
    assert sum(seen) == size


@pytest.mark.parametrize("position", [0, 8, 300, -1])
def test_a_flipped_bit_anywhere_is_a_digest_error(position: int, lora: Path) -> None:
    manifest, files, path = manifest_of(lora), files_of(lora), lora / WEIGHTS
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"acme/lora@1\.0\.0: adapter_model") as caught:
        load_adapter(manifest, files)
    assert "expertctl doctor" in caught.value.hint


def test_a_changed_configuration_is_a_digest_error(lora: Path) -> None:
    manifest, files, path = manifest_of(lora), files_of(lora), lora / CONFIG
    path.write_text(path.read_text().replace('"lora_alpha": 6', '"lora_alpha": 7'))
    with pytest.raises(DigestError, match=r"adapter_config\.json is not what was installed"):
        load_adapter(manifest, files)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_a_digest_error(change: int, lora: Path) -> None:
    manifest, files, path = manifest_of(lora), files_of(lora), lora / WEIGHTS
    size = path.stat().st_size + change
    os.truncate(path, size)
    with pytest.raises(DigestError, match=f"{size} bytes instead of {size - change}"):
        load_adapter(manifest, files)


def test_a_file_cut_short_while_it_is_read_is_a_digest_error(
    lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, files, path = manifest_of(lora), files_of(lora), lora / WEIGHTS
    whole = path.stat()
    os.truncate(path, whole.st_size - 5)
    monkeypatch.setattr(os, "fstat", lambda _: whole)
    with pytest.raises(DigestError, match="is not what was installed"):
        read_verified(path, files.paths[WEIGHTS][1], owner=manifest.ref)


def test_a_missing_file_is_named_with_the_way_out(lora: Path) -> None:
    manifest, files = manifest_of(lora), files_of(lora)
    (lora / WEIGHTS).unlink()
    with pytest.raises(NotFoundError, match=r"adapter_model\.safetensors is missing") as caught:
        load_adapter(manifest, files)
    assert "doctor" in caught.value.hint


def test_a_file_that_changes_after_reading_changes_nothing(lora: Path) -> None:
    adapter = load(lora)
    before = {module: t.a.clone() for module, t in adapter.modules.items()}
    size = (lora / WEIGHTS).stat().st_size
    with (lora / WEIGHTS).open("r+b") as stream:
        stream.write(b"\xff" * size)
    assert all(torch.equal(adapter.modules[m].a, a) for m, a in before.items())


def test_fewer_tensors_than_the_manifest_promises_are_refused(lora: Path) -> None:
    manifest = manifest_of(lora)
    [entry] = manifest.adapters
    more = replace(manifest, adapters=(replace(entry, tensors=30),))
    with pytest.raises(InvalidPackageError, match="28 of 30"):
        load_adapter(more, files_of(lora))


def test_a_kind_without_an_implementation_is_refused_by_name(lora: Path) -> None:
    with pytest.raises(IncompatibleError, match="kind ia3"):
        load_adapter(manifest_of(lora, kind="ia3"), files_of(lora))


def test_two_adapters_on_one_module_are_refused(lora: Path) -> None:
    manifest, files = manifest_of(lora), files_of(lora)
    [entry] = manifest.adapters
    again = replace(entry, path="second.safetensors")
    paths = {**files.paths, "second.safetensors": files.paths[WEIGHTS]}
    both = replace(manifest, adapters=(entry, again))
    with pytest.raises(InvalidPackageError, match=r"two adapters change model\.layers\.0"):
        load_adapter(both, StoredFiles(files.ref, paths))


def test_two_adapters_on_different_modules_are_one_expert(tmp_path: Path, base: Path) -> None:
    one = write_lora(tmp_path / "one", base, targets=("q_proj",))
    two = write_lora(tmp_path / "two", base, targets=("v_proj",))
    [first], [second] = manifest_of(one).adapters, manifest_of(two).adapters
    second = replace(second, path="v.safetensors", config="v.json")
    paths = {
        **files_of(one).paths,
        "v.safetensors": files_of(two).paths[WEIGHTS],
        "v.json": files_of(two).paths[CONFIG],
    }
    manifest = replace(manifest_of(one), adapters=(first, second))
    adapter = load_adapter(manifest, StoredFiles("acme/one@1.0.0", paths))
    assert {module.rpartition(".")[2] for module in adapter.modules} == {"q_proj", "v_proj"}
    assert adapter.tensors == 8


def test_scales_follow_rslora_and_the_patterns(tmp_path: Path, base: Path) -> None:
    directory = write_lora(
        tmp_path / "lora",
        base,
        rank=4,
        alpha=8,
        use_rslora=True,
        rank_pattern={"q_proj": 16},
        alpha_pattern={"layers.1.mlp.up_proj": 5},
    )
    modules = load(directory).modules
    assert json.loads((directory / CONFIG).read_text())["use_rslora"] is True
    assert modules["model.layers.0.self_attn.q_proj"].scale == 8 / 4
    assert modules["model.layers.0.self_attn.q_proj"].rank == 16
    assert modules["model.layers.0.mlp.up_proj"].scale == 8 / 2
    assert modules["model.layers.1.mlp.up_proj"].scale == 5 / 2
