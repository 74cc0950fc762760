"""Installing packages: verified, checked against each other and the bases, published.

Packages come from files, from one exported set, or from registries (`expertctl.install.request`);
the checks are the same. All packages of one call are checked together, and nothing is published
before every check has passed. Each package is published after those it requires, so a killed
process leaves no expert without its requirements. When one cannot be published, those before it
are withdrawn and the versions they replaced are restored.

The starter pack, a small base and experts for a first run, ships in the wheel. They are installed
like any package: the base is added, the experts are verified. The key that signed them was made for
that, used once and thrown away; its public half is trusted for the content digests that
``starter.json`` pins, and for nothing else.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.errors import (
    ConflictError,
    DigestError,
    ExpertError,
    InvalidPackageError,
    RevokedError,
    SignatureError,
    TrustError,
    UnsignedError,
    UsageError,
)
from expertctl.install.candidate import candidate_from_expert, candidate_from_file
from expertctl.install.publication import (
    InstalledPackage,
    Publishable,
    check_base_fit,
    check_conflicts,
    check_requirements,
    find_own_packages,
    publish_all,
    sort_by_requirements,
)
from expertctl.package.adapter_weights import find_numeric_anomalies
from expertctl.package.base_model import BaseIdentity
from expertctl.package.directory import find_document_problem
from expertctl.package.layout import WEIGHT_TYPE, choose_media_type
from expertctl.package.read import (
    PackageContents,
    VerifiedPackage,
    VersionContent,
    accept_by_digest,
    accept_unsigned,
    changed_version_error,
    read_package,
    read_set,
    verify_contents,
)
from expertctl.reference import Reference
from expertctl.routing.base_choice import STARTER_NAMESPACE
from expertctl.routing.index import RoutingIndex
from expertctl.routing.manifest_lint import describe_flag_effects, describe_missing_examples
from expertctl.routing.vetting import vet_experts
from expertctl.schema.manifest import Manifest
from expertctl.schema.validation import decode_json
from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.preference import Flag, describe_flags
from expertctl.store.refs import LOCAL, StoredExpert
from expertctl.store.store import Store
from expertctl.store.transaction import PackageStaging, StoreTransaction
from expertctl.trust.keys import KeyRing, PublicKey
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore

T = TypeVar("T")
LockedContents = Mapping[str, VersionContent]
"""``namespace/name@version`` → the content of that version, according to one source."""
NO_LOCKED_CONTENTS: LockedContents = {}


class VerifyAndPin(Protocol):
    """Verifies with the keys that registries name, and then pins them."""

    def __call__(self, verify: Callable[[TrustRecord], T]) -> T:
        """Return what ``verify`` returns; when it raises, nothing is pinned."""
        ...


@dataclass(frozen=True, slots=True)
class StagedPackage:
    """A package whose bytes are staged and hashed; its signature is not verified yet."""

    contents: PackageContents
    staging: PackageStaging
    registry: str = LOCAL
    """The host that it came from."""
    expected: Reference | None = None
    """What was asked for."""
    named_digest: Digest | None = None
    """Its exact bytes, where the user named them; then the signer need not be trusted."""


@dataclass(frozen=True, slots=True)
class InstallContext:
    """The stores that experts are installed to, and what the user tolerates."""

    store: Store
    bases: BaseStore
    trust: TrustStore
    registries: Path
    catalogue: Catalogue | None = None
    index: RoutingIndex | None = None
    allow_unsigned: bool = False
    allow_base_mismatch: bool = False
    accept_changed: Collection[str] = frozenset()
    """Versions, ``namespace/name@version``, that may have another content than before."""


def install_files(
    paths: Sequence[Path], context: InstallContext, *, progress: Progress = ignore_progress
) -> list[InstalledPackage]:
    """Install packages from files, all or none of them.

    Raises:
        NotFoundError: when a file, or something that a package requires, is missing.
        InvalidPackageError: when a file is malformed.
        TrustError: when nobody who is trusted vouches for one, or one is installed with another
            content.
        IncompatibleError: when they do not fit a base, each other or what is installed.
        DiskFullError: when there is no space left.
        StoreError: when the store cannot be written.
    """
    if not paths:
        raise UsageError("nothing to install", hint="expertctl install FILE…")
    with ExitStack() as stack:
        return install_staged(stage_files(paths, context.store, stack, progress), context)


def install_set(
    path: Path,
    context: InstallContext,
    *,
    locked: LockedContents = NO_LOCKED_CONTENTS,
    progress: Progress = ignore_progress,
) -> list[InstalledPackage]:
    """Install an exported set, all or none of it; checks and errors are those of `install_files`.

    ``locked`` are the contents of versions in a lock file.
    """
    with context.store.stage_package() as staging:
        return install_staged(_stage_set(path, staging, progress), context, locked=locked)


def install_staged(
    staged: Iterable[StagedPackage],
    context: InstallContext,
    *,
    locked: LockedContents = NO_LOCKED_CONTENTS,
    pinning: VerifyAndPin | None = None,
) -> list[InstalledPackage]:
    """Verify staged packages, and install all or none of them; raises as `install_files`.

    All signatures are verified first, through ``pinning`` where there is one. A version that may
    have changed may have another content than the installed one, which it replaces, and than the
    one in ``locked``, the contents in a lock file.
    """

    def verify(record: TrustRecord) -> list[Publishable]:
        unsigned = context.allow_unsigned
        found = [_make_publishable(item, record, allow_unsigned=unsigned) for item in staged]
        _check_locked(found, locked, context.accept_changed)
        return found

    candidates = pinning(verify) if pinning else verify(context.trust.read())
    fitted = _check_bases(candidates, context.bases, allow_mismatch=context.allow_base_mismatch)
    return _publish_candidates(fitted, context)


def stage_files(
    paths: Iterable[Path], store: Store, stack: ExitStack, progress: Progress
) -> Iterator[StagedPackage]:
    """Read files into staging folders that last until the stack is closed.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when one is malformed.
    """
    for path in paths:
        staging = stack.enter_context(store.stage_package())
        yield StagedPackage(read_package(path, sink=staging, progress=progress), staging)


def _stage_set(path: Path, staging: PackageStaging, progress: Progress) -> Iterator[StagedPackage]:
    for number, contents in enumerate(read_set(path, sink=staging, progress=progress)):
        digests = {file.digest for file in contents.layout.layers}
        yield StagedPackage(contents, staging.subset(str(number), digests))


def _make_publishable(
    staged: StagedPackage, trust: TrustRecord, *, allow_unsigned: bool
) -> Publishable:
    _check_documents(staged)
    if staged.named_digest is not None:
        candidate = _accept_named_bytes(staged, staged.named_digest, trust)
    else:
        package = _verify_signature(staged, trust, allow_unsigned=allow_unsigned)
        candidate = Publishable(package, staged.staging, staged.registry)
    home = trust.find_conflicting_registry(candidate.manifest.package.namespace, staged.registry)
    return replace(candidate, authority=home)


def _check_locked(
    candidates: Iterable[Publishable], locked: LockedContents, accept_changed: Collection[str]
) -> None:
    """Refuse another content than a lock file has for a version, unless it was accepted.

    Raises:
        ChangedVersionError: with both contents.
    """
    for candidate in candidates:
        ref, package = candidate.manifest.ref, candidate.package
        now = package.contents.content_digest
        before = locked.get(ref)
        if before is not None and before.digest != now and ref not in accept_changed:
            source = "the file" if candidate.registry == LOCAL else candidate.registry
            signers = (package.signer,) if package.signer else ()
            raise changed_version_error(ref, before, VersionContent(source, now, signers))


def _check_documents(staged: StagedPackage) -> None:
    """Refuse a package that contains a publisher's secret, or whose README is no text.

    Raises:
        InvalidPackageError: with every problem.
    """
    problems = [
        problem
        for file in staged.contents.files
        if choose_media_type(file.path) != WEIGHT_TYPE
        and (problem := _find_document_problem(staged.staging.path(file.digest), name=file.path))
    ]
    if problems:
        ref = staged.contents.manifest.ref
        hint = "tell its publisher, who has to publish another version without it"
        raise InvalidPackageError(ref, problems, hint=hint)


def _find_document_problem(path: Path, *, name: str) -> str | None:
    with path.open("rb") as stream:
        return find_document_problem(stream, name=name)


def _accept_named_bytes(staged: StagedPackage, digest: Digest, trust: TrustRecord) -> Publishable:
    """Accept the exact bytes that the user named, though no trusted key signed them."""
    place = staged.staging, staged.registry
    try:
        package = verify_contents(
            staged.contents, trust, expected=staged.expected, registry=staged.registry
        )
        return Publishable(package, *place)
    except (RevokedError, SignatureError):
        raise
    except TrustError as error:
        package = accept_by_digest(staged.contents, digest)
        warning = f"accepted because you named its exact bytes: {error.message}"
        return Publishable(package, *place, stored_warnings=(warning,))


def _publish_candidates(
    candidates: Sequence[Publishable], context: InstallContext
) -> list[InstalledPackage]:
    with context.store.begin_transaction() as changes:
        before = changes.scan().experts
        ordered = _check_relations(candidates, changes, context.accept_changed)
        added = publish_all(ordered, changes, context.accept_changed)
    manifests = {item.expert: c.manifest for item, c in zip(added, ordered, strict=True)}
    warnings = _register(manifests, context.catalogue, context.index)
    _remove_replaced_vectors(before, added, context.index)
    return [replace(i, warnings=(*i.warnings, *warnings.get(i.expert.ref, ()))) for i in added]


def _verify_signature(
    staged: StagedPackage, trust: TrustRecord, *, allow_unsigned: bool
) -> VerifiedPackage:
    contents = staged.contents
    if contents.signature is None and allow_unsigned and staged.registry == LOCAL:
        return accept_unsigned(contents)
    try:
        return verify_contents(contents, trust, expected=staged.expected, registry=staged.registry)
    except UnsignedError as error:
        if staged.registry != LOCAL:
            raise
        hint = f"{error.hint}; or install it all the same with --allow-unsigned"
        raise UnsignedError(error.message, hint=hint) from error


def _check_bases(
    candidates: Sequence[Publishable], bases: BaseStore, *, allow_mismatch: bool
) -> list[Publishable]:
    known = bases.list_bases()
    fitted = []
    for candidate in candidates:
        contents = candidate.package.contents
        lasting, momentary = check_base_fit(contents, known, allow_mismatch=allow_mismatch)
        odd = [
            f"{candidate.manifest.ref}: {d}"
            for d in find_numeric_anomalies(contents, candidate.staging.blob)
        ]
        stored = (*candidate.stored_warnings, *lasting, *odd)
        fitted.append(replace(candidate, stored_warnings=stored, install_warnings=tuple(momentary)))
    return fitted


def _remove_replaced_vectors(
    before: Iterable[StoredExpert], added: Iterable[InstalledPackage], index: RoutingIndex | None
) -> None:
    """Remove the vectors of replaced contents; `reindex` would do the same."""
    now = {item.expert.ref: item.expert.content_digest for item in added}
    gone = [
        e.content_digest for e in before if now.get(e.ref, e.content_digest) != e.content_digest
    ]
    if index is not None and gone:
        with suppress(ExpertError):
            index.remove(gone)


def _check_relations(
    candidates: Sequence[Publishable], changes: StoreTransaction, accept_changed: Collection[str]
) -> list[Publishable]:
    """Check the experts against each other and the installed ones; return them in order."""
    unique: dict[str, Publishable] = {}
    for candidate in candidates:
        ref = candidate.manifest.ref
        unique[ref] = _prefer_signed(unique.get(ref), candidate)
        changes.check_addition(
            candidate.package, registry=candidate.registry, replace=ref in accept_changed
        )
    installed = list(map(candidate_from_expert, changes.scan().experts))
    new = [
        replace(candidate_from_file(item.package.contents), registry=item.registry)
        for item in unique.values()
    ]
    check_conflicts(new, installed)
    check_requirements(new, installed)
    return [unique[candidate.ref] for candidate in sort_by_requirements(new)]


def _prefer_signed(first: Publishable | None, second: Publishable) -> Publishable:
    """Of a package that was given twice, return the signed one, else the first."""
    if first is None:
        return second
    if first.package.contents.content_digest != second.package.contents.content_digest:
        raise ConflictError(
            f"two files with different content are {second.manifest.ref}",
            hint="install one of them, or build one as another version",
        )
    return first if first.package.signer or not second.package.signer else second


def _register(
    manifests: Mapping[StoredExpert, Manifest],
    catalogue: Catalogue | None,
    index: RoutingIndex | None,
) -> dict[str, list[str]]:
    """Add installed experts to the catalogue and the index; return warnings by ref."""
    try:
        if catalogue is not None:
            catalogue.add_all(manifests.items())
        return {} if index is None else _add_to_index(manifests, index)
    except ExpertError as error:
        problem = f"installed but not indexed: {error.message}; `expertctl reindex`"
        return {expert.ref: [f"{expert.ref} is {problem}"] for expert in manifests}


def _add_to_index(
    manifests: Mapping[StoredExpert, Manifest], index: RoutingIndex
) -> dict[str, list[str]]:
    """Add experts to the routing index and vet their routing metadata."""
    by_digest = {expert.content_digest: manifest for expert, manifest in manifests.items()}
    index.add(by_digest)
    own = find_own_packages(manifests, KeyRing(Home(index.folder).keys))
    found = vet_experts(by_digest, index, own=own)
    return {
        expert.ref: _routing_warnings(expert, manifest, found[expert.content_digest])
        for expert, manifest in manifests.items()
    }


def _routing_warnings(
    expert: StoredExpert, manifest: Manifest, flags: tuple[Flag, ...]
) -> list[str]:
    """Return warnings about how the router treats an expert."""
    named, warnings = f"`--expert {expert.package}`", []
    if flags:
        effects = describe_flag_effects(flags, named)
        warnings.append(f"{expert.ref} {describe_flags(flags)}; {effects}")
    if not manifest.routing.examples:
        warnings.append(describe_missing_examples(expert.ref, name_option=named))
    return warnings


STARTER = Path(__file__).parent.parent / "_starter"
STARTER_MANIFEST = "starter.json"


@dataclass(frozen=True, slots=True)
class StarterBase:
    """The digests that the base must have."""

    name: str
    arch: str
    weights: str
    tokenizer: str


@dataclass(frozen=True, slots=True)
class StarterManifest:
    """``starter.json``: the content of the pack; ``experts`` maps a file to its content digest."""

    base: StarterBase
    public_key: str
    experts: dict[str, str]


def read_starter_manifest() -> StarterManifest:
    """Read the pinned digests of the wheel.

    Raises:
        InvalidPackageError: when the installation is damaged.
    """
    path = STARTER / STARTER_MANIFEST
    try:
        return decode_json(path.read_bytes(), StarterManifest)
    except (OSError, msgspec.MsgspecError) as error:
        hint = "install expertctl again"
        raise InvalidPackageError(str(path), [f"cannot be read: {error}"], hint=hint) from error


def install_starter(
    context: InstallContext, *, progress: Progress = ignore_progress
) -> list[InstalledPackage]:
    """Add the base and install the experts of the starter pack; repeating this is harmless.

    Raises:
        InvalidPackageError: when the installation is damaged.
        DigestError: when the base is not the pinned one.
        StoreError: when the home cannot be written.
    """
    pins = read_starter_manifest()
    base = context.bases.add_copy(STARTER / "base", name=pins.base.name, progress=progress)
    _check_identity(base.identity, pins.base)
    context.trust.add(
        PublicKey.from_pem(pins.public_key.encode()),
        name="starter-pack",
        namespaces=[STARTER_NAMESPACE],
        content_digests=sorted(pins.experts.values()),
    )
    experts = [STARTER / name for name in sorted(pins.experts)]
    return install_files(experts, context, progress=progress)


def _check_identity(identity: BaseIdentity, pin: StarterBase) -> None:
    found = {
        "arch": str(identity.arch),
        "weights": str(identity.weights),
        "tokenizer": str(identity.tokenizer),
    }
    for field, value in found.items():
        if value != getattr(pin, field):
            raise DigestError(
                f"the starter base has {field} {value}, pinned is {getattr(pin, field)}",
                hint="install expertctl again",
            )
