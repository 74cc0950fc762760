"""Which registries a namespace belongs to, and whose grants and revocations apply to a package.

Needs no cryptography: `list` uses it too.
"""

from collections.abc import Collection, Iterable

from expertctl.reference import FROM_FILE

NamespaceAuthority = tuple[str, str]
"""A host and one namespace of it."""


def find_namespace_registries(
    namespace: str, *, assigned: Iterable[NamespaceAuthority], pinned: Iterable[NamespaceAuthority]
) -> tuple[str, ...]:
    """Return the registry assigned to a namespace, else all that its keys were pinned from."""
    named = sorted({host for host, name in assigned if name == namespace})
    return tuple(named or sorted({host for host, name in pinned if name == namespace}))


def find_other_registry(registry: str, *, registries: Collection[str]) -> str | None:
    """Return the only registry that a namespace belongs to, if it is not this one; else None.

    A file belongs to no registry, so it is never in conflict with one.
    """
    other = len(registries) == 1 and registry not in {*registries, FROM_FILE}
    return next(iter(registries)) if other else None


def find_authorities(
    registry: str | None, *, registries: Collection[str], known: Collection[str]
) -> frozenset[str]:
    """Return the registries whose grants and revocations apply to packages from ``registry``.

    For a known registry only its own apply. For a file, those of the registry that the namespace
    belongs to; for a mirror without a trusted index, its own and those. A namespace that does not
    belong to exactly one registry adds none.
    """
    own = frozenset() if registry is None or registry == FROM_FILE else frozenset({registry})
    if registry in known or len(registries) != 1:
        return own
    return own | frozenset(registries)
