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

from expertctl.files import open_staged_file
from expertctl.store import quantised_file
from expertctl.store.quantised_file import (
    ALIGNED,
    QuantisedFile,
    QuantisedLayout,
    QuantisedPiece,
    ReadCancelled,
    hash_piece,
    iterate_pieces,
    write_quantised,
)
from tests.engine.moe.quantised_bases import (
    END_BYTES,
    ENTRY_BYTES,
    compute_file_size,
    find_piece_offset,
    find_table_offset,
)

OF = "a copy of something"
PIECE = 4 << 20
BLOCKS = QuantisedLayout(rest_bytes=PIECE + 100, blocks=3, block_bytes=5000)


def data_of(shape: QuantisedLayout) -> bytes:
    size = shape.rest_bytes + shape.blocks * shape.block_bytes
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def written(path: Path, shape: QuantisedLayout, of: str = OF) -> bytes:
    with open_staged_file(path, mode=0o600) as write:
        write_quantised(write, of, shape, iterate_pieces(memoryview(data_of(shape)), shape))
    return path.read_bytes()


@pytest.mark.parametrize(
    "shape",
    [
        QuantisedLayout(rest_bytes=1),
        QuantisedLayout(rest_bytes=PIECE + 1),
        QuantisedLayout(rest_bytes=ALIGNED, blocks=2, block_bytes=ALIGNED),
        QuantisedLayout(rest_bytes=100, blocks=4, block_bytes=64),
        BLOCKS,
    ],
    ids=str,
)
def test_every_byte_lies_where_the_layout_says(shape: QuantisedLayout, tmp_path: Path) -> None:
    """The layout by its description: the rest, blocks at multiples of 4096, the table, the seal."""
    found, data = written(tmp_path / "copy", shape), data_of(shape)
    parts = [
        data[at : min(at + PIECE, shape.rest_bytes)] for at in range(0, shape.rest_bytes, PIECE)
    ]
    blocks = [
        data[shape.rest_bytes + n * shape.block_bytes :][: shape.block_bytes]
        for n in range(shape.blocks)
    ]
    expected = bytearray(data[: shape.rest_bytes])
    for block in blocks:
        expected += bytes(-len(expected) % 4096) + block
    expected += bytes(-len(expected) % 4096) if blocks else b""
    entries = ((len(part), hashlib.sha256(part).digest()) for part in parts + blocks)
    listed = b"".join(struct.pack("<Q32s", *entry) for entry in entries)
    sizes = struct.pack("<3Q", shape.rest_bytes, shape.blocks, shape.block_bytes)
    seal = hashlib.sha256(OF.encode() + b"\n" + sizes + listed).digest()
    assert found == expected + listed + sizes + seal
    assert len(found) == compute_file_size(shape)


def test_a_block_may_be_shorter_than_it_is_in_memory(tmp_path: Path) -> None:
    """And is read as it is there; the next one begins behind it."""
    lengths = (5000, 1, 4096)
    contents = [bytes([number]) * length for number, length in enumerate(lengths)]
    rest = memoryview(data_of(BLOCKS))[: BLOCKS.rest_bytes]
    shape = QuantisedLayout(rest_bytes=BLOCKS.rest_bytes)
    pieces = [*(QuantisedPiece(p.memory, p.digest) for p in map(kept, iterate_pieces(rest, shape)))]
    pieces += [QuantisedPiece(memoryview(c), hashlib.sha256(c).digest()) for c in contents]
    with open_staged_file(tmp_path / "copy", mode=0o600) as write:
        write_quantised(write, OF, BLOCKS, pieces)
    copy = QuantisedFile.open(tmp_path / "copy", OF)
    assert copy is not None
    with closing(copy):
        assert copy.is_whole()
        first = BLOCKS.rest_pieces
        begins = [copy.piece_begin(first + number) for number in range(3)]
        assert begins == [find_piece_offset(BLOCKS, first), begins[0] + 8192, begins[1] + 4096]
        for number, content in enumerate(contents):
            assert copy.piece_size(first + number) == len(content)
            memory = memoryview(bytearray(len(content)))
            assert copy.read_piece(first + number, memory)
            assert memory == content


def kept(piece: QuantisedPiece) -> QuantisedPiece:
    return QuantisedPiece(memoryview(bytes(piece.memory)), piece.digest)


def test_sizes_that_are_damaged_take_no_memory(tmp_path: Path) -> None:
    """They say that nearly all of a large file is a table, which is not read to find out."""
    size = 40 << 30
    with (tmp_path / "copy").open("wb") as stream:
        stream.truncate(size)
        stream.seek(size - END_BYTES)
        stream.write(struct.pack("<3Q", 1, (size - END_BYTES) // ENTRY_BYTES - 1, 4096))
    assert QuantisedFile.open(tmp_path / "copy", OF) is None


@pytest.mark.parametrize("lengths", [(BLOCKS.max_block_bytes + 1, 1, 1), (0, 1, 1)])
def test_a_block_of_no_length_or_too_long_a_one_opens_nothing(
    lengths: tuple[int, int, int], tmp_path: Path
) -> None:
    shape = QuantisedLayout(rest_bytes=1, blocks=3, block_bytes=BLOCKS.block_bytes)
    contents = [b"?", *(bytes(length) for length in lengths)]
    pieces = [QuantisedPiece(memoryview(c), hashlib.sha256(c).digest()) for c in contents]
    with open_staged_file(tmp_path / "copy", mode=0o600) as write:
        write_quantised(write, OF, shape, pieces)
    assert QuantisedFile.open(tmp_path / "copy", OF) is None


def test_any_piece_is_read_alone(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS)
    copy = QuantisedFile.open(tmp_path / "copy", OF)
    assert copy is not None
    with closing(copy):
        assert copy.shape == BLOCKS
        for piece in reversed(range(BLOCKS.pieces)):
            place = BLOCKS.memory_span(piece)
            memory = memoryview(bytearray(place.stop - place.start))
            assert copy.read_piece(piece, memory)
            assert memory == data_of(BLOCKS)[place]
        assert copy.is_whole()


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="every read goes through the cache")
def test_what_cannot_be_read_past_the_cache_is_read_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is not at fault where the system has no memory for that."""
    written(tmp_path / "copy", BLOCKS)
    copy = QuantisedFile.open(tmp_path / "copy", OF)
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
        assert copy.read_piece(0, memory)
        assert memory == data_of(BLOCKS)[:PIECE]
        assert refused == [0]
        monkeypatch.undo()


def test_what_is_wanted_no_more_is_not_read_to_its_end(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS)
    copy = QuantisedFile.open(tmp_path / "copy", OF)
    assert copy is not None
    answers = iter([True, False])
    with closing(copy):
        memory = memoryview(bytearray(PIECE))
        with pytest.raises(ReadCancelled) as raised:
            copy.read_piece(0, memory, is_wanted=lambda: next(answers))
        half = PIECE // 2
        assert raised.value.read_bytes == half
        assert memory == data_of(BLOCKS)[:half] + bytes(half)
        assert copy.read_piece(0, memory, is_wanted=lambda: True)
        assert memory == data_of(BLOCKS)[:PIECE]


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0, 10_000), change=st.integers(1, 255))
def test_a_changed_byte_is_found_in_its_piece_or_opens_nothing(
    position: int, change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, shape = (
        tmp_path_factory.mktemp("a") / "copy",
        QuantisedLayout(rest_bytes=300, blocks=2, block_bytes=3000),
    )
    content = bytearray(written(path, shape))
    position %= len(content)
    content[position] ^= change
    path.write_bytes(content)
    copy = QuantisedFile.open(path, OF)
    if position >= find_table_offset(shape):
        assert copy is None
        return
    assert copy is not None
    with closing(copy):
        sound = [copy.read_piece(piece, room(shape, piece)) for piece in range(shape.pieces)]
    hit = [is_in(shape, piece, position) for piece in range(shape.pieces)]
    assert sound == [not is_hit for is_hit in hit]
    assert sum(hit) <= 1, "what fills up to the next block is nobody's"


def room(shape: QuantisedLayout, piece: int) -> memoryview:
    place = shape.memory_span(piece)
    return memoryview(bytearray(place.stop - place.start))


def is_in(shape: QuantisedLayout, piece: int, position: int) -> bool:
    begin = find_piece_offset(shape, piece)
    return begin <= position < begin + len(room(shape, piece))


def test_a_piece_that_was_sound_is_hashed_again_only_where_the_file_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, path, hashed = (
        QuantisedLayout(rest_bytes=64, blocks=2, block_bytes=64),
        tmp_path / "copy",
        list[bytes](),
    )
    written(path, shape)

    def counted(memory: memoryview) -> bytes:
        hashed.append(bytes(memory))
        return hash_piece(memory)

    monkeypatch.setattr(quantised_file, "hash_piece", counted)
    copy = QuantisedFile.open(path, OF)
    assert copy is not None
    with closing(copy):
        for _ in range(3):
            assert copy.read_piece(1, room(shape, 1))
        assert len(hashed) == 1
        before = path.stat()
        with path.open("r+b") as stream:
            stream.seek(find_piece_offset(shape, 1))
            stream.write(b"?")
        while path.stat().st_ctime_ns == before.st_ctime_ns:  # it ticks every few milliseconds
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        memory = room(shape, 1)
        assert not copy.read_piece(1, memory), "though size and time are as before"
        assert bytes(memory[:1]) == b"?"
        assert copy.read_piece(2, room(shape, 2)), "what was not touched is sound"


def test_what_is_written_while_a_piece_is_read_is_not_believed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read is over when the byte changes, and its edition is not looked at yet."""
    shape, path = QuantisedLayout(rest_bytes=64, blocks=1, block_bytes=64), tmp_path / "copy"
    written(path, shape)
    os.utime(path, ns=(0, 0))
    copy = QuantisedFile.open(path, OF)
    assert copy is not None
    reads = QuantisedFile._read

    def read_then_write(self: QuantisedFile, memory: memoryview, begin: int) -> None:
        reads(self, memory, begin)
        with path.open("r+b") as stream:
            stream.seek(find_piece_offset(shape, 1))
            stream.write(b"?")

    with closing(copy):
        with monkeypatch.context() as once:
            once.setattr(QuantisedFile, "_read", read_then_write)
            assert copy.read_piece(1, room(shape, 1)), "what was read is sound"
        assert not copy.read_piece(1, room(shape, 1))


def test_what_is_sealed_for_something_else_opens_nothing(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS, "a copy of something else")
    assert QuantisedFile.open(tmp_path / "copy", OF) is None


@pytest.mark.parametrize("sizes", [(1 << 63, 0, 0), (0, 1 << 60, 1 << 60), (0, 1 << 62, 0)])
def test_sizes_that_are_not_those_of_the_file_allocate_nothing(
    sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    table = struct.pack("<3Q", *sizes)
    seal = hashlib.sha256(OF.encode() + b"\n" + table).digest()
    (tmp_path / "copy").write_bytes(table + seal)
    assert QuantisedFile.open(tmp_path / "copy", OF) is None


def test_a_file_that_is_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    written(tmp_path / "copy", BLOCKS)
    copy = QuantisedFile.open(tmp_path / "copy", OF)
    assert copy is not None
    with closing(copy):
        os.truncate(tmp_path / "copy", find_piece_offset(BLOCKS, BLOCKS.pieces - 1))
        with pytest.raises(OSError, match="cut short"):
            copy.read_piece(BLOCKS.pieces - 1, room(BLOCKS, BLOCKS.pieces - 1))
        assert copy.read_piece(0, room(BLOCKS, 0))


def test_fewer_pieces_than_a_shape_has_are_our_own_mistake(tmp_path: Path) -> None:
    pieces = [QuantisedPiece(memoryview(b"x" * 64), b"x" * 32)]
    with open_staged_file(tmp_path / "copy") as write, pytest.raises(AssertionError):
        write_quantised(write, OF, QuantisedLayout(rest_bytes=64, blocks=1, block_bytes=64), pieces)
