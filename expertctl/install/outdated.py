"""What is behind: for each expert the version in use, the one allowed, and the newest.

Also what its registry says against installed versions: a revoked key, a yank, another content.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from expertctl.errors import NotFoundError, OfflineError
from expertctl.install.candidate import Candidate, installed
from expertctl.install.disagreement import Need
from expertctl.install.lock import Lock
from expertctl.install.notices import (
    REFUSED,
    Held,
    Notice,
    held_in_lock,
    held_in_store,
    notices_about,
    notices_about_others,
)
from expertctl.install.order import Target
from expertctl.install.release_age import ReleaseAge
from expertctl.install.resolve import needs_of
from expertctl.install.sources import Sources
from expertctl.install.worklist import Worklist
from expertctl.reference import PackageName, Reference, Version
from expertctl.store.preference import NEWEST, Preference, read_preference
from expertctl.store.ref import LOCAL, StoredExpert


@dataclass(frozen=True, slots=True)
class Standing:
    """How one expert compares with what its registry has."""

    package: PackageName
    current: Version
    """Locked, or else the installed one that is used where no version is named."""
    wanted: Version
    """The newest that all needs allow and that may be taken today."""
    newest: Version | None
    """The newest that was neither yanked nor revoked, prereleases aside; None: there is none."""
    waiting: tuple[Version, datetime] | None = None
    """A version that is too young, and until when."""
    notices: tuple[Notice, ...] = ()
    """What is known against the current version, and others that are installed beside it."""

    @property
    def yanked(self) -> str | None:
        """Why the current one was yanked; None when it was not."""
        return next((n.reason for n in self.notices if n.kind == "yanked" and n.in_use), None)

    @property
    def is_refused(self) -> bool:
        """Tell whether the key of the current one was revoked or its content changed."""
        return any(notice.kind in REFUSED and notice.in_use for notice in self.notices)

    @property
    def is_behind(self) -> bool:
        """Tell whether the user should look at it."""
        return bool(self.notices) or self.current != self.newest or self.waiting is not None


def outdated(
    worklist: Worklist, target: Target, sources: Sources, age: ReleaseAge
) -> list[Standing]:
    """Compare what is locked, or outside a project installed, with what registries have.

    Raises:
        TrustError: when an index cannot be trusted.
        RegistryError: when a registry cannot be reached.
    """
    lock, experts = worklist.lock(), target.store.experts()
    by_hand = not worklist.is_project
    for candidate in _current(lock, experts, NEWEST):
        _offered(candidate, sources, by_hand=by_hand)
    sources.record_yanks()  # they decide which version is in use
    current = _current(lock, experts, _preference(worklist, sources))
    needs = [*worklist.needs(worklist.file.read()), *(n for c in current for n in needs_of(c))]
    found = []
    for candidate in current:
        asked = [need for need in needs if need.package == candidate.package]
        offered = _offered(candidate, sources, by_hand=by_hand)
        others = [held_in_store(e) for e in experts if _is_beside(e, candidate)]
        notices = [
            *notices_about(_held(candidate, lock, experts, sources), sources),
            *notices_about_others(others, sources),
        ]
        if offered or notices:
            found.append(_standing(candidate, asked, offered, age, notices))
    return found


def _held(
    candidate: Candidate, lock: Lock | None, experts: Iterable[StoredExpert], sources: Sources
) -> list[Held]:
    """Return the current version as the lock file and as the store have it."""
    locked = lock.locked(candidate.package) if lock else None
    return [
        *(held_in_store(expert) for expert in experts if expert.ref == candidate.ref),
        *([held_in_lock(locked, sources)] if locked else []),
    ]


def _is_beside(expert: StoredExpert, current: Candidate) -> bool:
    return expert.package == current.package and expert.version != current.version


def _preference(worklist: Worklist, sources: Sources) -> Preference:
    folder = worklist.file.path.parent if worklist.is_project else None
    return read_preference(sources.settings.home, folder)


def _current(
    lock: Lock | None, experts: Sequence[StoredExpert], preference: Preference
) -> list[Candidate]:
    """Return the current version of each package; those from files, never behind, are left out."""
    if lock is not None:
        return [
            Candidate(
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
    used = {expert.package: expert for expert in experts} | preference.used(experts)
    return [installed(expert) for expert in used.values() if expert.registry != LOCAL]


def _offered(candidate: Candidate, sources: Sources, *, by_hand: bool) -> Sequence[Candidate]:
    """Return what the registry of a candidate has now; nothing when it has no index."""
    wanted = Reference(candidate.package, registry=candidate.registry)
    if not sources.has_index(sources.address(wanted, by_hand=True)):
        return []
    try:
        return sources.candidates(wanted, by_hand)
    except (NotFoundError, OfflineError):
        return []


def _standing(
    current: Candidate,
    needs: Sequence[Need],
    offered: Sequence[Candidate],
    age: ReleaseAge,
    notices: Iterable[Notice],
) -> Standing:
    good = [c for c in offered if c.yanked is None and not c.revoked]
    finals = [c for c in good if not c.version.prerelease]
    allowed = [c for c in good if all(_meets(need, c) for need in needs)]
    if not needs:
        allowed = finals
    ripe = [c.version for c in allowed if age.ripe_at(c) is None]
    doubtful = {c.version for c in offered} - {c.version for c in good}
    kept = [] if current.version in doubtful else [current.version]
    young = [(c.version, moment) for c in finals if (moment := age.ripe_at(c))]
    return Standing(
        current.package,
        current.version,
        max([*kept, *ripe], default=current.version),
        max([*kept, *(c.version for c in finals)], default=None),
        max(young, default=None),
        tuple(notices),
    )


def _meets(need: Need, candidate: Candidate) -> bool:
    """Tell whether a need allows a version; an exact digest allows only itself."""
    wanted = Reference(need.package, need.wanted.constraint, None, need.wanted.digest)
    return candidate.fits(wanted) != need.refused
