"""Mounting: a blob of one repository read through another one too, without sending it again.

Whoever may not read the source learns nothing: the answer is the same whether the blob is there.
"""

from sqlalchemy import Connection

from registry_server.access import quota
from registry_server.access.identity import Action, Identity
from registry_server.oci import blobs, repositories
from registry_server.oci.access import authorise, may_read
from registry_server.oci.errors import OciError
from registry_server.oci.names import RepositoryName
from registry_server.registry import Registry
from registry_server.storage.blob_digest import BlobDigest

MAX_SOURCES = 64
"""How many repositories are looked at when none is named."""


def mount(
    registry: Registry,
    identity: Identity,
    name: RepositoryName,
    digest: BlobDigest,
    source: str | None,
) -> bool:
    """Link a blob of ``source``, or of any repository that one may read; tell whether it was there.

    Raises:
        ExpertError: when one may not push to ``name``, or its namespace has no room.
    """
    with registry.database.write() as connection:
        target = authorise(connection, identity, Action.PUSH, name)
        size = _readable_size(connection, identity, digest, source)
        if size is None:
            return False
        namespace = target.namespace
        if not blobs.used_in_namespace(connection, namespace.id, digest):
            quota.demand_room(connection, namespace, size, registry.settings.limits)
        repository = repositories.find_or_create(
            connection, name=str(name), namespace_id=namespace.id
        )
        blobs.link(connection, repository.id, digest)
        return True


def _readable_size(
    connection: Connection, identity: Identity, digest: BlobDigest, source: str | None
) -> int | None:
    names = (
        blobs.repositories_with(connection, digest, limit=MAX_SOURCES)
        if source is None
        else [source]
    )
    for text in names:
        name = _name(text)
        if name and may_read(connection, identity, name):
            return blobs.linked_size(connection, str(name), digest)
    return None


def _name(text: str) -> RepositoryName | None:
    try:
        return RepositoryName.parse(text)
    except OciError:
        return None
