"""The file of an upload turns into a blob: from then on nobody writes to it any more."""

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event
from starlette.testclient import TestClient

from registry_server.errors import OciError
from registry_server.oci.uploads import create_upload_file, open_upload_file
from registry_server.registry import Registry
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.oci.images import begin_upload, compute_digest, push_blob, random_bytes

DATA = random_bytes(3000)
DIGEST = compute_digest(DATA)


@contextmanager
def one_commit_fails(registry: Registry) -> Iterator[None]:
    """Let the disk fail under the next commit."""
    left = iter([True])

    def fail(_: object, __: object, statement: str, *___: object) -> None:
        if statement == "COMMIT" and next(left, False):
            raise sqlite3.OperationalError("disk I/O error")

    engine = registry.database._engine
    event.listen(engine, "before_cursor_execute", fail)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", fail)
        assert not list(left), "nothing was committed"


def test_a_commit_that_fails_leaves_the_blob_that_was_there_whole(
    served: RegistryHarness, alice: TestClient
) -> None:
    push_blob(alice, "acme/other", DATA)
    location = begin_upload(alice, "acme/x")
    with one_commit_fails(served.registry):
        answer = alice.put(location, params={"digest": DIGEST}, content=DATA)
    assert answer.status_code == 503
    assert alice.get(f"/v2/acme/other/blobs/{DIGEST}").content == DATA
    assert alice.get(f"/v2/acme/x/blobs/{DIGEST}").status_code == 404


def test_after_a_commit_that_failed_the_same_blob_can_be_pushed(
    served: RegistryHarness, alice: TestClient
) -> None:
    location = begin_upload(alice, "acme/x")
    with one_commit_fails(served.registry):
        answer = alice.put(location, params={"digest": DIGEST}, content=DATA)
    assert answer.status_code == 503
    assert alice.patch(location, content=b"more").status_code == 404
    push_blob(alice, "acme/x", DATA)
    assert alice.get(f"/v2/acme/x/blobs/{DIGEST}").content == DATA


def test_a_file_that_became_a_blob_before_it_was_locked_is_no_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upload_file(tmp_path / "upload", "sha256").close()
    locked = fcntl.flock

    def late(handle: int, how: int) -> None:
        (tmp_path / "upload").rename(tmp_path / "blob")
        locked(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(OciError, match="there is no such upload"):
        open_upload_file(tmp_path / "upload")


def test_a_file_in_the_place_of_another_is_another_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_upload_file(tmp_path / "upload", "sha256").close()
    locked = fcntl.flock

    def late(handle: int, how: int) -> None:
        (tmp_path / "upload").rename(tmp_path / "blob")
        (tmp_path / "upload").touch()
        locked(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(OciError, match="there is no such upload"):
        open_upload_file(tmp_path / "upload")
