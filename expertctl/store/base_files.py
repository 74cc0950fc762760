"""Which files make a base, and whether they are still the ones that were read."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import CHUNK, Digest, Progress, hash_file, no_progress
from expertctl.durable import make_folders, staged_file, sync_folder
from expertctl.errors import BaseMismatchError, InvalidPackageError, NotFoundError
from expertctl.package.base_model import TOKENIZER_FILE
from expertctl.package.base_tensors import INDEX_FILE, weight_files
from expertctl.package.hashing_threads import hashing_threads
from expertctl.package.model_config import CONFIG_FILE

OPTIONAL = (
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


@dataclass(frozen=True, slots=True)
class _Stamp:
    size: int
    mtime_ns: int
    inode: int


def file_names(directory: Path) -> list[str]:
    """Return the names of the files that the engine may read, sorted.

    Raises:
        NotFoundError: when one that must be there is missing.
    """
    for name in (CONFIG_FILE, TOKENIZER_FILE):
        if not (directory / name).is_file():
            raise NotFoundError(f"{directory}: {name} is missing")
    weights = [path.name for path in weight_files(directory)]
    present = [name for name in OPTIONAL if (directory / name).is_file()]
    return sorted([CONFIG_FILE, TOKENIZER_FILE, *weights, *present])


def fingerprint(
    directory: Path, names: Iterable[str], *, progress: Progress = no_progress
) -> tuple[BaseFile, ...]:
    """Hash files, in threads.

    Raises:
        InvalidPackageError: when one of them changes meanwhile.
    """
    paths = [directory / name for name in names]
    stamps = [_stamp(path) for path in paths]
    with hashing_threads() as (pool, go_on):

        def count(size: int) -> None:
            go_on(size)
            progress(size)

        hashed = list(pool.map(lambda path: hash_file(path, progress=count), paths))
    changed = [p.name for p, stamp in zip(paths, stamps, strict=True) if _stamp(p) != stamp]
    if changed:
        problems = [f"{name} changed while it was read" for name in changed]
        raise InvalidPackageError(str(directory), problems)
    return tuple(
        BaseFile(path.name, stamp.size, stamp.mtime_ns, stamp.inode, digest)
        for path, stamp, (_, digest) in zip(paths, stamps, hashed, strict=True)
    )


def current_files(
    directory: Path, files: Iterable[BaseFile]
) -> tuple[tuple[BaseFile, ...], list[str]]:
    """Return the files as they are now, and what has changed, one line per file.

    A file of the same size with another time or inode is hashed: copies and restored backups are
    still the same base.
    """
    known = tuple(files)
    now, problems = [], []
    for file in known:
        try:
            now.append(_current(directory, file))
        except _ChangedError as error:
            problems.append(str(error))
    names = {file.path for file in known}
    new = [n for n in OPTIONAL if n not in names and (directory / n).is_file()]
    return tuple(now), problems + [f"{directory / name} is new" for name in new]


def rehashed(
    directory: Path, files: Iterable[BaseFile], *, progress: Progress = no_progress
) -> list[str]:
    """Return which files do not have their digest, after reading all of them."""
    known = tuple(files)
    missing = [f"{directory / f.path} is missing" for f in known if not _present(directory, f)]
    if missing:
        return missing
    found = fingerprint(directory, [file.path for file in known], progress=progress)
    pairs = zip(known, found, strict=True)
    return [_content(directory, old) for old, new in pairs if old.digest != new.digest]


def refuse_changes(name: str, problems: list[str]) -> None:
    """Raise when a base is not what was added.

    Raises:
        BaseMismatchError: naming every file.
    """
    if problems:
        raise BaseMismatchError(
            f"the base {name} is not what was added: {'; '.join(problems)}",
            hint=f"restore the files; or `expertctl base remove {name} --force` and add it again; "
            "where only the tokenizer was saved again, `expertctl base add DIR` is enough",
        )


class _ChangedError(ValueError):
    """What happened to one file."""


def _current(directory: Path, file: BaseFile) -> BaseFile:
    path = directory / file.path
    if not _present(directory, file):
        raise _ChangedError(f"{path} is missing")
    stamp = _stamp(path)
    if stamp.size != file.size:
        raise _ChangedError(f"{path} has {stamp.size:,} bytes, not {file.size:,}")
    if (stamp.mtime_ns, stamp.inode) == (file.mtime_ns, file.inode):
        return file
    (now,) = fingerprint(directory, [file.path])
    if now.digest != file.digest:
        raise _ChangedError(_content(directory, file))
    return now


def _content(directory: Path, file: BaseFile) -> str:
    return f"{directory / file.path} has other content"


def _present(directory: Path, file: BaseFile) -> bool:
    return (directory / file.path).is_file()


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return _Stamp(status.st_size, status.st_mtime_ns, status.st_ino)


def copy_files(source: Path, target: Path, progress: Progress) -> None:
    """Copy the files of a base into a folder, which is made.

    Raises:
        NotFoundError: when one that must be there is missing.
    """
    names = file_names(source)
    make_folders(target, mode=0o700)
    for name in names:
        with (source / name).open("rb") as stream, staged_file(target / name) as write:
            while chunk := stream.read(CHUNK):
                write(memoryview(chunk))
                progress(len(chunk))
    sync_folder(target)
