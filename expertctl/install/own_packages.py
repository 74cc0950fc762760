"""Which installed packages are the user's own: the router does not guard against them.

These are packages that one of the user's own keys signed, wherever they were installed from, and
files of ``local/`` that nobody signed, which the router uses only when they are named.
"""

from collections.abc import Iterable

from expertctl.digest import Digest
from expertctl.errors import ExpertError
from expertctl.store.ref import LOCAL, StoredExpert
from expertctl.trust.keys import KeyRing
from expertctl.trust.publisher import OWN_NAMESPACE


def own_packages(experts: Iterable[StoredExpert], ring: KeyRing) -> frozenset[Digest]:
    """Return the content digests of those that are the user's own."""
    keys = _key_ids(ring)
    return frozenset(expert.content_digest for expert in experts if _is_own(expert, keys))


def _is_own(expert: StoredExpert, keys: frozenset[str]) -> bool:
    if expert.signer is not None:
        return expert.signer in keys
    unsigned_file = expert.signature is None and expert.registry == LOCAL
    return unsigned_file and expert.package.namespace == OWN_NAMESPACE


def _key_ids(ring: KeyRing) -> frozenset[str]:
    """Return the ids of the user's keys; one that cannot be read counts for nothing."""
    found = set()
    for name in ring.names():
        try:
            found.add(ring.public(name).key_id)
        except ExpertError:
            continue
    return frozenset(found)
