"""What experts say of each other: which require and which exclude others. No I/O."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from expertctl.errors import ConflictError, MissingDependencyError
from expertctl.reference import PackageName, Reference, Version
from expertctl.store.ref import LOCAL, StoredExpert


@dataclass(frozen=True, slots=True)
class Claims:
    """What one expert, installed or about to be installed, says of others."""

    package: PackageName
    version: Version
    requires: tuple[Reference, ...]
    conflicts: tuple[Reference, ...]
    registry: str = LOCAL

    @classmethod
    def of(cls, expert: StoredExpert) -> "Claims":
        """Return the claims of an installed expert."""
        return cls(
            expert.package,
            expert.version,
            tuple(Reference.parse(text) for text in expert.requires),
            tuple(Reference.parse(text) for text in expert.conflicts),
            expert.registry,
        )

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return f"{self.package}@{self.version}"

    def fits(self, wanted: Reference) -> bool:
        """Tell whether this is what a reference asks for."""
        return (
            self.package == wanted.package
            and wanted.registry in {None, self.registry}
            and wanted.allows(self.version)
        )


def check_requirements(new: Sequence[Claims], installed: Iterable[Claims]) -> None:
    """Demand that all that the new experts require is installed or among them.

    Raises:
        MissingDependencyError: naming everything that is missing.
    """
    there = [*new, *installed]
    missing = [
        (claims.ref, wanted)
        for claims in new
        for wanted in claims.requires
        if not any(other.fits(wanted) for other in there)
    ]
    if missing:
        lines = "; ".join(f"{ref} requires {wanted}" for ref, wanted in missing)
        names = " ".join(dict.fromkeys(str(wanted) for _, wanted in missing))
        hint = f"get {names} and give its file to the same `expertctl install`"
        raise MissingDependencyError(f"{lines}, which is not installed", hint=hint)


def check_conflicts(new: Sequence[Claims], installed: Iterable[Claims]) -> None:
    """Demand that no expert refuses another, in either direction.

    Raises:
        ConflictError: naming every pair.
    """
    refs = {claims.ref for claims in new}
    others = [claims for claims in installed if claims.ref not in refs]
    pairs = [(a, b) for a, b in permutations([*new, *others], 2) if a.ref in refs or b.ref in refs]
    found = [f"{a.ref} conflicts with {b.ref}" for a, b in pairs if any(map(b.fits, a.conflicts))]
    if found:
        hint = "`expertctl remove` the one that you need less, or install the other alone"
        raise ConflictError("; ".join(found), hint=hint)


def in_order(new: Sequence[Claims]) -> list[Claims]:
    """Return the new experts in an order in which each follows what it requires, cycles aside."""
    ordered: list[Claims] = []
    seen: set[str] = set()

    def visit(claims: Claims) -> None:
        if claims.ref in seen:
            return
        seen.add(claims.ref)
        for wanted in claims.requires:
            for other in filter(lambda c: c.fits(wanted), new):
                visit(other)
        ordered.append(claims)

    for claims in new:
        visit(claims)
    return ordered


def with_requirements(
    wanted: Sequence[StoredExpert], installed: Sequence[StoredExpert]
) -> list[StoredExpert]:
    """Return experts and all that they require, of each the newest version that fits.

    Raises:
        MissingDependencyError: when something that one requires is not installed.
    """
    chosen = list(dict.fromkeys(wanted))
    for expert in chosen:  # grows while it is walked
        for needed in Claims.of(expert).requires:
            if not any(Claims.of(other).fits(needed) for other in chosen):
                chosen.append(_newest(needed, installed, of=expert))
    return chosen


def _newest(
    needed: Reference, installed: Sequence[StoredExpert], *, of: StoredExpert
) -> StoredExpert:
    found = [expert for expert in installed if Claims.of(expert).fits(needed)]
    if not found:
        hint = f"install it first, or `expertctl remove {of.ref}`"
        raise MissingDependencyError(
            f"{of.ref} requires {needed}, which is not installed", hint=hint
        )
    return max(found, key=lambda expert: expert.version)


def dependants(expert: StoredExpert, installed: Iterable[StoredExpert]) -> list[str]:
    """Return the refs that would miss an expert: they require it, and nothing else fits."""
    rest = [Claims.of(other) for other in installed if other != expert]
    own = Claims.of(expert)
    return [
        claims.ref
        for claims in rest
        if any(own.fits(w) and not any(o.fits(w) for o in rest) for w in claims.requires)
    ]


def missing_requirements(installed: Iterable[StoredExpert]) -> Mapping[str, list[str]]:
    """Return, for each ref, what it requires and does not find."""
    claims = [Claims.of(expert) for expert in installed]
    missing = {
        c.ref: [str(w) for w in c.requires if not any(o.fits(w) for o in claims)] for c in claims
    }
    return {ref: wanted for ref, wanted in missing.items() if wanted}
