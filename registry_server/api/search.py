"""Searching and counting packages: by words, namespace, base and kind of adapter.

A search finds packages whose name, description, task, tags or keywords contain every given word.
Words are compared literally, with ``instr``: there are no wildcards or patterns, so nothing needs
escaping and no query is slow. Results are ordered by the kind of match (the whole name, its
beginning, a part of it, whole words elsewhere, parts of words), then by downloads. Packages whose
versions are all yanked are neither found nor counted, and yanked versions are not counted, so all
numbers agree with the lists next to them.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta
from sqlalchemy import ColumnElement, Connection, and_, case, func, literal, select

from expertctl.errors import UsageError
from expertctl.http.operation import Operation
from expertctl.registry.index_document import format_timestamp
from expertctl.schema.manifest import AdapterKind, Manifest
from expertctl.schema.validation import decode_json
from registry_server.access import rights
from registry_server.access.rights import Identity
from registry_server.api.schema import ApiContext, ApiInput, ApiOutput, Limit, Time
from registry_server.database.tables import NAMESPACES, PACKAGES, RELEASES, SIGNED_FORMS
from registry_server.publishing.index import (
    PublisherKey,
    find_revocation_reason,
    fold_words,
    list_kinds,
    load_publisher_keys,
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
    """What to search for; all conditions must hold, and without any, all packages match."""

    q: Annotated[str, Meta(max_length=MAX_QUERY, description="Words that must all occur.")] = ""
    namespace: Annotated[str, Meta(max_length=64, description="Only in this namespace.")] = ""
    base: Annotated[str, Meta(max_length=200, description="Only for this base model.")] = ""
    kind: Annotated[
        Literal["", "lora", "dora", "ia3", "soft_prompt"],
        Meta(description="Only with an adapter of this kind."),
    ] = ""
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
    """A page of packages, best matches first; ``total`` is the number of all that match."""

    results: list[SearchResult]
    next: str | None
    total: int


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
    offset, wanted = int(query.cursor or 0), SearchTerms.parse(query.q)
    matching = _matching_conditions(identity, query, wanted)
    found = _find_package_ids(connection, matching, wanted, limit=query.limit + 1, offset=offset)
    following = offset + query.limit
    more = str(following) if len(found) > query.limit and following < MAX_OFFSET else None
    total = _count_packages(connection, matching)
    return SearchPage(_load_results(connection, found[: query.limit]), more, total)


def _find_package_ids(
    connection: Connection,
    matching: list[ColumnElement[bool]],
    wanted: SearchTerms,
    *,
    limit: int,
    offset: int,
) -> list[int]:
    """Return the ids of matching packages, in order.

    The query reads only two indexes, however large the rows of the packages are.
    """
    statement = (
        select(PACKAGES.c.id)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(*matching)
        .order_by(_rank_expression(wanted), _DOWNLOADS.desc(), _FULL_NAME)
        .limit(limit)
        .offset(offset)
    )
    return list(connection.execute(statement).scalars())


def _count_packages(connection: Connection, matching: list[ColumnElement[bool]]) -> int:
    joined = PACKAGES.join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
    return connection.scalar(select(func.count()).select_from(joined).where(*matching)) or 0


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


def _matching_conditions(
    identity: Identity, query: SearchQuery, wanted: SearchTerms
) -> list[ColumnElement[bool]]:
    conditions = _listed_conditions(identity)
    if query.namespace:
        conditions.append(NAMESPACES.c.name == query.namespace)
    if query.base:
        conditions.append(PACKAGES.c.base == query.base)
    if query.kind:
        conditions.append(_has_kind(query.kind))
    return [*conditions, *(func.instr(PACKAGES.c.search_text, w) > 0 for w in wanted.words)]


def _listed_conditions(identity: Identity) -> list[ColumnElement[bool]]:
    """Return the conditions of packages that lists contain; they need the table of namespaces."""
    return [rights.build_readable_filter(identity), PACKAGES.c.latest.is_not(None)]


def _has_kind(kind: str) -> ColumnElement[bool]:
    return func.instr(PACKAGES.c.kinds, f" {kind} ") > 0


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
        kinds=list_kinds(facts),
        base=facts.base.name,
        downloads=downloads,
        updated=format_timestamp(updated),
        signer=signers[-1],
        revoked=find_revocation_reason(signers, keys),
    )


@dataclass(frozen=True, slots=True)
class PackageCount:
    """How many packages a namespace, a base or a kind of adapter has."""

    name: str
    packages: int


KINDS: tuple[AdapterKind, ...] = ("lora", "dora", "ia3", "soft_prompt")


def count_by_kind(connection: Connection, identity: Identity) -> list[PackageCount]:
    """Return the number of packages of each kind of adapter; a package may have several."""
    joined = PACKAGES.join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
    sums = [func.coalesce(func.sum(case((_has_kind(kind), 1), else_=0)), 0) for kind in KINDS]
    statement = select(*sums).select_from(joined).where(*_listed_conditions(identity))
    counts = connection.execute(statement).one()
    return [PackageCount(kind, count) for kind, count in zip(KINDS, counts, strict=True) if count]


def count_by_base(
    connection: Connection, identity: Identity, *, limit: int, offset: int = 0
) -> list[PackageCount]:
    """Return the base models with packages, the most used first."""
    count = func.count()
    statement = (
        select(PACKAGES.c.base, count)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(*_listed_conditions(identity))
        .group_by(PACKAGES.c.base)
        .order_by(count.desc(), PACKAGES.c.base)
        .limit(limit)
        .offset(offset)
    )
    return [PackageCount(*row) for row in connection.execute(statement)]


def count_by_namespace(
    connection: Connection, identity: Identity, *, limit: int, offset: int = 0
) -> list[PackageCount]:
    """Return the readable namespaces sorted by name, also those without packages."""
    of_namespace = and_(PACKAGES.c.namespace_id == NAMESPACES.c.id, PACKAGES.c.latest.is_not(None))
    statement = (
        select(NAMESPACES.c.name, func.count(PACKAGES.c.id))
        .join(PACKAGES, of_namespace, isouter=True)
        .where(rights.build_readable_filter(identity))
        .group_by(NAMESPACES.c.name)
        .order_by(NAMESPACES.c.name)
        .limit(limit)
        .offset(offset)
    )
    return [PackageCount(*row) for row in connection.execute(statement)]


class RegistryStats(ApiOutput, frozen=True):
    """Totals of the namespaces that the caller may read.

    ``packages`` and ``versions`` leave out what is yanked, as searches do; ``yanked`` versions,
    ``bytes`` and ``downloads`` include it.
    """

    namespaces: int
    packages: int
    versions: int
    yanked: int
    bytes: int
    downloads: int


def search(context: ApiContext, query: SearchQuery) -> SearchPage:
    """Find packages by words in their names, descriptions, tasks and keywords."""
    with context.registry.database.read() as connection:
        return find_packages(connection, context.identity, query)


def stats(context: ApiContext) -> RegistryStats:
    """Return the number of namespaces, packages, versions and downloads, and the total size."""
    with context.registry.database.read() as connection:
        return load_stats(connection, context.identity)


def load_stats(connection: Connection, identity: Identity) -> RegistryStats:
    """Return the totals of the namespaces that ``identity`` may read."""
    own = select(NAMESPACES.c.id).where(rights.build_readable_filter(identity))
    packages = select(PACKAGES.c.id).where(PACKAGES.c.namespace_id.in_(own))
    listed = packages.where(PACKAGES.c.latest.is_not(None))
    versions = select(
        func.count(),
        func.count(RELEASES.c.yanked),
        func.coalesce(func.sum(RELEASES.c.size), 0),
        func.coalesce(func.sum(RELEASES.c.downloads), 0),
    ).where(RELEASES.c.package_id.in_(packages))
    spaces = connection.scalar(select(func.count()).select_from(own.subquery())) or 0
    known = connection.scalar(select(func.count()).select_from(listed.subquery())) or 0
    count, yanked, size, downloads = connection.execute(versions).one()
    return RegistryStats(spaces, known, count - yanked, yanked, size, downloads)


OPERATIONS = (
    Operation("GET", "/api/v1/search", search, "packages", is_public=True),
    Operation("GET", "/api/v1/stats", stats, "registry", is_public=True),
)
