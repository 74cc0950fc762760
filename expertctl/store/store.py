"""`Store`: the one owner of installed packages on this disk.

Readers take no lock: refs are written last and removed first, so what a ref names is there. Code
that writes lives in other modules and is imported only when needed: `list` must start fast.
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
from expertctl.store.paths import Scan, StorePaths, file_size, scan
from expertctl.store.preference import NEWEST, Preference
from expertctl.store.ref import LOCAL, StoredExpert

if TYPE_CHECKING:
    from expertctl.package.verify import VerifiedPackage
    from expertctl.schema.manifest import Manifest
    from expertctl.store.staging import Staging
    from expertctl.store.transaction import Added, Freed, Transaction

_NEAR, _ALIKE, _ALIKE_IN_ALL = 3, 0.66, 0.8  # one of three letters may differ
"""How many names are suggested at most, and how alike they are, in part or in all."""


@dataclass(frozen=True, slots=True)
class Store:
    """The packages below one folder; nothing is created until something is written."""

    root: Path
    preference: Preference = NEWEST
    """Decides which of several versions `find` returns; by default the newest."""

    @property
    def paths(self) -> StorePaths:
        """The paths of the store."""
        return StorePaths(self.root)

    def scan(self) -> Scan:
        """Return the installed experts, and refs that are damaged."""
        return scan(self.paths)

    def experts(self) -> list[StoredExpert]:
        """Return the installed experts, sorted by name and version."""
        return list(self.scan().experts)

    def find(self, wanted: Reference | Digest) -> StoredExpert:
        """Return the preferred version that a reference allows, or the expert that has a digest.

        Raises:
            NotFoundError: when nothing fits; the hint names what is near.
        """
        now = self.scan()
        if isinstance(wanted, Digest):
            return _with_digest(now.experts, wanted)
        found = [e for e in now.experts if self.preference.is_meant(e, wanted)]
        if not found:
            raise _missing(wanted, now)
        return max(found, key=self.preference.precedence)

    def blob_path(self, digest: Digest) -> Path:
        """Return the file of a blob.

        Raises:
            StoreError: when it is missing, which `doctor` explains.
        """
        path = self.paths.blob(digest)
        if file_size(path) is None:
            hint = "`expertctl doctor` tells which expert needs it and what to do"
            raise StoreError(f"{digest} is missing from the store", hint=hint)
        return path

    def read(self, expert: StoredExpert, path: str) -> bytes:
        """Return one file of an expert, hashed as it is read.

        Raises:
            DigestError: when it was changed.
            StoreError: when it is missing, or cannot be read.
        """
        file = expert.file(path)
        try:
            data = self.paths.blob(file.digest).read_bytes()
        except FileNotFoundError as error:
            message = f"{expert.ref}: {path} is missing from the store"
            raise StoreError(message, hint="see `expertctl doctor`") from error
        except OSError as error:
            message = f"{expert.ref}: {path} cannot be read in the store: {error.strerror}"
            raise StoreError(message, hint=expert.again) from error
        if Digest.of(data) != file.digest:
            hint = f"{expert.again}; `expertctl doctor` checks the whole store"
            raise DigestError(f"{expert.ref}: {path} was changed in the store", hint=hint)
        return data

    def manifest(self, expert: StoredExpert) -> "Manifest":
        """Return the manifest of an expert, its bytes hashed as they are read.

        Raises:
            DigestError: when it was changed.
            StoreError: when it is missing.
        """
        from expertctl.schema.manifest import MANIFEST_PATH, parse_manifest

        data = self.read(expert, MANIFEST_PATH)
        return parse_manifest(data, what=f"{expert.ref} {MANIFEST_PATH}")

    @contextmanager
    def stage(self) -> "Iterator[Staging]":
        """Lend a folder that one package can be written to; it is removed at the end.

        Raises:
            StoreError: when the store cannot be written.
            DiskFullError: when there is no space left.
        """
        from expertctl.store.disk import disk_errors
        from expertctl.store.lock import claim
        from expertctl.store.staging import Staging

        with disk_errors(self.root), ExitStack() as stack:
            with self.transaction() as changes:
                changes.sweep()
                folder = stack.enter_context(claim(self.paths.staging))
            yield Staging(folder)

    def revision(self) -> int:
        """Return a number that changes when an expert comes or goes; costs a microsecond."""
        try:
            return self.paths.refs.stat().st_mtime_ns
        except OSError:
            return 0

    def transaction(self) -> "AbstractContextManager[Transaction]":
        """Keep other processes from changing the store.

        Raises:
            StoreError: when it cannot be written, or another process holds it for too long.
        """
        from expertctl.store.transaction import begin

        return begin(self.paths)

    def add(
        self,
        package: "VerifiedPackage",
        staging: "Staging",
        *,
        warnings: Sequence[str] = (),
        registry: str = LOCAL,
    ) -> "Added":
        """Publish one package whose blobs are staged; see `Transaction.add`."""
        with self.transaction() as changes:
            return changes.add(package, staging, warnings=warnings, registry=registry)

    def remove(self, expert: StoredExpert) -> "Freed":
        """Remove an expert, and the blobs that nothing else needs now."""
        with self.transaction() as changes:
            return changes.remove(expert)

    def gc(self) -> "Freed":
        """Remove what nothing needs: blobs without a ref, folders of killed processes.

        Raises:
            StoreError: when a ref is damaged, or the store cannot be written.
        """
        if not self.root.exists():
            return self.garbage()
        with self.transaction() as changes:
            return changes.collect()

    def garbage(self) -> "Freed":
        """Return what `gc` would remove; changes nothing.

        Raises:
            StoreError: when a ref is damaged.
        """
        from expertctl.store.transaction import garbage_of

        return garbage_of(self.paths)

    @contextmanager
    def lease(self, experts: Iterable[StoredExpert]) -> Iterator[None]:
        """Keep the blobs of experts until the end, even if they are removed meanwhile.

        A store that cannot be written needs no lease: nothing can be removed from it here. On a
        full disk there is none either: an expert that is removed then is missing.

        Raises:
            NotFoundError: when one of them is not installed any more.
        """
        from expertctl.store.lease import lease

        wanted, is_held = list(experts), False
        with ExitStack() as stack:
            if os.access(self.root, os.W_OK):
                with suppress(DiskFullError), self.transaction():
                    self._demand(wanted)
                    digests = [file.digest for expert in wanted for file in expert.layers]
                    stack.enter_context(lease(self.paths, digests))
                    is_held = True
            if not is_held:
                self._demand(wanted)
            yield

    def check_integrity(self) -> None:
        """Raise unless every ref can be read and every blob has its digest."""
        now = self.scan()
        assert not now.damaged, now.damaged
        for expert in now.experts:
            for file in expert.layers:
                assert hash_file(self.blob_path(file.digest)) == (file.size, file.digest), file

    def _demand(self, experts: Sequence[StoredExpert]) -> None:
        present = set(self.experts())
        for expert in experts:
            if expert not in present:
                raise NotFoundError(f"{expert.ref} was removed or replaced meanwhile")


def parse_wanted(text: str) -> Reference | Digest:
    """Read how the user names an installed expert: a reference, or ``sha256:<hex>``.

    Raises:
        UsageError: when it is neither.
    """
    return Digest.typed(text) if text.startswith("sha256:") else Reference.parse(text)


def _with_digest(experts: Sequence[StoredExpert], digest: Digest) -> StoredExpert:
    for expert in experts:
        if digest in (expert.content_digest, expert.package_digest):
            return expert
    raise NotFoundError(f"{digest} is not installed", hint="`expertctl list --json` shows digests")


def _missing(wanted: Reference, now: Scan) -> NotFoundError:
    versions = [str(e.version) for e in now.experts if e.package == wanted.package]
    if versions:
        hint = f"installed: {', '.join(versions)}"
        if wanted.constraint == ANY:
            hint += "; a prerelease must be named"
        return NotFoundError(f"no installed version fits {wanted}", hint=hint)
    near = near_names(str(wanted.package), [str(e.package) for e in now.experts])
    hint = f"did you mean {' or '.join(near)}?" if near else "`expertctl list` shows what is"
    return NotFoundError(f"{wanted} is not installed", hint=hint)


def near_names(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that look like another one, those of its namespace first.

    Names in its namespace, or all names where none is given, are compared by their last part
    only: a shared part does not make names more alike.
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
