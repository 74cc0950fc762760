"""The OCI layout: fixed bytes for fixed files, and nothing in a manifest that could vary."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.package.layout import (
    CONFIG,
    MAX_FILE_BYTES,
    MAX_FILES,
    build_layout,
    choose_media_type,
    compute_content_digest,
    describe_name_problem,
    find_file_problems,
    parse_oci_index,
    parse_oci_manifest,
)
from expertctl.reference import Digest, FileDigest
from expertctl.schema.strict_json import encode_canonical


def file(path: str, size: int = 1, content: bytes | None = None) -> FileDigest:
    return FileDigest(path, size, Digest.compute(content if content is not None else path.encode()))


FILES = [file("expert.json", 7), file("adapter_model.safetensors", 9), file("README.md")]
SIGNATURE = file("model.sig", 3)
NAMES = st.from_regex(r"[a-z0-9_][a-z0-9_-]{0,20}", fullmatch=True).filter(
    lambda name: describe_name_problem(name) is None
)


def test_the_manifest_is_the_one_of_the_specification() -> None:
    layout = build_layout(FILES, SIGNATURE)
    manifest = json.loads(layout.manifest)
    assert set(manifest) == {"artifactType", "config", "layers", "mediaType", "schemaVersion"}
    assert manifest["schemaVersion"] == 2
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"] == {
        "mediaType": "application/vnd.cncf.model.config.v1+json",
        "digest": f"sha256:{hashlib.sha256(CONFIG).hexdigest()}",
        "size": len(CONFIG),
    }
    paths = [layer["annotations"]["org.cncf.model.filepath"] for layer in manifest["layers"]]
    assert paths == ["README.md", "adapter_model.safetensors", "expert.json", "model.sig"]
    assert manifest["layers"][1] == {
        "mediaType": "application/vnd.cncf.model.weight.v1.raw",
        "digest": f"sha256:{hashlib.sha256(b'adapter_model.safetensors').hexdigest()}",
        "size": 9,
        "annotations": {"org.cncf.model.filepath": "adapter_model.safetensors"},
    }


def test_digests_are_the_ones_of_the_definition() -> None:
    layout = build_layout(FILES, None)
    rows = ",".join(
        f'["{f.path}",{f.size},"{f.digest.hex}"]' for f in sorted(FILES, key=lambda f: f.path)
    )
    assert compute_content_digest(FILES).hex == hashlib.sha256(f"[{rows}]".encode()).hexdigest()
    assert layout.package_digest.hex == hashlib.sha256(layout.manifest).hexdigest()


def test_a_signature_changes_the_package_digest_and_not_the_content_digest() -> None:
    plain, signed = build_layout(FILES, None), build_layout(FILES, SIGNATURE)
    assert plain.package_digest != signed.package_digest
    assert compute_content_digest(plain.files) == compute_content_digest(signed.files)


@given(st.permutations(FILES))
def test_the_order_of_files_does_not_matter(files: list[FileDigest]) -> None:
    assert build_layout(files, SIGNATURE) == build_layout(FILES, SIGNATURE)
    assert compute_content_digest(files) == compute_content_digest(FILES)


@given(st.sets(NAMES, max_size=20), st.booleans())
@settings(deadline=None, max_examples=60)
def test_what_was_made_is_read_back(names: set[str], signed: bool) -> None:
    files = [file("expert.json"), *(file(n, i) for i, n in enumerate(sorted(names)))]
    layout = build_layout(files, SIGNATURE if signed else None)
    descriptor = parse_oci_index(layout.index, what="x")
    assert (descriptor.digest, descriptor.size) == (layout.package_digest, len(layout.manifest))
    assert parse_oci_manifest(layout.manifest, what="x") == layout


def test_weights_come_last_and_equal_files_share_a_blob() -> None:
    same = [file("LICENSE", 4, b"same"), file("README.md", 4, b"same")]
    layout = build_layout([*same, file("a.safetensors"), file("expert.json")], SIGNATURE)
    assert [digest for digest, _ in layout.blobs] == [
        Digest.compute(b"same"),
        Digest.compute(b"expert.json"),
        Digest.compute(b"model.sig"),
        Digest.compute(b"a.safetensors"),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "../x", "/abs", "C:\\x", "\\\\srv\\x", "..\\x", "%2e%2e", "foo/../../x", "a/b", "a\0b",
        "x.", "x ", "CON", "aux.txt", "nul", "LPT1.json", "com0", "a:b", "", ".", "..",
        ".hidden", "-rf",
        "é.json", "e\u0301.json", "a\nb", "a" * 101, "x\u202egpj", "~root", "$HOME",
    ],
)  # fmt: skip
def test_file_names_that_could_leave_the_directory_are_refused(name: str) -> None:
    assert describe_name_problem(name) is not None
    with pytest.raises(InvalidPackageError):
        build_layout([*FILES, file(name)], None)


def test_ordinary_file_names_are_accepted() -> None:
    names = ["adapter_model.safetensors", "LICENSE-MIT", "chat.jinja", "_x", "console.txt", "a..b"]
    assert [name for name in names if describe_name_problem(name)] == []


def test_every_problem_of_a_file_set_is_named() -> None:
    files = [
        file("a/b"),
        file("x.json"),
        file("X.json"),
        file("large.safetensors", MAX_FILE_BYTES + 1),
        file("config.txt", len(CONFIG), CONFIG),
        *(file(f"f{i}") for i in range(MAX_FILES)),
    ]
    problems = "\n".join(find_file_problems(files))
    for text in ("'a/b'", "'x.json' is there twice", "large", "reserved", "at most 64", "missing"):
        assert text in problems


def test_two_sizes_for_one_content_are_refused() -> None:
    """Only one can be true, and the content digest would hold the other."""
    lying = [file("LICENSE", 4, b"same"), file("README.md", 5, b"same")]
    with pytest.raises(InvalidPackageError, match="has two sizes"):
        build_layout([*lying, file("expert.json")], None)


def test_a_total_beyond_the_limit_is_refused() -> None:
    files = [file("expert.json"), *(file(f"{i}.safetensors", MAX_FILE_BYTES) for i in range(3))]
    assert any("in all" in problem for problem in find_file_problems(files))


def changed(path: list[Any], value: Any) -> bytes:
    manifest = json.loads(build_layout(FILES, SIGNATURE).manifest)
    target = manifest
    for step in path[:-1]:
        target = target[step]
    if value is None:
        del target[path[-1]]
    else:
        target[path[-1]] = value
    return encode_canonical(manifest)


ANNOTATIONS = ["layers", 0, "annotations"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(["mediaType"], "application/vnd.oci.image.index.v1+json", id="index type"),
        pytest.param(["artifactType"], "application/vnd.other", id="artifact type"),
        pytest.param(["artifactType"], None, id="no artifact type"),
        pytest.param(["schemaVersion"], 1, id="schema version"),
        pytest.param(["subject"], {"digest": f"sha256:{'0' * 64}"}, id="subject"),
        pytest.param(["annotations"], {"x": "y"}, id="annotations"),
        pytest.param(["manifests"], [], id="manifest that is an index too"),
        pytest.param(["config", "digest"], f"sha256:{'0' * 64}", id="another config"),
        pytest.param(["config", "data"], "e30=", id="config data"),
        pytest.param(["layers"], [], id="no layers"),
        pytest.param(["layers"], "x", id="layers of text"),
        pytest.param(["layers", 0], 5, id="a layer that is a number"),
        pytest.param(["layers", 0, "urls"], ["http://example.com"], id="foreign urls"),
        pytest.param(["layers", 0, "data"], "eA==", id="data"),
        pytest.param(["layers", 0, "size"], -1, id="negative size"),
        pytest.param(["layers", 0, "size"], True, id="size that is true"),
        pytest.param(["layers", 0, "size"], 2**53 - 1, id="huge size"),
        pytest.param(["layers", 0, "digest"], "sha256:../../x", id="digest with a path"),
        pytest.param(["layers", 0, "digest"], f"sha256:{'A' * 64}", id="upper-case digest"),
        pytest.param(["layers", 0, "digest"], f"sha512:{'0' * 128}", id="other algorithm"),
        pytest.param(["layers", 0, "mediaType"], "application/zip", id="layer type"),
        pytest.param(["layers", 0, "mediaType"], None, id="no layer type"),
        pytest.param(["layers", 0, "annotations"], None, id="no annotations"),
        pytest.param([*ANNOTATIONS, "org.cncf.model.filepath"], "../README.md", id="traversal"),
        pytest.param([*ANNOTATIONS, "org.cncf.model.filepath"], "/etc/passwd", id="absolute"),
        pytest.param([*ANNOTATIONS, "org.cncf.model.filepath"], "expert.json", id="duplicate"),
        pytest.param([*ANNOTATIONS, "org.cncf.model.filepath"], "zzz", id="unsorted"),
        pytest.param([*ANNOTATIONS, "org.cncf.model.filepath"], 5, id="path that is a number"),
        pytest.param(
            [*ANNOTATIONS, "org.opencontainers.image.title"], "../x", id="another annotation"
        ),
    ],
)
def test_a_manifest_that_is_not_the_one_of_its_files_is_refused(
    path: list[Any], value: Any
) -> None:
    with pytest.raises(InvalidPackageError):
        parse_oci_manifest(changed(path, value), what="x")


def test_a_signature_that_is_not_last_is_refused() -> None:
    manifest = json.loads(build_layout(FILES, SIGNATURE).manifest)
    manifest["layers"] = sorted(manifest["layers"], key=str)
    manifest["layers"].insert(0, manifest["layers"].pop())
    with pytest.raises(InvalidPackageError):
        parse_oci_manifest(encode_canonical(manifest), what="x")


def test_another_spelling_of_the_same_manifest_is_refused() -> None:
    manifest = json.loads(build_layout(FILES, None).manifest)
    with pytest.raises(InvalidPackageError, match="not the one that its files have"):
        parse_oci_manifest(json.dumps(manifest, indent=1).encode(), what="x")


def test_a_layer_too_many_is_refused() -> None:
    manifest = json.loads(build_layout(FILES, None).manifest)
    manifest["layers"] *= MAX_FILES
    with pytest.raises(InvalidPackageError):
        parse_oci_manifest(encode_canonical(manifest), what="x")


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["manifests"].append(index["manifests"][0]),
        lambda index: index["manifests"].clear(),
        lambda index: index.pop("manifests"),
        lambda index: index["manifests"][0].update(annotations={"x": "y"}),
        lambda index: index["manifests"][0].update(mediaType="application/x"),
        lambda index: index["manifests"][0].update(digest="sha256:x"),
        lambda index: index["manifests"].insert(0, "text"),
        lambda index: index.update(subject={}),
    ],
)
def test_an_index_that_is_not_ours_is_refused(change: Any) -> None:
    index = json.loads(build_layout(FILES, None).index)
    change(index)
    with pytest.raises(InvalidPackageError):
        parse_oci_index(encode_canonical(index), what="x")


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=100)
def test_random_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        parse_oci_manifest(data, what="x")
    with pytest.raises(InvalidPackageError):
        parse_oci_index(data, what="x")


def test_media_types_follow_the_file_name() -> None:
    assert choose_media_type("x.safetensors").endswith("weight.v1.raw")
    assert choose_media_type("expert.json").endswith("weight.config.v1.raw")
    assert choose_media_type("LICENSE.txt").endswith("doc.v1.raw")
    assert choose_media_type("model.sig").endswith("doc.v1.raw")
