import errno
import os
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.errors import DiskFullError, NotFoundError, StoreError
from registry_server.registry import BlobDigest, BlobStorage, wrap_disk_errors

DATA = b"some bytes"
DIGEST = BlobDigest.compute(DATA)


@pytest.fixture
def storage(tmp_path: Path) -> BlobStorage:
    (tmp_path / "blobs").mkdir()
    return BlobStorage(tmp_path / "blobs")


def adopt(storage: BlobStorage, data: bytes, algorithm: str = "sha256") -> BlobDigest:
    temporary = storage.folder.parent / "temporary"
    temporary.write_bytes(data)
    digest = BlobDigest.compute(data, algorithm=algorithm)
    storage.adopt(temporary, digest)
    assert not temporary.exists()
    return digest


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_blob_lies_under_its_digest(storage: BlobStorage, algorithm: str) -> None:
    digest = adopt(storage, DATA, algorithm)
    assert storage.path(digest) == storage.folder / algorithm / digest.hex[:2] / digest.hex
    assert storage.size(digest) == len(DATA)
    with storage.open(digest) as stream:
        assert stream.read() == DATA


def test_a_digest_of_a_package_finds_the_same_blob(storage: BlobStorage) -> None:
    adopt(storage, DATA)
    assert storage.path(Digest.compute(DATA)) == storage.path(DIGEST)


def test_a_blob_that_is_not_there_has_no_size_and_cannot_be_opened(storage: BlobStorage) -> None:
    assert storage.size(DIGEST) is None
    with pytest.raises(NotFoundError), storage.open(DIGEST):
        pass


def test_adopting_again_heals_a_damaged_blob(storage: BlobStorage) -> None:
    adopt(storage, DATA)
    storage.path(DIGEST).write_bytes(b"damaged")
    adopt(storage, DATA)
    assert storage.path(DIGEST).read_bytes() == DATA


def test_a_removed_blob_is_gone_and_may_be_removed_again(storage: BlobStorage) -> None:
    adopt(storage, DATA)
    storage.remove(DIGEST)
    storage.remove(DIGEST)
    assert storage.size(DIGEST) is None


def test_a_listing_names_our_blobs_and_nothing_else(storage: BlobStorage) -> None:
    digests = {adopt(storage, DATA), adopt(storage, b"other"), adopt(storage, DATA, "sha512")}
    (storage.folder / "sha256" / "ab").mkdir(exist_ok=True)
    for stray in ("sha256/ab/note.txt", f"sha256/ab/{DIGEST.hex}", "sha256/.tmp"):
        (storage.folder / stray).write_bytes(b"?")
    found = list(storage.list_blobs())
    assert {blob.digest for blob in found} == digests
    assert {blob.size for blob in found if blob.digest == DIGEST} == {len(DATA)}
    assert all(blob.modified > 0 for blob in found)


def test_an_empty_storage_lists_nothing(storage: BlobStorage) -> None:
    assert list(storage.list_blobs()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_apart(number: int) -> None:
    with pytest.raises(DiskFullError), wrap_disk_errors():
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE])
def test_a_failing_disk_is_an_outage(number: int) -> None:
    with pytest.raises(StoreError, match="disk fails"), wrap_disk_errors():
        raise OSError(number, os.strerror(number))


def test_a_storage_whose_folder_went_away_fails_closed(
    storage: BlobStorage, tmp_path: Path
) -> None:
    storage.folder.rmdir()
    with pytest.raises(StoreError):
        adopt(storage, DATA)
    assert not storage.folder.exists(), "a new one would hide the blobs that come back"
    (tmp_path / "blobs").write_bytes(b"a file where the folder was")
    with pytest.raises(StoreError):
        adopt(storage, DATA)
    with pytest.raises(StoreError):
        storage.size(DIGEST)
