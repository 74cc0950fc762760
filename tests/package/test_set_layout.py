"""The index of a set: fixed bytes for fixed packages, read back strictly."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.layout import (
    MAX_FILE_BYTES,
    MAX_PACKAGES,
    REF_NAME,
    PackageLayout,
    SetLayout,
    build_index_name,
    build_layout,
    build_set_layout,
    parse_set_index,
)
from expertctl.reference import Digest, FileDigest, PackageName, Version
from expertctl.schema.strict_json import encode_canonical


def file(path: str, content: bytes, size: int | None = None) -> FileDigest:
    return FileDigest(path, len(content) if size is None else size, Digest.compute(content))


def package(name: str, *more: FileDigest) -> PackageLayout:
    return build_layout([file("expert.json", name.encode()), *more], None)


def a_set(*names: str) -> SetLayout:
    return build_set_layout({name: package(name) for name in names})


TWO = a_set("acme/sql:1.0.0", "acme/english:2.0.0-rc.1")


def test_the_index_names_each_package_as_oci_tools_do() -> None:
    index = json.loads(TWO.index)
    assert set(index) == {"manifests", "mediaType", "schemaVersion"}
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    names = [entry["annotations"] for entry in index["manifests"]]
    assert names == [{REF_NAME: "acme/english:2.0.0-rc.1"}, {REF_NAME: "acme/sql:1.0.0"}]
    for entry, layout in zip(index["manifests"], TWO.packages.values(), strict=True):
        assert entry["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
        assert entry["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
        assert (entry["digest"], entry["size"]) == (
            str(layout.package_digest),
            len(layout.manifest),
        )


NAMES = st.from_regex(r"[a-z0-9]{1,8}/[a-z0-9]{1,8}:[1-9]\.[0-9]\.[0-9]", fullmatch=True)


@given(st.sets(NAMES, min_size=1, max_size=20), st.randoms())
@settings(deadline=None, max_examples=60)
def test_what_was_made_is_read_back_in_any_order(names: set[str], random: Any) -> None:
    shuffled = sorted(names)
    random.shuffle(shuffled)
    layout = a_set(*shuffled)
    assert layout == a_set(*sorted(names))
    named = parse_set_index(layout.index, what="x")
    assert list(named) == sorted(names)
    assert [d.digest for d in named.values()] == [Digest.compute(m) for m in layout.manifests]


def test_a_shared_blob_is_there_once_and_weights_come_last() -> None:
    shared = file("a.safetensors", b"weights")
    layout = build_set_layout({n: package(n, shared) for n in ("acme/b:1.0.0", "acme/a:1.0.0")})
    assert [digest for digest, _ in layout.blobs] == [
        Digest.compute(b"acme/a:1.0.0"),
        Digest.compute(b"acme/b:1.0.0"),
        Digest.compute(b"weights"),
    ]


def test_the_name_is_that_of_package_and_version() -> None:
    name = build_index_name(PackageName.parse("acme/sql"), Version.parse("1.0.0-rc.1"))
    assert name == "acme/sql:1.0.0-rc.1"


def test_what_cannot_be_in_one_set_is_named() -> None:
    with pytest.raises(InvalidPackageError, match="1 to 256 allowed"):
        build_set_layout({})
    with pytest.raises(InvalidPackageError, match="257 packages"):
        a_set(*(f"acme/x{i}:1.0.0" for i in range(MAX_PACKAGES + 1)))
    with pytest.raises(InvalidPackageError, match="one manifest"):
        build_set_layout({"acme/a:1.0.0": package("x"), "acme/b:1.0.0": package("x")})
    lying = package("b", file("README.md", b"text", 9)), package("a", file("README.md", b"text"))
    with pytest.raises(InvalidPackageError, match="two sizes"):
        build_set_layout({"acme/a:1.0.0": lying[1], "acme/b:1.0.0": lying[0]})
    one = package("a")
    posing = package("b", FileDigest("README.md", len(one.manifest), one.package_digest))
    with pytest.raises(InvalidPackageError, match=r"README\.md: it is a manifest of the set"):
        build_set_layout({"acme/a:1.0.0": one, "acme/b:1.0.0": posing})
    large = {
        f"acme/x{i}:1.0.0": package(
            str(i), file("a.safetensors", b"weights %d" % i, MAX_FILE_BYTES)
        )
        for i in range(9)
    }
    with pytest.raises(InvalidPackageError, match="bytes in all"):
        build_set_layout(large)


def test_an_index_of_packages_up_to_the_limit_is_read() -> None:
    names = [f"{'a' * 64}/{i:064}:1.0.0-{'x' * 200}" for i in range(MAX_PACKAGES)]
    assert len(parse_set_index(a_set(*names).index, what="x")) == MAX_PACKAGES


def first(index: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = index["manifests"][0]
    return entry


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda i: i.update(manifests=[]), id="no package"),
        pytest.param(lambda i: i.update(manifests={}), id="no list"),
        pytest.param(lambda i: i["manifests"].reverse(), id="another order"),
        pytest.param(lambda i: i["manifests"].append(first(i)), id="a package twice"),
        pytest.param(
            lambda i: i["manifests"].append(
                {**i["manifests"][1], "annotations": first(i)["annotations"]}
            ),
            id="two contents for one name",
        ),
        pytest.param(lambda i: i.update(annotations={}), id="annotations of the index"),
        pytest.param(lambda i: i.update(subject=first(i)), id="subject"),
        pytest.param(lambda i: first(i).update(urls=["file:///etc/passwd"]), id="urls"),
        pytest.param(lambda i: first(i).update(data="eA=="), id="data"),
        pytest.param(lambda i: first(i).update(platform={"os": "linux"}), id="platform"),
        pytest.param(lambda i: first(i).update(size=True), id="a size that is no number"),
        pytest.param(
            lambda i: first(i).update(mediaType=i["mediaType"]), id="an index in the index"
        ),
        pytest.param(lambda i: first(i).update(artifactType="application/x"), id="artifactType"),
        pytest.param(lambda i: first(i).update(digest="sha256:../../x"), id="digest traversal"),
        pytest.param(
            lambda i: first(i).update(digest=first(i)["digest"].upper()), id="upper-case digest"
        ),
        pytest.param(lambda i: first(i).pop("annotations"), id="no name"),
        pytest.param(lambda i: first(i).update(annotations=[]), id="annotations are a list"),
        pytest.param(lambda i: first(i)["annotations"].update(title="x"), id="another annotation"),
        pytest.param(lambda i: i.update(schemaVersion=1), id="another version"),
    ],
)
def test_an_index_that_is_not_ours_is_refused(change: Any) -> None:
    document = json.loads(TWO.index)
    change(document)
    with pytest.raises(InvalidPackageError):
        parse_set_index(encode_canonical(document), what="x")


@pytest.mark.parametrize(
    "name",
    [
        "../x:1.0.0", "/etc/passwd:1.0.0", "acme/sql", "acme/sql:", "acme/sql:1.0",
        "acme/sql:01.0.0", "acme/sql:1.0.0+build", "acme/sql:1.0.0:1.0.0", "Acme/sql:1.0.0",
        "acme/sql:v1.0.0", "acme/sql:latest", "localhost/acme/sql:1.0.0", "acme/sql@1.0.0",
        "acme/../x:1.0.0", "acme\\x:1.0.0", "acme/sql:1.0.0 ", "acme/s\0l:1.0.0",
        "\u0430cme/sql:1.0.0", "",
    ],
)  # fmt: skip
def test_a_name_that_is_no_package_and_version_is_refused(name: str) -> None:
    document = json.loads(TWO.index)
    first(document)["annotations"][REF_NAME] = name
    with pytest.raises(InvalidPackageError, match="is not called"):
        parse_set_index(encode_canonical(document), what="x")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xef\xbb\xbf{}", b"{}" + b" " * (1 << 19)])
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        parse_set_index(data, what="x")


def test_other_bytes_for_the_same_index_are_refused() -> None:
    with pytest.raises(InvalidPackageError, match="not the one that a set has"):
        parse_set_index(json.dumps(json.loads(TWO.index)).encode(), what="x")
