"""What a manifest or an index says, as far as a registry has to know.

A document is read as the kind that its media type names. One that would be another kind to another
reader, by its ``mediaType`` or because it has both layers and manifests, is refused (as after
CVE-2021-41190): the registry that checks it and the client that uses it must see the same thing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from expertctl.errors import DigestError, ExpertError
from expertctl.package.layout import INDEX_TYPE, MANIFEST_TYPE
from expertctl.schema.strict_json import JsonValue, load_object
from registry_server.oci.errors import OciCode, OciError
from registry_server.storage.blob_digest import BlobDigest

DOCKER_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST_TYPE = "application/vnd.docker.distribution.manifest.list.v2+json"
IMAGE_TYPES = frozenset({MANIFEST_TYPE, DOCKER_MANIFEST_TYPE})
INDEX_TYPES = frozenset({INDEX_TYPE, DOCKER_LIST_TYPE})
MAX_ENTRIES = 4096
_MAX_TYPE = 255
_FOREIGN = frozenset(
    {
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
    }
)
"""Layers that lie elsewhere: a registry need not have them."""

Kind = Literal["image", "index"]


@dataclass(frozen=True, slots=True)
class ManifestDocument:
    """What a manifest names."""

    kind: Kind
    media_type: str
    artifact_type: str | None
    subject: BlobDigest | None
    annotations: str | None
    """A JSON object of texts."""
    blobs: tuple[BlobDigest, ...]
    """The config and layers that the registry must have."""
    manifests: tuple[BlobDigest, ...]
    """The manifests of an index."""


def read_document(content: bytes, *, media_type: str | None, max_bytes: int) -> ManifestDocument:
    """Read a manifest that was sent under a media type, None when the request named none.

    Raises:
        OciError: when it is malformed, of an unknown kind, or ambiguous.
    """
    try:
        document = load_object(content, what="the manifest", max_bytes=max_bytes)
    except ExpertError as error:
        raise _invalid(error.message) from error
    stated = _media_type(document, media_type)
    kind: Kind = "index" if stated in INDEX_TYPES else "image"
    _check_shape(document, kind)
    return ManifestDocument(
        kind,
        stated,
        _artifact_type(document, kind),
        _subject(document),
        _annotations(document),
        tuple(_blobs(document)) if kind == "image" else (),
        tuple(_digest(entry) for entry in _entries(document, "manifests"))
        if kind == "index"
        else (),
    )


def _media_type(document: Mapping[str, JsonValue], sent: str | None) -> str:
    own = document.get("mediaType")
    if own is not None and sent is not None and own != sent:
        raise _invalid(f"mediaType is {str(own)[:100]!r}, but Content-Type {sent[:100]!r}")
    stated = own if own is not None else sent
    if not isinstance(stated, str) or stated not in IMAGE_TYPES | INDEX_TYPES:
        raise _invalid(f"{str(stated)[:100]!r} is not the media type of a manifest or an index")
    return stated


def _check_shape(document: Mapping[str, JsonValue], kind: Kind) -> None:
    if document.get("schemaVersion") != 2:
        raise _invalid("schemaVersion is not 2")
    theirs = {"config", "layers", "fsLayers"} if kind == "index" else {"manifests", "fsLayers"}
    if wrong := sorted(theirs & document.keys()):
        raise _invalid(f"an {kind} manifest has no {wrong[0]!r}")
    if kind == "image" and "config" not in document:
        raise _invalid("there is no config")
    for needed in ("layers",) if kind == "image" else ("manifests",):
        if not isinstance(document.get(needed), list):
            raise _invalid(f"there is no list of {needed}")


def _blobs(document: Mapping[str, JsonValue]) -> list[BlobDigest]:
    layers = [(entry.get("mediaType"), _digest(entry)) for entry in _entries(document, "layers")]
    config = _digest(_descriptor(document["config"]))
    own = [digest for kind, digest in layers if kind not in _FOREIGN]
    return list(dict.fromkeys([config, *own]))


def _entries(document: Mapping[str, JsonValue], name: str) -> list[Mapping[str, JsonValue]]:
    entries = document[name]
    assert isinstance(entries, list)
    if len(entries) > MAX_ENTRIES:
        raise _invalid(f"{len(entries)} {name}, at most {MAX_ENTRIES} are taken")
    return [_descriptor(entry) for entry in entries]


def _descriptor(value: JsonValue) -> Mapping[str, JsonValue]:
    if not isinstance(value, dict):
        raise _invalid("a descriptor is not an object")
    size = value.get("size")
    if type(size) is not int or size < 0 or not isinstance(value.get("mediaType"), str):
        raise _invalid("a descriptor lacks its mediaType or size")
    return value


def _digest(descriptor: Mapping[str, JsonValue]) -> BlobDigest:
    try:
        return BlobDigest.parse(str(descriptor.get("digest")))
    except DigestError as error:
        raise OciError(OciCode.DIGEST_INVALID, error.message) from error


def _artifact_type(document: Mapping[str, JsonValue], kind: Kind) -> str | None:
    """Return what a referrers list says: of an image without one, the type of its config."""
    stated = document.get("artifactType")
    if stated is None and kind == "image":
        stated = _descriptor(document["config"]).get("mediaType")
    if stated is None or stated == "":
        return None
    if not isinstance(stated, str) or len(stated) > _MAX_TYPE:
        raise _invalid("artifactType is not a media type")
    return stated


def _subject(document: Mapping[str, JsonValue]) -> BlobDigest | None:
    subject = document.get("subject")
    return None if subject is None else _digest(_descriptor(subject))


def _annotations(document: Mapping[str, JsonValue]) -> str | None:
    annotations = document.get("annotations")
    if annotations is None:
        return None
    if not isinstance(annotations, dict) or not all(
        isinstance(value, str) for value in annotations.values()
    ):
        raise _invalid("annotations are not texts by name")
    return json.dumps(annotations)


def _invalid(fact: str) -> OciError:
    return OciError(OciCode.MANIFEST_INVALID, fact)
