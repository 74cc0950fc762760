"""Operations on packages: search, details of packages and versions, yanking, and statistics.

The web pages show the same documents.

A search finds packages whose name, description, task, tags or keywords contain every given word.
Words are compared literally, with ``instr``: there are no wildcards or patterns, so nothing needs
escaping and no query is slow. Results are ordered by the kind of match (the whole name, its
beginning, a part of it, whole words elsewhere, parts of words), then by downloads. Packages whose
versions are all yanked are not found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Raw
from msgspec.structs import asdict
from sqlalchemy import ColumnElement, Connection, and_, case, func, literal, select

from expertctl.errors import NotFoundError, UsageError
from expertctl.http.operation import Operation
from expertctl.package.layout import parse_oci_manifest
from expertctl.reference import PackageName
from expertctl.registry.index_document import Release, format_timestamp
from expertctl.schema.manifest import AdapterKind, BaseRequirement, Manifest
from expertctl.schema.validation import decode_json
from registry_server.access import namespaces, rights
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import Action, Identity
from registry_server.api.namespaces import ReasonRequest
from registry_server.api.schema import (
    ApiContext,
    ApiInput,
    ApiOutput,
    Limit,
    Name,
    Time,
    VersionText,
)
from registry_server.database.tables import NAMESPACES, PACKAGES, RELEASES, SIGNED_FORMS
from registry_server.oci import manifests
from registry_server.publishing import releases
from registry_server.publishing.index import (
    PublisherKey,
    find_package_id,
    find_revocation_reason,
    fold_words,
    load_publisher_keys,
    load_releases,
    select_leading_release,
)

MAX_QUERY = 200
MAX_WORDS = 8
MAX_OFFSET = 10_000

_FULL_NAME: ColumnElement[str] = NAMESPACES.c.name.concat("/").concat(PACKAGES.c.name)
_DOWNLOADS = (
    select(func.coalesce(func.sum(RELEASES.c.downloads), 0))
    .where(RELEASES.c.package_id == PACKAGES.c.id)
    .correlate(PACKAGES)
    .scalar_subquery()
)


class SearchQuery(ApiInput, frozen=True):
    """The words to search for; without words, all packages match."""

    q: Annotated[str, Meta(max_length=MAX_QUERY, description="Words that must all occur.")] = ""
    limit: Limit = 20
    cursor: Annotated[str, Meta(pattern="^([1-9][0-9]{0,3})?$")] = ""


class SearchResult(ApiOutput, frozen=True):
    """A package, described by its leading version."""

    name: str
    version: str
    description: str
    task: str
    kinds: list[AdapterKind]
    base: str
    downloads: int
    updated: Time
    signer: Annotated[str, Meta(description="The key of its newest signed form.")]
    revoked: Annotated[
        str | None, Meta(description="Why its keys were revoked; null while one of them is valid.")
    ]


class SearchPage(ApiOutput, frozen=True):
    """A page of packages, best matches first."""

    results: list[SearchResult]
    next: str | None


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """The folded search terms: ``text`` in the form of a name, and the single words."""

    text: str
    words: tuple[str, ...]

    @classmethod
    def parse(cls, query: str) -> "SearchTerms":
        """Parse a query.

        Raises:
            UsageError: when it has too many words.
        """
        words = tuple(dict.fromkeys(fold_words(query).split()))
        if len(words) > MAX_WORDS:
            raise UsageError(f"search for at most {MAX_WORDS} words")
        return cls("-".join(query.casefold().split()), words)


def find_packages(connection: Connection, identity: Identity, query: SearchQuery) -> SearchPage:
    """Return a page of the packages that ``identity`` may read and that contain every word.

    Raises:
        UsageError: when there are too many words.
    """
    offset = int(query.cursor or 0)
    found = _find_package_ids(connection, identity, query, offset)
    following = offset + query.limit
    more = str(following) if len(found) > query.limit and following < MAX_OFFSET else None
    return SearchPage(_load_results(connection, found[: query.limit]), more)


def _find_package_ids(
    connection: Connection, identity: Identity, query: SearchQuery, offset: int
) -> list[int]:
    """Return the ids of the matching packages in order, and one id more if there is a next page.

    The query reads only two indexes, however large the rows of the packages are.
    """
    wanted = SearchTerms.parse(query.q)
    statement = (
        select(PACKAGES.c.id)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(
            rights.build_readable_filter(identity),
            PACKAGES.c.latest.is_not(None),
            *_matching_conditions(wanted),
        )
        .order_by(_rank_expression(wanted), _DOWNLOADS.desc(), _FULL_NAME)
        .limit(query.limit + 1)
        .offset(offset)
    )
    return list(connection.execute(statement).scalars())


def _load_results(connection: Connection, packages: list[int]) -> list[SearchResult]:
    """Return the search results of packages, in the given order."""
    statement = (
        select(
            PACKAGES.c.id,
            _FULL_NAME,
            PACKAGES.c.latest,
            PACKAGES.c.updated,
            _DOWNLOADS,
            RELEASES.c.manifest,
            RELEASES.c.id,
            NAMESPACES.c.id,
        )
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .join(RELEASES, _latest_release_condition())
        .where(PACKAGES.c.id.in_(packages))
    )
    rows = connection.execute(statement).all()
    signers = _load_signers(connection, [row[6] for row in rows])
    keys = {space: load_publisher_keys(connection, space) for space in {row[7] for row in rows}}
    results = {
        package: _search_result(*facts, signers=signers[release], keys=keys[namespace])
        for package, *facts, release, namespace in (tuple(row) for row in rows)
    }
    return [results[package] for package in packages]


def _load_signers(connection: Connection, releases: list[int]) -> dict[int, list[str]]:
    """Return the ids of the keys that signed each release, newest last."""
    query = (
        select(SIGNED_FORMS.c.release_id, SIGNED_FORMS.c.signer)
        .where(SIGNED_FORMS.c.release_id.in_(releases))
        .order_by(SIGNED_FORMS.c.position)
    )
    found: dict[int, list[str]] = {}
    for release, signer in connection.execute(query):
        found.setdefault(release, []).append(signer)
    return found


def _latest_release_condition() -> ColumnElement[bool]:
    same = RELEASES.c.version == PACKAGES.c.latest
    return and_(RELEASES.c.package_id == PACKAGES.c.id, same)


def _matching_conditions(wanted: SearchTerms) -> list[ColumnElement[bool]]:
    return [func.instr(PACKAGES.c.search_text, word) > 0 for word in wanted.words]


def _rank_expression(wanted: SearchTerms) -> ColumnElement[int]:
    if not wanted.words:
        return literal(0)
    whole = [func.instr(PACKAGES.c.search_text, f" {word} ") > 0 for word in wanted.words]
    full = _FULL_NAME
    return case(
        (PACKAGES.c.name == wanted.text, 0),
        (full == wanted.text, 0),
        (func.instr(PACKAGES.c.name, wanted.text) == 1, 1),
        (func.instr(full, wanted.text) == 1, 1),
        (func.instr(full, wanted.text) > 0, 2),
        (and_(*whole), 3),
        else_=4,
    )


def _search_result(
    name: str,
    version: str,
    updated: float,
    downloads: int,
    manifest: bytes,
    *,
    signers: list[str],
    keys: tuple[PublisherKey, ...],
) -> SearchResult:
    facts = decode_json(manifest, Manifest)
    return SearchResult(
        name=name,
        version=version,
        description=facts.description,
        task=facts.routing.task,
        kinds=list(dict.fromkeys(entry.kind for entry in facts.adapters)),
        base=facts.base.name,
        downloads=downloads,
        updated=format_timestamp(updated),
        signer=signers[-1],
        revoked=find_revocation_reason(signers, keys),
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


class RegistryStats(ApiOutput, frozen=True):
    """Totals of the namespaces that the caller may read; ``bytes`` is the size of all versions."""

    namespaces: int
    packages: int
    versions: int
    bytes: int
    downloads: int


def search(context: ApiContext, query: SearchQuery) -> SearchPage:
    """Find packages by words in their names, descriptions, tasks and keywords."""
    with context.registry.database.read() as connection:
        return find_packages(connection, context.identity, query)


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


def stats(context: ApiContext) -> RegistryStats:
    """Return the number of namespaces, packages, versions and downloads, and the total size."""
    own = select(NAMESPACES.c.id).where(rights.build_readable_filter(context.identity))
    packages = select(PACKAGES.c.id).where(PACKAGES.c.namespace_id.in_(own))
    versions = select(
        func.count(),
        func.coalesce(func.sum(RELEASES.c.size), 0),
        func.coalesce(func.sum(RELEASES.c.downloads), 0),
    ).where(RELEASES.c.package_id.in_(packages))
    with context.registry.database.read() as connection:
        spaces = connection.scalar(select(func.count()).select_from(own.subquery())) or 0
        known = connection.scalar(select(func.count()).select_from(packages.subquery())) or 0
        count, size, downloads = connection.execute(versions).one()
    return RegistryStats(spaces, known, count, size, downloads)


_PACKAGE_PATH = "/api/v1/packages/{namespace}/{name}"
_VERSION_PATH = f"{_PACKAGE_PATH}/{{version}}"
OPERATIONS = (
    Operation("GET", "/api/v1/search", search, "packages", is_public=True),
    Operation("GET", _PACKAGE_PATH, show_package, "packages", 200, (403, 404), is_public=True),
    Operation("GET", _VERSION_PATH, show_version, "packages", 200, (403, 404), is_public=True),
    Operation("PUT", f"{_VERSION_PATH}/yank", yank_version, "packages", 204, (403, 404)),
    Operation("DELETE", f"{_VERSION_PATH}/yank", unyank_version, "packages", 204, (403, 404)),
    Operation("GET", "/api/v1/stats", stats, "registry", is_public=True),
)
