"""Loading: every byte verified before use, read once, and used from where it was read."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import safetensors.torch
import torch

from expertctl.engine.adapters.load import (
    READ_CHUNK_BYTES,
    READ_SLACK_BYTES,
    LoadedAdapter,
    estimate_adapter_bytes,
    load_adapter,
    read_verified,
)
from expertctl.engine.adapters.steps import DoraTensors, Ia3Tensors, LoraTensors
from expertctl.engine.arrays import FloatArray
from expertctl.engine.torch.plan import to_tensor
from expertctl.errors import (
    DigestError,
    InvalidPackageError,
    NotFoundError,
    StoreError,
)
from expertctl.reference import FileDigest, hash_file
from expertctl.schema.manifest import AdapterEntry, AdapterKind, BaseRequirement, Manifest
from tests.engine.memory_measurement import find_owner
from tests.engine.package_fixtures import (
    CONFIG,
    WEIGHTS,
    list_package_files,
    load_adapters,
    make_adapter_manifest,
)
from tests.factories import write_base, write_dora, write_ia3, write_lora, write_soft_prompt


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
    adapter = load_adapters(directory)
    expected = safetensors.torch.load_file(directory / WEIGHTS)
    assert adapter.tensors == len(expected) == 2 * len(adapter.modules) == 28
    for module, [tensors] in adapter.modules.items():
        assert isinstance(tensors, LoraTensors)
        for half, tensor in (("A", tensors.a), ("B", tensors.b)):
            name = f"base_model.model.{module}.lora_{half}.weight"
            assert to_tensor(tensor).dtype == getattr(torch, dtype)
            assert torch.equal(to_tensor(tensor), expected[name])
        assert (tensors.rank, tensors.scale) == (4, 2.0)


def test_all_tensors_lie_in_the_one_buffer_that_was_counted(lora: Path) -> None:
    adapter = load_adapter(make_adapter_manifest(lora), list_package_files(lora))
    [buffer] = set(map(find_buffer, tensors_of(adapter)))
    assert len(buffer) == adapter.nbytes
    sizes = {name: file.size for name, (_, file) in list_package_files(lora).paths.items()}
    described = sizes["adapter_config.json"] + READ_SLACK_BYTES
    assert adapter.nbytes + described == estimate_adapter_bytes(make_adapter_manifest(lora), sizes)


def find_buffer(array: FloatArray) -> mmap:
    """The buffer that an array is a view into."""
    view = find_owner(array).base
    assert isinstance(view, memoryview)
    assert isinstance(view.obj, mmap)
    return view.obj


def tensors_of(adapter: LoadedAdapter) -> list[FloatArray]:
    found = list(adapter.soft_prompts)
    for steps in adapter.modules.values():
        for step in steps:
            match step:
                case Ia3Tensors():
                    found.append(step.vector)
                case DoraTensors():
                    found += [step.a, step.b, step.magnitude]
                case LoraTensors():
                    found += [step.a, step.b]
    return found


KINDS: dict[str, Callable[..., Path]] = {
    "lora": write_lora,
    "dora": write_dora,
    "ia3": write_ia3,
    "soft_prompt": write_soft_prompt,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", range(1, 8))
def test_a_header_of_any_length_gives_the_same_tensors(
    kind: str, extra: int, tmp_path: Path, base: Path
) -> None:
    directory = KINDS[kind](tmp_path / kind, base)
    expected = [tensor.copy() for tensor in tensors_of(load_adapters(directory))]
    path = directory / WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip(b" ")
    header += b" " * ((extra - len(header)) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    assert len(header) % 8 == extra
    found = tensors_of(load_adapters(directory))
    assert len(found) == len(expected) > 0
    assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "size",
    [0, 1, READ_CHUNK_BYTES - 1, READ_CHUNK_BYTES, READ_CHUNK_BYTES + 1, 3 * READ_CHUNK_BYTES + 5],
)
def test_a_file_of_any_size_is_read_whole_and_hashed(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(size).bytes(size))
    seen: list[int] = []
    file = FileDigest("w", *hash_file(path))
    buffer = read_verified(path, file, owner="acme/sql@1.0.0", progress=seen.append)
    assert bytes(buffer[: len(buffer) - READ_SLACK_BYTES]) == path.read_bytes()
    assert sum(seen) == size


@pytest.mark.parametrize("position", [0, 8, 300, -1])
def test_a_flipped_bit_anywhere_is_a_digest_error(position: int, lora: Path) -> None:
    manifest, files, path = make_adapter_manifest(lora), list_package_files(lora), lora / WEIGHTS
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"acme/lora@1\.0\.0: adapter_model") as caught:
        load_adapter(manifest, files)
    assert "expertctl doctor" in caught.value.hint


def test_a_changed_configuration_is_a_digest_error(lora: Path) -> None:
    manifest, files, path = make_adapter_manifest(lora), list_package_files(lora), lora / CONFIG
    path.write_text(path.read_text().replace('"lora_alpha": 6', '"lora_alpha": 7'))
    with pytest.raises(DigestError, match=r"adapter_config\.json differs from the installed file"):
        load_adapter(manifest, files)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_a_digest_error(change: int, lora: Path) -> None:
    manifest, files, path = make_adapter_manifest(lora), list_package_files(lora), lora / WEIGHTS
    size = path.stat().st_size + change
    os.truncate(path, size)
    with pytest.raises(DigestError, match=f"{size} bytes instead of {size - change}"):
        load_adapter(manifest, files)


def test_a_file_cut_short_while_it_is_read_is_a_digest_error(
    lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, files, path = make_adapter_manifest(lora), list_package_files(lora), lora / WEIGHTS
    whole = path.stat()
    os.truncate(path, whole.st_size - 5)
    monkeypatch.setattr(os, "fstat", lambda _: whole)
    with pytest.raises(DigestError, match="differs from the installed file"):
        read_verified(path, files.paths[WEIGHTS][1], owner=manifest.ref)


def test_a_missing_file_is_named_with_the_way_out(lora: Path) -> None:
    manifest, files = make_adapter_manifest(lora), list_package_files(lora)
    (lora / WEIGHTS).unlink()
    with pytest.raises(NotFoundError, match=r"adapter_model\.safetensors is missing") as caught:
        load_adapter(manifest, files)
    assert "doctor" in caught.value.hint


def test_a_file_that_cannot_be_read_is_named_and_its_folder_is_not(lora: Path) -> None:
    manifest, files = make_adapter_manifest(lora), list_package_files(lora)
    (lora / WEIGHTS).unlink()
    (lora / WEIGHTS).mkdir()
    with pytest.raises(StoreError) as caught:
        load_adapter(manifest, files)
    said = f"{manifest.ref}: {WEIGHTS} cannot be read in the store: Is a directory"
    assert caught.value.message == said
    assert "doctor" in caught.value.hint


def test_a_file_that_changes_after_reading_changes_nothing(lora: Path) -> None:
    adapter = load_adapters(lora)
    before = [tensor.copy() for tensor in tensors_of(adapter)]
    size = (lora / WEIGHTS).stat().st_size
    with (lora / WEIGHTS).open("r+b") as stream:
        stream.write(b"\xff" * size)
    assert all(np.array_equal(*pair) for pair in zip(tensors_of(adapter), before, strict=True))


def test_fewer_tensors_than_the_manifest_promises_are_refused(lora: Path) -> None:
    manifest = make_adapter_manifest(lora)
    [entry] = manifest.adapters
    more = replace(manifest, adapters=(replace(entry, tensors=30),))
    with pytest.raises(InvalidPackageError, match="28 of the 30"):
        load_adapter(more, list_package_files(lora))


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_that_promises_another_kind_is_refused(
    kind: str, tmp_path: Path, base: Path
) -> None:
    directory = KINDS[kind](tmp_path / kind, base)
    manifest = make_adapter_manifest(directory)
    [entry] = manifest.adapters
    other: AdapterKind = "ia3" if kind != "ia3" else "lora"
    wrong = replace(manifest, adapters=(replace(entry, kind=other),))
    with pytest.raises(InvalidPackageError, match=f"kind {kind}, the manifest says {other}"):
        load_adapter(wrong, list_package_files(directory))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_a_meaning_is_refused(kind: str, tmp_path: Path, base: Path) -> None:
    directory = KINDS[kind](tmp_path / kind, base)
    tensors = safetensors.torch.load_file(directory / WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.q_proj.stray"
    safetensors.torch.save_file({**tensors, name: torch.zeros(1, 1)}, directory / WEIGHTS)
    with pytest.raises(InvalidPackageError, match=r"q_proj\.stray"):
        load_adapter(
            manifest_like(directory, len(tensors) + 1, kind), list_package_files(directory)
        )


def manifest_like(directory: Path, tensors: int, kind: str) -> Manifest:
    entry = AdapterEntry(cast(AdapterKind, kind), WEIGHTS, CONFIG, "float32", tensors)
    base = BaseRequirement(name="tiny", arch="", tokenizer="")
    return Manifest(1, f"acme/{directory.name}", "1.0.0", "", "MIT", base, (entry,))


def test_dora_ia3_and_soft_prompts_have_the_values_of_their_files(
    tmp_path: Path, base: Path
) -> None:
    paths = [KINDS[kind](tmp_path / kind, base) for kind in ("dora", "ia3", "soft_prompt")]
    adapter = load_adapters(*paths)
    stored = [safetensors.torch.load_file(path / WEIGHTS) for path in paths]
    q, down = "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"
    dora, on_output = adapter.modules[q]
    assert isinstance(dora, DoraTensors)
    assert isinstance(on_output, Ia3Tensors)
    magnitude = stored[0][f"base_model.model.{q}.lora_magnitude_vector"]
    assert torch.equal(to_tensor(dora.magnitude), magnitude.flatten())
    vector = stored[1][f"base_model.model.{q}.ia3_l"][:, 0]
    assert torch.equal(to_tensor(on_output.vector), vector)
    assert not on_output.on_input
    on_input = adapter.modules[down][1]
    assert isinstance(on_input, Ia3Tensors)
    assert on_input.on_input
    vector = stored[1][f"base_model.model.{down}.ia3_l"][0]
    assert torch.equal(to_tensor(on_input.vector), vector)
    [prompt] = adapter.soft_prompts
    assert torch.equal(to_tensor(prompt), stored[2]["prompt_embeddings"])
    assert adapter.tensors == sum(len(tensors) for tensors in stored)


def test_several_adapters_on_one_module_are_steps_in_their_order(
    tmp_path: Path, base: Path
) -> None:
    one = write_lora(tmp_path / "one", base, targets=("q_proj",), rank=3)
    two = write_lora(tmp_path / "two", base, targets=("v_proj", "q_proj"), rank=5)
    for paths, ranks in (((one, two), [3, 5]), ((two, one), [5, 3])):
        adapter = load_adapters(*paths)
        steps = adapter.modules["model.layers.1.self_attn.q_proj"]
        assert [step.a.shape[0] for step in steps if isinstance(step, LoraTensors)] == ranks
        assert len(adapter.modules["model.layers.1.self_attn.v_proj"]) == 1
        assert adapter.tensors == 4 + 8


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
    steps = load_adapters(directory).modules
    modules = {m: step for m, [step] in steps.items() if isinstance(step, LoraTensors)}
    assert json.loads((directory / CONFIG).read_text())["use_rslora"] is True
    assert modules["model.layers.0.self_attn.q_proj"].scale == 8 / 4
    assert modules["model.layers.0.self_attn.q_proj"].rank == 16
    assert modules["model.layers.0.mlp.up_proj"].scale == 8 / 2
    assert modules["model.layers.1.mlp.up_proj"].scale == 5 / 2
