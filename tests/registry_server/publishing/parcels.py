"""Packages in memory, and ways to hand them to a registry without a network."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from expertctl.digest import Digest, FileDigest
from expertctl.package.layout import CONFIG, Layout, content_digest, layout_of, read_manifest
from expertctl.package.read import PackageContents, read_blobs
from expertctl.package.spool import unpack
from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument
from expertctl.registry.index_envelope import open_index
from expertctl.trust.bundle import sign_files
from expertctl.trust.keys import PrivateKey
from registry_server.access import namespaces
from registry_server.access.identity import Identity
from registry_server.oci import blobs, manifests, repositories
from registry_server.publishing.commit import Published, publish
from registry_server.publishing.routes import read_index
from registry_server.registry import Registry
from registry_server.storage.blob_digest import BlobDigest
from tests.factories import make_package, write_base


@dataclass(frozen=True)
class Parcel:
    """A package with all its blobs, the configuration too."""

    name: PackageName
    version: str
    layout: Layout
    blobs: Mapping[Digest, bytes]

    @property
    def package_digest(self) -> Digest:
        return self.layout.package_digest

    @property
    def content_digest(self) -> Digest:
        return content_digest(self.layout.files)

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class Template:
    """The files of one small expert, from which others differ in what their manifest says."""

    files: Mapping[str, bytes]

    def parcel(
        self,
        name: str = "acme/sql",
        version: str = "1.0.0",
        *,
        key: PrivateKey | None,
        stated: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        **changes: Any,
    ) -> Parcel:
        """Make a package; ``stated`` overrides what its manifest says of itself."""
        document = json.loads(self.files["expert.json"])
        document |= {"name": name, "version": version, **changes, **(stated or {})}
        contents = {**self.files, **(files or {}), "expert.json": json.dumps(document).encode()}
        described = [FileDigest(p, len(b), Digest.of(b)) for p, b in sorted(contents.items())]
        blobs = {Digest.of(data): data for data in (CONFIG, *contents.values())}
        signature = None
        if key is not None:
            bundle = sign_files(described, name=f"{name}@{version}", key=key)
            signature = FileDigest("model.sig", len(bundle), Digest.of(bundle))
            blobs[signature.digest] = bundle
        layout = layout_of(described, signature)
        return Parcel(PackageName.parse(name), version, layout, blobs)


def signed_again(parcel: Parcel, key: PrivateKey) -> Parcel:
    """The same content with the signature of another key."""
    bundle = sign_files(parcel.layout.files, name=parcel.ref, key=key)
    signature = FileDigest("model.sig", len(bundle), Digest.of(bundle))
    layout = layout_of(parcel.layout.files, signature)
    return replace(parcel, layout=layout, blobs={**parcel.blobs, signature.digest: bundle})


def make_template(folder: Path) -> Template:
    """Build one real package and take its files."""
    base = write_base(folder / "base", layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8)
    packed = make_package(folder, base_dir=base, lora={"rank": 1, "targets": ("q_proj",)})
    contents = unpack(packed, folder / "files")
    return Template({f.path: (folder / "files" / f.path).read_bytes() for f in contents.files})


def upload(registry: Registry, parcel: Parcel) -> None:
    """Put the blobs of a package into its repository, as finished uploads do."""
    with registry.database.write() as connection:
        namespace = namespaces.get(connection, parcel.name.namespace)
        repository = repositories.find_or_create(
            connection, name=str(parcel.name), namespace_id=namespace.id
        )
        for digest, data in parcel.blobs.items():
            temporary = registry.settings.data / digest.hex
            temporary.write_bytes(data)
            registry.storage.adopt(temporary, digest)
            blobs.enter(connection, BlobDigest.parse(str(digest)), len(data))
            blobs.link(connection, repository.id, BlobDigest.parse(str(digest)))


def send(registry: Registry, identity: Identity, parcel: Parcel) -> Published:
    """Publish a package whose blobs are there."""
    return publish(
        registry,
        identity,
        name=parcel.name,
        tag=parcel.version,
        manifest=parcel.layout.manifest,
    )


def push(registry: Registry, identity: Identity, parcel: Parcel) -> Published:
    """Upload a package and publish it."""
    upload(registry, parcel)
    return send(registry, identity, parcel)


def read(registry: Registry, identity: Identity, name: str = "acme/sql") -> IndexDocument:
    """Read the index document of a package with the client's own code."""
    package = PackageName.parse(name)
    envelope = read_index(registry, identity, package)
    return open_index(envelope, key=registry.index_key.public, package=package)


def pulled(registry: Registry, name: PackageName, digest: Digest) -> PackageContents:
    """Pull a package by its digest and read it whole, as a client does."""
    with registry.database.read() as connection:
        repository = repositories.find(connection, str(name))
        assert repository is not None
        stored = manifests.find(connection, repository.id, str(digest))
    assert stored is not None
    assert Digest.of(stored.content) == digest
    with registry.storage.open(Digest.of(CONFIG)) as stream:
        assert stream.read() == CONFIG
    layout = read_manifest(stored.content, what=str(name))
    return read_blobs(layout, registry.storage.open, what=str(name))
