"""Certificates of our own making, for servers on this machine.

A registry that lies: a plain socket server that says what a test wrote, byte for byte.

A registry that has a signed index and then sends what a test says.
"""

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from expertctl.package.layout import MANIFEST_TYPE
from expertctl.reference import Digest
from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import Credential, UnsavedCredential
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.http import RegistryHttp
from expertctl.registry.index_document import (
    IndexDocument,
    KeyEntry,
    Release,
    SignedForm,
    sign_index,
)
from expertctl.registry.transport import Timeouts
from expertctl.schema.manifest import parse_manifest
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.keys import PrivateKey
from tests.registry_server.publishing.package_fixtures import InMemoryPackage
from tests.store.fixtures import make_key


def make_self_signed(
    folder: Path, *, name: str = "localhost", alternative: bool = True
) -> tuple[ssl.SSLContext, Path]:
    """A server's TLS context, and the file of the one certificate that vouches for it.

    Without ``alternative`` only its common name names the server.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    if alternative:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    file, secret = folder / "certificate.pem", folder / "certificate.key"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, secret)
    return context, file


SECRET = "s3cret-of-the-right-host"
SECONDS = 120.0
"""After which a server gives a client up, so that no test hangs."""
_MAX_HEAD = 64 << 10


@dataclass(frozen=True)
class ReceivedRequest:
    """What a client sent."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def login(self) -> str | None:
        return self.headers.get("authorization")


class StallMarker:
    """In a reply: nothing more comes, and the connection stays open."""


Reply = bytes | Iterable[bytes | StallMarker]
ReplyScript = Callable[[ReceivedRequest], Reply]


def make_reply(
    status: int = 200,
    body: bytes = b"",
    *,
    length: int | None = None,
    **headers: str,
) -> bytes:
    """An answer; ``length`` is what it claims to have, -1 for no claim. ``_`` in names is ``-``."""
    lines = [f"HTTP/1.1 {status} Words", "Connection: close"]
    claimed = len(body) if length is None else length
    if claimed >= 0:
        lines.append(f"Content-Length: {claimed}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body


@dataclass
class HostileServer:
    """One server; ``seen`` is every request in the order of arrival."""

    respond: ReplyScript
    tls: ssl.SSLContext | None = None
    requests: list[ReceivedRequest] = field(default_factory=list)
    _listener: socket = field(default_factory=lambda: socket(AF_INET, SOCK_STREAM))
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(32)
        self._listener.settimeout(0.05)
        self._spawn(self._accept)

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(SECONDS)
        self._listener.close()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def alias_url(self) -> str:
        """The same server under a name that is another host to a client."""
        return f"{'https' if self.tls else 'http'}://localhost:{self.port}"

    @property
    def address(self) -> RegistryAddress:
        return RegistryAddress.parse(self.url)

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._spawn(self._serve, connection)

    def _serve(self, connection: socket) -> None:
        connection.settimeout(SECONDS)
        with connection, suppress(OSError):
            stream = self.tls.wrap_socket(connection, server_side=True) if self.tls else connection
            with stream:
                request = _read_request(stream)
                if request is None:
                    return
                self.requests.append(request)
                self._send_reply(stream, self.respond(request))

    def _send_reply(self, stream: socket, said: Reply) -> None:
        for part in [said] if isinstance(said, bytes) else said:
            if isinstance(part, StallMarker):
                self._stopped.wait(SECONDS)
                return
            stream.sendall(part)


def _read_request(stream: socket) -> ReceivedRequest | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = stream.recv(65536)
        if not more or len(data) > _MAX_HEAD:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        more = stream.recv(65536)
        if not more:
            break
        body += more
    return ReceivedRequest(method, target, headers, body)


@contextmanager
def run_hostile_server(
    script: ReplyScript, tls: ssl.SSLContext | None = None
) -> Iterator[HostileServer]:
    server = HostileServer(script, tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()


Serve = Callable[..., HostileServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that end with the test."""
    servers: list[HostileServer] = []

    def start(script: ReplyScript | Reply, tls: ssl.SSLContext | None = None) -> HostileServer:
        server = HostileServer(script if callable(script) else lambda _: script, tls)
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@dataclass
class RecordedPauses:
    """Stands for the clock: remembers what would have been slept."""

    seconds: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def make_client(
    server: HostileServer | None = None,
    *,
    attempts: int = 3,
    connect: float = 30.0,
    stall: float = 20.0,
    rate: float = 1024.0,
    ca_file: Path | None = None,
    environment: dict[str, str] | None = None,
    secret: str = SECRET,
    realm: str | None = None,
    pauses: RecordedPauses | None = None,
) -> RegistryHttp:
    """A client that is impatient and never sleeps, with a login for one server."""
    login = UnsavedCredential(server.address, Credential("me", secret, realm)) if server else None
    return RegistryHttp(
        login,
        environment=environment or {},
        ca_file=ca_file,
        timeouts=Timeouts(connect=connect, stall=stall, answer=SECONDS, rate=rate),
        retries=RetrySchedule(
            attempts=attempts, sleep=pauses or RecordedPauses(), jitter=lambda: 1.0
        ),
    )


TIME = "2026-01-01T00:00:00Z"


@dataclass
class HostileRegistry:
    """Answers from what is in it, which a test may change."""

    packages: dict[str, InMemoryPackage]
    key: PrivateKey
    is_indexed: bool = True
    revision: int = 1
    """Of every index; a test that changes what is in it raises it."""
    interval_days: int | None = None
    edit_release: Callable[[Release], Release] = field(default=lambda release: release)
    overrides: dict[str, Callable[[ReceivedRequest], Reply]] = field(default_factory=dict)
    """Path → what is said instead of the truth."""
    signers: dict[str, str] = field(default_factory=dict)
    """Ref → whose key the index says signed it, where not acme's."""
    server: HostileServer | None = None

    @property
    def hostile_server(self) -> HostileServer:
        assert self.server is not None
        return self.server

    @property
    def host(self) -> str:
        return self.hostile_server.address.host

    @property
    def known(self) -> KnownRegistry:
        return KnownRegistry(self.host, self.hostile_server.url, self.key.public)

    def list_requests(self, part: str) -> list[str]:
        """The paths with a part in them that were asked for."""
        return [request.path for request in self.hostile_server.requests if part in request.path]

    def publish(self, *parcels: InMemoryPackage) -> None:
        """Put these in place of all that is there, in the next revision."""
        self.packages = {parcel.ref: parcel for parcel in parcels}
        self.revision += 1

    def __call__(self, request: ReceivedRequest) -> Reply:
        if request.path in self.overrides:
            return self.overrides[request.path](request)
        for parcel in self.packages.values():
            if (said := self._make_honest_reply(request, parcel)) is not None:
                return said
        return make_reply(404)

    def _make_honest_reply(self, request: ReceivedRequest, parcel: InMemoryPackage) -> Reply | None:
        root = f"/v2/{parcel.name}"
        if self.is_indexed and request.path == f"/tuf/targets/index/{parcel.name}.json":
            return make_reply(body=sign_index(self._make_index(parcel), self.key))
        named = {f"{root}/manifests/{parcel.package_digest}", f"{root}/manifests/{parcel.version}"}
        if request.path in named:
            return make_reply(body=parcel.layout.manifest, Content_Type=MANIFEST_TYPE)
        for digest, data in parcel.blobs.items():
            if request.path == f"{root}/blobs/{digest}":
                return make_reply(body=data)
        return None

    def _make_index(self, parcel: InMemoryPackage) -> IndexDocument:
        mine = [p for p in self.packages.values() if p.name == parcel.name]
        releases = sorted(map(self._make_release, mine), key=lambda release: release.version)
        keys = (KeyEntry(make_key("acme").public, None),)
        return IndexDocument(parcel.name, self.revision, TIME, "", tuple(releases), keys,
                             interval_days=self.interval_days)  # fmt: skip

    def _make_release(self, parcel: InMemoryPackage) -> Release:
        manifest = parse_manifest(read_manifest_bytes(parcel.blobs, parcel))
        size = sum(file.size for file in parcel.layout.files)
        signer = make_key(self.signers.get(parcel.ref, "acme")).public.key_id
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
        return self.edit_release(release)


def read_manifest_bytes(blobs: Mapping[Digest, bytes], parcel: InMemoryPackage) -> bytes:
    """The bytes of expert.json."""
    (file,) = [file for file in parcel.layout.files if file.path == "expert.json"]
    return blobs[file.digest]


@contextmanager
def run_hostile_registry(
    *packages: InMemoryPackage, is_indexed: bool = True
) -> Iterator[HostileRegistry]:
    """Run such a registry."""
    hostile_registry = HostileRegistry(
        {parcel.ref: parcel for parcel in packages}, make_key("index"), is_indexed
    )
    with run_hostile_server(hostile_registry) as server:
        hostile_registry.server = server
        yield hostile_registry


def replace_form(release: Release, digest: Digest) -> Release:
    """A release whose index names another manifest."""
    return replace(release, forms=(replace(release.forms[0], package_digest=digest),))
