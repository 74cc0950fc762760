"""A copy of a base of which only a part is ever in memory: the bytes of one that was whole."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.packed_base import PackedBase, make_expert_shape, packed_base_bytes
from expertctl.engine.cpu.tensor_packing import compact_expert
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.moe.expert_files import ExpertStream, compute_copy_shape, list_experts
from expertctl.errors import BaseMismatchError, InvalidPackageError
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import read_model_config
from expertctl.reference import Progress, ignore_progress
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import QuantisedCache
from tests.engine.moe.quantised_bases import (
    add_known_base,
    open_stored_experts,
    write_routed_base,
    write_stacked_base,
)

SCHEMES = (Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4)
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "one by one": write_routed_base,
    "stacked": write_stacked_base,
    "of mixtral": lambda directory: write_routed_base(directory, arch="mixtral"),
    "some layers, in half the bytes": lambda directory: write_routed_base(
        directory, arch="dots1", dtype="bfloat16", shards=2
    ),
}


def load(
    directory: Path,
    scheme: Scheme,
    copies: QuantisedCache | None = None,
    *,
    experts: bool = False,
    progress: Progress = ignore_progress,
) -> PackedBase:
    return load_packed_base(
        directory,
        read_model_config(directory),
        scheme,
        experts=experts,
        copies=copies,
        cold="map",
        progress=progress,
    )


def bytes_of(base: PackedBase) -> bytes:
    parts: list[Any] = list(base.tensor_places().values())
    arrays = [array for part in parts for array in (part, *fields(part)) if is_array(array)]
    return b"".join(array.tobytes() for array in arrays)


def fields(part: Any) -> tuple[Any, ...]:
    return () if is_array(part) else (part.data, part.scales)


def is_array(part: Any) -> bool:
    return isinstance(part, np.ndarray)


@pytest.fixture(params=list(LAYOUTS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return LAYOUTS[request.param](tmp_path / "base")


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.value)
def test_every_block_is_what_is_packed_of_the_files(
    scheme: Scheme, directory: Path, tmp_path: Path
) -> None:
    config, copies = read_model_config(directory), add_known_base(directory, tmp_path / "bases")
    load(directory, scheme, copies)
    shape, stored = compute_copy_shape(config, scheme), open_stored_experts(directory, scheme)
    copy = copies.open(scheme.value, shape)
    assert copy is not None
    assert shape.blocks == len(list_experts(config)) > 0
    with closing(copy):
        for number, (layer, expert) in enumerate(list_experts(config)):
            ours = np.zeros(copy.piece_size(shape.rest_pieces + number), np.uint8)
            theirs = np.zeros(shape.block_bytes, np.uint8)
            assert copy.read_piece(shape.rest_pieces + number, ours.data)
            stored.read(layer, expert, theirs)
            if scheme is Scheme.BFLOAT16:
                theirs = compact_expert(theirs, stored.shape)
            np.testing.assert_array_equal(ours, theirs)
        taken = sum(map(copy.piece_size, range(shape.rest_pieces, shape.pieces)))
    stream = ExpertStream(
        read_base_tensors(directory, config), config, scheme, progress=ignore_progress
    )
    assert 0.6 * taken <= stream.min_bytes <= taken
    assert scheme is Scheme.BFLOAT16 or stream.min_bytes == taken
    assert copies.take_notes() == ()
    copies.check_integrity()


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.INT4], ids=lambda scheme: scheme.value)
def test_it_is_the_copy_of_a_base_that_is_in_memory_whole(
    scheme: Scheme, directory: Path, tmp_path: Path
) -> None:
    copies = add_known_base(directory, tmp_path / "bases")
    path = copies.path(scheme.value)
    plain = load(directory, scheme, experts=True)
    load(directory, scheme, copies)
    streamed = path.read_bytes()
    again = load(directory, scheme, copies, experts=True)
    assert again.read_bytes == plain.nbytes, "of the copy"
    assert bytes_of(again) == bytes_of(plain)
    path.unlink()
    load(directory, scheme, copies, experts=True)
    assert path.read_bytes() == streamed


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.value)
def test_who_leaves_experts_on_the_disk_reads_only_the_rest_the_next_time(
    scheme: Scheme, tmp_path: Path
) -> None:
    directory = write_routed_base(tmp_path / "base")
    config, copies = read_model_config(directory), add_known_base(directory, tmp_path / "bases")
    seen: list[int] = []
    first = load(directory, scheme, copies, progress=seen.append)
    assert first.read_bytes == sum(4 * int(np.prod(s)) for s in config.tensor_shapes().values())
    assert sum(seen) == packed_base_bytes(config, scheme)
    seen.clear()
    again = load(directory, scheme, copies, progress=seen.append)
    assert again.read_bytes == sum(seen) == packed_base_bytes(config, scheme, experts=False)
    assert bytes_of(again) == bytes_of(first) == bytes_of(load(directory, scheme))
    assert again.warnings == first.warnings


def test_floats_are_kept_only_where_they_are_shorter_or_to_be_mapped(tmp_path: Path) -> None:
    directory = write_routed_base(tmp_path / "base")
    config, copies = read_model_config(directory), add_known_base(directory, tmp_path / "bases")
    for scheme in (Scheme.FLOAT32, Scheme.FLOAT16):
        load_packed_base(directory, config, scheme, experts=False, copies=copies)
        assert not copies.path(scheme.value).exists()
    load_packed_base(directory, config, Scheme.BFLOAT16, copies=copies)
    assert not copies.path("bfloat16").exists(), "all experts are in memory"
    load_packed_base(directory, config, Scheme.BFLOAT16, experts=False, copies=copies)
    size = copies.path("bfloat16").stat().st_size
    assert size < packed_base_bytes(config, Scheme.BFLOAT16)


def test_an_expert_that_changed_unseen_leaves_no_copy(tmp_path: Path) -> None:
    directory = write_routed_base(tmp_path / "base")
    copies = add_known_base(directory, tmp_path / "bases")
    (path,) = directory.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    at = content.index(b"model.layers.2.mlp.experts.3.up_proj.weight")
    begin = int(content[content.index(b"data_offsets", at) :].partition(b"[")[2].split(b",")[0])
    content[8 + int.from_bytes(content[:8], "little") + begin] ^= 1
    path.write_bytes(content)
    for scheme in SCHEMES:
        with pytest.raises(BaseMismatchError, match="its weights are sha256:"):
            load(directory, scheme, copies)
        assert list(copies.path(scheme.value).parent.iterdir()) == []


def test_a_base_that_is_cut_short_meanwhile_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    directory = write_routed_base(tmp_path / "base")
    copies = add_known_base(directory, tmp_path / "bases")
    (path,) = directory.glob("*.safetensors")
    rest = packed_base_bytes(read_model_config(directory), Scheme.INT8, experts=False)
    counted: list[int] = []

    def cut(size: int) -> None:
        counted.append(size)
        if sum(counted) >= rest:
            os.truncate(path, path.stat().st_size // 2)

    with pytest.raises(InvalidPackageError, match="changed while"):
        load(directory, Scheme.INT8, copies, progress=cut)
    assert list(copies.path("int8").parent.iterdir()) == []


def test_a_disk_without_room_for_a_copy_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_routed_base(tmp_path / "base")
    config, copies = read_model_config(directory), add_known_base(directory, tmp_path / "bases")
    most, write_some = packed_base_bytes(config, Scheme.INT8, experts=False) + 5000, os.write
    written: list[int] = []

    def write_until_full(handle: int, data: memoryview) -> int:
        if sum(written) > most:
            raise OSError(28, "No space left on device")
        written.append(write_some(handle, data))
        return written[-1]

    monkeypatch.setattr(os, "write", write_until_full)
    found = load(directory, Scheme.INT8, copies)
    assert bytes_of(found) == bytes_of(load(directory, Scheme.INT8))
    (note,) = copies.take_notes()
    assert "cannot be written (No space left on device): tried again next time" in note
    assert list(copies.path("int8").parent.iterdir()) == []


def test_a_base_that_was_removed_meanwhile_is_run_all_the_same(tmp_path: Path) -> None:
    directory, bases = write_routed_base(tmp_path / "base"), BaseStore(tmp_path / "bases")
    base = bases.add(directory)
    copies = QuantisedCache(bases, base)
    bases.remove(base)
    load(directory, Scheme.INT8, copies)
    assert "removed or replaced meanwhile" in copies.take_notes()[0]


def test_blocks_are_as_large_as_the_kernels_say(directory: Path) -> None:
    config = read_model_config(directory)
    for scheme in SCHEMES:
        shape = compute_copy_shape(config, scheme)
        assert shape.block_bytes == make_expert_shape(config, scheme).nbytes
        assert shape.rest_bytes + shape.blocks * shape.block_bytes == packed_base_bytes(
            config, scheme
        )
