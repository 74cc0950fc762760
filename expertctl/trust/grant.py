"""The parts of what is trusted: keys with their grants, revocations, and known registries.

A grant without a registry was given by the person and counts wherever a package comes from. A grant
with one was pinned from that registry's index and counts for packages from there alone; so does a
revocation.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from expertctl.digest import Digest
from expertctl.errors import UsageError
from expertctl.reference import NAME_PATTERN
from expertctl.trust.keys import MAX_NAME, PublicKey

_NAMESPACE = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to sign one namespace; ``content_digests`` limits it, None does not."""

    namespace: str
    content_digests: tuple[str, ...] | None = None
    registry: str | None = None
    """The host from whose index it was pinned; ``None``: given by the person, counts everywhere."""

    @property
    def order(self) -> tuple[str, str]:
        """Where and for what it counts: a key has one grant for each."""
        return self.namespace, self.registry or ""

    def joined(self, other: "Grant") -> "Grant":
        """Return the wider of two grants for one namespace."""
        if self.content_digests is None or other.content_digests is None:
            return replace(self, content_digests=None)
        both = {*self.content_digests, *other.content_digests}
        return replace(self, content_digests=tuple(sorted(both)))

    def allows(self, content_digest: Digest) -> bool:
        """Tell whether this content may be signed."""
        return self.content_digests is None or str(content_digest) in self.content_digests

    def covers(self, namespace: str, hosts: Collection[str]) -> bool:
        """Tell whether it counts for a namespace where the word of these registries does."""
        return self.namespace == namespace and (self.registry is None or self.registry in hosts)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key, the name that the person gave it, and what it may sign."""

    key: PublicKey
    name: str
    grants: tuple[Grant, ...]

    @property
    def key_id(self) -> str:
        """The id of the key."""
        return self.key.key_id

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces that the key may sign, wholly or in part, each once."""
        return tuple(dict.fromkeys(grant.namespace for grant in self.grants))

    def joined(self, other: "TrustedKey") -> "TrustedKey":
        """Return this key with the grants of both, under the newer name."""
        grants = {grant.order: grant for grant in self.grants}
        for grant in other.grants:
            mine = grants.get(grant.order)
            grants[grant.order] = mine.joined(grant) if mine else grant
        return replace(other, grants=tuple(sorted(grants.values(), key=lambda g: g.order)))

    def without(self, registry: str) -> "TrustedKey":
        """Return this key without what was pinned from a registry."""
        return replace(self, grants=tuple(g for g in self.grants if g.registry != registry))


@dataclass(frozen=True, slots=True)
class Revocation:
    """A key that can never again authorise anything, and why.

    With a registry and a namespace it holds for packages of that namespace from there alone.
    """

    key_id: str
    reason: str
    registry: str | None = None
    namespace: str | None = None

    @property
    def scope(self) -> tuple[str, str] | None:
        """Registry and namespace; ``None`` when it is total."""
        return None if self.registry is None else (self.registry, self.namespace or "")


@dataclass(frozen=True, slots=True)
class KnownRegistry:
    """A registry whose index key the person accepted."""

    host: str
    url: str
    index_key: PublicKey
    namespaces: tuple[str, ...] = ()
    """Namespaces that the person said are meant to be this registry's."""
    pinned: tuple[str, ...] = ()
    """Namespaces whose publisher keys were pinned from its index once."""


def namespace_of(text: str) -> str:
    """Return the namespace that ``acme`` and ``acme/*`` name.

    Raises:
        UsageError: for anything else; no pattern covers more than one namespace.
    """
    name = text.removesuffix("/*")
    if len(name) <= MAX_NAME and _NAMESPACE.fullmatch(name):
        return name
    hint = "a namespace is the part before the slash: `acme` (or `acme/*`) for acme/sql"
    raise UsageError(f"{text[:80]!r} is not a namespace", hint=hint)


def grants_for(
    namespaces: Iterable[str],
    content_digests: Sequence[str] | None,
    *,
    registry: str | None = None,
) -> tuple[Grant, ...]:
    """Return one grant for each namespace, all with the same limits.

    Raises:
        UsageError: when there is no namespace, a bad one, or an empty list of contents.
        DigestError: when a content is not named by a digest.
    """
    names = sorted({namespace_of(text) for text in namespaces})
    if not names:
        raise UsageError("a key is trusted for a namespace", hint="add `--namespace NAME`")
    if content_digests is None:
        return tuple(Grant(name, None, registry) for name in names)
    limits = tuple(sorted({str(Digest.parse(text)) for text in content_digests}))
    if not limits:
        raise UsageError("a key limited to no content at all could sign nothing")
    return tuple(Grant(name, limits, registry) for name in names)
