"""Installing what references and files ask for: resolved, fetched, checked, published.

What a file requires counts as installed if it is, or if another file brings it; only the rest is
looked for in registries. What is installed already and whole is left as it is: its registry is
asked what it says of it now, but need not answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from expertctl.digest import Digest, hash_file
from expertctl.errors import OfflineError, UsageError
from expertctl.install.candidate import Candidate, in_file, installed
from expertctl.install.direct import Direct, find_direct
from expertctl.install.disagreement import Need
from expertctl.install.fetch import Lend, Parcel, fetch, tidy
from expertctl.install.install import (
    Contents,
    Pinning,
    Staged,
    install_staged,
    stage_files,
)
from expertctl.install.lock import Locked
from expertctl.install.notices import (
    Notice,
    ask_about,
    held_as_chosen,
    held_in_lock,
    held_in_store,
    sound_notices,
)
from expertctl.install.publication import Installed
from expertctl.install.release_age import ReleaseAge, shown
from expertctl.install.resolve import Chosen, Pin, Universe, resolve
from expertctl.install.sources import Sources
from expertctl.package.version_content import changed_version
from expertctl.reference import Constraint, PackageName, Reference
from expertctl.routing.index import RoutingIndex
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.ref import LOCAL, StoredExpert
from expertctl.store.store import Store
from expertctl.trust.policy import TrustStore
from expertctl.trust.record import TrustRecord

T = TypeVar("T")


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
    accept_changed: frozenset[str] = frozenset()
    """Versions, ``namespace/name@version``, that may have another content than before."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be installed."""

    needs: tuple[Need, ...] = ()
    files: tuple[Path, ...] = ()
    locked: tuple[Locked, ...] = ()
    """The entries of a lock file: preferred, and not contradicted."""
    age: ReleaseAge = field(default_factory=ReleaseAge)


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an order."""

    installed: tuple[Installed, ...]
    chosen: tuple[Chosen, ...]
    """What the references were resolved to."""
    notes: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()
    """What registries say against what was chosen, and is no reason to refuse it."""


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
        here = given(target, sources)
        directs = _directs(order.needs, here, sources)
        files = [in_file(item.contents) for item in staged]
        needs = [*order.needs, *_needs_of_files(files, [*files, *here])]
        universe = Universe(
            sources.candidates,
            given=files,
            files=[direct.candidate for direct in directs],
            locked=kept_pins(order.locked, target),
            age=order.age,
        )
        sources.prefetch(_surely_asked(order, here, directs))
        chosen = resolve_and_ask(needs, universe, target, sources)
        sources.demand_claims(chosen)
        done = install_chosen(
            chosen,
            target,
            sources,
            lend,
            files=staged,
            directs=directs,
            locked=order.locked,
        )
        return replace(done, notes=(*done.notes, *waiting(chosen, sources, order.age)))


def resolve_and_ask(
    needs: Sequence[Need], universe: Universe, target: Target, sources: Sources
) -> list[Chosen]:
    """Choose versions, installed ones among them, and ask registries about all that were chosen.

    Where an answer revokes a key, what it signed counts no more, and the choice is made again.
    """
    if not needs:
        return []
    here = given(target, sources)
    while True:
        chosen = resolve(needs, replace(universe, given=[*here, *universe.given]))
        ask_about(((i.candidate.registry, i.candidate.package) for i in chosen), sources)
        before, here = here, given(target, sources)
        if here == before:
            return chosen


def kept_pins(entries: Iterable[Locked], target: Target) -> dict[PackageName, Pin]:
    """Return the locked versions that are still preferred: not those whose change is accepted."""
    return {entry.package: entry.pin for entry in entries if entry.ref not in target.accept_changed}


def install_chosen(
    chosen: Sequence[Chosen],
    target: Target,
    sources: Sources,
    lend: Lend,
    *,
    files: Sequence[Staged] = (),
    directs: Sequence[Direct] = (),
    locked: Sequence[Locked] = (),
) -> Done:
    """Install what was resolved, and files that are staged, all or none of it.

    ``locked`` are entries of a lock file that what was chosen must not contradict.

    Raises:
        RevokedError: when a key was revoked that signed something chosen.
        ChangedVersionError: when a version has another content than before, and was not accepted.
        ExpertError: as `install_staged` and `fetch`; nothing is installed then.
    """
    experts = target.store.experts()
    notices = sound_notices(chosen, experts, locked, sources, accepted=target.accept_changed)
    there = {expert.ref: expert for expert in experts}
    brought = {item.contents.content_digest for item in files}
    asked = [item for item in chosen if item.candidate.content_digest not in brought]
    wanted = [item for item in asked if not _is_there(item, there, target, sources)]
    named = {direct.candidate: direct for direct in directs}
    parcels = [_parcel(item, sources, named.get(item.candidate)) for item in wanted]
    _demand_network(parcels, sources)
    pinned = [item for item in chosen if item in wanted or _is_vouched_for(item, there, sources)]

    def pinning(verify: Callable[[TrustRecord], T]) -> T:
        return sources.verify_and_pin(pinned, verify)

    stated = {entry.ref: held_in_lock(entry, sources).content for entry in locked}
    new = _fetch_and_install(parcels, files, target, lend, pinning, stated)
    sources.accept_contents(chosen, target.accept_changed)
    kept = [
        Installed(there[item.candidate.ref], "already installed")
        for item in asked
        if item not in wanted and any(need.from_person for need in item.needs)
    ]
    return Done(_warned([*new, *kept], notices), tuple(chosen), notices=notices)


def _warned(installed: Iterable[Installed], notices: Sequence[Notice]) -> tuple[Installed, ...]:
    """Return what was installed, each with the notices about it."""
    return tuple(
        replace(i, warnings=(*i.warnings, *(n.text for n in notices if n.ref == i.expert.ref)))
        for i in installed
    )


def _is_vouched_for(item: Chosen, there: Mapping[str, StoredExpert], sources: Sources) -> bool:
    """Tell whether an installed expert, whose signature was verified then, shows the first keys."""
    expert = there.get(item.candidate.ref)
    document = sources.statement(item.candidate.registry, item.candidate.package)
    if expert is None or document is None:
        return False
    keys = {entry.key.key_id for entry in document.keys}
    return sources.is_pinned(item.candidate) or expert.signer in keys


def given(target: Target, sources: Sources) -> list[Candidate]:
    """Return the installed experts that may be counted on."""
    return [
        installed(expert, yanked=sources.yank_reason(expert))
        for expert in target.store.experts()
        if not sources.is_revoked(expert.signer, expert.package, expert.registry)
        and expert.ref not in target.accept_changed
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
    pins = {entry.package: entry.pin for entry in order.locked}
    asked = []
    for need in order.needs:
        pin = pins.get(need.package)
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


def _is_there(
    item: Chosen, there: Mapping[str, StoredExpert], target: Target, sources: Sources
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
        if candidate.ref in target.accept_changed:
            return False
        before, now = held_in_store(expert).content, held_as_chosen(item, sources).content
        raise changed_version(candidate.ref, before, now)
    same = (expert.registry, expert.package_digest) == (candidate.registry, item.package_digest)
    return same and (expert.registry == LOCAL or _is_whole(expert, target.store))


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


def _demand_network(parcels: Sequence[Parcel], sources: Sources) -> None:
    if parcels and sources.settings.offline:
        names = ", ".join(str(parcel.wanted) for parcel in parcels)
        raise OfflineError(
            f"{names} must be fetched, and expertctl is offline",
            hint="leave out --offline, EXPERT_OFFLINE and the setting `offline`",
        )


def _fetch_and_install(
    parcels: Sequence[Parcel],
    files: Sequence[Staged],
    target: Target,
    lend: Lend,
    pinning: Pinning,
    locked: Contents,
) -> list[Installed]:
    if not (parcels or files):
        return pinning(lambda _: [])
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
            accept_changed=target.accept_changed,
            locked=locked,
            pinning=pinning,
        )
        tidy(fetched, target.registries)
        return done
