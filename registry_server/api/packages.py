"""Operations on packages: details of packages and versions, and yanking.

The web pages show the same documents.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Raw
from msgspec.structs import asdict
from sqlalchemy import Connection, select

from expertctl.errors import NotFoundError
from expertctl.http.operation import Operation
from expertctl.package.layout import parse_oci_manifest
from expertctl.reference import PackageName
from expertctl.registry.index_document import Release
from expertctl.schema.manifest import AdapterKind, BaseRequirement
from registry_server.access import namespaces, rights
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import Action, Identity
from registry_server.api.namespaces import ReasonRequest
from registry_server.api.schema import (
    ApiContext,
    ApiInput,
    ApiOutput,
    Name,
    Time,
    VersionText,
)
from registry_server.database.tables import RELEASES
from registry_server.oci import manifests
from registry_server.publishing import releases
from registry_server.publishing.index import (
    PublisherKey,
    find_package_id,
    find_revocation_reason,
    load_publisher_keys,
    load_releases,
    select_leading_release,
)


class VersionFacts(ApiOutput, frozen=True):
    """A version; the package digest and the signer are those of its newest signed form."""

    version: str
    published: Time
    yanked: Annotated[str | None, Meta(description="Why it was yanked; null if it was not.")]
    revoked: Annotated[
        str | None, Meta(description="Why its keys were revoked; null while one of them is valid.")
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


class FileFacts(ApiOutput, frozen=True):
    """A file of a package."""

    path: str
    size: int
    digest: str


class VersionDetails(VersionFacts, frozen=True):
    """A version with its ``expert.json`` and its files, including the signature."""

    manifest: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    files: list[FileFacts]


class PackageDetails(ApiOutput, frozen=True):
    """A package with its versions, newest first."""

    name: str
    description: str
    latest: str | None
    owners: list[str]
    versions: list[VersionFacts]


def describe_package(
    connection: Connection, identity: Identity, name: PackageName
) -> PackageDetails:
    """Return a package with all its versions.

    Raises:
        NotFoundError: when there is none that ``identity`` may read.
        UnauthenticatedError: when the request is anonymous and the namespace is not public.
    """
    row, package = _find_package(connection, identity, name)
    releases = load_releases(connection, package)
    counts = _load_download_counts(connection, package)
    people = namespaces.list_members(connection, row.id)
    keys = load_publisher_keys(connection, row.id)
    newest = sorted(releases, key=lambda release: release.version, reverse=True)
    speaking = select_leading_release(releases)
    return PackageDetails(
        name=str(name),
        description=speaking.description,
        latest=str(speaking.version) if speaking.yanked is None else None,
        owners=[user for user, role in people.items() if role == "owner"],
        versions=[_version_facts(release, counts, keys) for release in newest],
    )


def describe_version(
    connection: Connection, identity: Identity, name: PackageName, version: str
) -> VersionDetails:
    """Return a version with its manifest and its files.

    Raises:
        NotFoundError: when there is none that ``identity`` may read.
        UnauthenticatedError: when the request is anonymous and the namespace is not public.
    """
    row, package = _find_package(connection, identity, name)
    releases = load_releases(connection, package)
    release = next((r for r in releases if str(r.version) == version), None)
    if release is None:
        raise NotFoundError(f"there is no {name}@{version}")
    keys = load_publisher_keys(connection, row.id)
    facts = asdict(_version_facts(release, _load_download_counts(connection, package), keys))
    manifest = Raw(_load_expert_json(connection, package, version))
    return VersionDetails(**facts, manifest=manifest, files=_list_files(connection, name, release))


def _find_package(
    connection: Connection, identity: Identity, name: PackageName
) -> tuple[NamespaceRow, int]:
    row = rights.authorise(connection, identity, Action.READ, name.namespace, name.name)
    package = find_package_id(connection, row, name.name)
    if package is None:
        raise NotFoundError(f"there is no package {name}")
    return row, package


def _load_download_counts(connection: Connection, package: int) -> dict[str, int]:
    query = select(RELEASES.c.version, RELEASES.c.downloads).where(RELEASES.c.package_id == package)
    return {version: downloads for version, downloads in connection.execute(query)}


def _load_expert_json(connection: Connection, package: int, version: str) -> bytes:
    query = select(RELEASES.c.manifest).where(
        RELEASES.c.package_id == package, RELEASES.c.version == version
    )
    return bytes(connection.execute(query).scalar_one())


def _list_files(connection: Connection, package: PackageName, release: Release) -> list[FileFacts]:
    """Return the files of the newest signed form."""
    digest = str(release.forms[-1].package_digest)
    repository = rights.find_repository(connection, str(package))
    stored = repository and manifests.find_manifest(connection, repository.id, digest)
    assert stored, f"{package}: the manifest of {release.version} is not there"
    layout = parse_oci_manifest(stored.content, what=f"{package}@{release.version}")
    return [FileFacts(file.path, file.size, str(file.digest)) for file in layout.layers]


def _version_facts(
    release: Release, downloads: Mapping[str, int], keys: Sequence[PublisherKey]
) -> VersionFacts:
    newest = release.forms[-1]
    return VersionFacts(
        version=str(release.version),
        published=release.published,
        yanked=release.yanked,
        revoked=find_revocation_reason([form.signer for form in release.forms], keys),
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


class PackagePath(ApiInput, frozen=True):
    """Identifies a package."""

    namespace: Name
    name: Name

    @property
    def package(self) -> PackageName:
        """The name of the package."""
        return PackageName(self.namespace, self.name)


class VersionPath(PackagePath, frozen=True):
    """Identifies a version of a package."""

    version: VersionText


def show_package(context: ApiContext, path: PackagePath) -> PackageDetails:
    """Return a package with all its versions, newest first."""
    with context.registry.database.read() as connection:
        return describe_package(connection, context.identity, path.package)


def show_version(context: ApiContext, path: VersionPath) -> VersionDetails:
    """Return a version with its manifest and its files."""
    with context.registry.database.read() as connection:
        return describe_version(connection, context.identity, path.package, path.version)


def yank_version(context: ApiContext, path: VersionPath, body: ReasonRequest) -> None:
    """Yank a version: it is no longer chosen, but users who locked it can still install it."""
    releases.yank_release(
        context.registry,
        context.identity,
        name=path.package,
        version=path.version,
        reason=body.reason,
    )


def unyank_version(context: ApiContext, path: VersionPath) -> None:
    """Undo a yank."""
    releases.unyank_release(
        context.registry, context.identity, name=path.package, version=path.version
    )


_PACKAGE_PATH = "/api/v1/packages/{namespace}/{name}"
_VERSION_PATH = f"{_PACKAGE_PATH}/{{version}}"
OPERATIONS = (
    Operation("GET", _PACKAGE_PATH, show_package, "packages", 200, (403, 404), is_public=True),
    Operation("GET", _VERSION_PATH, show_version, "packages", 200, (403, 404), is_public=True),
    Operation("PUT", f"{_VERSION_PATH}/yank", yank_version, "packages", 204, (403, 404)),
    Operation("DELETE", f"{_VERSION_PATH}/yank", unyank_version, "packages", 204, (403, 404)),
)
