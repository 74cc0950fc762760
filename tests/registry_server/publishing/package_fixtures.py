"""Packages in memory, and ways to hand them to a registry without a network."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expertctl.digest import Digest, FileDigest
from expertctl.package.layout import (
    CONFIG,
    PackageLayout,
    build_layout,
    compute_content_digest,
    parse_oci_manifest,
)
from expertctl.package.read import PackageContents, read_blobs
from expertctl.package.write import unpack_package
from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument, open_index
from expertctl.trust.bundle import sign_files
from expertctl.trust.keys import PrivateKey
from registry_server.access import namespaces, rights
from registry_server.access.rights import Identity
from registry_server.api.routes import load_index
from registry_server.oci import blobs, manifests
from registry_server.publishing.releases import PublishResult, publish
from registry_server.registry import BlobDigest, Registry
from tests.factories import make_package, write_base


@dataclass(frozen=True)
class InMemoryPackage:
    """A package with all its blobs, the configuration too."""

    name: PackageName
    version: str
    layout: PackageLayout
    blobs: Mapping[Digest, bytes]

    @property
    def package_digest(self) -> Digest:
        return self.layout.package_digest

    @property
    def content_digest(self) -> Digest:
        return compute_content_digest(self.layout.files)

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class PackageTemplate:
    """The files of one small expert, from which others differ in what their manifest says."""

    files: Mapping[str, bytes]

    def make_package(
        self,
        name: str = "acme/sql",
        version: str = "1.0.0",
        *,
        key: PrivateKey | None,
        stated: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        **changes: Any,
    ) -> InMemoryPackage:
        """Make a package; ``stated`` overrides what its manifest says of itself."""
        document = json.loads(self.files["expert.json"])
        document |= {"name": name, "version": version, **changes, **(stated or {})}
        contents = {**self.files, **(files or {}), "expert.json": json.dumps(document).encode()}
        described = [FileDigest(p, len(b), Digest.compute(b)) for p, b in sorted(contents.items())]
        blobs = {Digest.compute(data): data for data in (CONFIG, *contents.values())}
        signature = None
        if key is not None:
            bundle = sign_files(described, name=f"{name}@{version}", key=key)
            signature = FileDigest("model.sig", len(bundle), Digest.compute(bundle))
            blobs[signature.digest] = bundle
        layout = build_layout(described, signature)
        return InMemoryPackage(PackageName.parse(name), version, layout, blobs)


def sign_with_other_key(parcel: InMemoryPackage, key: PrivateKey) -> InMemoryPackage:
    """The same content with the signature of another key."""
    bundle = sign_files(parcel.layout.files, name=parcel.ref, key=key)
    signature = FileDigest("model.sig", len(bundle), Digest.compute(bundle))
    layout = build_layout(parcel.layout.files, signature)
    return replace(parcel, layout=layout, blobs={**parcel.blobs, signature.digest: bundle})


def build_template(folder: Path) -> PackageTemplate:
    """Build one real package and take its files."""
    base = write_base(folder / "base", layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8)
    packed = make_package(folder, base_dir=base, lora={"rank": 1, "targets": ("q_proj",)})
    contents = unpack_package(packed, folder / "files")
    return PackageTemplate(
        {f.path: (folder / "files" / f.path).read_bytes() for f in contents.files}
    )


def upload_blobs(registry: Registry, parcel: InMemoryPackage) -> None:
    """Put the blobs of a package into its repository, as finished uploads do."""
    with registry.database.write() as connection:
        namespace = namespaces.get_namespace(connection, parcel.name.namespace)
        repository = rights.get_or_create_repository(
            connection, name=str(parcel.name), namespace_id=namespace.id
        )
        for digest, data in parcel.blobs.items():
            temporary = registry.settings.data / digest.hex
            temporary.write_bytes(data)
            registry.storage.adopt(temporary, digest)
            blobs.insert_blob(connection, BlobDigest.parse(str(digest)), len(data))
            blobs.link_blob(connection, repository.id, BlobDigest.parse(str(digest)))


def publish_uploaded(
    registry: Registry, identity: Identity, parcel: InMemoryPackage
) -> PublishResult:
    """Publish a package whose blobs are there."""
    return publish(
        registry,
        identity,
        name=parcel.name,
        tag=parcel.version,
        manifest=parcel.layout.manifest,
    )


def upload_and_publish(
    registry: Registry, identity: Identity, parcel: InMemoryPackage
) -> PublishResult:
    """Upload a package and publish it."""
    upload_blobs(registry, parcel)
    return publish_uploaded(registry, identity, parcel)


def read_published_index(
    registry: Registry, identity: Identity, name: str = "acme/sql"
) -> IndexDocument:
    """Read the index document of a package with the client's own code."""
    package = PackageName.parse(name)
    envelope = load_index(registry, identity, package)
    return open_index(envelope, key=registry.index_key.public, package=package)


def pull_package(registry: Registry, name: PackageName, digest: Digest) -> PackageContents:
    """Pull a package by its digest and read it whole, as a client does."""
    with registry.database.read() as connection:
        repository = rights.find_repository(connection, str(name))
        assert repository is not None
        stored = manifests.find_manifest(connection, repository.id, str(digest))
    assert stored is not None
    assert Digest.compute(stored.content) == digest
    with registry.storage.open(Digest.compute(CONFIG)) as stream:
        assert stream.read() == CONFIG
    layout = parse_oci_manifest(stored.content, what=str(name))
    return read_blobs(layout, registry.storage.open, what=str(name))
