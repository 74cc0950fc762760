"""The zstd frame: one, bounded, complete, and nothing around it."""

import contextlib
import io
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.frame import (
    MAX_WINDOW,
    RATIO_FREE_BYTES,
    check_frame,
    check_ratio,
    open_compressor,
    open_decompressor,
)

LIMIT = 1 << 30
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"\0\0\0\0"


def check(data: bytes, *, limit: int = LIMIT) -> int:
    return check_frame(io.BytesIO(data), file_size=len(data), max_content=limit, what="x")


def compressed(content: bytes) -> bytes:
    stream = io.BytesIO()
    with open_compressor(stream, content_size=len(content)) as output:
        output.write(content)
    return stream.getvalue()


def decompressed(data: bytes, size: int) -> bytes:
    with open_decompressor(io.BytesIO(data), what="x") as frame:
        content = frame.read_exact(size)
        assert frame.at_end()
    return content


@given(st.binary(max_size=3000), st.integers(0, 200))
@settings(deadline=None, max_examples=60)
def test_what_was_compressed_comes_out(part: bytes, times: int) -> None:
    content = part * times
    data = compressed(content)
    assert check(data) == len(content)
    assert decompressed(data, len(content)) == content


@given(st.binary(min_size=1, max_size=100_000), st.integers(-5, 12), st.booleans())
@settings(deadline=None, max_examples=60)
def test_frames_of_any_level_are_walked_to_their_end(
    content: bytes, level: int, checksum: bool
) -> None:
    data = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(content)
    assert check(data) == len(content)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        check(data)


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=200)
def test_random_bytes_behind_the_magic_never_crash(data: bytes) -> None:
    with contextlib.suppress(InvalidPackageError):
        assert check(b"\x28\xb5\x2f\xfd" + data) <= LIMIT


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(compressed(b"x") + b"\0", id="a trailing byte"),
        pytest.param(compressed(b"x") + compressed(b"y"), id="a second frame"),
        pytest.param(compressed(b"x") + SKIPPABLE, id="a skippable frame after"),
        pytest.param(SKIPPABLE + compressed(b"x"), id="a skippable frame before"),
        pytest.param(b"PK\x03\x04" + bytes(60), id="a zip"),
        pytest.param(b"\x1f\x8b" + bytes(60), id="a gzip"),
        pytest.param(b"", id="an empty file"),
        pytest.param(compressed(b"x" * 1000)[:-1], id="cut short"),
    ],
)
def test_anything_but_one_whole_frame_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        check(data)


def test_a_frame_without_its_content_size_is_refused() -> None:
    stream = io.BytesIO()
    compressor = zstandard.ZstdCompressor()
    with compressor.stream_writer(stream, closefd=False) as writer:
        writer.write(b"x")
    with pytest.raises(InvalidPackageError, match="does not state its content size"):
        check(stream.getvalue())


def test_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=24, write_content_size=True
    )
    data = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(MAX_WINDOW * 3))
    with pytest.raises(InvalidPackageError, match="window"):
        check(data)


def test_a_frame_of_very_many_blocks_is_refused_without_walking_them() -> None:
    frame = b"\x28\xb5\x2f\xfd\xa0" + (1000).to_bytes(4, "little")
    empty, last = b"\0\0\0", (1000 << 3 | 1).to_bytes(3, "little") + bytes(1000)
    assert check(frame + empty * 1000 + last) == 1000
    with pytest.raises(InvalidPackageError, match="more than 1027 blocks"):
        check(frame + empty * 100_000 + last)


def test_a_frame_with_a_dictionary_is_refused() -> None:
    data = bytearray(compressed(b"x" * 100))
    data[4] |= 1
    with pytest.raises(InvalidPackageError, match="dictionary"):
        check(bytes(data))


def test_a_content_beyond_the_limit_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(InvalidPackageError, match="at most 99 allowed"):
        check(compressed(bytes(100)), limit=99)


def test_a_decompression_bomb_is_refused_by_its_ratio() -> None:
    with pytest.raises(InvalidPackageError, match="more than 50 times"):
        check(compressed(bytes(RATIO_FREE_BYTES + 1)))
    check_ratio(RATIO_FREE_BYTES, 1, what="x")
    check_ratio(50 * RATIO_FREE_BYTES, RATIO_FREE_BYTES, what="x")


def test_a_wrong_content_size_is_found_while_unpacking() -> None:
    data = bytearray(compressed(b"abc" * 100))
    assert data[4] >> 6 == 1
    data[5:7] = (300 - 256 - 1).to_bytes(2, "little")
    with pytest.raises(InvalidPackageError, match="corrupt"):
        decompressed(bytes(data), 299)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_an_error_while_reading_reaches_the_reader_as_it_is(error: Exception) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise error

    with pytest.raises(type(error)), open_decompressor(Failing(), what="x") as frame:
        frame.read_exact(1)


def test_more_is_asked_than_there_is() -> None:
    with pytest.raises(InvalidPackageError, match="cut short"):
        decompressed(compressed(b"abc"), 4)


def test_less_is_asked_than_there_is() -> None:
    with open_decompressor(io.BytesIO(compressed(b"abc")), what="x") as frame:
        assert frame.read_exact(2) == b"ab"
        assert not frame.at_end()


def test_a_reader_may_leave_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "large.zst"
    content = bytes(range(256)) * (64 << 10)
    path.write_bytes(compressed(content))
    with path.open("rb") as stream, open_decompressor(stream, what="x") as frame:
        assert frame.read_exact(3) == b"\0\x01\x02"
    assert decompressed(path.read_bytes(), len(content)) == content


def test_a_window_at_the_limit_is_read() -> None:
    content = bytes(2 * MAX_WINDOW)
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=23)
    data = zstandard.ZstdCompressor(compression_params=parameters).compress(content)
    assert check(data) == len(content)
    assert decompressed(data, len(content)) == content
