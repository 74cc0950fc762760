"""Which of several installed versions of a package is meant where a reference leaves it open.

One rule for the router, ``--expert``, `serve`, `list`, `why` and `export`, in `precedence`:

1. the version that the project's lock file names, or that the list names exactly;
2. one from the registry that the namespace belongs to;
3. one whose signing key was not revoked;
4. one that was not yanked, according to what its registry said last;
5. the newest. A prerelease counts only where it is named.

So a yanked version is used only where it is locked or named exactly, or nothing else can be used.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from expertctl.reference import ANY, PackageName, Reference, Version
from expertctl.settings import Home
from expertctl.store.pins import PinFiles, Pins, VersionPin, is_allowed
from expertctl.store.ref import StoredExpert
from expertctl.store.signers import Signers, read_signers
from expertctl.store.yanks import Yanks, read_yanks

Precedence = tuple[bool, bool, bool, bool, Version]
"""Sort key of one version among those of its package: the largest is meant."""


def precedence(
    version: Version, *, pinned: bool, at_home: bool, revoked: bool, yanked: bool
) -> Precedence:
    """Return the sort key of a version; see the rule above."""
    return pinned, at_home, not revoked, not yanked, version


@dataclass(frozen=True, slots=True)
class Preference:
    """What is known here of installed versions beside their packages; empty: the newest counts."""

    yanks: Yanks = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    signers: Signers = field(default_factory=Signers)

    def yank_reason(self, expert: StoredExpert) -> str | None:
        """Return why an expert was yanked, which may be empty; None when it was not."""
        return self.yanks.get((expert.registry, expert.ref))

    def pin(self, expert: StoredExpert) -> VersionPin | None:
        """Return what names exactly this version; None when nothing does."""
        found = self.pins.versions.get(expert.package)
        return found if found is not None and found.names(expert) else None

    def precedence(self, expert: StoredExpert) -> Precedence:
        """Return the sort key of an installed version."""
        return precedence(
            expert.version,
            pinned=self.pin(expert) is not None,
            at_home=self.signers.other_home(expert) is None,
            revoked=self.signers.has_revoked(expert),
            yanked=self.yank_reason(expert) is not None,
        )

    def is_meant(self, expert: StoredExpert, wanted: Reference) -> bool:
        """Tell whether a reference may mean an expert; a pinned prerelease is named by its pin."""
        open_ = wanted == Reference(expert.package, ANY, wanted.registry)
        named = open_ and wanted.registry in {None, expert.registry}
        return is_allowed(expert, wanted) or (named and self.pin(expert) is not None)

    def used(self, experts: Iterable[StoredExpert]) -> dict[PackageName, StoredExpert]:
        """Return the version of each package that is used where none is named."""
        found: dict[PackageName, StoredExpert] = {}
        for expert in sorted(experts, key=self.precedence):
            if self.is_meant(expert, Reference(expert.package)):
                found[expert.package] = expert
        return found


@dataclass(frozen=True, slots=True)
class VersionUsage:
    """Whether an installed version is used where none is named, and what decides that."""

    used: bool
    used_instead: str | None
    """The version that is used where this one is not; None where this one or none is."""
    others: tuple[str, ...]
    """The other installed versions."""
    pinned: str | None
    """The lock file or list that names exactly this version."""
    yanked: str | None
    """Why it was yanked, which may be empty; None when it was not."""


def usage_of(
    expert: StoredExpert, experts: Iterable[StoredExpert], preference: Preference
) -> VersionUsage:
    """Compare an installed version with the others of its package."""
    same = [other for other in experts if other.package == expert.package]
    used = preference.used(same).get(expert.package)
    pin = preference.pin(expert)
    return VersionUsage(
        used=used == expert,
        used_instead=used.ref if used not in {None, expert} else None,
        others=tuple(other.ref for other in same if other != expert),
        pinned=str(pin.source) if pin else None,
        yanked=preference.yank_reason(expert),
    )


NEWEST = Preference()
"""Where nothing is known: the newest version."""


def read_preference(home: Home, folder: Path | None = None) -> Preference:
    """Read what a home, and the project in a folder, say about installed versions."""
    return Preference(
        read_yanks(home.yanked), PinFiles(home, folder).read(), read_signers(home.trust)
    )


def working_folder() -> Path | None:
    """Return the working folder; None when it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None
