"""Mounting blobs from other repositories: only what one may read, and no word about the rest."""

import httpx2
import pytest
from starlette.testclient import TestClient

from registry_server.access.rights import Action, TokenScope
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.oci.images import (
    compute_digest,
    push_blob,
    random_bytes,
    read_error_code,
)

DATA = random_bytes(1000)


def mount(
    client: TestClient, repository: str, digest: str, source: str | None = None
) -> httpx2.Response:
    query = {"mount": digest} | ({} if source is None else {"from": source})
    return client.post(f"/v2/{repository}/blobs/uploads/", params=query)


def shape(answer: httpx2.Response) -> tuple[int, set[str], str]:
    """What can be seen of an answer, but for the random id."""
    own = {"x-request-id", "location", "docker-upload-uuid"}
    kept = {f"{name}: {value}" for name, value in answer.headers.items() if name not in own}
    return answer.status_code, kept, answer.text


def test_a_blob_of_a_readable_repository_is_mounted(alice: TestClient, bob: TestClient) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    answer = mount(bob, "other/y", digest, "acme/x")
    assert answer.status_code == 201
    assert answer.headers["Location"] == f"/v2/other/y/blobs/{digest}"
    assert answer.headers["Docker-Content-Digest"] == digest
    assert bob.get(answer.headers["Location"]).content == DATA


def test_without_a_source_any_readable_repository_will_do(
    alice: TestClient, bob: TestClient
) -> None:
    digest = push_blob(alice, "acme/x", DATA, "sha512")
    assert mount(bob, "other/y", digest).status_code == 201
    assert bob.get(f"/v2/other/y/blobs/{digest}").content == DATA


@pytest.mark.parametrize("source", ["acme/y", "nowhere/x", "acme", "..", "acme/x/../x", "", None])
def test_what_is_not_there_begins_an_upload(
    alice: TestClient, bob: TestClient, source: str | None
) -> None:
    push_blob(alice, "acme/x", DATA)
    answer = mount(bob, "other/y", compute_digest(b"nowhere"), source)
    assert answer.status_code == 202
    assert bob.get(answer.headers["Location"]).status_code == 204


@pytest.mark.parametrize("source", ["acme/x", None])
def test_a_token_that_may_not_read_the_source_mounts_nothing_and_learns_nothing(
    served: RegistryHarness, alice: TestClient, bob: TestClient, source: str | None
) -> None:
    there, absent = push_blob(alice, "acme/x", DATA), compute_digest(b"nowhere")
    limited = served.client(served.create_token("bob", TokenScope(Action.PUSH, "other")))
    known = mount(limited, "other/y", there, source)
    assert known.status_code == 202
    assert shape(known) == shape(mount(limited, "other/y", absent, source))
    assert limited.head(f"/v2/other/y/blobs/{there}").status_code == 404


def test_who_may_not_push_mounts_nothing(served: RegistryHarness, alice: TestClient) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    reader = served.client(served.create_user("dora"))
    answer = mount(reader, "acme/y", digest, "acme/x")
    assert (answer.status_code, read_error_code(answer)) == (403, "DENIED")
    assert served.client().post(f"/v2/acme/y/blobs/uploads/?mount={digest}").status_code == 401


def test_a_mounted_blob_counts_in_the_quota_once(
    served: RegistryHarness, alice: TestClient
) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    secret = served.create_user("eve")
    served.create_namespace("small", owner="eve", quota=1500)
    eve = served.client(secret)
    assert mount(eve, "small/a", digest, "acme/x").status_code == 201
    assert mount(eve, "small/b", digest, "acme/x").status_code == 201
    other = push_blob(alice, "acme/x", random_bytes(1000, "other"))
    refused = mount(eve, "small/a", other, "acme/x")
    assert (refused.status_code, read_error_code(refused)) == (403, "DENIED")


@pytest.mark.parametrize("digest", ["sha256:../../x", "latest", "", "md5:" + "0" * 32])
def test_only_a_digest_is_mounted(alice: TestClient, digest: str) -> None:
    answer = mount(alice, "acme/x", digest, "acme/y")
    assert (answer.status_code, read_error_code(answer)) == (400, "DIGEST_INVALID")


def test_the_readable_source_is_found_among_those_that_one_may_not_read(
    served: RegistryHarness, alice: TestClient, bob: TestClient
) -> None:
    digest = push_blob(alice, "acme/x", DATA)
    secret = served.create_user("carol")
    served.create_namespace("zoo", owner="carol", read="public")
    push_blob(served.client(secret), "zoo/x", DATA)
    limited = served.client(served.create_token("bob", TokenScope(Action.PUSH, "other")))
    assert mount(limited, "other/y", digest).status_code == 201
