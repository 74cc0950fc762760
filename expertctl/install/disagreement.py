"""Requirements, and what to say when they cannot all be met."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from expertctl.errors import (
    ConflictError,
    ExpertError,
    IncompatibleError,
    MissingDependencyError,
    NotFoundError,
    RevokedError,
)
from expertctl.install.candidate import Candidate
from expertctl.install.release_age import ReleaseAge, shown
from expertctl.reference import PackageName, Reference
from expertctl.store.ref import LOCAL

_SHOWN = 8
_CHAIN = 6


@dataclass(frozen=True, slots=True)
class Need:
    """A wish for, or a refusal of, some versions of a package, by the user or an expert."""

    wanted: Reference
    by: str
    """``you``, a file's name, or the ref of an expert."""
    asker: PackageName | None = None
    """The package that needs it; None when the user does."""
    home: str | None = None
    """Where to look for it when it names no registry: that of its asker's own namespace."""
    refused: bool = False
    by_hand: bool = False
    """Whether the user typed it."""

    @classmethod
    def of(
        cls,
        by: str,
        wanted: Reference,
        *,
        asker: PackageName,
        home: str,
        refused: bool = False,
    ) -> "Need":
        """Return what an expert of a registry requires or refuses."""
        near = wanted.package.namespace == asker.namespace and home != LOCAL
        return cls(wanted, by, asker, home if near else None, refused)

    @property
    def package(self) -> PackageName:
        """The package that it is about."""
        return self.wanted.package

    @property
    def from_person(self) -> bool:
        """Whether the user asks, not an expert."""
        return self.asker is None

    @property
    def names_one_version(self) -> bool:
        """Whether one version is spelled out, by its number or a digest."""
        return self.wanted.constraint.pinned is not None or self.wanted.digest is not None

    def is_met_by(self, candidate: Candidate) -> bool:
        """Tell whether a candidate is what is wanted, or is none of what is refused."""
        return candidate.fits(self.wanted) != self.refused

    def __str__(self) -> str:
        """Return it as a clause."""
        verb = "refuses" if self.refused else "asks" if self.from_person else "requires"
        verb = "ask" if self.by == "you" else verb
        return f"{self.by} {verb} {self.wanted}"


@dataclass(frozen=True, slots=True)
class Offer:
    """What a registry has of one package, oldest first, or why it has nothing."""

    candidates: tuple[Candidate, ...]
    reason: str = ""
    way_out: str = ""
    age: ReleaseAge = field(default_factory=ReleaseAge)


class Asked(Protocol):
    """What the search remembers: which needs there were, and what was on offer."""

    asked: dict[PackageName, list[Need]]

    def offer(self, package: PackageName) -> Offer:
        """Return what is known of a package."""


def disagreement(causes: Iterable[Need], search: Asked) -> ExpertError:
    """Return the error that says which requirements cannot be met together."""
    by_package: dict[PackageName, list[Need]] = {}
    for need in dict.fromkeys(causes):
        by_package.setdefault(need.package, []).append(need)
    wanted = {p: needs for p, needs in by_package.items() if any(not n.refused for n in needs)}
    package, needs = max((wanted or by_package).items(), key=lambda item: len(item[1]))
    offer = search.offer(package)
    if len({need.wanted.registry for need in needs} - {None}) > 1:
        clauses = _joined([_clause(need, search) for need in needs])
        return ConflictError(f"{clauses}: two registries are never mixed", hint=_hint(offer, needs))
    if not offer.candidates:
        return _missing(package, needs, offer, search)
    lines = [_clause(need, search) for need in needs]
    others = [f"; {_told(p, n, search)}" for p, n in by_package.items() if p != package]
    message = f"{_joined(lines)}; {_versions(offer)}{''.join(others[:2])}"
    return _error(needs, offer)(message, hint=_hint(offer, needs))


def _told(package: PackageName, needs: Sequence[Need], search: Asked) -> str:
    return f"{_joined([_clause(n, search) for n in needs])}; {_versions(search.offer(package))}"


def _error(needs: Sequence[Need], offer: Offer) -> type[ExpertError]:
    meant = [c for c in offer.candidates if all(need.is_met_by(c) for need in needs)]
    if meant and all(candidate.revoked for candidate in meant):
        return RevokedError
    if len(needs) > 1:
        return ConflictError
    return NotFoundError if needs[0].from_person else IncompatibleError


def _missing(
    package: PackageName, needs: Sequence[Need], offer: Offer, search: Asked
) -> ExpertError:
    asked = [need for need in needs if need.from_person]
    why = f": {offer.reason}" if offer.reason else ""
    if asked:
        file = "give its .expert file to the same `expertctl install`"
        hint = f"{offer.way_out}; or {file}" if offer.way_out else f"check the name, or {file}"
        return NotFoundError(f"{asked[0].wanted} is not there{why}", hint=hint)
    hint = f"get {package} and give its file to the same `expertctl install`"
    clauses = _joined([_clause(need, search) for need in needs])
    return MissingDependencyError(f"{clauses}, which is not installed{why}", hint=hint)


def _clause(need: Need, search: Asked) -> str:
    """Return a need with the chain that led to it, from what the user asked for down."""
    links = [str(need)]
    seen = {need.package}
    while need.asker is not None and need.asker not in seen and len(links) < _CHAIN:
        seen.add(need.asker)
        above = [n for n in search.asked.get(need.asker, []) if not n.refused]
        if not above or above[0].from_person:
            break
        need = above[0]
        links.append(str(need))
    return ", ".join(reversed(links))


def _joined(clauses: Sequence[str]) -> str:
    if len(clauses) < 3:
        return ", but ".join(clauses)
    return ", ".join(clauses[:-1]) + f", but {clauses[-1]}"


def _versions(offer: Offer) -> str:
    refs = {c.version: c for c in offer.candidates}
    newest = sorted(refs, reverse=True)[:_SHOWN]
    shown_versions = ", ".join(str(v) for v in sorted(newest))
    more = f"{len(refs) - len(newest)} older and " if len(refs) > len(newest) else ""
    verb = "is" if len(refs) == 1 else "are"
    notes = [note for v in newest if (note := _note(refs[v], offer.age))]
    return f"there {verb} {more}{shown_versions}" + "".join(f" ({note})" for note in notes[:3])


def _note(candidate: Candidate, age: ReleaseAge) -> str:
    """Return why a version is not taken by itself; empty when it may be."""
    if candidate.yanked is not None:
        return f"{candidate.version} was yanked" + (
            f": {candidate.yanked}" * bool(candidate.yanked)
        )
    if candidate.revoked:
        return f"the key of {candidate.version} was revoked"
    ripe = age.ripe_at(candidate)
    if ripe is not None:
        return f"{candidate.version} waits until {shown(ripe)}"
    return ""


def _hint(offer: Offer, needs: Sequence[Need]) -> str:
    if any(offer.age.ripe_at(c) for c in offer.candidates):
        return "wait, or name it in the setting minimum_release_age_exclude if you know it"
    if len(needs) > 1:
        return "change one of these requirements; several versions may be installed one by one"
    sound = [c for c in offer.candidates if c.yanked is None and not c.revoked]
    if any(c.version.prerelease for c in sound):
        return "a prerelease must be named, such as @1.0.0-rc.1"
    return _withdrawn_hint(offer) or "ask for a version that is there"


def _withdrawn_hint(offer: Offer) -> str:
    """Say how to go on where no version may be chosen; empty where one may be."""
    usable = [c for c in offer.candidates if not c.revoked]
    if not usable:
        return (
            "every version was signed with a key that was revoked: ask its publisher for one that "
            "is signed with another key"
        )
    if any(candidate.yanked is None for candidate in usable):
        return ""
    newest = max(usable, key=lambda candidate: candidate.version)
    others = ", or its key was revoked" if len(usable) < len(offer.candidates) else ""
    return (
        f"every version was yanked{others}: ask its publisher for another; one that was yanked "
        f"comes only with its exact number, `expertctl install {newest.ref}`"
    )
