"""The file of a quantised copy: its layout, how it is written, and `CopyFile`, which reads it.

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

from expertctl.digest import Progress, no_progress
from expertctl.durable import Write
from expertctl.store.copies_folder import demand_own

ALIGNED = 4096
"""Blocks begin at multiples of this, so that they can be mapped and share no page."""
_PIECE = 4 << 20
_SIZES = struct.Struct("<QQQ")
_DIGEST_BYTES = hashlib.sha256().digest_size
_ENTRY = struct.Struct(f"<Q{_DIGEST_BYTES}s")
_END_BYTES = _SIZES.size + _DIGEST_BYTES
_THREADS = 4
_SLACK = 32
_AT_ONCE = 2 << 20
"""How many bytes are read between two checks whether they are still wanted."""


class Dropped(Exception):  # noqa: N818 - nothing went wrong
    """What was being read is no longer wanted; ``read_bytes`` were read until then."""

    def __init__(self, read_bytes: int) -> None:
        """Keep the number of bytes."""
        super().__init__(read_bytes)
        self.read_bytes = read_bytes


def always() -> bool:
    """Return True: the bytes are wanted."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyShape:
    """What a copy holds: the bytes of the rest, and the number of blocks of routed experts."""

    rest: int
    blocks: int = 0
    block: int = 0
    """The bytes of one block."""

    @property
    def rest_pieces(self) -> int:
        """How many pieces come before the first block."""
        return -(-self.rest // _PIECE)

    @property
    def most(self) -> int:
        """The most bytes of a block in the file: one that is not shortened may grow a little."""
        return self.block + self.block // _SLACK + 2 * ALIGNED

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return self.rest_pieces + self.blocks

    def in_memory(self, piece: int) -> slice:
        """Return the span of a piece in memory that holds all pieces one after the other."""
        if piece < self.rest_pieces:
            return slice(piece * _PIECE, min(self.rest, (piece + 1) * _PIECE))
        begin = self.rest + (piece - self.rest_pieces) * self.block
        return slice(begin, begin + self.block)

    def pieces_of(self, memory: memoryview) -> int:
        """Return how many pieces fit into a memory: those of the rest, or all."""
        assert len(memory) in (self.rest, self.rest + self.blocks * self.block)
        return self.rest_pieces if len(memory) == self.rest else self.pieces


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of a piece, valid until the next piece is taken, and their sha256."""

    memory: memoryview
    digest: bytes


def pieces_in(memory: memoryview, shape: CopyShape) -> Generator[Piece]:
    """Yield the pieces that are in memory, hashed in threads."""

    def hashed(number: int) -> Piece:
        piece = memory[shape.in_memory(number)]
        return Piece(piece, digest_of(piece))

    pool = ThreadPoolExecutor(_threads())
    try:
        yield from pool.map(hashed, range(shape.pieces_of(memory)))
    finally:
        pool.shutdown(cancel_futures=True)


def write_copy(write: Write, of: str, shape: CopyShape, pieces: Iterable[Piece]) -> None:
    """Write a copy of ``of``; ``pieces`` are all pieces of its shape, in order."""
    table, at = bytearray(), 0
    for piece in pieces:
        write(memoryview(bytes(_filled(at) - at)))
        write(piece.memory)
        at = _filled(at) + len(piece.memory)
        table += _ENTRY.pack(len(piece.memory), piece.digest)
    assert len(table) == shape.pieces * _ENTRY.size
    sizes = _packed(shape)
    gap = _table_begin(shape, at) - at
    write(memoryview(bytes(gap) + table + sizes + _seal(of, sizes, table)))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece is in the file, and its sha256."""

    begin: int
    size: int
    digest: bytes


Edition = tuple[int, int, int]
"""The size of a file and when it and its entry were changed last: another one after each write."""


class CopyFile:
    """An open copy whose seal was right; several threads may read it at once."""

    def __init__(self, handle: int, shape: CopyShape, places: Sequence[_Place]) -> None:
        """Own an open file whose table was checked."""
        self.handle, self.shape, self._places = handle, shape, places
        self._past_cache: int | None = None
        """The same file, opened to be read past the system's file cache."""
        self._checked: set[tuple[Edition, int]] = set()
        """Pieces that were found sound, each in the edition of the file that it was read from."""

    @classmethod
    def open(cls, path: Path, of: str) -> Self | None:
        """Open a copy of ``of``; None where it is damaged, or a copy of anything else.

        Raises:
            OSError: when it is not there, or is no file that only this user may write.
        """
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise OSError("it is no file")
            demand_own(found)
            ends = _read_ends(handle, found.st_size, of)
        except BaseException:
            os.close(handle)
            raise
        if ends is None:
            os.close(handle)
            return None
        return cls(handle, *ends)

    def bypass_cache(self, path: Path) -> None:
        """From now on, read into aligned memory past the system's file cache.

        That takes less of the processor and does not push out what the cache holds, but reading a
        piece again waits for the disk again.

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

    def begin_of(self, piece: int) -> int:
        """Return where in the file a piece begins."""
        return self._places[piece].begin

    def size_of(self, piece: int) -> int:
        """Return how many bytes of the file a piece has."""
        return self._places[piece].size

    def fill(
        self, piece: int, memory: memoryview, *, is_wanted: Callable[[], bool] = always
    ) -> bool:
        """Read a piece into memory; False where its bytes are not those that were written.

        A piece that was found sound is not hashed again unless the file was written since.

        Raises:
            OSError: when the file cannot be read to the end of the piece.
            Dropped: when it is no longer wanted, which is checked now and then.
        """
        begin, before = self.begin_of(piece), self.edition
        assert len(memory) == self.size_of(piece)
        step = len(memory) if is_wanted is always else _AT_ONCE
        for done in range(0, len(memory), step):
            if not is_wanted():
                raise Dropped(done)
            self._read(memory[done : done + step], begin + done)
        if self.edition == before and (before, piece) in self._checked:
            return True
        if not self.is_sound(piece, memory):
            return False
        self._checked.add((before, piece))
        return True

    @property
    def edition(self) -> Edition:
        """Which edition of the file there is now; its clock may miss two writes within 4 ms."""
        found = os.fstat(self.handle)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _read(self, memory: memoryview, begin: int) -> None:
        done = 0
        if self._past_cache is not None:
            done = _read_aligned(memory, self._past_cache, begin)
        _read_into(memory[done:], self.handle, begin + done)

    def is_sound(self, piece: int, memory: memoryview) -> bool:
        """Tell whether these are the bytes of a piece, by its digest."""
        return digest_of(memory) == self._places[piece].digest

    def fill_all(self, memory: memoryview, *, progress: Progress = no_progress) -> bool:
        """Read all pieces that fit into a memory, in threads, until one is not sound.

        Raises:
            OSError: when the file cannot be read to its end.
        """
        places = [self.shape.in_memory(n) for n in range(self.shape.pieces_of(memory))]
        pool = ThreadPoolExecutor(_threads())
        try:
            sound = pool.map(lambda n: self.fill(n, memory[places[n]]), range(len(places)))
            for is_sound, place in zip(sound, places, strict=True):
                if not is_sound:
                    return False
                progress(place.stop - place.start)
            return True
        finally:
            pool.shutdown(cancel_futures=True)

    def is_whole(self) -> bool:
        """Read every piece; tell whether all are what was written.

        Raises:
            OSError: when the file cannot be read to its end.
        """
        buffer = memoryview(bytearray(max(_PIECE, self.shape.most)))
        return all(self.fill(n, buffer[: p.size]) for n, p in enumerate(self._places))

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)
        if self._past_cache is not None:
            os.close(self._past_cache)
            self._past_cache = None


def digest_of(memory: memoryview) -> bytes:
    """Return the sha256 of bytes; the GIL is released meanwhile."""
    return hashlib.sha256(memory).digest()


def _read_ends(handle: int, size: int, of: str) -> tuple[CopyShape, Sequence[_Place]] | None:
    """Return what a file holds and where, if it is sealed as a copy of ``of``."""
    if size < _END_BYTES:
        return None
    end = memoryview(bytearray(_END_BYTES))
    _read_into(end, handle, size - _END_BYTES)
    sizes, seal = bytes(end[: _SIZES.size]), bytes(end[_SIZES.size :])
    rest, blocks, block = _SIZES.unpack(sizes)
    shape = CopyShape(rest=rest, blocks=blocks, block=block)
    begin = size - _END_BYTES - shape.pieces * _ENTRY.size
    if begin < rest + blocks * ALIGNED or not shape.pieces:
        return None  # before memory is allocated by these sizes
    table = bytearray(size - _END_BYTES - begin)
    _read_into(memoryview(table), handle, begin)
    if _seal(of, sizes, table) != seal:
        return None
    places = _places(table)
    return (shape, places) if _fits(places, shape, begin) else None


def _places(table: bytes | bytearray) -> Sequence[_Place]:
    """Return where the pieces are, which lie one after the other."""
    places, end = [], 0
    for size, digest in _ENTRY.iter_unpack(table):
        places.append(_Place(_filled(end), size, digest))
        end = _filled(end) + size
    return places


def _fits(places: Sequence[_Place], shape: CopyShape, end: int) -> bool:
    """Tell whether pieces are those of a shape, and the table begins behind them."""
    whole = [shape.in_memory(number) for number in range(shape.pieces)]
    sizes = [place.stop - place.start for place in whole]
    rest, last = shape.rest_pieces, places[-1]
    return (
        all(place.size == size for place, size in zip(places[:rest], sizes, strict=False))
        and all(0 < place.size <= shape.most for place in places[rest:])
        and _table_begin(shape, last.begin + last.size) == end
    )


def _read_into(memory: memoryview, handle: int, begin: int) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(handle, [memory[done:]], begin + done)
        if not count:
            raise OSError("it is cut short")
        done += count


def _read_aligned(memory: memoryview, handle: int, begin: int) -> int:
    """Read the whole aligned part past the cache; return how many bytes were read.

    What the system refuses, because the memory is not aligned or too little of it is free, is left
    to a read through the cache: only that shows whether the file is at fault.
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


def _packed(shape: CopyShape) -> bytes:
    return _SIZES.pack(shape.rest, shape.blocks, shape.block)


def _seal(of: str, sizes: bytes, table: bytes | bytearray) -> bytes:
    return hashlib.sha256(f"{of}\n".encode() + sizes + table).digest()


def _table_begin(shape: CopyShape, end: int) -> int:
    """Return where the table begins behind the pieces, which end at ``end``."""
    return _filled(end) if shape.blocks else end


def _filled(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)
