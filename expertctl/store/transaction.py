"""Changes to refs and blobs, made while no other process makes any.

The order is essential. Installing: blobs, their folder flushed, then the ref. Removing: the ref,
its folder flushed, then blobs that no ref names and no lease holds. So a process may be killed
between any two steps, and every blob that a ref names is there.
"""

import dataclasses
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.digest import Digest
from expertctl.durable import make_folders, publish, remove_tree, staged_file, sync_folder
from expertctl.errors import InvalidPackageError, StoreError
from expertctl.package.verify import VerifiedPackage
from expertctl.package.version_content import VersionContent, changed_version
from expertctl.schema.manifest import BaseRequirement
from expertctl.store.derived import Derived, folder_size
from expertctl.store.disk import disk_errors
from expertctl.store.lease import leased_blobs
from expertctl.store.lock import claimed_folders, exclusive, is_held
from expertctl.store.paths import Scan, StorePaths, file_size, read_ref, scan
from expertctl.store.ref import LOCAL, RequiredBase, StoredExpert, encode_ref
from expertctl.store.staging import Staging

STAGING_AGE = 3600.0
"""Staging younger than this, in seconds, is left alone, even where locks do not work."""

_HEX = re.compile(r"[0-9a-f]{64}")
Outcome = Literal["installed", "re-signed", "replaced", "already installed"]


@dataclass(frozen=True, slots=True)
class Added:
    """What adding a package did."""

    expert: StoredExpert
    outcome: Outcome
    superseded: tuple[Digest, ...] = ()
    """Blobs of the version as it was before, which may not be needed any more."""


@dataclass(frozen=True, slots=True)
class Freed:
    """What was removed, or would be."""

    blobs: tuple[Digest, ...] = ()
    folders: tuple[Path, ...] = ()
    size: int = 0
    copies: tuple[Path, ...] = ()
    """Quantised copies of bases that no run reads any more."""


@contextmanager
def begin(paths: StorePaths) -> Iterator["Transaction"]:
    """Take the store's lock, creating the store if need be.

    Raises:
        StoreError: when it cannot be written, or another process holds it for too long.
    """
    with disk_errors(paths.root):
        make_folders(paths.root, mode=0o700)
        with exclusive(paths.lock):
            yield Transaction(paths)


class Transaction:
    """The right to change the store; only `begin` makes one."""

    def __init__(self, paths: StorePaths) -> None:
        """Change the store at ``paths``, whose lock is held."""
        self._paths = paths

    def scan(self) -> Scan:
        """Return what the refs say now."""
        return scan(self._paths)

    def add(
        self,
        package: VerifiedPackage,
        staging: Staging,
        *,
        warnings: Sequence[str] = (),
        registry: str = LOCAL,
        replace: bool = False,
    ) -> Added:
        """Publish a package as `put` does, and remove the blobs that nothing needs now."""
        added = self.put(package, staging, warnings=warnings, registry=registry, replace=replace)
        if added.superseded:  # otherwise there is no need to read every ref
            self.free(added.superseded)
        return added

    def put(
        self,
        package: VerifiedPackage,
        staging: Staging,
        *,
        warnings: Sequence[str] = (),
        registry: str = LOCAL,
        replace: bool = False,
    ) -> Added:
        """Publish a package whose blobs are staged; ``registry`` is where it came from.

        The blobs replace existing ones, so installing again repairs damage. One version of a name
        is installed once: a registry takes it over from a file or another registry, a file from
        none, so that later revocations by the registry still apply. Blobs of what is replaced stay
        until the caller frees them, so that `restore` can bring it back.

        Raises:
            ChangedVersionError: when the version is installed with other content, and not to be
                replaced.
        """
        new = expert_of(package, warnings, registry=registry)
        old = self._installed(new)
        expert, outcome = _decide(old, new, replace=replace)
        path = self._paths.ref(expert.registry, expert.package, expert.version)
        self._say_so()  # before, too: the process may be killed after the change
        for digest in {file.digest for file in new.layers}:
            make_folders(self._paths.blobs, mode=0o755)
            publish(staging.path(digest), self._paths.blob(digest))
        sync_folder(self._paths.blobs)
        if old != expert:
            self._write_ref(expert, path, staging)
        self._say_so()  # even where the ref stays: blobs that were damaged are whole now
        for place in self._paths.refs_of(expert.package, expert.version):
            if place != path:
                self.discard(place)
        superseded = {*new.layers, *(old.layers if old else ())} - {*expert.layers}
        return Added(expert, outcome, tuple(sorted({file.digest for file in superseded})))

    def restore(self, before: StoredExpert, staging: Staging) -> None:
        """Bring back what a version was before `put` replaced it; its blobs were not freed yet."""
        path = self._paths.ref(before.registry, before.package, before.version)
        self._say_so()
        self._write_ref(before, path, staging)
        for place in self._paths.refs_of(before.package, before.version):
            if place != path:
                self.discard(place)
        self._say_so()

    def check(
        self, package: VerifiedPackage, *, registry: str = LOCAL, replace: bool = False
    ) -> None:
        """Do what `add` does before it publishes anything.

        Raises:
            ChangedVersionError: when the version is installed with other content, and not to be
                replaced.
        """
        new = expert_of(package, (), registry=registry)
        _decide(self._installed(new), new, replace=replace)

    def remove(self, expert: StoredExpert) -> Freed:
        """Remove an expert, and the blobs that nothing else needs now."""
        shown = self._paths.ref(expert.registry, expert.package, expert.version)
        places = self._paths.refs_of(expert.package, expert.version)
        for place in sorted(places, key=lambda place: place == shown):
            self.discard(place)
        return self.free(file.digest for file in expert.layers)

    def discard(self, ref: Path) -> None:
        """Remove a ref, damaged or not; its blobs stay."""
        self._say_so()
        ref.unlink(missing_ok=True)
        sync_folder(ref.parent)
        for folder in ref.parents[:3]:
            if not any(folder.iterdir()):
                folder.rmdir()
        self._say_so()

    def collect(self, *, age: float = STAGING_AGE) -> Freed:
        """Remove blobs that nothing needs, and folders of killed processes or gone packages.

        Raises:
            StoreError: when a ref is damaged: its blobs cannot be told from garbage.
        """
        garbage = garbage_of(self._paths, age=age)
        for expert in self.scan().shadowed:
            self.discard(self._paths.ref(expert.registry, expert.package, expert.version))
        for path in self._paths.blobs.glob(".*.tmp"):
            path.unlink()
        for digest in garbage.blobs:
            self._paths.blob(digest).unlink(missing_ok=True)
        for folder in garbage.folders:
            remove_tree(folder)
        return garbage

    def sweep(self, *, age: float = STAGING_AGE) -> None:
        """Remove folders that killed processes left."""
        for folder in abandoned(self._paths, age=age):
            remove_tree(folder)

    def _installed(self, new: StoredExpert) -> StoredExpert | None:
        """Return what the new one would replace; a damaged ref is as good as none."""
        found = []
        for path in self._paths.refs_of(new.package, new.version):
            try:
                found.append(read_ref(self._paths, path))
            except (FileNotFoundError, InvalidPackageError):
                continue
        return min(found, key=lambda old: (old.registry == LOCAL, old.registry), default=None)

    def _write_ref(self, expert: StoredExpert, path: Path, staging: Staging) -> None:
        with staged_file(staging.ref) as write:
            write(memoryview(encode_ref(expert)))
        make_folders(path.parent)
        publish(staging.ref, path)
        sync_folder(path.parent)

    def _say_so(self) -> None:
        """Change `Store.revision`, so that processes that cache refs or blobs read them again."""
        now = time.time_ns()
        with suppress(FileNotFoundError):  # there was nothing to be read
            os.utime(self._paths.refs, ns=(now, now))

    def free(self, digests: Iterable[Digest]) -> Freed:
        """Remove those of some blobs that no ref names and no lease holds."""
        now = self.scan()
        if now.damaged:
            return Freed()
        needed = _referenced(now) | leased_blobs(self._paths)
        freed = sorted({*digests} - needed)
        sizes = {digest: file_size(self._paths.blob(digest)) for digest in freed}
        for digest in freed:
            self._paths.blob(digest).unlink(missing_ok=True)
        gone = tuple(digest for digest, size in sizes.items() if size is not None)
        return Freed(gone, (), sum(size or 0 for size in sizes.values()))


def garbage_of(paths: StorePaths, *, age: float = STAGING_AGE) -> Freed:
    """Return what `Transaction.collect` would remove; changes nothing.

    Raises:
        StoreError: when a ref is damaged: its blobs cannot be told from garbage.
    """
    now = scan(paths)
    if now.damaged:
        names = ", ".join(ref.name for ref in now.damaged)
        raise StoreError(
            f"the record of {names} is damaged, so its files cannot be told from garbage",
            hint="install it again from its file, or `expertctl remove` it; then repeat",
        )
    needed = _referenced(now) | leased_blobs(paths)
    blobs = [digest for digest in stored_blobs(paths) if digest not in needed]
    size = sum(file_size(paths.blob(digest)) or 0 for digest in blobs)
    orphans = Derived(paths.derived).folders_without({e.content_digest for e in now.experts})
    size += sum(folder_size(folder) for folder in orphans)
    return Freed(tuple(blobs), (*abandoned(paths, age=age), *orphans), size)


def stored_blobs(paths: StorePaths) -> list[Digest]:
    """Return the digests of all blobs, sorted."""
    names = [path.name for path in paths.blobs.iterdir()] if paths.blobs.is_dir() else []
    return sorted(Digest(name) for name in names if _HEX.fullmatch(name))


def abandoned(paths: StorePaths, *, age: float = STAGING_AGE) -> list[Path]:
    """Return the folders of processes that ended without clearing up, but none that is young.

    A time in the future, as after a change of the clock, is not young.
    """
    now = time.time()
    folders = [*claimed_folders(paths.staging), *claimed_folders(paths.leases)]
    return [f for f in folders if abs(now - _changed(f, now)) >= age and not is_held(f)]


def _changed(folder: Path, now: float) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return now


def _referenced(now: Scan) -> set[Digest]:
    return {file.digest for expert in now.experts for file in expert.layers}


def _decide(
    old: StoredExpert | None, new: StoredExpert, *, replace: bool
) -> tuple[StoredExpert, Outcome]:
    """Return the content of the new ref; a signature or a registry is never taken away."""
    if old is None:
        return new, "installed"
    if old.content_digest != new.content_digest:
        if replace:
            return new, "replaced"
        raise changed_version(new.ref, stored_content(old), stored_content(new))
    registry = old.registry if new.registry == LOCAL else new.registry
    if new.signer is None or old.package_digest == new.package_digest:
        return dataclasses.replace(
            old, registry=registry, warnings=new.warnings
        ), "already installed"
    return dataclasses.replace(new, registry=registry), "re-signed"


def stored_content(expert: StoredExpert) -> VersionContent:
    """Return what a version contains, according to where it came from."""
    source = "a file" if expert.registry == LOCAL else expert.registry
    return VersionContent(source, expert.content_digest, (expert.signer,) if expert.signer else ())


def expert_of(
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
        base=required_base(manifest.base),
        requires=manifest.composition.requires,
        conflicts=manifest.composition.conflicts,
        warnings=tuple(warnings),
    )


def required_base(base: BaseRequirement) -> RequiredBase:
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
