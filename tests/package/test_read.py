"""Reading a package: the golden path, and everything that must be refused before it is believed."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.errors import (
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    SignatureError,
)
from expertctl.package.archive import END_OF_ARCHIVE, build_blob_name, build_header
from expertctl.package.read import PackageContents, read_package
from expertctl.reference import Digest, hash_file
from tests.package.forged_packages import (
    Entry,
    edit_json_file,
    edit_manifest,
    make_archive,
    make_member,
    make_package_archive,
    make_tensor_file,
    read_archive,
    read_members,
    read_packed_files,
    replace_manifest,
    write_frame,
)


class CollectedFiles:
    """A sink that keeps everything, and says what was finished."""

    def __init__(self) -> None:
        self.blobs: dict[Digest, bytes] = {}

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], object]]:
        parts = bytearray()
        yield parts.extend
        assert len(parts) == size
        self.blobs[digest] = bytes(parts)


@pytest.fixture
def tar(package: Path) -> bytes:
    return read_archive(package)


@pytest.fixture
def plain(unsigned: Path) -> bytes:
    return read_archive(unsigned)


def refused(tar: bytes, tmp_path: Path) -> str:
    """The message of the refusal; the sink kept nothing that does not have its digest."""
    sink = CollectedFiles()
    with pytest.raises((InvalidPackageError, DigestError)) as caught:
        read_package(write_frame(tar, tmp_path / "x.expert"), sink=sink)
    assert all(Digest.compute(data) == digest for digest, data in sink.blobs.items())
    return caught.value.message


def test_a_package_is_read_whole(package: Path, shared: Path) -> None:
    sink, counted = CollectedFiles(), list[int]()
    contents = read_package(package, sink=sink, progress=counted.append)
    files = shared / "acme-sql-1.0.0.files"
    assert contents.manifest.ref == "acme/sql@1.0.0"
    assert [f.path for f in contents.files] == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "expert.json",
    ]
    for file in contents.files[:2]:
        assert (file.size, file.digest) == hash_file(files / file.path)
        assert sink.blobs[file.digest] == (files / file.path).read_bytes()
    assert contents.small["adapter_config.json"] == (files / "adapter_config.json").read_bytes()
    assert contents.signature == sink.blobs[contents.layout.layers[-1].digest]
    assert sum(counted) == contents.size + len(contents.signature or b"")
    assert contents.adapters[0].tensors == 28
    assert Digest.compute(contents.layout.manifest) == contents.package_digest


def test_the_bytes_are_the_same_however_they_were_compressed(package: Path, tmp_path: Path) -> None:
    expected = read_package(package)
    for level in (-7, 3, 19):
        path = write_frame(read_archive(package), tmp_path / f"{level}.expert", level=level)
        assert read_package(path) == expected


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_package(tmp_path / "none.expert")


def test_a_directory_a_pipe_and_a_device_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.expert")
    for path in (tmp_path / "pipe.expert", Path("/dev/zero")):
        with pytest.raises(InvalidPackageError, match="not a regular file"):
            read_package(path)
    with pytest.raises((InvalidPackageError, OSError)):
        read_package(tmp_path)


@given(data=st.data())
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_byte_in_the_archive_is_refused(
    data: st.DataObject, plain: bytes, tmp_path: Path
) -> None:
    at = data.draw(st.integers(0, len(plain) - 1))
    changed = bytearray(plain)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert refused(bytes(changed), tmp_path)


@given(data=st.data())
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_flipped_byte_in_the_file_is_refused_or_changes_nothing(
    data: st.DataObject, package: Path, tmp_path: Path
) -> None:
    """The frame is transport: a flip that leaves its content alone is no harm."""
    changed = bytearray(package.read_bytes())
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "x.expert"
    path.write_bytes(changed)
    try:
        found: PackageContents | None = read_package(path)
    except (InvalidPackageError, DigestError, SignatureError):
        found = None
    assert found is None or found == read_package(package)


@given(at=st.integers(0, 10**6))
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_package_cut_short_anywhere_is_refused(at: int, package: Path, tmp_path: Path) -> None:
    data = package.read_bytes()
    path = tmp_path / "x.expert"
    path.write_bytes(data[: at % len(data)])
    with pytest.raises(InvalidPackageError):
        read_package(path)


@given(at=st.integers(0, 10**6))
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_an_archive_cut_short_anywhere_is_refused(at: int, plain: bytes, tmp_path: Path) -> None:
    assert refused(plain[: at % len(plain)], tmp_path)


Change = Callable[[list[Entry]], bytes]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda e: make_archive(e, END_OF_ARCHIVE + bytes(512)), id="a third zero block"
        ),
        pytest.param(lambda e: make_archive(e, END_OF_ARCHIVE[:512]), id="one zero block"),
        pytest.param(lambda e: make_archive(e, b""), id="no end"),
        pytest.param(lambda e: make_archive(e) + make_archive(e), id="a second archive"),
        pytest.param(lambda e: make_archive(e) + b"PK\x05\x06" + bytes(18), id="a zip behind"),
        pytest.param(lambda e: make_archive([e[1], e[0], *e[2:]]), id="index first"),
        pytest.param(lambda e: make_archive([*e[:4], *reversed(e[4:])]), id="another order"),
        pytest.param(lambda e: make_archive(e[:-1]), id="a blob missing"),
        pytest.param(lambda e: make_archive([*e, e[-1]]), id="a blob twice"),
        pytest.param(
            lambda e: make_archive([*e, (build_blob_name(Digest.compute(b"x")), b"x")]),
            id="a blob nobody names",
        ),
        pytest.param(lambda e: make_archive([*e, ("x.txt", b"x")]), id="a file that is no blob"),
        pytest.param(lambda e: make_archive([("pax", b"x"), *e]), id="something first"),
        pytest.param(lambda e: make_archive([(e[0][0], b"{}"), *e[1:]]), id="another oci-layout"),
        pytest.param(
            lambda e: make_archive([*e[:3], (e[3][0], b"{}"), *e[4:]]), id="another config"
        ),
        pytest.param(
            lambda e: make_archive([*e[:2], (e[2][0], e[3][1]), *e[3:]]), id="swapped manifest"
        ),
        pytest.param(
            lambda e: make_archive([*e[:-1], (e[-1][0], e[-1][1][:-1] + b"!")]),
            id="another content",
        ),
        pytest.param(
            lambda e: make_archive([*e[:-1], (f"blobs/sha256/{'A' * 64}", e[-1][1])]),
            id="an upper-case name",
        ),
        pytest.param(
            lambda e: make_archive([*e[:-1], (f"blobs/sha256/{'0' * 64}", e[-1][1])]),
            id="a name that is not its digest",
        ),
        pytest.param(
            lambda e: make_archive([*e[:-1], ("blobs/sha256/../../x", e[-1][1])]), id="a traversal"
        ),
    ],
)
def test_an_archive_that_is_not_the_one_of_its_manifest_is_refused(
    change: Change, plain: bytes, tmp_path: Path
) -> None:
    assert refused(change(read_members(plain)), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.expert"]


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"5", b"6", b"S", b"x", b"L"])
def test_a_link_device_or_special_member_is_refused(
    kind: bytes, plain: bytes, tmp_path: Path
) -> None:
    entries = read_members(plain)
    block = bytearray(build_header(*[entries[4][0], len(entries[4][1])]))
    block[156:157] = kind
    block[157 : 157 + 11] = b"/etc/passwd"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    at = sum(len(make_member(*entry)) for entry in entries[:4])
    assert "does not continue" in refused(plain[:at] + bytes(block) + plain[at + 512 :], tmp_path)


def test_padding_that_is_not_zero_is_refused(plain: bytes, tmp_path: Path) -> None:
    changed = bytearray(plain)
    changed[512 + len(read_members(plain)[0][1])] = 1
    assert "padding is not zero" in refused(bytes(changed), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: m.update(subject=m["config"]), id="subject"),
        pytest.param(lambda m: m["layers"][0].update(urls=["file:///etc/passwd"]), id="urls"),
        pytest.param(lambda m: m["layers"][0].update(data="eA=="), id="data"),
        pytest.param(lambda m: m["layers"][0].update(size=5), id="a size that lies"),
        pytest.param(lambda m: m["layers"].append(m["layers"][0]), id="a layer twice"),
        pytest.param(lambda m: m["layers"].pop(), id="a layer fewer"),
        pytest.param(
            lambda m: m["layers"][0]["annotations"].update(
                {"org.cncf.model.filepath": "../../.bashrc"}
            ),
            id="a path that climbs",
        ),
    ],
)
def test_a_manifest_that_says_more_or_less_is_refused(
    change: Callable[[dict[str, Any]], object], plain: bytes, tmp_path: Path
) -> None:
    assert refused(edit_manifest(plain, change), tmp_path)


def test_a_manifest_beyond_64_kib_is_refused(plain: bytes, tmp_path: Path) -> None:
    entries = read_members(plain)
    data = entries[2][1][:-1] + b" " * (64 << 10) + b"}"
    assert "at most 65536" in refused(replace_manifest(entries, data), tmp_path)


def test_an_index_that_gives_another_size_is_refused(plain: bytes, tmp_path: Path) -> None:
    entries = read_members(plain)
    index = json.loads(entries[1][1])
    index["manifests"][0]["size"] += 1
    data = json.dumps(index, separators=(",", ":"), sort_keys=True).encode()
    tar = make_archive([entries[0], (entries[1][0], data), *entries[2:]])
    assert "another size" in refused(tar, tmp_path)


def test_a_nested_archive_is_only_a_file_that_nobody_named(plain: bytes, tmp_path: Path) -> None:
    files = {**read_packed_files(plain), "inner.tar": plain}
    assert "inner.tar is not named in expert.json" in refused(make_package_archive(files), tmp_path)


@pytest.mark.parametrize(
    "name", ["extra.bin", "adapter_model.bin", "setup.py", "run.sh", "key.pem", "README.txt"]
)
def test_a_file_that_nobody_named_is_refused(name: str, plain: bytes, tmp_path: Path) -> None:
    files = {**read_packed_files(plain), name: b"x"}
    assert f"{name} is not named in expert.json" in refused(make_package_archive(files), tmp_path)


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "LICENSE-MIT", "NOTICE"])
def test_a_model_card_and_licences_need_not_be_named(
    name: str, plain: bytes, tmp_path: Path
) -> None:
    path = write_frame(
        make_package_archive({**read_packed_files(plain), name: b"text"}), tmp_path / "x.expert"
    )
    assert read_package(path).small[name] == b"text"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_named_and_missing_is_refused(
    name: str, plain: bytes, tmp_path: Path
) -> None:
    files = read_packed_files(plain)
    del files[name]
    assert f"{name} is named in expert.json but missing" in refused(
        make_package_archive(files), tmp_path
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("rank", 5), ("dtype", "float16"), ("tensors", 27), ("kind", "dora")],
)
def test_a_manifest_that_says_something_else_than_the_tensors_is_refused(
    key: str, value: object, plain: bytes, tmp_path: Path
) -> None:
    files = edit_json_file(
        read_packed_files(plain), "expert.json", lambda m: m["adapters"][0].update({key: value})
    )
    message = refused(make_package_archive(files), tmp_path)
    assert str(value) in message


def test_a_manifest_with_an_unknown_key_is_refused(plain: bytes, tmp_path: Path) -> None:
    files = edit_json_file(
        read_packed_files(plain), "expert.json", lambda m: m.update(run_after_install="sh x")
    )
    assert "run_after_install" in refused(make_package_archive(files), tmp_path)


def test_a_configuration_that_would_import_code_is_refused(plain: bytes, tmp_path: Path) -> None:
    hostile = {"base_model_class": "X", "parent_library": "os"}
    files = edit_json_file(
        read_packed_files(plain), "adapter_config.json", lambda c: c.update(auto_mapping=hostile)
    )
    assert "auto_mapping" in refused(make_package_archive(files), tmp_path)


def test_a_pickle_renamed_to_safetensors_is_refused(plain: bytes, tmp_path: Path) -> None:
    files = {**read_packed_files(plain), "adapter_model.safetensors": b"\x80\x04\x95" + bytes(100)}
    assert "adapter_model.safetensors" in refused(make_package_archive(files), tmp_path)


def test_tensors_of_another_model_are_refused(plain: bytes, tmp_path: Path) -> None:
    weights = make_tensor_file(
        {"lm_head.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)
    )
    files = {**read_packed_files(plain), "adapter_model.safetensors": weights}
    assert "lm_head.weight" in refused(make_package_archive(files), tmp_path)


def test_a_huge_expert_json_is_refused(plain: bytes, tmp_path: Path) -> None:
    files = {**read_packed_files(plain), "expert.json": b"{" + b" " * (1 << 20) + b"}"}
    assert "missing or too large" in refused(make_package_archive(files), tmp_path)


def test_a_huge_signature_is_refused(plain: bytes, tmp_path: Path) -> None:
    files = {**read_packed_files(plain), "model.sig": bytes((1 << 20) + 1)}
    assert "no signature" in refused(make_package_archive(files), tmp_path)


def test_equal_files_share_one_blob(plain: bytes, tmp_path: Path) -> None:
    files = {**read_packed_files(plain), "README.md": b"same", "LICENSE": b"same"}
    sink = CollectedFiles()
    contents = read_package(
        write_frame(make_package_archive(files), tmp_path / "x.expert"), sink=sink
    )
    assert contents.small["README.md"] == contents.small["LICENSE"] == b"same"
    assert len(sink.blobs) == 4


def test_a_sink_that_fails_stops_the_reading(package: Path) -> None:
    class Full(CollectedFiles):
        @contextmanager
        def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], object]]:
            raise OSError(28, "No space left on device")
            yield len

    with pytest.raises(OSError, match="No space"):
        read_package(package, sink=Full())


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(100), bytes(4096)])
def test_a_file_that_is_no_package_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.expert"
    path.write_bytes(content)
    with pytest.raises(ExpertError) as caught:
        read_package(path)
    assert isinstance(caught.value, InvalidPackageError)


def test_a_copy_reads_the_same(package: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(package, tmp_path / "copy.expert"))
    assert read_package(copy) == read_package(package)
