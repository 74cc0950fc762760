"""The file of a quantised copy: its layout, how it is written, and `QuantisedFile`, which reads it.

::

    rest      everything but the routed experts, as it lies in memory
    blocks    the routed experts, by layer and number, as they lie in memory or shorter
    table     for each piece (4 MiB of the rest, or a block): its size, 8 bytes, and its sha256
    sizes     the size of the rest, the number of blocks, the size of one in memory, 8 bytes each
    seal      a sha256 over what this is a copy of, the sizes and the table

Each block begins at the next multiple of 4096, and so does the table behind blocks. The file is
written from beginning to end, so only one piece of it is in memory. The seal is checked when a file
is opened; a piece is checked against the table when it is first read, where it is used, and again
when the file was written since.
"""

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from expertctl.files import WriteBytes
from expertctl.reference import Progress, ignore_progress
from expertctl.store.base_folder import check_private_folder

ALIGNED = 4096
"""Blocks begin at multiples of this, so that they can be mapped and share no page."""
_PIECE_BYTES = 4 << 20
_SIZES = struct.Struct("<QQQ")
_DIGEST_BYTES = hashlib.sha256().digest_size
_ENTRY = struct.Struct(f"<Q{_DIGEST_BYTES}s")
_END_BYTES = _SIZES.size + _DIGEST_BYTES
_THREADS = 4
_SLACK = 32
_READ_BYTES = 2 << 20
"""How many bytes are read between two checks of ``is_wanted``."""


class ReadCancelled(Exception):  # noqa: N818 - nothing went wrong
    """A read that is no longer wanted was ended after ``read_bytes`` bytes."""

    def __init__(self, read_bytes: int) -> None:
        """Store the number of bytes."""
        super().__init__(read_bytes)
        self.read_bytes = read_bytes


def always_wanted() -> bool:
    """Return True: the bytes are wanted."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayout:
    """The sizes of a copy: the bytes of the rest, and the number of blocks of routed experts."""

    rest_bytes: int
    blocks: int = 0
    block_bytes: int = 0
    """The size of one block in memory."""

    @property
    def rest_pieces(self) -> int:
        """The number of pieces before the first block."""
        return -(-self.rest_bytes // _PIECE_BYTES)

    @property
    def max_block_bytes(self) -> int:
        """The largest size of a block in the file: an incompressible one may grow a little."""
        return self.block_bytes + self.block_bytes // _SLACK + 2 * ALIGNED

    @property
    def pieces(self) -> int:
        """The number of all pieces."""
        return self.rest_pieces + self.blocks

    def memory_span(self, piece: int) -> slice:
        """Return the span of a piece in a memory that holds all pieces consecutively."""
        if piece < self.rest_pieces:
            return slice(piece * _PIECE_BYTES, min(self.rest_bytes, (piece + 1) * _PIECE_BYTES))
        begin = self.rest_bytes + (piece - self.rest_pieces) * self.block_bytes
        return slice(begin, begin + self.block_bytes)

    def count_pieces_in(self, memory: memoryview) -> int:
        """Return how many pieces fit into a memory: those of the rest, or all."""
        assert len(memory) in (self.rest_bytes, self.rest_bytes + self.blocks * self.block_bytes)
        return self.rest_pieces if len(memory) == self.rest_bytes else self.pieces


@dataclass(frozen=True, slots=True)
class QuantisedPiece:
    """The bytes of a piece, valid until the next piece is taken, and their sha256."""

    memory: memoryview
    digest: bytes


def iterate_pieces(memory: memoryview, shape: QuantisedLayout) -> Generator[QuantisedPiece]:
    """Yield the pieces of a base in memory, hashed in several threads."""

    def hashed(number: int) -> QuantisedPiece:
        piece = memory[shape.memory_span(number)]
        return QuantisedPiece(piece, hash_piece(piece))

    pool = ThreadPoolExecutor(_thread_count())
    try:
        yield from pool.map(hashed, range(shape.count_pieces_in(memory)))
    finally:
        pool.shutdown(cancel_futures=True)


def write_quantised(
    write: WriteBytes, source: str, shape: QuantisedLayout, pieces: Iterable[QuantisedPiece]
) -> None:
    """Write a copy of ``source``; ``pieces`` are all pieces of its layout, in order."""
    table, at = bytearray(), 0
    for piece in pieces:
        write(memoryview(bytes(_align_up(at) - at)))
        write(piece.memory)
        at = _align_up(at) + len(piece.memory)
        table += _ENTRY.pack(len(piece.memory), piece.digest)
    assert len(table) == shape.pieces * _ENTRY.size
    sizes = _pack_sizes(shape)
    gap = _find_table(shape, at) - at
    write(memoryview(bytes(gap) + table + sizes + _compute_seal(source, sizes, table)))


@dataclass(frozen=True, slots=True)
class _PieceLocation:
    """The position of a piece in the file, and its sha256."""

    begin: int
    size: int
    digest: bytes


FileEdition = tuple[int, int, int]
"""The size, mtime and ctime of a file: different after each write."""


class QuantisedFile:
    """An open copy whose seal was right; several threads may read it at once."""

    def __init__(
        self, handle: int, shape: QuantisedLayout, places: Sequence[_PieceLocation]
    ) -> None:
        """Own an open file whose table was checked."""
        self.handle, self.shape, self._places = handle, shape, places
        self._past_cache: int | None = None
        """The same file, opened to be read past the system's file cache."""
        self._checked: set[tuple[FileEdition, int]] = set()
        """Pieces that were found sound, each in the edition of the file that it was read from."""

    @classmethod
    def open(cls, path: Path, source: str) -> Self | None:
        """Open a copy of ``source``; None where it is damaged, or a copy of anything else.

        Raises:
            OSError: when it is not there, or is no file that only this user may write.
        """
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise OSError("it is no file")
            check_private_folder(found)
            ends = _read_ends(handle, found.st_size, source)
        except BaseException:
            os.close(handle)
            raise
        if ends is None:
            os.close(handle)
            return None
        return cls(handle, *ends)

    def bypass_cache(self, path: Path) -> None:
        """From now on, read into aligned memory past the system's file cache (``O_DIRECT``).

        That costs less processor time and evicts nothing from the cache, but every repeated read
        waits for the disk.

        Raises:
            OSError: when the system does not offer that, or another file has this path now.
        """
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT)
        if not os.path.samestat(os.fstat(handle), os.fstat(self.handle)):
            os.close(handle)
            raise OSError("it is another file now")
        self._past_cache = handle

    def piece_begin(self, piece: int) -> int:
        """Return the offset of a piece in the file."""
        return self._places[piece].begin

    def piece_size(self, piece: int) -> int:
        """Return the size of a piece in the file, in bytes."""
        return self._places[piece].size

    def read_piece(
        self, piece: int, memory: memoryview, *, is_wanted: Callable[[], bool] = always_wanted
    ) -> bool:
        """Read a piece into memory; False where its bytes are not those that were written.

        A piece that was found sound is not hashed again unless the file was written since.

        Raises:
            OSError: when the file cannot be read to the end of the piece.
            ReadCancelled: when ``is_wanted``, called between reads, returns False.
        """
        begin, before = self.piece_begin(piece), self.edition
        assert len(memory) == self.piece_size(piece)
        step = len(memory) if is_wanted is always_wanted else _READ_BYTES
        for done in range(0, len(memory), step):
            if not is_wanted():
                raise ReadCancelled(done)
            self._read(memory[done : done + step], begin + done)
        if self.edition == before and (before, piece) in self._checked:
            return True
        if not self.is_sound(piece, memory):
            return False
        self._checked.add((before, piece))
        return True

    @property
    def edition(self) -> FileEdition:
        """The current edition of the file; its clock may miss two writes within 4 ms."""
        found = os.fstat(self.handle)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _read(self, memory: memoryview, begin: int) -> None:
        done = 0
        if self._past_cache is not None:
            done = _read_aligned(memory, self._past_cache, begin)
        _read_fully(memory[done:], self.handle, begin + done)

    def is_sound(self, piece: int, memory: memoryview) -> bool:
        """Tell whether these are the bytes of a piece, by its digest."""
        return hash_piece(memory) == self._places[piece].digest

    def read_all(self, memory: memoryview, *, progress: Progress = ignore_progress) -> bool:
        """Read all pieces that fit into a memory, in several threads, until one is not sound.

        Raises:
            OSError: when the file cannot be read to its end.
        """
        places = [self.shape.memory_span(n) for n in range(self.shape.count_pieces_in(memory))]
        pool = ThreadPoolExecutor(_thread_count())
        try:
            sound = pool.map(lambda n: self.read_piece(n, memory[places[n]]), range(len(places)))
            for is_sound, place in zip(sound, places, strict=True):
                if not is_sound:
                    return False
                progress(place.stop - place.start)
            return True
        finally:
            pool.shutdown(cancel_futures=True)

    def is_whole(self) -> bool:
        """Read every piece; tell whether all are sound.

        Raises:
            OSError: when the file cannot be read to its end.
        """
        buffer = memoryview(bytearray(max(_PIECE_BYTES, self.shape.max_block_bytes)))
        return all(self.read_piece(n, buffer[: p.size]) for n, p in enumerate(self._places))

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)
        if self._past_cache is not None:
            os.close(self._past_cache)
            self._past_cache = None


def hash_piece(memory: memoryview) -> bytes:
    """Return the sha256 of bytes; the GIL is released meanwhile."""
    return hashlib.sha256(memory).digest()


def _read_ends(
    handle: int, size: int, source: str
) -> tuple[QuantisedLayout, Sequence[_PieceLocation]] | None:
    """Return the layout and piece locations of a file that is sealed as a copy of ``source``."""
    if size < _END_BYTES:
        return None
    end = memoryview(bytearray(_END_BYTES))
    _read_fully(end, handle, size - _END_BYTES)
    sizes, seal = bytes(end[: _SIZES.size]), bytes(end[_SIZES.size :])
    rest, blocks, block = _SIZES.unpack(sizes)
    shape = QuantisedLayout(rest_bytes=rest, blocks=blocks, block_bytes=block)
    begin = size - _END_BYTES - shape.pieces * _ENTRY.size
    if begin < rest + blocks * ALIGNED or not shape.pieces:
        return None  # before memory is allocated by these sizes
    table = bytearray(size - _END_BYTES - begin)
    _read_fully(memoryview(table), handle, begin)
    if _compute_seal(source, sizes, table) != seal:
        return None
    places = _parse_table(table)
    return (shape, places) if _matches_shape(places, shape, begin) else None


def _parse_table(table: bytes | bytearray) -> Sequence[_PieceLocation]:
    """Return the locations of the pieces, which follow one another."""
    places, end = [], 0
    for size, digest in _ENTRY.iter_unpack(table):
        places.append(_PieceLocation(_align_up(end), size, digest))
        end = _align_up(end) + size
    return places


def _matches_shape(places: Sequence[_PieceLocation], shape: QuantisedLayout, end: int) -> bool:
    """Tell whether the pieces have the sizes of a layout, and the table begins behind them."""
    whole = [shape.memory_span(number) for number in range(shape.pieces)]
    sizes = [place.stop - place.start for place in whole]
    rest, last = shape.rest_pieces, places[-1]
    return (
        all(place.size == size for place, size in zip(places[:rest], sizes, strict=False))
        and all(0 < place.size <= shape.max_block_bytes for place in places[rest:])
        and _find_table(shape, last.begin + last.size) == end
    )


def _read_fully(memory: memoryview, handle: int, begin: int) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(handle, [memory[done:]], begin + done)
        if not count:
            raise OSError("it is cut short")
        done += count


def _read_aligned(memory: memoryview, handle: int, begin: int) -> int:
    """Read the whole aligned part past the cache; return the number of bytes read.

    A read that the system refuses, because the memory is not aligned or too little of it is free,
    is left to a read through the cache: only that shows whether the file is at fault.
    """
    done, whole = 0, len(memory) // ALIGNED * ALIGNED
    while done < whole:
        try:
            count = os.preadv(handle, [memory[done:whole]], begin + done)
        except OSError:
            return done
        if not count:
            break
        done += count
    return done


def _pack_sizes(shape: QuantisedLayout) -> bytes:
    return _SIZES.pack(shape.rest_bytes, shape.blocks, shape.block_bytes)


def _compute_seal(source: str, sizes: bytes, table: bytes | bytearray) -> bytes:
    return hashlib.sha256(f"{source}\n".encode() + sizes + table).digest()


def _find_table(shape: QuantisedLayout, end: int) -> int:
    """Return the offset of the table behind the pieces, which end at ``end``."""
    return _align_up(end) if shape.blocks else end


def _align_up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _thread_count() -> int:
    return min(_THREADS, os.cpu_count() or 1)
