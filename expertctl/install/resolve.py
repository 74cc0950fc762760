"""From what is asked for to one version of each package: a search with backjumping.

One version per package in one resolution; older ones may stay installed beside it. The locked
version is preferred; then, for a package that the user did not ask for by name, the installed one;
then the newest version that is not yanked and has its least age. A yanked version is taken only
when it is locked or named exactly by the user; a prerelease only when a constraint names it.
Requirements may form a cycle.

The search finds an answer iff there is one: a choice that fails is undone together with those after
it that have no part in the failure, and nothing is remembered beyond the choices it depended on.
`resolvelib` carries such memory over and misses answers, so it is not used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from expertctl.digest import Digest
from expertctl.errors import IncompatibleError, NotFoundError, OfflineError
from expertctl.install.candidate import Candidate
from expertctl.install.disagreement import Need, Offer, disagreement
from expertctl.install.release_age import ReleaseAge
from expertctl.reference import PackageName, Reference, Version

MAX_STEPS = 5_000
"""How many versions are tried before the search gives up."""
MAX_LOOKS = 300_000
"""How many times a version is checked against needs, over all tries: some seconds."""
MAX_PACKAGES = 300
"""More than any real set of experts; each costs a request."""

Index = Callable[[Reference, bool], Sequence[Candidate]]
"""Asks for all versions of a package; the flag says whether a registry, if named, was named by the
user, and not by a package or a project file."""


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
    """Installed experts; a yanked one is the last choice among them."""
    files: Sequence[Candidate] = ()
    """From files that the user named: for the same package, nothing else counts."""
    locked: Mapping[PackageName, Pin] = field(default_factory=dict)
    age: ReleaseAge = field(default_factory=ReleaseAge)
    prefer_given: bool = True
    """Whether an installed version is good enough where the user did not ask for it by name."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One version of the resolution, and the reasons for it."""

    candidate: Candidate
    needs: tuple[Need, ...]

    @property
    def package_digest(self) -> Digest:
        """The signed form that was named, else the newest."""
        named = {need.wanted.digest for need in self.needs}
        digests = self.candidate.package_digests
        return next((digest for digest in digests if digest in named), digests[0])


@dataclass(frozen=True, slots=True)
class _Conflict:
    """Why nothing fits."""

    blame: frozenset[PackageName]
    """The choices of which at least one must be another."""
    trouble: tuple[Need, ...]
    """The needs, all of one package, that cannot be met together."""


_Choices = dict[PackageName, Candidate]
_Needs = dict[PackageName, tuple[Need, ...]]


def resolve(needs: Sequence[Need], universe: Universe) -> list[Chosen]:
    """Choose one version of every package that is needed, sorted by name.

    Raises:
        NotFoundError: when something that is asked for is nowhere.
        MissingDependencyError: when only something that is required is nowhere.
        ConflictError: when the requirements disagree.
        IncompatibleError: when no answer was found within the bounds.
    """
    search = _Search(Shelves(universe, {n.package for n in needs if n.from_person}))
    found = search.extend({}, _added({}, needs))
    if isinstance(found, _Conflict):
        raise disagreement(found.trouble, search.shelves)
    return _reached(needs, found)


def _too_deep(what: str) -> IncompatibleError:
    hint = "name exact versions of some of them, such as acme/sql@1.2.0"
    return IncompatibleError(f"the requirements are too tangled: {what}", hint=hint)


def _reached(needs: Sequence[Need], choices: _Choices) -> list[Chosen]:
    """Return the choices with the reasons for each."""
    reasons: dict[PackageName, list[Need]] = {}
    for need in [*needs, *(n for c in choices.values() for n in needs_of(c))]:
        if not need.refused:
            reasons.setdefault(need.package, []).append(need)
    return [Chosen(choices[name], tuple(reasons[name])) for name in sorted(choices)]


def needs_of(candidate: Candidate) -> list[Need]:
    """Return what a candidate requires and refuses; its own name aside."""
    home = candidate.registry
    required = [Need.of(candidate.ref, r, asker=candidate.package, home=home)
                for r in candidate.requires if r.package != candidate.package]  # fmt: skip
    refused = [Need.of(candidate.ref, r, asker=candidate.package, home=home, refused=True)
               for r in candidate.conflicts if r.package != candidate.package]  # fmt: skip
    return [*required, *refused]


def _added(needs: _Needs, more: Sequence[Need]) -> _Needs:
    joined = dict(needs)
    for need in more:
        joined[need.package] = (*joined.get(need.package, ()), need)
    return joined


class _Search:
    """Tries one version after the other, and counts."""

    def __init__(self, shelves: "Shelves") -> None:
        self.shelves = shelves
        self._steps = 0

    def extend(self, choices: _Choices, needs: _Needs) -> _Choices | _Conflict:
        """Choose all that is needed beyond the choices so far, which stay."""
        package = self._next(choices, needs)
        if package is None:
            return choices
        blame, troubles = set(_askers(needs[package])), list[tuple[Need, ...]]()
        for candidate in self.shelves.choices(package, needs[package]):
            self._count()
            found = self._try(candidate, choices, needs)
            if not isinstance(found, _Conflict):
                return found
            if package not in found.blame:
                return found
            blame |= found.blame
            troubles.append(found.trouble)
        return _Conflict(frozenset(blame - {package}), [*troubles, needs[package]][0])

    def _try(self, candidate: Candidate, choices: _Choices, needs: _Needs) -> _Choices | _Conflict:
        """Go on with one choice, unless its requirements clearly cannot be met."""
        more, package = needs_of(candidate), candidate.package
        joined = _added(needs, more)
        for need in more:
            chosen = choices.get(need.package)
            if chosen is not None and not need.is_met_by(chosen):
                return _Conflict(frozenset({need.package, package}), joined[need.package])
            if chosen is None and self._is_hopeless(need.package, joined):
                blame = frozenset(_askers(joined[need.package])) | {package}
                return _Conflict(blame, joined[need.package])
        return self.extend({**choices, package: candidate}, joined)

    def _next(self, choices: _Choices, needs: _Needs) -> PackageName | None:
        """Return what to choose next: first what the user asked for, then by name."""
        open_ = [p for p in needs if p not in choices and _is_wanted(needs[p])]
        return min(open_, key=lambda p: (not self.shelves.is_direct(p), p), default=None)

    def _is_hopeless(self, package: PackageName, needs: _Needs) -> bool:
        wanted = needs[package]
        return _is_wanted(wanted) and self.shelves.is_hopeless(package, wanted)

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _too_deep(f"no answer among {MAX_STEPS:,} tries")


def _is_wanted(needs: Sequence[Need]) -> bool:
    return any(not need.refused for need in needs)


def _askers(needs: Sequence[Need]) -> Iterator[PackageName]:
    yield from (need.asker for need in needs if need.asker is not None)


class Shelves:
    """The versions of each package, best first; asks an index once, and only when it must."""

    def __init__(self, universe: Universe, direct: set[PackageName]) -> None:
        """Offer what is in a universe; ``direct`` packages were asked for by the user."""
        self._universe = universe
        self._direct = direct
        self._published: dict[tuple[PackageName, str | None], Offer] = {}
        self._hopeless: set[frozenset[Need]] = set()
        self._looks = 0
        self.asked: dict[PackageName, list[Need]] = {}
        """The last needs of each package, to tell why it was wanted."""

    def is_direct(self, package: PackageName) -> bool:
        """Tell whether the user asked for a package."""
        return package in self._direct

    def choices(self, package: PackageName, needs: Sequence[Need]) -> Iterator[Candidate]:
        """Yield what meets all needs of a package, best first."""
        self.asked[package] = list(needs)
        real = [need for need in needs if not need.refused]
        for candidate in self._preferred(package, real):
            self._count()
            if all(need.is_met_by(candidate) for need in needs):
                yield candidate

    def is_hopeless(self, package: PackageName, needs: Sequence[Need]) -> bool:
        """Tell whether nothing meets all needs of a package; cached, as versions often agree."""
        key = frozenset(replace(need, by="") for need in needs)
        if key in self._hopeless:
            self.asked[package] = list(needs)
            return True
        if next(self.choices(package, needs), None) is not None:
            return False
        self._hopeless.add(key)
        return True

    def offer(self, package: PackageName) -> Offer:
        """Return what is known of a package, for messages; no index is asked."""
        known = [offer for (name, _), offer in self._published.items() if name == package]
        here = tuple(c for c in self._here(package))
        every = tuple(c for offer in known for c in offer.candidates)
        reason = next((offer.reason for offer in known if offer.reason), "")
        way_out = next((offer.way_out for offer in known if offer.way_out), "")
        return Offer((*here, *every), reason, way_out, self._universe.age)

    def _count(self) -> None:
        self._looks += 1
        if self._looks > MAX_LOOKS:
            raise _too_deep(f"no answer after {MAX_LOOKS:,} looks at versions")

    def _preferred(self, package: PackageName, needs: Sequence[Need]) -> Iterator[Candidate]:
        """Yield what may be chosen, best first, each once; the index is asked only for more."""
        seen: set[tuple[Version, Digest, str]] = set()
        for candidate in self._in_order(package, needs):
            key = candidate.version, candidate.content_digest, candidate.registry
            if key not in seen and not candidate.contradicts_itself:
                seen.add(key)
                yield candidate

    def _in_order(self, package: PackageName, needs: Sequence[Need]) -> Iterator[Candidate]:
        files = [c for c in self._universe.files if c.package == package]
        if files:
            yield from files
            return
        here, pin = self._here(package), self._universe.locked.get(package)
        exact = any(need.names_one_version for need in needs)
        yield from (c for c in here if pin and pin.is_met_by(c))
        good_enough = self._universe.prefer_given and package not in self._direct
        if pin is None and (exact or good_enough):
            yield from here
        everything = self._offered(package, needs).candidates
        yield from (c for c in everything if pin and pin.is_met_by(c))
        yield from (c for c in reversed(everything) if self._may_be_new(c, needs))
        yield from here

    def _here(self, package: PackageName) -> list[Candidate]:
        found = [c for c in self._universe.given if c.package == package]
        return sorted(found, key=lambda c: (c.yanked is None, c.version), reverse=True)

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
            return Offer((), error.message, error.hint)
        return Offer(tuple(sorted(found, key=lambda c: c.version)))
