"""Removing what nothing needs, from the store and from the bases."""

import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.store.bases import BaseStore
from expertctl.store.disk import disk_errors
from expertctl.store.quantised_copies import outdated_copies
from expertctl.store.store import Store

if TYPE_CHECKING:  # `list` and `gc` start without what reads packages
    from expertctl.store.transaction import Freed


def collect(store: Store, bases: BaseStore) -> "Freed":
    """Remove what `garbage` returns.

    Raises:
        StoreError: when a record is damaged, or something cannot be written.
    """
    copies = outdated_copies(bases)
    with disk_errors(bases.folder):
        size = sum(map(_size, (*bases.garbage(), *copies)))
    freed = store.gc()
    folders = (*freed.folders, *bases.collect())
    if copies:
        bases.discard(copies)
    return replace(freed, folders=folders, copies=copies, size=freed.size + size)


def garbage(store: Store, bases: BaseStore) -> "Freed":
    """Return what nothing needs; changes nothing.

    Raises:
        StoreError: when a record is damaged: what it needs cannot be told from garbage.
    """
    found = store.garbage()
    with disk_errors(bases.folder):
        folders, copies = bases.garbage(), outdated_copies(bases)
        size = found.size + sum(map(_size, (*folders, *copies)))
    return replace(found, folders=(*found.folders, *folders), copies=copies, size=size)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder, without what goes meanwhile."""
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    size = 0
    for each in (path, *inside):  # `os.walk` passes over a folder that is gone, `rglob` does not
        with suppress(FileNotFoundError):
            found = each.lstat()
            size += 0 if stat.S_ISDIR(found.st_mode) else found.st_size
    return size
