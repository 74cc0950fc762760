"""What is behind: for each expert the installed version, the one allowed, and the newest.

Also what its registry says against the current version: a revoked key, a yank, another content.
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
)
from expertctl.install.order import Target
from expertctl.install.release_age import ReleaseAge
from expertctl.install.resolve import needs_of
from expertctl.install.sources import Sources
from expertctl.install.worklist import Worklist
from expertctl.reference import PackageName, Reference, Version
from expertctl.store.ref import LOCAL, StoredExpert


@dataclass(frozen=True, slots=True)
class Standing:
    """How one expert compares with what its registry has."""

    package: PackageName
    current: Version
    """Locked, or else the newest installed."""
    wanted: Version
    """The newest that all needs allow and that may be taken today."""
    newest: Version
    """The newest that was not yanked, prereleases aside."""
    waiting: tuple[Version, datetime] | None = None
    """A version that is too young, and until when."""
    notices: tuple[Notice, ...] = ()
    """What is known against the current version, locked or installed."""

    @property
    def yanked(self) -> str | None:
        """Why the current one was yanked; None when it was not."""
        return next((n.reason for n in self.notices if n.kind == "yanked"), None)

    @property
    def is_refused(self) -> bool:
        """Tell whether its key was revoked or its content changed."""
        return any(notice.kind in REFUSED for notice in self.notices)

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
    current = _current(lock, experts)
    needs = [*worklist.needs(worklist.file.read()), *(n for c in current for n in needs_of(c))]
    found = []
    for candidate in current:
        asked = [need for need in needs if need.package == candidate.package]
        offered = _offered(candidate, sources, by_hand=not worklist.is_project)
        notices = notices_about(_held(candidate, lock, experts, sources), sources)
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


def _current(lock: Lock | None, experts: Iterable[StoredExpert]) -> list[Candidate]:
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
    newest = {expert.package: installed(expert) for expert in experts}
    return [candidate for candidate in newest.values() if candidate.registry != LOCAL]


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
    young = [(c.version, moment) for c in finals if (moment := age.ripe_at(c))]
    return Standing(
        current.package,
        current.version,
        max([current.version, *ripe]),
        max([current.version, *(c.version for c in finals)]),
        max(young, default=None),
        tuple(notices),
    )


def _meets(need: Need, candidate: Candidate) -> bool:
    """Tell whether a need allows a version; an exact digest allows only itself."""
    wanted = Reference(need.package, need.wanted.constraint, None, need.wanted.digest)
    return candidate.fits(wanted) != need.refused
