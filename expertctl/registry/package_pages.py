"""What a registry says about packages: for people who look, never a base for trust.

Install believes the signed index document alone; this is what ``search`` and ``info`` show.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import quote, urlencode

from expertctl.digest import Digest
from expertctl.errors import ExpertError, RegistryError
from expertctl.reference import PackageName, Version
from expertctl.registry.answers import answer
from expertctl.registry.api_client import ApiClient
from expertctl.schema.manifest import BaseRequirement
from expertctl.schema.strict_json import JsonObject
from expertctl.trust.record import TrustRecord


@dataclass(frozen=True, slots=True)
class Hit:
    """A package that a search found, by its newest version."""

    name: str
    version: str
    description: str = ""
    task: str = ""
    kinds: tuple[str, ...] = ()
    base: str = ""
    downloads: int = 0
    updated: str = ""
    signer: str | None = None
    revoked: str | None = None
    """Why every key that signed it was revoked, if they were."""


@dataclass(frozen=True, slots=True)
class Hits:
    """One page of a search; ``next`` is where the following one begins."""

    results: tuple[Hit, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """One version of a package."""

    version: str
    content_digest: str
    package_digest: str
    published: str = ""
    yanked: str | None = None
    """Why it was taken back, if it was."""
    revoked: str | None = None
    """Why every key that signed it was revoked, if they were."""
    size: int = 0
    signer: str | None = None
    downloads: int = 0
    kinds: tuple[str, ...] = ()
    base: BaseRequirement | None = None
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Tell whether it was neither yanked nor signed by revoked keys alone."""
        return self.yanked is None and self.revoked is None


@dataclass(frozen=True, slots=True)
class PackagePage:
    """A package with all its versions."""

    name: str
    description: str = ""
    latest: str | None = None
    owners: tuple[str, ...] = ()
    versions: tuple[Release, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionPage:
    """One version with its ``expert.json``, which is not verified here."""

    release: Release
    manifest: JsonObject


def search(api: ApiClient, text: str, *, limit: int, cursor: str | None = None) -> Hits:
    """Return the packages whose name, description or keywords fit a text."""
    wanted = {"q": text, "limit": str(limit), **({"cursor": cursor} if cursor else {})}
    document = api.get(f"search?{urlencode(wanted)}")
    return answer(document, Hits, host=api.address.host)


def package_page(api: ApiClient, package: PackageName) -> PackagePage:
    """Return a package with its versions.

    Raises:
        NotFoundError: when there is none of this name that the user may read.
    """
    page = answer(api.get(f"packages/{package}"), PackagePage, host=api.address.host)
    _check(page.name, package, page.versions, api.address.host)
    return page


def version_page(api: ApiClient, package: PackageName, version: Version) -> VersionPage:
    """Return one version.

    Raises:
        NotFoundError: when there is none that the user may read.
    """
    document = api.get(f"packages/{package}/{quote(str(version))}")
    manifest = document.get("manifest")
    if not isinstance(manifest, dict):
        raise RegistryError(f"{api.address.host} about {package}: there is no manifest")
    release = answer(document, Release, host=api.address.host)
    _check(str(package), package, [release], api.address.host)
    return VersionPage(release, manifest)


def with_revocations(
    releases: Iterable[Release], record: TrustRecord, *, namespace: str, host: str
) -> tuple[Release, ...]:
    """Return releases, also those marked as revoked whose newest signer is revoked here."""
    return tuple(
        release
        if release.revoked is not None
        else replace(release, revoked=_revocation(release.signer, record, namespace, host))
        for release in releases
    )


def marked(hits: Iterable[Hit], record: TrustRecord, *, host: str) -> tuple[Hit, ...]:
    """Return hits, also those marked as revoked whose newest signer is revoked here."""
    return tuple(
        hit
        if hit.revoked is not None
        else replace(hit, revoked=_revocation(hit.signer, record, hit.name.partition("/")[0], host))
        for hit in hits
    )


def _revocation(signer: str | None, record: TrustRecord, namespace: str, host: str) -> str | None:
    """Return why a key is revoked on this machine, which may be empty; None when it is not."""
    if signer is None:
        return None
    found = record.revocation(signer, namespace=namespace, registry=host)
    return found.reason if found else None


def yank(api: ApiClient, package: PackageName, version: Version, reason: str) -> None:
    """Take a version back: only users who locked it are still given it."""
    api.put(_yank_path(package, version), {"reason": reason})


def unyank(api: ApiClient, package: PackageName, version: Version) -> None:
    """Let a version that was taken back count again."""
    api.delete(_yank_path(package, version))


def _yank_path(package: PackageName, version: Version) -> str:
    return f"packages/{package}/{quote(str(version))}/yank"


def _check(name: str, package: PackageName, releases: Iterable[Release], host: str) -> None:
    """Refuse an answer about another package, or with versions that are none."""
    try:
        same = PackageName.parse(name) == package
        for release in releases:
            Version.parse(release.version)
            Digest.parse(release.content_digest)
            Digest.parse(release.package_digest)
    except ExpertError as error:
        raise RegistryError(f"{host} about {package}: {error.message}") from error
    if not same:
        raise RegistryError(f"{host} was asked for {package} and answered about another package")
