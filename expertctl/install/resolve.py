"""From what is asked for to one version of each package: `resolvelib` over what indexes offer.

One version per package in one resolution; older ones may stay installed beside it. What is locked
is preferred, then, where nobody asked for it by name, what is installed, then the newest version
that is not yanked and has its least age. A yanked version is taken only when it is locked or named
exactly by a person; a prerelease only when a constraint names it. Requirements may form a cycle.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from resolvelib import AbstractProvider, BaseReporter
from resolvelib.resolvers import (
    RequirementInformation,
    Resolution,
    ResolutionImpossible,
    ResolutionTooDeep,
)

from expertctl.digest import Digest
from expertctl.errors import IncompatibleError, NotFoundError, OfflineError
from expertctl.install.candidate import Candidate
from expertctl.install.disagreement import Need, Offer, disagreement
from expertctl.install.release_age import ReleaseAge
from expertctl.reference import Constraint, PackageName, Reference, Version

MAX_ROUNDS = 2_000
MAX_PACKAGES = 300
"""More than any real set of experts; each costs a request."""

Index = Callable[[Reference, bool], Sequence[Candidate]]
"""Asks for all versions of a package; its registry, if one is named, was named by a person, or not
(by a package or a project file)."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A version that a lock file names."""

    version: Version
    content_digest: Digest

    def is_met_by(self, candidate: Candidate) -> bool:
        """Tell whether a candidate is that very content."""
        return (candidate.version, candidate.content_digest) == (self.version, self.content_digest)


@dataclass(frozen=True, slots=True)
class Universe:
    """All that there is to choose from, and what is preferred."""

    index: Index
    given: Sequence[Candidate] = ()
    """Installed experts."""
    files: Sequence[Candidate] = ()
    """From files that the person named: of their names, nothing else counts."""
    locked: Mapping[PackageName, Pin] = field(default_factory=dict)
    age: ReleaseAge = field(default_factory=ReleaseAge)


@dataclass(frozen=True, slots=True)
class Chosen:
    """One version of the resolution, and why it is in it."""

    candidate: Candidate
    needs: tuple[Need, ...]

    @property
    def package_digest(self) -> Digest:
        """The signed form that was named, else the newest."""
        named = {need.wanted.digest for need in self.needs}
        digests = self.candidate.package_digests
        return next((digest for digest in digests if digest in named), digests[0])


@dataclass(frozen=True, slots=True)
class _Absent:
    """The choice not to have a package, which those that only refuse it are content with."""

    package: PackageName


_Choice = Candidate | _Absent


def resolve(needs: Sequence[Need], universe: Universe) -> list[Chosen]:
    """Choose one version of every package that is needed, sorted by name.

    Raises:
        NotFoundError: when something that is asked for is nowhere.
        MissingDependencyError: when only something that is required is nowhere.
        ConflictError: when the requirements disagree.
        IncompatibleError: when no answer was found within the bounds.
    """
    provider = _Provider(needs, universe)
    search: Resolution[Need, _Choice, PackageName] = Resolution(provider, BaseReporter())
    try:
        found = search.resolve(needs, max_rounds=MAX_ROUNDS)
    except ResolutionImpossible as error:
        raise disagreement([cause.requirement for cause in error.causes], provider) from error
    except ResolutionTooDeep as error:
        raise _too_deep(f"no answer within {MAX_ROUNDS:,} steps") from error
    return _reached(needs, found.mapping)


def _too_deep(what: str) -> IncompatibleError:
    hint = "name exact versions of some of them, such as acme/sql@1.2.0"
    return IncompatibleError(f"the requirements are too tangled: {what}", hint=hint)


def _reached(needs: Sequence[Need], mapping: Mapping[PackageName, _Choice]) -> list[Chosen]:
    """Return what is needed, directly or by what is; what is only refused falls away."""
    reasons: dict[PackageName, list[Need]] = {}
    waiting = list(needs)
    for need in waiting:  # grows while it is walked
        choice = mapping.get(need.package)
        if need.refused or not isinstance(choice, Candidate):
            continue
        if need.package not in reasons:
            waiting += needs_of(choice)
        reasons.setdefault(need.package, []).append(need)
    chosen = [(mapping[package], tuple(found)) for package, found in sorted(reasons.items())]
    return [Chosen(c, found) for c, found in chosen if isinstance(c, Candidate)]


def needs_of(candidate: Candidate) -> list[Need]:
    """Return what a candidate requires and refuses; its own name aside."""
    home = candidate.registry
    required = [Need.of(candidate.ref, r, asker=candidate.package, home=home)
                for r in candidate.requires if r.package != candidate.package]  # fmt: skip
    refused = [Need.of(candidate.ref, r, asker=candidate.package, home=home, refused=True)
               for r in candidate.conflicts if r.package != candidate.package]  # fmt: skip
    return [*required, *refused]


def _itself(candidate: Candidate) -> Need:
    """Return that a choice stands by itself: to have another, the search goes back to it.

    Going back, `resolvelib` skips a choice that is part of a disagreement unless it also depends on
    a part of it, and so can miss an answer (the test against trying everything found one).
    """
    wanted = Reference(candidate.package, Constraint.exactly(candidate.version))
    return Need(wanted, candidate.ref, candidate.package)


class _Provider(AbstractProvider[Need, _Choice, PackageName]):
    """Answers the resolver's questions; asks an index once, and only when it must."""

    def __init__(self, needs: Sequence[Need], universe: Universe) -> None:
        self._universe = universe
        self._direct = {need.package for need in needs if need.from_person}
        self._published: dict[tuple[PackageName, str | None], Offer] = {}
        self._absent: dict[PackageName, _Absent] = {}
        self._dependencies: dict[Candidate, list[Need]] = {}
        self.asked: dict[PackageName, list[Need]] = {}
        """What was last asked of each package, to tell why it was wanted."""

    def identify(self, requirement_or_candidate: Need | _Choice) -> PackageName:
        return requirement_or_candidate.package

    def get_preference(
        self,
        identifier: PackageName,
        resolutions: Mapping[PackageName, _Choice],
        candidates: Mapping[PackageName, Iterator[_Choice]],
        information: Mapping[PackageName, Iterator["RequirementInformation[Need, _Choice]"]],
        backtrack_causes: Sequence["RequirementInformation[Need, _Choice]"],
    ) -> tuple[bool, bool, str]:
        needs = [item.requirement for item in information[identifier]]
        only_refused = all(need.refused for need in needs)
        return only_refused, identifier not in self._direct, str(identifier)

    def find_matches(
        self,
        identifier: PackageName,
        requirements: Mapping[PackageName, Iterator[Need]],
        incompatibilities: Mapping[PackageName, Iterator[_Choice]],
    ) -> Callable[[], Iterator[_Choice]]:
        needs = list(requirements[identifier])
        asked = [need for need in needs if need.asker != identifier]
        excluded = set(incompatibilities[identifier])
        if any(not need.refused for need in asked):
            self.asked[identifier] = asked
        return lambda: (c for c in self._choices(identifier, needs) if c not in excluded)

    def is_satisfied_by(self, requirement: Need, candidate: _Choice) -> bool:
        if isinstance(candidate, _Absent):
            return requirement.refused
        return requirement.is_met_by(candidate)

    def get_dependencies(self, candidate: _Choice) -> Iterable[Need]:
        if isinstance(candidate, _Absent):
            return []
        if candidate not in self._dependencies:
            self._dependencies[candidate] = [_itself(candidate), *needs_of(candidate)]
        return self._dependencies[candidate]

    def offer(self, package: PackageName) -> Offer:
        """Return what is known of a package, for messages; nothing is asked for now."""
        known = [offer for (name, _), offer in self._published.items() if name == package]
        here = tuple(c for c in self._here(package))
        every = tuple(c for offer in known for c in offer.candidates)
        reason = next((offer.reason for offer in known if offer.reason), "")
        return Offer((*here, *every), reason, self._universe.age)

    def _choices(self, package: PackageName, needs: Sequence[Need]) -> Iterator[_Choice]:
        real = [need for need in needs if not need.refused]
        if not real:
            yield self._absent.setdefault(package, _Absent(package))
            return
        for candidate in self._preferred(package, real):
            if all(need.is_met_by(candidate) for need in needs):
                yield candidate

    def _preferred(self, package: PackageName, needs: Sequence[Need]) -> Iterator[Candidate]:
        """Yield what may be chosen, best first, each once; the index is asked only for more."""
        seen: set[tuple[Version, Digest]] = set()
        for candidate in self._in_order(package, needs):
            key = candidate.version, candidate.content_digest
            if key not in seen and not candidate.contradicts_itself:
                seen.add(key)
                yield candidate

    def _in_order(self, package: PackageName, needs: Sequence[Need]) -> Iterator[Candidate]:
        files = [c for c in self._universe.files if c.package == package]
        if files:
            yield from files
            return
        here, pin = self._here(package), self._universe.locked.get(package)
        exact = any(n.names_one_version for n in needs if n.asker != package)
        yield from (c for c in here if pin and pin.is_met_by(c))
        if pin is None and (exact or package not in self._direct):
            yield from here
        everything = self._offered(package, needs).candidates
        yield from (c for c in everything if pin and pin.is_met_by(c))
        yield from (c for c in reversed(everything) if self._may_be_new(c, needs))
        yield from here

    def _here(self, package: PackageName) -> list[Candidate]:
        found = [c for c in self._universe.given if c.package == package]
        return sorted(found, key=lambda c: c.version, reverse=True)

    def _may_be_new(self, candidate: Candidate, needs: Sequence[Need]) -> bool:
        if any(need.wanted.digest for need in needs if need.from_person):
            return True
        named = any(need.names_one_version and need.from_person for need in needs)
        ripe = self._universe.age.ripe_at(candidate) is None
        doubtful = candidate.revoked or candidate.yanked is not None
        return ripe and (named or not doubtful)

    def _offered(self, package: PackageName, needs: Sequence[Need]) -> Offer:
        named = {need.wanted.registry for need in needs} - {None}
        homes = {need.home for need in needs} - {None}
        hosts = named or homes
        if len(hosts) > 1:
            return Offer((), f"{' and '.join(sorted(map(str, hosts)))} are two registries")
        host = next(iter(hosts), None)
        by_hand = host in {n.wanted.registry for n in needs if n.by_hand} | homes
        return self._asked_once(Reference(package, registry=host), by_hand)

    def _asked_once(self, wanted: Reference, by_hand: bool) -> Offer:
        key = wanted.package, wanted.registry
        if key not in self._published:
            if len(self._published) >= MAX_PACKAGES:
                raise _too_deep(f"more than {MAX_PACKAGES} packages")
            self._published[key] = self._ask(wanted, by_hand)
        return self._published[key]

    def _ask(self, wanted: Reference, by_hand: bool) -> Offer:
        try:
            found = self._universe.index(wanted, by_hand)
        except (NotFoundError, OfflineError) as error:
            return Offer((), error.message)
        return Offer(tuple(sorted(found, key=lambda c: c.version)))
