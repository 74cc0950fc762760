"""Manifests over HTTP: kept as they came, by digest and tag, and only when they are whole."""

import threading
from queue import Queue
from threading import Thread

import anyio
import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from registry_server.access import rights
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.oci.images import (
    CONFIG,
    IMAGE,
    INDEX,
    Fields,
    compute_digest,
    encode_json,
    make_descriptor,
    make_image,
    make_image_index,
    push_blob,
    push_image,
    put_manifest,
    random_bytes,
    read_error_code,
)

NOWHERE = compute_digest(b"nowhere")
DOCKER = "application/vnd.docker.distribution.manifest.v2+json"


def at(reference: str, repository: str = "acme/x") -> str:
    return f"/v2/{repository}/manifests/{reference}"


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_manifest_comes_back_as_the_bytes_that_came(alice: TestClient, algorithm: str) -> None:
    content = b" " + encode_json(make_image(push_blob(alice, "acme/x", b"{}"))) + b"\n"
    digest = compute_digest(content, algorithm)
    stored = put_manifest(alice, "acme/x", digest, content)
    assert (stored.status_code, stored.headers["Location"]) == (201, at(digest))
    got = alice.get(at(digest))
    assert (got.status_code, got.content, got.headers["Content-Type"]) == (200, content, IMAGE)
    assert got.headers["Docker-Content-Digest"] == digest
    assert "immutable" in got.headers["Cache-Control"]


def test_head_says_what_get_says_without_the_bytes(alice: TestClient) -> None:
    push_image(alice, "acme/x", "v1")
    got, head = alice.get(at("v1")), alice.head(at("v1"))
    assert head.content == b""
    assert {**head.headers, "x-request-id": ""} == {**got.headers, "x-request-id": ""}


def test_a_tag_names_the_manifest_that_came_last_under_it(alice: TestClient) -> None:
    first = push_image(alice, "acme/x", "v1")
    second = push_image(alice, "acme/x", "v1", annotations={"a": "b"})
    answer = alice.get(at("v1"))
    assert answer.headers["Docker-Content-Digest"] == second != first
    assert answer.headers["Cache-Control"] == "private, no-cache"
    assert alice.get(at(first)).status_code == 200


def test_a_client_that_has_the_manifest_is_told_so(alice: TestClient) -> None:
    digest = push_image(alice, "acme/x", "v1")
    headers = {"If-None-Match": f'"{digest}"'}
    assert [alice.get(at(r), headers=headers).status_code for r in ("v1", digest)] == [304, 304]


def test_tags_can_be_given_beside_the_digest(alice: TestClient) -> None:
    content = encode_json(make_image(push_blob(alice, "acme/x", b"{}")))
    digest = compute_digest(content, "sha512")
    answer = put_manifest(alice, "acme/x", f"{digest}?tag=v1&tag=latest", content)
    assert answer.headers.get_list("OCI-Tag") == ["v1", "latest"]
    for tag in ("v1", "latest"):
        assert alice.get(at(tag)).headers["Docker-Content-Digest"] == digest


@pytest.mark.parametrize("tag", ["-v1", ".v1", "a" * 129, "1.0.0+build", "a b", "ä", "", "a/b"])
def test_what_is_no_tag_stores_nothing(alice: TestClient, tag: str) -> None:
    content = encode_json(make_image(push_blob(alice, "acme/x", b"{}")))
    answer = alice.put(
        at(compute_digest(content)),
        params={"tag": tag},
        content=content,
        headers={"Content-Type": IMAGE},
    )
    assert (answer.status_code, read_error_code(answer)) == (400, "TAG_INVALID")
    assert alice.get(at(compute_digest(content))).status_code == 404
    direct = put_manifest(alice, "acme/x", tag.replace("/", "%2f") or "+", content)
    assert direct.status_code in {400, 404}


def test_more_tags_than_anybody_needs_are_refused(alice: TestClient) -> None:
    content = encode_json(make_image(push_blob(alice, "acme/x", b"{}")))
    query = "&".join(f"tag=v{number}" for number in range(65))
    answer = put_manifest(alice, "acme/x", f"{compute_digest(content)}?{query}", content)
    assert (answer.status_code, read_error_code(answer)) == (400, "TAG_INVALID")


@pytest.mark.parametrize(
    "digest", ["sha256:baddigeststring", "sha256:" + "A" * 64, "md5:" + "0" * 32, "sha256:"]
)
def test_nothing_is_stored_under_what_is_no_digest(alice: TestClient, digest: str) -> None:
    answer = alice.put(at(digest))
    assert (answer.status_code, read_error_code(answer)) == (400, "DIGEST_INVALID")


@pytest.mark.parametrize(
    "reference",
    [".INVALID_MANIFEST_NAME", "a" * 129, "-v1", "sha256:baddigest", "sha256:" + "A" * 64, "md5:0"],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE"])
def test_no_manifest_is_there_under_a_malformed_reference(
    alice: TestClient, method: str, reference: str
) -> None:
    """`.INVALID_MANIFEST_NAME` is what the conformance tests of the specification ask for."""
    answer = alice.request(method, at(reference))
    assert answer.status_code == 404
    assert method == "HEAD" or read_error_code(answer) == "MANIFEST_UNKNOWN"


def test_a_manifest_under_the_digest_of_another_is_refused(alice: TestClient) -> None:
    content = encode_json(make_image(push_blob(alice, "acme/x", b"{}")))
    answer = put_manifest(alice, "acme/x", compute_digest(content), content + b"  ")
    assert (answer.status_code, read_error_code(answer)) == (400, "DIGEST_INVALID")


@pytest.mark.parametrize("reference", ["missing", NOWHERE])
def test_a_manifest_that_is_not_there_is_404(alice: TestClient, reference: str) -> None:
    for repository in ("acme/x", "acme/never"):
        answer = alice.get(at(reference, repository))
        assert (answer.status_code, read_error_code(answer)) == (404, "MANIFEST_UNKNOWN")


def test_a_manifest_is_refused_before_what_it_names_is_there(alice: TestClient) -> None:
    config = push_blob(alice, "acme/x", b"{}")
    elsewhere = push_blob(alice, "acme/y", random_bytes(100))
    documents: list[Fields] = [
        make_image(NOWHERE),
        make_image(config, [make_descriptor(NOWHERE, 10)]),
        make_image(config, [make_descriptor(elsewhere, 100)]),
        make_image_index([make_descriptor(NOWHERE, 10, IMAGE)]),
        make_image_index([make_descriptor(config, 2, IMAGE)]),
    ]
    for document in documents:
        answer = put_manifest(alice, "acme/x", "v1", document)
        assert (answer.status_code, read_error_code(answer)) == (404, "MANIFEST_BLOB_UNKNOWN")
    assert alice.get(at("v1")).status_code == 404


def test_layers_that_lie_elsewhere_need_not_be_here(alice: TestClient) -> None:
    config = push_blob(alice, "acme/x", b"{}")
    kind = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
    layer = make_descriptor(NOWHERE, 123456, kind, urls=["https://store.example.com/x"])
    assert put_manifest(alice, "acme/x", "v1", make_image(config, [layer])).status_code == 201


def test_an_index_of_an_index_is_kept(alice: TestClient) -> None:
    first = push_image(alice, "acme/x", "v1")
    inner = put_manifest(
        alice, "acme/x", "inner", make_image_index([make_descriptor(first, 10, IMAGE)])
    )
    digest = inner.headers["Docker-Content-Digest"]
    outer = put_manifest(
        alice, "acme/x", "outer", make_image_index([make_descriptor(digest, 10, INDEX)])
    )
    assert (inner.status_code, outer.status_code) == (201, 201)
    assert alice.get(at("outer")).headers["Content-Type"] == INDEX


@pytest.mark.parametrize(
    "document",
    [
        make_image_index(),
        make_image("CONFIG", []),
        make_image("CONFIG", [], **{"x-custom": {"any": 1}}),
        make_image("CONFIG", [make_descriptor("CONFIG", 2, data="e30=")]),
        {key: value for key, value in make_image("CONFIG").items() if key != "mediaType"},
        make_image("CONFIG", [make_descriptor("CONFIG", 2)] * 3),
        {**make_image("CONFIG"), "mediaType": DOCKER},
    ],
    ids=["empty index", "no layers", "custom", "data", "no media type", "twice", "docker"],
)
def test_unusual_and_sound_manifests_are_kept(alice: TestClient, document: Fields) -> None:
    config = push_blob(alice, "acme/x", b"{}")
    content = encode_json(document).replace(b'"CONFIG"', f'"{config}"'.encode())
    answer = put_manifest(alice, "acme/x", "v1", content, document.get("mediaType", IMAGE))
    assert answer.status_code == 201, answer.text
    assert alice.get(at("v1")).content == content


UNSOUND = {
    "not JSON": b"{",
    "a list": b"[]",
    "duplicate keys": b'{"schemaVersion": 2, "schemaVersion": 2}',
    "not UTF-8": b'{"schemaVersion": 2, "a": "\xff"}',
    "deep": b'{"a":' * 100 + b"1" + b"}" * 100,
    "schema 1": encode_json({**make_image(NOWHERE), "schemaVersion": 1}),
    "no schema": encode_json({"mediaType": IMAGE, "config": {}, "layers": []}),
    "no config": encode_json({"schemaVersion": 2, "mediaType": IMAGE, "layers": []}),
    "no layers": encode_json({**make_image(NOWHERE), "layers": None}),
    "layers no list": encode_json({**make_image(NOWHERE), "layers": {}}),
    "layer no object": encode_json({**make_image(NOWHERE), "layers": ["x"]}),
    "size a text": encode_json(make_image(NOWHERE, [make_descriptor(NOWHERE, "2")])),  # type: ignore[arg-type]
    "size below zero": encode_json(make_image(NOWHERE, [make_descriptor(NOWHERE, -1)])),
    "size a boolean": encode_json(make_image(NOWHERE, [make_descriptor(NOWHERE, True)])),
    "annotations a list": encode_json(make_image(NOWHERE, annotations=[])),
    "annotations not texts": encode_json(make_image(NOWHERE, annotations={"a": 1})),
    "artifact type a number": encode_json(make_image(NOWHERE, artifactType=3)),
    "artifact type too long": encode_json(make_image(NOWHERE, artifactType="a" * 256)),
    "subject a text": encode_json(make_image(NOWHERE, subject=NOWHERE)),
    "too many layers": encode_json(make_image(NOWHERE, [make_descriptor(NOWHERE, 1)] * 4097)),
    "an index with layers": encode_json({**make_image(NOWHERE), "manifests": []}),
    "schema 1 layers": encode_json({**make_image(NOWHERE), "fsLayers": []}),
    "another type inside": encode_json({**make_image(NOWHERE), "mediaType": INDEX}),
    "type a number": encode_json({**make_image(NOWHERE), "mediaType": 2}),
}


@pytest.mark.parametrize("content", UNSOUND.values(), ids=UNSOUND.keys())
def test_a_malformed_or_ambiguous_manifest_is_refused(alice: TestClient, content: bytes) -> None:
    answer = put_manifest(alice, "acme/x", "v1", content)
    assert (answer.status_code, read_error_code(answer)) == (400, "MANIFEST_INVALID")


@pytest.mark.parametrize(
    ("document", "media_type"),
    [
        (make_image(NOWHERE), INDEX),
        (make_image_index(), IMAGE),
        ({**make_image_index(), "mediaType": IMAGE}, IMAGE),
        ({**make_image(NOWHERE), "mediaType": INDEX}, INDEX),
        ({"schemaVersion": 2, "manifests": [], "layers": [], "config": {}}, INDEX),
        ({"schemaVersion": 2, "manifests": [], "layers": [], "config": {}}, IMAGE),
        ({"schemaVersion": 2, "manifests": []}, "application/json"),
        ({"schemaVersion": 2, "manifests": []}, "text/html"),
        ({"schemaVersion": 1}, "application/vnd.docker.distribution.manifest.v1+json"),
    ],
)
def test_no_document_is_a_manifest_to_one_reader_and_an_index_to_another(
    alice: TestClient, document: Fields, media_type: str
) -> None:
    answer = put_manifest(alice, "acme/x", "v1", document, media_type)
    assert (answer.status_code, read_error_code(answer)) == (400, "MANIFEST_INVALID")


def test_parameters_of_the_media_type_are_no_part_of_it(alice: TestClient) -> None:
    answer = put_manifest(alice, "acme/x", "v1", make_image_index(), f"{INDEX}; charset=utf-8")
    assert answer.status_code == 201
    assert alice.get(at("v1")).headers["Content-Type"] == INDEX


@pytest.mark.parametrize("name", ["config", "layers", "subject"])
def test_a_digest_of_an_unknown_kind_inside_is_refused(alice: TestClient, name: str) -> None:
    bad = make_descriptor("md5:" + "0" * 32, 2, CONFIG)
    value: object = [bad] if name == "layers" else bad
    answer = put_manifest(alice, "acme/x", "v1", {**make_image(NOWHERE), name: value})
    assert (answer.status_code, read_error_code(answer)) == (400, "DIGEST_INVALID")


def test_a_manifest_of_four_mebibytes_is_the_largest(alice: TestClient) -> None:
    config = push_blob(alice, "acme/x", b"{}")
    content = encode_json(make_image(config))
    largest = content + b" " * ((4 << 20) - len(content))
    assert put_manifest(alice, "acme/x", "v1", largest).status_code == 201
    declared = put_manifest(alice, "acme/x", "v2", largest + b" ")
    streamed = alice.put(at("v2"), content=iter([largest, b" "]), headers={"Content-Type": IMAGE})
    assert [(a.status_code, read_error_code(a)) for a in (declared, streamed)] == [
        (413, "SIZE_INVALID")
    ] * 2
    assert alice.get(at("v2")).status_code == 404


def test_manifests_count_in_the_quota(served: RegistryHarness) -> None:
    secret = served.create_user("eve")
    served.create_namespace("small", owner="eve", quota=1000)
    eve = served.client(secret)
    push_image(eve, "small/x", "v1")
    big = make_image(push_blob(eve, "small/x", b"{}"), annotations={"a": "b" * 1000})
    answer = put_manifest(eve, "small/x", "v2", big)
    assert (answer.status_code, read_error_code(answer)) == (403, "DENIED")
    push_image(eve, "small/x", "v1")


def test_the_subject_of_a_manifest_is_named_and_need_not_be_there(alice: TestClient) -> None:
    config = push_blob(alice, "acme/x", b"{}")
    document = make_image(config, subject=make_descriptor(NOWHERE, 5, IMAGE))
    answer = put_manifest(alice, "acme/x", "v1", document)
    assert (answer.status_code, answer.headers["OCI-Subject"]) == (201, NOWHERE)


def test_removing_a_tag_keeps_the_manifest(alice: TestClient) -> None:
    digest = push_image(alice, "acme/x", "v1")
    push_image(alice, "acme/x", "v2")
    assert alice.delete(at("v1")).status_code == 202
    assert alice.get(at("v1")).status_code == 404
    assert alice.get(at(digest)).status_code == 200
    assert alice.get(at("v2")).status_code == 200
    assert alice.delete(at("v1")).status_code == 404


def test_removing_a_manifest_removes_its_tags(alice: TestClient) -> None:
    digest = push_image(alice, "acme/x", "v1")
    push_image(alice, "acme/x", "v2")
    assert alice.delete(at(digest)).status_code == 202
    assert [alice.get(at(r)).status_code for r in (digest, "v1", "v2")] == [404, 404, 404]
    assert alice.get("/v2/acme/x/tags/list").json()["tags"] == []
    assert alice.delete(at(digest)).status_code == 404
    assert push_image(alice, "acme/x", "v1") == digest


def test_of_many_who_remove_one_manifest_one_did_it(alice: TestClient) -> None:
    digest = push_image(alice, "acme/x", "v1")
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(alice.delete(at(digest)).status_code))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [202, 404, 404, 404, 404, 404]


def test_who_only_reads_neither_puts_nor_removes(
    served: RegistryHarness, alice: TestClient
) -> None:
    push_image(alice, "acme/x", "v1")
    reader = served.client(served.create_user("dora"))
    refused = [put_manifest(reader, "acme/x", "v1", make_image_index()), reader.delete(at("v1"))]
    assert [(a.status_code, read_error_code(a)) for a in refused] == [(403, "DENIED")] * 2
    assert reader.get(at("v1")).status_code == 200


def test_a_publisher_pushes_and_removes_nothing(served: RegistryHarness, alice: TestClient) -> None:
    secret = served.create_user("pat")
    served.create_namespace("shop", publisher="pat")
    pat = served.client(secret)
    digest = push_image(pat, "shop/x", "v1")
    for reference in ("v1", digest):
        assert pat.delete(at(reference, "shop/x")).status_code == 403


def test_in_a_namespace_of_packages_only_versions_are_put_and_nothing_is_removed(
    served: RegistryHarness,
) -> None:
    secret = served.create_user("carol")
    served.create_namespace("models", owner="carol", kind="expert")
    carol = served.client(secret)
    content = encode_json(make_image(push_blob(carol, "models/sql", b"{}")))
    digest = compute_digest(content)
    refused = [
        put_manifest(carol, "models/sql", digest, content),
        put_manifest(carol, "models/sql", "1.0.0?tag=latest", content),
        carol.delete(at("1.0.0", "models/sql")),
        carol.delete(at(digest, "models/sql")),
    ]
    assert [(a.status_code, read_error_code(a)) for a in refused] == [(405, "UNSUPPORTED")] * 4
    for tag in ("latest", "1.0", "v1.0.0", "01.0.0", "1.0.0"):
        assert put_manifest(carol, "models/sql", tag, content).status_code in {400, 405, 409}
    assert carol.get("/v2/models/sql/tags/list").json()["tags"] == []


@pytest.mark.parametrize("name", ["models", "models/a/b", "models/A", "models/a_b", "models/a.b"])
def test_in_a_namespace_of_packages_repositories_are_packages(
    served: RegistryHarness, name: str
) -> None:
    secret = served.create_user("carol")
    served.create_namespace("models", owner="carol", kind="expert")
    answer = served.client(secret).post(f"/v2/{name}/blobs/uploads/")
    assert (answer.status_code, read_error_code(answer)) == (400, "NAME_INVALID")


def test_a_reader_does_not_wait_for_a_writer(served: RegistryHarness, alice: TestClient) -> None:
    """Fetches are counted in the database, which somebody else may be writing to for a while."""
    digest = push_image(alice, "acme/x", "v1")
    secret = served.create_user("bob")
    answered: Queue[bytes] = Queue()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        answered.put(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {secret}".encode())]
    path = "/v2/acme/x/manifests/v1"
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    asking = Thread(target=lambda: anyio.run(served.app, scope, receive, send))
    with served.registry.database.write():
        asking.start()
        assert answered.get(timeout=120) == b""  # the status and headers
        assert compute_digest(answered.get(timeout=120)) == digest
    asking.join(timeout=120)
    assert not asking.is_alive()


def test_pushes_and_removals_are_in_the_audit_log(
    served: RegistryHarness, alice: TestClient
) -> None:
    config = push_blob(alice, "acme/x", b"{}")
    content = encode_json(make_image(config))
    put_manifest(alice, "acme/x", "v1", content)
    alice.delete(at("v1"))
    alice.delete(at(compute_digest(content)))
    alice.delete(f"/v2/acme/x/blobs/{config}")
    with served.registry.database.read() as connection:
        entries = list(rights.list_audit_rows(connection, limit=4))
    manifest = f"acme/x@{compute_digest(content)}"
    assert [(e.actor, e.action, e.target, e.detail) for e in reversed(entries)] == [
        ("alice", "manifest.push", manifest, "v1"),
        ("alice", "tag.remove", "acme/x:v1", ""),
        ("alice", "manifest.remove", manifest, ""),
        ("alice", "blob.remove", f"acme/x@{config}", ""),
    ]
