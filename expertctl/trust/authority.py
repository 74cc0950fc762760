"""To which registries a namespace belongs, and so whose word counts for a package of it.

Needs no cryptography: `list` asks too.
"""

from collections.abc import Collection, Iterable

from expertctl.reference import FROM_FILE

NamespaceAuthority = tuple[str, str]
"""A host and one namespace of it."""


def find_namespace_registries(
    namespace: str, *, assigned: Iterable[NamespaceAuthority], pinned: Iterable[NamespaceAuthority]
) -> tuple[str, ...]:
    """Return the one that the person named for it, else all from which its keys were pinned."""
    named = sorted({host for host, name in assigned if name == namespace})
    return tuple(named or sorted({host for host, name in pinned if name == namespace}))


def find_other_registry(registry: str, *, registries: Collection[str]) -> str | None:
    """Return the one registry that a namespace belongs to, if it is not this one; else None.

    A file belongs to no registry, so it is no other one.
    """
    other = len(registries) == 1 and registry not in {*registries, FROM_FILE}
    return next(iter(registries)) if other else None


def find_authorities(
    registry: str | None, *, registries: Collection[str], known: Collection[str]
) -> frozenset[str]:
    """Return the registries whose grants and revocations count for what came from ``registry``.

    For a known registry only its own count. For a file, those of the namespace's home count; for a
    mirror without an index that could be believed, its own and those. Without exactly one home, a
    file has none, and a mirror only its own.
    """
    own = frozenset() if registry is None or registry == FROM_FILE else frozenset({registry})
    if registry in known or len(registries) != 1:
        return own
    return own | frozenset(registries)
