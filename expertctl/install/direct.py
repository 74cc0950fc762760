"""Packages of a registry that has no index: any OCI registry, as it is.

Nothing there says which versions are right, so the user must: by naming exact bytes, or an exact
version whose publisher's key the user trusts for that namespace of that registry.
"""

from dataclasses import dataclass

from expertctl.digest import Digest, FileDigest
from expertctl.errors import DigestError, InvalidPackageError, RegistryError, TrustError
from expertctl.install.candidate import Candidate
from expertctl.install.disagreement import Need
from expertctl.install.sources import Sources
from expertctl.package.layout import Layout, content_digest, read_manifest
from expertctl.package.verify import ANOTHER
from expertctl.reference import Reference
from expertctl.registry.address import RegistryAddress
from expertctl.registry.download import ALTERED
from expertctl.registry.oci_client import OciClient
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES, parse_manifest


@dataclass(frozen=True, slots=True)
class Direct:
    """One package that was found without an index."""

    candidate: Candidate
    named: Digest | None
    """Its exact bytes, where the user named them by hand."""


def find_direct(need: Need, sources: Sources) -> Direct | None:
    """Find what a reference names in a registry without an index; None where it has one.

    Raises:
        NotFoundError: when it is not there.
        TrustError: when it is another package than its name says, or may not come from there.
        InvalidPackageError: when it is none.
    """
    wanted = need.wanted
    if wanted.registry is None:
        return None
    address = sources.address(wanted, by_hand=True)
    if sources.has_index(address) or not _may_be(need, address, sources):
        return None
    if not need.by_hand:
        sources.demand_home(wanted, address)
    client = sources.client(address.host)
    tag = wanted.digest or str(wanted.constraint.pinned)
    remote = client.manifest(str(wanted.package), tag)
    what = f"{wanted} from {address.host}"
    candidate = _candidate(
        read_manifest(remote.data, what=what), client, wanted, remote.digest, what
    )
    sources.without_index(address)
    return Direct(candidate, remote.digest if wanted.digest and need.by_hand else None)


def _may_be(need: Need, address: RegistryAddress, sources: Sources) -> bool:
    """Tell whether the user vouches for the bytes, or a trusted key for the version."""
    wanted = need.wanted
    if wanted.digest is not None and need.by_hand:
        return True
    return need.names_one_version and sources.vouches(address, wanted.package)


def _candidate(
    layout: Layout, client: OciClient, wanted: Reference, digest: Digest, what: str
) -> Candidate:
    file = next(file for file in layout.files if file.path == MANIFEST_PATH)  # always there
    manifest = parse_manifest(_small(client, wanted, file, what), what=f"{what} {MANIFEST_PATH}")
    content = content_digest(layout.files)
    if manifest.package != wanted.package or not wanted.allows(manifest.semver, digest, content):
        message = f"asked for {wanted}, but the package is {manifest.ref}"
        raise TrustError(message, hint=ANOTHER)
    return Candidate(
        package=manifest.package,
        version=manifest.semver,
        registry=client.address.host,
        content_digest=content,
        package_digests=(digest,),
        requires=tuple(map(Reference.parse, manifest.composition.requires)),
        conflicts=tuple(map(Reference.parse, manifest.composition.conflicts)),
        base=manifest.base.name,
        size=sum(file.size for file in layout.layers),
    )


def _small(client: OciClient, wanted: Reference, file: FileDigest, what: str) -> bytes:
    """Fetch one small file into memory."""
    if file.size > MAX_MANIFEST_BYTES:
        raise InvalidPackageError(what, [f"{file.path} has more than {MAX_MANIFEST_BYTES} bytes"])
    data = bytearray()
    with client.blob(str(wanted.package), file.digest) as answer:
        if answer.status != 200:
            message = f"{what}: {file.path} was answered with {answer.status}"
            raise RegistryError(message, hint=ALTERED)
        for chunk in answer.chunks:
            data += chunk
            if len(data) > file.size:
                break
    if len(data) != file.size or Digest.of(data) != file.digest:
        raise DigestError(f"{what}: {file.path} does not have its digest", hint=ALTERED)
    return bytes(data)
