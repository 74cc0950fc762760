"""`install_request`: resolves, fetches, checks and publishes what references and files ask for.

What a file requires counts as installed if it is, or if another file provides it; only the rest is
looked up in registries. An installed, undamaged version is left as it is: its registry is asked for
news about it, but need not answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from expertctl.digest import Digest, hash_file
from expertctl.errors import OfflineError, UsageError
from expertctl.install.candidate import (
    InstallCandidate,
    ReleaseAge,
    Requirement,
    candidate_from_expert,
    candidate_from_file,
    format_moment,
)
from expertctl.install.fetch import (
    FetchItem,
    OpenProgress,
    UnindexedPackage,
    clear_downloads,
    fetch_packages,
    find_unindexed,
)
from expertctl.install.installer import (
    InstallContext,
    LockedContents,
    StagedPackage,
    VerifyAndPin,
    install_staged,
    stage_files,
)
from expertctl.install.notices import (
    Notice,
    check_resolution,
    query_authorities,
    version_in_lock,
    version_in_resolution,
    version_in_store,
)
from expertctl.install.project_file import LockedExpert
from expertctl.install.publication import InstalledPackage
from expertctl.install.resolve import CandidatePool, LockedVersion, ResolvedPackage, resolve
from expertctl.install.sources import RegistrySources
from expertctl.package.read import changed_version_error
from expertctl.reference import Constraint, PackageName, Reference
from expertctl.store.refs import LOCAL, StoredExpert
from expertctl.store.store import Store
from expertctl.trust.trust_record import TrustRecord

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """What is to be installed."""

    needs: tuple[Requirement, ...] = ()
    files: tuple[Path, ...] = ()
    locked: tuple[LockedExpert, ...] = ()
    """The entries of a lock file: preferred, and not contradicted."""
    age: ReleaseAge = field(default_factory=ReleaseAge)


@dataclass(frozen=True, slots=True)
class InstallReport:
    """The result of an install."""

    installed: tuple[InstalledPackage, ...]
    chosen: tuple[ResolvedPackage, ...]
    """What the references were resolved to."""
    notes: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    """What registries state against the chosen versions that is no reason to refuse them."""


def install_request(
    request: InstallRequest,
    context: InstallContext,
    sources: RegistrySources,
    open_progress: OpenProgress,
) -> InstallReport:
    """Install what references and files ask for, all or none of it.

    Raises:
        ExpertError: as `install_files`, `resolve` and `fetch_packages`; nothing is installed then.
    """
    if not (request.needs or request.files):
        raise UsageError("nothing to install", hint="expertctl install REF… or FILE…")
    with ExitStack() as stack:
        with open_progress(sum(p.stat().st_size for p in request.files if p.is_file())) as progress:
            staged = list(stage_files(request.files, context.store, stack, progress))
        here = find_installed_candidates(context, sources)
        unindexed = _find_unindexed_packages(request.needs, here, sources)
        files = [candidate_from_file(item.contents) for item in staged]
        needs = [*request.needs, *_file_requirements(files, [*files, *here])]
        pool = CandidatePool(
            sources.find_candidates,
            installed=files,
            files=[direct.candidate for direct in unindexed],
            locked=preferred_pins(request.locked, context),
            age=request.age,
        )
        sources.prefetch(_list_needed_indexes(request, here, unindexed))
        chosen = resolve_and_verify(needs, pool, context, sources)
        sources.check_namespace_claims(chosen)
        done = install_resolved(
            chosen,
            context,
            sources,
            open_progress,
            files=staged,
            unindexed=unindexed,
            locked=request.locked,
        )
        return replace(done, notes=(*done.notes, *describe_waiting(chosen, sources, request.age)))


def resolve_and_verify(
    requirements: Sequence[Requirement],
    pool: CandidatePool,
    context: InstallContext,
    sources: RegistrySources,
) -> list[ResolvedPackage]:
    """Choose versions, installed ones among them, and ask the registries of all that were chosen.

    Where an answer revokes a key, the versions it signed no longer count and the choice is
    repeated.
    """
    if not requirements:
        return []
    here = find_installed_candidates(context, sources)
    while True:
        chosen = resolve(requirements, replace(pool, installed=[*here, *pool.installed]))
        query_authorities(((i.candidate.registry, i.candidate.package) for i in chosen), sources)
        before, here = here, find_installed_candidates(context, sources)
        if here == before:
            return chosen


def preferred_pins(
    entries: Iterable[LockedExpert], context: InstallContext
) -> dict[PackageName, LockedVersion]:
    """Return the locked versions that are still preferred: not those whose change is accepted."""
    return {
        entry.package: entry.pin for entry in entries if entry.ref not in context.accept_changed
    }


def install_resolved(
    chosen: Sequence[ResolvedPackage],
    context: InstallContext,
    sources: RegistrySources,
    open_progress: OpenProgress,
    *,
    files: Sequence[StagedPackage] = (),
    unindexed: Sequence[UnindexedPackage] = (),
    locked: Sequence[LockedExpert] = (),
) -> InstallReport:
    """Install what was resolved, and staged files, all or none of it.

    ``locked`` are entries of a lock file that the chosen versions must not contradict.

    Raises:
        RevokedError: when a key was revoked that signed something chosen.
        ChangedVersionError: when a version has another content than before, and was not accepted.
        ExpertError: as `install_staged` and `fetch_packages`; nothing is installed then.
    """
    experts = context.store.list_experts()
    notices = check_resolution(chosen, experts, locked, sources, accepted=context.accept_changed)
    there = {expert.ref: expert for expert in experts}
    brought = {item.contents.content_digest for item in files}
    remaining = [item for item in chosen if item.candidate.content_digest not in brought]
    wanted = [item for item in remaining if not _is_installed(item, there, context, sources)]
    named = {direct.candidate: direct for direct in unindexed}
    to_fetch = [_make_fetch_item(item, sources, named.get(item.candidate)) for item in wanted]
    _check_online(to_fetch, sources)
    pinned = [item for item in chosen if item in wanted or _is_vouched_for(item, there, sources)]

    def pinning(verify: Callable[[TrustRecord], T]) -> T:
        return sources.verify_and_pin(pinned, verify)

    stated = {entry.ref: version_in_lock(entry, sources).content for entry in locked}
    new = _fetch_and_install(to_fetch, files, context, open_progress, pinning, stated)
    sources.accept_contents(chosen, context.accept_changed)
    kept = [
        InstalledPackage(there[item.candidate.ref], "already installed")
        for item in remaining
        if item not in wanted and any(need.is_from_user for need in item.needs)
    ]
    return InstallReport(_add_warnings([*new, *kept], notices), tuple(chosen), notices=notices)


def _add_warnings(
    installed: Iterable[InstalledPackage], notices: Sequence[Notice]
) -> tuple[InstalledPackage, ...]:
    """Return the installed packages, each with the notices about it."""
    return tuple(
        replace(i, warnings=(*i.warnings, *(n.text for n in notices if n.ref == i.expert.ref)))
        for i in installed
    )


def _is_vouched_for(
    item: ResolvedPackage, there: Mapping[str, StoredExpert], sources: RegistrySources
) -> bool:
    """Tell whether an installed expert, verified at its install, confirms the index's keys."""
    expert = there.get(item.candidate.ref)
    document = sources.find_index(item.candidate.registry, item.candidate.package)
    if expert is None or document is None:
        return False
    keys = {entry.key.key_id for entry in document.keys}
    return sources.is_pinned(item.candidate) or expert.signer in keys


def find_installed_candidates(
    context: InstallContext, sources: RegistrySources
) -> list[InstallCandidate]:
    """Return the installed experts that may be chosen."""
    return [
        candidate_from_expert(expert, yanked=sources.find_yank_reason(expert))
        for expert in context.store.list_experts()
        if sources.find_revocation(expert.signer, expert.package, expert.registry) is None
        and expert.ref not in context.accept_changed
    ]


def describe_waiting(
    chosen: Iterable[ResolvedPackage], sources: RegistrySources, age: ReleaseAge
) -> list[str]:
    """Return notes about newer versions that are skipped because they are too young."""
    notes = []
    for item in chosen:
        newer = [
            c for c in sources.list_offered(item.candidate) if c.version > item.candidate.version
        ]
        young = [c for c in newer if age.allowed_at(c) and not c.version.prerelease]
        for candidate in young[-1:]:
            moment = age.allowed_at(candidate)
            notes.append(f"{candidate.ref} waits until {format_moment(moment)}" if moment else "")
    return notes


def _find_unindexed_packages(
    requirements: Iterable[Requirement], here: Sequence[InstallCandidate], sources: RegistrySources
) -> list[UnindexedPackage]:
    """Find packages of registries without an index, unless they are installed already."""
    absent = [
        need
        for need in requirements
        if not (need.names_one_version and any(c.satisfies(need.wanted) for c in here))
    ]
    return [found for need in absent if (found := find_unindexed(need, sources))]


def _list_needed_indexes(
    request: InstallRequest, here: Sequence[InstallCandidate], unindexed: Sequence[UnindexedPackage]
) -> list[tuple[Reference, bool]]:
    """Return the indexes needed in any case: none where an installed version will do."""
    found = {direct.candidate.package for direct in unindexed}
    pins = {entry.package: entry.pin for entry in request.locked}
    indexes = []
    for need in request.needs:
        pin = pins.get(need.package)
        good = [c for c in here if (pin.is_met_by(c) if pin else need.names_one_version)]
        if need.package not in found and not any(c.satisfies(need.wanted) for c in good):
            indexes.append((Reference(need.package, registry=need.wanted.registry), need.by_hand))
    return indexes if len(indexes) > 1 else []


def _file_requirements(
    files: Sequence[InstallCandidate], there: Sequence[InstallCandidate]
) -> list[Requirement]:
    """Return the requirements of files that neither the files nor the store satisfy."""
    return [
        Requirement(wanted, file.ref, file.package)
        for file in files
        for wanted in file.requires
        if not any(candidate.satisfies(wanted) for candidate in there)
    ]


def _is_installed(
    item: ResolvedPackage,
    there: Mapping[str, StoredExpert],
    context: InstallContext,
    sources: RegistrySources,
) -> bool:
    """Tell whether exactly this is installed, every byte of it.

    Raises:
        ChangedVersionError: when the version is installed with other content.
    """
    candidate = item.candidate
    expert = there.get(candidate.ref)
    if expert is None:
        return False
    if expert.content_digest != candidate.content_digest:
        if candidate.ref in context.accept_changed:
            return False
        before, now = version_in_store(expert).content, version_in_resolution(item, sources).content
        raise changed_version_error(candidate.ref, before, now)
    same = (expert.registry, expert.package_digest) == (candidate.registry, item.package_digest)
    return same and (expert.registry == LOCAL or _is_whole(expert, context.store))


def _is_whole(expert: StoredExpert, store: Store) -> bool:
    try:
        return all(
            hash_file(store.paths.blob(file.digest)) == (file.size, file.digest)
            for file in expert.layers
        )
    except FileNotFoundError:
        return False


def _make_fetch_item(
    item: ResolvedPackage, sources: RegistrySources, unindexed: UnindexedPackage | None
) -> FetchItem:
    """Return the package to fetch for a choice; its signer must be trusted.

    Raises:
        TrustError: when nobody who is trusted signed that form.
    """
    candidate = item.candidate
    found = sources.find_release(candidate)
    if found is not None:
        sources.check_signer(candidate, item.package_digest)
    return FetchItem(
        Reference(candidate.package, Constraint.for_version(candidate.version)),
        candidate.registry,
        sources.open_client(candidate.registry),
        item.package_digest,
        candidate.content_digest,
        found[1] if found else None,
        unindexed.named_digest if unindexed else _find_named_digest(item, sources),
    )


def _find_named_digest(item: ResolvedPackage, sources: RegistrySources) -> Digest | None:
    """Return the digest that the user names again for an expert that is damaged here."""
    candidate = item.candidate
    named = {need.wanted.digest for need in item.needs if need.by_hand}
    if sources.knows_host(candidate.registry) or candidate.package_digest not in named:
        return None
    return candidate.package_digest


def _check_online(items: Sequence[FetchItem], sources: RegistrySources) -> None:
    if items and sources.settings.offline:
        names = ", ".join(str(item.wanted) for item in items)
        raise OfflineError(
            f"{names} must be fetched, and expertctl is offline",
            hint="leave out --offline, EXPERT_OFFLINE and the setting `offline`",
        )


def _fetch_and_install(
    items: Sequence[FetchItem],
    files: Sequence[StagedPackage],
    context: InstallContext,
    open_progress: OpenProgress,
    pinning: VerifyAndPin,
    locked: LockedContents,
) -> list[InstalledPackage]:
    if not (items or files):
        return pinning(lambda _: [])
    with ExitStack() as stack:
        fetched: list[StagedPackage] = []
        if items:
            staging = stack.enter_context(context.store.stage_package())
            fetched = fetch_packages(
                items,
                store=context.store,
                staging=staging,
                registries=context.registries,
                open_progress=open_progress,
            )
        done = install_staged([*files, *fetched], context, locked=locked, pinning=pinning)
        clear_downloads(fetched, context.registries)
        return done
