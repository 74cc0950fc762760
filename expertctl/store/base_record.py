"""The record of a base model, ``base.json``: its name, its files and their digests.

A base is a directory with a configuration, a tokenizer and weights. This module names it, lists and
hashes its files, detects whether they are still the ones that were added, and encodes the record. A
copy lies beside its record and is found from there, so a home can be moved.

A GGUF file stays where it is, too: a folder beside the record has the other files, which follow
from its header, and names it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from expertctl.digest import READ_CHUNK, Digest, Progress, hash_file, ignore_progress
from expertctl.errors import (
    BaseMismatchError,
    DigestError,
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    StoreError,
    UsageError,
)
from expertctl.files import make_folders, open_staged_file, sync_folder
from expertctl.package.base_model import TOKENIZER_FILE, BaseIdentity, open_hashing_threads
from expertctl.package.base_tensors import INDEX_FILE, find_weight_files
from expertctl.package.config_document import CONFIG_FILE
from expertctl.package.gguf_codec import GGUF_TABLE
from expertctl.package.gguf_file import read_gguf_header
from expertctl.schema.strict_json import load_object
from expertctl.schema.validation import convert_document
from expertctl.store.store import find_similar_names

_MAX_HUB_NAME = 200


def check_directory(directory: Path) -> None:
    """Require an existing directory.

    Raises:
        UsageError: when it is something else, or holds a GGUF file, which must be named.
        InvalidPackageError: when it is a file called ``.gguf`` that is none.
        NotFoundError: when it does not exist.
    """
    if directory.is_dir():
        _check_no_gguf(directory)
        return
    if directory.suffix == ".gguf" and directory.exists():
        problem = "not a GGUF file: it does not begin with its magic"
        raise InvalidPackageError(str(directory), [problem], hint="download it again")
    if directory.exists():
        hint = "give the folder of config.json, or a GGUF file"
        raise UsageError(f"{directory} is no directory", hint=hint)
    hint = "to download a model: `expertctl pull ORG/NAME`"
    raise NotFoundError(f"{directory}: no such directory", hint=hint)


def _check_no_gguf(directory: Path) -> None:
    if (directory / GGUF_TABLE).exists():
        raise UsageError(
            f"{directory} has the files that follow from a GGUF file", hint="add the GGUF file"
        )
    files = sorted(path.name for path in directory.glob("*.gguf"))
    if files and not (directory / CONFIG_FILE).exists():
        commands = " or ".join(f"`expertctl base add {directory / name}`" for name in files[:3])
        raise UsageError(f"{directory} holds GGUF files, no config.json", hint=commands)


def infer_name(directory: Path, name: str | None, revision: str | None) -> tuple[str, str | None]:
    """Complete name and revision from a hub cache path, ``models--org--name/snapshots/<commit>``.

    A GGUF base is named after the file, and a blob, whose name is a digest, after the model in its
    header.

    Raises:
        UsageError: when what it is called cannot name a base.
    """
    if directory.is_file():
        folder = directory.absolute().parent  # unresolved: a cached file may be a link to a blob
        is_snapshot = folder.parent.name == "snapshots"
        revision = revision or (folder.name if is_snapshot else None)
        return check_base_name(name or _name_gguf_file(directory)), revision
    place = directory.resolve()
    if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
        name = name or place.parent.parent.name.removeprefix("models--").replace("--", "/")
        revision = revision or place.name
    return check_base_name(name or place.name), revision


def _name_gguf_file(path: Path) -> str:
    if path.suffix == ".gguf":
        return path.stem
    named = read_gguf_header(path).metadata.get("general.name")
    return named if isinstance(named, str) and named else path.name


def check_base_name(name: str) -> str:
    """Return a name that a base may have.

    Raises:
        UsageError: for any other.
    """
    shown = name.isprintable() and name.strip() == name and name[:1] not in {"", "."}
    if not shown or len(quote(name, safe="")) > _MAX_HUB_NAME:
        raise UsageError(f"{name[:80]!r} cannot name a base", hint="choose one with `--name NAME`")
    return name


OPTIONAL_FILES = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
)


@dataclass(frozen=True, slots=True)
class BaseFile:
    """One file of a base as it was when it was hashed."""

    path: str
    size: int
    mtime_ns: int
    inode: int
    digest: Digest


FileStat = tuple[int, int, int]
"""Size, modification time in nanoseconds, and inode."""


def list_base_files(directory: Path) -> list[str]:
    """Return the names of the files that the engine may read, sorted.

    Raises:
        NotFoundError: when one that must be there is missing.
    """
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        if not (directory / name).is_file():
            raise NotFoundError(f"{directory}: {name} is missing")
    weights = [_name_weights(directory, path) for path in find_weight_files(directory)]
    optional = (*OPTIONAL_FILES, GGUF_TABLE)
    present = [name for name in optional if (directory / name).is_file()]
    return sorted([CONFIG_FILE, TOKENIZER_FILE, *weights, *present])


def _name_weights(directory: Path, path: Path) -> str:
    """Return the name of a file in the folder, or the path of a GGUF file elsewhere."""
    return path.name if path.parent == directory else str(path)


def stat_base_files(directory: Path, names: Iterable[str]) -> list[FileStat]:
    """Return size, time and inode of files."""
    return [_stat_file(directory / name) for name in names]


def hash_base_files(
    directory: Path,
    names: Iterable[str],
    *,
    stamps: Sequence[FileStat] | None = None,
    progress: Progress = ignore_progress,
) -> tuple[BaseFile, ...]:
    """Hash files in several threads; ``stamps`` are theirs before anything of them was read.

    Raises:
        InvalidPackageError: when one of them changes meanwhile.
    """
    names = list(names)
    paths = [directory / name for name in names]
    stamps = stat_base_files(directory, names) if stamps is None else stamps
    with open_hashing_threads() as (pool, go_on):

        def count(size: int) -> None:
            go_on(size)
            progress(size)

        hashed = list(pool.map(lambda path: hash_file(path, progress=count), paths))
    changed = [p.name for p, stamp in zip(paths, stamps, strict=True) if _stat_file(p) != stamp]
    if changed:
        problems = [f"{name} changed while it was read" for name in changed]
        raise InvalidPackageError(str(directory), problems)
    return tuple(
        BaseFile(name, *stamp, digest)
        for name, stamp, (_, digest) in zip(names, stamps, hashed, strict=True)
    )


def refresh_files(
    directory: Path, files: Iterable[BaseFile]
) -> tuple[tuple[BaseFile, ...], list[str]]:
    """Return the files with their current stat values, and one line per file that has changed.

    A file of the same size with another time or inode is hashed: a copy or a restored backup is
    still the same base.
    """
    known = tuple(files)
    now, problems = [], []
    for file in known:
        match _refresh_file(directory, file):
            case str(problem):
                problems.append(problem)
            case same:
                now.append(same)
    names = {file.path for file in known}
    new = [n for n in OPTIONAL_FILES if n not in names and (directory / n).is_file()]
    return tuple(now), problems + [f"{directory / name} is new" for name in new]


def find_changed_files(directory: Path, files: Iterable[BaseFile]) -> list[str]:
    """Hash all files, and return one line per file whose digest differs."""
    known = tuple(files)
    paths = [directory / file.path for file in known]
    missing = [f"{path} is missing" for path in paths if not path.is_file()]
    if missing:
        return missing
    found = hash_base_files(directory, [file.path for file in known])
    pairs = zip(known, found, paths, strict=True)
    return [f"{path} has other content" for old, new, path in pairs if old.digest != new.digest]


NO_DIGESTS: Mapping[str, Digest] = {}


def check_digests(files: Iterable[BaseFile], expected: Mapping[str, Digest], *, what: str) -> None:
    """Require the digests that somebody stated for some of the files.

    That of a GGUF file is stated for `COPIED_GGUF`, wherever the file is and whatever its name.

    Raises:
        DigestError: naming every file that differs.
    """
    wrong = [
        Path(file.path).name
        for file in files
        if expected.get(_label_file(file), file.digest) != file.digest
    ]
    if wrong:
        raise DigestError(
            f"{what}: {', '.join(wrong)} differs from what the hub states",
            hint="remove the damaged files from the cache of the hub, then repeat the command",
        )


def _label_file(file: BaseFile) -> str:
    return COPIED_GGUF if Path(file.path).is_absolute() else file.path


def check_unchanged(name: str, problems: list[str]) -> None:
    """Raise when a base differs from the one that was added.

    Raises:
        BaseMismatchError: naming every file.
    """
    if problems:
        raise BaseMismatchError(
            f"the base {name} is not what was added: {'; '.join(problems)}",
            hint=f"restore the files; or `expertctl base remove {name} --force` and add it again; "
            "where only the tokenizer was saved again, `expertctl base add DIR` is enough",
        )


def _refresh_file(directory: Path, file: BaseFile) -> BaseFile | str:
    """Return a file with its current stat values, or how its content changed."""
    path = directory / file.path
    if not path.is_file():
        return f"{path} is missing"
    size, *stamp = _stat_file(path)
    if size != file.size:
        return f"{path} has {size:,} bytes, not {file.size:,}"
    if stamp == [file.mtime_ns, file.inode]:
        return file
    (now,) = hash_base_files(directory, [file.path])
    return now if now.digest == file.digest else f"{path} has other content"


def _stat_file(path: Path) -> FileStat:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def copy_files(source: Path, target: Path, progress: Progress) -> None:
    """Copy the files of a base into a new folder.

    Raises:
        NotFoundError: when one that must be there is missing.
    """
    names = list_base_files(source)
    make_folders(target, mode=0o700)
    for name in names:
        copy_file(source / name, target / name, progress)
    sync_folder(target)


def copy_file(source: Path, target: Path, progress: Progress) -> None:
    """Copy one file; it appears under its name when it is complete."""
    with source.open("rb") as stream, open_staged_file(target) as write:
        while chunk := stream.read(READ_CHUNK):
            write(memoryview(chunk))
            progress(len(chunk))


COPY_FOLDER = "files"
"""The folder of a copy, beside its record."""
DERIVED_PREFIX = "derived-"
"""What begins the name of the folder, beside the record, of the files that follow from a GGUF."""
COPIED_GGUF = "model.gguf"
"""The name of a GGUF file in a copy."""
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredBase:
    """A known base: its path, its identity, and the state of its files when they were added."""

    name: str
    path: Path
    identity: BaseIdentity
    files: tuple[BaseFile, ...]
    shapes: Mapping[str, tuple[int, int]]
    """(out, in) of every linear layer."""
    copied: bool
    added_ns: int
    foreign: bool = False
    """Whether only ``run --engine transformers`` can run it."""

    @property
    def size(self) -> int:
        """The total size of its files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def source(self) -> Path:
        """What the user added: the folder, or the GGUF file; for a copy, its folder."""
        named = [Path(file.path) for file in self.files if Path(file.path).is_absolute()]
        return named[0] if named else self.path

    @property
    def digests(self) -> Mapping[str, Digest]:
        """The digests of its files by name; that of a GGUF file for `COPIED_GGUF`."""
        return {_label_file(file): file.digest for file in self.files}

    @property
    def is_derived(self) -> bool:
        """Whether its folder, beside the record, was made from a GGUF file that stays in place."""
        return self.source != self.path


class _StoredIdentity(msgspec.Struct, forbid_unknown_fields=True):
    revision: str | None
    arch: str
    weights: str | None
    tokenizer: str


class _StoredFile(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    size: int
    mtime_ns: str
    inode: str
    digest: str


class _StoredBaseRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    schema: int
    name: str
    path: str
    copied: bool
    added_ns: str
    identity: _StoredIdentity
    files: list[_StoredFile]
    shapes: dict[str, tuple[int, int]]
    foreign: bool = False


def encode_base_record(base: StoredBase) -> bytes:
    """Return the bytes of a record; nanoseconds and inodes are text, as they may exceed 2^53."""
    identity = base.identity
    weights = str(identity.weights) if identity.weights else None
    record = _StoredBaseRecord(
        1,
        base.name,
        base.path.name if base.copied or base.is_derived else str(base.path),
        base.copied,
        str(base.added_ns),
        _StoredIdentity(identity.revision, str(identity.arch), weights, str(identity.tokenizer)),
        [
            _StoredFile(f.path, f.size, str(f.mtime_ns), str(f.inode), str(f.digest))
            for f in base.files
        ],
        dict(base.shapes),
        base.foreign,
    )
    return json.dumps(msgspec.to_builtins(record), indent=1).encode() + b"\n"


def read_base_record(path: Path) -> StoredBase:
    """Read a record.

    Raises:
        StoreError: when it is damaged.
    """
    try:
        document: Any = load_object(path.read_bytes(), what=str(path), max_bytes=_MAX_BYTES)
        record = convert_document(document, _StoredBaseRecord)
        return _base_from_record(record, path.parent)
    except (ExpertError, msgspec.ValidationError, ValueError) as error:
        hint = f"remove {path.parent} and add the base again"
        raise StoreError(f"{path} is damaged: {error}", hint=hint) from error


def _base_from_record(record: _StoredBaseRecord, folder: Path) -> StoredBase:
    stored = record.identity
    identity = BaseIdentity(
        name=record.name,
        revision=stored.revision,
        arch=Digest.parse(stored.arch),
        weights=Digest.parse(stored.weights) if stored.weights else None,
        tokenizer=Digest.parse(stored.tokenizer),
    )
    files = tuple(
        BaseFile(f.path, f.size, int(f.mtime_ns), int(f.inode), Digest.parse(f.digest))
        for f in record.files
    )
    return StoredBase(
        name=record.name,
        path=folder / COPY_FOLDER if record.copied else folder / record.path,
        identity=identity,
        files=files,
        shapes=record.shapes,
        copied=record.copied,
        added_ns=int(record.added_ns),
        foreign=record.foreign,
    )


_MAX_NAMED = 8
"""How many known bases an error lists."""


def match_label(known: Sequence[StoredBase], label: str) -> StoredBase | None:
    """Return the only base that a label may mean, by its full name or its last part."""
    exact = [base for base in known if base.name == label]
    alike = [base for base in known if _last_part(base.name) == _last_part(label)]
    found = exact or alike
    return found[0] if len(found) == 1 else None


def build_unknown_base_hint(wanted: str, known: Sequence[StoredBase]) -> str:
    """Return the hint for an unknown base: similar names, and all known ones."""
    names = [base.name for base in known]
    near = find_similar_names(wanted, names)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    if not names:
        return "none is known yet: `expertctl pull ORG/NAME`, or `expertctl base add DIR`"
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{meant}known: {', '.join(names[:_MAX_NAMED])}{more}; `expertctl base add DIR` adds one"


def _last_part(label: str) -> str:
    return label.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()
