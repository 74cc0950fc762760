"""What is wrong with this machine's experts, and the way out of each; changes nothing."""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest, FileDigest, Progress, hash_file, no_progress
from expertctl.errors import ExpertError, RevokedError, SignatureError, StoreError, TrustError
from expertctl.install.notices import (
    REFUSED,
    Notice,
    held_in_store,
    notices_about,
    vouching_registries,
)
from expertctl.install.own_packages import own_packages
from expertctl.install.remove import fits
from expertctl.install.requirements import missing_requirements
from expertctl.install.sources import Sources
from expertctl.package.layout import content_digest, layout_of
from expertctl.package.verify import check_signed_name
from expertctl.plain_text import one_line
from expertctl.reference import PackageName
from expertctl.registry.index_store import IndexStore
from expertctl.routing.index import DEEP_FOLDER
from expertctl.routing.suspicion import RULES, flags
from expertctl.routing.vector_files import JOURNAL_FILE, vector_damage
from expertctl.schema.manifest import MANIFEST_PATH
from expertctl.settings import Home
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.catalogue import Catalogue
from expertctl.store.flags import Flag, suspicion_of
from expertctl.store.paths import Scan, StorePaths
from expertctl.store.quantised_copies import copies_of
from expertctl.store.ref import LOCAL, StoredExpert
from expertctl.store.store import Store
from expertctl.store.suspicions import Suspicions
from expertctl.store.transaction import abandoned, required_base, stored_blobs
from expertctl.trust.bundle import read_bundle, verify_bundle
from expertctl.trust.keys import KeyRing
from expertctl.trust.policy import TrustStore

_THREADS = 4
_TRUST_AGAIN = "restore it from a backup, or move it away; then `expertctl trust add` keys again"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    subject: str
    problem: str
    hint: str
    broken: bool = True
    """False when all works, but the user should know."""
    untrusted: bool = False
    """True when a key was revoked, a version changed, or an index cannot be trusted."""
    unchecked: bool = False
    """True when a registry could not be asked, so that nothing is known against a package."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was looked at and what was found."""

    findings: tuple[Finding, ...]
    experts: int
    blobs: int
    size: int

    @property
    def healthy(self) -> bool:
        """Tell whether nothing is broken."""
        return not any(finding.broken for finding in self.findings)

    @property
    def untrusted(self) -> bool:
        """Tell whether trust in something was withdrawn."""
        return any(finding.untrusted for finding in self.findings)

    @property
    def unchecked(self) -> bool:
        """Tell whether a registry could not be asked about something."""
        return any(finding.unchecked for finding in self.findings)


@dataclass(frozen=True, slots=True)
class _Blob:
    """What a file among the blobs really is; no size when it is missing."""

    size: int | None
    digest: Digest | None
    trouble: str = ""
    """Why it cannot be read."""


def examine(
    store: Store,
    *,
    bases: BaseStore,
    trust: TrustStore,
    catalogue: Catalogue,
    indexes: IndexStore | None = None,
    suspicions: Suspicions | None = None,
    online: Iterable[Finding] = (),
    progress: Progress = no_progress,
) -> Diagnosis:
    """Read everything and hash every blob, in threads; ``online`` is what registries say."""
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


def ask_registries(store: Store, sources: Sources) -> tuple[Finding, ...]:
    """Return what registries say now against what is installed, and who could not be asked.

    New revocations are taken over. One registry that fails keeps nobody from asking the others.
    """
    experts = store.experts()
    held = ((expert.registry, expert.package) for expert in experts)
    sources.ask_each(vouching_registries(held, sources))
    refused = (_refused_index(h, p, e) for (h, p), e in sorted(sources.unanswered.items()))
    notices = (notice for expert in experts for notice in _notices(expert, sources))
    return (*map(_notice_finding, notices), *refused)


def _notices(expert: StoredExpert, sources: Sources) -> Iterator[Notice]:
    try:
        found = notices_about([held_in_store(expert)], sources)
    except StoreError:  # `examine` reports what cannot be read of what registries said before
        return
    # it also reports every key that was revoked; `_refused_index` who was not asked
    yield from (notice for notice in found if notice.kind not in {"revoked", "unchecked"})


def _notice_finding(notice: Notice) -> Finding:
    return Finding(
        notice.ref,
        notice.message.removeprefix(f"{notice.ref}: ").replace(f"{notice.ref} ", "it ", 1),
        notice.hint,
        broken=notice.kind in REFUSED,
        untrusted=notice.kind in REFUSED,
    )


def _refused_index(host: str, package: PackageName, error: ExpertError) -> Finding:
    """Return the one line about a package whose registry gave no index that can be believed.

    What is not a signed index is none; one of another key, or older than before, is a lie.
    """
    lie = isinstance(error, TrustError) and not isinstance(error, SignatureError)
    problem = f"whether it was revoked, yanked or changed is not known: {one_line(error.message)}"
    subject = f"{host}/{package}"
    return Finding(subject, problem, error.hint, broken=lie, untrusted=lie, unchecked=True)


def blob_bytes(store: Store) -> int:
    """Return how many bytes `examine` will hash."""
    paths = [store.paths.blob(digest) for digest in stored_blobs(store.paths)]
    return sum(path.stat().st_size for path in paths if path.exists())


def _hash_blobs(paths: StorePaths, progress: Progress) -> Mapping[Digest, _Blob]:
    digests = stored_blobs(paths)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda digest: _hash_blob(paths.blob(digest), progress), digests)
        return dict(zip(digests, found, strict=True))


def _hash_blob(path: Path, progress: Progress) -> _Blob:
    try:
        return _Blob(*hash_file(path, progress=progress))
    except FileNotFoundError:
        return _Blob(None, None)
    except OSError as error:
        return _Blob(None, None, error.strerror or str(error))


def _damaged_refs(now: Scan) -> Iterator[Finding]:
    for ref in now.damaged:
        local = ref.path.parts[-4] == LOCAL
        again = "FILE` with its file" if local else f"{ref.name}`"
        hint = f"`expertctl install {again}; or `expertctl remove {ref.name}`"
        yield Finding(ref.name, f"its record {ref.path} is damaged: {ref.problem}", hint)


def _expert_findings(
    expert: StoredExpert, blobs: Mapping[Digest, _Blob], store: Store, trust: TrustStore | None
) -> Iterator[Finding]:
    broken = [f for file in expert.layers if (f := _file_finding(expert, file, blobs, store))]
    yield from broken
    if not broken:
        yield from _record_findings(expert, store)
        if trust is not None:  # otherwise that one file is at fault, and no expert
            yield from _signer_findings(expert, store, trust)


def _file_finding(
    expert: StoredExpert, file: FileDigest, blobs: Mapping[Digest, _Blob], store: Store
) -> Finding | None:
    blob = blobs.get(file.digest, _Blob(None, None))
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
    return Finding(expert.ref, problem, expert.again)


def _record_findings(expert: StoredExpert, store: Store) -> Iterator[Finding]:
    """A record must follow from the files that it names."""
    layout = layout_of(expert.files, expert.signature)
    try:
        manifest = store.manifest(expert)
    except ExpertError as error:
        yield Finding(expert.ref, error.message, error.hint or expert.again)
        return
    pairs = {
        "content digest": (expert.content_digest, content_digest(expert.files)),
        "package digest": (expert.package_digest, layout.package_digest),
        "name": (expert.ref, manifest.ref),
        "base": (expert.base, required_base(manifest.base)),
        "requires": (expert.requires, manifest.composition.requires),
        "conflicts": (expert.conflicts, manifest.composition.conflicts),
    }
    wrong = [what for what, (stated, real) in pairs.items() if stated != real]
    if wrong:
        problem = f"its record does not say what {MANIFEST_PATH} says: {', '.join(wrong)}"
        yield Finding(expert.ref, problem, expert.again)


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
        check_signed_name(bundle, expert.package, expert.version)
    except RevokedError as error:
        yield Finding(expert.ref, error.message, error.hint, untrusted=True)
    except TrustError as error:
        yield Finding(expert.ref, error.message, error.hint, broken=False)
    except ExpertError as error:
        yield Finding(expert.ref, error.message, error.hint or expert.again)


def _requirement_findings(experts: Iterable[StoredExpert]) -> Iterator[Finding]:
    for ref, wanted in missing_requirements(experts).items():
        names = ", ".join(wanted)
        hint = f"install {names}, or `expertctl remove {ref}`"
        yield Finding(ref, f"it requires {names}, which is not installed", hint)


def _blob_findings(
    now: Scan, blobs: Mapping[Digest, _Blob], paths: StorePaths
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
    for folder in abandoned(paths):
        problem = "an install that was killed left this"
        yield Finding(str(folder), problem, "`expertctl gc` removes it", broken=False)


def _mode_findings(paths: StorePaths) -> Iterator[Finding]:
    if os.name != "posix" or not paths.root.exists():
        return
    folders = [paths.root, paths.blobs.parent, paths.blobs, *paths.refs.rglob("*")]
    files = [paths.blob(digest) for digest in stored_blobs(paths)]
    for path in [*folders, *files]:
        if path.exists() and path.stat().st_mode & 0o022:
            yield Finding(str(path), "other users may change it", f"chmod go-w {path}")


def _trust_findings(trust: TrustStore) -> Iterator[Finding]:
    try:
        trust.read()
    except ExpertError as error:
        problem = error.message.removeprefix(f"{trust.path}: ")
        yield Finding(str(trust.path), problem, error.hint or _TRUST_AGAIN)
    except OSError as error:
        yield Finding(str(trust.path), error.strerror or str(error), _TRUST_AGAIN)


def _index_findings(indexes: IndexStore | None, trust: TrustStore | None) -> Iterator[Finding]:
    """What registries said last must be readable: it is the floor for what they say next."""
    known = trust.read().registries if indexes is not None and trust is not None else ()
    for registry in known:
        assert indexes is not None
        for error in indexes.problems(registry):
            yield Finding(registry.host, error.message, error.hint)


def _catalogue_findings(catalogue: Catalogue, now: Scan) -> Iterator[Finding]:
    problems = catalogue.problems()
    hint = "`expertctl reindex` makes it again"
    for problem in problems:
        yield Finding(str(catalogue.path), problem, hint)
    if not problems and set(catalogue.refs()) != {expert.ref for expert in now.experts}:
        problem = "it does not list what is installed"
        yield Finding(str(catalogue.path), problem, hint, broken=False)


def _vector_findings(home: Path) -> Iterator[Finding]:
    for folder in (home, home / DEEP_FOLDER):
        if damage := vector_damage(folder):
            hint = "`expertctl reindex` makes it again"
            yield Finding(str(folder / JOURNAL_FILE), damage, hint, broken=False)


def _suspicion_findings(
    suspicions: Suspicions | None, store: Store, now: Scan
) -> Iterator[Finding]:
    """Report what was flagged at install, or would be now where it was not judged yet."""
    if suspicions is None:
        return
    for problem in suspicions.problems():
        yield Finding(str(suspicions.path), problem, "`expertctl reindex` makes it again")
    known = suspicions.verdicts([expert.content_digest for expert in now.experts])
    if older := sum(verdict.rules != RULES for verdict in known.values()):
        problem = (
            f"it judges {older} of {len(now.experts)} packages by the rules of another version"
        )
        hint = "`expertctl reindex` judges them again"
        yield Finding(str(suspicions.path), problem, hint, broken=False)
    own = own_packages(now.experts, KeyRing(Home(suspicions.path.parent).keys))
    for expert in now.experts:
        if expert.content_digest in own:
            continue
        verdict = known.get(expert.content_digest)
        found = verdict.flags if verdict else _flags_now(expert, store, suspicions)
        if found:
            hint = f"`expertctl remove {expert.ref}`, unless you know its publisher"
            yield Finding(expert.ref, f"it {suspicion_of(found)}", hint, broken=False)


def _flags_now(expert: StoredExpert, store: Store, suspicions: Suspicions) -> tuple[Flag, ...]:
    try:
        return flags(store.manifest(expert), suspicions)
    except ExpertError:  # told already
        return ()


def _copy_findings(bases: BaseStore, base: StoredBase) -> Iterator[Finding]:
    copies = copies_of(bases, base)
    for path, problem in copies.problems().items() if copies else ():
        hint = "the next run that needs it makes it again; `expertctl gc` removes outdated ones"
        yield Finding(str(path), f"the quantised copy is not used: {problem}", hint, broken=False)


def _base_findings(bases: BaseStore, experts: Iterable[StoredExpert]) -> Iterator[Finding]:
    try:
        known = bases.bases()
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
        if not any(fits(expert.base, base) for base in known):
            problem = f"its base {expert.base.name} is not added"
            hint = "`expertctl base add DIR` with the base's directory"
            yield Finding(expert.ref, problem, hint, broken=False)
