"""What registries said last: the floor below which no index document is believed.

::

    <folder>/<registry>/index/<index key>/<namespace>/<name>.json   the newest signed envelope
    <folder>/<registry>/index/<index key>/<namespace>/<name>.first  `registry.first_contents`
    <folder>/<registry>/index/lock                                  held while one is written

A new index key, which only the person can accept, begins anew; nothing else ever lowers the floor.
A file that cannot be read stops everything about its package: it is not taken for an unknown one.
``.first`` is written before the envelope that makes it necessary, so a killed process forgets no
content; only `accept_content` removes an entry.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.durable import make_folders, write_atomic
from expertctl.errors import ExpertError, StoreError, TrustError
from expertctl.reference import PackageName, Version
from expertctl.registry.first_contents import (
    MAX_BYTES,
    NONE,
    FirstContents,
    encode_contents,
    extended,
    parse_contents,
)
from expertctl.registry.index_document import IndexDocument
from expertctl.registry.index_envelope import MAX_ENVELOPE, open_index
from expertctl.registry.known import address_of
from expertctl.schema.strict_json import read_bounded
from expertctl.trust.grant import KnownRegistry

LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Remembered:
    """An index document that was believed, with the bytes that were signed."""

    document: IndexDocument
    envelope: bytes


@dataclass(frozen=True, slots=True)
class IndexStore:
    """The newest believed index document of each package; nothing is created until one is."""

    folder: Path
    lock_seconds: float = LOCK_SECONDS

    def path(self, known: KnownRegistry, package: PackageName) -> Path:
        """Return the file of a package."""
        key = known.index_key.key_id.removeprefix("sha256:")
        return self._index(known) / key / package.namespace / f"{package.name}.json"

    def recall(self, known: KnownRegistry, package: PackageName) -> Remembered | None:
        """Return what a registry said last of a package; ``None`` when it was never asked.

        Raises:
            StoreError: when the file is damaged or cannot be read.
        """
        path = self.path(known, package)
        try:
            envelope = read_bounded(path, max_bytes=MAX_ENVELOPE)
            document = open_index(envelope, key=known.index_key, package=package)
        except FileNotFoundError:
            return None
        except (OSError, ExpertError) as error:
            raise StoreError(
                f"what {known.host} said last of {package} cannot be read: {error}",
                hint=f"restore {path} from a backup; or move it away, which allows {known.host} "
                "to show an older state than before",
            ) from error
        return Remembered(document, envelope)

    def believe(
        self,
        known: KnownRegistry,
        package: PackageName,
        envelope: bytes,
        *,
        floor: Remembered | None,
    ) -> IndexDocument:
        """Return the newest document, which is then remembered.

        ``floor`` is what was remembered before the registry was asked. A newer document that
        another process has remembered meanwhile is returned instead.

        Raises:
            TrustError: when it is not signed as it must be, older than before, changed without a
                new revision, or changes too many versions.
            StoreError: when it cannot be remembered.
        """
        document = open_index(envelope, key=known.index_key, package=package)
        new = Remembered(document, envelope)
        if floor is not None:
            self._demand_not_older(known, floor, new)
            if floor.envelope == envelope:
                return floor.document
        with self._locked(known):
            now = self.recall(known, package)
            if now is not None and now.document.revision >= document.revision:
                self._demand_not_older(known, new, now)
                return now.document
            if now is not None:
                before = now.document
                self._change_first(
                    known, package, lambda first: extended(first, before, document, host=known.host)
                )
            path = self.path(known, package)
            make_folders(path.parent, mode=0o700)
            write_atomic(path, envelope, mode=0o600)
        return document

    def first_contents(self, known: KnownRegistry, package: PackageName) -> FirstContents:
        """Return what versions contained at first that the registry changed or took away later.

        Raises:
            StoreError: when the file is damaged or cannot be read.
        """
        path = self.path(known, package).with_suffix(".first")
        try:
            data = read_bounded(path, max_bytes=MAX_BYTES)
            return parse_contents(data, host=known.host, what=str(path))
        except FileNotFoundError:
            return NONE
        except (OSError, ExpertError) as error:
            raise StoreError(
                f"what versions of {package} from {known.host} contained cannot be read: {error}",
                hint=f"restore {path} from a backup; or move it away, which allows {known.host} "
                "to change them",
            ) from error

    def accept_content(self, known: KnownRegistry, package: PackageName, version: Version) -> None:
        """Take what a registry says now for the content of a version, as the person demanded.

        Raises:
            StoreError: when that cannot be remembered.
        """
        if version in self.first_contents(known, package):
            with self._locked(known):
                self._change_first(
                    known, package, lambda first: {v: c for v, c in first.items() if v != version}
                )

    def _change_first(
        self,
        known: KnownRegistry,
        package: PackageName,
        change: Callable[[FirstContents], FirstContents],
    ) -> None:
        """Change the file of first contents; the lock is held.

        Raises:
            TrustError: when it would become too large to be read again; it stays as it is.
        """
        before = self.first_contents(known, package)
        after = change(before)
        if after == before:
            return
        data = encode_contents(after)
        if len(data) > MAX_BYTES:
            raise TrustError(
                f"{known.host} changed or took away {len(after):,} versions of {package}, more "
                "than can be remembered",
                hint="tell whoever runs the registry; what was believed before still is",
            )
        write_atomic(self.path(known, package).with_suffix(".first"), data, mode=0o600)

    def problems(self, known: KnownRegistry) -> list[StoreError]:
        """Return what cannot be read of what a registry said last."""
        found = []
        for package in self._packages(known):
            try:
                self.recall(known, package)
                self.first_contents(known, package)
            except StoreError as error:
                found.append(error)
        return found

    def check_integrity(self, known: KnownRegistry) -> None:
        """Raise unless every remembered document of a registry can be read."""
        for package in self._packages(known):
            assert self.recall(known, package) is not None

    def _packages(self, known: KnownRegistry) -> list[PackageName]:
        key = known.index_key.key_id.removeprefix("sha256:")
        paths = sorted((self._index(known) / key).glob("*/[!.]*.json"))
        return [PackageName(path.parent.name, path.stem) for path in paths]

    def _index(self, known: KnownRegistry) -> Path:
        return self.folder / address_of(known).folder / "index"

    def _demand_not_older(self, known: KnownRegistry, old: Remembered, new: Remembered) -> None:
        before, after = old.document.revision, new.document.revision
        path = self.path(known, new.document.package)
        what = f"{known.host}: the index of {new.document.package}"
        if after < before:
            raise TrustError(
                f"{what} has revision {after}, but it had {before} before: an older state is shown",
                hint="if whoever runs the registry says that it was restored from a backup, "
                f"move {path} away",
            )
        if after == before and new.envelope != old.envelope:
            raise TrustError(
                f"{what} was changed without a new revision: {after} says two things",
                hint=f"tell whoever runs the registry; what was believed first is {path}",
            )

    @contextmanager
    def _locked(self, known: KnownRegistry) -> Iterator[None]:
        folder = self._index(known)
        try:
            make_folders(folder, mode=0o700)
            lock = FileLock(
                folder / "lock",
                timeout=self.lock_seconds,
                thread_local=False,
                poll_interval=_POLL_SECONDS,
            )
            with lock:
                yield
        except Timeout as error:
            message = f"{folder} is being changed by another process"
            raise StoreError(message, hint="try again when that has ended") from error
        except OSError as error:
            raise StoreError(
                f"{folder}: what {known.host} says cannot be remembered: {error.strerror}",
                hint="without that an older state could be shown as new; free or unlock the disk",
            ) from error
