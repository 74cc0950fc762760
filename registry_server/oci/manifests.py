"""Manifests and indexes, tags, and referrers: parsing, and their rows in the database.

A document is parsed as the kind that its media type names. A document that another reader could
parse as another kind, by its ``mediaType`` or because it has both layers and manifests, is refused
(see CVE-2021-41190), so that the registry that checks it and its clients interpret it equally.

Referrers of a manifest are signatures, attestations and other manifests with it as their subject.
An index that a client pushed with the tag ``sha256-<hex>``, for registries without a referrers
list, is an ordinary tag.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, Table, and_, delete, func, select
from sqlalchemy.dialects.sqlite import insert

from expertctl.errors import DigestError, ExpertError
from expertctl.package.layout import INDEX_TYPE, MANIFEST_TYPE
from expertctl.schema.strict_json import JsonValue, load_object
from registry_server.database.tables import (
    MANIFEST_LINKS,
    MANIFESTS,
    REPOSITORIES,
    REPOSITORY_BLOBS,
    TAGS,
)
from registry_server.errors import OciCode, OciError
from registry_server.registry import BlobDigest

DOCKER_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST_TYPE = "application/vnd.docker.distribution.manifest.list.v2+json"
IMAGE_TYPES = frozenset({MANIFEST_TYPE, DOCKER_MANIFEST_TYPE})
INDEX_TYPES = frozenset({INDEX_TYPE, DOCKER_LIST_TYPE})
MAX_DESCRIPTORS = 4096
_MAX_MEDIA_TYPE = 255
_NONDISTRIBUTABLE = frozenset(
    {
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    }
)
"""Media types of layers that are stored elsewhere, which a registry need not have."""

ManifestKind = Literal["image", "index"]


@dataclass(frozen=True, slots=True)
class ParsedManifest:
    """The descriptors of a manifest."""

    kind: ManifestKind
    media_type: str
    artifact_type: str | None
    subject: BlobDigest | None
    annotations: str | None
    """Annotations, as a JSON object of strings."""
    blobs: tuple[BlobDigest, ...]
    """The digests of the config and the layers, which the registry must have."""
    manifests: tuple[BlobDigest, ...]
    """The digests of the manifests of an index."""


def parse_manifest(content: bytes, *, media_type: str | None, max_bytes: int) -> ParsedManifest:
    """Parse a manifest with the media type of the request; None if it had none.

    Raises:
        OciError: when it is malformed, of an unknown kind, or ambiguous.
    """
    try:
        document = load_object(content, what="the manifest", max_bytes=max_bytes)
    except ExpertError as error:
        raise _manifest_invalid(error.message) from error
    stated = _read_media_type(document, media_type)
    kind: ManifestKind = "index" if stated in INDEX_TYPES else "image"
    _check_shape(document, kind)
    return ParsedManifest(
        kind,
        stated,
        _read_artifact_type(document, kind),
        _read_subject(document),
        _read_annotations(document),
        tuple(_read_blobs(document)) if kind == "image" else (),
        tuple(_read_digest(entry) for entry in _read_descriptors(document, "manifests"))
        if kind == "index"
        else (),
    )


def _read_media_type(document: Mapping[str, JsonValue], sent: str | None) -> str:
    own = document.get("mediaType")
    if own is not None and sent is not None and own != sent:
        raise _manifest_invalid(f"mediaType is {str(own)[:100]!r}, but Content-Type {sent[:100]!r}")
    stated = own if own is not None else sent
    if not isinstance(stated, str) or stated not in IMAGE_TYPES | INDEX_TYPES:
        raise _manifest_invalid(
            f"{str(stated)[:100]!r} is not the media type of a manifest or an index"
        )
    return stated


def _check_shape(document: Mapping[str, JsonValue], kind: ManifestKind) -> None:
    if document.get("schemaVersion") != 2:
        raise _manifest_invalid("schemaVersion is not 2")
    theirs = {"config", "layers", "fsLayers"} if kind == "index" else {"manifests", "fsLayers"}
    if wrong := sorted(theirs & document.keys()):
        raise _manifest_invalid(f"an {kind} manifest has no {wrong[0]!r}")
    if kind == "image" and "config" not in document:
        raise _manifest_invalid("there is no config")
    for needed in ("layers",) if kind == "image" else ("manifests",):
        if not isinstance(document.get(needed), list):
            raise _manifest_invalid(f"there is no list of {needed}")


def _read_blobs(document: Mapping[str, JsonValue]) -> list[BlobDigest]:
    layers = [
        (entry.get("mediaType"), _read_digest(entry))
        for entry in _read_descriptors(document, "layers")
    ]
    config = _read_digest(_check_descriptor(document["config"]))
    own = [digest for kind, digest in layers if kind not in _NONDISTRIBUTABLE]
    return list(dict.fromkeys([config, *own]))


def _read_descriptors(
    document: Mapping[str, JsonValue], name: str
) -> list[Mapping[str, JsonValue]]:
    entries = document[name]
    assert isinstance(entries, list)
    if len(entries) > MAX_DESCRIPTORS:
        raise _manifest_invalid(f"{len(entries)} {name}, at most {MAX_DESCRIPTORS} are taken")
    return [_check_descriptor(entry) for entry in entries]


def _check_descriptor(value: JsonValue) -> Mapping[str, JsonValue]:
    if not isinstance(value, dict):
        raise _manifest_invalid("a descriptor is not an object")
    size = value.get("size")
    if type(size) is not int or size < 0 or not isinstance(value.get("mediaType"), str):
        raise _manifest_invalid("a descriptor lacks its mediaType or size")
    return value


def _read_digest(descriptor: Mapping[str, JsonValue]) -> BlobDigest:
    try:
        return BlobDigest.parse(str(descriptor.get("digest")))
    except DigestError as error:
        raise OciError(OciCode.DIGEST_INVALID, error.message) from error


def _read_artifact_type(document: Mapping[str, JsonValue], kind: ManifestKind) -> str | None:
    """Return the artifact type for the referrers list; by default, the type of the config."""
    stated = document.get("artifactType")
    if stated is None and kind == "image":
        stated = _check_descriptor(document["config"]).get("mediaType")
    if stated is None or stated == "":
        return None
    if not isinstance(stated, str) or len(stated) > _MAX_MEDIA_TYPE:
        raise _manifest_invalid("artifactType is not a media type")
    return stated


def _read_subject(document: Mapping[str, JsonValue]) -> BlobDigest | None:
    subject = document.get("subject")
    return None if subject is None else _read_digest(_check_descriptor(subject))


def _read_annotations(document: Mapping[str, JsonValue]) -> str | None:
    annotations = document.get("annotations")
    if annotations is None:
        return None
    if not isinstance(annotations, dict) or not all(
        isinstance(value, str) for value in annotations.values()
    ):
        raise _manifest_invalid("annotations must be an object of strings")
    return json.dumps(annotations)


def _manifest_invalid(fact: str) -> OciError:
    return OciError(OciCode.MANIFEST_INVALID, fact)


_BATCH = 500
"""Maximum digests in one SQL statement."""


@dataclass(frozen=True, slots=True)
class StoredManifest:
    """A stored manifest."""

    digest: str
    media_type: str
    content: bytes


def find_manifest(connection: Connection, repository_id: int, digest: str) -> StoredManifest | None:
    """Return a manifest of a repository by its digest."""
    columns = (MANIFESTS.c.digest, MANIFESTS.c.media_type, MANIFESTS.c.content)
    own = (MANIFESTS.c.repository_id == repository_id, MANIFESTS.c.digest == digest)
    row = connection.execute(select(*columns).where(*own)).first()
    return None if row is None else StoredManifest(row[0], row[1], row[2])


def find_manifest_by_reference(
    connection: Connection, repository: str, reference: BlobDigest | str
) -> StoredManifest | None:
    """Return a manifest by the name of its repository and its digest or a tag."""
    query = (
        select(MANIFESTS.c.digest, MANIFESTS.c.media_type, MANIFESTS.c.content)
        .join(REPOSITORIES, REPOSITORIES.c.id == MANIFESTS.c.repository_id)
        .where(REPOSITORIES.c.name == repository)
    )
    if isinstance(reference, BlobDigest):
        query = query.where(MANIFESTS.c.digest == str(reference))
    else:
        same = (
            TAGS.c.repository_id == MANIFESTS.c.repository_id,
            TAGS.c.digest == MANIFESTS.c.digest,
        )
        query = query.join(TAGS, and_(*same)).where(TAGS.c.name == reference)
    row = connection.execute(query).first()
    return None if row is None else StoredManifest(row[0], row[1], row[2])


def store_manifest(
    connection: Connection,
    *,
    repository_id: int,
    digest: BlobDigest,
    document: ParsedManifest,
    content: bytes,
) -> bool:
    """Store a manifest and its links; return whether it is new.

    In the same transaction, the caller has checked the digest, and that the repository has what the
    manifest references (`require_references`).
    """
    if find_manifest(connection, repository_id, str(digest)) is not None:
        return False
    connection.execute(
        insert(MANIFESTS).values(
            repository_id=repository_id,
            digest=str(digest),
            media_type=document.media_type,
            artifact_type=document.artifact_type,
            subject=None if document.subject is None else str(document.subject),
            annotations=document.annotations,
            size=len(content),
            content=content,
            created=time.time(),
        )
    )
    if rows := _build_links(repository_id, digest, document):
        connection.execute(insert(MANIFEST_LINKS), rows)
    return True


def require_references(
    connection: Connection, repository_id: int, document: ParsedManifest
) -> None:
    """Check that the repository has every blob and manifest that a manifest references.

    Raises:
        OciError: MANIFEST_BLOB_UNKNOWN, for the first missing one.
    """
    blobs = _find_present(connection, REPOSITORY_BLOBS, repository_id, document.blobs)
    for digest in document.blobs:
        if str(digest) not in blobs:
            raise OciError(OciCode.MANIFEST_BLOB_UNKNOWN, f"blob {digest} was not pushed here")
    manifests = _find_present(connection, MANIFESTS, repository_id, document.manifests)
    for digest in document.manifests:
        if str(digest) not in manifests:
            raise OciError(OciCode.MANIFEST_BLOB_UNKNOWN, f"manifest {digest} was not pushed here")


def remove_manifest(connection: Connection, repository_id: int, digest: str) -> bool:
    """Remove a manifest and the tags that point to it; return whether it existed."""
    own = (MANIFESTS.c.repository_id == repository_id, MANIFESTS.c.digest == digest)
    gone = connection.execute(delete(MANIFESTS).where(*own)).rowcount > 0
    connection.execute(
        delete(MANIFEST_LINKS).where(
            MANIFEST_LINKS.c.repository_id == repository_id, MANIFEST_LINKS.c.manifest == digest
        )
    )
    connection.execute(
        delete(TAGS).where(TAGS.c.repository_id == repository_id, TAGS.c.digest == digest)
    )
    return gone


def _build_links(
    repository_id: int, digest: BlobDigest, document: ParsedManifest
) -> list[dict[str, object]]:
    """Return a row for each digest that a manifest references."""
    named = [*((d, "blob") for d in document.blobs), *((d, "manifest") for d in document.manifests)]
    own = {"repository_id": repository_id, "manifest": str(digest)}
    return [{**own, "digest": str(to), "kind": kind} for to, kind in dict(named).items()]


def _find_present(
    connection: Connection, table: Table, repository_id: int, digests: Iterable[BlobDigest]
) -> set[str]:
    """Return which digests a table has for a repository."""
    found: set[str] = set()
    for part in _batch_digests(digests):
        own = (table.c.repository_id == repository_id, table.c.digest.in_(part))
        found.update(connection.execute(select(table.c.digest).where(*own)).scalars())
    return found


def _batch_digests(digests: Iterable[BlobDigest]) -> list[list[str]]:
    texts = [str(digest) for digest in digests]
    return [texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]


def set_tag(connection: Connection, *, repository_id: int, tag: str, digest: str) -> None:
    """Point a new or existing tag to a manifest."""
    values = {"repository_id": repository_id, "name": tag, "digest": digest, "updated": time.time()}
    moved = {"digest": digest, "updated": values["updated"]}
    keys = [TAGS.c.repository_id, TAGS.c.name]
    connection.execute(insert(TAGS).values(values).on_conflict_do_update(keys, set_=moved))


def remove_tag(connection: Connection, repository_id: int, tag: str) -> bool:
    """Remove a tag, but not its manifest; return whether it existed."""
    own = (TAGS.c.repository_id == repository_id, TAGS.c.name == tag)
    return connection.execute(delete(TAGS).where(*own)).rowcount > 0


def list_tags(connection: Connection, repository_id: int, *, after: str, limit: int) -> list[str]:
    """Return up to ``limit`` tags after ``after``, sorted by their bytes."""
    own = (TAGS.c.repository_id == repository_id, TAGS.c.name > after)
    query = select(TAGS.c.name).where(*own).order_by(TAGS.c.name).limit(limit)
    return list(connection.execute(query).scalars())


MAX_REFERRERS = 500
MAX_REFERRER_BYTES = 4 << 20
"""Maximum bytes of the annotations of a page: clients do not read larger indexes."""


@dataclass(frozen=True, slots=True)
class ReferrerPage:
    """A page of referrers, sorted by digest."""

    descriptors: list[dict[str, object]]
    next: str | None
    """The digest after which the next page begins; None on the last page."""


def list_referrers(
    connection: Connection,
    repository_id: int,
    *,
    subject: str,
    artifact_type: str | None,
    after: str,
) -> ReferrerPage:
    """Return the referrers of a digest that come after ``after``, optionally of one type only."""
    table = MANIFESTS.c
    query = (
        select(table.digest, table.media_type, table.size, table.artifact_type, table.annotations)
        .where(table.repository_id == repository_id, table.subject == subject)
        .where(table.digest > after)
        .order_by(table.digest)
        .limit(MAX_REFERRERS + 1)
    )
    if artifact_type is not None:
        query = query.where(func.coalesce(table.artifact_type, "") == artifact_type)
    shown: list[dict[str, object]] = []
    size = 0
    for digest, media_type, length, kind, annotations in connection.execute(query):
        size += len(annotations or "") + 512
        if shown and (size > MAX_REFERRER_BYTES or len(shown) == MAX_REFERRERS):
            return ReferrerPage(shown, str(shown[-1]["digest"]))
        shown.append(_build_descriptor(digest, media_type, length, kind, annotations))
    return ReferrerPage(shown, None)


def _build_descriptor(
    digest: str, media_type: str, size: int, artifact_type: str | None, annotations: str | None
) -> dict[str, object]:
    entry: dict[str, object] = {"mediaType": media_type, "digest": digest, "size": size}
    if artifact_type is not None:
        entry["artifactType"] = artifact_type
    if annotations is not None:
        entry["annotations"] = json.loads(annotations)
    return entry
