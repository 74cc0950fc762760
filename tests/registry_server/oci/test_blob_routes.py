"""Blobs over HTTP: whole, in part, known already, unknown here."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from registry_server.registry import BlobDigest
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.oci.images import (
    compute_digest,
    push_blob,
    random_bytes,
    read_error_code,
)

DATA = random_bytes(2048)


def address(digest: str, repository: str = "acme/x") -> str:
    return f"/v2/{repository}/blobs/{digest}"


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
@pytest.mark.parametrize("size", [0, 1, 2048, 3_000_000])
def test_a_blob_comes_back_as_it_was_pushed(alice: TestClient, algorithm: str, size: int) -> None:
    data = random_bytes(size)
    digest = push_blob(alice, "acme/x", data, algorithm)
    answer = alice.get(address(digest))
    assert (answer.status_code, answer.content) == (200, data)
    assert answer.headers["Content-Length"] == str(size)
    assert answer.headers["Docker-Content-Digest"] == digest
    assert answer.headers["ETag"] == f'"{digest}"'
    assert "immutable" in answer.headers["Cache-Control"]


def test_head_says_what_get_says_without_the_bytes(alice: TestClient) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    got, head = alice.get(address(digest)), alice.head(address(digest))
    assert head.content == b""
    assert head.status_code == got.status_code
    assert {**head.headers, "x-request-id": ""} == {**got.headers, "x-request-id": ""}


def test_head_of_a_part_says_what_get_of_the_part_says(alice: TestClient) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    head = alice.head(address(digest), headers={"Range": "bytes=0-9"})
    assert (head.status_code, head.headers["Content-Length"], head.content) == (206, "10", b"")


@pytest.mark.parametrize(
    ("asked", "part", "content_range"),
    [
        ("bytes=0-0", DATA[:1], "bytes 0-0/2048"),
        ("bytes=500-1499", DATA[500:1500], "bytes 500-1499/2048"),
        ("bytes=500-", DATA[500:], "bytes 500-2047/2048"),
        ("bytes=-500", DATA[-500:], "bytes 1548-2047/2048"),
        ("bytes=-5000", DATA, "bytes 0-2047/2048"),
        ("bytes=2000-5000", DATA[2000:], "bytes 2000-2047/2048"),
        ("bytes=0-999999999999999999", DATA, "bytes 0-2047/2048"),
        ("BYTES=2047-", DATA[-1:], "bytes 2047-2047/2048"),
    ],
)
def test_a_range_gives_just_these_bytes(
    alice: TestClient, asked: str, part: bytes, content_range: str
) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    answer = alice.get(address(digest), headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, part)
    assert answer.headers["Content-Range"] == content_range
    assert answer.headers["Content-Length"] == str(len(part))


@pytest.mark.parametrize(
    "asked",
    [
        "bytes=2048-",
        "bytes=5000-10000",
        "bytes=500-0",
        "bytes=-0",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "bytes=0x1-2",
        "bytes=99999999999999999999999-",
        "bytes=+1-2",
        "bytes=1- 2",
        "bytes=\u0661-\u0662".encode(),
    ],
)
def test_a_range_that_is_no_part_of_the_blob_is_416(alice: TestClient, asked: str | bytes) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    answer = alice.get(address(digest), headers=[(b"Range", asked)])  # type: ignore[list-item]
    assert (answer.status_code, read_error_code(answer)) == (416, "RANGE_INVALID")
    assert answer.headers["Content-Range"] == "bytes */2048"


@pytest.mark.parametrize("asked", ["bytes=0-1,4-5", "bytes=0-,0-,0-,0-", "lines=1-2", "bytes"])
def test_several_ranges_and_other_units_get_the_whole_blob(alice: TestClient, asked: str) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    answer = alice.get(address(digest), headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, DATA)


def test_a_thousand_ranges_cost_no_more_than_the_blob(alice: TestClient) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    asked = "bytes=" + ",".join("0-2047" for _ in range(1000))
    answer = alice.get(address(digest), headers={"Range": asked})
    assert len(answer.content) == len(DATA)


def test_a_range_of_an_empty_blob_is_416(alice: TestClient) -> None:
    digest = push_blob(alice, "acme/x", b"")
    assert alice.get(address(digest), headers={"Range": "bytes=0-"}).status_code == 416


def test_a_range_counts_only_if_the_bytes_are_the_ones_that_the_client_has(
    alice: TestClient,
) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    same = alice.get(address(digest), headers={"Range": "bytes=9-", "If-Range": f'"{digest}"'})
    other = alice.get(address(digest), headers={"Range": "bytes=9-", "If-Range": '"other"'})
    assert (same.status_code, other.status_code, other.content) == (206, 200, DATA)


@pytest.mark.parametrize("known", ['"{}"', 'W/"{}"', '"other", "{}"', "*"])
def test_a_client_that_has_the_blob_is_told_so(alice: TestClient, known: str) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    headers = {"If-None-Match": known.format(digest)}
    answer = alice.get(address(digest), headers=headers)
    assert (answer.status_code, answer.content) == (304, b"")


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../../../etc/passwd",
        "sha256:" + "A" * 64,
        "sha256:" + "a" * 63,
        "sha256:" + "a" * 65,
        "sha512:" + "a" * 64,
        "md5:" + "a" * 32,
        "sha384:" + "a" * 96,
        "sha256" + "a" * 64,
        "sha256:" + "a" * 63 + "g",
        "sha256:" + "a" * 63 + "\u0661",
        "SHA256:" + "a" * 64,
        "latest",
        "sha256:",
    ],
)
def test_what_is_not_exactly_a_digest_finds_nothing(alice: TestClient, digest: str) -> None:
    answer = alice.get(f"/v2/acme/x/blobs/{digest}")
    assert answer.status_code in {400, 404}
    assert read_error_code(answer) in {
        "DIGEST_INVALID",
        "NAME_INVALID",
        "NAME_UNKNOWN",
        "MANIFEST_INVALID",
    }


def test_a_blob_of_another_repository_is_not_there(alice: TestClient, bob: TestClient) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    for client, repository in ((alice, "acme/y"), (bob, "other/x")):
        answer = client.get(address(digest, repository))
        assert (answer.status_code, read_error_code(answer)) == (404, "BLOB_UNKNOWN")
        assert client.head(address(digest, repository)).status_code == 404


def test_the_answer_for_bytes_that_the_storage_has_is_that_for_unknown_ones(
    alice: TestClient, bob: TestClient
) -> None:
    there, absent = push_blob(alice, "acme/x", DATA), compute_digest(b"nowhere")
    known = bob.get(address(there, "other/x"))
    unknown = bob.get(address(absent, "other/x"))
    assert known.text.replace(there, "D") == unknown.text.replace(absent, "D")


def test_nobody_reads_a_private_blob_and_learns_nothing(
    served: RegistryHarness, alice: TestClient
) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    nobody = served.client()
    there, absent = nobody.get(address(digest)), nobody.get(address(digest, "nowhere/x"))
    assert (there.status_code, absent.status_code) == (401, 401)
    assert there.json() == absent.json()


def test_anybody_reads_a_public_blob(served: RegistryHarness) -> None:
    secret = served.create_user("carol")
    served.create_namespace("open", owner="carol", read="public")
    digest = push_blob(served.client(secret), "open/x", DATA)
    answer = served.client().get(address(digest, "open/x"))
    assert answer.content == DATA
    assert answer.headers["Cache-Control"].startswith("public")


def test_no_browser_makes_a_page_of_a_blob(alice: TestClient) -> None:
    digest = push_blob(alice, "acme/x", b"<script>alert(1)</script>")
    headers = alice.get(address(digest)).headers
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Disposition"] == "attachment"
    assert "sandbox" in headers["Content-Security-Policy"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"short")])
def test_a_blob_that_the_disk_lost_is_an_outage_and_not_a_404(
    served: RegistryHarness, alice: TestClient, damage: object
) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    damage(served.registry.storage.path(BlobDigest.parse(digest)))  # type: ignore[operator]
    answer = alice.get(address(digest))
    assert (answer.status_code, read_error_code(answer)) == (503, "UNAVAILABLE")
    assert int(answer.headers["Retry-After"]) > 0


def test_a_removed_blob_is_gone_here_and_stays_elsewhere(alice: TestClient) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    push_blob(alice, "acme/y", DATA)
    assert alice.delete(address(digest)).status_code == 202
    assert alice.head(address(digest)).status_code == 404
    assert alice.delete(address(digest)).status_code == 404
    assert alice.get(address(digest, "acme/y")).content == DATA


def test_who_only_publishes_or_reads_removes_nothing(
    served: RegistryHarness, alice: TestClient
) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    reader = served.client(served.create_user("dora"))
    answer = reader.delete(address(digest))
    assert (answer.status_code, read_error_code(answer)) == (403, "DENIED")
    assert alice.head(address(digest)).status_code == 200


def test_in_a_namespace_of_packages_no_blob_is_removed(served: RegistryHarness) -> None:
    secret = served.create_user("carol")
    served.create_namespace("models", owner="carol", kind="expert")
    carol = served.client(secret)
    digest = push_blob(carol, "models/sql", DATA)
    answer = carol.delete(address(digest, "models/sql"))
    assert (answer.status_code, read_error_code(answer)) == (405, "UNSUPPORTED")
    assert carol.head(address(digest, "models/sql")).status_code == 200


def test_other_methods_are_refused_by_name(alice: TestClient) -> None:
    answer = alice.put(address(compute_digest(DATA)), content=b"")
    assert (answer.status_code, read_error_code(answer)) == (405, "UNSUPPORTED")
