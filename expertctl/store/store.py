"""`Store`: the owner of installed packages on this disk.

Readers take no lock: refs are written last and removed first, so every blob that a ref names
exists. Code that writes lives in other modules and is imported only when needed: `list` must start
fast.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl.digest import Digest, hash_file
from expertctl.errors import DigestError, DiskFullError, NotFoundError, StoreError
from expertctl.reference import ANY, Reference
from expertctl.store.preference import PREFER_NEWEST, VersionPreference
from expertctl.store.refs import StoredExpert, StorePaths, StoreScan, find_file_size, scan_refs

if TYPE_CHECKING:
    from expertctl.schema.manifest import Manifest
    from expertctl.store.transaction import FreedFiles, PackageStaging, StoreTransaction

_NEAR, _ALIKE, _ALIKE_IN_ALL = 3, 0.66, 0.8  # one of three letters may differ
"""The number of suggested names, and the least similarity of the last part, or of the whole name.
"""


@dataclass(frozen=True, slots=True)
class Store:
    """The packages below one folder; nothing is created until something is written.

    Methods that write raise `StoreError` when the store cannot be written, or another process holds
    its lock for too long, and `DiskFullError` when there is no space left.
    """

    root: Path
    preference: VersionPreference = PREFER_NEWEST
    """Decides which of several versions `find` returns; by default the newest."""

    @property
    def paths(self) -> StorePaths:
        """The paths of the store."""
        return StorePaths(self.root)

    def scan(self) -> StoreScan:
        """Return the installed experts and the damaged refs."""
        return scan_refs(self.paths)

    def list_experts(self) -> list[StoredExpert]:
        """Return the installed experts, sorted by name and version."""
        return list(self.scan().experts)

    def find(self, wanted: Reference | Digest) -> StoredExpert:
        """Return the preferred version that a reference allows, or the expert with a digest.

        Raises:
            NotFoundError: when nothing fits; the hint names what is near.
        """
        now = self.scan()
        if isinstance(wanted, Digest):
            return _find_by_digest(now.experts, wanted)
        found = [e for e in now.experts if self.preference.may_mean(e, wanted)]
        if not found:
            raise _not_found_error(wanted, now)
        return max(found, key=self.preference.precedence)

    def blob_path(self, digest: Digest) -> Path:
        """Return the file of a blob.

        Raises:
            StoreError: when it is missing, which `doctor` explains.
        """
        path = self.paths.blob(digest)
        if find_file_size(path) is None:
            hint = "`expertctl doctor` tells which expert needs it and what to do"
            raise StoreError(f"{digest} is missing from the store", hint=hint)
        return path

    def read(self, expert: StoredExpert, path: str) -> bytes:
        """Return one file of an expert, its bytes hashed as they are read.

        Raises:
            DigestError: when it was changed.
            StoreError: when it is missing, or cannot be read.
        """
        file = expert.find_file(path)
        try:
            data = self.paths.blob(file.digest).read_bytes()
        except FileNotFoundError as error:
            message = f"{expert.ref}: {path} is missing from the store"
            raise StoreError(message, hint="see `expertctl doctor`") from error
        except OSError as error:
            message = f"{expert.ref}: {path} cannot be read in the store: {error.strerror}"
            raise StoreError(message, hint=expert.repair_command) from error
        if Digest.compute(data) != file.digest:
            hint = f"{expert.repair_command}; `expertctl doctor` checks the whole store"
            raise DigestError(f"{expert.ref}: {path} was changed in the store", hint=hint)
        return data

    def read_manifest(self, expert: StoredExpert) -> "Manifest":
        """Return the manifest of an expert, its bytes hashed as they are read.

        Raises:
            DigestError: when it was changed.
            StoreError: when it is missing.
        """
        from expertctl.schema.manifest import MANIFEST_PATH, parse_manifest

        data = self.read(expert, MANIFEST_PATH)
        return parse_manifest(data, what=f"{expert.ref} {MANIFEST_PATH}")

    @contextmanager
    def stage_package(self) -> "Iterator[PackageStaging]":
        """Create a folder that one package can be written to; it is removed at the end."""
        from expertctl.store.disk import disk_errors
        from expertctl.store.locks import claim_folder
        from expertctl.store.transaction import PackageStaging

        with disk_errors(self.root), ExitStack() as stack:
            with self.begin_transaction() as changes:
                changes.sweep()
                folder = stack.enter_context(claim_folder(self.paths.staging))
            yield PackageStaging(folder)

    def revision(self) -> int:
        """Return a number that changes when an expert is added or removed; costs a microsecond."""
        try:
            return self.paths.refs.stat().st_mtime_ns
        except OSError:
            return 0

    def begin_transaction(self) -> "AbstractContextManager[StoreTransaction]":
        """Lock the store against changes by other processes."""
        from expertctl.store.transaction import begin_transaction

        return begin_transaction(self.paths)

    def remove(self, expert: StoredExpert) -> "FreedFiles":
        """Remove an expert, and the blobs that nothing else needs now."""
        with self.begin_transaction() as changes:
            return changes.remove(expert)

    def collect_garbage(self) -> "FreedFiles":
        """Remove what nothing needs: blobs without a ref, folders of killed processes.

        Raises:
            StoreError: when a ref is damaged.
        """
        if not self.root.exists():
            return self.find_garbage()
        with self.begin_transaction() as changes:
            return changes.collect_garbage()

    def find_garbage(self) -> "FreedFiles":
        """Return what `collect_garbage` would remove; changes nothing.

        Raises:
            StoreError: when a ref is damaged.
        """
        from expertctl.store.transaction import find_garbage

        return find_garbage(self.paths)

    @contextmanager
    def lease_experts(self, experts: Iterable[StoredExpert]) -> Iterator[None]:
        """Keep the blobs of experts until the end, even if they are removed meanwhile.

        A store that cannot be written needs no lease: nothing can be removed from it here. On a
        full disk there is no lease either: an expert that is removed then is missing.

        Raises:
            NotFoundError: when one of them is not installed any more.
        """
        from expertctl.store.locks import lease_blobs

        wanted, is_held = list(experts), False
        with ExitStack() as stack:
            if os.access(self.root, os.W_OK):
                with suppress(DiskFullError), self.begin_transaction():
                    self._check_installed(wanted)
                    digests = [file.digest for expert in wanted for file in expert.layers]
                    stack.enter_context(lease_blobs(self.paths, digests))
                    is_held = True
            if not is_held:
                self._check_installed(wanted)
            yield

    def check_integrity(self) -> None:
        """Raise unless every ref can be read and every blob has its digest."""
        now = self.scan()
        assert not now.damaged, now.damaged
        for expert in now.experts:
            for file in expert.layers:
                assert hash_file(self.blob_path(file.digest)) == (file.size, file.digest), file

    def _check_installed(self, experts: Sequence[StoredExpert]) -> None:
        present = set(self.list_experts())
        for expert in experts:
            if expert not in present:
                raise NotFoundError(f"{expert.ref} was removed or replaced meanwhile")


def _find_by_digest(experts: Sequence[StoredExpert], digest: Digest) -> StoredExpert:
    for expert in experts:
        if digest in (expert.content_digest, expert.package_digest):
            return expert
    raise NotFoundError(f"{digest} is not installed", hint="`expertctl list --json` shows digests")


def _not_found_error(wanted: Reference, now: StoreScan) -> NotFoundError:
    versions = [str(e.version) for e in now.experts if e.package == wanted.package]
    if versions:
        hint = f"installed: {', '.join(versions)}"
        if wanted.constraint == ANY:
            hint += "; a prerelease must be named"
        return NotFoundError(f"no installed version fits {wanted}", hint=hint)
    near = find_similar_names(str(wanted.package), [str(e.package) for e in now.experts])
    known = "`expertctl list` shows what is installed"
    hint = f"did you mean {' or '.join(near)}?" if near else known
    return NotFoundError(f"{wanted} is not installed", hint=hint)


def find_similar_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names similar to another one, those of its namespace first.

    Names in its namespace, or all names where it has none, are compared by their last part only: a
    shared namespace does not make names more similar.
    """
    from difflib import get_close_matches

    namespace, slash, own = name.rpartition("/")
    known = sorted(set(names))
    mates = [other for other in known if not slash or other.startswith(f"{namespace}/")]
    ends = {other.rpartition("/")[2] for other in mates}
    near = get_close_matches(own, ends, n=_NEAR, cutoff=_ALIKE)
    found = [other for end in near for other in mates if other.rpartition("/")[2] == end]
    strangers = set(known).difference(mates)
    return [*found, *get_close_matches(name, strangers, n=_NEAR, cutoff=_ALIKE_IN_ALL)][:_NEAR]
