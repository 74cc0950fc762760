"""`TrustRecord`: trusted keys with their grants, revocations and registries; does no I/O.

A grant lets a key sign a namespace: any content, or only the listed contents. A revocation is never
undone; it outlives the removal of the key. Grants and revocations from a registry apply only to
packages from there. A package from a file, or from a mirror without an index, is treated as coming
from the registry that its namespace belongs to, if there is one.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.reference import (
    FROM_FILE,
    Digest,
    PackageName,
    find_authorities,
    find_namespace_registries,
    find_other_registry,
)
from expertctl.trust.grants import (
    Grant,
    KnownRegistry,
    Revocation,
    TrustedKey,
    TrustFileContent,
    encode_trust,
    parse_trust,
)
from expertctl.trust.keys import PublicKey

MAX_REASON = 500
_KEY_ID = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TrustRecord:
    """Everything that is trusted and revoked; changes return a new record."""

    keys: tuple[TrustedKey, ...] = ()
    revoked: tuple[Revocation, ...] = ()
    registries: tuple[KnownRegistry, ...] = ()

    @classmethod
    def parse(cls, data: bytes, *, what: str) -> Self:
        """Parse the bytes of ``trust.json``.

        Raises:
            InvalidPackageError: with every problem, when they are not exactly such a document.
        """
        try:
            file = parse_trust(data, what=what)
        except InvalidPackageError as error:
            hint = f"restore {what} from a backup; without it nothing is trusted"
            raise InvalidPackageError(error.what, error.problems, hint=hint) from error
        return cls(file.keys, file.revoked, file.registries)

    def encode(self) -> bytes:
        """Return the bytes of ``trust.json``.

        Raises:
            TrustError: when they would be too many to be read again.
        """
        return encode_trust(TrustFileContent(self.keys, self.revoked, self.registries))

    def find_revocation(
        self, key_id: str, *, namespace: str | None = None, registry: str | None = None
    ) -> Revocation | None:
        """Return the revocation of a key; None when there is none.

        Without a namespace only a total revocation applies; with one also those of
        `find_authorities`.
        """
        scopes: set[tuple[str, str] | None] = {None}
        if namespace is not None:
            scopes |= {
                (host, namespace) for host in self.find_authoritative_hosts(namespace, registry)
            }
        return next((r for r in self.revoked if r.key_id == key_id and r.scope in scopes), None)

    def find_key(self, key_id: str) -> TrustedKey | None:
        """Return a trusted key by its id; a revoked one too, for display."""
        return next((k for k in self.keys if k.key_id == key_id), None)

    def find_registry(self, host: str) -> KnownRegistry | None:
        """Return a registry whose index key was accepted."""
        return next((known for known in self.registries if known.host == host), None)

    def list_registries_for(self, namespace: str) -> tuple[str, ...]:
        """Return the hosts of the registries that a namespace belongs to.

        The one that the user assigned to it, else all from which its keys were pinned.
        """
        granted = (
            (grant.registry, grant.namespace)
            for key in self.keys
            for grant in key.grants
            if grant.registry is not None
        )
        pinned = ((r.host, name) for r in self.registries for name in r.pinned)
        meant = ((r.host, name) for r in self.registries for name in r.namespaces)
        return find_namespace_registries(namespace, assigned=meant, pinned=chain(pinned, granted))

    def find_conflicting_registry(self, namespace: str, registry: str) -> str | None:
        """Return the only registry that a namespace belongs to, if it is not this one; else None.

        A file belongs to no registry, so it is never in conflict with one.
        """
        return find_other_registry(registry, registries=self.list_registries_for(namespace))

    def find_authoritative_hosts(self, namespace: str, registry: str | None) -> frozenset[str]:
        """Return the hosts whose word counts in a namespace for packages from ``registry``."""
        known = {r.host for r in self.registries}
        return find_authorities(
            registry, registries=self.list_registries_for(namespace), known=known
        )

    def is_pinned(self, host: str, namespace: str) -> bool:
        """Tell whether the keys of a namespace of a registry were pinned already."""
        known = self.find_registry(host)
        return (known is not None and namespace in known.pinned) or any(
            grant.registry == host and grant.namespace == namespace
            for key in self.keys
            for grant in key.grants
        )

    def list_pinned_keys(self, host: str, namespace: str) -> list[PublicKey]:
        """Return the keys with a grant for a namespace that was pinned from a registry's index."""
        return [
            trusted.key
            for trusted in self.keys
            if any(g.registry == host and g.namespace == namespace for g in trusted.grants)
        ]

    def list_vouching_keys(self, host: str, namespace: str) -> list[PublicKey]:
        """Return the keys that may sign any content in a namespace of a registry."""
        return [
            trusted.key
            for trusted in self.keys
            if self.find_revocation(trusted.key_id, namespace=namespace, registry=host) is None
            and any(
                grant.covers(namespace, {host}) and grant.content_digests is None
                for grant in trusted.grants
            )
        ]

    def with_key(self, trusted: TrustedKey) -> "TrustRecord":
        """Return a record with a key added, or with more grants for it.

        Raises:
            RevokedError: when the key was revoked, totally or where it is to count.
        """
        for grant in trusted.grants:
            self._check_not_revoked(trusted.key_id, grant)
        present = self.find_key(trusted.key_id)
        if present is None:
            return replace(self, keys=(*self.keys, trusted))
        joined = present.merge(trusted)
        return replace(self, keys=tuple(joined if k is present else k for k in self.keys))

    def without_key(self, key_id: str) -> "TrustRecord":
        """Return a record without a key; its revocation stays.

        Raises:
            NotFoundError: when it is not there.
        """
        if self.find_key(key_id) is None:
            hint = "`expertctl trust list` shows the trusted keys"
            raise NotFoundError(f"the key {key_id} is not trusted", hint=hint)
        return replace(self, keys=tuple(k for k in self.keys if k.key_id != key_id))

    def with_revocation(self, key_id: str, reason: str) -> "TrustRecord":
        """Return a record with a key revoked everywhere, known or not; the first reason stays.

        Raises:
            UsageError: when the id is not one, or the reason is too long or not printable.
        """
        return self._add_revocation(Revocation(key_id, reason))

    def with_registry(self, known: KnownRegistry) -> "TrustRecord":
        """Return a record with a registry added or changed; its namespaces move to it.

        Raises:
            UsageError: when the host is the one that stands for files.
        """
        if known.host == FROM_FILE:
            raise UsageError(f"{FROM_FILE!r} stands for what came from files, not for a registry")
        before = self.find_registry(known.host)
        if before is not None:
            meant = tuple(sorted({*before.namespaces, *known.namespaces}))
            known = replace(known, namespaces=meant, pinned=before.pinned)
        others = (
            replace(r, namespaces=tuple(n for n in r.namespaces if n not in known.namespaces))
            for r in self.registries
            if r.host != known.host
        )
        return replace(self, registries=tuple(sorted([*others, known], key=lambda r: r.host)))

    def without_registry(self, host: str) -> "TrustRecord":
        """Return a record without a registry and the grants pinned from it; its revocations stay.

        Raises:
            NotFoundError: when it is not known.
        """
        if self.find_registry(host) is None:
            hint = "`expertctl trust registry list` shows the known ones"
            raise NotFoundError(f"no registry is known as {host[:140]!r}", hint=hint)
        left = (key.without_registry(host) for key in self.keys)
        return replace(
            self,
            keys=tuple(key for key in left if key.grants),
            registries=tuple(r for r in self.registries if r.host != host),
        )

    def with_pins(self, host: str, namespace: str, keys: Iterable[PublicKey]) -> "TrustRecord":
        """Return a record with keys pinned for a registry's namespace; known keys keep their names.

        A namespace that belonged to another registry stays assigned to that one: a reference
        without a host keeps its meaning.

        Raises:
            RevokedError: when one of them was revoked.
        """
        pinned = self
        for key in keys:
            present = self.find_key(key.key_id)
            name = present.name if present else namespace
            pinned = pinned.with_key(TrustedKey(key, name, (Grant(namespace, None, host),)))
        home = self.find_conflicting_registry(namespace, host)
        registries = tuple(
            replace(
                r,
                pinned=_add_name(r.pinned, namespace) if r.host == host else r.pinned,
                namespaces=_add_name(r.namespaces, namespace) if r.host == home else r.namespaces,
            )
            for r in self.registries
        )
        return replace(pinned, registries=registries)

    def with_registry_revocations(
        self, host: str, namespace: str, revoked: Iterable[tuple[str, str]]
    ) -> "TrustRecord":
        """Return a record with keys, given with reasons, revoked for one namespace of a registry.

        Raises:
            UsageError: when an id is not one, or a reason is too long or not printable.
        """
        record = self
        for key_id, reason in revoked:
            record = record._add_revocation(Revocation(key_id, reason, host, namespace))
        return record

    def authorise(
        self,
        key_id: str,
        *,
        package: PackageName,
        content_digest: Digest,
        registry: str | None = None,
    ) -> PublicKey:
        """Return the key when it may vouch for this content under this name.

        ``registry`` is the host of the registry that the package came from.

        Raises:
            RevokedError: when the key was revoked, whatever else is known of it.
            TrustError: when it is not trusted, or not for this namespace or content.
        """
        if revocation := self.find_revocation(
            key_id, namespace=package.namespace, registry=registry
        ):
            hint = f"wait for a version of {package} that is signed with another key"
            raise RevokedError(f"{package}: {_describe_revocation(revocation)}", hint=hint)
        trusted = self.find_key(key_id)
        if trusted is None:
            where = f" --registry {registry}" if registry not in {None, FROM_FILE} else ""
            use = f"`expertctl trust add KEY.pem --namespace {package.namespace}{where}`"
            message = f"{package}: key {key_id} is not trusted"
            raise TrustError(message, hint=f"if you know whose it is: {use}")
        hosts = self.find_authoritative_hosts(package.namespace, registry)
        _check_grant(trusted, package, content_digest, hosts)
        return trusted.key

    def _check_not_revoked(self, key_id: str, grant: Grant) -> None:
        namespace = grant.namespace if grant.registry else None
        revocation = self.find_revocation(key_id, namespace=namespace, registry=grant.registry)
        if revocation is not None:
            hint = "a revocation is final; ask the publisher for the key that replaces it"
            raise RevokedError(_describe_revocation(revocation), hint=hint)

    def _add_revocation(self, new: Revocation) -> "TrustRecord":
        if not _KEY_ID.fullmatch(new.key_id):
            raise UsageError(f"{new.key_id[:80]!r} is not a key id such as sha256:<64 hex digits>")
        if len(new.reason) > MAX_REASON or not new.reason.isprintable():
            raise UsageError(f"a reason is one line of at most {MAX_REASON} characters")
        if any(r.key_id == new.key_id and r.scope == new.scope for r in self.revoked):
            return self
        return replace(self, revoked=(*self.revoked, new))


def _add_name(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    return tuple(sorted({*names, name}))


def _check_grant(
    trusted: TrustedKey, package: PackageName, content_digest: Digest, hosts: Collection[str]
) -> None:
    grants = [g for g in trusted.grants if g.covers(package.namespace, hosts)]
    who = f"key {trusted.key_id} ({trusted.name})"
    if not grants:
        where = f" from {' or '.join(sorted(hosts))}" if hosts else ""
        message = f"{package}: {who} may not sign '{package.namespace}/*'{where}"
        grant = f"`expertctl keys grant {trusted.name} --namespace {package.namespace}`"
        hint = f"if it is your key: {grant}; `expertctl trust list` shows what keys may sign"
        raise TrustError(message, hint=hint)
    if not any(grant.allows(content_digest) for grant in grants):
        message = f"{package}: {who} is valid for fixed contents, {content_digest} is not one"
        raise TrustError(message, hint="see `expertctl trust list --json`")


def _describe_revocation(revocation: Revocation) -> str:
    where = "" if revocation.registry is None else f" by {revocation.registry}"
    reason = f": {revocation.reason}" if revocation.reason else ""
    return f"key {revocation.key_id} was revoked{where}{reason}"
