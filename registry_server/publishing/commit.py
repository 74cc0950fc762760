"""Publishes a pushed package in one transaction: everything becomes visible, or nothing.

::

    manifest ─► parse ─► validate ─► read package ─► validate ─► rows, tag, index, audit
                                                     └────── one write transaction ─────┘

The package is read with the client's reader, without the write lock, so that no writer waits for
it. Blobs never change under their digest, so the bytes that were read are those that are published;
everything else is validated again inside the transaction.

Files that people read must not contain secrets: `expertctl build` and `publish` check that as well,
but any OCI client can push. Files are read completely, in pieces, so large ones take little memory.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, func, insert, select, update

from expertctl.errors import DigestError, InvalidPackageError, NotFoundError
from expertctl.package.directory import find_document_problem
from expertctl.package.layout import (
    MANIFEST_TYPE,
    MAX_MANIFEST_BYTES,
    WEIGHT_TYPE,
    choose_media_type,
)
from expertctl.package.read import PackageContents, read_blobs
from expertctl.reference import Digest, FileDigest, PackageName
from expertctl.schema.manifest import MANIFEST_PATH
from registry_server.access import namespaces, rights
from registry_server.access.rights import Identity
from registry_server.blob_storage import BlobDigest, BlobStorage, wrap_disk_errors
from registry_server.database.tables import RELEASES, SIGNED_FORMS
from registry_server.oci import manifests
from registry_server.oci.manifests import parse_manifest
from registry_server.publishing.index import insert_package, rewrite_index
from registry_server.publishing.push import (
    PushAction,
    PushRequest,
    ValidatedPush,
    parse_push_request,
    storage_damaged,
    validate_push,
)
from registry_server.registry import Registry


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
