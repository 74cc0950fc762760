"""Suspicion: what in a manifest looks as if it were made to mislead the router.

Deterministic, from the manifest and from what other packages brought before. Nothing here refuses a
package: a flag is shown to the user, and between equals the flagged package comes second.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from expertctl.routing.copied_texts import copied_texts, marks_of
from expertctl.routing.oddities import oddities
from expertctl.schema.manifest import Manifest
from expertctl.store.flags import Flag
from expertctl.store.suspicions import Known

RULES = 3
"""Raised whenever the same packages would get other flags."""


def flags(manifest: Manifest, others: Known) -> tuple[Flag, ...]:
    """Return what is suspicious about a manifest, given what others brought before."""
    return (*copied_texts(manifest, others), *oddities(manifest, others))


@dataclass(slots=True)
class KnownManifests:
    """What some manifests bring, kept in memory; the first of a text owns it."""

    marks: dict[int, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> Self:
        """Collect what these manifests bring, the earliest first."""
        known = cls()
        for manifest in manifests:
            known.add(manifest)
        return known

    def add(self, manifest: Manifest) -> None:
        """Add what one more manifest brings."""
        self.names |= {manifest.name: manifest.name, manifest.package.name: manifest.name}
        for mark in marks_of(manifest):
            self.marks.setdefault(mark, manifest.name)

    def owners(self, marks: Collection[int]) -> Mapping[int, str]:
        """Return the package that brought each mark first; of new marks, nothing."""
        return {mark: self.marks[mark] for mark in marks if mark in self.marks}

    def named(self, names: Collection[str]) -> Mapping[str, str]:
        """Return which of these names are packages, with or without namespace."""
        return {name: self.names[name] for name in names if name in self.names}
