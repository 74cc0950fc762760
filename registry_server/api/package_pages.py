"""What people are shown of a package: read from the tables, for the API and for web pages alike."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Raw
from msgspec.structs import asdict
from sqlalchemy import Connection, select

from expertctl.errors import NotFoundError
from expertctl.package.layout import read_manifest
from expertctl.reference import PackageName
from expertctl.registry.index_document import Release
from expertctl.schema.manifest import AdapterKind, BaseRequirement
from registry_server.access import namespaces, rights
from registry_server.access.identity import Action, Identity
from registry_server.access.namespaces import NamespaceRow
from registry_server.api.wire import Output, Time
from registry_server.database.tables import RELEASES
from registry_server.oci import manifests, repositories
from registry_server.publishing.index import leading, package_id, releases_of
from registry_server.publishing.namespace_key import (
    NamespaceKey,
    namespace_keys,
    revocation_reason,
)


class VersionFacts(Output, frozen=True):
    """A version; the package digest and the signer are those of its newest signed form."""

    version: str
    published: Time
    yanked: Annotated[str | None, Meta(description="Why, when it was yanked.")]
    revoked: Annotated[
        str | None, Meta(description="Why, when every key that signed it was revoked.")
    ]
    size: int
    content_digest: str
    package_digest: str
    signer: str
    downloads: int
    kinds: list[AdapterKind]
    base: BaseRequirement
    requires: list[str]
    conflicts: list[str]


class FileFacts(Output, frozen=True):
    """A file of a package."""

    path: str
    size: int
    digest: str


class VersionPage(VersionFacts, frozen=True):
    """A version with its ``expert.json`` and its files, the signature among them."""

    manifest: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    files: list[FileFacts]


class PackagePage(Output, frozen=True):
    """A package with its versions, the newest first."""

    name: str
    description: str
    latest: str | None
    owners: list[str]
    versions: list[VersionFacts]


def package_page(connection: Connection, identity: Identity, name: PackageName) -> PackagePage:
    """Return a package with all its versions.

    Raises:
        NotFoundError: when there is none, as far as ``identity`` may know.
        UnauthenticatedError: when nobody is named, and the namespace is not public.
    """
    row, package = _find(connection, identity, name)
    releases = releases_of(connection, package)
    counts = _downloads(connection, package)
    people = namespaces.members(connection, row.id)
    keys = namespace_keys(connection, row.id)
    newest = sorted(releases, key=lambda release: release.version, reverse=True)
    speaking = leading(releases)
    return PackagePage(
        name=str(name),
        description=speaking.description,
        latest=str(speaking.version) if speaking.yanked is None else None,
        owners=[user for user, role in people.items() if role == "owner"],
        versions=[_version(release, counts, keys) for release in newest],
    )


def version_page(
    connection: Connection, identity: Identity, name: PackageName, version: str
) -> VersionPage:
    """Return a version with its manifest and its files.

    Raises:
        NotFoundError: when there is none, as far as ``identity`` may know.
        UnauthenticatedError: when nobody is named, and the namespace is not public.
    """
    row, package = _find(connection, identity, name)
    releases = releases_of(connection, package)
    release = next((r for r in releases if str(r.version) == version), None)
    if release is None:
        raise NotFoundError(f"there is no {name}@{version}")
    keys = namespace_keys(connection, row.id)
    facts = asdict(_version(release, _downloads(connection, package), keys))
    manifest = Raw(_expert_json(connection, package, version))
    return VersionPage(**facts, manifest=manifest, files=_files(connection, name, release))


def _find(
    connection: Connection, identity: Identity, name: PackageName
) -> tuple[NamespaceRow, int]:
    row = rights.authorise(connection, identity, Action.READ, name.namespace, name.name)
    package = package_id(connection, row, name.name)
    if package is None:
        raise NotFoundError(f"there is no package {name}")
    return row, package


def _downloads(connection: Connection, package: int) -> dict[str, int]:
    query = select(RELEASES.c.version, RELEASES.c.downloads).where(RELEASES.c.package_id == package)
    return {version: downloads for version, downloads in connection.execute(query)}


def _expert_json(connection: Connection, package: int, version: str) -> bytes:
    query = select(RELEASES.c.manifest).where(
        RELEASES.c.package_id == package, RELEASES.c.version == version
    )
    return bytes(connection.execute(query).scalar_one())


def _files(connection: Connection, package: PackageName, release: Release) -> list[FileFacts]:
    """Return the files that the newest signed form names."""
    digest = str(release.forms[-1].package_digest)
    repository = repositories.find(connection, str(package))
    stored = repository and manifests.find(connection, repository.id, digest)
    assert stored, f"{package}: the manifest of {release.version} is not there"
    layout = read_manifest(stored.content, what=f"{package}@{release.version}")
    return [FileFacts(file.path, file.size, str(file.digest)) for file in layout.layers]


def _version(
    release: Release, downloads: Mapping[str, int], keys: Sequence[NamespaceKey]
) -> VersionFacts:
    newest = release.forms[-1]
    return VersionFacts(
        version=str(release.version),
        published=release.published,
        yanked=release.yanked,
        revoked=revocation_reason([form.signer for form in release.forms], keys),
        size=release.size,
        content_digest=str(release.content_digest),
        package_digest=str(newest.package_digest),
        signer=newest.signer,
        downloads=downloads[str(release.version)],
        kinds=list(release.kinds),
        base=release.base,
        requires=list(release.requires),
        conflicts=list(release.conflicts),
    )
