"""The zstd frame (RFC 8878) around a package's tar: one frame, bounded, with nothing after it.

The frame is only transport. Before any decompression its blocks are walked: one frame with a stated
content size, a small window, no dictionary, that ends where the file ends. Decompression runs in
its own thread, as zstandard releases the interpreter lock.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import zstandard

from expertctl.errors import InvalidPackageError

FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
FASTEST_LEVEL = -1
"""Stores random-looking data as it is: reading costs little more than hashing."""
LEVELS = range(-7, 20)
WINDOW_LOG = 17
MAX_WINDOW = 8 << 20
"""The window size that RFC 8878, section 3.1.1.1.2, asks every decoder to support."""
MAX_RATIO = 50
RATIO_FREE_BYTES = 64 << 20
MANY_BLOCKS, SMALL_BLOCK = 1024, 256
"""The block limit is 1024 plus one per 256 bytes of content; compressors use far larger blocks."""
_CHUNK_BYTES = 1 << 18
_BUFFERS = 8
_BUFFERS_PER_RETURN = 4
"""Buffers are returned in batches: waking the thread for each costs a fifth of hashing it."""
_READ_BYTES = 1 << 18
_RAW, _RLE, _RESERVED = 0, 1, 3
_MAX_BLOCK = 128 << 10


def check_frame(stream: BinaryIO, *, file_size: int, max_content: int, what: str) -> int:
    """Check that a file is one frame, and return its content size in bytes.

    Raises:
        InvalidPackageError: when it is anything else, too large, or compressed too much.
    """
    content, position, checksum = _parse_frame_header(stream.read(18), max_content, what)
    position = (
        _find_end_of_blocks(stream, position, MANY_BLOCKS + content // SMALL_BLOCK, what) + checksum
    )
    stream.seek(0)
    if position != file_size:
        raise InvalidPackageError(
            what, [f"the zstd frame ends at byte {position}, the file at {file_size}"]
        )
    check_ratio(content, file_size, what=what)
    return content


def check_ratio(content: int, compressed: int, *, what: str) -> None:
    """Refuse a likely decompression bomb.

    Raises:
        InvalidPackageError: when the content is much larger than the compressed data.
    """
    if content > RATIO_FREE_BYTES and content > MAX_RATIO * compressed:
        raise InvalidPackageError(
            what, [f"{compressed} bytes would unpack to {content}, more than {MAX_RATIO} times"]
        )


def _parse_frame_header(start: bytes, max_content: int, what: str) -> tuple[int, int, int]:
    """Return content size, header length and checksum length, in bytes (section 3.1.1.1)."""
    if start[:4] != FRAME_MAGIC or len(start) < 6:
        raise InvalidPackageError(what, ["not a .expert file: it does not begin with a zstd frame"])
    flags = start[4]
    single_segment, checksum = bool(flags & 0x20), 4 if flags & 0x04 else 0
    if flags & 0x1B:
        raise InvalidPackageError(what, ["the zstd frame has a dictionary or reserved bits"])
    field = (1 if single_segment else 0, 2, 4, 8)[flags >> 6]
    if field == 0:
        raise InvalidPackageError(what, ["the zstd frame does not state its content size"])
    begin = 5 if single_segment else 6
    content = int.from_bytes(start[begin : begin + field], "little") + (256 if field == 2 else 0)
    window = content if single_segment else _parse_window(start[5])
    if window > MAX_WINDOW:
        raise InvalidPackageError(what, [f"the zstd frame asks for a window of {window} bytes"])
    if content > max_content:
        raise InvalidPackageError(
            what, [f"it would unpack to {content} bytes, at most {max_content} allowed"]
        )
    return content, begin + field, checksum


def _parse_window(descriptor: int) -> int:
    base = 1 << (10 + (descriptor >> 3))
    return base + (base >> 3) * (descriptor & 7)


def _find_end_of_blocks(stream: BinaryIO, position: int, max_blocks: int, what: str) -> int:
    """Walk at most ``max_blocks`` block headers (section 3.1.1.2); return the end offset."""
    for _ in range(max_blocks):
        stream.seek(position)
        head = stream.read(3)
        value = int.from_bytes(head, "little")
        last, kind, size = value & 1, value >> 1 & 3, value >> 3
        if len(head) < 3 or kind == _RESERVED or size > _MAX_BLOCK:
            raise InvalidPackageError(what, [f"the zstd frame is broken at byte {position}"])
        position += 3 + (1 if kind == _RLE else size)
        if last:
            return position
    raise InvalidPackageError(what, [f"the zstd frame has more than {max_blocks} blocks"])


class FrameReader:
    """The content of a frame as a stream: exact reads of small things, chunks of large ones.

    Chunks are views of reused buffers, valid until the next read.
    """

    def __init__(self, filled: "_Filled", empty: "_Buffers", what: str) -> None:
        """Store the two queues that connect the reader with the decompressing thread."""
        self._filled = filled
        self._empty = empty
        self._what = what
        self._buffer = bytearray()
        self._used: list[bytearray] = []
        self._view = memoryview(b"")

    def read_exact(self, size: int) -> bytes:
        """Return the next ``size`` bytes; raises as `chunks`."""
        parts = bytearray()
        for chunk in self.chunks(size):
            parts += chunk
        return bytes(parts)

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in chunks.

        Raises:
            InvalidPackageError: when there are fewer, or the frame is corrupt.
        """
        while size:
            if not self._view:
                self._refill()
            piece = self._view[:size]
            self._view = self._view[len(piece) :]
            size -= len(piece)
            yield piece

    def at_end(self) -> bool:
        """Tell whether the content ends here.

        Raises:
            InvalidPackageError: when the frame is corrupt.
        """
        if self._view:
            return False
        _, count = self._next_chunk()
        return count == 0

    def _next_chunk(self) -> "_Chunk":
        item = self._filled.get()
        if isinstance(item, zstandard.ZstdError):
            raise InvalidPackageError(self._what, [f"the zstd frame is corrupt: {item}"]) from item
        if isinstance(item, Exception):
            raise item
        return item

    def _refill(self) -> None:
        if self._buffer:
            self._used.append(self._buffer)
        if len(self._used) == _BUFFERS_PER_RETURN:
            self._empty.put(self._used)
            self._used = []
        self._buffer, count = self._next_chunk()
        if count == 0:
            raise InvalidPackageError(self._what, ["the archive is cut short"])
        self._view = memoryview(self._buffer)[:count]


_Chunk = tuple[bytearray, int]
_Filled = queue.SimpleQueue[_Chunk | Exception]
_Buffers = queue.SimpleQueue[list[bytearray] | None]


@contextmanager
def open_decompressor(stream: BinaryIO, *, what: str) -> Iterator[FrameReader]:
    """Decompress a checked frame in a thread as long as the context lasts."""
    filled: _Filled = queue.SimpleQueue()
    empty: _Buffers = queue.SimpleQueue()
    empty.put([bytearray(_CHUNK_BYTES) for _ in range(_BUFFERS)])
    worker = threading.Thread(target=_decompress, args=(stream, filled, empty), daemon=True)
    worker.start()
    try:
        yield FrameReader(filled, empty, what)
    finally:
        empty.put(None)
        worker.join()


def _decompress(stream: BinaryIO, filled: _Filled, empty: _Buffers) -> None:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
    try:
        with decompressor.stream_reader(stream, read_size=_READ_BYTES, closefd=False) as reader:
            _fill(reader.readinto, filled, empty)
    except (zstandard.ZstdError, OSError, MemoryError) as error:  # else the reader waits forever
        filled.put(error)


def _fill(read: Callable[[bytearray], int], filled: _Filled, empty: _Buffers) -> None:
    while (buffers := empty.get()) is not None:
        for buffer in buffers:
            count = read(buffer)
            filled.put((buffer, count))
            if count == 0:
                return


@contextmanager
def open_compressor(
    stream: BinaryIO, *, content_size: int, level: int = FASTEST_LEVEL
) -> Iterator[BinaryIO]:
    """Write one frame with content of the given size in bytes."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level, window_log=WINDOW_LOG, write_content_size=True, write_checksum=False
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    writer = compressor.stream_writer(stream, size=content_size, closefd=False)
    yield writer
    writer.flush(zstandard.FLUSH_FRAME)
