"""Index documents: made from the rows of a package, signed, and kept in its row.

The rows are the truth and the document is a function of them, its revision and the time. Code that
changes a row that the document shows calls `rewrite_index` in the same transaction, so that what
clients read is always one state. The revision grows by one with each change, and when the document
is signed again because it grows old: it says how often that is, so that clients notice a registry
that shows them an old state.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from sqlalchemy import Connection, Row, Select, func, insert, select, update

from expertctl.digest import Digest
from expertctl.errors import BudgetError, InvalidPackageError
from expertctl.reference import PackageName, Version
from expertctl.registry.index_document import (
    IndexDocument,
    KeyEntry,
    Release,
    RevokedKey,
    SignedForm,
    write_time,
)
from expertctl.registry.index_envelope import open_index, sign_index
from expertctl.schema.manifest import Manifest
from expertctl.schema.shape import shape_json
from expertctl.trust.keys import PrivateKey
from registry_server.access.confusable import skeleton
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import NAMESPACES, PACKAGES, RELEASES, SIGNED_FORMS
from registry_server.publishing.index_key import IndexSigner
from registry_server.publishing.namespace_key import NamespaceKey, namespace_keys
from registry_server.publishing.search_text import search_text


def signed_index(connection: Connection, name: PackageName) -> bytes | None:
    """Return the envelope of a package's index document, None when there is no such package."""
    query = (
        select(PACKAGES.c.index_document)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(NAMESPACES.c.name == name.namespace, PACKAGES.c.name == name.name)
    )
    return connection.execute(query).scalar_one_or_none()


def package_id(connection: Connection, namespace: NamespaceRow, name: str) -> int | None:
    """Return the row id of a package, None when there is none."""
    query = select(PACKAGES.c.id).where(
        PACKAGES.c.namespace_id == namespace.id, PACKAGES.c.name == name
    )
    return connection.execute(query).scalar_one_or_none()


def insert_package(
    connection: Connection, namespace: NamespaceRow, name: str, *, now: float
) -> int:
    """Make the row of a package; its document is written by `rewrite_index` before the commit."""
    row = {
        "namespace_id": namespace.id,
        "name": name,
        "skeleton": skeleton(name),
        "description": "",
        "revision": 0,
        "index_document": b"",
        "created": now,
        "updated": now,
        "signed": now,
    }
    made = connection.execute(insert(PACKAGES).values(row))
    assert made.inserted_primary_key is not None
    return int(made.inserted_primary_key[0])


def rewrite_index(connection: Connection, package: int, *, signer: IndexSigner, now: float) -> None:
    """Make and sign the next document of a package, in the transaction that changed its rows.

    Raises:
        BudgetError: when no client could read it any more: too many versions, forms or keys.
    """
    keys = _keys_of(connection, package)
    changed = _next_document(connection, package, keys, signer=signer, now=now)
    _set(connection, package, {**changed, "updated": now})


def index_is_due(connection: Connection, *, signer: IndexSigner, now: float) -> bool:
    """Tell whether `renew_indexes` has anything to do."""
    return connection.execute(_due(signer, now).limit(1)).first() is not None


def renew_indexes(connection: Connection, *, signer: IndexSigner, now: float, at_most: int) -> int:
    """Sign documents again that are older than half of their interval; return how many.

    Nothing else of a package changes, nor when it was updated. At most so many, the oldest first.
    """
    query = _due(signer, now).order_by(PACKAGES.c.signed).limit(at_most)
    due = connection.execute(query).scalars().all()
    for package in due:
        keys = _keys_of(connection, package)
        changed = _next_document(connection, package, keys, signer=signer, now=now)
        _set(connection, package, changed)
    return len(due)


def rewrite_namespace(
    connection: Connection, namespace: NamespaceRow, *, signer: IndexSigner, now: float
) -> None:
    """Make the next document of every package of a namespace: its keys have changed."""
    keys = namespace_keys(connection, namespace.id)
    packages = select(PACKAGES.c.id).where(PACKAGES.c.namespace_id == namespace.id)
    for package in list(connection.execute(packages.order_by(PACKAGES.c.id)).scalars()):
        changed = _next_document(connection, package, keys, signer=signer, now=now)
        _set(connection, package, {**changed, "updated": now})


def document_of(
    package: PackageName,
    releases: Sequence[Release],
    keys: Iterable[NamespaceKey],
    *,
    revision: int,
    now: float,
    interval_days: int,
) -> IndexDocument:
    """Return the document for these releases and keys."""
    known = tuple(keys)
    return IndexDocument(
        package=package,
        revision=revision,
        updated=moment(now),
        description=leading(releases).description,
        releases=tuple(sorted(releases, key=lambda release: release.version)),
        keys=tuple(KeyEntry(k.key, k.statement) for k in known if k.revoked is None),
        revoked=tuple(RevokedKey(k.key_id, k.reason) for k in known if k.revoked is not None),
        interval_days=interval_days,
    )


def leading(releases: Iterable[Release]) -> Release:
    """Return the release that speaks for a package: the newest final one that is not yanked.

    Where there is none, a prerelease speaks, else a yanked one.
    """
    return max(releases, key=lambda r: (r.yanked is None, not r.version.prerelease, r.version))


def releases_of(connection: Connection, package: int) -> list[Release]:
    """Return every version of a package, in no order."""
    forms = _forms_of(connection, package)
    query = select(
        RELEASES.c.id,
        RELEASES.c.version,
        RELEASES.c.content_digest,
        RELEASES.c.manifest,
        RELEASES.c.size,
        RELEASES.c.published,
        RELEASES.c.yanked,
        func.coalesce(RELEASES.c.yank_reason, "").label("yank_reason"),
    ).where(RELEASES.c.package_id == package)
    return [_release(row, forms) for row in connection.execute(query)]


def moment(seconds: float) -> str:
    """Return a time as index documents say it."""
    return write_time(datetime.fromtimestamp(seconds, UTC))


def _due(signer: IndexSigner, now: float) -> Select[int]:
    return select(PACKAGES.c.id).where(PACKAGES.c.signed < now - signer.renewal_seconds)


def _keys_of(connection: Connection, package: int) -> Sequence[NamespaceKey]:
    query = select(PACKAGES.c.namespace_id).where(PACKAGES.c.id == package)
    return namespace_keys(connection, connection.execute(query).scalar_one())


def _set(connection: Connection, package: int, values: Mapping[str, object]) -> None:
    connection.execute(update(PACKAGES).where(PACKAGES.c.id == package).values(values))


def _next_document(
    connection: Connection,
    package: int,
    keys: Sequence[NamespaceKey],
    *,
    signer: IndexSigner,
    now: float,
) -> dict[str, object]:
    """Return the columns of a package that its next document changes, but when it was updated."""
    row = connection.execute(
        select(PACKAGES.c.name, PACKAGES.c.revision, NAMESPACES.c.name)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(PACKAGES.c.id == package)
    ).one()
    name, revision, namespace = row
    document = document_of(
        PackageName(namespace, name),
        releases_of(connection, package),
        keys,
        revision=revision + 1,
        now=now,
        interval_days=signer.interval_days,
    )
    return {
        "revision": document.revision,
        "index_document": _readable(document, signer.key),
        "description": document.description,
        "signed": now,
        **_found_by(connection, package, document),
    }


def _found_by(
    connection: Connection, package: int, document: IndexDocument
) -> dict[str, str | None]:
    """Return what searches look at; a package whose versions are all yanked is not found."""
    speaking = leading(document.releases)
    query = select(RELEASES.c.manifest).where(
        RELEASES.c.package_id == package, RELEASES.c.version == str(speaking.version)
    )
    manifest = shape_json(connection.execute(query).scalar_one(), Manifest)
    latest = str(speaking.version) if speaking.yanked is None else None
    return {"latest": latest, "search_text": search_text(document.package, manifest)}


def _readable(document: IndexDocument, key: PrivateKey) -> bytes:
    """Sign a document, and read it as a client will: an unreadable one must not be published."""
    what = f"the index of {document.package}"
    try:
        envelope = sign_index(document, key)
        same = open_index(envelope, key=key.public, package=document.package) == document
    except InvalidPackageError as error:
        hint = "ask whoever runs the registry; what was published before is not affected"
        raise BudgetError(f"{what} would be too large: {error.message}", hint=hint) from error
    assert same, f"{what} does not read as it was written"
    return envelope


def _forms_of(connection: Connection, package: int) -> Mapping[int, list[SignedForm]]:
    query = (
        select(
            SIGNED_FORMS.c.release_id,
            SIGNED_FORMS.c.package_digest,
            SIGNED_FORMS.c.signer,
            SIGNED_FORMS.c.size,
        )
        .join(RELEASES, RELEASES.c.id == SIGNED_FORMS.c.release_id)
        .where(RELEASES.c.package_id == package)
        .order_by(SIGNED_FORMS.c.release_id, SIGNED_FORMS.c.position)
    )
    forms: dict[int, list[SignedForm]] = {}
    for release, digest, signer, size in connection.execute(query):
        forms.setdefault(release, []).append(SignedForm(Digest.parse(digest), signer, size))
    return forms


def _release(
    row: Row[int, str, str, bytes, int, float, float | None, str],
    forms: Mapping[int, list[SignedForm]],
) -> Release:
    """Make a release; its manifest was checked when it was published, so it is only decoded."""
    manifest = shape_json(row.manifest, Manifest)
    return Release(
        version=Version.parse(row.version),
        content_digest=Digest.parse(row.content_digest),
        forms=tuple(forms[row.id]),
        size=row.size,
        published=moment(row.published),
        yanked=None if row.yanked is None else row.yank_reason,
        kinds=tuple(dict.fromkeys(entry.kind for entry in manifest.adapters)),
        base=manifest.base,
        requires=manifest.composition.requires,
        conflicts=manifest.composition.conflicts,
        description=manifest.description,
    )
