"""`IndexStore`, the last index document of each package; `fetch_index` requests a newer one.

::

    <folder>/<registry>/index/<index key>/<namespace>/<name>.json   the newest signed envelope
    <folder>/<registry>/index/<index key>/<namespace>/<name>.first  first contents, see below
    <folder>/<registry>/index/lock                                  held while one is written

The stored document is the floor below which no index document is accepted. A new index key, which
only the user can accept, begins anew; nothing else ever lowers the floor. A file that cannot be
read blocks its package: it is not treated as a missing one.

An index document says only what a version contains now. If a version vanished or got another
content, its first content would be forgotten with the document before, and it could come back as
something else. So ``.first`` keeps the first known content of such versions. It is written before
the envelope that makes it necessary, so a killed process forgets no content; only `accept_content`
removes an entry.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import msgspec
from filelock import FileLock, Timeout

from expertctl.digest import Digest
from expertctl.errors import (
    ExpertError,
    InvalidPackageError,
    NotFoundError,
    RegistryError,
    StoreError,
    TrustError,
)
from expertctl.files import make_folders, write_atomic
from expertctl.package.read import VersionContent
from expertctl.reference import PackageName, Version
from expertctl.registry.http import RegistryHttp, RegistryRequest
from expertctl.registry.index_document import MAX_ENVELOPE, IndexDocument, Release, open_index
from expertctl.registry.registry_trust import known_registry_address
from expertctl.schema.strict_json import load_object, read_bounded
from expertctl.schema.validation import convert_document
from expertctl.trust.grants import KnownRegistry

MAX_BYTES = 16 << 20
_FIRST_CONTENTS_SCHEMA = 1

FirstContents = Mapping[Version, VersionContent]
NO_FIRST_CONTENTS: FirstContents = MappingProxyType({})


class _StoredVersionContent(msgspec.Struct, forbid_unknown_fields=True):
    content_digest: str
    signers: tuple[str, ...]


class _StoredFirstContents(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    versions: dict[str, _StoredVersionContent]


def release_content(release: Release, *, source: str) -> VersionContent:
    """Return the content of a release; the newest signer comes first."""
    signers = dict.fromkeys(form.signer for form in reversed(release.forms))
    return VersionContent(source, release.content_digest, tuple(signers))


def extend_first_contents(
    first: FirstContents, before: IndexDocument, after: IndexDocument, *, host: str
) -> FirstContents:
    """Return the first contents after a document replaced another one."""
    now = {release.version: release.content_digest for release in after.releases}
    source = f"{host}, before,"
    lost = {
        release.version: release_content(release, source=source)
        for release in before.releases
        if release.version not in first and now.get(release.version) != release.content_digest
    }
    return {**first, **lost} if lost else first


def encode_first_contents(contents: FirstContents) -> bytes:
    """Return the bytes of the file."""
    versions = {
        str(version): _StoredVersionContent(str(content.digest), content.signers)
        for version, content in contents.items()
    }
    return msgspec.json.encode(
        _StoredFirstContents(_FIRST_CONTENTS_SCHEMA, versions), order="sorted"
    )


def parse_first_contents(data: bytes, *, host: str, what: str) -> FirstContents:
    """Parse the bytes of the file.

    Raises:
        InvalidPackageError: when they are not exactly such a document.
    """
    document = load_object(data, what=what, max_bytes=MAX_BYTES)
    try:
        stored = convert_document(document, _StoredFirstContents)
        return {
            Version.parse(text): VersionContent(
                f"{host}, before,", Digest.parse(entry.content_digest), entry.signers
            )
            for text, entry in stored.versions.items()
        }
    except (msgspec.ValidationError, ExpertError) as error:
        raise InvalidPackageError(what, [str(error)]) from error


LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class RememberedIndex:
    """An accepted index document, with the bytes that were signed."""

    document: IndexDocument
    envelope: bytes


@dataclass(frozen=True, slots=True)
class IndexStore:
    """The newest accepted index document of each package; nothing exists before the first.

    Methods raise `StoreError` when a stored file is damaged, or cannot be read or written.
    """

    folder: Path
    lock_seconds: float = LOCK_SECONDS

    def path(self, known: KnownRegistry, package: PackageName) -> Path:
        """Return the file of a package."""
        key = known.index_key.key_id.removeprefix("sha256:")
        return self._index_folder(known) / key / package.namespace / f"{package.name}.json"

    def load(self, known: KnownRegistry, package: PackageName) -> RememberedIndex | None:
        """Return the last document of a package; None when its registry was never asked."""
        path = self.path(known, package)
        try:
            envelope = read_bounded(path, max_bytes=MAX_ENVELOPE)
            document = open_index(envelope, key=known.index_key, package=package)
        except FileNotFoundError:
            return None
        except (OSError, ExpertError) as error:
            raise StoreError(
                f"the stored index of {package} from {known.host} cannot be read: {error}",
                hint=f"restore {path} from a backup; or move it away, which allows {known.host} "
                "to show an older state than before",
            ) from error
        return RememberedIndex(document, envelope)

    def accept(
        self,
        known: KnownRegistry,
        package: PackageName,
        envelope: bytes,
        *,
        floor: RememberedIndex | None,
    ) -> IndexDocument:
        """Store a document unless a newer one is stored; return the newest.

        ``floor`` is the document that was stored before the registry was asked. A newer document
        that another process has stored meanwhile is returned instead.

        Raises:
            TrustError: when it is not signed as it must be, older than before, changed without a
                new revision, or changes too many versions.
            StoreError: when it cannot be stored.
        """
        document = open_index(envelope, key=known.index_key, package=package)
        new = RememberedIndex(document, envelope)
        if floor is not None:
            self._check_not_older(known, floor, new)
            if floor.envelope == envelope:
                return floor.document
        with self._hold_lock(known):
            now = self.load(known, package)
            if now is not None and now.document.revision >= document.revision:
                self._check_not_older(known, new, now)
                return now.document
            if now is not None:
                before = now.document
                self._update_first_contents(
                    known,
                    package,
                    lambda first: extend_first_contents(first, before, document, host=known.host),
                )
            path = self.path(known, package)
            make_folders(path.parent, mode=0o700)
            write_atomic(path, envelope, mode=0o600)
        return document

    def first_contents(self, known: KnownRegistry, package: PackageName) -> FirstContents:
        """Return the first contents of versions that the registry changed or removed later."""
        path = self.path(known, package).with_suffix(".first")
        try:
            data = read_bounded(path, max_bytes=MAX_BYTES)
            return parse_first_contents(data, host=known.host, what=str(path))
        except FileNotFoundError:
            return NO_FIRST_CONTENTS
        except (OSError, ExpertError) as error:
            raise StoreError(
                f"what versions of {package} from {known.host} contained cannot be read: {error}",
                hint=f"restore {path} from a backup; or move it away, which allows {known.host} "
                "to change them",
            ) from error

    def accept_content(self, known: KnownRegistry, package: PackageName, version: Version) -> None:
        """Accept the registry's current content of a version, as the user demanded."""
        if version in self.first_contents(known, package):
            with self._hold_lock(known):
                self._update_first_contents(
                    known, package, lambda first: {v: c for v, c in first.items() if v != version}
                )

    def _update_first_contents(
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
        data = encode_first_contents(after)
        if len(data) > MAX_BYTES:
            raise TrustError(
                f"{known.host} changed or took away {len(after):,} versions of {package}, more "
                "than can be remembered",
                hint="tell the operator of the registry; the index accepted before stays in force",
            )
        write_atomic(self.path(known, package).with_suffix(".first"), data, mode=0o600)

    def find_problems(self, known: KnownRegistry) -> list[StoreError]:
        """Return an error for every stored document of a registry that cannot be read."""
        found = []
        for package in self.list_packages(known):
            try:
                self.load(known, package)
                self.first_contents(known, package)
            except StoreError as error:
                found.append(error)
        return found

    def check_integrity(self, known: KnownRegistry) -> None:
        """Raise unless every stored document of a registry can be read."""
        for package in self.list_packages(known):
            assert self.load(known, package) is not None

    def list_packages(self, known: KnownRegistry) -> list[PackageName]:
        """Return the packages of which there is a document of a registry, sorted."""
        key = known.index_key.key_id.removeprefix("sha256:")
        paths = sorted((self._index_folder(known) / key).glob("*/[!.]*.json"))
        return [PackageName(path.parent.name, path.stem) for path in paths]

    def _index_folder(self, known: KnownRegistry) -> Path:
        return self.folder / known_registry_address(known).folder / "index"

    def _check_not_older(
        self, known: KnownRegistry, old: RememberedIndex, new: RememberedIndex
    ) -> None:
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
                hint=f"tell the operator of the registry; what was believed first is {path}",
            )

    @contextmanager
    def _hold_lock(self, known: KnownRegistry) -> Iterator[None]:
        folder = self._index_folder(known)
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
                f"{folder}: the index of {known.host} cannot be stored: {error.strerror}",
                hint="without it an older state could pass as new; free or unlock the disk",
            ) from error


_NOT_MODIFIED = 304


def fetch_index(
    client: RegistryHttp,
    known: KnownRegistry,
    package: PackageName,
    store: IndexStore,
    *,
    offline: bool = False,
    attempts: int | None = None,
) -> IndexDocument:
    """Return the current index document of a package; offline, the last stored one.

    ``attempts`` is the number of attempts, by default that of the client.

    Raises:
        NotFoundError: when it has no such package, or we are offline and never asked it.
        TrustError: when its index key did not sign this, or it is older than before.
        StoreError: when the stored document cannot be read, or the new one not be stored.
        RegistryError: when it cannot be reached or understood.
    """
    floor = store.load(known, package)
    if offline:
        return _load_offline(floor, known, package)
    envelope = _request_envelope(client, known, package, floor, attempts)
    return store.accept(known, package, envelope, floor=floor)


def index_path(package: PackageName) -> str:
    """Return the URL path of the index document of a package."""
    return f"/tuf/targets/index/{package.namespace}/{package.name}.json"


def _load_offline(
    floor: RememberedIndex | None, known: KnownRegistry, package: PackageName
) -> IndexDocument:
    if floor is None:
        raise NotFoundError(
            f"{known.host} was never asked about {package}, and expertctl is offline",
            hint="leave out --offline",
        )
    return floor.document


def _request_envelope(
    client: RegistryHttp,
    known: KnownRegistry,
    package: PackageName,
    floor: RememberedIndex | None,
    attempts: int | None,
) -> bytes:
    """Return the envelope; a registry that has nothing newer sends nothing."""
    headers = {"Accept": "application/json"}
    if floor is not None:
        headers["If-None-Match"] = _etag(floor.envelope)
    call = RegistryRequest(
        "GET", known_registry_address(known), index_path(package), headers=headers
    )
    try:
        answer = client.request(
            call, max_bytes=MAX_ENVELOPE, accept={200, _NOT_MODIFIED}, attempts=attempts
        )
    except NotFoundError as error:
        hint = (
            f"`expertctl search {package.name}` shows what you may see; "
            f"if {package.namespace}/* is private, `expertctl login {known.host}` first"
        )
        message = f"{known.host} has no package {package} that you may read"
        raise NotFoundError(message, hint=hint) from error
    if answer.status != _NOT_MODIFIED:
        return answer.body
    if floor is None:
        raise RegistryError(f"{known.host}: 304 for {package}, but no index of it is stored")
    return floor.envelope


def _etag(envelope: bytes) -> str:
    return f'"sha256:{hashlib.sha256(envelope).hexdigest()}"'
