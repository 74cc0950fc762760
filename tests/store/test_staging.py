"""Staging of several packages: each gets its blobs, shared ones too, by link or by copy."""

import errno
import os
from pathlib import Path

import pytest

from expertctl.reference import Digest
from expertctl.store.transaction import BLOB_MODE, PackageStaging

BLOBS = {Digest.compute(data): data for data in (b"shared", b"first", b"second" * 300_000)}
SHARED, FIRST, SECOND = BLOBS


@pytest.fixture
def staging(tmp_path: Path) -> PackageStaging:
    staging = PackageStaging(tmp_path)
    for digest, data in BLOBS.items():
        with staging.open(digest, len(data)) as write:
            write(memoryview(data))
    return staging


def no_links(source: object, target: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("links", [True, False])
def test_each_part_has_its_blobs_and_may_give_them_away(
    links: bool, staging: PackageStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    parts = [staging.subset("0", [SHARED, FIRST]), staging.subset("1", [SHARED, SECOND])]
    for part, digests in zip(parts, ([SHARED, FIRST], [SHARED, SECOND]), strict=True):
        assert sorted(path.name for path in part.folder.iterdir()) == sorted(d.hex for d in digests)
        for digest in digests:
            assert part.path(digest).read_bytes() == BLOBS[digest]
            assert part.path(digest).stat().st_mode & 0o777 == BLOB_MODE
            part.path(digest).unlink()


def test_a_full_disk_is_no_reason_to_copy(
    staging: PackageStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space"):
        staging.subset("0", [SHARED])
