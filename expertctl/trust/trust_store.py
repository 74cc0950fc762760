"""`TrustStore`, the owner of ``trust.json``, and `PublisherIdentity`, the user's own trusted keys.

The file is replaced as a whole, so readers need no lock; writers take turns through a lock file
beside it, so that no change of another process is lost. A file that others may write is refused.

The user's own keys are trusted from their creation: for ``local/*``, and for namespaces that were
named with them or granted later.
"""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest
from expertctl.errors import NotFoundError, RevokedError, TrustError, UsageError
from expertctl.files import hold_lock, write_atomic
from expertctl.reference import PackageName
from expertctl.trust.grants import MAX_BYTES, KnownRegistry, Revocation, TrustedKey, make_grants
from expertctl.trust.keys import Algorithm, KeyRing, PrivateKey, PublicKey, check_key_name
from expertctl.trust.trust_record import TrustRecord

LOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TrustStore:
    """Which key may sign what, kept in one file; a missing file trusts no key."""

    path: Path
    lock_seconds: float = LOCK_SECONDS

    def read(self) -> TrustRecord:
        """Return the current content of the file.

        Raises:
            InvalidPackageError: when it is damaged.
            TrustError: when others may write it.
        """
        try:
            with self.path.open("rb") as stream:
                mode = os.fstat(stream.fileno()).st_mode
                data = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return TrustRecord()
        if os.name == "posix" and stat.S_IMODE(mode) & 0o022:
            message = f"{self.path}: others may change what is trusted"
            raise TrustError(message, hint=f"check it, then chmod 600 {self.path}")
        return TrustRecord.parse(data, what=str(self.path))

    def add(
        self,
        key: PublicKey,
        *,
        name: str,
        namespaces: Sequence[str],
        content_digests: Sequence[str] | None = None,
        registry: str | None = None,
    ) -> TrustedKey:
        """Trust a key for namespaces, in addition to its present grants.

        ``content_digests`` limits it, in these namespaces, to those contents; ``registry``, a host,
        to packages from there.

        Raises:
            RevokedError: when the key was revoked.
            UsageError: when the name or a namespace is not one.
        """
        grants = make_grants(namespaces, content_digests, registry=registry)
        added = TrustedKey(key, check_key_name(name), grants)
        trusted = self.update(lambda record: record.with_key(added)).find_key(key.key_id)
        assert trusted is not None
        return trusted

    def remove(self, key_id: str) -> None:
        """Remove a key from the trusted ones; a revocation of it stays.

        Raises:
            NotFoundError: when it is not trusted.
        """
        self.update(lambda record: record.without_key(key_id))

    def revoke(self, key_id: str, reason: str = "") -> Revocation:
        """Revoke a key for good, for past and future signatures; the key need not be known.

        Raises:
            UsageError: when the id or the reason is not one.
        """
        changed = self.update(lambda record: record.with_revocation(key_id, reason))
        revocation = changed.find_revocation(key_id)
        assert revocation is not None
        return revocation

    def list_keys(self) -> list[TrustedKey]:
        """Return the trusted keys in the order they were added, revoked ones included."""
        return list(self.read().keys)

    def is_revoked(self, key_id: str) -> bool:
        """Tell whether a key was revoked."""
        return self.read().find_revocation(key_id) is not None

    def find_key(self, text: str) -> TrustedKey:
        """Return a trusted key by name or key id.

        Raises:
            NotFoundError: when no key is called so.
            UsageError: when several are.
        """
        found = [k for k in self.read().keys if text in (k.name, k.key_id)]
        if not found:
            hint = "`expertctl trust list` shows the trusted keys"
            raise NotFoundError(f"no trusted key is called {text[:80]!r}", hint=hint)
        if len(found) > 1:
            ids = ", ".join(k.key_id for k in found)
            raise UsageError(f"{len(found)} keys are called {text!r}", hint=f"give the id: {ids}")
        return found[0]

    def authorise(
        self,
        key_id: str,
        *,
        package: PackageName,
        content_digest: Digest,
        registry: str | None = None,
    ) -> PublicKey:
        """Return the key when it may vouch for this content; see `TrustRecord.authorise`."""
        return self.read().authorise(
            key_id, package=package, content_digest=content_digest, registry=registry
        )

    def add_registry(self, known: KnownRegistry) -> KnownRegistry:
        """Accept the index key of a registry; the namespaces that it names move to it.

        Raises:
            UsageError: when its host is what stands for files.
        """
        added = self.update(lambda record: record.with_registry(known)).find_registry(known.host)
        assert added is not None
        return added

    def remove_registry(self, host: str) -> None:
        """Remove a registry and the grants pinned from it; its revocations stay.

        Raises:
            NotFoundError: when it is not known.
        """
        self.update(lambda record: record.without_registry(host))

    def check_integrity(self) -> None:
        """Assert that the file has the same meaning after it is encoded and parsed again."""
        record = self.read()
        assert TrustRecord.parse(record.encode(), what=str(self.path)) == record

    def update(self, change: Callable[[TrustRecord], TrustRecord]) -> TrustRecord:
        """Apply a change while no other process writes; return the new record.

        Raises:
            StoreError: when another process writes it for too long.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self.path.with_name(f"{self.path.name}.lock")
        with hold_lock(lock, guarded=self.path, seconds=self.lock_seconds):
            record = self.read()
            changed = change(record)
            if changed != record:
                write_atomic(self.path, changed.encode(), mode=0o600)
            return changed


HUB_NAMESPACE = "hf"
"""The namespace of packages that were converted here from a hub, and that a key of here signed."""
OWN_NAMESPACE = "local"


@dataclass(frozen=True, slots=True)
class OwnKey:
    """One of the user's keys as `expertctl keys list` shows it."""

    name: str
    key: PublicKey
    namespaces: tuple[str, ...]
    revoked: bool


@dataclass(frozen=True, slots=True)
class PublisherIdentity:
    """The user's keys together with the trust store."""

    ring: KeyRing
    trust: TrustStore

    def create_key(
        self, name: str, *, algorithm: Algorithm = "ecdsa-p256", namespaces: Sequence[str] = ()
    ) -> TrustedKey:
        """Generate a key and trust it for ``local`` and for ``namespaces``.

        Raises:
            UsageError: when the name is taken, or the name or a namespace is not one.
        """
        return self._add_and_trust(name, PrivateKey.generate(algorithm), namespaces)

    def import_key(
        self, name: str, pem: bytes, *, namespaces: Sequence[str] = (), what: str = "private key"
    ) -> TrustedKey:
        """Store an existing private key, and trust it as `create_key` does.

        Raises:
            InvalidPackageError: when it is not a private key of a kind that is used here.
            RevokedError: when it was revoked.
            UsageError: when the name is taken, or the name or a namespace is not one.
        """
        return self._add_and_trust(name, PrivateKey.from_pem(pem, what=what), namespaces)

    def grant_namespaces(self, name: str, namespaces: Sequence[str]) -> TrustedKey:
        """Trust one of the user's keys for more namespaces.

        Raises:
            NotFoundError: when there is none of that name.
            RevokedError: when it was revoked.
            UsageError: when there is no namespace, or one is not a namespace.
        """
        return self.trust.add(self.ring.read_public(name), name=name, namespaces=namespaces)

    def list_keys(self) -> list[OwnKey]:
        """Return the user's keys by name, with the grants of each."""
        record = self.trust.read()
        return [
            _describe_key(name, self.ring.read_public(name), record)
            for name in self.ring.list_names()
        ]

    def read_signing_key(self, name: str) -> PrivateKey:
        """Return a key to sign with.

        Raises:
            NotFoundError: when there is none of that name.
            RevokedError: when it was revoked, since its signature would not be accepted.
        """
        key = self.ring.read_private(name)
        if self.trust.is_revoked(key.public.key_id):
            hint = "make another with `expertctl keys new NAME`"
            raise RevokedError(f"your key {name!r} was revoked", hint=hint)
        return key

    def revoke_key(self, name_or_id: str, reason: str = "") -> Revocation:
        """Revoke a key that `resolve_key_id` finds: an own one, a trusted one, or any by its id."""
        return self.trust.revoke(self.resolve_key_id(name_or_id), reason)

    def resolve_key_id(self, name_or_id: str) -> str:
        """Return the id of an own key, a trusted key, or the id itself.

        Raises:
            NotFoundError: when no key is called so and it is not a key id.
            UsageError: when the name means two keys.
        """
        if name_or_id.startswith("sha256:"):
            return name_or_id
        ids = {k.key_id for k in self.trust.list_keys() if k.name == name_or_id}
        if name_or_id in self.ring.list_names():
            ids.add(self.ring.read_public(name_or_id).key_id)
        if not ids:
            hint = "`expertctl keys list` and `expertctl trust list` show the keys"
            raise NotFoundError(f"no key is called {name_or_id[:80]!r}", hint=hint)
        if len(ids) > 1:
            hint = f"give the id: {', '.join(sorted(ids))}"
            raise UsageError(f"{len(ids)} keys are called {name_or_id!r}", hint=hint)
        return ids.pop()

    def _add_and_trust(self, name: str, key: PrivateKey, namespaces: Sequence[str]) -> TrustedKey:
        """Store a key, then trust it; every reason to refuse the second step is checked first."""
        wanted = TrustedKey(key.public, name, make_grants([OWN_NAMESPACE, *namespaces], None))
        self.trust.read().with_key(wanted)
        self.ring.add(name, key)
        return self.trust.add(key.public, name=name, namespaces=wanted.namespaces)


def _describe_key(name: str, key: PublicKey, record: TrustRecord) -> OwnKey:
    trusted = record.find_key(key.key_id)
    namespaces = trusted.namespaces if trusted else ()
    return OwnKey(name, key, namespaces, record.find_revocation(key.key_id) is not None)
