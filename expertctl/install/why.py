"""Why an expert is here: which experts require it, who vouches for it, which base it is for.

The store does not record whether the user asked for an expert by name, so nothing here says so.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.install.remove import fits
from expertctl.install.requirements import Claims
from expertctl.store.base_record import StoredBase
from expertctl.store.ref import StoredExpert
from expertctl.trust.grant import Grant
from expertctl.trust.record import TrustRecord


@dataclass(frozen=True, slots=True)
class Link:
    """One expert requires another, in these words."""

    ref: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Requirer:
    """An expert that needs the one asked about, by the shortest chain of requirements."""

    ref: str
    chain: tuple[Link, ...]
    """From the requirer down to the one that names the expert itself."""


@dataclass(frozen=True, slots=True)
class Vouching:
    """Who signed an expert, and what the user trusts that key for now."""

    key_id: str
    name: str | None
    """What the user calls the key; None when it is not trusted any more."""
    grant: Grant | None
    """The permission to sign this expert's namespace and content, if there is one."""
    revoked: str | None
    """The reason of the revocation, if there is one."""


@dataclass(frozen=True, slots=True)
class Why:
    """All there is to say about why an expert is installed."""

    expert: StoredExpert
    required_by: tuple[Requirer, ...]
    breaks: tuple[str, ...]
    """The experts that would no longer run without it."""
    vouching: Vouching | None
    """None means that nobody signed it."""
    bases: tuple[str, ...]
    """The bases of this machine that it was made for."""


def why(
    expert: StoredExpert,
    *,
    installed: Sequence[StoredExpert],
    bases: Sequence[StoredBase],
    trust: TrustRecord,
) -> Why:
    """Explain one of the installed experts."""
    return Why(
        expert,
        tuple(_requirers(expert, installed)),
        tuple(_broken_without(expert, installed)),
        _vouching(expert, trust),
        tuple(base.name for base in bases if fits(expert.base, base)),
    )


def _requirers(expert: StoredExpert, installed: Sequence[StoredExpert]) -> list[Requirer]:
    """Go up from the expert, nearest first; each requirer is met once."""
    own, claims = Claims.of(expert), [Claims.of(other) for other in installed]
    chains: dict[str, tuple[Link, ...]] = {}
    waiting: deque[tuple[Claims, tuple[Link, ...]]] = deque([(own, ())])
    while waiting:
        below, chain = waiting.popleft()
        for other in claims:
            wanted = _wants(other, below)
            if wanted is not None and other.ref not in chains and other != own:
                chains[other.ref] = (Link(other.ref, wanted), *chain)
                waiting.append((other, chains[other.ref]))
    return [Requirer(ref, chain) for ref, chain in chains.items()]


def _wants(claims: Claims, other: Claims) -> str | None:
    """Return the reference by which one expert requires another."""
    return next((str(wanted) for wanted in claims.requires if other.fits(wanted)), None)


def _broken_without(expert: StoredExpert, installed: Sequence[StoredExpert]) -> list[str]:
    """Return what would lack the expert, directly or through its own requirements."""
    rest = [Claims.of(other) for other in installed if other != expert]
    sound, before = _sound(rest), _sound([*rest, Claims.of(expert)])
    return [claims.ref for claims in rest if claims in before - sound]


def _sound(claims: Sequence[Claims]) -> set[Claims]:
    """Return the largest set in which each finds all that it requires within the set."""
    kept = set(claims)
    while True:
        left = {c for c in kept if all(any(o.fits(w) for o in kept) for w in c.requires)}
        if left == kept:
            return kept
        kept = left


def _vouching(expert: StoredExpert, trust: TrustRecord) -> Vouching | None:
    if expert.signer is None:
        return None
    namespace = expert.package.namespace
    trusted = trust.trusted(expert.signer)
    revocation = trust.revocation(expert.signer, namespace=namespace, registry=expert.registry)
    hosts = trust.authorities(namespace, expert.registry)
    matching = [
        grant
        for grant in (trusted.grants if trusted else ())
        if grant.covers(namespace, hosts) and grant.allows(expert.content_digest)
    ]
    return Vouching(
        expert.signer,
        trusted.name if trusted else None,
        matching[0] if matching else None,
        revocation.reason if revocation else None,
    )
