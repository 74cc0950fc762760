"""The grammar of OCI names, tags and digests: what is not exactly one of these goes no further."""

import re
from dataclasses import dataclass

from expertctl.errors import DigestError, UsageError
from expertctl.reference import PackageName
from registry_server.oci.errors import OciCode, OciError
from registry_server.storage.blob_digest import BlobDigest

MAX_NAME = 255
MAX_TAG = 128
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class RepositoryName:
    """``namespace/rest``; only `parse` makes one."""

    namespace: str
    rest: str

    @classmethod
    def parse(cls, text: str) -> "RepositoryName":
        """Read the name of a repository.

        Raises:
            OciError: NAME_INVALID.
        """
        namespace, _, rest = text.partition("/")
        if len(text) > MAX_NAME or not _NAME.fullmatch(text) or not rest:
            hint = "repositories are called NAMESPACE/NAME"
            raise OciError(OciCode.NAME_INVALID, f"{text[:80]!r} is not a repository", hint=hint)
        return cls(namespace, rest)

    def package(self) -> PackageName:
        """Return the name as that of a package, the only kind that `expert` namespaces have.

        Raises:
            OciError: NAME_INVALID.
        """
        try:
            return PackageName.parse(str(self))
        except UsageError as error:
            raise OciError(OciCode.NAME_INVALID, error.message, hint=error.hint) from error

    def __str__(self) -> str:
        """Return ``namespace/rest``."""
        return f"{self.namespace}/{self.rest}"


def read_digest(text: str) -> BlobDigest:
    """Read a digest.

    Raises:
        OciError: DIGEST_INVALID.
    """
    try:
        return BlobDigest.parse(text)
    except DigestError as error:
        raise OciError(OciCode.DIGEST_INVALID, error.message) from error


def read_tag(text: str) -> str:
    """Read a tag.

    Raises:
        OciError: TAG_INVALID.
    """
    if not _TAG.fullmatch(text):
        raise OciError(OciCode.TAG_INVALID, f"{text[:80]!r} is not a tag")
    return text


def read_reference(text: str) -> BlobDigest | str:
    """Read what names a manifest: a digest, which alone may hold a colon, or a tag.

    Raises:
        OciError: DIGEST_INVALID or TAG_INVALID.
    """
    return read_digest(text) if ":" in text else read_tag(text)
