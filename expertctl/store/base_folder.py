"""The folder of one base: its quantised copies and the files beside its record.

The folder of copies may be an ordinary one, or a link or mount to another disk, which may hold
other files. So only entries with our names are ever removed there: ``<scheme>-<version>`` and the
staging folders of copies. Where other users may write, nothing is removed: a link could take the
place of a folder while it is emptied.

The canonical digest of a base's tokenizer is kept in a file of its own. It follows from
``tokenizer.json`` alone, so the record does not hold it: records of earlier releases get it when
they are first read, and earlier releases can still read the records.
"""

import errno
import os
import re
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from expertctl.digest import Digest
from expertctl.errors import ExpertError
from expertctl.files import make_folders, remove_tree, sync_folder, write_atomic
from expertctl.package.base_model import TOKENIZER_FILE
from expertctl.package.tokenizer import FORM_VERSION, MAX_TOKENIZER_BYTES, compute_tokenizer_digest
from expertctl.schema.strict_json import read_bounded
from expertctl.schema.validation import decode_json
from expertctl.store.base_record import COPY_FOLDER, DERIVED_PREFIX, StoredBase

QUANTISED = "quantised"
"""The name of the folder of copies, beside the record of the base."""
USAGE_PROFILE = "habits.jsonl"
"""The usage profile of a base's routed experts, beside its record; see `UsageProfileFile`."""
TOKENIZER_DIGEST = "tokenizer-digest.json"
"""The canonical digest of the tokenizer, beside the record; see `with_canonical_tokenizer`."""
QUALITY = "quality-{}.json"
"""What a base loses in a scheme of integers, beside the record; see `QuantisedCache`."""
STAGED_PREFIX = ".new-"
_COPY_NAME = re.compile(r"(int[0-9]{1,2}|bfloat16|float32)-[0-9]{1,9}")
_STAGED_NAME = re.compile(re.escape(STAGED_PREFIX) + r"[0-9a-f]{16}")
_OWN_FILES = (
    USAGE_PROFILE,
    TOKENIZER_DIGEST,
    *(QUALITY.format(scheme) for scheme in ("int8", "int5", "int4")),
)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_KEPT_ERRORS = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}
"""Why a folder is not removed: it is gone already, holds other files, or is a mount."""


def list_copies(folder: Path) -> list[Path]:
    """Return the entries that are named like a copy, of any file type, sorted."""
    return _list_matching(folder, _COPY_NAME)


def list_staged(folder: Path) -> list[Path]:
    """Return the staging folders of copies, those left by killed processes included."""
    found = _list_matching(folder, _STAGED_NAME)
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def list_removable(folder: Path) -> list[Path]:
    """Return the entries with our names, if only this user may write the folder of copies."""
    return [*list_copies(folder), *list_staged(folder)] if is_private_folder(folder) else []


def list_all_staged(bases: Path) -> list[Path]:
    """Return the staging folders of all bases, and those in which whole bases are copied."""
    own = [folder for folder in bases.glob(f"*/{QUANTISED}") if is_private_folder(folder)]
    return [left for folder in (bases, *own) for left in list_staged(folder)]


def list_orphaned_folders(bases: Path) -> list[Path]:
    """Return the folders of bases whose records are gone; links are not followed.

    Folders with other names, such as the ``lost+found`` of a disk, are left alone.
    """
    found = [path for path in bases.glob("[!.]*") if path.is_dir() and not path.is_symlink()]
    return [path for path in found if _has_own_name(path) and _is_orphaned(path)]


def replace_copy(staged: Path, place: Path) -> None:
    """Move a flushed copy to its final path and remove those of other versions."""
    version = place.name.rpartition("-")[2]
    for old in list_copies(place.parent):
        is_other = old.name.rpartition("-")[2] != version
        if is_other or (old == place and not old.is_file()):
            remove_entry(old)
    staged.replace(place)
    sync_folder(place.parent)


def make_copies_folder(folder: Path) -> None:
    """Make the folder if there is none; only this user may be able to write it.

    Raises:
        OSError: when that fails, saying why.
    """
    if folder.is_symlink() and not folder.exists():
        raise OSError(f"it leads to {folder.readlink()}, which is not there")
    if folder.exists() and not folder.is_dir():
        raise OSError("it is no folder")
    make_folders(folder, mode=0o700)
    check_private_folder(folder.stat())


def check_private_folder(found: os.stat_result) -> None:
    """Require that this user owns a file or folder and no other user may write it.

    Raises:
        OSError: when another user may write it.
    """
    if found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
        raise OSError("others may write it")


def remove_entry(path: Path) -> None:
    """Remove a file, a link or a folder tree; a missing one is no error."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)


def remove_base_folder(home: Path) -> None:
    """Remove the folder of a base with its copies; files that are not ours stay among the copies.

    Where the folder is a link, other files in its target stay, too.
    """
    copies = home / QUANTISED
    for path in list_removable(copies):
        remove_entry(path)
    with suppress(FileNotFoundError):
        ours = [path for path in home.iterdir() if path != copies and _is_own_entry(path.name)]
        for path in ours if home.is_symlink() else list(home.iterdir()):
            if path != copies or not path.is_dir() or path.is_symlink():
                remove_entry(path)
    for folder in (copies, home):
        _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in _KEPT_ERRORS:
            raise


def _is_orphaned(home: Path) -> bool:
    """Tell whether a folder remained of a base: no record, and only entries with our names."""
    try:
        ours = all(_is_own_entry(path.name) for path in home.iterdir())
        return ours and not _is_kept(home / QUANTISED)
    except (FileNotFoundError, PermissionError):  # removed meanwhile, or of another user
        return False


def _is_own_entry(name: str) -> bool:
    own = {COPY_FOLDER, QUANTISED, *_OWN_FILES}
    return name in own or name.startswith(DERIVED_PREFIX)


def _has_own_name(home: Path) -> bool:
    return quote(unquote(home.name), safe="") == home.name


def is_private_folder(folder: Path) -> bool:
    """Tell whether only this user may write a folder; False where that is unknown."""
    if not hasattr(os, "geteuid"):
        return False
    try:
        check_private_folder(folder.stat())
    except OSError:
        return False
    return True


def _is_kept(folder: Path) -> bool:
    """Tell whether removing a base would leave this folder: a mount, or one with other files."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    ours = set(list_removable(folder))
    return os.path.ismount(folder) or any(path not in ours for path in folder.iterdir())


def _list_matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


class _TokenizerRecord(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    file: str
    canonical: str | None
    """None where the file has no canonical form."""


def with_canonical_tokenizer(base: StoredBase, home: Path) -> StoredBase:
    """Return a base whose identity has the canonical digest of the tokenizer that was added.

    The digest is absent where ``tokenizer.json`` is no longer that file, or has no canonical form.
    """
    file = next((file.digest for file in base.files if file.path == TOKENIZER_FILE), None)
    if file is None:
        return base
    kept = _read_tokenizer_record(home)
    if kept is None or (kept.version, kept.file) != (FORM_VERSION, str(file)):
        kept = _compute_tokenizer_record(base.path / TOKENIZER_FILE, file)
        if kept is not None:
            _write_tokenizer_record(home, kept)
    return _with_tokenizer_digest(base, kept.canonical if kept else None)


def save_canonical_tokenizer(base: StoredBase, home: Path) -> None:
    """Store the canonical digest of a base that was just read; a failure only costs time later."""
    canonical = base.identity.canonical_tokenizer
    for file in base.files if canonical else ():
        if file.path == TOKENIZER_FILE:
            _write_tokenizer_record(
                home, _TokenizerRecord(FORM_VERSION, str(file.digest), str(canonical))
            )


def _with_tokenizer_digest(base: StoredBase, canonical: str | None) -> StoredBase:
    digest = Digest.parse(canonical) if canonical else None
    return replace(base, identity=replace(base.identity, canonical_tokenizer=digest))


def _read_tokenizer_record(home: Path) -> _TokenizerRecord | None:
    try:
        kept = decode_json((home / TOKENIZER_DIGEST).read_bytes(), _TokenizerRecord)
        Digest.parse(kept.canonical or kept.file)
    except (OSError, msgspec.MsgspecError, ExpertError):  # it can be made again
        return None
    return kept


def _compute_tokenizer_record(path: Path, file: Digest) -> _TokenizerRecord | None:
    """Read the tokenizer; None where it is not the one that was added."""
    try:
        data = read_bounded(path, max_bytes=MAX_TOKENIZER_BYTES)
    except OSError:
        return None
    if Digest.compute(data) != file:
        return None
    try:
        canonical = str(compute_tokenizer_digest(data, what=str(path)))
    except ExpertError:
        canonical = None
    return _TokenizerRecord(FORM_VERSION, str(file), canonical)


def _write_tokenizer_record(home: Path, kept: _TokenizerRecord) -> None:
    with suppress(OSError):
        write_atomic(home / TOKENIZER_DIGEST, msgspec.json.encode(kept) + b"\n", mode=0o600)
