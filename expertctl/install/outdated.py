"""`find_outdated`: for each expert the version in use, the newest allowed one, and the newest one.

It includes the notices of registries about installed versions: a revoked key, a yank, a changed
content.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from expertctl.errors import NotFoundError, OfflineError
from expertctl.install.candidate import (
    InstallCandidate,
    ReleaseAge,
    Requirement,
    candidate_from_expert,
)
from expertctl.install.installer import InstallContext
from expertctl.install.notices import (
    REFUSED_KINDS,
    KnownVersion,
    Notice,
    collect_notices,
    collect_other_notices,
    version_in_lock,
    version_in_store,
)
from expertctl.install.project_file import LockFile
from expertctl.install.requirement_list import RequirementList
from expertctl.install.resolve import list_requirements
from expertctl.install.sources import RegistrySources
from expertctl.reference import PackageName, Reference, Version
from expertctl.store.preference import PREFER_NEWEST, VersionPreference, read_preference
from expertctl.store.refs import LOCAL, StoredExpert


@dataclass(frozen=True, slots=True)
class OutdatedEntry:
    """How one expert compares with the versions of its registry."""

    package: PackageName
    current: Version
    """The locked version, or else the installed one that is used where no version is named."""
    wanted: Version
    """The newest that all requirements allow and that may be taken today."""
    newest: Version | None
    """The newest that was neither yanked nor revoked, prereleases aside; None: there is none."""
    waiting: tuple[Version, datetime] | None = None
    """A version that is too young, and until when."""
    notices: tuple[Notice, ...] = ()
    """Notices about the current version and other installed ones."""

    @property
    def yanked(self) -> str | None:
        """Why the current version was yanked; None when it was not."""
        return next((n.reason for n in self.notices if n.kind == "yanked" and n.in_use), None)

    @property
    def is_refused(self) -> bool:
        """Whether the key of the current version was revoked or its content changed."""
        return any(notice.kind in REFUSED_KINDS and notice.in_use for notice in self.notices)

    @property
    def is_behind(self) -> bool:
        """Whether the user should look at it."""
        return bool(self.notices) or self.current != self.newest or self.waiting is not None


def find_outdated(
    requirement_list: RequirementList,
    context: InstallContext,
    sources: RegistrySources,
    age: ReleaseAge,
) -> list[OutdatedEntry]:
    """Compare the locked, or outside a project the installed, versions with the registries.

    Raises:
        TrustError: when an index cannot be trusted.
        RegistryError: when a registry cannot be reached.
    """
    lock, experts = requirement_list.load_lock(), context.store.list_experts()
    by_hand = not requirement_list.is_project
    for candidate in _current_candidates(lock, experts, PREFER_NEWEST):
        _list_offered(candidate, sources, by_hand=by_hand)
    sources.record_yanks()  # they decide which version is in use
    current = _current_candidates(lock, experts, _read_list_preference(requirement_list, sources))
    needs = [
        *requirement_list.requirements(requirement_list.file.read()),
        *(n for c in current for n in list_requirements(c)),
    ]
    found = []
    for candidate in current:
        matching = [need for need in needs if need.package == candidate.package]
        offered = _list_offered(candidate, sources, by_hand=by_hand)
        others = [version_in_store(e) for e in experts if _is_unused_version(e, candidate)]
        notices = [
            *collect_notices(_current_versions(candidate, lock, experts, sources), sources),
            *collect_other_notices(others, sources),
        ]
        if offered or notices:
            found.append(_compare_versions(candidate, matching, offered, age, notices))
    return found


def _current_versions(
    candidate: InstallCandidate,
    lock: LockFile | None,
    experts: Iterable[StoredExpert],
    sources: RegistrySources,
) -> list[KnownVersion]:
    """Return the current version as the lock file and as the store have it."""
    locked = lock.find(candidate.package) if lock else None
    return [
        *(version_in_store(expert) for expert in experts if expert.ref == candidate.ref),
        *([version_in_lock(locked, sources)] if locked else []),
    ]


def _is_unused_version(expert: StoredExpert, current: InstallCandidate) -> bool:
    return expert.package == current.package and expert.version != current.version


def _read_list_preference(
    requirement_list: RequirementList, sources: RegistrySources
) -> VersionPreference:
    folder = requirement_list.file.path.parent if requirement_list.is_project else None
    return read_preference(sources.settings.home, folder)


def _current_candidates(
    lock: LockFile | None, experts: Sequence[StoredExpert], preference: VersionPreference
) -> list[InstallCandidate]:
    """Return the current version of each package, without those from files: they never lag."""
    if lock is not None:
        return [
            InstallCandidate(
                locked.package,
                locked.version,
                locked.registry,
                locked.content_digest,
                (locked.package_digest,),
                locked.requires,
            )
            for locked in lock.experts
            if locked.registry != LOCAL
        ]
    used = {expert.package: expert for expert in experts} | preference.select_used(experts)
    return [candidate_from_expert(expert) for expert in used.values() if expert.registry != LOCAL]


def _list_offered(
    candidate: InstallCandidate, sources: RegistrySources, *, by_hand: bool
) -> Sequence[InstallCandidate]:
    """Return the versions in the registry of a candidate; none when it has no index."""
    wanted = Reference(candidate.package, registry=candidate.registry)
    if not sources.knows_host(sources.resolve_address(wanted, by_hand=True).host):
        return []
    try:
        return sources.find_candidates(wanted, by_hand)
    except (NotFoundError, OfflineError):
        return []


def _compare_versions(
    current: InstallCandidate,
    requirements: Sequence[Requirement],
    offered: Sequence[InstallCandidate],
    age: ReleaseAge,
    notices: Iterable[Notice],
) -> OutdatedEntry:
    good = [c for c in offered if c.yanked is None and not c.revoked]
    finals = [c for c in good if not c.version.prerelease]
    allowed = [c for c in good if all(_is_met(need, c) for need in requirements)]
    if not requirements:
        allowed = finals
    ripe = [c.version for c in allowed if age.allowed_at(c) is None]
    doubtful = {c.version for c in offered} - {c.version for c in good}
    kept = [] if current.version in doubtful else [current.version]
    young = [(c.version, moment) for c in finals if (moment := age.allowed_at(c))]
    return OutdatedEntry(
        current.package,
        current.version,
        max([*kept, *ripe], default=current.version),
        max([*kept, *(c.version for c in finals)], default=None),
        max(young, default=None),
        tuple(notices),
    )


def _is_met(requirement: Requirement, candidate: InstallCandidate) -> bool:
    """Tell whether a requirement allows a version; an exact digest allows only itself."""
    wanted = Reference(
        requirement.package, requirement.wanted.constraint, None, requirement.wanted.digest
    )
    return candidate.satisfies(wanted) != requirement.refused
