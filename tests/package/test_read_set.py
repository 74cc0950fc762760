"""Reading several packages from one archive: the golden path, and what must be refused."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.errors import DigestError, InvalidPackageError, NotFoundError
from expertctl.package import archive as archive_module
from expertctl.package.archive import END_OF_ARCHIVE, build_blob_name, build_header
from expertctl.package.layout import REF_NAME
from expertctl.package.read import read_package, read_set
from expertctl.reference import Digest
from expertctl.schema.strict_json import encode_canonical
from tests.package.forged_packages import (
    Entry,
    Files,
    edit_json_file,
    list_set_members,
    make_archive,
    make_layout,
    make_member,
    make_package_archive,
    make_set_layout,
    read_archive,
    read_packed_files,
    write_frame,
)

SLOW = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class CollectedSet:
    """A sink that keeps everything, each blob once."""

    def __init__(self) -> None:
        self.blobs: dict[Digest, bytes] = {}

    @contextmanager
    def open(self, digest: Digest, size: int) -> Iterator[Callable[[memoryview], object]]:
        assert digest not in self.blobs
        parts = bytearray()
        yield parts.extend
        assert len(parts) == size
        self.blobs[digest] = bytes(parts)


@pytest.fixture(scope="module")
def packages(package: Path, unsigned: Path) -> Mapping[str, Files]:
    """Two packages that share their weights; the first is signed."""
    other = edit_json_file(
        read_packed_files(read_archive(unsigned)),
        "expert.json",
        lambda m: m.update(name="acme/zwei"),
    )
    return {"acme/sql:1.0.0": read_packed_files(read_archive(package)), "acme/zwei:1.0.0": other}


@pytest.fixture(scope="module")
def tar(packages: Mapping[str, Files]) -> bytes:
    return make_archive(list_set_members(packages))


@pytest.fixture(scope="module")
def same(packages: Mapping[str, Files]) -> bytes:
    """An archive that is the same in every run: its signatures, whose length varies, are out."""
    unsigned = {n: {p: d for p, d in f.items() if p != "model.sig"} for n, f in packages.items()}
    return make_archive(list_set_members(unsigned))


def plain(data: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "x.tar"
    path.write_bytes(data)
    return path


def refused(data: bytes, tmp_path: Path) -> str:
    """The message of the refusal, of the plain tar as of the one in a frame."""
    messages = []
    for path in (plain(data, tmp_path), write_frame(data, tmp_path / "x.experts")):
        sink = CollectedSet()
        with pytest.raises((InvalidPackageError, DigestError)) as caught:
            list(read_set(path, sink=sink))
        assert all(Digest.compute(data) == digest for digest, data in sink.blobs.items())
        messages.append(caught.value.message.replace(path.name, "x"))
    assert messages[0].splitlines()[0] == messages[1].splitlines()[0]
    return messages[0]


def test_a_set_is_read_as_its_packages_are(
    packages: Mapping[str, Files], tar: bytes, tmp_path: Path
) -> None:
    alone = [
        read_package(write_frame(make_package_archive(f), tmp_path / "a.expert"))
        for f in packages.values()
    ]
    for path in (plain(tar, tmp_path), write_frame(tar, tmp_path / "x.experts")):
        sink, counted = CollectedSet(), list[int]()
        assert list(read_set(path, sink=sink, progress=counted.append)) == alone
        files = [data for package in packages.values() for data in package.values()]
        assert sorted(sink.blobs.values()) == sorted(set(files))
        assert sum(counted) == sum(map(len, set(files)))


def test_one_package_alone_may_be_a_set(packages: Mapping[str, Files], tmp_path: Path) -> None:
    one = {"acme/sql:1.0.0": packages["acme/sql:1.0.0"]}
    (contents,) = read_set(plain(make_archive(list_set_members(one)), tmp_path))
    assert contents.manifest.ref == "acme/sql@1.0.0"


def test_a_package_is_not_a_set_and_a_set_not_a_package(
    package: Path, tar: bytes, tmp_path: Path
) -> None:
    with pytest.raises(InvalidPackageError) as caught:
        read_set(package)
    assert "expertctl install FILE" in caught.value.hint
    with pytest.raises(InvalidPackageError) as caught:
        read_package(write_frame(tar, tmp_path / "x.experts"))
    assert "expertctl import FILE" in caught.value.hint


@given(data=st.data())
@SLOW
def test_a_flipped_byte_is_refused(data: st.DataObject, same: bytes, tmp_path: Path) -> None:
    changed = bytearray(same)
    changed[data.draw(st.integers(0, len(same) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((InvalidPackageError, DigestError)):
        list(read_set(plain(bytes(changed), tmp_path)))


@given(at=st.integers(0, 10**6))
@SLOW
def test_a_set_cut_short_anywhere_is_refused(at: int, tar: bytes, tmp_path: Path) -> None:
    whole = write_frame(tar, tmp_path / "x.experts").read_bytes()
    for data in (tar, whole):
        with pytest.raises(InvalidPackageError):
            read_set(plain(data[: at % len(data)], tmp_path))


Change = Callable[[list[Entry]], bytes]
"""Members are: oci-layout, index.json, two manifests, config, small files, the weights."""


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
        pytest.param(lambda e: make_archive([*e[:2], e[3], e[2], *e[4:]]), id="manifests swapped"),
        pytest.param(lambda e: make_archive([*e[:3], *e[4:]]), id="a manifest missing"),
        pytest.param(lambda e: make_archive([*e[:5], *reversed(e[5:])]), id="another order"),
        pytest.param(lambda e: make_archive(e[:-1]), id="a blob missing"),
        pytest.param(lambda e: make_archive([*e, e[-1]]), id="a blob twice"),
        pytest.param(
            lambda e: make_archive([*e, (build_blob_name(Digest.compute(b"x")), b"x")]),
            id="a blob nobody names",
        ),
        pytest.param(lambda e: make_archive([*e[:-1], ("../../x", e[-1][1])]), id="a traversal"),
        pytest.param(
            lambda e: make_archive([*e[:-1], ("/etc/x", e[-1][1])]), id="an absolute name"
        ),
        pytest.param(
            lambda e: make_archive([*e[:4], (e[4][0], b"{}"), *e[5:]]), id="another config"
        ),
        pytest.param(
            lambda e: make_archive([*e[:-1], (e[-1][0], e[-1][1][:-1] + b"!")]),
            id="another content",
        ),
    ],
)
def test_an_archive_that_is_not_the_one_of_its_index_is_refused(
    change: Change, packages: Mapping[str, Files], tmp_path: Path
) -> None:
    assert refused(change(list_set_members(packages)), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.experts", "x.tar"]


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"5", b"6", b"S", b"x", b"L"])
def test_a_link_device_or_special_member_is_refused(
    kind: bytes, packages: Mapping[str, Files], tar: bytes, tmp_path: Path
) -> None:
    entries = list_set_members(packages)
    block = bytearray(build_header(entries[5][0], len(entries[5][1])))
    block[156:157] = kind
    block[157 : 157 + 11] = b"/etc/passwd"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    at = sum(len(make_member(*entry)) for entry in entries[:5])
    assert "does not continue" in refused(tar[:at] + bytes(block) + tar[at + 512 :], tmp_path)


def renamed(packages: Mapping[str, Files], names: Mapping[str, str]) -> bytes:
    """A set whose index calls its packages otherwise."""
    return make_archive(list_set_members({names[name]: files for name, files in packages.items()}))


def test_a_package_under_another_name_is_refused(
    packages: Mapping[str, Files], tmp_path: Path
) -> None:
    first, second = packages
    for names in (
        {first: "acme/else:1.0.0", second: second},
        {first: "acme/sql:1.0.1", second: second},
        {first: second, second: first},
    ):
        assert "what index.json calls" in refused(renamed(packages, names), tmp_path)


def test_two_packages_of_one_name_and_version_are_refused(
    packages: Mapping[str, Files], tmp_path: Path
) -> None:
    layout = make_set_layout(packages)
    index = json.loads(layout.index)
    index["manifests"][1]["annotations"] = index["manifests"][0]["annotations"]
    entries = list_set_members(packages)
    entries[1] = ("index.json", encode_canonical(index))
    assert "acme/sql:1.0.0 is there twice" in refused(make_archive(entries), tmp_path)


def test_a_manifest_whose_size_is_a_lie_is_refused(
    packages: Mapping[str, Files], tmp_path: Path
) -> None:
    entries = list_set_members(packages)
    index = json.loads(entries[1][1])
    index["manifests"][0]["size"] += 1
    entries[1] = ("index.json", encode_canonical(index))
    assert "another size" in refused(make_archive(entries), tmp_path)


def test_a_foreign_manifest_is_refused(packages: Mapping[str, Files], tmp_path: Path) -> None:
    """A container image may be beside ours in a layout; it is nobody's expert."""
    entries = list_set_members(packages)
    foreign = encode_canonical({**json.loads(entries[2][1]), "subject": {}})
    index = json.loads(entries[1][1])
    index["manifests"][0] |= {"digest": str(Digest.compute(foreign)), "size": len(foreign)}
    entries[1:3] = [
        ("index.json", encode_canonical(index)),
        (build_blob_name(Digest.compute(foreign)), foreign),
    ]
    assert "manifest is not the one" in refused(make_archive(entries), tmp_path)


def test_a_bad_package_spoils_the_set_and_is_named(
    packages: Mapping[str, Files], tmp_path: Path
) -> None:
    bad = {**packages, "acme/zwei:1.0.0": {**packages["acme/zwei:1.0.0"], "setup.py": b"import os"}}
    message = refused(make_archive(list_set_members(bad)), tmp_path)
    assert "x acme/zwei:1.0.0: setup.py is not named in expert.json" in message


def test_a_file_that_poses_as_another_manifest_is_refused(
    packages: Mapping[str, Files], tmp_path: Path
) -> None:
    manifest = make_layout(packages["acme/sql:1.0.0"]).manifest
    entries = list_set_members(packages)
    files = {**packages["acme/zwei:1.0.0"], "README.md": manifest}
    posing = make_layout(files)
    index = json.loads(entries[1][1])
    index["manifests"][1] |= {
        "digest": str(posing.package_digest),
        "size": len(posing.manifest),
    }
    entries[1] = ("index.json", encode_canonical(index))
    entries[3] = (build_blob_name(posing.package_digest), posing.manifest)
    assert "it is a manifest of the set" in refused(make_archive(entries), tmp_path)


def test_what_is_kept_in_memory_is_bounded(
    tar: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "MAX_KEPT_BYTES", 5000)
    assert "more than 5000 bytes" in refused(tar, tmp_path)


def test_bytes_that_many_packages_share_count_for_each(
    packages: Mapping[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of tensors is read for each package that has it, so one must not be read forever."""
    monkeypatch.setattr(archive_module, "MAX_KEPT_BYTES", 50_000)
    files = packages["acme/zwei:1.0.0"]
    many = {f"{name}:1.0.0": _called(name, files) for name in map("acme/p{}".format, range(20))}
    data = make_archive(list_set_members(many))
    assert len(data) < 200_000
    assert "more than 50000 bytes" in refused(data, tmp_path)


def test_of_weights_only_the_header_counts(
    packages: Mapping[str, Files], tar: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [file for package in packages.values() for file in package.items()]
    weights = [data for path, data in files if path.endswith(".safetensors")]
    headers = [8 + int.from_bytes(data[:8], "little") for data in weights]
    assert sum(headers) < sum(map(len, weights)) / 2
    looked_at = sum(len(data) for _, data in files if data not in weights) + sum(headers)
    monkeypatch.setattr(archive_module, "MAX_KEPT_BYTES", looked_at)
    for path in (plain(tar, tmp_path), write_frame(tar, tmp_path / "x.experts")):
        assert len(list(read_set(path))) == 2
    monkeypatch.setattr(archive_module, "MAX_KEPT_BYTES", looked_at - 1)
    assert f"more than {looked_at - 1} bytes" in refused(tar, tmp_path)


def _called(name: str, files: Files) -> Files:
    return edit_json_file(files, "expert.json", lambda manifest: manifest.update(name=name))


def test_packages_are_looked_into_one_by_one(packages: Mapping[str, Files], tmp_path: Path) -> None:
    bad = {**packages, "acme/zwei:1.0.0": {**packages["acme/zwei:1.0.0"], "setup.py": b"import os"}}
    contents = read_set(plain(make_archive(list_set_members(bad)), tmp_path))
    assert next(contents).manifest.ref == "acme/sql@1.0.0"
    with pytest.raises(InvalidPackageError):
        next(contents)


def test_bytes_around_the_frame_are_refused(tar: bytes, tmp_path: Path) -> None:
    data = write_frame(tar, tmp_path / "x.experts").read_bytes()
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0evil"
    for changed in (data + b"x", data + data, skippable + data, data + skippable):
        with pytest.raises(InvalidPackageError):
            read_set(plain(changed, tmp_path))


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InvalidPackageError, match="not a regular file"):
            read_set(path)
    with pytest.raises(NotFoundError):
        read_set(tmp_path / "none")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + bytes(2000), bytes(4096)])
def test_a_file_that_is_no_set_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidPackageError):
        read_set(plain(content, tmp_path))


def test_the_names_are_those_of_the_annotation(tar: bytes, tmp_path: Path) -> None:
    contents = list(read_set(plain(tar, tmp_path)))
    assert [c.manifest.ref for c in contents] == ["acme/sql@1.0.0", "acme/zwei@1.0.0"]
    assert REF_NAME.encode() in tar
