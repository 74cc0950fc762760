"""Releases: publishing a pushed package; yanking versions, and the publisher keys of a namespace.

A publish is one transaction: everything becomes visible, or nothing.

::

    manifest ─► parse ─► validate ─► read package ─► validate ─► rows, tag, index, audit
                                                     └────── one write transaction ─────┘

The package is read with the client's reader, without the write lock, so that no writer waits for
it. Blobs never change under their digest, so the bytes that were read are those that are published;
everything else is validated again inside the transaction.

Files that people read must not contain secrets: `expertctl build` and `publish` check that as well,
but any OCI client can push. Files are read completely, in pieces, so large ones take little memory.

A yanked version stays in the index and can be pulled: resolvers skip it, users who locked it can
still install it.

All index documents of a namespace contain its keys. Clients pin the first key at their first
install. Users who pinned an older key trust a later one if the older key endorses it; without such
a statement they must decide themselves. A revoked key stays revoked, and its endorsements are void.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, insert, select, update

from expertctl.digest import Digest, FileDigest
from expertctl.errors import (
    BudgetError,
    DigestError,
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    UsageError,
)
from expertctl.package.directory import find_document_problem
from expertctl.package.layout import (
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    WEIGHT_TYPE,
    choose_media_type,
)
from expertctl.package.read import PackageContents, read_blobs
from expertctl.reference import PackageName
from expertctl.schema.manifest import MANIFEST_PATH
from expertctl.trust.dsse import verify_key_statement
from expertctl.trust.keys import PublicKey
from registry_server.access import namespaces, rights
from registry_server.access.namespaces import NamespaceRow
from registry_server.access.rights import Action, Identity
from registry_server.database.tables import NAMESPACE_KEYS, RELEASES, SIGNED_FORMS
from registry_server.oci import manifests
from registry_server.oci.manifests import parse_manifest
from registry_server.publishing.index import (
    PublisherKey,
    find_key,
    find_package_id,
    insert_package,
    load_publisher_keys,
    rewrite_index,
    rewrite_namespace_indexes,
)
from registry_server.publishing.push import (
    PushAction,
    PushRequest,
    ValidatedPush,
    parse_push_request,
    storage_damaged,
    validate_push,
)
from registry_server.registry import BlobDigest, BlobStorage, Registry, wrap_disk_errors


def require_publishable(storage: BlobStorage, files: Iterable[FileDigest], *, what: str) -> None:
    """Check that no file except weights contains a secret, and that the README is UTF-8.

    Raises:
        InvalidPackageError: with all problems.
        StoreError: when the disk fails.
    """
    with wrap_disk_errors():
        problems = [
            problem
            for file in files
            if choose_media_type(file.path) != WEIGHT_TYPE
            and (problem := _find_problem(file.path, storage.path(file.digest)))
        ]
    if problems:
        hint = "remove it, revoke a secret that was sent, and build the package again"
        raise InvalidPackageError(f"{what}: must not be published", problems, hint=hint)


def _find_problem(name: str, path: Path) -> str | None:
    with path.open("rb") as stream:
        return find_document_problem(stream, name=name)


@dataclass(frozen=True, slots=True)
class PublishResult:
    """A published version; ``created`` is False if the push changed nothing."""

    created: bool
    package_digest: Digest
    content_digest: Digest


def publish(
    registry: Registry, identity: Identity, *, name: PackageName, tag: str, manifest: bytes
) -> PublishResult:
    """Publish a package whose blobs were uploaded.

    Publishing the same package again changes nothing; the same content with another valid signature
    becomes the newest signed form.

    Raises:
        ExpertError: when it may not be published; see `parse_push_request`, `validate_push` and
        `read_blobs`. StoreError: when the database or the storage fails; then nothing was
        published. BudgetError: when the quota or the disk is used up; likewise.
    """
    offer = parse_push_request(name=name, tag=tag, manifest=manifest)
    with registry.database.read() as connection:
        expected = validate_push(connection, registry.storage, identity, offer).action
    contents = _read_contents(registry.storage, offer) if expected is PushAction.RELEASE else None
    with registry.database.write() as connection:
        admission = validate_push(connection, registry.storage, identity, offer)
        if admission.action is not PushAction.NOTHING:
            _commit(connection, registry, identity, offer, admission, contents)
    created = admission.action is not PushAction.NOTHING
    if admission.action is PushAction.RELEASE:
        registry.metrics.publishes.inc()
    return PublishResult(created, offer.package_digest, offer.content_digest)


def _read_contents(storage: BlobStorage, offer: PushRequest) -> PackageContents:
    """Read every byte of the package with the client's reader.

    Raises:
        InvalidPackageError: when it is malformed, another than its name says, or holds what must
            not be published.
        StoreError: when a blob differs from the upload.
    """
    try:
        contents = read_blobs(offer.layout, storage.open, what=offer.ref)
    except (DigestError, NotFoundError) as error:
        raise storage_damaged(error.message) from error
    if contents.manifest.ref != offer.ref:
        problem = f"it was pushed as {offer.ref}, but {MANIFEST_PATH} says {contents.manifest.ref}"
        raise InvalidPackageError(offer.ref, [problem])
    require_publishable(storage, offer.layout.files, what=offer.ref)
    return contents


def _commit(
    connection: Connection,
    registry: Registry,
    identity: Identity,
    offer: PushRequest,
    admission: ValidatedPush,
    contents: PackageContents | None,
) -> None:
    """Write everything that a publish changes, in the caller's transaction."""
    now = time.time()
    package = admission.package
    if package is None:
        package = insert_package(connection, admission.namespace, offer.name.name, now=now)
    if admission.action is PushAction.RELEASE:
        assert contents is not None, "a published version is never removed"
        _insert_release(connection, package, identity, offer, contents, now)
    _set_newest_form(connection, package, offer, admission.signer, now)
    _store_manifest(connection, registry, admission, offer)
    manifests.set_tag(
        connection,
        repository_id=admission.repository,
        tag=offer.version,
        digest=str(offer.package_digest),
    )
    rewrite_index(connection, package, signer=registry.index_signer, now=now)
    action = "publish" if admission.action is PushAction.RELEASE else "publish.signature"
    rights.write_audit_row(connection, identity, action, offer.ref, str(offer.package_digest))


def _insert_release(
    connection: Connection,
    package: int,
    identity: Identity,
    offer: PushRequest,
    contents: PackageContents,
    now: float,
) -> None:
    row = {
        "package_id": package,
        "version": offer.version,
        "content_digest": str(contents.content_digest),
        "manifest": contents.small[MANIFEST_PATH],
        "size": contents.size,
        "published": now,
        "publisher": identity.user_id,
    }
    connection.execute(insert(RELEASES).values(row))


def _set_newest_form(
    connection: Connection, package: int, offer: PushRequest, signer: str, now: float
) -> None:
    """Make a signed form, new or existing, the newest of its release."""
    columns = SIGNED_FORMS.c
    query = select(RELEASES.c.id).where(
        RELEASES.c.package_id == package, RELEASES.c.version == offer.version
    )
    release = connection.execute(query).scalar_one()
    last = select(func.coalesce(func.max(columns.position), 0)).where(columns.release_id == release)
    place = {"position": connection.execute(last).scalar_one() + 1, "published": now}
    own = {"release_id": release, "package_digest": str(offer.package_digest)}
    moved = connection.execute(
        update(SIGNED_FORMS)
        .where(columns.release_id == release, columns.package_digest == own["package_digest"])
        .values(place)
    )
    if not moved.rowcount:
        row = {**own, **place, "signer": signer, "size": len(offer.layout.manifest)}
        connection.execute(insert(SIGNED_FORMS).values(row))


def _store_manifest(
    connection: Connection, registry: Registry, admission: ValidatedPush, offer: PushRequest
) -> None:
    manifest = offer.layout.manifest
    digest = BlobDigest.parse(str(offer.package_digest))
    if manifests.find_manifest(connection, admission.repository, str(digest)) is not None:
        return
    namespaces.require_quota(
        connection, admission.namespace, len(manifest), registry.settings.limits
    )
    document = parse_manifest(manifest, media_type=MANIFEST_TYPE, max_bytes=MAX_MANIFEST_BYTES)
    manifests.store_manifest(
        connection,
        repository_id=admission.repository,
        digest=digest,
        document=document,
        content=manifest,
    )


MAX_REASON = 500


def yank_release(
    registry: Registry, identity: Identity, *, name: PackageName, version: str, reason: str
) -> None:
    """Yank a version; if it is yanked already, replace the reason.

    Raises:
        UsageError: when the reason is empty, too long or not printable.
        NotFoundError: when there is no such version.
    """
    text = check_reason(reason)
    _set_yanked(registry, identity, name=name, version=version, reason=text)


def unyank_release(
    registry: Registry, identity: Identity, *, name: PackageName, version: str
) -> None:
    """Undo a yank, if the version is yanked.

    Raises:
        NotFoundError: when there is no such version.
    """
    _set_yanked(registry, identity, name=name, version=version, reason=None)


def check_reason(text: str) -> str:
    """Check a reason, and return it.

    Raises:
        UsageError: when it is empty, too long or not printable.
    """
    reason = text.strip()
    if not (0 < len(reason) <= MAX_REASON and reason.isprintable()):
        hint = f"one line of 1 to {MAX_REASON} printable characters"
        raise UsageError("the reason is empty, too long or not printable", hint=hint)
    return reason


def _set_yanked(
    registry: Registry, identity: Identity, *, name: PackageName, version: str, reason: str | None
) -> None:
    now = time.time()
    with registry.database.write() as connection:
        package, release, before = _find_release(connection, identity, name, version)
        if before == reason:
            return
        yanked = None if reason is None else now
        connection.execute(
            update(RELEASES)
            .where(RELEASES.c.id == release)
            .values(yanked=yanked, yank_reason=reason)
        )
        rewrite_index(connection, package, signer=registry.index_signer, now=now)
        action = "unyank" if reason is None else "yank"
        rights.write_audit_row(connection, identity, action, f"{name}@{version}", reason or "")


def _find_release(
    connection: Connection, identity: Identity, name: PackageName, version: str
) -> tuple[int, int, str | None]:
    """Return the ids of the package and the release, and the reason of its yank, if any."""
    namespace = rights.authorise(connection, identity, Action.YANK, name.namespace, name.name)
    package = find_package_id(connection, namespace, name.name)
    query = select(RELEASES.c.id, RELEASES.c.yanked, RELEASES.c.yank_reason).where(
        RELEASES.c.package_id == package, RELEASES.c.version == version
    )
    row = connection.execute(query).one_or_none()
    if package is None or row is None:
        raise NotFoundError(f"there is no {name}@{version[:80]} to yank")
    return package, row.id, None if row.yanked is None else row.yank_reason or ""


MAX_NAMESPACE_KEYS = 200
"""Maximum keys of a namespace, including revoked ones: each index document contains them all."""


@dataclass(frozen=True, slots=True)
class KeyRegistration:
    """A key of the namespace, whether it is new or existed before."""

    key_id: str
    vouched_by: str | None
    """The id of the older key that endorses it."""
    warnings: tuple[str, ...]


def add_key(
    registry: Registry,
    identity: Identity,
    *,
    namespace: str,
    public_key: bytes,
    statement: bytes | None,
) -> KeyRegistration:
    """Allow a key to sign for a namespace; an existing key may get its statement later.

    Raises:
        InvalidPackageError: when it is not a public key of a supported kind.
        RevokedError: when it was revoked here, which is permanent.
        TrustError: when no key of the namespace signed the statement.
        BudgetError: when the namespace has too many keys.
    """
    key, now = PublicKey.from_pem(public_key), time.time()
    with registry.database.write() as connection:
        row = rights.authorise(connection, identity, Action.MANAGE, namespace)
        known = load_publisher_keys(connection, row.id)
        existing = find_key(known, key.key_id)
        _check_usable(existing, key.key_id, row, known)
        signer = _find_voucher(statement, row, key, known)
        if existing is None or statement not in {None, existing.statement}:
            _store_key(connection, row, key, statement, existing, now)
            rewrite_namespace_indexes(connection, row, signer=registry.index_signer, now=now)
            rights.write_audit_row(connection, identity, "keys.add", namespace, key.key_id)
        signer = signer or _find_earlier_voucher(existing, row, known)
    return KeyRegistration(key.key_id, signer, _build_warnings(signer, row, key.key_id, known))


def revoke_key(
    registry: Registry, identity: Identity, *, namespace: str, key_id: str, reason: str
) -> None:
    """Revoke a key permanently; its packages stay listed, but clients refuse them.

    Raises:
        UsageError: when the reason is empty, too long or not printable.
        NotFoundError: when the namespace has no such key.
    """
    text, now = check_reason(reason), time.time()
    with registry.database.write() as connection:
        row = rights.authorise(connection, identity, Action.MANAGE, namespace)
        existing = find_key(load_publisher_keys(connection, row.id), key_id)
        if existing is None:
            raise NotFoundError(f"{namespace} has no key {key_id[:80]}")
        if existing.revoked is not None:
            return
        connection.execute(
            update(NAMESPACE_KEYS)
            .where(NAMESPACE_KEYS.c.namespace_id == row.id, NAMESPACE_KEYS.c.key_id == key_id)
            .values(revoked=now, reason=text)
        )
        rewrite_namespace_indexes(connection, row, signer=registry.index_signer, now=now)
        rights.write_audit_row(connection, identity, "keys.revoke", namespace, f"{key_id} {text}")


def _check_usable(
    existing: PublisherKey | None,
    key_id: str,
    namespace: NamespaceRow,
    registered: Sequence[PublisherKey],
) -> None:
    if existing is not None and existing.revoked is not None:
        raise RevokedError(
            f"key {key_id} was revoked in {namespace.name}: {existing.reason}",
            hint="make another with `expertctl keys new NAME`",
        )
    if existing is None and len(registered) >= MAX_NAMESPACE_KEYS:
        raise BudgetError(
            f"{namespace.name} has {len(registered)} keys, {MAX_NAMESPACE_KEYS} are allowed"
        )


def _find_voucher(
    statement: bytes | None,
    namespace: NamespaceRow,
    key: PublicKey,
    registered: Sequence[PublisherKey],
) -> str | None:
    """Return the id of the key that endorses ``key``."""
    if statement is None:
        return None
    older = [k.key for k in registered if k.revoked is None and k.key_id != key.key_id]
    return verify_key_statement(statement, namespace=namespace.name, new=key, keys=older)


def _find_earlier_voucher(
    existing: PublisherKey | None, namespace: NamespaceRow, registered: Sequence[PublisherKey]
) -> str | None:
    """Return the id of the key that endorses it already, unless it was revoked since."""
    if existing is None or existing.statement is None:
        return None
    keys = [key.key for key in registered]
    signer = verify_key_statement(
        existing.statement, namespace=namespace.name, new=existing.key, keys=keys
    )
    return signer if any(k.key_id == signer and k.revoked is None for k in registered) else None


def _store_key(
    connection: Connection,
    namespace: NamespaceRow,
    key: PublicKey,
    statement: bytes | None,
    existing: PublisherKey | None,
    now: float,
) -> None:
    columns = NAMESPACE_KEYS.c
    if existing is not None:
        where = (columns.namespace_id == namespace.id, columns.key_id == key.key_id)
        connection.execute(update(NAMESPACE_KEYS).where(*where).values(statement=statement))
        return
    row = {
        "namespace_id": namespace.id,
        "key_id": key.key_id,
        "public_key": key.pem().decode("ascii"),
        "statement": statement,
        "added": now,
    }
    connection.execute(insert(NAMESPACE_KEYS).values(row))


def _build_warnings(
    signer: str | None, namespace: NamespaceRow, key_id: str, registered: Sequence[PublisherKey]
) -> tuple[str, ...]:
    others = [key for key in registered if key.key_id != key_id]
    if signer is not None or not others:
        return ()
    return (
        f"no older key of {namespace.name} vouches for {key_id}: users who pinned one must run "
        f"`expertctl trust add KEY.pem --namespace {namespace.name}`",
    )
