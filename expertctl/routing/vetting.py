"""Vetting: judging packages as they are installed, each by what was there before it.

The verdict is kept (`store.suspicions`), so routing only reads it. What is judged already stays
judged: a package that was there first is never flagged for a copy that came later. The user's own
packages are not flagged, whatever they say: nobody has to be protected from them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice

from expertctl.digest import Digest
from expertctl.routing.copied_texts import marks_of
from expertctl.routing.index import RoutingIndex
from expertctl.routing.resemblance import COMPARED_FROM, Told, resemblance
from expertctl.routing.suspicion import RULES, KnownManifests, flags
from expertctl.routing.vector_table import Mask, Vectors
from expertctl.schema.manifest import Manifest
from expertctl.store.flags import Flag
from expertctl.store.suspicions import FILE, Known, Suspicions, Verdict

BATCH = 128
"""How many packages are judged between two writes."""

Experts = Mapping[Digest, Manifest]
"""Content digest → manifest, in the order in which they came."""


def suspicions_of(index: RoutingIndex) -> Suspicions:
    """Return what is remembered beside an index."""
    return Suspicions(index.folder / FILE)


NOBODY: frozenset[Digest] = frozenset()


def vet(
    experts: Experts, index: RoutingIndex, *, own: Collection[Digest] = NOBODY
) -> dict[Digest, tuple[Flag, ...]]:
    """Judge the experts not judged yet, and remember the verdicts; return the flags of all.

    ``own`` are those of the user, which get no flags.

    Raises:
        StoreError: when the verdicts cannot be written.
        DiskFullError: when there is no space left.
    """
    suspicions = suspicions_of(index)
    known = suspicions.verdicts(experts)
    current = {d: v.flags for d, v in known.items() if v.rules == RULES and not _changes(v, own)}
    new = {digest: m for digest, m in experts.items() if digest not in current}
    if not new:
        return current
    vetting = Vetting(suspicions, index, pending=new, own=own)
    left = iter(new.items())
    while batch := dict(islice(left, BATCH)):
        verdicts = vetting.judge(batch)
        suspicions.add(verdicts)
        current |= {verdict.content_digest: verdict.flags for verdict in verdicts}
    return current


def _changes(verdict: Verdict, own: Collection[Digest]) -> bool:
    """Tell whether a package was flagged before its signer's key became the user's own."""
    return bool(verdict.flags) and verdict.content_digest in own


def advise(
    manifest: Manifest, index: RoutingIndex, *, own: Collection[Digest] = NOBODY
) -> tuple[Flag, ...]:
    """Return the flags that a package of somebody else would get here; nothing is remembered.

    It is not compared with the user's own packages, which others do not have.
    """
    suspicions = suspicions_of(index)
    names = {verdict.name for verdict in suspicions.verdicts(own).values()}
    vetting = Vetting(suspicions, index, pending={})
    vetting.others[index.positions(own)] = False
    return vetting.find(manifest, _Without(suspicions, names))


def vet_again(
    experts: Experts, index: RoutingIndex, *, own: Collection[Digest] = NOBODY
) -> dict[Digest, tuple[Flag, ...]]:
    """Forget all but these, judge again those that were flagged, and those not judged yet.

    Raises:
        StoreError: when the verdicts cannot be written.
        DiskFullError: when there is no space left.
    """
    suspicions = suspicions_of(index)
    known = suspicions.verdicts(experts)
    clean = [digest for digest, verdict in known.items() if not verdict.flags]
    suspicions.keep(clean, {manifest.name for manifest in experts.values()})
    return vet(experts, index, own=own)


@dataclass(frozen=True, slots=True)
class _Either:
    """What the record knows and what a batch adds to it; the record was there first."""

    record: Known
    batch: Known

    def owners(self, marks: Collection[int]) -> Mapping[int, str]:
        return {**self.batch.owners(marks), **self.record.owners(marks)}

    def named(self, names: Collection[str]) -> Mapping[str, str]:
        return {**self.batch.named(names), **self.record.named(names)}


@dataclass(frozen=True, slots=True)
class _Without:
    """What the record knows, without what some packages brought."""

    record: Known
    names: Collection[str]

    def owners(self, marks: Collection[int]) -> Mapping[int, str]:
        found = self.record.owners(marks)
        return {mark: name for mark, name in found.items() if name not in self.names}

    def named(self, names: Collection[str]) -> Mapping[str, str]:
        found = self.record.named(names)
        return {name: package for name, package in found.items() if package not in self.names}


class Vetting:
    """One round of judging, with the packages that may have been copied from so far."""

    def __init__(
        self,
        suspicions: Suspicions,
        index: RoutingIndex,
        *,
        pending: Experts,
        own: Collection[Digest] = NOBODY,
    ) -> None:
        """Begin; a pending package counts only once it is judged, a flagged one never."""
        self.suspicions = suspicions
        self.index = index
        self.own = own
        self.names = {digest: manifest.name for digest, manifest in pending.items()}
        self.pending: dict[str, list[Digest]] = {}
        for digest, manifest in pending.items():
            self.pending.setdefault(manifest.package.namespace, []).append(digest)
        self.others: Mask = index.table.alive.copy()
        self.others[index.positions([*pending, *suspicions.flagged()])] = False

    def judge(self, batch: Experts) -> list[Verdict]:
        """Judge packages in order, each against those before it."""
        seen = KnownManifests()
        known = _Either(self.suspicions, seen)
        return [self._judge(digest, m, known, seen) for digest, m in batch.items()]

    def _judge(
        self, digest: Digest, manifest: Manifest, known: Known, seen: KnownManifests
    ) -> Verdict:
        found = (*flags(manifest, known), *self._resembling(digest, manifest))
        if not found:
            seen.add(manifest)
            self.others[self.index.positions([digest])] = True
        elif digest in self.own:  # what it brings does not count against later ones all the same
            return Verdict(digest, manifest.name, (), RULES)
        return Verdict(digest, manifest.name, found, RULES, marks_of(manifest))

    def find(self, manifest: Manifest, known: Known) -> tuple[Flag, ...]:
        """Judge a package that has no vectors in the index."""
        examples = manifest.routing.examples
        if len(examples) < COMPARED_FROM:
            return flags(manifest, known)
        rows = self.index.encoder.encode([manifest.description, *examples])
        return (*flags(manifest, known), *self._compared(rows, manifest))

    def _resembling(self, digest: Digest, manifest: Manifest) -> tuple[Flag, ...]:
        """Compare the vectors of a package with those of other publishers."""
        table, position = self.index.table, self.index.positions([digest])
        if not len(position):
            return ()
        return self._compared(table.rows[table.rows_of(position)], manifest)

    def _compared(self, rows: Vectors, manifest: Manifest) -> tuple[Flag, ...]:
        return tuple(
            resemblance(
                self.index.table,
                Told(rows[0], rows[1 : 1 + len(manifest.routing.examples)]),
                others=self._foreign(manifest),
                name=self._name,
                encoder=self.index.encoder,
            )
        )

    def _foreign(self, manifest: Manifest) -> Mask:
        """Leave out what the same publisher brought."""
        namespace = manifest.package.namespace
        own = [*self.pending.get(namespace, ()), *self.suspicions.of_namespace(namespace)]
        foreign = self.others.copy()
        foreign[self.index.positions(own)] = False
        return foreign

    def _name(self, position: int) -> str:
        digest = self.index.digest(position)
        known = self.suspicions.verdicts([digest])
        return self.names.get(digest) or (known[digest].name if known else str(digest))
