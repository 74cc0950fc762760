"""Installing what references and files ask for: resolved, fetched, checked, published.

What a file requires counts as installed if it is, or if another file brings it; only the rest is
looked for in registries. What is installed already and whole is left as it is, without network.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from expertctl.digest import Digest, hash_file
from expertctl.errors import ConflictError, OfflineError, RevokedError, UsageError
from expertctl.install.candidate import Candidate, in_file, installed
from expertctl.install.direct import Direct, find_direct
from expertctl.install.disagreement import Need
from expertctl.install.fetch import Lend, Parcel, fetch, tidy
from expertctl.install.install import Installed, Staged, install_staged, stage_files
from expertctl.install.release_age import ReleaseAge, shown
from expertctl.install.resolve import Chosen, Pin, Universe, resolve
from expertctl.install.sources import Sources
from expertctl.reference import Constraint, PackageName, Reference
from expertctl.routing.index import RoutingIndex
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.ref import LOCAL, StoredExpert
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore


@dataclass(frozen=True, slots=True)
class Target:
    """Where experts are installed to, and what the user tolerates."""

    store: Store
    bases: BaseStore
    trust: TrustStore
    registries: Path
    catalogue: Catalogue | None = None
    index: RoutingIndex | None = None
    allow_unsigned: bool = False
    allow_base_mismatch: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be installed."""

    needs: tuple[Need, ...] = ()
    files: tuple[Path, ...] = ()
    pins: Mapping[PackageName, Pin] = field(default_factory=dict)
    """Versions of a lock file, which are preferred."""
    age: ReleaseAge = field(default_factory=ReleaseAge)


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an order."""

    installed: tuple[Installed, ...]
    chosen: tuple[Chosen, ...]
    """What the references were resolved to."""
    notes: tuple[str, ...] = ()


def install_order(order: Order, target: Target, sources: Sources, lend: Lend) -> Done:
    """Install what references and files ask for, all or none of it.

    Raises:
        ExpertError: as `install_files`, `resolve` and `fetch`; nothing is installed then.
    """
    if not (order.needs or order.files):
        raise UsageError("nothing to install", hint="expertctl install REF… or FILE…")
    with ExitStack() as stack:
        with lend(sum(p.stat().st_size for p in order.files if p.is_file())) as progress:
            staged = list(stage_files(order.files, target.store, stack, progress))
        here = given(target.store, sources)
        directs = _directs(order.needs, here, sources)
        files = [in_file(item.contents) for item in staged]
        needs = [*order.needs, *_needs_of_files(files, [*files, *here])]
        universe = Universe(
            sources.candidates,
            given=[*here, *files],
            files=[direct.candidate for direct in directs],
            locked=order.pins,
            age=order.age,
        )
        sources.prefetch(_surely_asked(order, here, directs))
        chosen = resolve(needs, universe) if needs else []
        sources.demand_claims(chosen)
        done = install_chosen(chosen, target, sources, lend, files=staged, directs=directs)
        return replace(done, notes=(*done.notes, *waiting(chosen, sources, order.age)))


def install_chosen(
    chosen: Sequence[Chosen],
    target: Target,
    sources: Sources,
    lend: Lend,
    *,
    files: Sequence[Staged] = (),
    directs: Sequence[Direct] = (),
) -> Done:
    """Install what was resolved, and files that are staged, all or none of it.

    Raises:
        ExpertError: as `install_staged` and `fetch`; nothing is installed then.
    """
    there = {expert.ref: expert for expert in target.store.experts()}
    brought = {item.contents.content_digest for item in files}
    asked = [item for item in chosen if item.candidate.content_digest not in brought]
    wanted = [item for item in asked if not _is_there(item, there, target.store)]
    named = {direct.candidate: direct for direct in directs}
    parcels = [_parcel(item, sources, named.get(item.candidate)) for item in wanted]
    _demand_network(parcels, sources)
    told = sources.pin(chosen)
    _refuse_revoked([there[i.candidate.ref] for i in asked if i not in wanted], sources)
    new = _fetch_and_install(parcels, files, target, lend)
    kept = [
        Installed(there[item.candidate.ref], "already installed", _yanked(item, sources))
        for item in asked
        if item not in wanted and any(need.from_person for need in item.needs)
    ]
    yanked = {item.candidate.ref: _yanked(item, sources) for item in wanted}
    done = [replace(i, warnings=(*i.warnings, *yanked.get(i.expert.ref, ()))) for i in new]
    return Done((*done, *kept), tuple(chosen), tuple(told))


def given(store: Store, sources: Sources) -> list[Candidate]:
    """Return the installed experts that may be counted on."""
    return [
        installed(expert)
        for expert in store.experts()
        if not sources.is_revoked(expert.signer, expert.package, expert.registry)
    ]


def waiting(chosen: Iterable[Chosen], sources: Sources, age: ReleaseAge) -> list[str]:
    """Say which newer versions are passed over because they are too young."""
    notes = []
    for item in chosen:
        newer = [c for c in sources.offered(item.candidate) if c.version > item.candidate.version]
        young = [c for c in newer if age.ripe_at(c) and not c.version.prerelease]
        for candidate in young[-1:]:
            moment = age.ripe_at(candidate)
            notes.append(f"{candidate.ref} waits until {shown(moment)}" if moment else "")
    return notes


def _directs(needs: Iterable[Need], here: Sequence[Candidate], sources: Sources) -> list[Direct]:
    """Find what registries without an index have, unless it is installed already."""
    absent = [
        need
        for need in needs
        if not (need.names_one_version and any(c.fits(need.wanted) for c in here))
    ]
    return [found for need in absent if (found := find_direct(need, sources))]


def _surely_asked(
    order: Order, here: Sequence[Candidate], directs: Sequence[Direct]
) -> list[tuple[Reference, bool]]:
    """Return the indexes needed in any case: none for installed versions that will do."""
    found = {direct.candidate.package for direct in directs}
    asked = []
    for need in order.needs:
        pin = order.pins.get(need.package)
        good = [c for c in here if (pin.is_met_by(c) if pin else need.names_one_version)]
        if need.package not in found and not any(c.fits(need.wanted) for c in good):
            asked.append((Reference(need.package, registry=need.wanted.registry), need.by_hand))
    return asked if len(asked) > 1 else []


def _needs_of_files(files: Sequence[Candidate], there: Sequence[Candidate]) -> list[Need]:
    """Return what files require and neither the files nor the store have."""
    return [
        Need(wanted, file.ref, file.package)
        for file in files
        for wanted in file.requires
        if not any(candidate.fits(wanted) for candidate in there)
    ]


def _is_there(item: Chosen, there: Mapping[str, StoredExpert], store: Store) -> bool:
    """Tell whether exactly this is installed, every byte of it.

    Raises:
        ConflictError: when the version is installed with other content.
    """
    candidate = item.candidate
    expert = there.get(candidate.ref)
    if expert is None:
        return False
    if expert.content_digest != candidate.content_digest:
        raise ConflictError(
            f"{candidate.ref} is installed with other content than {candidate.registry} has",
            hint=f"first `expertctl remove {candidate.ref}`, if what is installed may go",
        )
    same = (expert.registry, expert.package_digest) == (candidate.registry, item.package_digest)
    return same and (expert.registry == LOCAL or _is_whole(expert, store))


def _is_whole(expert: StoredExpert, store: Store) -> bool:
    try:
        return all(
            hash_file(store.paths.blob(file.digest)) == (file.size, file.digest)
            for file in expert.layers
        )
    except FileNotFoundError:
        return False


def _parcel(item: Chosen, sources: Sources, direct: Direct | None) -> Parcel:
    """Return what is to be fetched for a choice; its signer must be one that counts.

    Raises:
        TrustError: when nobody who is trusted signed that form.
    """
    candidate = item.candidate
    found = sources.release(candidate)
    if found is not None:
        sources.demand_signer(candidate, item.package_digest)
    return Parcel(
        Reference(candidate.package, Constraint.exactly(candidate.version)),
        candidate.registry,
        sources.client(candidate.registry),
        item.package_digest,
        candidate.content_digest,
        found[1] if found else None,
        direct.named if direct else _named_again(item, sources),
    )


def _named_again(item: Chosen, sources: Sources) -> Digest | None:
    """Return the exact bytes that the user names again for an expert that is damaged here."""
    candidate = item.candidate
    named = {need.wanted.digest for need in item.needs if need.by_hand}
    if sources.knows(candidate.registry) or candidate.package_digest not in named:
        return None
    return candidate.package_digest


def _refuse_revoked(present: Iterable[StoredExpert], sources: Sources) -> None:
    """Refuse installed experts whose key the registry has just reported as revoked."""
    for expert in present:
        if sources.is_revoked(expert.signer, expert.package, expert.registry):
            hint = "wait for a version that is signed with another key"
            raise RevokedError(f"{expert.ref}: the key that signed it was revoked", hint=hint)


def _demand_network(parcels: Sequence[Parcel], sources: Sources) -> None:
    if parcels and sources.settings.offline:
        names = ", ".join(str(parcel.wanted) for parcel in parcels)
        raise OfflineError(
            f"{names} must be fetched, and expertctl is offline",
            hint="leave out --offline, EXPERT_OFFLINE and the setting `offline`",
        )


def _fetch_and_install(
    parcels: Sequence[Parcel], files: Sequence[Staged], target: Target, lend: Lend
) -> list[Installed]:
    if not (parcels or files):
        return []
    with ExitStack() as stack:
        fetched: list[Staged] = []
        if parcels:
            staging = stack.enter_context(target.store.stage())
            fetched = fetch(
                parcels,
                store=target.store,
                staging=staging,
                registries=target.registries,
                lend=lend,
            )
        done = install_staged(
            [*files, *fetched],
            store=target.store,
            bases=target.bases,
            trust=target.trust,
            catalogue=target.catalogue,
            index=target.index,
            allow_unsigned=target.allow_unsigned,
            allow_base_mismatch=target.allow_base_mismatch,
        )
        tidy(fetched, target.registries)
        return done


def _yanked(item: Chosen, sources: Sources) -> tuple[str, ...]:
    """Return a warning where the publisher has taken a version back."""
    reason = sources.yanked(item.candidate)
    if reason is None:
        return ()
    why = f": {reason}" if reason else ""
    return (f"{item.candidate.ref} was yanked{why}; `expertctl update` finds another",)
