"""The publish commit: one transaction, before which nothing is there and after which everything is.

::

    manifest ─► Offer ─► admit ─► read_blobs ─► admit ─► rows, manifest, tag, index document, audit
                offer    admission  the client's   └──────────── one write transaction ───────────┘
                                    own reader

The bytes of the package are read without the write lock, so that no writer waits for them. Blobs
never change under their digest, so what was read is still what lies there; all else that may have
changed meanwhile is checked again inside the transaction.
"""

import time
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, update

from expertctl.digest import Digest
from expertctl.errors import DigestError, InvalidPackageError, NotFoundError
from expertctl.package.layout import MANIFEST_TYPE, MAX_MANIFEST_BYTES
from expertctl.package.read import PackageContents, read_blobs
from expertctl.reference import PackageName
from expertctl.schema.manifest import MANIFEST_PATH
from registry_server.access import audit, quota
from registry_server.access.identity import Identity
from registry_server.database.tables import RELEASES, SIGNED_FORMS
from registry_server.oci import manifests, tags
from registry_server.oci.manifest_document import read_document
from registry_server.publishing.admission import Admission, admit, damaged
from registry_server.publishing.decision import Step
from registry_server.publishing.documents import demand_publishable
from registry_server.publishing.index import insert_package, rewrite_index
from registry_server.publishing.offer import Offer, read_offer
from registry_server.registry import Registry
from registry_server.storage.blob_digest import BlobDigest
from registry_server.storage.blobs import BlobStorage


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is there; ``created`` tells whether this push changed anything."""

    created: bool
    package_digest: Digest
    content_digest: Digest


def publish(
    registry: Registry, identity: Identity, *, name: PackageName, tag: str, manifest: bytes
) -> Published:
    """Publish a package whose blobs were uploaded, or do nothing at all.

    The same package again changes nothing; the same content under another valid signature becomes
    the form that counts.

    Raises:
        ExpertError: when it may not be published; see `read_offer`, `admit` and `read_blobs`.
        StoreError: when the database or the storage fails; then nothing was published.
        BudgetError: when the quota or the disk is used up; likewise.
    """
    offer = read_offer(name=name, tag=tag, manifest=manifest)
    with registry.database.read() as connection:
        expected = admit(connection, registry.storage, identity, offer).step
    contents = _contents(registry.storage, offer) if expected is Step.RELEASE else None
    with registry.database.write() as connection:
        admission = admit(connection, registry.storage, identity, offer)
        if admission.step is not Step.NOTHING:
            _commit(connection, registry, identity, offer, admission, contents)
    created = admission.step is not Step.NOTHING
    if admission.step is Step.RELEASE:
        registry.metrics.publishes.inc()
    return Published(created, offer.package_digest, offer.content_digest)


def _contents(storage: BlobStorage, offer: Offer) -> PackageContents:
    """Read the package as a client will, every byte of it.

    Raises:
        InvalidPackageError: when it is malformed, another than its name says, or holds what must
            not be published.
        StoreError: when a blob is no longer what was uploaded.
    """
    try:
        contents = read_blobs(offer.layout, storage.open, what=offer.ref)
    except (DigestError, NotFoundError) as error:
        raise damaged(error.message) from error
    if contents.manifest.ref != offer.ref:
        problem = f"it was pushed as {offer.ref}, but {MANIFEST_PATH} says {contents.manifest.ref}"
        raise InvalidPackageError(offer.ref, [problem])
    demand_publishable(storage, offer.layout.files, what=offer.ref)
    return contents


def _commit(
    connection: Connection,
    registry: Registry,
    identity: Identity,
    offer: Offer,
    admission: Admission,
    contents: PackageContents | None,
) -> None:
    """Write all that a publish is, in the caller's transaction."""
    now = time.time()
    package = admission.package
    if package is None:
        package = insert_package(connection, admission.namespace, offer.name.name, now=now)
    if admission.step is Step.RELEASE:
        assert contents is not None, "a version that was there is never removed"
        _insert_release(connection, package, identity, offer, contents, now)
    _put_form_last(connection, package, offer, admission.signer, now)
    _store_manifest(connection, registry, admission, offer)
    tags.point(
        connection,
        repository_id=admission.repository,
        tag=offer.version,
        digest=str(offer.package_digest),
    )
    rewrite_index(connection, package, signer=registry.index_signer, now=now)
    action = "publish" if admission.step is Step.RELEASE else "publish.signature"
    audit.record(connection, identity, action, offer.ref, str(offer.package_digest))


def _insert_release(
    connection: Connection,
    package: int,
    identity: Identity,
    offer: Offer,
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


def _put_form_last(
    connection: Connection, package: int, offer: Offer, signer: str, now: float
) -> None:
    """Make the signed form the newest of its release, whether it is new or was there."""
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
    connection: Connection, registry: Registry, admission: Admission, offer: Offer
) -> None:
    manifest = offer.layout.manifest
    digest = BlobDigest.parse(str(offer.package_digest))
    if manifests.find(connection, admission.repository, str(digest)) is not None:
        return
    quota.demand_room(connection, admission.namespace, len(manifest), registry.settings.limits)
    document = read_document(manifest, media_type=MANIFEST_TYPE, max_bytes=MAX_MANIFEST_BYTES)
    manifests.store(
        connection,
        repository_id=admission.repository,
        digest=digest,
        document=document,
        content=manifest,
    )
