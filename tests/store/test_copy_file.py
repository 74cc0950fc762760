"""Pieces are found where the layout says, and nothing is believed that was not sealed."""

import errno
import hashlib
import os
import struct
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.durable import staged_file
from expertctl.store import copy_file
from expertctl.store.copy_file import (
    ALIGNED,
    CopyFile,
    CopyShape,
    Dropped,
    Piece,
    digest_of,
    pieces_in,
    write_copy,
)
from tests.store.copy_layout import END_BYTES, ENTRY_BYTES, file_bytes, in_file, table

OF = "a copy of something"
PIECE = 4 << 20
BLOCKS = CopyShape(rest=PIECE + 100, blocks=3, block=5000)


def data_of(shape: CopyShape) -> bytes:
    size = shape.rest + shape.blocks * shape.block
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def written(path: Path, shape: CopyShape, of: str = OF) -> bytes:
    with staged_file(path, mode=0o600) as write:
        write_copy(write, of, shape, pieces_in(memoryview(data_of(shape)), shape))
    return path.read_bytes()


@pytest.mark.parametrize(
    "shape",
    [
        CopyShape(rest=1),
        CopyShape(rest=PIECE + 1),
        CopyShape(rest=ALIGNED, blocks=2, block=ALIGNED),
        CopyShape(rest=100, blocks=4, block=64),
        BLOCKS,
    ],
    ids=str,
)
def test_every_byte_lies_where_the_layout_says(shape: CopyShape, tmp_path: Path) -> None:
    """The layout by its description: the rest, blocks at multiples of 4096, the table, the seal."""
    found, data = written(tmp_path / "copy", shape), data_of(shape)
    parts = [data[at : min(at + PIECE, shape.rest)] for at in range(0, shape.rest, PIECE)]
    blocks = [data[shape.rest + n * shape.block :][: shape.block] for n in range(shape.blocks)]
    expected = bytearray(data[: shape.rest])
    for block in blocks:
        expected += bytes(-len(expected) % 4096) + block
    expected += bytes(-len(expected) % 4096) if blocks else b""
    entries = ((len(part), hashlib.sha256(part).digest()) for part in parts + blocks)
    listed = b"".join(struct.pack("<Q32s", *entry) for entry in entries)
    sizes = struct.pack("<3Q", shape.rest, shape.blocks, shape.block)
    seal = hashlib.sha256(OF.encode() + b"\n" + sizes + listed).digest()
    assert found == expected + listed + sizes + seal
    assert len(found) == file_bytes(shape)


def test_a_block_may_be_shorter_than_it_is_in_memory(tmp_path: Path) -> None:
    """And is read as it is there; the next one begins behind it."""
    lengths = (5000, 1, 4096)
    contents = [bytes([number]) * length for number, length in enumerate(lengths)]
    rest = memoryview(data_of(BLOCKS))[: BLOCKS.rest]
    shape = CopyShape(rest=BLOCKS.rest)
    pieces = [*(Piece(p.memory, p.digest) for p in map(kept, pieces_in(rest, shape)))]
    pieces += [Piece(memoryview(c), hashlib.sha256(c).digest()) for c in contents]
    with staged_file(tmp_path / "copy", mode=0o600) as write:
        write_copy(write, OF, BLOCKS, pieces)
    copy = CopyFile.open(tmp_path / "copy", OF)
    assert copy is not None
    with closing(copy):
        assert copy.is_whole()
        first = BLOCKS.rest_pieces
        begins = [copy.begin_of(first + number) for number in range(3)]
        assert begins == [in_file(BLOCKS, first), begins[0] + 8192, begins[1] + 4096]
        for number, content in enumerate(contents):
            assert copy.size_of(first + number) == len(content)
            memory = memoryview(bytearray(len(content)))
            assert copy.fill(first + number, memory)
            assert memory == content


def kept(piece: Piece) -> Piece:
    return Piece(memoryview(bytes(piece.memory)), piece.digest)


def test_sizes_that_are_damaged_take_no_memory(tmp_path: Path) -> None:
    """They say that nearly all of a large file is a table, which is not read to find out."""
    size = 40 << 30
    with (tmp_path / "copy").open("wb") as stream:
        stream.truncate(size)
        stream.seek(size - END_BYTES)
        stream.write(struct.pack("<3Q", 1, (size - END_BYTES) // ENTRY_BYTES - 1, 4096))
    assert CopyFile.open(tmp_path / "copy", OF) is None


@pytest.mark.parametrize("lengths", [(BLOCKS.most + 1, 1, 1), (0, 1, 1)])
def test_a_block_of_no_length_or_too_long_a_one_opens_nothing(
    lengths: tuple[int, int, int], tmp_path: Path
) -> None:
    shape = CopyShape(rest=1, blocks=3, block=BLOCKS.block)
    contents = [b"?", *(bytes(length) for length in lengths)]
    pieces = [Piece(memoryview(c), hashlib.sha256(c).digest()) for c in contents]
    with staged_file(tmp_path / "copy", mode=0o600) as write:
        write_copy(write, OF, shape, pieces)
    assert CopyFile.open(tmp_path / "copy", OF) is None


def test_any_piece_is_read_alone(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS)
    copy = CopyFile.open(tmp_path / "copy", OF)
    assert copy is not None
    with closing(copy):
        assert copy.shape == BLOCKS
        for piece in reversed(range(BLOCKS.pieces)):
            place = BLOCKS.in_memory(piece)
            memory = memoryview(bytearray(place.stop - place.start))
            assert copy.fill(piece, memory)
            assert memory == data_of(BLOCKS)[place]
        assert copy.is_whole()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="every read goes through the cache")
def test_what_cannot_be_read_past_the_cache_is_read_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is not at fault where the system has no memory for that."""
    written(tmp_path / "copy", BLOCKS)
    copy = CopyFile.open(tmp_path / "copy", OF)
    assert copy is not None
    preadv, refused = os.preadv, []

    def short(handle: int, buffers: list[memoryview], offset: int) -> int:
        if handle != copy.handle:
            refused.append(offset)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return preadv(handle, buffers, offset)

    with closing(copy):
        copy.bypass_cache(tmp_path / "copy")
        monkeypatch.setattr(os, "preadv", short)
        memory = memoryview(bytearray(PIECE))
        assert copy.fill(0, memory)
        assert memory == data_of(BLOCKS)[:PIECE]
        assert refused == [0]
        monkeypatch.undo()


def test_what_is_wanted_no_more_is_not_read_to_its_end(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS)
    copy = CopyFile.open(tmp_path / "copy", OF)
    assert copy is not None
    answers = iter([True, False])
    with closing(copy):
        memory = memoryview(bytearray(PIECE))
        with pytest.raises(Dropped) as raised:
            copy.fill(0, memory, is_wanted=lambda: next(answers))
        half = PIECE // 2
        assert raised.value.read_bytes == half
        assert memory == data_of(BLOCKS)[:half] + bytes(half)
        assert copy.fill(0, memory, is_wanted=lambda: True)
        assert memory == data_of(BLOCKS)[:PIECE]


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_changed_byte_is_found_in_its_piece_or_opens_nothing(
    position: int, change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, shape = tmp_path_factory.mktemp("a") / "copy", CopyShape(rest=300, blocks=2, block=3000)
    content = bytearray(written(path, shape))
    position %= len(content)
    content[position] ^= change
    path.write_bytes(content)
    copy = CopyFile.open(path, OF)
    if position >= table(shape):
        assert copy is None
        return
    assert copy is not None
    with closing(copy):
        sound = [copy.fill(piece, room(shape, piece)) for piece in range(shape.pieces)]
    hit = [is_in(shape, piece, position) for piece in range(shape.pieces)]
    assert sound == [not is_hit for is_hit in hit]
    assert sum(hit) <= 1, "what fills up to the next block is nobody's"


def room(shape: CopyShape, piece: int) -> memoryview:
    place = shape.in_memory(piece)
    return memoryview(bytearray(place.stop - place.start))


def is_in(shape: CopyShape, piece: int, position: int) -> bool:
    begin = in_file(shape, piece)
    return begin <= position < begin + len(room(shape, piece))


def test_a_piece_that_was_sound_is_hashed_again_only_where_the_file_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, path, hashed = CopyShape(rest=64, blocks=2, block=64), tmp_path / "copy", list[bytes]()
    written(path, shape)

    def counted(memory: memoryview) -> bytes:
        hashed.append(bytes(memory))
        return digest_of(memory)

    monkeypatch.setattr(copy_file, "digest_of", counted)
    copy = CopyFile.open(path, OF)
    assert copy is not None
    with closing(copy):
        for _ in range(3):
            assert copy.fill(1, room(shape, 1))
        assert len(hashed) == 1
        before = path.stat()
        with path.open("r+b") as stream:
            stream.seek(in_file(shape, 1))
            stream.write(b"?")
        while path.stat().st_ctime_ns == before.st_ctime_ns:  # it ticks every few milliseconds
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        memory = room(shape, 1)
        assert not copy.fill(1, memory), "though size and time are as before"
        assert bytes(memory[:1]) == b"?"
        assert copy.fill(2, room(shape, 2)), "what was not touched is sound"


def test_what_is_written_while_a_piece_is_read_is_not_believed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read is over when the byte changes, and its edition is not looked at yet."""
    shape, path = CopyShape(rest=64, blocks=1, block=64), tmp_path / "copy"
    written(path, shape)
    os.utime(path, ns=(0, 0))
    copy = CopyFile.open(path, OF)
    assert copy is not None
    reads = CopyFile._read

    def read_then_write(self: CopyFile, memory: memoryview, begin: int) -> None:
        reads(self, memory, begin)
        with path.open("r+b") as stream:
            stream.seek(in_file(shape, 1))
            stream.write(b"?")

    with closing(copy):
        with monkeypatch.context() as once:
            once.setattr(CopyFile, "_read", read_then_write)
            assert copy.fill(1, room(shape, 1)), "what was read is sound"
        assert not copy.fill(1, room(shape, 1))


def test_what_is_sealed_for_something_else_opens_nothing(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS, "a copy of something else")
    assert CopyFile.open(tmp_path / "copy", OF) is None


@pytest.mark.parametrize("sizes", [(1 << 63, 0, 0), (0, 1 << 60, 1 << 60), (0, 1 << 62, 0)])
def test_sizes_that_are_not_those_of_the_file_allocate_nothing(
    sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    table = struct.pack("<3Q", *sizes)
    seal = hashlib.sha256(OF.encode() + b"\n" + table).digest()
    (tmp_path / "copy").write_bytes(table + seal)
    assert CopyFile.open(tmp_path / "copy", OF) is None


def test_a_file_that_is_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS)
    copy = CopyFile.open(tmp_path / "copy", OF)
    assert copy is not None
    with closing(copy):
        os.truncate(tmp_path / "copy", in_file(BLOCKS, BLOCKS.pieces - 1))
        with pytest.raises(OSError, match="cut short"):
            copy.fill(BLOCKS.pieces - 1, room(BLOCKS, BLOCKS.pieces - 1))
        assert copy.fill(0, room(BLOCKS, 0))


def test_fewer_pieces_than_a_shape_has_are_our_own_mistake(tmp_path: Path) -> None:
    pieces = [Piece(memoryview(b"x" * 64), b"x" * 32)]
    with staged_file(tmp_path / "copy") as write, pytest.raises(AssertionError):
        write_copy(write, OF, CopyShape(rest=64, blocks=1, block=64), pieces)
