"""Search for packages whose name, description, task, tags or keywords contain every given word.

Words are compared literally, with ``instr``: there are no wildcards or patterns, so nothing needs
escaping and no query is slow. Results are ordered by the kind of match (the whole name, its
beginning, a part of it, whole words elsewhere, parts of words), then by downloads. Packages whose
versions are all yanked are not found.
"""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta
from sqlalchemy import ColumnElement, Connection, and_, case, func, literal, select

from expertctl.errors import UsageError
from expertctl.schema.manifest import AdapterKind, Manifest
from expertctl.schema.validation import decode_json
from registry_server.access import rights
from registry_server.access.rights import Identity
from registry_server.api.schema import ApiInput, ApiOutput, Limit, Time, format_timestamp
from registry_server.database.tables import NAMESPACES, PACKAGES, RELEASES, SIGNED_FORMS
from registry_server.publishing.index import (
    PublisherKey,
    find_revocation_reason,
    fold_words,
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
