"""Bodies that end in other ways than well-behaved clients end them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from registry_server.access.rights import RepositoryName
from registry_server.errors import OciCode, OciError
from registry_server.oci import uploads as uploads_module
from registry_server.oci.upload_routes import read_content_length, receive_body
from registry_server.oci.uploads import OpenUpload, Uploads
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.oci.images import compute_digest, random_bytes

NAME = RepositoryName.parse("acme/x")
BIG = random_bytes(2_500_000)


def request_of(headers: dict[str, str], messages: Sequence[dict[str, Any]]) -> Request:
    """A request whose body comes as these messages, and whose client is gone after them."""
    coming = iter(messages)

    async def next_message() -> Any:
        return next(coming, {"type": "http.disconnect"})

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "PATCH", "path": "/", "headers": raw, "query_string": b""}
    return Request(scope, next_message)


def body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


@pytest.fixture
def uploads(served: RegistryHarness) -> Uploads:
    return Uploads(served.registry)


@pytest.fixture
def upload(served: RegistryHarness, alice: TestClient, uploads: Uploads) -> OpenUpload:
    identity = served.authenticate(served.create_token("alice"))
    return uploads.start(identity, NAME, "sha256")


def take(uploads: Uploads, upload: OpenUpload, request: Request) -> OciCode | None:
    """Receive a body; return the code of the refusal."""
    try:
        asyncio.run(receive_body(uploads, upload, request))
    except OciError as error:
        return error.oci_code
    return None


@pytest.mark.parametrize(
    "headers", [{"content-length": "2500000"}, {"transfer-encoding": "chunked"}]
)
def test_what_came_before_the_client_went_away_is_kept(
    uploads: Uploads, upload: OpenUpload, headers: dict[str, str]
) -> None:
    parts = [body(BIG[:1_200_000], more=True), body(BIG[1_200_000:1_300_000], more=True)]
    found = take(uploads, upload, request_of(headers, parts))
    assert (found, upload.file.offset) == (OciCode.BLOB_UPLOAD_INVALID, 1_300_000)
    uploads.pause(upload)
    assert upload.file.path.read_bytes() == BIG[:1_300_000]


@pytest.mark.parametrize("came", [0, 2_499_999])
def test_a_body_shorter_than_it_said_is_forgotten(
    uploads: Uploads, upload: OpenUpload, came: int
) -> None:
    request = request_of({"content-length": "2500000"}, [body(BIG[:came], more=False)])
    assert take(uploads, upload, request) is OciCode.SIZE_INVALID
    assert upload.file.offset == 0
    uploads.pause(upload)


@pytest.mark.parametrize("piece", [100_000, 2_500_000])
def test_a_body_longer_than_it_said_is_forgotten_and_not_read_to_its_end(
    uploads: Uploads, upload: OpenUpload, piece: int
) -> None:
    parts = [body(BIG[i : i + piece], more=True) for i in range(0, len(BIG), piece)]
    request = request_of({"content-length": "1200000"}, parts)
    assert take(uploads, upload, request) is OciCode.SIZE_INVALID
    assert upload.file.offset == 0
    uploads.pause(upload)


def test_after_bytes_were_forgotten_the_hash_is_that_of_the_others(
    served: RegistryHarness, uploads: Uploads, upload: OpenUpload
) -> None:
    wrong = request_of({"content-length": "5"}, [body(b"wrong+", more=False)])
    assert take(uploads, upload, wrong) is OciCode.SIZE_INVALID
    right = request_of({"content-length": "5"}, [body(b"right", more=False)])
    assert take(uploads, upload, right) is None
    assert str(upload.file.digest("sha256")) == compute_digest(b"right")
    assert str(upload.file.digest("sha512")) == compute_digest(b"right", "sha512")
    uploads.pause(upload)


def test_only_so_many_hashes_are_kept_and_the_others_are_made_again(
    served: RegistryHarness, uploads: Uploads, alice: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("registry_server.oci.uploads._MAX_CACHED_HASHES", 1)
    identity = served.authenticate(served.create_token("alice"))
    opened = [uploads.start(identity, NAME, "sha256") for _ in range(3)]
    for upload in opened:
        upload.file.append(b"abc")
        upload.reserved = 3
        uploads.pause(upload)
    for upload in opened:
        again = uploads.open(identity, NAME, upload.id)
        assert str(again.file.digest("sha256")) == compute_digest(b"abc")
        uploads.pause(again)


def test_a_file_that_lost_bytes_is_no_blob(uploads: Uploads, upload: OpenUpload) -> None:
    upload.file.append(b"abc")
    upload.file.offset = 9
    with pytest.raises(Exception, match="shorter"):
        upload.file.digest("sha512")
    upload.file.offset = 3
    uploads.pause(upload)


@pytest.mark.parametrize("length", ["-1", "1e3", "\u00b2", "9" * 19, "0x10", ""])
def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    raw = [(b"content-length", length.encode("latin-1"))]
    request = Request({"type": "http", "method": "PUT", "headers": raw})
    with pytest.raises(OciError) as caught:
        read_content_length(request)
    assert caught.value.oci_code is OciCode.SIZE_INVALID


def test_a_file_is_opened_with_a_hash_only_when_it_has_these_bytes(
    uploads: Uploads, upload: OpenUpload
) -> None:
    stale = uploads_module.RunningHash.new("sha256")
    stale.update(b"more than there is")
    upload.file.close()
    again = uploads_module.open_upload_file(upload.file.path, stale)
    assert str(again.digest("sha256")) == compute_digest(b"")
    again.close()
