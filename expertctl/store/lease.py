"""Leases: blobs that a running process uses stay until it ends, even when they are removed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from expertctl.digest import Digest
from expertctl.store.lock import claim, claimed_folders, is_held
from expertctl.store.paths import StorePaths

_LIST = "blobs"


@contextmanager
def lease(paths: StorePaths, digests: Iterable[Digest]) -> Iterator[Path]:
    """Hold blobs until the end; begin while the store's lock is held."""
    with claim(paths.leases) as folder:
        lines = "".join(f"{digest.hex}\n" for digest in sorted(set(digests)))
        (folder / _LIST).write_text(lines, encoding="ascii")
        yield folder


def leased_blobs(paths: StorePaths) -> set[Digest]:
    """Return the blobs that living processes hold; ask while the store's lock is held."""
    held = [folder for folder in claimed_folders(paths.leases) if is_held(folder)]
    return {digest for folder in held for digest in _listed(folder)}


def _listed(folder: Path) -> list[Digest]:
    try:
        lines = (folder / _LIST).read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        return []
    return [Digest.parse(f"sha256:{line}") for line in lines]
