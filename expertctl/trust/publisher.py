"""The person as a publisher: own keys, which are trusted from the moment they exist.

A key of one's own may sign ``local/*``, and namespaces that were named with it or granted later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.errors import NotFoundError, RevokedError, UsageError
from expertctl.trust.grant import Revocation, TrustedKey, grants_for
from expertctl.trust.keys import Algorithm, KeyRing, PrivateKey, PublicKey
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

OWN_NAMESPACE = "local"


@dataclass(frozen=True, slots=True)
class OwnKey:
    """One of the person's keys as `expertctl keys list` shows it."""

    name: str
    key: PublicKey
    namespaces: tuple[str, ...]
    revoked: bool


@dataclass(frozen=True, slots=True)
class Publisher:
    """The person's keys together with what is trusted."""

    ring: KeyRing
    trust: TrustStore

    def create(
        self, name: str, *, algorithm: Algorithm = "ecdsa-p256", namespaces: Sequence[str] = ()
    ) -> TrustedKey:
        """Make a key and trust it for ``local`` and for ``namespaces``.

        Raises:
            UsageError: when the name is taken, or the name or a namespace is not one.
        """
        return self._adopt(name, PrivateKey.generate(algorithm), namespaces)

    def import_(
        self, name: str, pem: bytes, *, namespaces: Sequence[str] = (), what: str = "private key"
    ) -> TrustedKey:
        """Take in a key that was made elsewhere, and trust it as `create` does.

        Raises:
            InvalidPackageError: when it is not a private key of a kind that is used here.
            RevokedError: when it was revoked.
            UsageError: when the name is taken, or the name or a namespace is not one.
        """
        return self._adopt(name, PrivateKey.from_pem(pem, what=what), namespaces)

    def grant(self, name: str, namespaces: Sequence[str]) -> TrustedKey:
        """Trust one of the person's keys for more namespaces.

        Raises:
            NotFoundError: when there is none of that name.
            RevokedError: when it was revoked.
            UsageError: when there is no namespace, or one is not a namespace.
        """
        return self.trust.add(self.ring.public(name), name=name, namespaces=namespaces)

    def keys(self) -> list[OwnKey]:
        """Return the person's keys by name, with what each is trusted for."""
        record = self.trust.read()
        return [_own(name, self.ring.public(name), record) for name in self.ring.names()]

    def signing_key(self, name: str) -> PrivateKey:
        """Return a key to sign with.

        Raises:
            NotFoundError: when there is none of that name.
            RevokedError: when it was revoked, since its signature would not be accepted.
        """
        key = self.ring.private(name)
        if self.trust.is_revoked(key.public.key_id):
            hint = "make another with `expertctl keys new NAME`"
            raise RevokedError(f"your key {name!r} was revoked", hint=hint)
        return key

    def revoke(self, name_or_id: str, reason: str = "") -> Revocation:
        """Revoke a key: one of the person's own, a trusted one, or any by its id.

        Raises:
            NotFoundError: when no key is called so and it is not a key id.
            UsageError: when the name means two keys.
        """
        return self.trust.revoke(self.key_id_of(name_or_id), reason)

    def key_id_of(self, name_or_id: str) -> str:
        """Return the id of an own key, a trusted key, or the id itself.

        Raises:
            NotFoundError: when no key is called so and it is not a key id.
            UsageError: when the name means two keys.
        """
        if name_or_id.startswith("sha256:"):
            return name_or_id
        ids = {k.key_id for k in self.trust.entries() if k.name == name_or_id}
        if name_or_id in self.ring.names():
            ids.add(self.ring.public(name_or_id).key_id)
        if not ids:
            hint = "`expertctl keys list` and `expertctl trust list` show the keys"
            raise NotFoundError(f"no key is called {name_or_id[:80]!r}", hint=hint)
        if len(ids) > 1:
            hint = f"give the id: {', '.join(sorted(ids))}"
            raise UsageError(f"{len(ids)} keys are called {name_or_id!r}", hint=hint)
        return ids.pop()

    def _adopt(self, name: str, key: PrivateKey, namespaces: Sequence[str]) -> TrustedKey:
        """Keep, then trust; what could refuse the second step is checked before the first."""
        wanted = TrustedKey(key.public, name, grants_for([OWN_NAMESPACE, *namespaces], None))
        self.trust.read().with_key(wanted)
        self.ring.add(name, key)
        return self.trust.add(key.public, name=name, namespaces=wanted.namespaces)


def _own(name: str, key: PublicKey, record: TrustRecord) -> OwnKey:
    trusted = record.trusted(key.key_id)
    namespaces = trusted.namespaces if trusted else ()
    return OwnKey(name, key, namespaces, record.revocation(key.key_id) is not None)
