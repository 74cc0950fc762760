"""Candidates for an install, the requirements on them, and the explanation of a conflict.

An `InstallCandidate` is one version of one package from any source. `ReleaseAge` is the minimum age
of a published version before it is taken, which gives others time to inspect it; a version that is
locked, installed already or named by its digest need not have that age.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal, Protocol

from expertctl.digest import Digest
from expertctl.errors import (
    ConflictError,
    ExpertError,
    IncompatibleError,
    MissingDependencyError,
    NotFoundError,
    RevokedError,
)
from expertctl.package.read import PackageContents
from expertctl.reference import PackageName, Reference, Version
from expertctl.registry.index_document import IndexDocument, Release, SignedForm
from expertctl.store.refs import LOCAL, StoredExpert

SignerVerdict = Literal["trusted", "unknown", "revoked"]
JudgeSigner = Callable[[Release, SignedForm], SignerVerdict]
"""Returns how far the key that signed a form is trusted here."""


@dataclass(frozen=True, slots=True)
class InstallCandidate:
    """One version: what it requires and refuses, and its digests."""

    package: PackageName
    version: Version
    registry: str
    content_digest: Digest
    package_digests: tuple[Digest, ...]
    """Of its signed forms; the first is the default: the newest one of a trusted key."""
    requires: tuple[Reference, ...] = ()
    conflicts: tuple[Reference, ...] = ()
    base: str = ""
    """The name of the base that it was made for."""
    size: int = 0
    published: datetime | None = None
    yanked: str | None = None
    """Why it was yanked; None when it was not."""
    revoked: bool = False
    """Whether every key that signed it was revoked."""
    is_local: bool = False
    """Whether its bytes are on this machine: installed, or in a file that the user named."""

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return f"{self.package}@{self.version}"

    @property
    def package_digest(self) -> Digest:
        """The digest of the form that is taken where none is named."""
        return self.package_digests[0]

    def satisfies(self, wanted: Reference) -> bool:
        """Tell whether this is what a reference asks for."""
        return (
            self.package == wanted.package
            and wanted.registry in {None, self.registry}
            and wanted.allows(self.version, self.content_digest, *self.package_digests)
        )

    @property
    def contradicts_itself(self) -> bool:
        """Whether it requires another version of its own package, which can never be met."""
        own = [wanted for wanted in self.requires if wanted.package == self.package]
        return not all(wanted.allows(self.version) for wanted in own)


def candidates_from_index(
    index: IndexDocument, registry: str, judge: JudgeSigner
) -> list[InstallCandidate]:
    """Return the versions of an index, in its order."""
    return [
        _candidate_from_release(index.package, release, registry, judge)
        for release in index.releases
    ]


def candidate_from_expert(expert: StoredExpert, *, yanked: str | None = None) -> InstallCandidate:
    """Return an installed expert as a candidate; ``yanked`` says why it was yanked."""
    return InstallCandidate(
        package=expert.package,
        version=expert.version,
        registry=expert.registry,
        content_digest=expert.content_digest,
        package_digests=(expert.package_digest,),
        requires=_parse_references(expert.requires),
        conflicts=_parse_references(expert.conflicts),
        base=expert.base.name,
        size=expert.size,
        yanked=yanked,
        is_local=True,
    )


def candidate_from_file(contents: PackageContents) -> InstallCandidate:
    """Return the package in a file as a candidate."""
    manifest = contents.manifest
    return InstallCandidate(
        package=manifest.package,
        version=manifest.semver,
        registry=LOCAL,
        content_digest=contents.content_digest,
        package_digests=(contents.package_digest,),
        requires=_parse_references(manifest.composition.requires),
        conflicts=_parse_references(manifest.composition.conflicts),
        base=manifest.base.name,
        size=contents.size,
        is_local=True,
    )


def _candidate_from_release(
    package: PackageName, release: Release, registry: str, judge: JudgeSigner
) -> InstallCandidate:
    verdicts = {form: judge(release, form) for form in reversed(release.forms)}
    good = [form for form, verdict in verdicts.items() if verdict == "trusted"]
    rest = [form for form in verdicts if form not in good]
    return InstallCandidate(
        package=package,
        version=release.version,
        registry=registry,
        content_digest=release.content_digest,
        package_digests=tuple(form.package_digest for form in (*good, *rest)),
        requires=_parse_references(release.requires),
        conflicts=_parse_references(release.conflicts),
        base=release.base.name,
        size=release.size,
        published=release.published_at,
        yanked=release.yanked,
        revoked=set(verdicts.values()) == {"revoked"},
    )


def _parse_references(texts: Sequence[str]) -> tuple[Reference, ...]:
    return tuple(Reference.parse(text) for text in texts)


@dataclass(frozen=True, slots=True)
class ReleaseAge:
    """The minimum age, and the packages exempt from it; ``now`` is when the command began."""

    minimum: timedelta = timedelta()
    exclude: tuple[str, ...] = ()
    """Namespaces, and names of packages."""
    now: datetime = datetime(9999, 1, 1, tzinfo=UTC)

    @classmethod
    def from_now(cls, minimum: timedelta | None, exclude: Iterable[str]) -> "ReleaseAge":
        """Return the rule as of this moment."""
        return cls(minimum or timedelta(), tuple(exclude), datetime.now(UTC))

    def allowed_at(self, candidate: InstallCandidate) -> datetime | None:
        """Return when a version that is too young may be taken; None when it may be now."""
        names = {candidate.package.namespace, str(candidate.package)}
        if candidate.published is None or names & set(self.exclude) or not self.minimum:
            return None
        ripe = candidate.published + self.minimum
        return ripe if ripe > self.now else None


def format_moment(moment: datetime) -> str:
    """Return a time as messages show it."""
    return moment.strftime("%Y-%m-%d %H:%M UTC")


_MAX_VERSIONS = 8
_MAX_CHAIN = 6


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement for, or a refusal of, some versions of a package, by the user or an expert."""

    wanted: Reference
    source: str
    """``you``, a file's name, or the ref of an expert."""
    requirer: PackageName | None = None
    """The package that requires it; None when the user does."""
    default_registry: str | None = None
    """Where to look for it when it names no registry: that of the requirer's own namespace."""
    refused: bool = False
    by_hand: bool = False
    """Whether the user typed it."""

    @classmethod
    def from_expert(
        cls,
        source: str,
        wanted: Reference,
        *,
        requirer: PackageName,
        registry: str,
        refused: bool = False,
    ) -> "Requirement":
        """Return what an expert from a registry requires or refuses."""
        near = wanted.package.namespace == requirer.namespace and registry != LOCAL
        return cls(wanted, source, requirer, registry if near else None, refused)

    @property
    def package(self) -> PackageName:
        """The package that it is about."""
        return self.wanted.package

    @property
    def is_from_user(self) -> bool:
        """Whether the user asks, not an expert."""
        return self.requirer is None

    @property
    def names_one_version(self) -> bool:
        """Whether it names exactly one version, by its number or a digest."""
        return self.wanted.constraint.pinned is not None or self.wanted.digest is not None

    def is_met_by(self, candidate: InstallCandidate) -> bool:
        """Tell whether a candidate satisfies it, or is none of the refused versions."""
        return candidate.satisfies(self.wanted) != self.refused

    def __str__(self) -> str:
        """Return it as a clause."""
        verb = "refuses" if self.refused else "asks" if self.is_from_user else "requires"
        verb = "ask" if self.source == "you" else verb
        return f"{self.source} {verb} {self.wanted}"


@dataclass(frozen=True, slots=True)
class Availability:
    """The versions of one package, oldest first, or why there are none."""

    candidates: tuple[InstallCandidate, ...]
    reason: str = ""
    hint: str = ""
    age: ReleaseAge = field(default_factory=ReleaseAge)


class ResolverState(Protocol):
    """The state of the search: the requirements so far, and the versions that were found."""

    asked: dict[PackageName, list[Requirement]]

    def find_availability(self, package: PackageName) -> Availability:
        """Return what is known of a package."""


def explain_conflict(causes: Iterable[Requirement], search: ResolverState) -> ExpertError:
    """Return the error that says which requirements cannot be met together."""
    by_package: dict[PackageName, list[Requirement]] = {}
    for need in dict.fromkeys(causes):
        by_package.setdefault(need.package, []).append(need)
    wanted = {p: needs for p, needs in by_package.items() if any(not n.refused for n in needs)}
    package, needs = max((wanted or by_package).items(), key=lambda item: len(item[1]))
    offer = search.find_availability(package)
    if len({need.wanted.registry for need in needs} - {None}) > 1:
        clauses = _join_clauses([_describe_chain(need, search) for need in needs])
        return ConflictError(
            f"{clauses}: two registries are never mixed", hint=_conflict_hint(offer, needs)
        )
    if not offer.candidates:
        return _missing_error(package, needs, offer, search)
    lines = [_describe_chain(need, search) for need in needs]
    others = [
        f"; {_describe_requirements(p, n, search)}" for p, n in by_package.items() if p != package
    ]
    message = f"{_join_clauses(lines)}; {_describe_versions(offer)}{''.join(others[:2])}"
    return _conflict_type(needs, offer)(message, hint=_conflict_hint(offer, needs))


def _describe_requirements(
    package: PackageName, requirements: Sequence[Requirement], search: ResolverState
) -> str:
    clauses = _join_clauses([_describe_chain(need, search) for need in requirements])
    return f"{clauses}; {_describe_versions(search.find_availability(package))}"


def _conflict_type(requirements: Sequence[Requirement], offer: Availability) -> type[ExpertError]:
    meant = [c for c in offer.candidates if all(need.is_met_by(c) for need in requirements)]
    if meant and all(candidate.revoked for candidate in meant):
        return RevokedError
    if len(requirements) > 1:
        return ConflictError
    return NotFoundError if requirements[0].is_from_user else IncompatibleError


def _missing_error(
    package: PackageName,
    requirements: Sequence[Requirement],
    offer: Availability,
    search: ResolverState,
) -> ExpertError:
    by_user = [need for need in requirements if need.is_from_user]
    reason = offer.reason.removeprefix(f"{package}: ")
    why = f": {reason}" if reason else ""
    if by_user:
        file = "give its .expert file to the same `expertctl install`"
        hint = f"{offer.hint}; or {file}" if offer.hint else f"check the name, or {file}"
        return NotFoundError(f"{by_user[0].wanted} is not there{why}", hint=hint)
    hint = f"get {package} and give its file to the same `expertctl install`"
    clauses = _join_clauses([_describe_chain(need, search) for need in requirements])
    return MissingDependencyError(f"{clauses}, which is not installed{why}", hint=hint)


def _describe_chain(requirement: Requirement, search: ResolverState) -> str:
    """Return a requirement with the chain that led to it, from the user's own downwards."""
    links = [str(requirement)]
    seen = {requirement.package}
    while (
        requirement.requirer is not None
        and requirement.requirer not in seen
        and len(links) < _MAX_CHAIN
    ):
        seen.add(requirement.requirer)
        above = [n for n in search.asked.get(requirement.requirer, []) if not n.refused]
        if not above or above[0].is_from_user:
            break
        requirement = above[0]
        links.append(str(requirement))
    return ", ".join(reversed(links))


def _join_clauses(clauses: Sequence[str]) -> str:
    if len(clauses) < 3:
        return ", but ".join(clauses)
    return ", ".join(clauses[:-1]) + f", but {clauses[-1]}"


def _describe_versions(offer: Availability) -> str:
    refs = {c.version: c for c in offer.candidates}
    newest = sorted(refs, reverse=True)[:_MAX_VERSIONS]
    shown_versions = ", ".join(str(v) for v in sorted(newest))
    more = f"{len(refs) - len(newest)} older and " if len(refs) > len(newest) else ""
    verb = "is" if len(refs) == 1 else "are"
    notes = [note for v in newest if (note := _version_note(refs[v], offer.age))]
    return f"there {verb} {more}{shown_versions}" + "".join(f" ({note})" for note in notes[:3])


def _version_note(candidate: InstallCandidate, age: ReleaseAge) -> str:
    """Return why a version is not taken by default; empty when it may be."""
    if candidate.yanked is not None:
        return f"{candidate.version} was yanked" + (candidate.yanked and f": {candidate.yanked}")
    if candidate.revoked:
        return f"the key of {candidate.version} was revoked"
    ripe = age.allowed_at(candidate)
    if ripe is not None:
        return f"{candidate.version} waits until {format_moment(ripe)}"
    return ""


def _conflict_hint(offer: Availability, requirements: Sequence[Requirement]) -> str:
    if any(offer.age.allowed_at(c) for c in offer.candidates):
        return "wait, or name it in the setting minimum_release_age_exclude if you know it"
    if len(requirements) > 1:
        return "change one of these requirements; several versions may be installed one by one"
    sound = [c for c in offer.candidates if c.yanked is None and not c.revoked]
    if any(c.version.prerelease for c in sound):
        return "a prerelease must be named, such as @1.0.0-rc.1"
    return _no_choice_hint(offer) or "ask for a version that is there"


def _no_choice_hint(offer: Availability) -> str:
    """Return the way out where no version may be chosen; empty where one may be."""
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
