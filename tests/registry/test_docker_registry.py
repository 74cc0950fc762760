"""The same client against Debian's docker-registry: push, resume, pull, delete, log in."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest

from expertctl.digest import Digest, FileDigest
from expertctl.errors import NotFoundError, UnauthenticatedError, UnreachableError
from expertctl.package.layout import build_layout
from expertctl.registry.client import ApiClient, OciClient
from expertctl.registry.credentials import Credential, UnsavedCredential
from expertctl.registry.download import BlobDownloader
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.http import RegistryHttp
from expertctl.registry.upload import BlobUpload, Uploader
from tests.registry.docker_registry import DockerRegistry, docker_registry, run_docker_registry
from tests.registry.hostile_registry import RecordedPauses
from tests.registry.test_download import StagingTarget, download

__all__ = ["docker_registry"]

pytestmark = [
    pytest.mark.all,
    pytest.mark.skipif(not shutil.which("docker-registry"), reason="docker-registry is missing"),
]

SMALL = b'{"schemaVersion": 1}'
LARGE = os.urandom(3 << 20)
FILES = {
    "expert.json": SMALL,
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": LARGE,
}
LAYOUT = build_layout([FileDigest(n, len(d), Digest.compute(d)) for n, d in FILES.items()], None)
BLOBS = {Digest.compute(data): data for data in [*FILES.values()]}
CONFIG = b'{"config":{},"descriptor":{},"modelfs":{"diffIds":[],"type":"layers"}}'


@contextmanager
def opened(data: bytes) -> Iterator[BinaryIO]:
    yield BytesIO(data)


def push(oci: OciClient, repository: str = "acme/sql") -> list[bool]:
    blobs = {**BLOBS, Digest.compute(CONFIG): CONFIG}
    travelled = [
        oci.upload_blob(repository, digest, len(data), lambda data=data: opened(data))  # type: ignore[misc]
        for digest, data in blobs.items()
    ]
    oci.put_manifest(repository, "1.0.0", LAYOUT.manifest)
    return travelled


def pull(oci: OciClient, folder: Path) -> dict[str, bytes]:
    target = StagingTarget(folder / "staging")
    target.folder.mkdir()
    download(BlobDownloader(folder / "partial"), oci, LAYOUT.layers, target)
    return {file.path: target.path(file.digest).read_bytes() for file in LAYOUT.layers}


def test_what_is_pushed_is_pulled_and_travels_once(
    docker_registry: DockerRegistry, tmp_path: Path
) -> None:
    with RegistryHttp() as http:
        oci = OciClient(http, docker_registry.address, tmp_path / "uploads")
        oci.ping()
        assert push(oci) == [True] * 4
        assert push(oci) == [False] * 4

        assert oci.fetch_manifest_digest("acme/sql", "1.0.0") == LAYOUT.package_digest
        assert oci.fetch_manifest("acme/sql", "1.0.0").data == LAYOUT.manifest
        assert oci.fetch_manifest("acme/sql", LAYOUT.package_digest).data == LAYOUT.manifest
        assert pull(oci, tmp_path) == FILES


def test_an_upload_in_chunks_goes_on_in_another_run(
    docker_registry: DockerRegistry, tmp_path: Path
) -> None:
    digest, reads = Digest.compute(LARGE), [0]

    class Breaking(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            reads[0] += 1
            if reads[0] == 3:
                raise KeyboardInterrupt
            return super().read(size)

    @contextmanager
    def breaking() -> Iterator[BinaryIO]:
        yield Breaking(LARGE)

    upload = BlobUpload("/v2/acme/sql/blobs/uploads/", "", digest, len(LARGE))
    with RegistryHttp() as http, pytest.raises(KeyboardInterrupt):
        Uploader(http, docker_registry.address, tmp_path, 1 << 20).send(upload, breaking)
    counts: list[int] = []
    with RegistryHttp() as http:
        uploader = Uploader(http, docker_registry.address, tmp_path, 1 << 20)
        uploader.send(upload, lambda: opened(LARGE), progress=counts.append)
        assert OciClient(http, docker_registry.address).has_blob("acme/sql", digest)
    assert counts[0] >= 1 << 20
    assert sum(counts) == len(LARGE)


def test_a_download_goes_on_with_a_range(docker_registry: DockerRegistry, tmp_path: Path) -> None:
    with RegistryHttp(retries=RetrySchedule(attempts=1)) as http:
        oci = OciClient(http, docker_registry.address)
        push(oci)
        digest = Digest.compute(LARGE)
        wrong = FileDigest("f", len(LARGE), digest)
        partial = tmp_path / "partial"
        target = StagingTarget(tmp_path / "staging")

        def interrupt(count: int) -> None:
            if count:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            download(BlobDownloader(partial), oci, [wrong], target, interrupt)
        kept = (partial / f"{digest.hex}.part").stat().st_size
        assert 0 < kept < len(LARGE)
        target.folder.mkdir()
        counts: list[int] = []
        download(BlobDownloader(partial), oci, [wrong], target, counts.append)
        assert counts[0] == kept
        assert target.path(digest).read_bytes() == LARGE


def test_wrong_bytes_are_not_taken(docker_registry: DockerRegistry) -> None:
    digest = Digest.compute(b"right")
    with RegistryHttp() as http, pytest.raises(Exception, match="has another digest"):
        OciClient(http, docker_registry.address).upload_blob(
            "acme/sql", digest, 5, lambda: opened(b"wrong")
        )


def test_a_login_with_a_password_opens_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    with run_docker_registry(tmp_path, user="me", password="pass") as registry:
        right = UnsavedCredential(registry.address, Credential("me", "pass"))
        with RegistryHttp(right) as http:
            oci = OciClient(http, registry.address)
            oci.ping()
            assert http.has_authenticated(registry.address)
            push(oci)
            assert pull(oci, tmp_path) == FILES
        wrong = UnsavedCredential(registry.address, Credential("me", "wrong"))
        for credentials in (wrong, None):
            with RegistryHttp(credentials) as http, pytest.raises(UnauthenticatedError) as caught:
                OciClient(http, registry.address).ping()
            assert "expertctl login" in caught.value.hint


def test_a_registry_that_is_gone_is_named(tmp_path: Path) -> None:
    with run_docker_registry(tmp_path) as registry:
        address = registry.address
    pauses = RecordedPauses()
    with (
        RegistryHttp(retries=RetrySchedule(sleep=pauses)) as http,
        pytest.raises(UnreachableError, match=f"{address.host}: no connection: .*tried 5 times"),
    ):
        OciClient(http, address).ping()
    assert len(pauses.seconds) == 4


def test_our_own_interface_is_not_there(docker_registry: DockerRegistry) -> None:
    with RegistryHttp() as http, pytest.raises(NotFoundError):
        ApiClient(http, docker_registry.address).get("whoami")
