"""Index documents, built from the rows of a package, signed, and stored in its row.

A document is a function of the rows, its revision and the time. Code that changes a row that the
document contains calls `rewrite_index` in the same transaction, so that clients always read one
state. Each change increments the revision. A document is also signed again, with a new revision,
before it is older than the interval it states, so that clients notice a registry that serves an old
state.

The module also loads the publisher keys of a namespace, and builds the text that searches match.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    format_timestamp,
    open_index,
    sign_index,
)
from expertctl.schema.manifest import AdapterKind, Manifest
from expertctl.schema.validation import decode_json
from expertctl.trust.keys import PrivateKey, PublicKey
from registry_server.access.namespaces import NamespaceRow, fold_name
from registry_server.database.tables import (
    NAMESPACE_KEYS,
    NAMESPACES,
    PACKAGES,
    RELEASES,
    SIGNED_FORMS,
)
from registry_server.registry import IndexSigner


@dataclass(frozen=True, slots=True)
class PublisherKey:
    """A publisher key; ``revoked`` is the time of its revocation, None while it is valid."""

    key: PublicKey
    statement: bytes | None
    added: float
    revoked: float | None
    reason: str

    @property
    def key_id(self) -> str:
        """The id of the key."""
        return self.key.key_id


def load_publisher_keys(connection: Connection, namespace_id: int) -> tuple[PublisherKey, ...]:
    """Return all keys of a namespace, including revoked ones, in the order they were added."""
    columns = NAMESPACE_KEYS.c
    rows = connection.execute(
        select(
            columns.public_key, columns.statement, columns.added, columns.revoked, columns.reason
        )
        .where(columns.namespace_id == namespace_id)
        .order_by(columns.added, columns.key_id)
    )
    return tuple(
        PublisherKey(PublicKey.from_pem(pem.encode()), statement, added, revoked, reason)
        for pem, statement, added, revoked, reason in rows
    )


def find_key(keys: Iterable[PublisherKey], key_id: str) -> PublisherKey | None:
    """Return the key with an id; None if there is none."""
    return next((key for key in keys if key.key_id == key_id), None)


def find_revocation_reason(signers: Sequence[str], keys: Iterable[PublisherKey]) -> str | None:
    """Return why all signers of a version were revoked; None while one of them is valid.

    ``signers`` are the ids of the keys of its signed forms, newest last.
    """
    revoked = {key.key_id: key.reason for key in keys if key.revoked is not None}
    return revoked[signers[-1]] if all(signer in revoked for signer in signers) else None


MAX_SEARCH_TEXT = 20_000
_SEPARATORS = re.compile(r"[\W_]+")


def build_search_text(name: PackageName, manifest: Manifest) -> str:
    """Return the searchable words of a package, in lower case, each between single spaces."""
    routing = manifest.routing
    texts = (str(name), manifest.description, routing.task, *manifest.tags, *routing.keywords)
    return fold_words(" ".join(texts))[:MAX_SEARCH_TEXT]


def list_kinds(manifest: Manifest) -> list[AdapterKind]:
    """Return the kinds of the adapters of a package, each once."""
    return list(dict.fromkeys(entry.kind for entry in manifest.adapters))


def fold_words(text: str) -> str:
    """Return the words of a text, folded to lower case, each between single spaces."""
    return f" {_SEPARATORS.sub(' ', text.casefold()).strip()} "


def load_signed_index(connection: Connection, name: PackageName) -> bytes | None:
    """Return the envelope of a package's index document; None if there is no such package."""
    query = (
        select(PACKAGES.c.index_document)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(NAMESPACES.c.name == name.namespace, PACKAGES.c.name == name.name)
    )
    return connection.execute(query).scalar_one_or_none()


def find_package_id(connection: Connection, namespace: NamespaceRow, name: str) -> int | None:
    """Return the row id of a package; None if there is none."""
    query = select(PACKAGES.c.id).where(
        PACKAGES.c.namespace_id == namespace.id, PACKAGES.c.name == name
    )
    return connection.execute(query).scalar_one_or_none()


def insert_package(
    connection: Connection, namespace: NamespaceRow, name: str, *, now: float
) -> int:
    """Insert the row of a package; `rewrite_index` must write its document before the commit."""
    row = {
        "namespace_id": namespace.id,
        "name": name,
        "skeleton": fold_name(name),
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
    """Build and sign the next document of a package, in the transaction that changed its rows.

    Raises:
        BudgetError: when it is too large for clients: too many versions, forms or keys.
    """
    keys = _load_keys(connection, package)
    changed = _build_next_document(connection, package, keys, signer=signer, now=now)
    _update_package(connection, package, {**changed, "updated": now})


def is_renewal_due(connection: Connection, *, signer: IndexSigner, now: float) -> bool:
    """Return whether `renew_indexes` has work to do."""
    return connection.execute(_select_due(signer, now).limit(1)).first() is not None


def renew_indexes(
    connection: Connection, *, signer: IndexSigner, now: float, max_documents: int
) -> int:
    """Sign documents again that are older than half of their interval; return their number.

    At most ``max_documents`` are signed, oldest first. Packages do not change otherwise.
    """
    query = _select_due(signer, now).order_by(PACKAGES.c.signed).limit(max_documents)
    due = connection.execute(query).scalars().all()
    for package in due:
        keys = _load_keys(connection, package)
        changed = _build_next_document(connection, package, keys, signer=signer, now=now)
        _update_package(connection, package, changed)
    return len(due)


def rewrite_namespace_indexes(
    connection: Connection, namespace: NamespaceRow, *, signer: IndexSigner, now: float
) -> None:
    """Rewrite the documents of all packages of a namespace after its keys have changed."""
    keys = load_publisher_keys(connection, namespace.id)
    packages = select(PACKAGES.c.id).where(PACKAGES.c.namespace_id == namespace.id)
    for package in list(connection.execute(packages.order_by(PACKAGES.c.id)).scalars()):
        changed = _build_next_document(connection, package, keys, signer=signer, now=now)
        _update_package(connection, package, {**changed, "updated": now})


def build_document(
    package: PackageName,
    releases: Sequence[Release],
    keys: Iterable[PublisherKey],
    *,
    revision: int,
    now: float,
    interval_days: int,
) -> IndexDocument:
    """Build the document for these releases and keys."""
    known = tuple(keys)
    return IndexDocument(
        package=package,
        revision=revision,
        updated=format_timestamp(now),
        description=select_leading_release(releases).description,
        releases=tuple(sorted(releases, key=lambda release: release.version)),
        keys=tuple(KeyEntry(k.key, k.statement) for k in known if k.revoked is None),
        revoked=tuple(RevokedKey(k.key_id, k.reason) for k in known if k.revoked is not None),
        interval_days=interval_days,
    )


def select_leading_release(releases: Iterable[Release]) -> Release:
    """Return the leading release of a package: the newest final one that is not yanked.

    Without such a release, it is the newest prerelease, else a yanked one.
    """
    return max(releases, key=lambda r: (r.yanked is None, not r.version.prerelease, r.version))


def load_releases(connection: Connection, package: int) -> list[Release]:
    """Return all versions of a package, unordered."""
    forms = _load_forms(connection, package)
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
    return [_build_release(row, forms) for row in connection.execute(query)]


def _select_due(signer: IndexSigner, now: float) -> Select[int]:
    return select(PACKAGES.c.id).where(PACKAGES.c.signed < now - signer.renewal_seconds)


def _load_keys(connection: Connection, package: int) -> Sequence[PublisherKey]:
    query = select(PACKAGES.c.namespace_id).where(PACKAGES.c.id == package)
    return load_publisher_keys(connection, connection.execute(query).scalar_one())


def _update_package(connection: Connection, package: int, values: Mapping[str, object]) -> None:
    connection.execute(update(PACKAGES).where(PACKAGES.c.id == package).values(values))


def _build_next_document(
    connection: Connection,
    package: int,
    keys: Sequence[PublisherKey],
    *,
    signer: IndexSigner,
    now: float,
) -> dict[str, object]:
    """Return the columns of a package that its next document changes, except ``updated``."""
    row = connection.execute(
        select(PACKAGES.c.name, PACKAGES.c.revision, NAMESPACES.c.name)
        .join(NAMESPACES, NAMESPACES.c.id == PACKAGES.c.namespace_id)
        .where(PACKAGES.c.id == package)
    ).one()
    name, revision, namespace = row
    document = build_document(
        PackageName(namespace, name),
        load_releases(connection, package),
        keys,
        revision=revision + 1,
        now=now,
        interval_days=signer.interval_days,
    )
    return {
        "revision": document.revision,
        "index_document": _sign_and_verify(document, signer.key),
        "description": document.description,
        "signed": now,
        **_build_search_columns(connection, package, document),
    }


def _build_search_columns(
    connection: Connection, package: int, document: IndexDocument
) -> dict[str, str | None]:
    """Return the columns that searches use; without a version to choose, it is not found."""
    speaking = select_leading_release(document.releases)
    query = select(RELEASES.c.manifest).where(
        RELEASES.c.package_id == package, RELEASES.c.version == str(speaking.version)
    )
    manifest = decode_json(connection.execute(query).scalar_one(), Manifest)
    latest = str(speaking.version) if speaking.yanked is None else None
    return {
        "latest": latest,
        "search_text": build_search_text(document.package, manifest),
        "base": manifest.base.name,
        "kinds": f" {' '.join(list_kinds(manifest))} ",
    }


def _sign_and_verify(document: IndexDocument, key: PrivateKey) -> bytes:
    """Sign a document and verify it with the client's reader before it is stored."""
    what = f"the index of {document.package}"
    try:
        envelope = sign_index(document, key)
        same = open_index(envelope, key=key.public, package=document.package) == document
    except InvalidPackageError as error:
        hint = "ask the operator of the registry; published versions are not affected"
        raise BudgetError(f"{what} would be too large: {error.message}", hint=hint) from error
    assert same, f"{what} does not read as it was written"
    return envelope


def _load_forms(connection: Connection, package: int) -> Mapping[int, list[SignedForm]]:
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


def _build_release(
    row: Row[int, str, str, bytes, int, float, float | None, str],
    forms: Mapping[int, list[SignedForm]],
) -> Release:
    """Build a release; its manifest was validated when it was published."""
    manifest = decode_json(row.manifest, Manifest)
    return Release(
        version=Version.parse(row.version),
        content_digest=Digest.parse(row.content_digest),
        forms=tuple(forms[row.id]),
        size=row.size,
        published=format_timestamp(row.published),
        yanked=None if row.yanked is None else row.yank_reason,
        kinds=tuple(dict.fromkeys(entry.kind for entry in manifest.adapters)),
        base=manifest.base,
        requires=manifest.composition.requires,
        conflicts=manifest.composition.conflicts,
        description=manifest.description,
    )
