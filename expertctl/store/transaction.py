"""Changes of the store: staging of packages, and transactions on refs and blobs.

`PackageStaging` is the folder that one install writes to before anything is published.
`StoreTransaction` changes refs and blobs while no other process does.

The order is essential. Installing: blobs, their folder flushed, then the ref. Removing: the ref,
its folder flushed, then blobs that no ref names and no lease holds. So a process may be killed
between any two steps, and every blob that a ref names exists.
"""

import dataclasses
import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from expertctl.digest import READ_CHUNK, Digest
from expertctl.errors import InvalidPackageError, StoreError
from expertctl.files import make_folders, open_staged_file, publish_file, remove_tree, sync_folder
from expertctl.package.read import VerifiedPackage, VersionContent, changed_version_error
from expertctl.schema.manifest import BaseRequirement
from expertctl.store.disk import DerivedData, disk_errors, measure_folder
from expertctl.store.locks import (
    exclusive_lock,
    is_claimed,
    list_claimed_folders,
    list_leased_blobs,
)
from expertctl.store.refs import (
    LOCAL,
    RequiredBase,
    StoredExpert,
    StorePaths,
    StoreScan,
    encode_ref,
    find_file_size,
    read_ref,
    scan_refs,
)

_NO_LINK_ERRORS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
BLOB_MODE = 0o444
"""Nothing may change a verified blob in place."""


@dataclass(frozen=True, slots=True)
class PackageStaging:
    """A `BlobSink` in its own folder; when `open` exits, the bytes are flushed to the disk."""

    folder: Path

    def open(
        self, digest: Digest, size: int
    ) -> AbstractContextManager[Callable[[memoryview], None]]:
        """Create a staged blob."""
        del size
        return open_staged_file(self.path(digest), mode=BLOB_MODE)

    def blob(self, digest: Digest) -> AbstractContextManager[BinaryIO]:
        """Open a staged blob."""
        return self.path(digest).open("rb")

    def path(self, digest: Digest) -> Path:
        """Return the path of a staged blob."""
        return self.folder / digest.hex

    def adopt(self, digest: Digest, source: Path) -> None:
        """Stage a blob that exists elsewhere; the other file stays."""
        self.path(digest).unlink(missing_ok=True)
        _link_or_copy(source, self.path(digest))

    def subset(self, name: str, digests: Iterable[Digest]) -> "PackageStaging":
        """Return a staging inside this one with some of its blobs; several may share a blob."""
        part = PackageStaging(self.folder / name)
        part.folder.mkdir(mode=0o700)
        for digest in digests:
            _link_or_copy(self.path(digest), part.path(digest))
        return part

    @property
    def ref(self) -> Path:
        """The path of a ref before it is published."""
        return self.folder / "ref"


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRORS:
            raise
        with source.open("rb") as stream, open_staged_file(target, mode=BLOB_MODE) as write:
            while chunk := stream.read(READ_CHUNK):
                write(memoryview(chunk))


STAGING_AGE = 3600.0
"""Staging younger than this, in seconds, is left alone, even where locks do not work."""

_HEX = re.compile(r"[0-9a-f]{64}")
AddOutcome = Literal["installed", "re-signed", "replaced", "already installed"]


@dataclass(frozen=True, slots=True)
class AddResult:
    """The result of publishing a package."""

    expert: StoredExpert
    outcome: AddOutcome
    superseded: tuple[Digest, ...] = ()
    """Blobs of the replaced version, which may be unneeded now."""


@dataclass(frozen=True, slots=True)
class FreedFiles:
    """What was removed, or would be."""

    blobs: tuple[Digest, ...] = ()
    folders: tuple[Path, ...] = ()
    size: int = 0
    copies: tuple[Path, ...] = ()
    """Outdated quantised copies of bases."""


@contextmanager
def begin_transaction(paths: StorePaths) -> Iterator["StoreTransaction"]:
    """Take the store's lock, creating the store if necessary.

    Raises:
        StoreError: when it cannot be written, or another process holds it for too long.
    """
    with disk_errors(paths.root):
        make_folders(paths.root, mode=0o700)
        with exclusive_lock(paths.lock):
            yield StoreTransaction(paths)


class StoreTransaction:
    """The right to change the store; only `begin_transaction` makes one."""

    def __init__(self, paths: StorePaths) -> None:
        """Change the store at ``paths``, whose lock is held."""
        self._paths = paths

    def scan(self) -> StoreScan:
        """Read every ref."""
        return scan_refs(self._paths)

    def publish(
        self,
        package: VerifiedPackage,
        staging: PackageStaging,
        *,
        warnings: Sequence[str] = (),
        registry: str = LOCAL,
        replace: bool = False,
    ) -> AddResult:
        """Publish a package whose blobs are staged; ``registry`` is where it came from.

        The blobs replace existing ones, so installing again repairs damage. One version of a name
        is installed once: a registry takes it over from a file or another registry, but a file
        never takes it over, so that later revocations by the registry still apply. Blobs of the
        replaced version stay until the caller frees them, so that `restore` can bring it back.

        Raises:
            ChangedVersionError: when the version is installed with other content, and not to be
                replaced.
        """
        new = make_stored_expert(package, warnings, registry=registry)
        old = self._find_replaced(new)
        expert, outcome = _merge_ref(old, new, replace=replace)
        path = self._paths.ref(expert.registry, expert.package, expert.version)
        self._touch_refs()  # before, too: the process may be killed after the change
        for digest in {file.digest for file in new.layers}:
            make_folders(self._paths.blobs, mode=0o755)
            publish_file(staging.path(digest), self._paths.blob(digest))
        sync_folder(self._paths.blobs)
        if old != expert:
            self._write_ref(expert, path, staging)
        self._touch_refs()  # even where the ref stays: blobs that were damaged are whole now
        self._discard_others(expert, path)
        superseded = {*new.layers, *(old.layers if old else ())} - {*expert.layers}
        return AddResult(expert, outcome, tuple(sorted({file.digest for file in superseded})))

    def restore(self, before: StoredExpert, staging: PackageStaging) -> None:
        """Restore the version that `publish` replaced; its blobs were not freed yet."""
        path = self._paths.ref(before.registry, before.package, before.version)
        self._touch_refs()
        self._write_ref(before, path, staging)
        self._discard_others(before, path)
        self._touch_refs()

    def check_addition(
        self, package: VerifiedPackage, *, registry: str = LOCAL, replace: bool = False
    ) -> None:
        """Check whether `publish` would accept a package; changes nothing.

        Raises:
            ChangedVersionError: when the version is installed with other content, and not replaced.
        """
        new = make_stored_expert(package, (), registry=registry)
        _merge_ref(self._find_replaced(new), new, replace=replace)

    def remove(self, expert: StoredExpert) -> FreedFiles:
        """Remove an expert, and the blobs that nothing else needs."""
        shown = self._paths.ref(expert.registry, expert.package, expert.version)
        places = self._paths.find_refs(expert.package, expert.version)
        for place in sorted(places, key=lambda place: place == shown):
            self.discard(place)
        return self.free_blobs(file.digest for file in expert.layers)

    def discard(self, ref: Path) -> None:
        """Remove a ref, damaged or not; its blobs stay."""
        self._touch_refs()
        ref.unlink(missing_ok=True)
        sync_folder(ref.parent)
        for folder in ref.parents[:3]:
            if not any(folder.iterdir()):
                folder.rmdir()
        self._touch_refs()

    def collect_garbage(self, *, age: float = STAGING_AGE) -> FreedFiles:
        """Remove blobs that nothing needs, and folders of killed processes or removed packages.

        Raises:
            StoreError: when a ref is damaged: its blobs cannot be told from garbage.
        """
        garbage = find_garbage(self._paths, age=age)
        for expert in self.scan().shadowed:
            self.discard(self._paths.ref(expert.registry, expert.package, expert.version))
        for path in self._paths.blobs.glob(".*.tmp"):
            path.unlink()
        for digest in garbage.blobs:
            self._paths.blob(digest).unlink(missing_ok=True)
        for folder in garbage.folders:
            remove_tree(folder)
        return garbage

    def sweep(self) -> None:
        """Remove folders left by killed processes."""
        for folder in list_abandoned_folders(self._paths):
            remove_tree(folder)

    def _discard_others(self, expert: StoredExpert, path: Path) -> None:
        """Remove the refs of a version but the one at ``path``."""
        for place in self._paths.find_refs(expert.package, expert.version):
            if place != path:
                self.discard(place)

    def _find_replaced(self, new: StoredExpert) -> StoredExpert | None:
        """Return the expert that a new one would replace; a damaged ref counts as none."""
        found = []
        for path in self._paths.find_refs(new.package, new.version):
            try:
                found.append(read_ref(self._paths, path))
            except (FileNotFoundError, InvalidPackageError):
                continue
        return min(found, key=lambda old: (old.registry == LOCAL, old.registry), default=None)

    def _write_ref(self, expert: StoredExpert, path: Path, staging: PackageStaging) -> None:
        with open_staged_file(staging.ref) as write:
            write(memoryview(encode_ref(expert)))
        make_folders(path.parent)
        publish_file(staging.ref, path)
        sync_folder(path.parent)

    def _touch_refs(self) -> None:
        """Change `Store.revision`, so that processes that cache refs or blobs read them again."""
        now = time.time_ns()
        with suppress(FileNotFoundError):  # there was nothing to be read
            os.utime(self._paths.refs, ns=(now, now))

    def free_blobs(self, digests: Iterable[Digest]) -> FreedFiles:
        """Remove those of some blobs that no ref names and no lease holds."""
        now = self.scan()
        if now.damaged:
            return FreedFiles()
        needed = _list_referenced(now) | list_leased_blobs(self._paths)
        freed = sorted({*digests} - needed)
        sizes = {digest: find_file_size(self._paths.blob(digest)) for digest in freed}
        for digest in freed:
            self._paths.blob(digest).unlink(missing_ok=True)
        gone = tuple(digest for digest, size in sizes.items() if size is not None)
        return FreedFiles(gone, (), sum(size or 0 for size in sizes.values()))


def find_garbage(paths: StorePaths, *, age: float = STAGING_AGE) -> FreedFiles:
    """Return what `StoreTransaction.collect_garbage` would remove; changes nothing.

    Raises:
        StoreError: when a ref is damaged: its blobs cannot be told from garbage.
    """
    now = scan_refs(paths)
    if now.damaged:
        names = ", ".join(ref.name for ref in now.damaged)
        raise StoreError(
            f"the record of {names} is damaged, so its files cannot be told from garbage",
            hint="install it again from its file, or `expertctl remove` it; then repeat",
        )
    needed = _list_referenced(now) | list_leased_blobs(paths)
    blobs = [digest for digest in list_blobs(paths) if digest not in needed]
    size = sum(find_file_size(paths.blob(digest)) or 0 for digest in blobs)
    orphans = DerivedData(paths.derived).list_other_folders({e.content_digest for e in now.experts})
    size += sum(measure_folder(folder) for folder in orphans)
    return FreedFiles(tuple(blobs), (*list_abandoned_folders(paths, age=age), *orphans), size)


def list_blobs(paths: StorePaths) -> list[Digest]:
    """Return the digests of all blobs, sorted."""
    names = [path.name for path in paths.blobs.iterdir()] if paths.blobs.is_dir() else []
    return sorted(Digest(name) for name in names if _HEX.fullmatch(name))


def list_abandoned_folders(paths: StorePaths, *, age: float = STAGING_AGE) -> list[Path]:
    """Return the folders of processes that ended without cleaning up, except young ones.

    A time in the future, as after a change of the clock, is not young.
    """
    now = time.time()
    folders = [*list_claimed_folders(paths.staging), *list_claimed_folders(paths.leases)]
    return [f for f in folders if abs(now - _last_change(f, now)) >= age and not is_claimed(f)]


def _last_change(folder: Path, now: float) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return now


def _list_referenced(now: StoreScan) -> set[Digest]:
    return {file.digest for expert in now.experts for file in expert.layers}


def _merge_ref(
    old: StoredExpert | None, new: StoredExpert, *, replace: bool
) -> tuple[StoredExpert, AddOutcome]:
    """Return the expert to record; a signature or a registry is never lost."""
    if old is None:
        return new, "installed"
    if old.content_digest != new.content_digest:
        if replace:
            return new, "replaced"
        raise changed_version_error(new.ref, expert_content(old), expert_content(new))
    registry = old.registry if new.registry == LOCAL else new.registry
    if new.signer is None or old.package_digest == new.package_digest:
        return dataclasses.replace(
            old, registry=registry, warnings=new.warnings
        ), "already installed"
    return dataclasses.replace(new, registry=registry), "re-signed"


def expert_content(expert: StoredExpert) -> VersionContent:
    """Return the content of a version, and where it came from."""
    source = "a file" if expert.registry == LOCAL else expert.registry
    return VersionContent(source, expert.content_digest, (expert.signer,) if expert.signer else ())


def make_stored_expert(
    package: VerifiedPackage, warnings: Sequence[str], *, registry: str = LOCAL
) -> StoredExpert:
    """Return a verified package as the store records it; ``registry`` is where it came from."""
    contents = package.contents
    manifest = contents.manifest
    return StoredExpert(
        registry=registry,
        package=manifest.package,
        version=manifest.semver,
        content_digest=contents.content_digest,
        package_digest=contents.package_digest,
        files=contents.files,
        signature=contents.layout.signature,
        signer=package.signer,
        base=make_required_base(manifest.base),
        requires=manifest.composition.requires,
        conflicts=manifest.composition.conflicts,
        warnings=tuple(warnings),
    )


def make_required_base(base: BaseRequirement) -> RequiredBase:
    """Return the base that a manifest names."""
    return RequiredBase(
        name=base.name,
        revision=base.revision,
        arch=Digest.parse(base.arch),
        weights=Digest.parse(base.weights) if base.weights else None,
        tokenizer=Digest.parse(base.tokenizer),
        accepts=tuple(Digest.parse(text) for text in base.accepts),
        tokenizer_version=base.tokenizer_version,
    )
