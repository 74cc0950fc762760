"""The client and our own server over real sockets: logins, chunks, ranges."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest

from expertctl.digest import Digest, FileDigest
from expertctl.errors import DigestError, ForbiddenError, UnauthenticatedError
from expertctl.registry import credentials
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import ApiClient, OciClient
from expertctl.registry.credentials import Credential, UnsavedCredential
from expertctl.registry.download import BlobDownloader
from expertctl.registry.http import RegistryHttp
from expertctl.registry.upload import BlobUpload, Uploader
from tests.registry.live_registry import LiveRegistry, run_live_registry
from tests.registry.test_docker_registry import FILES, LAYOUT, push
from tests.registry.test_download import StagingTarget, download

DATA = os.urandom(3 << 20)
DIGEST = Digest.compute(DATA)
CHUNK = 1 << 20


@dataclass(frozen=True)
class PlainRegistry:
    """A registry with a namespace of the plain kind, and its owner's token."""

    live: LiveRegistry
    secret: str

    @property
    def address(self) -> RegistryAddress:
        return RegistryAddress.parse(self.live.url)

    def http(self, secret: str | None = None, user: str = "alice") -> RegistryHttp:
        return RegistryHttp(
            UnsavedCredential(self.address, Credential(user, secret or self.secret))
        )


@pytest.fixture
def plain_registry(tmp_path: Path) -> Iterator[PlainRegistry]:
    with run_live_registry(tmp_path / "registry") as live:
        secret = live.served.create_user("alice")
        live.served.create_namespace("acme", owner="alice")
        yield PlainRegistry(live, secret)


@contextmanager
def opened(data: bytes) -> Iterator[BinaryIO]:
    yield BytesIO(data)


def test_what_is_pushed_is_pulled_and_travels_once(
    plain_registry: PlainRegistry, tmp_path: Path
) -> None:
    target = StagingTarget(tmp_path / "staging")
    target.folder.mkdir()
    with plain_registry.http() as http:
        oci = OciClient(http, plain_registry.address, tmp_path / "uploads")
        oci.ping()
        assert push(oci) == [True] * (len(FILES) + 1)
        assert push(oci) == [False] * (len(FILES) + 1)
        assert oci.fetch_manifest_digest("acme/sql", "1.0.0") == LAYOUT.package_digest
        assert oci.fetch_manifest("acme/sql", "1.0.0").data == LAYOUT.manifest
        download(BlobDownloader(tmp_path / "partial"), oci, LAYOUT.layers, target)
    assert {f.path: target.path(f.digest).read_bytes() for f in LAYOUT.layers} == FILES


def test_an_upload_in_chunks_goes_on_in_another_run(
    plain_registry: PlainRegistry, tmp_path: Path
) -> None:
    class Breaking(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() >= 2 * CHUNK:
                raise KeyboardInterrupt
            return super().read(size)

    upload = BlobUpload("/v2/acme/sql/blobs/uploads/", "", DIGEST, len(DATA))

    @contextmanager
    def breaking() -> Iterator[BinaryIO]:
        yield Breaking(DATA)

    with plain_registry.http() as http, pytest.raises(KeyboardInterrupt):
        Uploader(http, plain_registry.address, tmp_path / "uploads", CHUNK).send(upload, breaking)
    counts: list[int] = []
    with plain_registry.http() as http:
        uploader = Uploader(http, plain_registry.address, tmp_path / "uploads", CHUNK)
        uploader.send(upload, lambda: opened(DATA), progress=counts.append)
        assert OciClient(http, plain_registry.address).has_blob("acme/sql", DIGEST)
    assert counts[0] == 2 * CHUNK
    assert sum(counts) == len(DATA)


def test_a_download_goes_on_with_a_range(plain_registry: PlainRegistry, tmp_path: Path) -> None:
    file = FileDigest("f", len(DATA), DIGEST)
    target, downloads = StagingTarget(tmp_path / "staging"), BlobDownloader(tmp_path / "partial")
    target.folder.mkdir()

    def interrupt(count: int) -> None:
        if count:
            raise KeyboardInterrupt

    with plain_registry.http() as http:
        oci = OciClient(http, plain_registry.address)
        oci.upload_blob("acme/sql", DIGEST, len(DATA), lambda: opened(DATA))
        with pytest.raises(KeyboardInterrupt):
            download(downloads, oci, [file], target, interrupt)
        kept = (downloads.folder / f"{DIGEST.hex}.part").stat().st_size
        counts: list[int] = []
        download(downloads, oci, [file], target, counts.append)
    assert 0 < kept < len(DATA)
    assert counts[0] == kept
    assert target.path(DIGEST).read_bytes() == DATA


def test_wrong_bytes_are_not_taken(plain_registry: PlainRegistry) -> None:
    with plain_registry.http() as http, pytest.raises(DigestError):
        OciClient(http, plain_registry.address).upload_blob(
            "acme/sql", Digest.compute(b"right"), 5, lambda: opened(b"wrong")
        )


def test_a_login_is_needed(plain_registry: PlainRegistry) -> None:
    with plain_registry.http() as http:
        assert ApiClient(http, plain_registry.address).get("whoami")["user"] == "alice"
    with RegistryHttp(None) as http, pytest.raises(UnauthenticatedError) as caught:
        ApiClient(http, plain_registry.address).get("whoami")
    assert "expertctl login" in caught.value.hint


def test_the_way_of_other_clients_works_too(
    plain_registry: PlainRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They show a token to the realm as a password, and get a short-lived one for a scope."""
    monkeypatch.setattr(credentials, "OUR_TOKEN", "of nobody")
    with plain_registry.http() as http:
        oci = OciClient(http, plain_registry.address)
        push(oci)
        assert oci.fetch_manifest_digest("acme/sql", "1.0.0") == LAYOUT.package_digest


@pytest.mark.parametrize("secret", ["xpt_" + "0" * 43, "wrong"])
def test_a_wrong_token_opens_nothing(plain_registry: PlainRegistry, secret: str) -> None:
    with plain_registry.http(secret) as http, pytest.raises(UnauthenticatedError):
        OciClient(http, plain_registry.address).ping()


def test_nobody_else_pushes(plain_registry: PlainRegistry) -> None:
    mallory = plain_registry.live.served.create_user("mallory")
    with plain_registry.http(mallory, "mallory") as http, pytest.raises(ForbiddenError):
        push(OciClient(http, plain_registry.address))
