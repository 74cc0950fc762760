"""Notices: facts that registries state against installed, locked or chosen versions.

A *notice* is one such fact: the signing key was revoked, the version was yanked, its content
changed, it is no longer listed, or its registry could not be asked. `install`, `update` and `lock`
refuse a revoked key and a changed content; `outdated` and `doctor --online` report them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from expertctl.digest import Digest
from expertctl.errors import ChangedVersionError, ExpertError, RevokedError, TrustError
from expertctl.install.project_file import LockedExpert
from expertctl.install.resolve import ResolvedPackage
from expertctl.install.sources import RegistrySources
from expertctl.package.read import VersionContent, changed_version_error
from expertctl.reference import PackageName, Version
from expertctl.registry.index_document import Release
from expertctl.registry.index_store import release_content
from expertctl.store.pins import LOCK_FILE
from expertctl.store.refs import LOCAL, StoredExpert

NoticeKind = Literal["revoked", "yanked", "changed", "unlisted", "unchecked"]
REFUSED_KINDS: frozenset[NoticeKind] = frozenset({"revoked", "changed"})
"""The kinds that `install`, `update` and `lock` refuse; exit code 5 wherever one is found."""
_ERRORS: dict[NoticeKind, type[TrustError]] = {
    "revoked": RevokedError,
    "changed": ChangedVersionError,
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One fact against a version."""

    kind: NoticeKind
    ref: str
    registry: str
    message: str
    hint: str = ""
    reason: str = ""
    """For a yank: the publisher's reason, which may be empty."""
    contents: tuple[VersionContent, ...] = ()
    """For a changed version: its content before, and now."""
    in_use: bool = True
    """False for an installed version other than the chosen or current one."""

    @property
    def text(self) -> str:
        """Message and hint in one line."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


@dataclass(frozen=True, slots=True)
class KnownVersion:
    """A version that is installed, locked or chosen, and its content according to that source."""

    package: PackageName
    version: Version
    registry: str
    content: VersionContent
    signer: str | None
    installed: bool = False

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return f"{self.package}@{self.version}"


def version_in_store(expert: StoredExpert) -> KnownVersion:
    """Return an installed expert as a known version."""
    signers = (expert.signer,) if expert.signer else ()
    content = VersionContent("what is installed", expert.content_digest, signers)
    held = KnownVersion(expert.package, expert.version, expert.registry, content, expert.signer)
    return replace(held, installed=True)


def version_in_lock(locked: LockedExpert, sources: RegistrySources) -> KnownVersion:
    """Return an entry of a lock file; its signer is looked up in the index.

    The signers of a content that the registry changed since are those of its first content.
    """
    document = sources.find_index(locked.registry, locked.package)
    release = document.find_release(locked.version) if document else None
    same = release is not None and release.content_digest == locked.content_digest
    form = release.find_form(locked.package_digest) if release and same else None
    signer = form.signer if form else None
    signers: tuple[str, ...] = (signer,) if signer else ()
    first = sources.find_first_content(locked.registry, locked.package, locked.version)
    if first is not None and first.digest == locked.content_digest:
        signers = first.signers
    content = VersionContent(LOCK_FILE, locked.content_digest, signers)
    return KnownVersion(locked.package, locked.version, locked.registry, content, signer)


def version_in_resolution(item: ResolvedPackage, sources: RegistrySources) -> KnownVersion:
    """Return a resolved package; its signer is that of the form that would be installed."""
    candidate = item.candidate
    found = sources.find_release(candidate)
    form = found[1].find_form(item.package_digest) if found else None
    signer = form.signer if form else None
    content = VersionContent(candidate.registry, candidate.content_digest)
    if found:
        content = release_content(found[1], source=candidate.registry)
    return KnownVersion(candidate.package, candidate.version, candidate.registry, content, signer)


def collect_notices(versions: Iterable[KnownVersion], sources: RegistrySources) -> list[Notice]:
    """Return all notices about some versions; their indexes were requested before."""
    found = [notice for one in versions for notice in _version_notices(one, sources)]
    return list({(n.kind, n.ref, n.registry): n for n in reversed(found)}.values())[::-1]


def check_notices(notices: Iterable[Notice], *, accepted: Collection[str] = ()) -> None:
    """Refuse revoked keys and changed contents; ``accepted`` refs may have another content.

    Raises:
        RevokedError: when a key was revoked.
        ChangedVersionError: when a version has another content than before.
    """
    for notice in notices:
        if notice.kind in REFUSED_KINDS and not (
            notice.kind == "changed" and notice.ref in accepted
        ):
            raise _ERRORS[notice.kind](notice.message, hint=notice.hint)


def query_authorities(
    versions: Iterable[tuple[str, PackageName]], sources: RegistrySources
) -> None:
    """Ask the registries that vouch for versions, given by their registry and package.

    Raises:
        TrustError: when an index cannot be trusted.
        InvalidPackageError: when an index is malformed.
        StoreError: when an answer cannot be remembered.
    """
    sources.query_quietly(find_authorities(versions, sources))


def find_authorities(
    versions: Iterable[tuple[str, PackageName]], sources: RegistrySources
) -> Iterator[tuple[str, PackageName]]:
    """Yield which registry to ask about which package; for a file, those of its namespace."""
    for registry, package in versions:
        hosts = sources.find_authorities(package, registry) if registry == LOCAL else [registry]
        yield from ((host, package) for host in hosts)


def _version_notices(version: KnownVersion, sources: RegistrySources) -> Iterator[Notice]:
    document = sources.find_index(version.registry, version.package)
    release = document.find_release(version.version) if document else None
    yield from _revocation_notices(version, release, sources)
    if release is not None:
        yield from _yank_notices(version, release)
        yield from _change_notices(version, release, sources)
    elif document is not None:
        message = f"{version.registry} does not list {version.ref} any more"
        yield Notice("unlisted", version.ref, version.registry, message)
    if error := sources.unanswered.get((version.registry, version.package)):
        yield _unchecked_notice(version, error)


def _revocation_notices(
    version: KnownVersion, release: Release | None, sources: RegistrySources
) -> Iterator[Notice]:
    revocation = sources.find_revocation(version.signer, version.package, version.registry)
    if revocation is None:
        return
    host = f" by {revocation.registry}" if revocation.registry else ""
    why = f": {revocation.reason}" if revocation.reason else ""
    message = f"{version.ref}: key {revocation.key_id}, which signed it, was revoked{host}{why}"
    signed_anew = release is not None and any(
        sources.find_revocation(form.signer, version.package, version.registry) is None
        for form in release.forms
    )
    hint = "ask its publisher for a version that is signed with another key"
    if version.installed:
        hint += f"; `expertctl remove {version.ref}` removes this one"
    if signed_anew:
        hint = f"it was signed anew: `expertctl install {version.registry}/{version.ref}`"
    yield Notice("revoked", version.ref, version.registry, message, hint)


def _yank_notices(version: KnownVersion, release: Release) -> Iterator[Notice]:
    if release.yanked is not None:
        why = f": {release.yanked}" if release.yanked else ""
        message = f"{version.ref} was yanked{why}"
        way_out = (
            "`expertctl update` takes another version where the list allows one, "
            f"`expertctl remove {version.ref}` removes this one"
        )
        yield Notice("yanked", version.ref, version.registry, message, way_out, release.yanked)


def _change_notices(
    version: KnownVersion, release: Release, sources: RegistrySources
) -> Iterator[Notice]:
    now = release_content(release, source=version.registry)
    first = sources.find_first_content(version.registry, version.package, version.version)
    for before in (version.content, *([first] if first else [])):
        if before.digest != now.digest:
            yield _change_notice(version.ref, version.registry, before, now)
            return


def _change_notice(ref: str, registry: str, before: VersionContent, now: VersionContent) -> Notice:
    error = changed_version_error(ref, before, now)
    return Notice("changed", ref, registry, error.message, error.hint, contents=(before, now))


def _unchecked_notice(version: KnownVersion, error: ExpertError) -> Notice:
    message = (
        f"{version.ref}: {version.registry} cannot say whether its key was revoked or it was "
        f"yanked: {error.message}"
    )
    return Notice("unchecked", version.ref, version.registry, message)


def check_resolution(
    chosen: Sequence[ResolvedPackage],
    experts: Sequence[StoredExpert],
    locked: Iterable[LockedExpert],
    sources: RegistrySources,
    *,
    accepted: Collection[str],
) -> tuple[Notice, ...]:
    """Return the notices about a resolution that are no reason to refuse it.

    ``locked`` are the entries of a lock file that must not be contradicted; refs in ``accepted``
    may have another content. The notices of `collect_other_notices` about other installed versions
    of the same packages are included.

    Raises:
        RevokedError: when a key was revoked that signed something chosen.
        ChangedVersionError: when a version has another content than before, and was not accepted.
    """
    items = {item.candidate.package: item for item in chosen}
    kept = [one for one in locked if _still_fits(one, items.get(one.package))]
    held = [
        *(version_in_resolution(item, sources) for item in chosen if not item.candidate.is_local),
        *(
            _without_replaced_signer(version_in_store(e), e.package_digest, items[e.package])
            for e in experts
            if _is_chosen(e, items)
        ),
        *(
            _without_replaced_signer(
                version_in_lock(e, sources), e.package_digest, items[e.package]
            )
            for e in kept
        ),
    ]
    notices = collect_notices(held, sources)
    check_notices([*notices, *_find_contradictions(kept, items)], accepted=accepted)
    others = [
        version_in_store(e) for e in experts if e.package in items and not _is_chosen(e, items)
    ]
    others_told = collect_other_notices(others, sources)
    return (*(n for n in notices if n.kind not in REFUSED_KINDS), *others_told)


def collect_other_notices(
    versions: Iterable[KnownVersion], sources: RegistrySources
) -> list[Notice]:
    """Return the notices about installed versions other than the ones in use.

    Only revoked keys, yanks and changed contents; none is a reason to refuse anything.
    """
    return [
        _mark_unused(notice)
        for notice in collect_notices(versions, sources)
        if notice.kind in {"revoked", "yanked", "changed"}
    ]


def _mark_unused(notice: Notice) -> Notice:
    if notice.kind == "changed":
        return replace(notice, in_use=False)
    hint = (
        "it is still installed beside the version that is used, "
        f"`expertctl remove {notice.ref}` removes it"
    )
    return replace(notice, hint=hint, in_use=False)


def _without_replaced_signer(
    version: KnownVersion, package_digest: Digest, item: ResolvedPackage
) -> KnownVersion:
    """Return a known version, without its signer where a form with another signature was chosen."""
    stays = item.candidate.is_local or item.package_digest == package_digest
    return version if stays else replace(version, signer=None)


def _is_chosen(expert: StoredExpert, items: Mapping[PackageName, ResolvedPackage]) -> bool:
    item = items.get(expert.package)
    return item is not None and item.candidate.version == expert.version


def _still_fits(locked: LockedExpert, item: ResolvedPackage | None) -> bool:
    """Tell whether all requirements on a package allow its locked version, whatever was chosen."""
    return item is not None and all(locked.satisfies(n.wanted) != n.refused for n in item.needs)


def _find_contradictions(
    kept: Iterable[LockedExpert], items: Mapping[PackageName, ResolvedPackage]
) -> Iterator[Notice]:
    """Yield notices about locked versions chosen with another content, also from files."""
    for locked in kept:
        candidate = items[locked.package].candidate
        same = candidate.version == locked.version
        if same and candidate.content_digest != locked.content_digest:
            before = VersionContent(LOCK_FILE, locked.content_digest)
            now = VersionContent(candidate.registry, candidate.content_digest)
            yield _change_notice(locked.ref, locked.registry, before, now)
