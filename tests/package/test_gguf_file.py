"""Headers of GGUF files: sound ones, hostile ones, and damaged ones."""

import random
import struct
from pathlib import Path

import gguf
import pytest

from expertctl.errors import ExpertError, IncompatibleError, InvalidPackageError
from expertctl.package.gguf_base import derive_base_files
from expertctl.package.gguf_file import is_gguf_file, read_gguf_header
from tests.factories import write_base
from tests.gguf_files import write_gguf

_STRING, _ARRAY, _UINT32 = 8, 9, 4


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    base = write_base(folder / "base", layers=1, hidden=32)
    return write_gguf(folder / "model.gguf", base)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(
    name: str = "a", shape: tuple[int, ...] = (4,), *, kind: int = 0, offset: int = 0
) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def pack(
    *entries: bytes,
    keys: tuple[bytes, ...] = (),
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 64,
) -> bytes:
    tensors, pairs = counts or (len(entries), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join((*keys, *entries))
    return head + bytes(-len(head) % 32 + data)


def read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    read_gguf_header(path)


def test_a_header_is_what_the_package_of_llama_cpp_reads(sound: Path) -> None:
    ours, reader = read_gguf_header(sound), gguf.GGUFReader(sound)
    fields = {name for name in reader.fields if not name.startswith("GGUF.")}
    assert set(ours.metadata) == fields
    for name in fields:
        value = ours.metadata[name]
        shown = list(value) if isinstance(value, tuple) else value
        assert shown == reader.fields[name].contents()
    assert list(ours.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        found = ours.tensors[tensor.name]
        assert (found.offset, found.size) == (tensor.data_offset, tensor.n_bytes)
        assert list(found.shape[::-1]) == tensor.shape.tolist()


def test_a_file_is_recognised_by_its_first_bytes(sound: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(sound.read_bytes())
    assert is_gguf_file(blob)
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04")
    assert not is_gguf_file(tmp_path / "other.gguf")
    assert not is_gguf_file(tmp_path)
    assert not is_gguf_file(tmp_path / "gone")


HUGE = 1 << 63
_FLAG = key("a", 7, b"\x02")
_NESTED = key("a", _ARRAY, struct.pack("<IQ", _ARRAY, 1) + struct.pack("<IQ", _UINT32, 0))
HOSTILE = {
    "no magic": (b"GGML" + bytes(60), "magic is not GGUF"),
    "empty": (b"", "magic needs 4 bytes"),
    "magic only": (b"GGUF", "version needs"),
    "no tensors": (pack(), "tensor count is 0"),
    "tensor count": (pack(counts=(HUGE, 0)), "tensor count is 9223372036854775808"),
    "key count": (pack(entry(), counts=(1, HUGE)), "key count is"),
    "more tensors than there are": (pack(entry(), counts=(9, 0)), "tensor name"),
    "length of a key": (pack(entry(), keys=(struct.pack("<Q", HUGE),)), "key 0 is a text of"),
    "length of a text": (
        pack(entry(), keys=(key("a", _STRING, struct.pack("<Q", 1 << 20)),)),
        "a needs 1048576 bytes",
    ),
    "not UTF-8": (pack(entry(), keys=(key("a", _STRING, text(b"\xff")),)), "a is not valid UTF-8"),
    "array of numbers": (
        pack(entry(), keys=(key("a", _ARRAY, struct.pack("<IQ", _UINT32, HUGE)),)),
        "a has 9223372036854775808 items",
    ),
    "array of texts": (
        pack(entry(), keys=(key("a", _ARRAY, struct.pack("<IQ", _STRING, 3_000_000)),)),
        "more than the file holds",
    ),
    "array of arrays": (pack(entry(), keys=(_NESTED,)), "an array of arrays"),
    "type": (pack(entry(), keys=(key("a", 99, b""),)), "unknown type 99"),
    "boolean": (pack(entry(), keys=(_FLAG,)), "boolean other than"),
    "number": (pack(entry(), keys=(key("a", 6, struct.pack("<f", float("nan"))),)), "finite"),
    "key twice": (pack(entry(), keys=(key("a", _UINT32, bytes(4)),) * 2), "a appears twice"),
    "key": (pack(entry(), keys=(key("a\n", _UINT32, bytes(4)),)), "which is no key"),
    "alignment": (
        pack(entry(), keys=(key("general.alignment", _UINT32, struct.pack("<I", 24)),)),
        "power of two",
    ),
    "tensor twice": (pack(entry(), entry(offset=32)), "a appears twice"),
    "overlap": (pack(entry(), entry("b")), "b overlaps a"),
    "tensor name": (pack(entry("../a b")), "tensor name is"),
    "dimensions": (pack(entry(shape=(1,) * 5)), "has 5 dimensions"),
    "no dimension": (pack(entry(shape=())), "has 0 dimensions"),
    "size 0": (pack(entry(shape=(0,))), "has the shape"),
    "size that overflows": (pack(entry(shape=(1 << 32, 1 << 32))), "a ends at"),
    "size beyond all": (pack(entry(shape=(HUGE,))), "has the shape"),
    "offset": (pack(entry(offset=HUGE)), "a ends at"),
    "offset within another": (pack(entry(offset=8)), "no multiple of 32"),
    "end": (pack(entry(shape=(17,))), "a ends at"),
    "rows of blocks": (pack(entry(shape=(16,), kind=2)), "no multiple of 32"),
}


@pytest.mark.parametrize(("data", "problem"), HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_header_is_refused_by_field(data: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError, match=problem):
        read(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (pack(entry(), version=1), "version 1"),
        (pack(entry(), version=3 << 24), "big-endian"),
        (pack(entry(kind=10)), "tensor a is Q2_K"),
        (pack(entry(kind=20)), "tensor a is IQ4_NL"),
        (pack(entry(kind=4)), "unknown kind 4"),
    ],
)
def test_what_is_not_supported_is_named(data: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=problem) as error:
        read(tmp_path, data)
    assert error.value.hint


def test_a_small_header_is_read(tmp_path: Path) -> None:
    read(tmp_path, pack(entry(), entry("b", (3,), offset=32)))


def test_damaged_files_give_errors_of_ours_only(sound: Path, tmp_path: Path) -> None:
    """Bytes are flipped, removed and repeated; whatever is read then is checked by those above."""
    data, chance = sound.read_bytes(), random.Random(0)
    header = read_gguf_header(sound)
    begin = min(tensor.offset for tensor in header.tensors.values())
    path, refused = tmp_path / "model.gguf", 0
    for _ in range(400):
        damaged = bytearray(data)
        match chance.randrange(3):
            case 0:
                for _ in range(chance.randrange(1, 4)):
                    damaged[chance.randrange(begin)] = chance.randrange(256)
            case 1:
                del damaged[chance.randrange(len(data)) :]
            case _:
                at = chance.randrange(begin)
                damaged[at : at + 8] = chance.choice([bytes(8), b"\xff" * 8, b"\0" * 7 + b"\x80"])
        path.write_bytes(damaged)
        try:
            derive_base_files(read_gguf_header(path), file="model.gguf")
        except ExpertError:
            refused += 1
    assert refused > 200


def test_the_items_of_all_arrays_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes forty times its byte in memory."""
    monkeypatch.setattr("expertctl.package.gguf_file._MAX_ITEMS", 1000)
    array = struct.pack("<IQ", 1, 400) + bytes(400)
    keys = [key(f"k{number}", _ARRAY, array) for number in range(3)]
    with pytest.raises(InvalidPackageError, match="k2 has 400 items, at most 1000"):
        read(tmp_path, pack(entry(), keys=tuple(keys)))
