"""The tar: our headers against the standard library's reader, and what is not one of ours."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.archive import BLOCK_SIZE, END_OF_ARCHIVE, build_header, parse_declared_size
from tests.package.forged_packages import make_archive

NAMES = st.sampled_from(["oci-layout", "index.json", f"blobs/sha256/{'a' * 64}"])
SIZES = st.integers(0, 8**11 - 1)


@given(NAMES, SIZES)
@settings(deadline=None, max_examples=200)
def test_the_standard_library_reads_our_headers(name: str, size: int) -> None:
    info = tarfile.TarInfo.frombuf(build_header(name, size), "ascii", "strict")
    assert (info.name, info.size, info.mode, info.mtime) == (name, size, 0o644, 0)
    assert (info.uid, info.gid, info.uname, info.gname) == (0, 0, "", "")
    assert info.isreg()


def test_the_standard_library_reads_a_whole_archive() -> None:
    data = make_archive([("oci-layout", b"x" * 700), ("index.json", b"")])
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        sizes = {info.name: info.size for info in tar}
        assert sizes == {"oci-layout": 700, "index.json": 0}
    assert data.endswith(END_OF_ARCHIVE)
    assert len(data) == BLOCK_SIZE + 1024 + BLOCK_SIZE + len(END_OF_ARCHIVE)


@given(NAMES, SIZES)
@settings(deadline=None, max_examples=100)
def test_a_header_gives_back_its_size(name: str, size: int) -> None:
    assert parse_declared_size(build_header(name, size), name=name, what="x") == size


@given(NAMES, SIZES, st.integers(0, BLOCK_SIZE - 1), st.integers(1, 255))
@settings(deadline=None, max_examples=300)
def test_any_changed_byte_of_a_header_is_refused(name: str, size: int, at: int, by: int) -> None:
    block = bytearray(build_header(name, size))
    block[at] ^= by
    with pytest.raises(InvalidPackageError):
        parse_declared_size(bytes(block), name=name, what="x")


@given(st.binary(min_size=BLOCK_SIZE, max_size=BLOCK_SIZE))
@settings(deadline=None, max_examples=100)
def test_random_blocks_are_refused(block: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        parse_declared_size(block, name="index.json", what="x")


def with_field(block: bytes, field: slice, value: bytes) -> bytes:
    """Change a field and make the checksum right, as an attacker would."""
    changed = bytearray(block)
    changed[field] = value.ljust(field.stop - field.start, b"\0")
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param(slice(0, 100), b"../index.json", id="traversal"),
        pytest.param(slice(0, 100), b"/index.json", id="absolute"),
        pytest.param(slice(0, 100), b"INDEX.JSON", id="other case"),
        pytest.param(slice(0, 100), b"./index.json", id="dot slash"),
        pytest.param(slice(0, 100), b"index.json\0x", id="text after NUL"),
        pytest.param(slice(100, 108), b"0004755\0", id="setuid"),
        pytest.param(slice(100, 108), b"0000666\0", id="world-writable"),
        pytest.param(slice(108, 116), b"0001750\0", id="odd uid"),
        pytest.param(slice(124, 136), b"-0000000001", id="negative size"),
        pytest.param(slice(124, 136), b"\x80" + bytes(10) + b"\x05", id="base-256 size"),
        pytest.param(slice(124, 136), b"0000000005 \0", id="size with a space"),
        pytest.param(slice(136, 148), b"14723455000\0", id="time"),
        pytest.param(slice(156, 157), b"1", id="hard link"),
        pytest.param(slice(156, 157), b"2", id="symbolic link"),
        pytest.param(slice(156, 157), b"3", id="character device"),
        pytest.param(slice(156, 157), b"4", id="block device"),
        pytest.param(slice(156, 157), b"5", id="directory"),
        pytest.param(slice(156, 157), b"6", id="FIFO"),
        pytest.param(slice(156, 157), b"7", id="contiguous"),
        pytest.param(slice(156, 157), b"S", id="GNU sparse"),
        pytest.param(slice(156, 157), b"L", id="GNU long name"),
        pytest.param(slice(156, 157), b"x", id="pax header"),
        pytest.param(slice(156, 157), b"g", id="pax global header"),
        pytest.param(slice(156, 157), b"\0", id="old regular file"),
        pytest.param(slice(157, 257), b"/etc/passwd", id="link target"),
        pytest.param(slice(257, 265), b"ustar  \0", id="GNU magic"),
        pytest.param(slice(257, 265), bytes(8), id="V7"),
        pytest.param(slice(265, 297), b"root", id="owner"),
        pytest.param(slice(345, 500), b"../..", id="prefix"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(field: slice, value: bytes) -> None:
    block = with_field(build_header("index.json", 5), field, value)
    with pytest.raises(InvalidPackageError, match=r"does not continue with index\.json"):
        parse_declared_size(block, name="index.json", what="x")


def test_a_wrong_checksum_is_refused() -> None:
    block = bytearray(build_header("index.json", 5))
    block[148:156] = b"000000\0 "
    with pytest.raises(InvalidPackageError):
        parse_declared_size(bytes(block), name="index.json", what="x")
