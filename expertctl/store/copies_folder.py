"""The folder of a base's quantised copies: an ordinary one, or a link or a mount to another disk.

Such a disk may hold other files. So only what has a name of ours is ever removed there:
``<scheme>-<version>``, and the folders in which a copy is being written. Where other users may
write, nothing is removed: a link could take the place of a folder while that is emptied.
"""

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from expertctl.durable import make_folders, remove_tree, sync_folder
from expertctl.store.base_record import COPY

QUANTISED = "quantised"
"""The name of the folder, beside the record of the base."""
HABITS = "habits.jsonl"
"""The habits of a base's routed experts, also beside its record: see `HabitsFile`."""
TOKENIZER_DIGEST = "tokenizer-digest.json"
"""The canonical digest of its tokenizer, also beside its record: see `base_tokenizer`."""
STAGED = ".new-"
_COPY = re.compile(r"(int[0-9]{1,2}|bfloat16|float32)-[0-9]{1,9}")
_STAGED = re.compile(re.escape(STAGED) + r"[0-9a-f]{16}")
_BESIDE = {QUANTISED, HABITS, TOKENIZER_DIGEST}
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_STAYS = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}
"""Why a folder is not removed: it is gone already, holds other things, or is a mount."""


def copies_in(folder: Path) -> list[Path]:
    """Return what is named like a copy, whatever it is, sorted."""
    return _named(folder, _COPY)


def staged_in(folder: Path) -> list[Path]:
    """Return the folders in which something is being written, or was by killed processes."""
    found = _named(folder, _STAGED)
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def removable_in(folder: Path) -> list[Path]:
    """Return what has a name of ours, if only this user may write the folder of copies."""
    return [*copies_in(folder), *staged_in(folder)] if is_own(folder) else []


def staged_below(bases: Path) -> list[Path]:
    """Return the staging folders of all bases, and those in which bases are being copied."""
    own = [folder for folder in bases.glob(f"*/{QUANTISED}") if is_own(folder)]
    return [left for folder in (bases, *own) for left in staged_in(folder)]


def left_below(bases: Path) -> list[Path]:
    """Return the folders of bases whose records are gone; links are not followed.

    Folders with other names, such as the ``lost+found`` of a disk, are not ours.
    """
    found = [path for path in bases.glob("[!.]*") if path.is_dir() and not path.is_symlink()]
    return [path for path in found if _has_own_name(path) and _is_left(path)]


def put_in_place(staged: Path, place: Path) -> None:
    """Move a flushed copy to its place; older ones of its scheme are removed."""
    scheme = place.name.partition("-")[0]
    for old in copies_in(place.parent):
        if old.name.startswith(f"{scheme}-") and (old != place or not old.is_file()):
            remove_entry(old)
    staged.replace(place)
    sync_folder(place.parent)


def make_copies_folder(folder: Path) -> None:
    """Make the folder if there is none, and demand that only this user may write it.

    Raises:
        OSError: when that fails, saying why.
    """
    if folder.is_symlink() and not folder.exists():
        raise OSError(f"it leads to {folder.readlink()}, which is not there")
    if folder.exists() and not folder.is_dir():
        raise OSError("it is no folder")
    make_folders(folder, mode=0o700)
    demand_own(folder.stat())


def demand_own(found: os.stat_result) -> None:
    """Demand that this user owns it and no other user may write it.

    Raises:
        OSError: when it is not so.
    """
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise OSError("others may write it")


def remove_entry(path: Path) -> None:
    """Remove a file, a link or a folder of ours; what is gone already is no error."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def remove_home(home: Path) -> None:
    """Remove the folder of a base with its copies; what is not ours among them stays.

    Where it is a link, other files in the folder it leads to stay, too.
    """
    copies = home / QUANTISED
    for path in removable_in(copies):
        remove_entry(path)
    with suppress(FileNotFoundError):
        ours = [home / COPY, home / HABITS, home / TOKENIZER_DIGEST]
        for path in ours if home.is_symlink() else list(home.iterdir()):
            if path != copies or not path.is_dir() or path.is_symlink():
                remove_entry(path)
    for folder in (copies, home):
        _remove_emptied(folder)


def _remove_emptied(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in _STAYS:
            raise


def _is_left(home: Path) -> bool:
    """Tell whether a folder is what is left of a base: no record, and only what is ours."""
    try:
        ours = {path.name for path in home.iterdir()} <= {COPY, *_BESIDE}
        return ours and not _stays(home / QUANTISED)
    except (FileNotFoundError, PermissionError):  # removed meanwhile, or of another user
        return False


def _has_own_name(home: Path) -> bool:
    return quote(unquote(home.name), safe="") == home.name


def is_own(folder: Path) -> bool:
    """Tell whether only this user may write a folder; False on a system that does not tell."""
    if not hasattr(os, "geteuid"):
        return False
    try:
        demand_own(folder.stat())
    except OSError:
        return False
    return True


def _stays(folder: Path) -> bool:
    """Tell whether removing a base would leave this folder: it is a mount or holds other things."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    ours = set(removable_in(folder))
    return os.path.ismount(folder) or any(path not in ours for path in folder.iterdir())


def _named(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
