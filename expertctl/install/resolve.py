"""`resolve`: chooses one version of each required package, by a search with backjumping.

One version per package in one resolution; older ones may stay installed beside it. The locked
version is preferred; then, for a package that the user did not ask for by name, the installed one;
then the newest version that is not yanked and has the minimum age. A yanked version is taken only
when it is locked or named exactly by the user; a prerelease only when a constraint names it.
Requirements may form a cycle.

The search finds an answer iff there is one: a failed choice is undone together with the later ones
that have no part in the failure, and nothing is remembered beyond the choices it depended on.
`resolvelib` carries such memory over and misses answers, so it is not used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from expertctl.errors import IncompatibleError, NotFoundError, OfflineError
from expertctl.install.candidate import (
    Availability,
    InstallCandidate,
    ReleaseAge,
    Requirement,
    explain_conflict,
)
from expertctl.reference import Digest, PackageName, Reference, Version

MAX_STEPS = 5_000
"""How many versions are tried before the search gives up."""
MAX_LOOKS = 300_000
"""How often a version is checked against requirements, over all tries: some seconds."""
MAX_PACKAGES = 300
"""More than any real set of experts; each costs a request."""

IndexLookup = Callable[[Reference, bool], Sequence[InstallCandidate]]
"""Requests all versions of a package; the flag says whether a registry, if named, was named by the
user, and not by a package or a project file."""


@dataclass(frozen=True, slots=True)
class LockedVersion:
    """A version that a lock file names."""

    version: Version
    content_digest: Digest

    def is_met_by(self, candidate: InstallCandidate) -> bool:
        """Tell whether a candidate has exactly that version and content."""
        return (candidate.version, candidate.content_digest) == (self.version, self.content_digest)


@dataclass(frozen=True, slots=True)
class CandidatePool:
    """All candidates, and the preferences among them."""

    index: IndexLookup
    installed: Sequence[InstallCandidate] = ()
    """Installed experts; a yanked one is the last choice among them."""
    files: Sequence[InstallCandidate] = ()
    """From files that the user named: no other candidate of the same package counts."""
    locked: Mapping[PackageName, LockedVersion] = field(default_factory=dict)
    age: ReleaseAge = field(default_factory=ReleaseAge)
    prefer_installed: bool = True
    """Whether an installed version is good enough where the user did not ask for it by name."""


@dataclass(frozen=True, slots=True)
class ResolvedPackage:
    """One version of the resolution, and the requirements that led to it."""

    candidate: InstallCandidate
    needs: tuple[Requirement, ...]

    @property
    def package_digest(self) -> Digest:
        """The signed form that was named, else the default one."""
        named = {need.wanted.digest for need in self.needs}
        digests = self.candidate.package_digests
        return next((digest for digest in digests if digest in named), digests[0])


@dataclass(frozen=True, slots=True)
class _Conflict:
    """Why no version fits."""

    blame: frozenset[PackageName]
    """The packages of which at least one needs another choice."""
    trouble: tuple[Requirement, ...]
    """The requirements, all on one package, that cannot be met together."""


_Choices = dict[PackageName, InstallCandidate]
_Needs = dict[PackageName, tuple[Requirement, ...]]


def resolve(requirements: Sequence[Requirement], pool: CandidatePool) -> list[ResolvedPackage]:
    """Choose one version of every required package, sorted by name.

    Raises:
        NotFoundError: when a package that the user asks for is nowhere.
        MissingDependencyError: when only a package that an expert requires is nowhere.
        ConflictError: when the requirements disagree.
        IncompatibleError: when no answer was found within the limits.
    """
    search = _Search(CandidateProvider(pool, {n.package for n in requirements if n.is_from_user}))
    found = search.extend({}, _add_requirements({}, requirements))
    if isinstance(found, _Conflict):
        raise explain_conflict(found.trouble, search.provider)
    return _collect_reached(requirements, found)


def _depth_error(what: str) -> IncompatibleError:
    hint = "name exact versions of some of them, such as acme/sql@1.2.0"
    return IncompatibleError(f"the requirements are too tangled: {what}", hint=hint)


def _collect_reached(
    requirements: Sequence[Requirement], choices: _Choices
) -> list[ResolvedPackage]:
    """Return the choices with the requirements for each."""
    reasons: dict[PackageName, list[Requirement]] = {}
    for need in [*requirements, *(n for c in choices.values() for n in list_requirements(c))]:
        if not need.refused:
            reasons.setdefault(need.package, []).append(need)
    return [ResolvedPackage(choices[name], tuple(reasons[name])) for name in sorted(choices)]


def list_requirements(candidate: InstallCandidate) -> list[Requirement]:
    """Return what a candidate requires and refuses of other packages."""
    return [
        Requirement.from_expert(
            candidate.ref,
            reference,
            requirer=candidate.package,
            registry=candidate.registry,
            refused=refused,
        )
        for references, refused in ((candidate.requires, False), (candidate.conflicts, True))
        for reference in references
        if reference.package != candidate.package
    ]


def _add_requirements(requirements: _Needs, more: Sequence[Requirement]) -> _Needs:
    joined = dict(requirements)
    for need in more:
        joined[need.package] = (*joined.get(need.package, ()), need)
    return joined


class _Search:
    """Tries one version after the other, within `MAX_STEPS`."""

    def __init__(self, provider: "CandidateProvider") -> None:
        self.provider = provider
        self._steps = 0

    def extend(self, choices: _Choices, requirements: _Needs) -> _Choices | _Conflict:
        """Choose a version of every package that is still required; earlier choices stay."""
        package = self._pick_next(choices, requirements)
        if package is None:
            return choices
        blame = set(_iter_requirers(requirements[package]))
        troubles = list[tuple[Requirement, ...]]()
        for candidate in self.provider.iter_choices(package, requirements[package]):
            self._count()
            found = self._try(candidate, choices, requirements)
            if not isinstance(found, _Conflict) or package not in found.blame:
                return found
            blame |= found.blame
            troubles.append(found.trouble)
        return _Conflict(frozenset(blame - {package}), [*troubles, requirements[package]][0])

    def _try(
        self, candidate: InstallCandidate, choices: _Choices, requirements: _Needs
    ) -> _Choices | _Conflict:
        """Continue with one choice, unless its requirements clearly cannot be met."""
        more, package = list_requirements(candidate), candidate.package
        joined = _add_requirements(requirements, more)
        for need in more:
            chosen = choices.get(need.package)
            if chosen is not None and not need.is_met_by(chosen):
                return _Conflict(frozenset({need.package, package}), joined[need.package])
            if chosen is None and self._is_hopeless(need.package, joined):
                blame = frozenset(_iter_requirers(joined[need.package])) | {package}
                return _Conflict(blame, joined[need.package])
        return self.extend({**choices, package: candidate}, joined)

    def _pick_next(self, choices: _Choices, requirements: _Needs) -> PackageName | None:
        """Return the package to choose next: first those the user asked for, then by name."""
        open_ = [p for p in requirements if p not in choices and _is_wanted(requirements[p])]
        return min(open_, key=lambda p: (not self.provider.is_direct(p), p), default=None)

    def _is_hopeless(self, package: PackageName, requirements: _Needs) -> bool:
        wanted = requirements[package]
        return _is_wanted(wanted) and self.provider.is_hopeless(package, wanted)

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _depth_error(f"no answer among {MAX_STEPS:,} tries")


def _is_wanted(requirements: Sequence[Requirement]) -> bool:
    return any(not need.refused for need in requirements)


def _iter_requirers(requirements: Sequence[Requirement]) -> Iterator[PackageName]:
    yield from (need.requirer for need in requirements if need.requirer is not None)


class CandidateProvider:
    """The versions of each package, best first; requests an index once, and only when it must."""

    def __init__(self, pool: CandidatePool, unindexed: set[PackageName]) -> None:
        """Provide the candidates of a pool; the user asked for the ``unindexed`` packages."""
        self._pool = pool
        self._direct = unindexed
        self._published: dict[tuple[PackageName, str | None], Availability] = {}
        self._hopeless: set[frozenset[Requirement]] = set()
        self._looks = 0
        self.asked: dict[PackageName, list[Requirement]] = {}
        """The last requirements on each package, to explain why it was wanted."""

    def is_direct(self, package: PackageName) -> bool:
        """Tell whether the user asked for a package."""
        return package in self._direct

    def iter_choices(
        self, package: PackageName, requirements: Sequence[Requirement]
    ) -> Iterator[InstallCandidate]:
        """Yield the candidates that meet all requirements on a package, best first."""
        self.asked[package] = list(requirements)
        real = [need for need in requirements if not need.refused]
        for candidate in self._iter_preferred(package, real):
            self._count()
            if all(need.is_met_by(candidate) for need in requirements):
                yield candidate

    def is_hopeless(self, package: PackageName, requirements: Sequence[Requirement]) -> bool:
        """Tell whether no version meets all requirements; cached, as versions often agree."""
        key = frozenset(replace(need, source="") for need in requirements)
        if key in self._hopeless:
            self.asked[package] = list(requirements)
            return True
        if next(self.iter_choices(package, requirements), None) is not None:
            return False
        self._hopeless.add(key)
        return True

    def find_availability(self, package: PackageName) -> Availability:
        """Return what is known of a package, for messages; no index is requested."""
        known = [offer for (name, _), offer in self._published.items() if name == package]
        here = self._local_candidates(package)
        every = [c for offer in known for c in offer.candidates]
        reason = next((offer.reason for offer in known if offer.reason), "")
        way_out = next((offer.hint for offer in known if offer.hint), "")
        return Availability((*here, *every), reason, way_out, self._pool.age)

    def _count(self) -> None:
        self._looks += 1
        if self._looks > MAX_LOOKS:
            raise _depth_error(f"no answer after {MAX_LOOKS:,} looks at versions")

    def _iter_preferred(
        self, package: PackageName, requirements: Sequence[Requirement]
    ) -> Iterator[InstallCandidate]:
        """Yield what may be chosen, best first, each once; requests the index only if needed."""
        seen: set[tuple[Version, Digest, str]] = set()
        for candidate in self._iter_sorted(package, requirements):
            key = candidate.version, candidate.content_digest, candidate.registry
            if key not in seen and not candidate.contradicts_itself:
                seen.add(key)
                yield candidate

    def _iter_sorted(
        self, package: PackageName, requirements: Sequence[Requirement]
    ) -> Iterator[InstallCandidate]:
        files = [c for c in self._pool.files if c.package == package]
        if files:
            yield from files
            return
        here, pin = self._local_candidates(package), self._pool.locked.get(package)
        exact = any(need.names_one_version for need in requirements)
        yield from (c for c in here if pin and pin.is_met_by(c))
        good_enough = self._pool.prefer_installed and package not in self._direct
        if pin is None and (exact or good_enough):
            yield from here
        everything = self._find_availability(package, requirements).candidates
        yield from (c for c in everything if pin and pin.is_met_by(c))
        yield from (c for c in reversed(everything) if self._may_be_new(c, requirements))
        yield from here

    def _local_candidates(self, package: PackageName) -> list[InstallCandidate]:
        found = [c for c in self._pool.installed if c.package == package]
        return sorted(found, key=lambda c: (c.yanked is None, c.version), reverse=True)

    def _may_be_new(self, candidate: InstallCandidate, requirements: Sequence[Requirement]) -> bool:
        if any(need.wanted.digest for need in requirements if need.is_from_user):
            return True
        named = any(need.names_one_version and need.is_from_user for need in requirements)
        ripe = self._pool.age.allowed_at(candidate) is None
        doubtful = candidate.revoked or candidate.yanked is not None
        return ripe and (named or not doubtful)

    def _find_availability(
        self, package: PackageName, requirements: Sequence[Requirement]
    ) -> Availability:
        named = {need.wanted.registry for need in requirements} - {None}
        homes = {need.default_registry for need in requirements} - {None}
        hosts = named or homes
        if len(hosts) > 1:
            return Availability((), f"{' and '.join(sorted(map(str, hosts)))} are two registries")
        host = next(iter(hosts), None)
        by_hand = host in {n.wanted.registry for n in requirements if n.by_hand} | homes
        return self._query_once(Reference(package, registry=host), by_hand)

    def _query_once(self, wanted: Reference, by_hand: bool) -> Availability:
        key = wanted.package, wanted.registry
        if key not in self._published:
            if len(self._published) >= MAX_PACKAGES:
                raise _depth_error(f"more than {MAX_PACKAGES} packages")
            self._published[key] = self._query_index(wanted, by_hand)
        return self._published[key]

    def _query_index(self, wanted: Reference, by_hand: bool) -> Availability:
        try:
            found = self._pool.index(wanted, by_hand)
        except (NotFoundError, OfflineError) as error:
            return Availability((), error.message, error.hint)
        return Availability(tuple(sorted(found, key=lambda c: c.version)))
