"""Operations on installed experts: removing, explaining why they are installed, exporting.

An expert or a base is not removed while others need it, unless forced. The store does not record
whether the user asked for an expert by name, so `explain_install` cannot say so. An exported set
holds the named experts and all that they require, so that `install_set` finds everything in it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.errors import ConflictError, ExpertError, NotFoundError, UsageError
from expertctl.install.candidate import InstallCandidate, candidate_from_expert
from expertctl.install.publication import expand_requirements, find_dependants
from expertctl.package.directory import export_peft_directories
from expertctl.package.layout import PackageLayout, build_index_name, build_set_layout
from expertctl.package.read import is_file_name
from expertctl.package.write import write_oci_archive, write_package
from expertctl.reference import parse_target
from expertctl.routing.index import RoutingIndex
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.package_reader import open_experts, open_package
from expertctl.store.refs import DamagedRef, RequiredBase, StoredExpert
from expertctl.store.store import Store
from expertctl.store.transaction import FreedFiles
from expertctl.trust.grants import Grant
from expertctl.trust.trust_record import TrustRecord


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """What was removed, and warnings about experts that lack a requirement now."""

    ref: str
    freed: FreedFiles
    warnings: tuple[str, ...] = ()


def remove_expert(
    wanted: str,
    *,
    store: Store,
    catalogue: Catalogue | None = None,
    index: RoutingIndex | None = None,
    force: bool = False,
) -> RemovalReport:
    """Remove the preferred version that fits; given its exact name, also one with a damaged ref.

    Raises:
        NotFoundError: when nothing fits.
        ConflictError: when others require it and ``force`` is not given.
    """
    damaged = next((ref for ref in store.scan().damaged if ref.name == wanted), None)
    if damaged is not None:
        return _discard_damaged(damaged, store)
    expert = store.find(parse_target(wanted))
    with store.begin_transaction() as changes:
        experts = changes.scan().experts
        if expert not in experts:
            raise NotFoundError(f"{expert.ref} was removed or replaced meanwhile", hint="try again")
        needy = find_dependants(expert, experts)
        if needy and not force:
            raise _still_needed_error(expert.ref, needy, f"expertctl remove {expert.ref} --force")
        freed = changes.remove(expert)
    warnings = [f"{ref} requires {expert.package} and will not run" for ref in needy]
    warnings += _unregister(expert, catalogue, index)
    return RemovalReport(expert.ref, freed, tuple(warnings))


def remove_base(
    wanted: str, *, bases: BaseStore, store: Store, force: bool = False
) -> RemovalReport:
    """Unregister a base.

    Raises:
        NotFoundError: when it is not known.
        ConflictError: when experts need it and ``force`` is not given.
    """
    base = bases.find(wanted)
    others = [other for other in bases.list_bases() if other.name != base.name]
    needy = [expert.ref for expert in find_stranded_experts(base, others, store.list_experts())]
    if needy and not force:
        raise _still_needed_error(base.name, needy, f"expertctl base remove {base.name} --force")
    bases.remove(base)
    warnings = [f"{ref} needs {base.name} and will not run" for ref in needy]
    return RemovalReport(base.name, FreedFiles(), tuple(warnings))


def find_stranded_experts(
    base: StoredBase, others: Sequence[StoredBase], experts: Sequence[StoredExpert]
) -> list[StoredExpert]:
    """Return the experts that fit a base and none of the others."""
    return [
        expert
        for expert in experts
        if fits_base(expert.base, base)
        and not any(fits_base(expert.base, other) for other in others)
    ]


def fits_base(required: RequiredBase, base: StoredBase) -> bool:
    """Tell whether a base is the one that an installed expert was made for."""
    identity = base.identity
    tokenizer = identity.tokenizer_for_version(required.tokenizer_version)
    if (required.arch, required.tokenizer) != (identity.arch, tokenizer):
        return False
    if required.weights is None:
        return (required.name, required.revision) == (identity.name, identity.revision)
    return identity.weights in {required.weights, *required.accepts}


def _discard_damaged(damaged: DamagedRef, store: Store) -> RemovalReport:
    with store.begin_transaction() as changes:
        if damaged not in changes.scan().damaged:
            raise NotFoundError(
                f"the record of {damaged.name} was removed or replaced meanwhile", hint="try again"
            )
        changes.discard(damaged.path)
    hint = "its files stay until `expertctl gc`"
    return RemovalReport(
        damaged.name, FreedFiles(), (f"the record of {damaged.name} was damaged; {hint}",)
    )


def _unregister(
    expert: StoredExpert, catalogue: Catalogue | None, index: RoutingIndex | None
) -> list[str]:
    try:
        if catalogue is not None:
            catalogue.remove(expert)
        if index is not None:
            index.remove([expert.content_digest])
    except ExpertError as error:
        return [f"{expert.ref} is still in the index: {error.message}; `expertctl reindex`"]
    return []


def _still_needed_error(name: str, needy: Sequence[str], command: str) -> ConflictError:
    hint = f"remove those first, or `{command}`"
    return ConflictError(f"{name} is needed by {', '.join(needy)}", hint=hint)


@dataclass(frozen=True, slots=True)
class RequirementLink:
    """One expert requires another; ``wanted`` is the reference that it states."""

    ref: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Requirer:
    """An expert that requires the explained one, by the shortest chain of requirements."""

    ref: str
    chain: tuple[RequirementLink, ...]
    """From the requirer down to the one that names the expert itself."""


@dataclass(frozen=True, slots=True)
class SignerTrust:
    """The signer of an expert, and the user's present trust in that key."""

    key_id: str
    name: str | None
    """The user's name for the key; None when it is no longer trusted."""
    grant: Grant | None
    """The permission to sign this expert's namespace and content, if there is one."""
    revoked: str | None
    """The reason of the revocation, if there is one."""


@dataclass(frozen=True, slots=True)
class InstallReason:
    """Why an expert is installed."""

    expert: StoredExpert
    required_by: tuple[Requirer, ...]
    breaks: tuple[str, ...]
    """The experts that would no longer run without it."""
    vouching: SignerTrust | None
    """None when nobody signed it."""
    bases: tuple[str, ...]
    """The known bases that it was made for."""


def explain_install(
    expert: StoredExpert,
    *,
    installed: Sequence[StoredExpert],
    bases: Sequence[StoredBase],
    trust: TrustRecord,
) -> InstallReason:
    """Explain one of the installed experts."""
    return InstallReason(
        expert,
        tuple(_find_requirers(expert, installed)),
        tuple(_find_broken(expert, installed)),
        _explain_signer(expert, trust),
        tuple(base.name for base in bases if fits_base(expert.base, base)),
    )


def _find_requirers(expert: StoredExpert, installed: Sequence[StoredExpert]) -> list[Requirer]:
    """Walk up from the expert, nearest first; each requirer is listed once."""
    own, others = candidate_from_expert(expert), list(map(candidate_from_expert, installed))
    chains: dict[str, tuple[RequirementLink, ...]] = {}
    waiting: deque[tuple[InstallCandidate, tuple[RequirementLink, ...]]] = deque([(own, ())])
    while waiting:
        below, chain = waiting.popleft()
        for other in others:
            wanted = next((str(w) for w in other.requires if below.satisfies(w)), None)
            if wanted is not None and other.ref not in chains and other != own:
                chains[other.ref] = (RequirementLink(other.ref, wanted), *chain)
                waiting.append((other, chains[other.ref]))
    return [Requirer(ref, chain) for ref, chain in chains.items()]


def _find_broken(expert: StoredExpert, installed: Sequence[StoredExpert]) -> list[str]:
    """Return the experts that would lack this one, directly or through their requirements."""
    rest = [candidate_from_expert(other) for other in installed if other != expert]
    sound, before = _find_runnable(rest), _find_runnable([*rest, candidate_from_expert(expert)])
    return [other.ref for other in rest if other in before - sound]


def _find_runnable(experts: Sequence[InstallCandidate]) -> set[InstallCandidate]:
    """Return the largest set in which each expert finds all its requirements within the set."""
    kept = set(experts)
    while True:
        left = {c for c in kept if all(any(o.satisfies(w) for o in kept) for w in c.requires)}
        if left == kept:
            return kept
        kept = left


def _explain_signer(expert: StoredExpert, trust: TrustRecord) -> SignerTrust | None:
    if expert.signer is None:
        return None
    namespace = expert.package.namespace
    trusted = trust.find_key(expert.signer)
    revocation = trust.find_revocation(expert.signer, namespace=namespace, registry=expert.registry)
    hosts = trust.find_authoritative_hosts(namespace, expert.registry)
    matching = [
        grant
        for grant in (trusted.grants if trusted else ())
        if grant.covers(namespace, hosts) and grant.allows(expert.content_digest)
    ]
    return SignerTrust(
        expert.signer,
        trusted.name if trusted else None,
        matching[0] if matching else None,
        revocation.reason if revocation else None,
    )


ExportFormat = Literal["expert", "oci", "peft"]
SetFormat = Literal["set", "oci"]


@dataclass(frozen=True, slots=True)
class ExportedPackage:
    """One package that was written."""

    ref: str
    package_digest: Digest
    adapters: tuple[str, ...] = ()
    """The paths of its adapters in a directory for PEFT, in order."""


def export_package(
    target: str,
    output: Path,
    *,
    form: ExportFormat,
    store: Store,
    progress: Progress = ignore_progress,
) -> ExportedPackage:
    """Write one package, from a file or from the store.

    Raises:
        NotFoundError: when there is no such file or expert.
        UsageError: when the output cannot be written there.
        InvalidPackageError: when the file is malformed.
        DigestError: when bytes are not those of their digest.
    """
    adapters: list[str] = []
    with open_package(target, store, unpack_folder=output, progress=progress) as package:
        layout, blobs = package.layout, package.blobs
        match form:
            case "expert":
                write_package(output, layout, blobs, progress=progress)
            case "oci":
                write_oci_archive(output, layout, blobs, progress=progress)
            case "peft":
                adapters = export_peft_directories(output, layout, blobs, progress=progress)
    return ExportedPackage(package.ref, layout.package_digest, tuple(adapters))


def export_set(
    targets: Sequence[str],
    output: Path,
    *,
    form: SetFormat,
    store: Store,
    progress: Progress = ignore_progress,
) -> list[ExportedPackage]:
    """Write installed experts and all their requirements into one file; return them by name.

    Raises:
        NotFoundError: when one is not installed, or something that it requires.
        UsageError: when one is a file, or the output is a directory.
        InvalidPackageError: when they cannot be in one set.
        DigestError: when a file was changed in the store.
    """
    for target in targets:
        if is_file_name(target):
            hint = f"`expertctl install {target}` first, then name the expert"
            raise UsageError(f"{target} is a file; a set is made of installed experts", hint=hint)
    wanted = [store.find(parse_target(target)) for target in targets]
    experts = expand_requirements(wanted, store.list_experts())
    with open_experts(store, experts) as (layouts, blobs):
        layout = build_set_layout(_name_layouts(experts, layouts))
        write = write_package if form == "set" else write_oci_archive
        write(output, layout, blobs, progress=progress)
    ordered = sorted(experts, key=lambda expert: (expert.package, expert.version))
    return [ExportedPackage(expert.ref, expert.package_digest) for expert in ordered]


def _name_layouts(
    experts: Sequence[StoredExpert], layouts: Sequence[PackageLayout]
) -> dict[str, PackageLayout]:
    named: dict[str, PackageLayout] = {}
    for expert, layout in zip(experts, layouts, strict=True):
        name = build_index_name(expert.package, expert.version)
        if name in named:
            raise UsageError(f"{expert.ref} is installed from two registries", hint="export one")
        named[name] = layout
    return named
