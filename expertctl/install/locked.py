"""Installing exactly what a lock file says, and nothing that it should not say.

A lock file comes with a project, so nothing in it is believed unchecked: its registry must be the
one where the namespace belongs, its digests those of the registry's signed index or of what is
installed, and the publisher's key must count. It can only narrow what would be installed without
it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from expertctl.errors import DigestError, NotFoundError, TrustError
from expertctl.install.candidate import Candidate
from expertctl.install.direct import Direct, find_direct
from expertctl.install.disagreement import Need
from expertctl.install.fetch import Lend
from expertctl.install.lock import Lock, Locked, demand_lock
from expertctl.install.notices import ask_about, held_as_chosen, held_in_lock
from expertctl.install.order import Done, Target, given, install_chosen
from expertctl.install.project import Project
from expertctl.install.resolve import Chosen
from expertctl.install.sources import Sources
from expertctl.install.worklist import Worklist
from expertctl.package.version_content import changed_version
from expertctl.reference import Constraint, PackageName, Reference
from expertctl.store.ref import LOCAL

LOCK = "expert.lock"
_ACCEPT = "if the publisher confirms it, `expertctl lock --accept-changed {ref}`"
_AGAIN = "if you trust what the registry says, `expertctl lock` writes expert.lock anew"


@dataclass(frozen=True, slots=True)
class _Found:
    """What one entry of a lock file was resolved to."""

    chosen: Chosen
    direct: Direct | None = None


def install_locked(
    worklist: Worklist,
    wanted: Sequence[Reference],
    target: Target,
    sources: Sources,
    lend: Lend,
) -> Done:
    """Install what the lock file says, or only the part of it that some references need.

    Raises:
        NotFoundError: when there is no lock file, or it lacks what is wanted.
        ConflictError: when it is not that of experts.toml.
        TrustError: when it says something else than the registry, or another registry.
        ExpertError: as `install_chosen`; nothing is installed then.
    """
    project, lock = worklist.file.read(), demand_lock(worklist.file.lock_path)
    lock.demand_current(project, what=str(worklist.file.lock_path))
    part = _part(lock, wanted)
    for locked in part:
        _demand_home(locked, project, sources)
    ask_about(((locked.registry, locked.package) for locked in part), sources)
    here = given(target, sources)
    found = [_find(locked, here, sources) for locked in part]
    directs = [item.direct for item in found if item.direct is not None]
    chosen = [item.chosen for item in found]
    return install_chosen(chosen, target, sources, lend, directs=directs, locked=part)


def _part(lock: Lock, wanted: Sequence[Reference]) -> list[Locked]:
    """Return the entries that some references need; all of them without references."""
    if not wanted:
        return list(lock.experts)
    packages: list[PackageName] = []
    for reference in wanted:
        locked = lock.locked(reference.package)
        if locked is None or not locked.fits(reference):
            there = f"locked is {locked.ref}" if locked else "it is not locked"
            hint = "leave out --locked, or change experts.toml and `expertctl lock`"
            raise NotFoundError(f"{reference}: {there}", hint=hint)
        packages.append(reference.package)
    for package in packages:  # grows while it is walked
        found = lock.locked(package)
        packages += (
            [r.package for r in found.requires if r.package not in packages] if found else []
        )
    return [locked for locked in lock.experts if locked.package in packages]


def _find(locked: Locked, here: Sequence[Candidate], sources: Sources) -> _Found:
    installed = next((c for c in here if locked.pin.is_met_by(c)), None)
    if installed is not None:
        _demand_same(locked, installed, "what is installed")
        return _Found(_chosen(locked, installed))
    if locked.registry == LOCAL:
        hint = "get its .expert file, then `expertctl install FILE`"
        raise NotFoundError(f"{locked.ref} was installed from a file when it was locked", hint=hint)
    exact = Reference(locked.package, registry=locked.registry, digest=locked.package_digest)
    direct = find_direct(Need(exact, LOCK), sources)
    if direct is not None:
        candidate = direct.candidate
    else:
        everything = sources.candidates(Reference(locked.package, registry=locked.registry), True)
        candidate = _version(locked, everything)
    if candidate.content_digest != locked.content_digest:
        before = held_in_lock(locked, sources).content
        now = held_as_chosen(_chosen(locked, candidate), sources).content
        raise changed_version(locked.ref, before, now, way_out=_ACCEPT.format(ref=locked.ref))
    _demand_same(locked, candidate, locked.registry)
    return _Found(_chosen(locked, candidate), direct)


def _chosen(locked: Locked, candidate: Candidate) -> Chosen:
    wanted = Reference(locked.package, digest=locked.package_digest)
    return Chosen(candidate, (Need(wanted, LOCK),))


def _version(locked: Locked, candidates: Sequence[Candidate]) -> Candidate:
    for candidate in candidates:
        if candidate.version == locked.version:
            return candidate
    raise NotFoundError(f"{locked.registry} has no {locked.ref}, which is locked", hint=_AGAIN)


def _demand_same(locked: Locked, candidate: Candidate, who: str) -> None:
    """Demand that what a lock file says of an expert is true."""
    pairs = {
        "version": (locked.version, candidate.version),
        "content_digest": (locked.content_digest, candidate.content_digest),
        "requires": (locked.requires, candidate.requires),
        "base": (locked.base, candidate.base),
    }
    wrong = [name for name, (stated, true) in pairs.items() if stated != true]
    if not candidate.given and locked.package_digest not in candidate.package_digests:
        wrong.append("package_digest")
    if wrong:
        message = f"{LOCK} says another {' and '.join(wrong)} of {locked.ref} than {who}"
        raise DigestError(message, hint=f"{LOCK} was edited, or the registry lies; {_AGAIN}")


def _demand_home(locked: Locked, project: Project, sources: Sources) -> None:
    """Demand that an expert is locked to the registry where its namespace belongs."""
    if locked.registry == LOCAL:
        return
    homes = _homes(locked, project, sources)
    if homes and locked.registry not in homes:
        raise TrustError(
            f"{LOCK} takes {locked.ref} from {locked.registry}, but {locked.package.namespace}/* "
            f"belongs to {' and '.join(sorted(homes))}",
            hint=f"if that is right, name the registry in experts.toml; {_AGAIN}",
        )


def _homes(locked: Locked, project: Project, sources: Sources) -> set[str]:
    namespace = locked.package.namespace
    named = {r.registry for r in project.experts if r.package.namespace == namespace} - {None}
    found = set()
    for host in named or {None}:
        exact = Constraint.exactly(locked.version)
        wanted = project.located(Reference(locked.package, exact, registry=host))
        try:
            found.add(sources.project_host(wanted))
        except NotFoundError:  # no registry is set: any that is known will do
            continue
    return found
