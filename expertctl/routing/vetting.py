"""Vetting: flagging packages on installation, each compared with those installed before it.

A near copy says in other words what another package says. The examples of a catch-all have little
in common, and are also far from its description or mostly resemble those of other packages.

Verdicts are stored (`store.suspicions`), so routing only reads them, and they are final: a package
that was installed first is never flagged for a copy that came later. The user's own packages are
not flagged, as nobody has to be protected from them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.encoder import Encoder
from expertctl.routing.index import ManifestsByDigest, RoutingIndex
from expertctl.routing.manifest_lint import (
    RULES_VERSION,
    SeenManifests,
    find_flags,
    fingerprint_manifest,
)
from expertctl.routing.vector_table import Mask, Rows, Vectors, VectorTable
from expertctl.schema.manifest import Manifest
from expertctl.store.preference import CATCH_ALL, Flag
from expertctl.store.suspicions import (
    SUSPICIONS_FILE,
    KnownPackages,
    PackageVerdict,
    SuspicionStore,
)

MIN_NEAR_COPY_COSINE = 0.9
"""Texts this similar say the same in other words."""

SEMANTIC_ENCODER = "minilm"
"""The encoder that sees meaning; examples of one task may have no words in common."""

_MAX_COMPARED_EXAMPLES = 12
"""How many examples of a package are compared with all others."""
_MIN_NEAR_COPY_SHARE = 0.4
MIN_COMPARED_EXAMPLES = 2
"""With fewer examples, nothing can be said."""
_MIN_ALIKE = 0.6
_MAX_UNLIKE = 0.25
"""Examples with a lower mean cosine have nothing in common."""
_MIN_COVERED_EXPERTS = 4
"""The least number of other packages that the examples of a catch-all resemble."""
_MIN_COVERED_SHARE = 0.5
_MIN_EXAMPLES = 10
"""The least number of examples without anything in common that counts by itself."""
_MAX_OVERALL_COSINE = 0.19
_MAX_DESCRIPTION_COSINE = 0.12
"""Examples this far from each other and from their description are about everything: even in a
field as wide as medicine they are closer to the description."""
_ROWS_PER_BLOCK = 1 << 14

NameLookup = Callable[[int], str]
"""Position → name of the package there."""


@dataclass(frozen=True, slots=True, eq=False)
class PackageRows:
    """The rows of a package's description and examples."""

    description: Vectors  # [dimensions]
    examples: Vectors  # [examples, dimensions]


@dataclass(frozen=True, slots=True, eq=False)
class _ClosestTexts:
    """The closest text of other packages to each example: its similarity and its owner."""

    similarities: Vectors
    owners: Rows


def find_near_duplicates(
    table: VectorTable, package: PackageRows, *, others: Mask, name: NameLookup, encoder: Encoder
) -> Iterator[Flag]:
    """Flag a near copy and a catch-all; ``others`` are the positions to compare with."""
    if len(package.examples) < MIN_COMPARED_EXAMPLES:
        return
    last = len(package.examples) - 1
    sample = package.examples[np.unique(np.linspace(0, last, _MAX_COMPARED_EXAMPLES).astype(int))]
    closest = _find_closest_texts(table, sample, others, encoder)
    yield from _check_near_copy(closest, name)
    if encoder.name == SEMANTIC_ENCODER:
        yield from _check_catch_all(package, closest)


def _check_near_copy(closest: _ClosestTexts, name: NameLookup) -> Iterator[Flag]:
    compared = len(closest.owners)
    near = Counter(closest.owners[closest.similarities >= MIN_NEAR_COPY_COSINE].tolist())
    for other, count in near.most_common(1):
        if count >= max(MIN_COMPARED_EXAMPLES, _MIN_NEAR_COPY_SHARE * compared):
            share = f"{count} of {compared} examples say in other words"
            yield Flag("near-copy", f"{share} what those of {name(other)} say", name(other))


def _check_catch_all(package: PackageRows, closest: _ClosestTexts) -> Iterator[Flag]:
    common = _mean_cosine(package.examples)
    alike = closest.similarities >= _MIN_ALIKE
    others = len(np.unique(closest.owners[alike]))
    if (
        common < _MAX_UNLIKE
        and others >= _MIN_COVERED_EXPERTS
        and alike.mean() >= _MIN_COVERED_SHARE
    ):
        sentence = "its examples have little in common, but most resemble those of other packages"
        yield Flag(CATCH_ALL, sentence)
    elif (
        common < _MAX_OVERALL_COSINE
        and len(package.examples) >= _MIN_EXAMPLES
        and _is_description_unrelated(package)
    ):
        sentence = "its examples have little in common with each other and with its description"
        yield Flag(CATCH_ALL, sentence)


def _is_description_unrelated(package: PackageRows) -> bool:
    return float((package.examples @ package.description).mean()) < _MAX_DESCRIPTION_COSINE


def _find_closest_texts(
    table: VectorTable, queries: Vectors, others: Mask, encoder: Encoder
) -> _ClosestTexts:
    """Return the text closest to each query; its owner is -1 when there are no others."""
    best = np.full(len(queries), -1, np.float32)
    owner = np.full(len(queries), -1, np.int64)
    end = _find_last_row(table, others)
    for start in range(0, end, _ROWS_PER_BLOCK):
        part = slice(start, min(start + _ROWS_PER_BLOCK, end))
        own = table.owners[part]
        cosines = queries @ table.rows[part].T
        cosines[:, np.flatnonzero(~others[own])] = -1
        at = cosines.argmax(1)
        top = cosines[np.arange(len(queries)), at]
        better = top > best
        best[better], owner[better] = top[better], own[at[better]]
    return _ClosestTexts(encoder.calibrate(best), owner)


def _find_last_row(table: VectorTable, others: Mask) -> int:
    """Return the end of the rows of the last of the others."""
    positions = np.flatnonzero(others)
    return int(table.starts[positions[-1]] + table.counts[positions[-1]]) if len(positions) else 0


def _mean_cosine(rows: Vectors) -> float:
    """Return the mean cosine of pairs of different rows."""
    total, count = rows.sum(0), len(rows)
    return float((total @ total - count) / (count * (count - 1)))


VETTING_BATCH = 128
"""How many packages are vetted between two writes."""


def open_suspicions(index: RoutingIndex) -> SuspicionStore:
    """Return the verdicts stored next to an index."""
    return SuspicionStore(index.folder / SUSPICIONS_FILE)


NO_EXPERTS: frozenset[Digest] = frozenset()


def vet_experts(
    experts: ManifestsByDigest, index: RoutingIndex, *, own: Collection[Digest] = NO_EXPERTS
) -> dict[Digest, tuple[Flag, ...]]:
    """Vet the experts not vetted yet, and store the verdicts; return the flags of all.

    ``experts`` are in order of installation; ``own`` are those of the user, which get no flags.

    Raises:
        StoreError: when the verdicts cannot be written.
        DiskFullError: when there is no space left.
    """
    suspicions = open_suspicions(index)
    known = suspicions.find_verdicts(experts)
    current = {
        d: v.flags for d, v in known.items() if v.rules == RULES_VERSION and not _became_own(v, own)
    }
    new = {digest: m for digest, m in experts.items() if digest not in current}
    if not new:
        return current
    vetting = VettingRound(suspicions, index, pending=new, own=own)
    left = iter(new.items())
    while batch := dict(islice(left, VETTING_BATCH)):
        verdicts = vetting.vet_batch(batch)
        suspicions.add(verdicts)
        current |= {verdict.content_digest: verdict.flags for verdict in verdicts}
    return current


def _became_own(verdict: PackageVerdict, own: Collection[Digest]) -> bool:
    """Tell whether a package was flagged before its signer's key became the user's own."""
    return bool(verdict.flags) and verdict.content_digest in own


def preview_flags(
    manifest: Manifest,
    index: RoutingIndex,
    *,
    own: Collection[Digest] = NO_EXPERTS,
    among: Collection[Digest] | None = None,
) -> tuple[Flag, ...]:
    """Return the flags that a package would get if somebody else installed it; nothing is stored.

    It is not compared with the user's own packages, which others do not have, and with ``among``
    only with those: the index also has the vectors of files that were run or measured, such as an
    earlier build of the same package.
    """
    suspicions = open_suspicions(index)
    names = {verdict.name for verdict in suspicions.find_verdicts(own).values()}
    vetting = VettingRound(suspicions, index, pending={})
    vetting.others[index.find_positions(own)] = False
    if among is not None:
        compared = np.zeros_like(vetting.others)
        compared[index.find_positions(among)] = True
        vetting.others &= compared
    return vetting.vet_unindexed(manifest, _KnownWithout(suspicions, names))


def revet_experts(
    experts: ManifestsByDigest, index: RoutingIndex, *, own: Collection[Digest] = NO_EXPERTS
) -> dict[Digest, tuple[Flag, ...]]:
    """Forget all other verdicts, and vet again the flagged and unvetted ones of these.

    Raises as `vet_experts`.
    """
    suspicions = open_suspicions(index)
    known = suspicions.find_verdicts(experts)
    clean = [digest for digest, verdict in known.items() if not verdict.flags]
    suspicions.retain(clean, {manifest.name for manifest in experts.values()})
    return vet_experts(experts, index, own=own)


@dataclass(frozen=True, slots=True)
class _CombinedKnown:
    """The stored packages and those of a batch; the stored ones take precedence."""

    record: KnownPackages
    batch: KnownPackages

    def find_owners(self, marks: Collection[int]) -> Mapping[int, str]:
        return {**self.batch.find_owners(marks), **self.record.find_owners(marks)}

    def find_names(self, names: Collection[str]) -> Mapping[str, str]:
        return {**self.batch.find_names(names), **self.record.find_names(names)}


@dataclass(frozen=True, slots=True)
class _KnownWithout:
    """The stored packages except some."""

    record: KnownPackages
    names: Collection[str]

    def find_owners(self, marks: Collection[int]) -> Mapping[int, str]:
        found = self.record.find_owners(marks)
        return {mark: name for mark, name in found.items() if name not in self.names}

    def find_names(self, names: Collection[str]) -> Mapping[str, str]:
        found = self.record.find_names(names)
        return {name: package for name, package in found.items() if package not in self.names}


class VettingRound:
    """One round of vetting, with the packages that may have been copied from so far."""

    def __init__(
        self,
        suspicions: SuspicionStore,
        index: RoutingIndex,
        *,
        pending: ManifestsByDigest,
        own: Collection[Digest] = NO_EXPERTS,
    ) -> None:
        """Start a round; a pending package counts once it is vetted, a flagged one never."""
        self.suspicions = suspicions
        self.index = index
        self.own = own
        self.names = {digest: manifest.name for digest, manifest in pending.items()}
        self.pending: dict[str, list[Digest]] = {}
        for digest, manifest in pending.items():
            self.pending.setdefault(manifest.package.namespace, []).append(digest)
        self.others: Mask = index.table.alive.copy()
        self.others[index.find_positions([*pending, *suspicions.read_flagged()])] = False

    def vet_batch(self, batch: ManifestsByDigest) -> list[PackageVerdict]:
        """Vet packages in order, each against those before it."""
        seen = SeenManifests()
        known = _CombinedKnown(self.suspicions, seen)
        return [self._vet_expert(digest, m, known, seen) for digest, m in batch.items()]

    def _vet_expert(
        self,
        digest: Digest,
        manifest: Manifest,
        known: KnownPackages,
        batch_manifests: SeenManifests,
    ) -> PackageVerdict:
        found = (*find_flags(manifest, known), *self._check_indexed(digest, manifest))
        if not found:
            batch_manifests.add(manifest)
            self.others[self.index.find_positions([digest])] = True
        elif digest in self.own:  # even so, its texts do not count against later ones
            return PackageVerdict(digest, manifest.name, (), RULES_VERSION)
        return PackageVerdict(
            digest, manifest.name, found, RULES_VERSION, fingerprint_manifest(manifest)
        )

    def vet_unindexed(self, manifest: Manifest, known: KnownPackages) -> tuple[Flag, ...]:
        """Vet a package that has no vectors in the index."""
        examples = manifest.routing.examples
        if len(examples) < MIN_COMPARED_EXAMPLES:
            return find_flags(manifest, known)
        rows = self.index.encoder.encode([manifest.description, *examples])
        return (*find_flags(manifest, known), *self._check_rows(rows, manifest))

    def _check_indexed(self, digest: Digest, manifest: Manifest) -> tuple[Flag, ...]:
        """Compare the vectors of a package with those of other publishers."""
        table, position = self.index.table, self.index.find_positions([digest])
        if not len(position):
            return ()
        return self._check_rows(table.rows[table.select_rows(position)], manifest)

    def _check_rows(self, rows: Vectors, manifest: Manifest) -> tuple[Flag, ...]:
        return tuple(
            find_near_duplicates(
                self.index.table,
                PackageRows(rows[0], rows[1 : 1 + len(manifest.routing.examples)]),
                others=self._mask_foreign(manifest),
                name=self._find_name,
                encoder=self.index.encoder,
            )
        )

    def _mask_foreign(self, manifest: Manifest) -> Mask:
        """Return the other packages without those of the same publisher."""
        namespace = manifest.package.namespace
        own = [
            *self.pending.get(namespace, ()),
            *self.suspicions.list_namespace_contents(namespace),
        ]
        foreign = self.others.copy()
        foreign[self.index.find_positions(own)] = False
        return foreign

    def _find_name(self, position: int) -> str:
        digest = self.index.table.digest_at(position)
        known = self.suspicions.find_verdicts([digest])
        return self.names.get(digest) or (known[digest].name if known else str(digest))
