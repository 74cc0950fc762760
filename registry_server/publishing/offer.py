"""What a push offers, read from its name, its tag and its manifest alone."""

from dataclasses import dataclass

from expertctl.digest import Digest, FileDigest
from expertctl.errors import UnsignedError, UsageError
from expertctl.package.layout import CONFIG, Layout, content_digest, read_manifest
from expertctl.reference import PackageName
from expertctl.trust.bundle import MAX_BUNDLE
from registry_server.publishing.decision import exact_version

_CONFIG = (Digest.of(CONFIG), len(CONFIG))


@dataclass(frozen=True, slots=True)
class Offer:
    """A well-formed manifest under a well-formed name; no byte of its blobs was looked at."""

    name: PackageName
    version: str
    layout: Layout
    signature: FileDigest

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return f"{self.name}@{self.version}"

    @property
    def package_digest(self) -> Digest:
        """The digest of the OCI manifest."""
        return self.layout.package_digest

    @property
    def content_digest(self) -> Digest:
        """The digest of all files but the signature, if they are what the manifest says."""
        return content_digest(self.layout.files)

    @property
    def blobs(self) -> dict[str, int]:
        """The size of every blob that must be there, by digest; the configuration is one."""
        return {str(digest): size for digest, size in (_CONFIG, *self.layout.blobs)}


def read_offer(*, name: PackageName, tag: str, manifest: bytes) -> Offer:
    """Read what is offered.

    Raises:
        UsageError: when the tag is not a version in its one spelling.
        InvalidPackageError: when the manifest is not exactly that of a package.
        UnsignedError: when there is no signature.
    """
    version = str(exact_version(tag))
    layout = read_manifest(manifest, what=f"{name}@{version}")
    if layout.signature is None:
        raise UnsignedError(
            f"{name}@{version} is not signed, and a registry takes signed packages only",
            hint="sign it with `expertctl sign FILE --key NAME`, then publish it again",
        )
    if layout.signature.size > MAX_BUNDLE:
        raise UsageError(f"{name}@{version}: its signature file is too large")
    return Offer(PackageName(name.namespace, name.name), version, layout, layout.signature)
