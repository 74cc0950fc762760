"""`reindex`, which rebuilds the indexes from the store, and `examine_store`, which finds faults.

`examine_store` and `query_registries` report what is wrong with this machine's experts, each with
the way out; they change nothing in the store.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest, FileDigest, Progress, hash_file, ignore_progress
from expertctl.errors import (
    ExpertError,
    RevokedError,
    SignatureError,
    StoreError,
    TrustError,
    to_single_line,
)
from expertctl.install.installed_experts import fits_base
from expertctl.install.notices import (
    REFUSED_KINDS,
    Notice,
    collect_notices,
    find_authorities,
    version_in_store,
)
from expertctl.install.publication import find_missing_requirements, find_own_packages
from expertctl.install.sources import RegistrySources
from expertctl.package.layout import build_layout, compute_content_digest
from expertctl.package.read import require_signed_name
from expertctl.reference import PackageName
from expertctl.registry.index_store import IndexStore
from expertctl.routing.index import RERANK_FOLDER, RoutingIndex
from expertctl.routing.manifest_lint import RULES_VERSION, find_flags
from expertctl.routing.vector_files import JOURNAL_FILE, describe_vector_damage
from expertctl.routing.vetting import revet_experts
from expertctl.schema.manifest import MANIFEST_PATH, Manifest
from expertctl.settings import Home
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.preference import Flag, describe_flags
from expertctl.store.quantised_cache import open_quantised_cache
from expertctl.store.refs import LOCAL, StoredExpert, StorePaths, StoreScan
from expertctl.store.store import Store
from expertctl.store.suspicions import SuspicionStore
from expertctl.store.transaction import list_abandoned_folders, list_blobs, make_required_base
from expertctl.trust.bundle import read_bundle, verify_bundle
from expertctl.trust.keys import KeyRing
from expertctl.trust.trust_store import TrustStore


@dataclass(frozen=True, slots=True)
class ReindexReport:
    """The number of indexed experts, and what could not be read."""

    experts: int
    warnings: tuple[str, ...]


def reindex(store: Store, *, catalogue: Catalogue, index: RoutingIndex) -> ReindexReport:
    """Rebuild the catalogue, vectors and verdicts; the history of uses stays if it is readable.

    Raises:
        StoreError: when they cannot be written.
    """
    now = store.scan()
    warnings = [f"the record of {ref.name} is damaged: {ref.problem}" for ref in now.damaged]
    known: list[tuple[StoredExpert, Manifest]] = []
    for expert in now.experts:
        try:
            known.append((expert, store.read_manifest(expert)))
        except ExpertError as error:
            warnings.append(f"left out {expert.ref}: {error.message}")
    catalogue.rebuild(known)
    index.rebuild({expert.content_digest: manifest for expert, manifest in known})
    known.sort(key=lambda pair: _install_time(pair[0], store))
    own = find_own_packages((expert for expert, _ in known), KeyRing(Home(index.folder).keys))
    revet_experts({expert.content_digest: manifest for expert, manifest in known}, index, own=own)
    return ReindexReport(len(known), tuple(warnings))


def _install_time(expert: StoredExpert, store: Store) -> int:
    """Return when an expert was installed: the first one is no copy of a later one."""
    ref = store.paths.ref(expert.registry, expert.package, expert.version)
    return ref.stat().st_mtime_ns if ref.exists() else 0


_THREADS = 4
_RESTORE_TRUST_HINT = (
    "restore it from a backup, or move it away; then `expertctl trust add` keys again"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault, and the way out."""

    subject: str
    problem: str
    hint: str
    broken: bool = True
    """False when everything works, but the user should know."""
    untrusted: bool = False
    """True when a key was revoked, a version changed, or an index cannot be trusted."""
    unchecked: bool = False
    """True when a registry could not be asked, so that nothing is known against a package."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings, and how much was examined."""

    findings: tuple[Finding, ...]
    experts: int
    blobs: int
    size: int

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken."""
        return not any(finding.broken for finding in self.findings)

    @property
    def untrusted(self) -> bool:
        """Whether trust in something was withdrawn."""
        return any(finding.untrusted for finding in self.findings)

    @property
    def unchecked(self) -> bool:
        """Whether a registry could not be asked about something."""
        return any(finding.unchecked for finding in self.findings)


@dataclass(frozen=True, slots=True)
class _BlobState:
    """The real size and digest of a blob file; no size when it is missing."""

    size: int | None
    digest: Digest | None
    trouble: str = ""
    """Why it cannot be read."""


def examine_store(
    store: Store,
    *,
    bases: BaseStore,
    trust: TrustStore,
    catalogue: Catalogue,
    indexes: IndexStore | None = None,
    suspicions: SuspicionStore | None = None,
    online: Iterable[Finding] = (),
    progress: Progress = ignore_progress,
) -> Diagnosis:
    """Check everything and hash every blob, in threads; ``online`` are findings of registries."""
    blobs = _hash_blobs(store.paths, progress)
    now = store.scan()
    distrusted = list(_trust_findings(trust))
    readable = None if distrusted else trust
    findings = [
        *_damaged_refs(now),
        *(f for expert in now.experts for f in _expert_findings(expert, blobs, store, readable)),
        *_requirement_findings(now.experts),
        *_blob_findings(now, blobs, store.paths),
        *_staging_findings(store.paths),
        *_mode_findings(store.paths),
        *distrusted,
        *_index_findings(indexes, readable),
        *_catalogue_findings(catalogue, now),
        *_vector_findings(catalogue.path.parent),
        *_suspicion_findings(suspicions, store, now),
        *_base_findings(bases, now.experts),
        *online,
    ]
    size = sum(blob.size or 0 for blob in blobs.values())
    return Diagnosis(tuple(findings), len(now.experts), len(blobs), size)


def query_registries(store: Store, sources: RegistrySources) -> tuple[Finding, ...]:
    """Return what registries say against installed experts, and which could not be asked.

    New revocations are applied. A registry that fails does not keep the others from being asked.
    """
    experts = store.list_experts()
    held = ((expert.registry, expert.package) for expert in experts)
    sources.query_each(find_authorities(held, sources))
    refused = (_index_refused_finding(h, p, e) for (h, p), e in sorted(sources.unanswered.items()))
    notices = (notice for expert in experts for notice in _collect_notices(expert, sources))
    return (*map(_notice_finding, notices), *refused)


def _collect_notices(expert: StoredExpert, sources: RegistrySources) -> Iterator[Notice]:
    try:
        found = collect_notices([version_in_store(expert)], sources)
    except StoreError:  # `examine_store` reports stored indexes that cannot be read
        return
    # revoked keys are reported there too, unanswered requests by `_index_refused_finding`
    yield from (notice for notice in found if notice.kind not in {"revoked", "unchecked"})


def _notice_finding(notice: Notice) -> Finding:
    return Finding(
        notice.ref,
        notice.message.removeprefix(f"{notice.ref}: ").replace(f"{notice.ref} ", "it ", 1),
        notice.hint,
        broken=notice.kind in REFUSED_KINDS,
        untrusted=notice.kind in REFUSED_KINDS,
    )


def _index_refused_finding(host: str, package: PackageName, error: ExpertError) -> Finding:
    """Return the finding for a package whose registry gave no index that can be trusted.

    An answer that is not a signed index counts as none; an index of another key, or one older than
    before, counts as a lie.
    """
    lie = isinstance(error, TrustError) and not isinstance(error, SignatureError)
    problem = (
        f"whether it was revoked, yanked or changed is not known: {to_single_line(error.message)}"
    )
    subject = f"{host}/{package}"
    return Finding(subject, problem, error.hint, broken=lie, untrusted=lie, unchecked=True)


def count_blob_bytes(store: Store) -> int:
    """Return how many bytes `examine_store` will hash."""
    paths = [store.paths.blob(digest) for digest in list_blobs(store.paths)]
    return sum(path.stat().st_size for path in paths if path.exists())


def _hash_blobs(paths: StorePaths, progress: Progress) -> Mapping[Digest, _BlobState]:
    digests = list_blobs(paths)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda digest: _hash_blob(paths.blob(digest), progress), digests)
        return dict(zip(digests, found, strict=True))


def _hash_blob(path: Path, progress: Progress) -> _BlobState:
    try:
        return _BlobState(*hash_file(path, progress=progress))
    except FileNotFoundError:
        return _BlobState(None, None)
    except OSError as error:
        return _BlobState(None, None, error.strerror or str(error))


def _damaged_refs(now: StoreScan) -> Iterator[Finding]:
    for ref in now.damaged:
        local = ref.path.parts[-4] == LOCAL
        again = "FILE` with its file" if local else f"{ref.name}`"
        hint = f"`expertctl install {again}; or `expertctl remove {ref.name}`"
        yield Finding(ref.name, f"its record {ref.path} is damaged: {ref.problem}", hint)


def _expert_findings(
    expert: StoredExpert, blobs: Mapping[Digest, _BlobState], store: Store, trust: TrustStore | None
) -> Iterator[Finding]:
    broken = [f for file in expert.layers if (f := _file_finding(expert, file, blobs, store))]
    yield from broken
    if not broken:
        yield from _record_findings(expert, store)
        if trust is not None:  # otherwise only ``trust.json`` is at fault
            yield from _signer_findings(expert, store, trust)


def _file_finding(
    expert: StoredExpert, file: FileDigest, blobs: Mapping[Digest, _BlobState], store: Store
) -> Finding | None:
    blob = blobs.get(file.digest, _BlobState(None, None))
    path = store.paths.blob(file.digest)
    if blob.trouble:
        problem = f"{file.path} cannot be read: {path}: {blob.trouble}"
    elif blob.size is None and not path.exists():
        problem = f"{file.path} is missing: there is no {path}"
    elif blob.size is not None and blob.size < file.size:
        problem = f"{file.path} is cut short: {path} has {blob.size:,} of {file.size:,} bytes"
    elif blob.size is not None and blob.digest != file.digest:
        problem = f"{file.path} was changed: {path} has the digest {blob.digest}"
    else:
        return None
    return Finding(expert.ref, problem, expert.repair_command)


def _record_findings(expert: StoredExpert, store: Store) -> Iterator[Finding]:
    """Compare a record with the files that it names."""
    layout = build_layout(expert.files, expert.signature)
    try:
        manifest = store.read_manifest(expert)
    except ExpertError as error:
        yield Finding(expert.ref, error.message, error.hint or expert.repair_command)
        return
    pairs = {
        "content digest": (expert.content_digest, compute_content_digest(expert.files)),
        "package digest": (expert.package_digest, layout.package_digest),
        "name": (expert.ref, manifest.ref),
        "base": (expert.base, make_required_base(manifest.base)),
        "requires": (expert.requires, manifest.composition.requires),
        "conflicts": (expert.conflicts, manifest.composition.conflicts),
    }
    wrong = [what for what, (stated, real) in pairs.items() if stated != real]
    if wrong:
        problem = f"its record does not say what {MANIFEST_PATH} says: {', '.join(wrong)}"
        yield Finding(expert.ref, problem, expert.repair_command)


def _signer_findings(expert: StoredExpert, store: Store, trust: TrustStore) -> Iterator[Finding]:
    if expert.signature is None:
        problem = "it is not signed: nobody vouches for it"
        yield Finding(expert.ref, problem, "install a signed package of it", broken=False)
        return
    try:
        bundle = read_bundle(store.blob_path(expert.signature.digest).read_bytes())
        key = trust.authorise(
            bundle.key_id,
            package=expert.package,
            content_digest=expert.content_digest,
            registry=expert.registry,
        )
        verify_bundle(bundle, expert.files, key)
        require_signed_name(bundle, expert.package, expert.version)
    except RevokedError as error:
        yield Finding(expert.ref, error.message, error.hint, untrusted=True)
    except TrustError as error:
        yield Finding(expert.ref, error.message, error.hint, broken=False)
    except ExpertError as error:
        yield Finding(expert.ref, error.message, error.hint or expert.repair_command)


def _requirement_findings(experts: Iterable[StoredExpert]) -> Iterator[Finding]:
    for ref, wanted in find_missing_requirements(experts).items():
        names = ", ".join(wanted)
        hint = f"install {names}, or `expertctl remove {ref}`"
        yield Finding(ref, f"it requires {names}, which is not installed", hint)


def _blob_findings(
    now: StoreScan, blobs: Mapping[Digest, _BlobState], paths: StorePaths
) -> Iterator[Finding]:
    needed = {file.digest for expert in now.experts for file in expert.layers}
    idle = [d for d, blob in blobs.items() if d not in needed and blob.size is not None]
    if idle and not now.damaged:
        size = sum(blobs[digest].size or 0 for digest in idle)
        problem = f"{len(idle)} files of {size:,} bytes belong to nothing that is installed"
        yield Finding(str(paths.blobs), problem, "`expertctl gc` removes them", broken=False)
    known = {digest.hex for digest in blobs}
    names = sorted(p.name for p in paths.blobs.iterdir()) if paths.blobs.is_dir() else []
    for name in names:
        if name not in known and name[0] != ".":
            hint = "remove it, if you know what it is"
            yield Finding(str(paths.blobs / name), "this is no file of ours", hint, broken=False)


def _staging_findings(paths: StorePaths) -> Iterator[Finding]:
    for folder in list_abandoned_folders(paths):
        problem = "an install that was killed left this"
        yield Finding(str(folder), problem, "`expertctl gc` removes it", broken=False)


def _mode_findings(paths: StorePaths) -> Iterator[Finding]:
    if os.name != "posix" or not paths.root.exists():
        return
    folders = [paths.root, paths.blobs.parent, paths.blobs, *paths.refs.rglob("*")]
    files = [paths.blob(digest) for digest in list_blobs(paths)]
    for path in [*folders, *files]:
        if path.exists() and path.stat().st_mode & 0o022:
            yield Finding(str(path), "other users may change it", f"chmod go-w {path}")


def _trust_findings(trust: TrustStore) -> Iterator[Finding]:
    try:
        trust.read()
    except ExpertError as error:
        problem = error.message.removeprefix(f"{trust.path}: ")
        yield Finding(str(trust.path), problem, error.hint or _RESTORE_TRUST_HINT)
    except OSError as error:
        yield Finding(str(trust.path), error.strerror or str(error), _RESTORE_TRUST_HINT)


def _index_findings(indexes: IndexStore | None, trust: TrustStore | None) -> Iterator[Finding]:
    """Report stored index documents that cannot be read: they are the floor for later ones."""
    known = trust.read().registries if indexes is not None and trust is not None else ()
    for registry in known:
        assert indexes is not None
        for error in indexes.find_problems(registry):
            yield Finding(registry.host, error.message, error.hint)


def _catalogue_findings(catalogue: Catalogue, now: StoreScan) -> Iterator[Finding]:
    problems = catalogue.find_problems()
    hint = "`expertctl reindex` makes it again"
    for problem in problems:
        yield Finding(str(catalogue.path), problem, hint)
    if not problems and set(catalogue.list_refs()) != {expert.ref for expert in now.experts}:
        problem = "it does not list what is installed"
        yield Finding(str(catalogue.path), problem, hint, broken=False)


def _vector_findings(home: Path) -> Iterator[Finding]:
    for folder in (home, home / RERANK_FOLDER):
        if damage := describe_vector_damage(folder):
            hint = "`expertctl reindex` makes it again"
            yield Finding(str(folder / JOURNAL_FILE), damage, hint, broken=False)


def _suspicion_findings(
    suspicions: SuspicionStore | None, store: Store, now: StoreScan
) -> Iterator[Finding]:
    """Report the flags found at install, or the current ones of an expert not vetted yet."""
    if suspicions is None:
        return
    for problem in suspicions.find_problems():
        yield Finding(str(suspicions.path), problem, "`expertctl reindex` makes it again")
    known = suspicions.find_verdicts([expert.content_digest for expert in now.experts])
    if older := sum(verdict.rules != RULES_VERSION for verdict in known.values()):
        problem = (
            f"it judges {older} of {len(now.experts)} packages by the rules of another version"
        )
        hint = "`expertctl reindex` judges them again"
        yield Finding(str(suspicions.path), problem, hint, broken=False)
    own = find_own_packages(now.experts, KeyRing(Home(suspicions.path.parent).keys))
    for expert in now.experts:
        if expert.content_digest in own:
            continue
        verdict = known.get(expert.content_digest)
        found = verdict.flags if verdict else _current_flags(expert, store, suspicions)
        if found:
            hint = f"`expertctl remove {expert.ref}`, unless you know its publisher"
            yield Finding(expert.ref, f"it {describe_flags(found)}", hint, broken=False)


def _current_flags(
    expert: StoredExpert, store: Store, suspicions: SuspicionStore
) -> tuple[Flag, ...]:
    try:
        return find_flags(store.read_manifest(expert), suspicions)
    except ExpertError:  # reported already
        return ()


def _copy_findings(bases: BaseStore, base: StoredBase) -> Iterator[Finding]:
    copies = open_quantised_cache(bases, base)
    for path, problem in copies.find_problems().items() if copies else ():
        hint = "the next run that needs it makes it again; `expertctl gc` removes outdated ones"
        yield Finding(str(path), f"the quantised copy is not used: {problem}", hint, broken=False)


def _base_findings(bases: BaseStore, experts: Iterable[StoredExpert]) -> Iterator[Finding]:
    try:
        known = bases.list_bases()
    except ExpertError as error:
        yield Finding(str(bases.folder), error.message, error.hint)
        return
    for base in known:
        try:
            bases.check(base)
        except ExpertError as error:
            yield Finding(base.name, error.message, error.hint)
        yield from _copy_findings(bases, base)
    for expert in experts:
        if not any(fits_base(expert.base, base) for base in known):
            problem = f"its base {expert.base.name} is not added"
            hint = "`expertctl base add DIR` with the base's directory"
            yield Finding(expert.ref, problem, hint, broken=False)
