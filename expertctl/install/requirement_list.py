"""The list of wanted experts, a project's ``experts.toml`` or the user's own, and its lock file.

Only the working folder is searched for a project. A project has a lock file; the user's list in
``EXPERT_HOME`` has none: what is installed is its state. A project's file may come from another
person and may name only registries that the user knows; the user's own list counts as typed by the
user.

`install_locked` installs exactly what a lock file says. A lock file comes with a project, so none
of it is trusted unchecked: its registry must be the one that the namespace belongs to, its digests
those of the registry's signed index or of the installed version, and the publisher's key must be
trusted. It can only narrow what would be installed without it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from expertctl.errors import DigestError, NotFoundError, TrustError, UsageError
from expertctl.install.candidate import InstallCandidate, ReleaseAge, Requirement
from expertctl.install.fetch import OpenProgress, UnindexedPackage, find_unindexed
from expertctl.install.installer import InstallContext
from expertctl.install.notices import (
    Notice,
    check_resolution,
    query_authorities,
    version_in_lock,
    version_in_resolution,
)
from expertctl.install.project_file import (
    LockedExpert,
    LockFile,
    Project,
    ProjectFile,
    describe_changes,
    read_lock,
    require_lock,
    write_lock,
)
from expertctl.install.request import (
    InstallReport,
    describe_waiting,
    find_installed_candidates,
    install_resolved,
    preferred_pins,
    resolve_and_verify,
)
from expertctl.install.resolve import CandidatePool, ResolvedPackage
from expertctl.install.sources import RegistrySources
from expertctl.package.read import changed_version_error
from expertctl.reference import Constraint, PackageName, Reference
from expertctl.settings import Home
from expertctl.store.pins import LOCK_FILE, PROJECT_FILE, is_project
from expertctl.store.refs import LOCAL


@dataclass(frozen=True, slots=True)
class RequirementList:
    """A list of wanted experts, and whether it is a project's."""

    file: ProjectFile
    is_project: bool

    def requirements(self, project: Project) -> tuple[Requirement, ...]:
        """Return what the list asks for."""
        who = PROJECT_FILE if self.is_project else str(self.file.path)
        by_hand = not self.is_project
        return tuple(Requirement(wanted, who, by_hand=by_hand) for wanted in project.experts)

    def load_lock(self) -> LockFile | None:
        """Return the content of the lock file; None where there is none.

        Raises:
            InvalidPackageError: when it is damaged.
        """
        return read_lock(self.file.lock_path) if self.is_project else None


@dataclass(frozen=True, slots=True)
class ListResolution:
    """The resolution of a list."""

    chosen: tuple[ResolvedPackage, ...]
    unindexed: tuple[UnindexedPackage, ...]
    notes: tuple[str, ...]
    locked: tuple[LockedExpert, ...]
    """The entries of the lock file that were to be kept, or whose version was chosen again."""


def find_requirement_list(home: Home, folder: Path) -> RequirementList:
    """Return the list that applies in a folder."""
    own = user_requirement_list(home)
    if not is_project(folder, home):
        return own
    return RequirementList(replace(own.file, path=folder / PROJECT_FILE), is_project=True)


def user_requirement_list(home: Home) -> RequirementList:
    """Return the user's own list."""
    return RequirementList(
        ProjectFile(home.root / PROJECT_FILE, home.root / f"{PROJECT_FILE}.lock"), False
    )


def require_project(home: Home, folder: Path) -> RequirementList:
    """Return the project of a folder.

    Raises:
        NotFoundError: when there is none.
    """
    found = find_requirement_list(home, folder)
    if not found.is_project:
        hint = 'write one:\n[experts]\n"acme/sql" = "^1.2"'
        raise NotFoundError(f"there is no {PROJECT_FILE} in {folder}", hint=hint)
    return found


def resolve_requirement_list(
    requirement_list: RequirementList,
    context: InstallContext,
    sources: RegistrySources,
    age: ReleaseAge,
    *,
    fresh: Iterable[PackageName] | None = (),
    project: Project | None = None,
) -> ListResolution:
    """Resolve a list, keeping locked versions except for ``fresh`` packages (None: for all).

    ``project`` is the future content of the list, where that differs from the present one.

    Raises:
        ExpertError: as `resolve`.
    """
    project = requirement_list.file.read() if project is None else project
    needs = requirement_list.requirements(project)
    lock = requirement_list.load_lock()
    entries = lock.experts if lock is not None else ()
    anew = {entry.package for entry in entries} if fresh is None else set(fresh)
    kept = [entry for entry in entries if entry.package not in anew]
    unindexed = [found for need in needs if (found := find_unindexed(need, sources))]
    pool = CandidatePool(
        lambda wanted, by_hand: sources.find_candidates(
            project.with_registry(wanted), by_hand=by_hand and wanted.registry is not None
        ),
        files=[direct.candidate for direct in unindexed],
        locked=preferred_pins(kept, context),
        age=age,
        prefer_installed=not requirement_list.is_project and fresh is not None,
    )
    chosen = resolve_and_verify(needs, pool, context, sources)
    sources.check_namespace_claims(chosen)
    notes = [*_describe_moved(project, sources), *describe_waiting(chosen, sources, age)]
    refs = {item.candidate.ref for item in chosen}
    again = [entry for entry in entries if entry.package in anew and entry.ref in refs]
    return ListResolution(tuple(chosen), tuple(unindexed), tuple(notes), (*kept, *again))


def check_requirement_list(
    resolved: ListResolution, context: InstallContext, sources: RegistrySources
) -> tuple[Notice, ...]:
    """Return the notices about a resolution that are no reason to refuse it.

    Raises:
        TrustError: when a key was revoked, or a version has another content than before.
    """
    return check_resolution(
        resolved.chosen,
        context.store.list_experts(),
        resolved.locked,
        sources,
        accepted=context.accept_changed,
    )


def lock_requirement_list(
    requirement_list: RequirementList, resolved: ListResolution
) -> tuple[list[str], bool]:
    """Write the lock file of a project; return the changes, and whether it was written."""
    before = requirement_list.load_lock()
    after = LockFile.from_resolution(requirement_list.file.read(), resolved.chosen)
    changes = describe_changes(before.experts if before else (), after.experts)
    return changes, write_lock(requirement_list.file.lock_path, after)


def install_requirement_list(
    requirement_list: RequirementList,
    context: InstallContext,
    sources: RegistrySources,
    open_progress: OpenProgress,
    age: ReleaseAge,
    *,
    fresh: Iterable[PackageName] | None = (),
) -> tuple[InstallReport, list[str]]:
    """Install what a list wants, and lock it where it is a project's; return the changes.

    Raises:
        UsageError: when it wants nothing.
        ExpertError: as `resolve` and `install_resolved`; nothing is installed then.
    """
    if not requirement_list.file.read().experts:
        raise UsageError("nothing to install", hint="expertctl install REF… or FILE…")
    before = {expert.ref for expert in context.store.list_experts()}
    resolved = resolve_requirement_list(requirement_list, context, sources, age, fresh=fresh)
    done = install_resolved(
        resolved.chosen,
        context,
        sources,
        open_progress,
        unindexed=resolved.unindexed,
        locked=resolved.locked,
    )
    if requirement_list.is_project:
        changes, _ = lock_requirement_list(requirement_list, resolved)
    else:
        changes = [f"+ {c.candidate.ref}" for c in resolved.chosen if c.candidate.ref not in before]
    return replace(done, notes=(*done.notes, *resolved.notes)), changes


def _describe_moved(project: Project, sources: RegistrySources) -> list[str]:
    """Return notes about namespaces for which a project's file names another registry."""
    default_host = sources.default_host
    return [
        f"{namespace}/* comes from {host}, says {PROJECT_FILE}"
        for namespace, host in project.registries
        if host != default_host
    ]


_ACCEPT_HINT = "if the publisher confirms it, `expertctl lock --accept-changed {ref}`"
_RELOCK_HINT = "if you trust what the registry says, `expertctl lock` writes expert.lock anew"


def install_locked(
    requirement_list: RequirementList,
    wanted: Sequence[Reference],
    context: InstallContext,
    sources: RegistrySources,
    open_progress: OpenProgress,
) -> InstallReport:
    """Install what the lock file says, or only the part of it that some references need.

    Raises:
        NotFoundError: when there is no lock file, or it lacks what is wanted.
        ConflictError: when it is not that of experts.toml.
        TrustError: when it says something else than the registry, or another registry.
        ExpertError: as `install_resolved`; nothing is installed then.
    """
    project, lock = requirement_list.file.read(), require_lock(requirement_list.file.lock_path)
    lock.check_current(project, what=str(requirement_list.file.lock_path))
    part = _select_entries(lock, wanted)
    for locked in part:
        _check_authority(locked, project, sources)
    query_authorities(((locked.registry, locked.package) for locked in part), sources)
    here = find_installed_candidates(context, sources)
    found = [_resolve_entry(locked, here, sources) for locked in part]
    unindexed = [direct for _, direct in found if direct is not None]
    chosen = [item for item, _ in found]
    return install_resolved(
        chosen, context, sources, open_progress, unindexed=unindexed, locked=part
    )


def _select_entries(lock: LockFile, wanted: Sequence[Reference]) -> list[LockedExpert]:
    """Return the entries that some references need; all of them without references."""
    if not wanted:
        return list(lock.experts)
    packages: list[PackageName] = []
    for reference in wanted:
        locked = lock.find(reference.package)
        if locked is None or not locked.satisfies(reference):
            there = f"locked is {locked.ref}" if locked else "it is not locked"
            hint = "leave out --locked, or change experts.toml and `expertctl lock`"
            raise NotFoundError(f"{reference}: {there}", hint=hint)
        packages.append(reference.package)
    for package in packages:  # grows during the iteration
        found = lock.find(package)
        packages += (
            [r.package for r in found.requires if r.package not in packages] if found else []
        )
    return [locked for locked in lock.experts if locked.package in packages]


def _resolve_entry(
    locked: LockedExpert, here: Sequence[InstallCandidate], sources: RegistrySources
) -> tuple[ResolvedPackage, UnindexedPackage | None]:
    installed = next((c for c in here if locked.pin.is_met_by(c)), None)
    if installed is not None:
        _check_same(locked, installed, "what is installed")
        return _make_chosen(locked, installed), None
    if locked.registry == LOCAL:
        hint = "get its .expert file, then `expertctl install FILE`"
        raise NotFoundError(f"{locked.ref} was installed from a file when it was locked", hint=hint)
    exact = Reference(locked.package, registry=locked.registry, digest=locked.package_digest)
    direct = find_unindexed(Requirement(exact, LOCK_FILE), sources)
    if direct is not None:
        candidate = direct.candidate
    else:
        everything = sources.find_candidates(
            Reference(locked.package, registry=locked.registry), True
        )
        candidate = _find_version(locked, everything)
    if candidate.content_digest != locked.content_digest:
        before = version_in_lock(locked, sources).content
        now = version_in_resolution(_make_chosen(locked, candidate), sources).content
        raise changed_version_error(
            locked.ref, before, now, hint=_ACCEPT_HINT.format(ref=locked.ref)
        )
    _check_same(locked, candidate, locked.registry)
    return _make_chosen(locked, candidate), direct


def _make_chosen(locked: LockedExpert, candidate: InstallCandidate) -> ResolvedPackage:
    wanted = Reference(locked.package, digest=locked.package_digest)
    return ResolvedPackage(candidate, (Requirement(wanted, LOCK_FILE),))


def _find_version(locked: LockedExpert, candidates: Sequence[InstallCandidate]) -> InstallCandidate:
    for candidate in candidates:
        if candidate.version == locked.version:
            return candidate
    raise NotFoundError(
        f"{locked.registry} has no {locked.ref}, which is locked", hint=_RELOCK_HINT
    )


def _check_same(locked: LockedExpert, candidate: InstallCandidate, who: str) -> None:
    """Require that the statements of a lock file about an expert are true."""
    pairs = {
        "version": (locked.version, candidate.version),
        "content_digest": (locked.content_digest, candidate.content_digest),
        "requires": (locked.requires, candidate.requires),
        "base": (locked.base, candidate.base),
    }
    wrong = [name for name, (stated, true) in pairs.items() if stated != true]
    if not candidate.is_local and locked.package_digest not in candidate.package_digests:
        wrong.append("package_digest")
    if wrong:
        raise DigestError(
            f"{LOCK_FILE} says another {' and '.join(wrong)} of {locked.ref} than {who}",
            hint=f"{LOCK_FILE} was edited, or the registry lies; {_RELOCK_HINT}",
        )


def _check_authority(locked: LockedExpert, project: Project, sources: RegistrySources) -> None:
    """Require that an expert is locked to the registry that its namespace belongs to."""
    if locked.registry == LOCAL:
        return
    homes = _allowed_hosts(locked, project, sources)
    if homes and locked.registry not in homes:
        raise TrustError(
            f"{LOCK_FILE} takes {locked.ref} from {locked.registry}, but "
            f"{locked.package.namespace}/* belongs to {' and '.join(sorted(homes))}",
            hint=f"if that is right, name the registry in experts.toml; {_RELOCK_HINT}",
        )


def _allowed_hosts(locked: LockedExpert, project: Project, sources: RegistrySources) -> set[str]:
    namespace = locked.package.namespace
    named = {r.registry for r in project.experts if r.package.namespace == namespace} - {None}
    found = set()
    for host in named or {None}:
        exact = Constraint.for_version(locked.version)
        wanted = project.with_registry(Reference(locked.package, exact, registry=host))
        try:
            found.add(sources.resolve_project_host(wanted))
        except NotFoundError:  # no registry is set: any known one is allowed
            continue
    return found
