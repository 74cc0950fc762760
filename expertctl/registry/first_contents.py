"""The first known content of versions that a registry changed or took away later, as bytes.

An index document says only what a version contains now. A version that vanished, or that got
another content, would be forgotten with the document before, and could come back as something else.
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from expertctl.digest import Digest
from expertctl.errors import ExpertError, InvalidPackageError
from expertctl.package.version_content import VersionContent
from expertctl.reference import Version
from expertctl.registry.index_document import IndexDocument, Release
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import load_object

MAX_BYTES = 16 << 20
_SCHEMA = 1

FirstContents = Mapping[Version, VersionContent]
NONE: FirstContents = MappingProxyType({})


class _StoredContent(msgspec.Struct, forbid_unknown_fields=True):
    content_digest: str
    signers: tuple[str, ...]


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    versions: dict[str, _StoredContent]


def stated_content(release: Release, *, source: str) -> VersionContent:
    """Return what an index document says a version contains; the newest signer comes first."""
    signers = dict.fromkeys(form.signer for form in reversed(release.forms))
    return VersionContent(source, release.content_digest, tuple(signers))


def extended(
    first: FirstContents, before: IndexDocument, after: IndexDocument, *, host: str
) -> FirstContents:
    """Return the first contents after a document replaced another one."""
    now = {release.version: release.content_digest for release in after.releases}
    source = f"{host}, before,"
    lost = {
        release.version: stated_content(release, source=source)
        for release in before.releases
        if release.version not in first and now.get(release.version) != release.content_digest
    }
    return {**first, **lost} if lost else first


def encode_contents(contents: FirstContents) -> bytes:
    """Return the bytes of the file."""
    versions = {
        str(version): _StoredContent(str(content.digest), content.signers)
        for version, content in contents.items()
    }
    return msgspec.json.encode(_Stored(_SCHEMA, versions), order="sorted")


def parse_contents(data: bytes, *, host: str, what: str) -> FirstContents:
    """Read the bytes of the file.

    Raises:
        InvalidPackageError: when it is not exactly such a document.
    """
    document = load_object(data, what=what, max_bytes=MAX_BYTES)
    try:
        stored = shape(document, _Stored)
        return {
            Version.parse(text): VersionContent(
                f"{host}, before,", Digest.parse(entry.content_digest), entry.signers
            )
            for text, entry in stored.versions.items()
        }
    except (msgspec.ValidationError, ExpertError) as error:
        raise InvalidPackageError(what, [str(error)]) from error
