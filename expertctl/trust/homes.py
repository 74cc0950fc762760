"""To which registries a namespace belongs. Needs no cryptography: `list` asks too."""

from collections.abc import Iterable

Belonging = tuple[str, str]
"""A host and one namespace of it."""


def homes(
    namespace: str, *, meant: Iterable[Belonging], pinned: Iterable[Belonging]
) -> tuple[str, ...]:
    """Return the one that the person named for it, else all from which its keys were pinned."""
    named = sorted({host for host, name in meant if name == namespace})
    return tuple(named or sorted({host for host, name in pinned if name == namespace}))


def only_home(hosts: tuple[str, ...]) -> str | None:
    """Return the registry whose word counts for what came from a file: the only one there is."""
    return hosts[0] if len(hosts) == 1 else None
