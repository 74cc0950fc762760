import errno
import os
import sqlite3
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from expertctl.errors import StoreError
from registry_server.app import create_app
from registry_server.database import connection as connection_module
from registry_server.registry import BlobDigest, open_registry
from tests.registry_server.harness import RegistryHarness, create_registry, make_settings
from tests.registry_server.oci.images import (
    begin_upload,
    push_blob,
    push_image,
    random_bytes,
    read_error_code,
)

DATA = random_bytes(1000)


@pytest.fixture
def alice(served: RegistryHarness) -> TestClient:
    secret = served.create_user("alice")
    served.create_namespace("acme", owner="alice")
    return served.client(secret)


def test_the_root_of_the_api_is_for_people_who_are_known(
    served: RegistryHarness, alice: TestClient
) -> None:
    nobody, known = served.client().get("/v2/"), alice.get("/v2/")
    assert (nobody.status_code, read_error_code(nobody)) == (401, "UNAUTHORIZED")
    assert (known.status_code, known.json()) == (200, {})
    assert known.headers["Docker-Distribution-Api-Version"] == "registry/2.0"


@pytest.mark.parametrize(
    "path", ["/v2/_catalog", "/v2/acme", "/v2/acme/x", "/v2/acme/x/", "/v2/acme/x/blobs", "/v3/"]
)
def test_there_is_nothing_elsewhere(alice: TestClient, path: str) -> None:
    assert alice.get(path).status_code == 404


@pytest.mark.parametrize(
    "name",
    [
        "ACME/x",
        "acme/X",
        "acme",
        "acme/_x",
        "acme/x_",
        "acme/x..y",
        "acme/x___y",
        "acme/.x",
        "acme/-x",
        "acme/x y",
        "acme/\u0430",
        "acme/" + "x" * 251,
        "acme/x@y",
        "acme/x:1",
    ],
)
def test_what_is_no_name_of_a_repository_is_refused(alice: TestClient, name: str) -> None:
    answer = alice.get(f"/v2/{name}/tags/list")
    assert (answer.status_code, read_error_code(answer)) == (400, "NAME_INVALID")


@pytest.mark.parametrize(
    "name", ["acme/x", "acme/x/y/z", "acme/a.b_c__d-e--f/0", "acme/" + "x" * 250]
)
def test_names_of_the_specification_can_be_pushed_to(alice: TestClient, name: str) -> None:
    push_image(alice, name, "v1")
    assert alice.get(f"/v2/{name}/tags/list").json() == {"name": name, "tags": ["v1"]}


def test_repositories_may_be_called_like_parts_of_the_api(alice: TestClient) -> None:
    for name in ("acme/blobs/uploads", "acme/manifests/x", "acme/tags/list", "acme/blobs"):
        push_image(alice, name, "v1")
        assert alice.get(f"/v2/{name}/manifests/v1").status_code == 200


def test_an_unknown_namespace_and_one_that_may_not_be_read_look_alike(
    served: RegistryHarness,
) -> None:
    served.create_user("alice")
    served.create_namespace("acme", owner="alice")
    nobody = served.client()
    known, unknown = nobody.get("/v2/acme/x/tags/list"), nobody.get("/v2/none/x/tags/list")
    assert known.status_code == unknown.status_code == 401
    assert known.json() == unknown.json()


def test_a_registry_that_was_never_made_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="index key"):
        create_app(make_settings(tmp_path / "nothing"))


def test_shutting_down_closes_the_registry_and_starting_opens_it_again(tmp_path: Path) -> None:
    served = create_registry(make_settings(tmp_path / "registry"))
    secret = served.create_user("alice")
    served.create_namespace("acme", owner="alice")
    with served.client(secret) as client:
        digest = push_image(client, "acme/x", "v1")
    app = create_app(served.settings)
    with TestClient(app, base_url="http://127.0.0.1:8080") as client:
        headers = {"Authorization": f"Bearer {secret}"}
        answer = client.get(f"/v2/acme/x/manifests/{digest}", headers=headers)
    assert answer.status_code == 200


def test_a_locked_database_refuses_writes_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BUSY_SECONDS", 0)
    served = create_registry(make_settings(tmp_path / "registry"))
    secret = served.create_user("alice")
    served.create_namespace("acme", owner="alice")
    alice = served.client(secret)
    digest = push_image(alice, "acme/x", "v1")
    other = sqlite3.connect(served.settings.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    refused = alice.post("/v2/acme/x/blobs/uploads/")
    assert (refused.status_code, read_error_code(refused)) == (503, "UNAVAILABLE")
    assert "Retry-After" in refused.headers
    assert alice.get(f"/v2/acme/x/manifests/{digest}").status_code == 200
    other.execute("ROLLBACK")
    other.close()
    assert alice.post("/v2/acme/x/blobs/uploads/").status_code == 202
    served.close()


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 503)]
)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "fchmod"])
def test_a_disk_that_fails_in_the_middle_publishes_nothing(
    served: RegistryHarness,
    alice: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    number: int,
    status: int,
) -> None:
    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    digest = str(BlobDigest.compute(DATA))
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing)
        answer = alice.post(f"/v2/acme/x/blobs/uploads/?digest={digest}", content=DATA)
    assert (answer.status_code, read_error_code(answer)) == (status, "UNAVAILABLE")
    assert alice.head(f"/v2/acme/x/blobs/{digest}").status_code == 404
    assert list(served.registry.storage.list_blobs()) == []
    assert push_blob(alice, "acme/x", DATA) == digest
    served.registry.check_integrity()


def test_a_disk_that_fills_during_an_upload_keeps_what_came(
    alice: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = begin_upload(alice, "acme/x")
    alice.patch(location, content=DATA[:400])
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", _no_room)
        assert alice.patch(location, content=DATA[400:]).status_code == 507
    assert alice.get(location).headers["Range"] == "0-399"
    assert alice.patch(location, content=DATA[400:]).status_code == 202
    done = alice.put(location, params={"digest": str(BlobDigest.compute(DATA))})
    assert done.status_code == 201


def _no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_integrity_check_finds_blobs_that_are_missing_or_short(
    served: RegistryHarness, alice: TestClient
) -> None:
    digest = BlobDigest.parse(push_blob(alice, "acme/x", DATA))
    served.registry.check_integrity()
    path = served.registry.storage.path(digest)
    path.write_bytes(DATA[:-1])
    with pytest.raises(StoreError, match=str(digest)):
        served.registry.check_integrity()
    path.unlink()
    with pytest.raises(StoreError, match="missing"):
        served.registry.check_integrity()


def test_folders_of_blobs_and_uploads_are_for_the_server_alone(tmp_path: Path) -> None:
    served = create_registry(make_settings(tmp_path / "registry"))
    modes = {f.stat().st_mode & 0o777 for f in (served.settings.blobs, served.settings.uploads)}
    served.close()
    assert modes == {0o700}
    open_registry(served.settings).close()
