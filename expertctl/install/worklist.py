"""What is wanted here: a project's ``experts.toml``, or else the user's own in ``EXPERT_HOME``.

Only the working folder is looked at. A project has a lock file; the user's list has none, for what
is installed is its state. A project's file may come from another person and may name only
registries that the user knows; the user's own list counts as typed by the user.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from expertctl.errors import NotFoundError, UsageError
from expertctl.install.direct import Direct, find_direct
from expertctl.install.disagreement import Need
from expertctl.install.fetch import Lend
from expertctl.install.lock import Lock, Locked, added_and_gone, read_lock, write_lock
from expertctl.install.notices import Notice, sound_notices
from expertctl.install.order import (
    Done,
    Target,
    install_chosen,
    kept_pins,
    resolve_and_ask,
    waiting,
)
from expertctl.install.project import Project, ProjectFile
from expertctl.install.release_age import ReleaseAge
from expertctl.install.resolve import Chosen, Universe
from expertctl.install.sources import Sources
from expertctl.reference import PackageName
from expertctl.settings import Home
from expertctl.store.pins import PROJECT, is_project


@dataclass(frozen=True, slots=True)
class Worklist:
    """A list of wanted experts, and whether it is a project's."""

    file: ProjectFile
    is_project: bool

    def needs(self, project: Project) -> tuple[Need, ...]:
        """Return what the list asks for."""
        who = PROJECT if self.is_project else str(self.file.path)
        by_hand = not self.is_project
        return tuple(Need(wanted, who, by_hand=by_hand) for wanted in project.experts)

    def lock(self) -> Lock | None:
        """Return the lock file's content; None where there is none.

        Raises:
            InvalidPackageError: when it is damaged.
        """
        return read_lock(self.file.lock_path) if self.is_project else None


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a list was resolved to."""

    chosen: tuple[Chosen, ...]
    directs: tuple[Direct, ...]
    notes: tuple[str, ...]
    locked: tuple[Locked, ...]
    """The entries of the lock file that were to be kept, or whose version was chosen again."""


def find_worklist(home: Home, folder: Path) -> Worklist:
    """Return the list that counts in a folder."""
    guard = home.root / f"{PROJECT}.lock"
    here = ProjectFile(folder / PROJECT, guard)
    if is_project(folder, home):
        return Worklist(here, is_project=True)
    return user_list(home)


def user_list(home: Home) -> Worklist:
    """Return the user's own list."""
    return Worklist(ProjectFile(home.root / PROJECT, home.root / f"{PROJECT}.lock"), False)


def demand_project(home: Home, folder: Path) -> Worklist:
    """Return the project of a folder.

    Raises:
        NotFoundError: when there is none.
    """
    found = find_worklist(home, folder)
    if not found.is_project:
        hint = 'write one:\n[experts]\n"acme/sql" = "^1.2"'
        raise NotFoundError(f"there is no {PROJECT} in {folder}", hint=hint)
    return found


def resolve_list(
    worklist: Worklist,
    target: Target,
    sources: Sources,
    age: ReleaseAge,
    *,
    fresh: Iterable[PackageName] | None = (),
    project: Project | None = None,
) -> Resolved:
    """Resolve a list, keeping what is locked but for ``fresh`` packages (None: for all).

    ``project`` is what the list is going to say, where that is not what it says now.

    Raises:
        ExpertError: as `resolve`.
    """
    project = worklist.file.read() if project is None else project
    needs = worklist.needs(project)
    lock = worklist.lock()
    entries = lock.experts if lock is not None else ()
    anew = {entry.package for entry in entries} if fresh is None else set(fresh)
    kept = [entry for entry in entries if entry.package not in anew]
    directs = [found for need in needs if (found := find_direct(need, sources))]
    universe = Universe(
        lambda wanted, by_hand: sources.candidates(
            project.located(wanted), by_hand=by_hand and wanted.registry is not None
        ),
        files=[direct.candidate for direct in directs],
        locked=kept_pins(kept, target),
        age=age,
        prefer_given=not worklist.is_project and fresh is not None,
    )
    chosen = resolve_and_ask(needs, universe, target, sources)
    sources.demand_claims(chosen)
    notes = [*_moved(project, sources), *waiting(chosen, sources, age)]
    refs = {item.candidate.ref for item in chosen}
    again = [entry for entry in entries if entry.package in anew and entry.ref in refs]
    return Resolved(tuple(chosen), tuple(directs), tuple(notes), (*kept, *again))


def check_list(resolved: Resolved, target: Target, sources: Sources) -> tuple[Notice, ...]:
    """Return what is known against a resolution and is no reason to refuse it.

    Raises:
        TrustError: when a key was revoked, or a version has another content than before.
    """
    return sound_notices(
        resolved.chosen,
        target.store.experts(),
        resolved.locked,
        sources,
        accepted=target.accept_changed,
    )


def lock_list(worklist: Worklist, resolved: Resolved) -> tuple[list[str], bool]:
    """Write the lock file of a project; return what changed, and whether it was written."""
    before = worklist.lock()
    after = Lock.of(worklist.file.read(), resolved.chosen)
    changes = added_and_gone(before.experts if before else (), after.experts)
    return changes, write_lock(worklist.file.lock_path, after)


def install_list(
    worklist: Worklist,
    target: Target,
    sources: Sources,
    lend: Lend,
    age: ReleaseAge,
    *,
    fresh: Iterable[PackageName] | None = (),
) -> tuple[Done, list[str]]:
    """Install what a list wants, and lock it where it is a project's; return what changed.

    Raises:
        UsageError: when it wants nothing.
        ExpertError: as `resolve` and `install_chosen`; nothing is installed then.
    """
    if not worklist.file.read().experts:
        raise UsageError("nothing to install", hint="expertctl install REF… or FILE…")
    before = {expert.ref for expert in target.store.experts()}
    resolved = resolve_list(worklist, target, sources, age, fresh=fresh)
    done = install_chosen(
        resolved.chosen,
        target,
        sources,
        lend,
        directs=resolved.directs,
        locked=resolved.locked,
    )
    if worklist.is_project:
        changes, _ = lock_list(worklist, resolved)
    else:
        changes = [f"+ {c.candidate.ref}" for c in resolved.chosen if c.candidate.ref not in before]
    return replace(done, notes=(*done.notes, *resolved.notes)), changes


def _moved(project: Project, sources: Sources) -> list[str]:
    """Say from which registry a project's file takes a namespace, if not the usual one."""
    usual = sources.default_host
    return [
        f"{namespace}/* comes from {host}, says {PROJECT}"
        for namespace, host in project.registries
        if host != usual
    ]
