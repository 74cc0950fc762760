"""A registry that has a signed index and then sends what a test says."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from expertctl.digest import Digest
from expertctl.package.layout import MANIFEST_TYPE
from expertctl.registry.index_document import IndexDocument, KeyEntry, Release, SignedForm
from expertctl.registry.index_envelope import sign_index
from expertctl.schema.manifest import parse_manifest
from expertctl.trust.grant import KnownRegistry
from expertctl.trust.keys import PrivateKey
from tests.registry.hostile import HostileServer, Reply, Request, reply, serving
from tests.registry_server.publishing.parcels import Parcel
from tests.store.shop import a_key

TIME = "2026-01-01T00:00:00Z"


@dataclass
class Liar:
    """Answers from what is in it, which a test may change."""

    parcels: dict[str, Parcel]
    key: PrivateKey
    indexed: bool = True
    revision: int = 1
    """Of every index; a test that changes what is in it raises it."""
    interval_days: int | None = None
    change: Callable[[Release], Release] = field(default=lambda release: release)
    answers: dict[str, Callable[[Request], Reply]] = field(default_factory=dict)
    """Path → what is said instead of the truth."""
    signers: dict[str, str] = field(default_factory=dict)
    """Ref → whose key the index says signed it, where not acme's."""
    server: HostileServer | None = None

    @property
    def running(self) -> HostileServer:
        assert self.server is not None
        return self.server

    @property
    def host(self) -> str:
        return self.running.address.host

    @property
    def known(self) -> KnownRegistry:
        return KnownRegistry(self.host, self.running.url, self.key.public)

    def asked(self, part: str) -> list[str]:
        """The paths with a part in them that were asked for."""
        return [request.path for request in self.running.seen if part in request.path]

    def publish(self, *parcels: Parcel) -> None:
        """Put these in place of all that is there, in the next revision."""
        self.parcels = {parcel.ref: parcel for parcel in parcels}
        self.revision += 1

    def __call__(self, request: Request) -> Reply:
        if request.path in self.answers:
            return self.answers[request.path](request)
        for parcel in self.parcels.values():
            if (said := self._truth(request, parcel)) is not None:
                return said
        return reply(404)

    def _truth(self, request: Request, parcel: Parcel) -> Reply | None:
        root = f"/v2/{parcel.name}"
        if self.indexed and request.path == f"/tuf/targets/index/{parcel.name}.json":
            return reply(body=sign_index(self._document(parcel), self.key))
        named = {f"{root}/manifests/{parcel.package_digest}", f"{root}/manifests/{parcel.version}"}
        if request.path in named:
            return reply(body=parcel.layout.manifest, Content_Type=MANIFEST_TYPE)
        for digest, data in parcel.blobs.items():
            if request.path == f"{root}/blobs/{digest}":
                return reply(body=data)
        return None

    def _document(self, parcel: Parcel) -> IndexDocument:
        mine = [p for p in self.parcels.values() if p.name == parcel.name]
        releases = sorted(map(self._release, mine), key=lambda release: release.version)
        keys = (KeyEntry(a_key("acme").public, None),)
        return IndexDocument(parcel.name, self.revision, TIME, "", tuple(releases), keys,
                             interval_days=self.interval_days)  # fmt: skip

    def _release(self, parcel: Parcel) -> Release:
        manifest = parse_manifest(manifest_of(parcel.blobs, parcel))
        size = sum(file.size for file in parcel.layout.files)
        signer = a_key(self.signers.get(parcel.ref, "acme")).public.key_id
        form = SignedForm(parcel.package_digest, signer, len(parcel.layout.manifest))
        release = Release(
            version=manifest.semver,
            content_digest=parcel.content_digest,
            forms=(form,),
            size=size,
            published=TIME,
            yanked=None,
            kinds=tuple(dict.fromkeys(entry.kind for entry in manifest.adapters)),
            base=manifest.base,
            requires=manifest.composition.requires,
            conflicts=manifest.composition.conflicts,
        )
        return self.change(release)


def manifest_of(blobs: Mapping[Digest, bytes], parcel: Parcel) -> bytes:
    """The bytes of expert.json."""
    (file,) = [file for file in parcel.layout.files if file.path == "expert.json"]
    return blobs[file.digest]


@contextmanager
def lying(*parcels: Parcel, indexed: bool = True) -> Iterator[Liar]:
    """Run such a registry."""
    liar = Liar({parcel.ref: parcel for parcel in parcels}, a_key("index"), indexed)
    with serving(liar) as server:
        liar.server = server
        yield liar


def with_form(release: Release, digest: Digest) -> Release:
    """A release whose index names another manifest."""
    return replace(release, forms=(replace(release.forms[0], package_digest=digest),))
