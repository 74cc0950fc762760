"""`TrustStore`: the one owner of ``trust.json``.

The file is replaced as a whole, so readers need no lock; writers take turns through a lock file
beside it, so that no change of another process is lost. A file that others may write is refused.
"""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from expertctl.digest import Digest
from expertctl.durable import write_atomic
from expertctl.errors import NotFoundError, StoreError, TrustError, UsageError
from expertctl.reference import PackageName
from expertctl.trust.grant import KnownRegistry, Revocation, TrustedKey, grants_for
from expertctl.trust.keys import PublicKey, key_name
from expertctl.trust.record import TrustRecord
from expertctl.trust.trust_file import MAX_BYTES

LOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TrustStore:
    """Which key may sign what, kept in one file; a missing file trusts no key."""

    path: Path
    lock_seconds: float = LOCK_SECONDS

    def read(self) -> TrustRecord:
        """Return what the file says now.

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
        """Trust a key for namespaces, beside what it is trusted for already.

        ``content_digests`` limits it, in these namespaces, to those contents; ``registry``, a host,
        to packages from there.

        Raises:
            RevokedError: when the key was revoked.
            UsageError: when the name or a namespace is not one.
        """
        grants = grants_for(namespaces, content_digests, registry=registry)
        added = TrustedKey(key, key_name(name), grants)
        trusted = self.change(lambda record: record.with_key(added)).trusted(key.key_id)
        assert trusted is not None
        return trusted

    def remove(self, key_id: str) -> None:
        """Trust a key no longer; a revocation of it stays.

        Raises:
            NotFoundError: when it is not trusted.
        """
        self.change(lambda record: record.without_key(key_id))

    def revoke(self, key_id: str, reason: str = "") -> Revocation:
        """Refuse all that a key signed or will sign, for good; the key need not be known.

        Raises:
            UsageError: when the id or the reason is not one.
        """
        changed = self.change(lambda record: record.with_revocation(key_id, reason))
        revocation = changed.revocation(key_id)
        assert revocation is not None
        return revocation

    def entries(self) -> list[TrustedKey]:
        """Return the trusted keys in the order they were added, revoked ones included."""
        return list(self.read().keys)

    def revocations(self) -> list[Revocation]:
        """Return all revocations, the oldest first."""
        return list(self.read().revoked)

    def is_revoked(self, key_id: str) -> bool:
        """Tell whether a key was revoked."""
        return self.read().revocation(key_id) is not None

    def find(self, text: str) -> TrustedKey:
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
        """Return the key when it may vouch for this content under this name.

        ``registry`` is the host of the registry that the package came from; ``None``: a file.

        Raises:
            RevokedError: when the key was revoked.
            TrustError: when it is not trusted, or not for this namespace or content.
        """
        return self.read().authorise(
            key_id, package=package, content_digest=content_digest, registry=registry
        )

    def add_registry(self, known: KnownRegistry) -> KnownRegistry:
        """Accept the index key of a registry; the namespaces that it names move to it.

        Raises:
            UsageError: when its host is what stands for files.
        """
        added = self.change(lambda record: record.with_registry(known)).registry(known.host)
        assert added is not None
        return added

    def remove_registry(self, host: str) -> None:
        """Forget a registry and the keys that were pinned from it; its revocations stay.

        Raises:
            NotFoundError: when it is not known.
        """
        self.change(lambda record: record.without_registry(host))

    def check_integrity(self) -> None:
        """Read the file and write it in memory; raise when the two differ in meaning."""
        record = self.read()
        assert TrustRecord.parse(record.encode(), what=str(self.path)) == record

    def change(self, change: Callable[[TrustRecord], TrustRecord]) -> TrustRecord:
        """Apply a change to what the file says while no other process writes; return the result.

        Raises:
            StoreError: when another process writes it for too long.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(f"{self.path}.lock", timeout=self.lock_seconds, mode=0o600)
        try:
            with lock:
                record = self.read()
                changed = change(record)
                if changed != record:
                    write_atomic(self.path, changed.encode(), mode=0o600)
                return changed
        except Timeout as error:
            message = f"{self.path} is being changed by another process"
            raise StoreError(message, hint="try again when that has ended") from error
