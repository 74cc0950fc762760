"""Where the store keeps things, and which refs there are; reads only.

::

    store/blobs/sha256/<hex>                           one file of a package
    store/refs/<registry>/<namespace>/<name>/<version> the commit of one installed expert; registry
                                                       is a host, ':' as '+', or local: from a file
    store/staging/<token>/                             what one install is writing now
    store/leases/<token>/                              blobs that one process is using now
    store/derived/<content digest>/                    what was computed from one package
    store/running/<number>-<token>/                    what one run takes of the memory
    store/lock                                         held while refs or blobs are changed
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError
from expertctl.reference import PackageName, Version
from expertctl.store.ref import LOCAL, StoredExpert, parse_ref


@dataclass(frozen=True, slots=True)
class StorePaths:
    """The paths below ``store/``."""

    root: Path

    @property
    def blobs(self) -> Path:
        """One file per blob, named by its digest."""
        return self.root / "blobs" / "sha256"

    @property
    def refs(self) -> Path:
        """One file per installed expert."""
        return self.root / "refs"

    @property
    def staging(self) -> Path:
        """One folder per running install."""
        return self.root / "staging"

    @property
    def leases(self) -> Path:
        """One folder per process that uses blobs."""
        return self.root / "leases"

    @property
    def derived(self) -> Path:
        """One folder per package from which something was computed."""
        return self.root / "derived"

    @property
    def running(self) -> Path:
        """One folder per run that uses a base."""
        return self.root / "running"

    @property
    def lock(self) -> Path:
        """The lock that is held while refs or blobs are changed."""
        return self.root / "lock"

    def blob(self, digest: Digest) -> Path:
        """Where a blob is, if it is there."""
        return self.blobs / digest.hex

    def ref(self, registry: str, package: PackageName, version: Version) -> Path:
        """Where the ref of an expert is, if it is installed."""
        place = self.refs / _folder_of(registry)
        return place / package.namespace / package.name / str(version)

    def refs_of(self, package: PackageName, version: Version) -> list[Path]:
        """Return the refs of one version, whatever the registry: more than one after a crash."""
        places = (Path(entry.path) for entry in _entries(str(self.refs)))
        paths = (place / package.namespace / package.name / str(version) for place in places)
        return [path for path in paths if path.is_file()]


@dataclass(frozen=True, slots=True)
class DamagedRef:
    """A file among the refs that is not a ref."""

    path: Path
    name: str
    """What it should have been: ``namespace/name@version``."""
    problem: str

    @property
    def warning(self) -> str:
        """What the user is told when a command is not about the store."""
        return f"the record of {self.name} is damaged; see `expertctl doctor`"


@dataclass(frozen=True, slots=True)
class Scan:
    """What the refs say now, sorted by name and version."""

    experts: tuple[StoredExpert, ...]
    damaged: tuple[DamagedRef, ...]
    shadowed: tuple[StoredExpert, ...] = ()
    """Refs of an earlier origin of an expert, left by a process that was killed."""


def scan(paths: StorePaths) -> Scan:
    """Read every ref; one that is removed meanwhile is left out."""
    experts: list[StoredExpert] = []
    damaged: list[DamagedRef] = []
    for path in _ref_files(paths.refs):
        try:
            experts.append(read_ref(paths, path))
        except FileNotFoundError:
            continue
        except InvalidPackageError as error:
            namespace, name, version = path.parts[-3:]
            damaged.append(DamagedRef(path, f"{namespace}/{name}@{version}", error.problems[0]))
    experts.sort(key=lambda e: (e.package, e.version, e.registry == LOCAL, e.registry))
    shadowed = [b for a, b in pairwise(experts) if _is_shadow(a, b)]
    shown = [e for e in experts if e not in shadowed] if shadowed else experts
    return Scan(tuple(shown), tuple(damaged), tuple(shadowed))


def _is_shadow(shown: StoredExpert, other: StoredExpert) -> bool:
    """Tell whether one ref stands for both: a registry took over from a file or another one."""
    return shown.ref == other.ref and shown.content_digest == other.content_digest


def _folder_of(registry: str) -> str:
    """Return a host as a folder name valid on any system, as `RegistryAddress.folder` does."""
    return registry.replace(":", "+").replace("[", "").replace("]", "")


def read_ref(paths: StorePaths, path: Path) -> StoredExpert:
    """Read one ref, which must be in its place.

    Raises:
        FileNotFoundError: when it is not there.
        InvalidPackageError: when it is damaged.
    """
    expert = parse_ref(path.read_bytes(), what=str(path))
    if paths.ref(expert.registry, expert.package, expert.version) != path:
        raise InvalidPackageError(str(path), [f"it names {expert.ref} of {expert.registry}"])
    return expert


def _ref_files(folder: Path) -> Iterator[Path]:
    """Yield the files four levels below ``refs``, without those being written (``.`` first)."""
    level = [str(folder)]
    for _ in range(3):
        level = [e.path for f in level for e in _entries(f) if e.is_dir()]
    for name in level:
        yield from (Path(e.path) for e in _entries(name) if e.is_file())


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if e.name[0] != "."), key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def file_size(path: Path) -> int | None:
    """Return the size of a file, None when it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
