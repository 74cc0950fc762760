"""What registries say now against versions that are installed, locked or about to be installed.

A *notice* is one such fact: the signing key was revoked, the version was yanked, its content is
another than before, it is not listed any more, or nobody could be asked. `install`, `update` and
`lock` refuse a revoked key and a changed content; `outdated` and `doctor --online` report them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from expertctl.digest import Digest
from expertctl.errors import ChangedVersionError, ExpertError, RevokedError, TrustError
from expertctl.install.lock import Locked
from expertctl.install.resolve import Chosen
from expertctl.install.sources import Sources
from expertctl.package.version_content import VersionContent, changed_version
from expertctl.reference import PackageName, Version
from expertctl.registry.first_contents import stated_content
from expertctl.registry.index_document import Release
from expertctl.store.ref import LOCAL, StoredExpert

Kind = Literal["revoked", "yanked", "changed", "unlisted", "unchecked"]
REFUSED: frozenset[Kind] = frozenset({"revoked", "changed"})
"""What `install`, `update` and `lock` refuse; exit code 5 wherever it is found."""
_ERRORS: dict[Kind, type[TrustError]] = {"revoked": RevokedError, "changed": ChangedVersionError}


@dataclass(frozen=True, slots=True)
class Notice:
    """One fact against a version."""

    kind: Kind
    ref: str
    registry: str
    message: str
    hint: str = ""
    reason: str = ""
    """Of a yank: what the publisher says, which may be nothing."""
    contents: tuple[VersionContent, ...] = ()
    """Of a changed version: what it contained before, and now."""
    in_use: bool = True
    """False for another installed version than the one that was chosen or is current."""

    @property
    def text(self) -> str:
        """Message and hint in one line."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


@dataclass(frozen=True, slots=True)
class Held:
    """A version that is installed, locked or chosen, and what it contains according to that."""

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


def held_in_store(expert: StoredExpert) -> Held:
    """Return an installed expert as a held version."""
    signers = (expert.signer,) if expert.signer else ()
    content = VersionContent("what is installed", expert.content_digest, signers)
    held = Held(expert.package, expert.version, expert.registry, content, expert.signer)
    return replace(held, installed=True)


def held_in_lock(locked: Locked, sources: Sources) -> Held:
    """Return an entry of a lock file; its signer is looked up in the index, or the one before."""
    document = sources.statement(locked.registry, locked.package)
    release = document.release(locked.version) if document else None
    same = release is not None and release.content_digest == locked.content_digest
    form = release.form(locked.package_digest) if release and same else None
    signer = form.signer if form else None
    signers: tuple[str, ...] = (signer,) if signer else ()
    first = sources.first_content(locked.registry, locked.package, locked.version)
    if first is not None and first.digest == locked.content_digest:
        signers = first.signers
    content = VersionContent("expert.lock", locked.content_digest, signers)
    return Held(locked.package, locked.version, locked.registry, content, signer)


def held_as_chosen(item: Chosen, sources: Sources) -> Held:
    """Return what a resolution chose; its signer is that of the form that would be installed."""
    candidate = item.candidate
    found = sources.release(candidate)
    form = found[1].form(item.package_digest) if found else None
    signer = form.signer if form else None
    content = VersionContent(candidate.registry, candidate.content_digest)
    if found:
        content = stated_content(found[1], source=candidate.registry)
    return Held(candidate.package, candidate.version, candidate.registry, content, signer)


def notices_about(held: Iterable[Held], sources: Sources) -> list[Notice]:
    """Return all that is known against some versions; their indexes were asked for before."""
    found = [notice for one in held for notice in _notices(one, sources)]
    return list({(n.kind, n.ref, n.registry): n for n in reversed(found)}.values())[::-1]


def demand_sound(notices: Iterable[Notice], *, accepted: Collection[str] = ()) -> None:
    """Refuse revoked keys and changed contents; ``accepted`` refs may have another content.

    Raises:
        RevokedError: when a key was revoked.
        ChangedVersionError: when a version has another content than before.
    """
    for notice in notices:
        if notice.kind in REFUSED and not (notice.kind == "changed" and notice.ref in accepted):
            raise _ERRORS[notice.kind](notice.message, hint=notice.hint)


def ask_about(held: Iterable[tuple[str, PackageName]], sources: Sources) -> None:
    """Ask the registries that vouch for versions, given by their registry and package.

    Raises:
        TrustError: when an index cannot be trusted.
        InvalidPackageError: when an index is malformed.
        StoreError: when an answer cannot be remembered.
    """
    sources.ask_about(vouching_registries(held, sources))


def vouching_registries(
    held: Iterable[tuple[str, PackageName]], sources: Sources
) -> Iterator[tuple[str, PackageName]]:
    """Yield which registry to ask about which package; for a file, those of its namespace."""
    for registry, package in held:
        hosts = sources.authorities(package, registry) if registry == LOCAL else [registry]
        yield from ((host, package) for host in hosts)


def _notices(held: Held, sources: Sources) -> Iterator[Notice]:
    document = sources.statement(held.registry, held.package)
    release = document.release(held.version) if document else None
    yield from _revoked(held, release, sources)
    if release is not None:
        yield from _yanked(held, release)
        yield from _changed(held, release, sources)
    elif document is not None:
        message = f"{held.registry} does not list {held.ref} any more"
        yield Notice("unlisted", held.ref, held.registry, message)
    if error := sources.unanswered.get((held.registry, held.package)):
        yield _unchecked(held, error)


def _revoked(held: Held, release: Release | None, sources: Sources) -> Iterator[Notice]:
    revocation = sources.revocation(held.signer, held.package, held.registry)
    if revocation is None:
        return
    host = f" by {revocation.registry}" if revocation.registry else ""
    why = f": {revocation.reason}" if revocation.reason else ""
    message = f"{held.ref}: key {revocation.key_id}, which signed it, was revoked{host}{why}"
    signed_anew = release is not None and any(
        sources.revocation(form.signer, held.package, held.registry) is None
        for form in release.forms
    )
    hint = "ask its publisher for a version that is signed with another key"
    if held.installed:
        hint += f"; `expertctl remove {held.ref}` removes this one"
    if signed_anew:
        hint = f"it was signed anew: `expertctl install {held.registry}/{held.ref}`"
    yield Notice("revoked", held.ref, held.registry, message, hint)


def _yanked(held: Held, release: Release) -> Iterator[Notice]:
    if release.yanked is not None:
        why = f": {release.yanked}" if release.yanked else ""
        message = f"{held.ref} was yanked{why}"
        way_out = (
            "`expertctl update` takes another version where the list allows one, "
            f"`expertctl remove {held.ref}` removes this one"
        )
        yield Notice("yanked", held.ref, held.registry, message, way_out, release.yanked)


def _changed(held: Held, release: Release, sources: Sources) -> Iterator[Notice]:
    now = stated_content(release, source=held.registry)
    first = sources.first_content(held.registry, held.package, held.version)
    for before in (held.content, *([first] if first else [])):
        if before.digest != now.digest:
            yield _change(held.ref, held.registry, before, now)
            return


def _change(ref: str, registry: str, before: VersionContent, now: VersionContent) -> Notice:
    error = changed_version(ref, before, now)
    return Notice("changed", ref, registry, error.message, error.hint, contents=(before, now))


def _unchecked(held: Held, error: ExpertError) -> Notice:
    message = (
        f"{held.ref}: {held.registry} cannot say whether its key was revoked or it was yanked: "
        f"{error.message}"
    )
    return Notice("unchecked", held.ref, held.registry, message)


def sound_notices(
    chosen: Sequence[Chosen],
    experts: Sequence[StoredExpert],
    locked: Iterable[Locked],
    sources: Sources,
    *,
    accepted: Collection[str],
) -> tuple[Notice, ...]:
    """Return what is known against a resolution and is no reason to refuse it.

    ``locked`` are the entries of a lock file that must not be contradicted; ``accepted`` refs may
    have another content. Of other installed versions of the same packages those are returned that
    `notices_about_others` returns.

    Raises:
        RevokedError: when a key was revoked that signed something chosen.
        ChangedVersionError: when a version has another content than before, and was not accepted.
    """
    items = {item.candidate.package: item for item in chosen}
    kept = [one for one in locked if _still_fits(one, items.get(one.package))]
    held = [
        *(held_as_chosen(item, sources) for item in chosen if not item.candidate.given),
        *(_unless_signed_anew(held_in_store(e), e.package_digest, items[e.package])
          for e in experts if _is_chosen(e, items)),
        *(_unless_signed_anew(held_in_lock(one, sources), one.package_digest, items[one.package])
          for one in kept),
    ]  # fmt: skip
    notices = notices_about(held, sources)
    demand_sound([*notices, *_contradictions(kept, items)], accepted=accepted)
    others = [held_in_store(e) for e in experts if e.package in items and not _is_chosen(e, items)]
    others_told = notices_about_others(others, sources)
    return (*(n for n in notices if n.kind not in REFUSED), *others_told)


def notices_about_others(held: Iterable[Held], sources: Sources) -> list[Notice]:
    """Return what is known against installed versions beside the ones that are used.

    Only revoked keys, yanks and changed contents: none is a reason to refuse anything.
    """
    return [
        _beside(notice)
        for notice in notices_about(held, sources)
        if notice.kind in {"revoked", "yanked", "changed"}
    ]


def _beside(notice: Notice) -> Notice:
    if notice.kind == "changed":
        return replace(notice, in_use=False)
    hint = (
        "it is still installed beside the version that is used, "
        f"`expertctl remove {notice.ref}` removes it"
    )
    return replace(notice, hint=hint, in_use=False)


def _unless_signed_anew(held: Held, package_digest: Digest, item: Chosen) -> Held:
    """Return a held version, without its signer where a form with another signature was chosen."""
    stays = item.candidate.given or item.package_digest == package_digest
    return held if stays else replace(held, signer=None)


def _is_chosen(expert: StoredExpert, items: Mapping[PackageName, Chosen]) -> bool:
    item = items.get(expert.package)
    return item is not None and item.candidate.version == expert.version


def _still_fits(locked: Locked, item: Chosen | None) -> bool:
    """Tell whether all needs of a package allow its locked version, whatever was chosen."""
    return item is not None and all(locked.fits(n.wanted) != n.refused for n in item.needs)


def _contradictions(
    kept: Iterable[Locked], items: Mapping[PackageName, Chosen]
) -> Iterator[Notice]:
    """Yield locked versions that were chosen with another content, also from files."""
    for locked in kept:
        candidate = items[locked.package].candidate
        same = candidate.version == locked.version
        if same and candidate.content_digest != locked.content_digest:
            before = VersionContent("expert.lock", locked.content_digest)
            now = VersionContent(candidate.registry, candidate.content_digest)
            yield _change(locked.ref, locked.registry, before, now)
