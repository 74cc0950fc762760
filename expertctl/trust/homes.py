"""To which registries a namespace belongs, and so whose word counts for a package of it.

Needs no cryptography: `list` asks too.
"""

from collections.abc import Collection, Iterable

from expertctl.reference import FROM_FILE

Belonging = tuple[str, str]
"""A host and one namespace of it."""


def homes(
    namespace: str, *, meant: Iterable[Belonging], pinned: Iterable[Belonging]
) -> tuple[str, ...]:
    """Return the one that the person named for it, else all from which its keys were pinned."""
    named = sorted({host for host, name in meant if name == namespace})
    return tuple(named or sorted({host for host, name in pinned if name == namespace}))


def authorities(
    registry: str | None, *, homes: Collection[str], known: Collection[str]
) -> frozenset[str]:
    """Return the registries whose grants and revocations count for what came from somewhere.

    A known registry speaks for itself alone. A file, and a mirror that has no index that could be
    believed, carry what the namespace's home says; where there is not exactly one, nobody's.
    """
    own = frozenset() if registry is None or registry == FROM_FILE else frozenset({registry})
    if registry in known or len(homes) != 1:
        return own
    return own | frozenset(homes)
