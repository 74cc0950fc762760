"""Experts of a copy are those of the files, read or lent; what is damaged is not computed with."""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.cpu.tensor_packing import compact_expert
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.memory.host import MappedFile, allocate
from expertctl.engine.moe import expert_files
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import (
    CopiedExperts,
    compute_copy_shape,
    list_experts,
    open_copied_experts,
)
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine_config import MoeColdOption
from expertctl.package.model_config import read_model_config
from expertctl.store.quantised_cache import QuantisedCache
from expertctl.store.quantised_file import ALIGNED, QuantisedFile, QuantisedLayout
from tests.engine.cpu.test_decoder import scores
from tests.engine.moe.quantised_bases import (
    add_known_base,
    find_piece_offset,
    open_stored_experts,
    write_routed_base,
)

pytestmark = pytest.mark.all

SCHEMES = (Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4)
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28, 50, 1, 9, 33, 12, 4, 57, 21]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_routed_base(tmp_path / "base", num_experts=8)


@pytest.fixture
def copies(directory: Path, tmp_path: Path) -> QuantisedCache:
    return add_known_base(directory, tmp_path / "bases")


def keep(directory: Path, copies: QuantisedCache, scheme: Scheme) -> Path:
    """Have a copy made, and the system forget it."""
    config = read_model_config(directory)
    load_packed_base(directory, config, scheme, experts=False, copies=copies, cold="map")
    path = copies.path(scheme.value)
    if hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    return path


def reader_of(
    directory: Path, copies: QuantisedCache, scheme: Scheme, *, cold: MoeColdOption = "read"
) -> CopiedExperts:
    stored = open_stored_experts(directory, scheme)
    found = open_copied_experts(copies, read_model_config(directory), stored, cold=cold, blocks=0)
    assert found is not None
    return found


def packed(directory: Path, scheme: Scheme, layer: int, expert: int) -> bytes:
    """The block of an expert by the files of the base."""
    block = np.zeros(make_expert_shape(read_model_config(directory), scheme).nbytes, np.uint8)
    open_stored_experts(directory, scheme).read(layer, expert, block)
    return block.tobytes()


def as_copied(directory: Path, scheme: Scheme, layer: int, expert: int) -> bytes:
    """What a copy has of an expert: the same, or shorter."""
    block = packed(directory, scheme, layer, expert)
    if scheme is not Scheme.BFLOAT16:
        return block
    shape = make_expert_shape(read_model_config(directory), scheme)
    return compact_expert(np.frombuffer(block, np.uint8), shape).tobytes()


def room_for(reader: CopiedExperts, directory: Path, scheme: Scheme) -> Any:
    return np.empty(reader.compact or shape_of(directory, scheme).block_bytes, np.uint8)


def shape_of(directory: Path, scheme: Scheme) -> QuantisedLayout:
    return compute_copy_shape(read_model_config(directory), scheme)


def damage(path: Path, position: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(position)
        (byte,) = stream.read(1)
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))


@pytest.fixture
def lending(directory: Path, copies: QuantisedCache) -> Iterator[CopiedExperts]:
    keep(directory, copies, Scheme.INT8)
    reader = reader_of(directory, copies, Scheme.INT8, cold="map")
    if reader.cold != "map":
        pytest.skip("a system that does not tell what it holds of a file")
    with closing(reader):
        yield reader


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.value)
def test_each_expert_is_read_as_it_was_packed(
    scheme: Scheme, directory: Path, copies: QuantisedCache
) -> None:
    keep(directory, copies, scheme)
    (directory / "model.safetensors").rename(directory / "elsewhere")
    (directory / "elsewhere").rename(directory / "model.safetensors")
    with closing(reader_of(directory, copies, scheme)) as reader:
        block = room_for(reader, directory, scheme)
        assert bool(reader.compact) == (scheme is Scheme.BFLOAT16)
        for layer, expert in reversed(list_experts(read_model_config(directory))):
            expected = as_copied(directory, scheme, layer, expert)
            assert reader.read(layer, expert, block) == len(expected) <= block.nbytes
            assert block.tobytes()[: len(expected)] == expected
            assert reader.find_cached_address(layer, expert) is None, "nobody asked for a mapping"
        assert reader.cold == "read"
    assert copies.take_notes() == ()


def test_without_a_copy_there_is_no_such_reader(directory: Path, copies: QuantisedCache) -> None:
    stored = open_stored_experts(directory, Scheme.INT8)
    assert (
        open_copied_experts(copies, read_model_config(directory), stored, cold="map", blocks=0)
        is None
    )


def test_where_nothing_can_be_kept_that_is_told_and_files_are_read(
    directory: Path, copies: QuantisedCache
) -> None:
    folder = copies.path("int8").parent
    folder.write_text("mine")
    config, stored = read_model_config(directory), open_stored_experts(directory, Scheme.INT8)
    load_packed_base(directory, config, Scheme.INT8, experts=False, copies=copies)
    assert open_copied_experts(copies, config, stored, cold="read", blocks=0) is None
    told = f"{copies.path('int8')} cannot be written ({folder}: it is no folder)"
    assert copies.take_notes() == (f"{told}: tried again next time",)


@pytest.mark.parametrize("cold", ["read", "map", "direct"])
def test_a_damaged_expert_is_read_from_the_base_and_told_once(
    cold: MoeColdOption, directory: Path, copies: QuantisedCache
) -> None:
    shape, path = shape_of(directory, Scheme.INT4), keep(directory, copies, Scheme.INT4)
    for number in (3, 9):
        damage(path, find_piece_offset(shape, shape.rest_pieces + number) + shape.block_bytes // 2)
    block = np.empty(shape.block_bytes, np.uint8)
    with closing(reader_of(directory, copies, Scheme.INT4, cold=cold)) as reader:
        for number, (layer, expert) in enumerate(list_experts(read_model_config(directory))):
            lent = reader.find_cached_address(layer, expert)
            assert number not in (3, 9) or lent is None
            read = reader.read(layer, expert, block)
            assert block.tobytes() == packed(directory, Scheme.INT4, layer, expert)
            assert (read == block.nbytes) == (number not in (3, 9))
        assert reader.find_cached_address(*list_experts(read_model_config(directory))[3]) is None
        told = f"{path} is not used any more (it is damaged): made again next time"
        assert copies.take_notes() == (told,)
        assert not path.exists()
    keep(directory, copies, Scheme.INT4)
    copies.check_integrity()


@pytest.mark.parametrize("cold", ["read", "map", "direct"])
def test_a_damaged_compact_expert_is_made_compact_from_the_base(
    cold: MoeColdOption, directory: Path, copies: QuantisedCache
) -> None:
    keep(directory, copies, Scheme.BFLOAT16)
    experts, path = list_experts(read_model_config(directory)), copies.path("bfloat16")
    at = path.read_bytes().index(as_copied(directory, Scheme.BFLOAT16, *experts[5]))
    damage(path, at + 1000)
    with closing(reader_of(directory, copies, Scheme.BFLOAT16, cold=cold)) as reader:
        block = room_for(reader, directory, Scheme.BFLOAT16)
        for expert in experts[4:7]:
            lent = reader.find_cached_address(*expert)
            assert expert != experts[5] or lent is None
            reader.read(*expert, block)
            expected = as_copied(directory, Scheme.BFLOAT16, *expert)
            assert block.tobytes()[: len(expected)] == expected
        told = f"{path} is not used any more (it is damaged): made again next time"
        assert copies.take_notes() == (told,)


def test_who_wants_the_matrix_of_a_compact_expert_gets_it_from_the_base(
    directory: Path, copies: QuantisedCache
) -> None:
    keep(directory, copies, Scheme.BFLOAT16)
    with closing(reader_of(directory, copies, Scheme.BFLOAT16)) as reader:
        block = np.empty(shape_of(directory, Scheme.BFLOAT16).block_bytes, np.uint8)
        reader.read_whole(1, 3, block)
        assert block.tobytes() == packed(directory, Scheme.BFLOAT16, 1, 3)


@pytest.mark.parametrize("cold", ["read", "direct"])
def test_an_expert_that_the_disk_gives_otherwise_later_is_read_from_the_base(
    cold: MoeColdOption, directory: Path, copies: QuantisedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody wrote it, so it is not hashed again; whether it can be unpacked is looked at."""
    monkeypatch.setattr(QuantisedFile, "edition", (0, 0, 0))
    path, number = keep(directory, copies, Scheme.BFLOAT16), 5
    expert = list_experts(read_model_config(directory))[number]
    expected = as_copied(directory, Scheme.BFLOAT16, *expert)
    at = path.read_bytes().index(expected)
    with closing(reader_of(directory, copies, Scheme.BFLOAT16, cold=cold)) as reader:
        block = room_for(reader, directory, Scheme.BFLOAT16)
        reader.read(*expert, block)
        assert copies.take_notes() == ()
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(b"\xff" * 4096)
        reader.read(*expert, block)
        assert block.tobytes()[: len(expected)] == expected
        told = f"{path} is not used any more (it is damaged): made again next time"
        assert copies.take_notes() == (told,)


@pytest.mark.parametrize("cold", ["read", "direct", "map"])
def test_an_expert_that_is_written_over_after_it_was_read_is_read_from_the_base(
    cold: MoeColdOption, directory: Path, copies: QuantisedCache
) -> None:
    shape, path = shape_of(directory, Scheme.INT8), keep(directory, copies, Scheme.INT8)
    os.utime(path, ns=(0, 0))
    block = np.empty(shape.block_bytes, np.uint8)
    with closing(reader_of(directory, copies, Scheme.INT8, cold=cold)) as reader:
        reader.read(0, 5, block)
        lent = reader.find_cached_address(0, 5)
        assert lent is None or cold == "map"
        damage(path, find_piece_offset(shape, shape.rest_pieces + 5))
        assert reader.find_cached_address(0, 5) is None
        reader.read(0, 5, block)
        assert block.tobytes() == packed(directory, Scheme.INT8, 0, 5)
        told = f"{path} is not used any more (it is damaged): made again next time"
        assert copies.take_notes() == (told,)


def test_a_copy_with_an_expert_that_is_no_shorter_is_used_for_none_and_that_is_told(
    directory: Path, copies: QuantisedCache
) -> None:
    """Its weights are noise, so blocks are as large as they are computed."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for part in ("gate", "up", "down"):
        name = f"model.layers.0.mlp.experts.2.{part}_proj.weight"
        noise = np.random.default_rng(0).integers(0, 1 << 16, tensors[name].shape, np.uint16)
        noise &= 0xBFFF  # all of them are numbers
        tensors[name] = torch.from_numpy(noise.astype(np.int32) << 16).view(torch.float32)
    save_file(tensors, path)
    copies = add_known_base(directory, path.parent.parent / "others")
    keep(directory, copies, Scheme.BFLOAT16)
    with closing(reader_of(directory, copies, Scheme.BFLOAT16, cold="map")) as reader:
        assert reader.compact == 0
        block = np.empty(shape_of(directory, Scheme.BFLOAT16).block_bytes, np.uint8)
        for expert in list_experts(read_model_config(directory))[:4]:
            reader.read(*expert, block)
            assert block.tobytes() == packed(directory, Scheme.BFLOAT16, *expert)
            assert reader.find_cached_address(*expert) is None
    told = f"{copies.path('bfloat16')} is not used: an expert is longer in it than unpacked"
    assert copies.take_notes() == (told,)


def test_a_copy_that_is_cut_short_while_it_is_open_is_told_and_not_waited_for(
    directory: Path, copies: QuantisedCache
) -> None:
    shape, path = shape_of(directory, Scheme.INT8), keep(directory, copies, Scheme.INT8)
    block = np.empty(shape.block_bytes, np.uint8)
    with closing(reader_of(directory, copies, Scheme.INT8, cold="map")) as reader:
        os.truncate(
            path, find_piece_offset(shape, shape.rest_pieces + 4) // mmap.PAGESIZE * mmap.PAGESIZE
        )
        for layer, expert in list_experts(read_model_config(directory)):
            reader.read(layer, expert, block)
            assert block.tobytes() == packed(directory, Scheme.INT8, layer, expert)
            address = reader.find_cached_address(layer, expert)
            assert address is None or ctypes.string_at(address, block.nbytes) == block.tobytes()
        assert reader.find_cached_address(*list_experts(read_model_config(directory))[-1]) is None
        assert "it is cut short" in copies.take_notes()[0]


def test_an_expert_is_mapped_when_all_of_it_is_in_the_page_cache(
    directory: Path, lending: CopiedExperts
) -> None:
    block = np.empty(shape_of(directory, Scheme.INT8).block_bytes, np.uint8)
    if lending.find_cached_address(1, 3) is not None:
        pytest.skip("a file system that holds all it has in memory")
    lending.read(1, 3, block)
    address = lending.find_cached_address(1, 3)
    assert address is not None
    assert address % 64 == 0, "where kernels may begin to read"
    assert ctypes.string_at(address, block.nbytes) == packed(directory, Scheme.INT8, 1, 3)
    assert lending.find_cached_address(1, 3) == address


def test_what_is_mapped_was_checked_where_it_lies(
    directory: Path, copies: QuantisedCache, lending: CopiedExperts
) -> None:
    """Not where it was read to before."""
    shape, path = shape_of(directory, Scheme.INT8), copies.path("int8")
    block = np.empty(shape.block_bytes, np.uint8)
    lending.read(0, 5, block)
    damage(path, find_piece_offset(shape, shape.rest_pieces + 5))
    assert lending.find_cached_address(0, 5) is None
    assert "it is damaged" in copies.take_notes()[0]
    assert not path.exists()


def test_who_cannot_map_a_copy_reads_it_and_says_so(
    directory: Path, copies: QuantisedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> MappedFile:
        raise OSError(12, "Cannot allocate memory")

    path = keep(directory, copies, Scheme.INT8)
    monkeypatch.setattr(MappedFile, "map_file", refuse)
    with closing(reader_of(directory, copies, Scheme.INT8, cold="map")) as reader:
        block = np.empty(shape_of(directory, Scheme.INT8).block_bytes, np.uint8)
        assert (reader.cold, reader.find_cached_address(0, 0)) == ("read", None)
        assert reader.read(0, 0, block) == block.nbytes
    told = f"{path} is not mapped (Cannot allocate memory): read through the page cache"
    assert copies.take_notes() == (told,)


def test_who_cannot_read_past_the_cache_reads_through_it_and_says_so_where_it_was_wished(
    directory: Path, copies: QuantisedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keep(directory, copies, Scheme.INT8)
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.setattr(expert_files, "find_unused_bytes", lambda: 0)
    for wish in ("auto", "direct"):
        assert copies.take_notes() == ()
        with closing(reader_of(directory, copies, Scheme.INT8, cold=wish)) as reader:
            assert reader.cold == "read"
    why = f"({os.strerror(errno.ENOTSUP)}): read through the page cache"
    told = f"{path} is not read with direct I/O {why}"
    assert copies.take_notes() == (told,)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="every read goes through the cache")
def test_what_is_read_past_the_cache_is_not_in_it(directory: Path, copies: QuantisedCache) -> None:
    shape = shape_of(directory, Scheme.INT8)
    keep(directory, copies, Scheme.INT8)
    block = np.frombuffer(allocate(shape.block_bytes), np.uint8)
    whole = shape.block_bytes // ALIGNED * ALIGNED
    assert whole, "else nothing is aligned"
    held = []
    for cold in ("direct", "read"):
        with closing(reader_of(directory, copies, Scheme.INT8, cold=cold)) as reader:
            assert reader.cold == cold
            reader.read(1, 3, block)
            assert block.tobytes() == packed(directory, Scheme.INT8, 1, 3)
        with copies.path("int8").open("rb") as stream:
            mapped = MappedFile.map_file(stream.fileno())
            assert mapped is not None
            piece = shape.rest_pieces + list_experts(read_model_config(directory)).index((1, 3))
            held.append(mapped.is_cached(find_piece_offset(shape, piece), whole))
            mapped.close()
    if held[0] and held[1]:
        pytest.skip("a file system that holds all it has in memory")
    assert held == [False, True]


@pytest.mark.parametrize(("free", "cold"), [(0.4, "direct"), (0.6, "read"), (None, "read")])
def test_nobody_reads_through_a_cache_that_could_not_keep_half_of_what_is_left(
    free: float | None,
    cold: str,
    directory: Path,
    copies: QuantisedCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep(directory, copies, Scheme.INT8)
    shape, stored = shape_of(directory, Scheme.INT8), open_stored_experts(directory, Scheme.INT8)
    assert shape.blocks == 24
    there = None if free is None else int((6 + 18 * free) * shape.block_bytes)
    monkeypatch.setattr(expert_files, "find_unused_bytes", lambda: there)
    found = open_copied_experts(copies, read_model_config(directory), stored, cold="auto", blocks=6)
    assert found is not None
    with closing(found):
        assert found.cold == (cold if hasattr(os, "O_DIRECT") else "read")


@pytest.mark.parametrize("cold", ["read", "map", "direct"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("slots", [0, 2])
def test_scores_have_the_bits_of_a_base_that_is_in_memory_whole(
    slots: int,
    scheme: Scheme,
    cold: MoeColdOption,
    directory: Path,
    copies: QuantisedCache,
    crew: ThreadPool,
) -> None:
    config = read_model_config(directory)
    routed = config.experts
    assert routed is not None
    expected = scores(
        PackedDecoder(load_packed_base(directory, config, scheme), crew), IDS, prefill=9
    )
    keep(directory, copies, scheme)
    trunk = load_packed_base(directory, config, scheme, experts=False, copies=copies, cold="map")
    seats = [LayerSlots(experts=routed.count, capacity=slots) for _ in routed.layers]
    reader = reader_of(directory, copies, scheme, cold=cold)
    memory = ExpertMemory(
        replace(make_expert_shape(config, scheme), compact_bytes=reader.compact),
        layers=len(routed.layers),
        experts=routed.count,
        blocks=len(routed.layers) * slots + routed.count - slots,
    )
    with (
        closing(reader),
        closing(ExpertCache(memory, reader, layer_numbers=routed.layers, slots=seats)) as cache,
    ):
        decoder = PackedDecoder(trunk, crew, experts=cache)
        for _ in range(3):
            assert torch.equal(scores(decoder, IDS, prefill=9), expected)
            cache.check_integrity()
        assert (cache.activity().mapped > 0) == (reader.cold == "map")
    assert copies.take_notes() == ()
