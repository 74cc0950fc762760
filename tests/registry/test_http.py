"""The client against a registry that lies, over real sockets: where a login goes, what is refused.

The server is `127.0.0.1` to the client, and under the name `localhost` another host.
"""

import base64
import gzip
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_INET6, SO_LINGER, SOCK_STREAM, SOL_SOCKET, socket
from types import SimpleNamespace

import httpx2
import pytest

from expertctl.errors import (
    BudgetError,
    ConflictError,
    ForbiddenError,
    InvalidPackageError,
    NotFoundError,
    OfflineError,
    RateLimitError,
    RegistryError,
    UnauthenticatedError,
    UnreachableError,
)
from expertctl.registry import transport as wire_module
from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import Credential, CredentialStore, UnsavedCredential
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.http import MAX_REDIRECTS, RegistryHttp, RegistryRequest, open_http
from expertctl.registry.transport import RegistryTransport, Timeouts
from expertctl.settings import load_settings
from tests.registry.hostile_registry import (
    SECRET,
    HostileServer,
    ReceivedRequest,
    RecordedPauses,
    Reply,
    ReplyScript,
    Serve,
    StallMarker,
    make_client,
    make_reply,
    make_self_signed,
    serve,
)

__all__ = ["serve"]

BASIC = "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()
ASKS_BASIC = {"WWW_Authenticate": 'Basic realm="x"'}


@dataclass
class Resolver:
    """Resolves every name to the same addresses, and remembers what it was asked."""

    addresses: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __call__(self, host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        self.asked.append(host)
        kinds = {one: AF_INET6 if ":" in one else AF_INET for one in self.addresses}
        return [(kind, SOCK_STREAM, 0, "", (one, port)) for one, kind in kinds.items()]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    fake = Resolver()
    monkeypatch.setattr("expertctl.registry.transport.getaddrinfo", fake)
    return fake


def get(
    http: RegistryHttp, server: HostileServer, target: str = "/x", max_bytes: int = 1000
) -> bytes:
    return http.request(RegistryRequest("GET", server.address, target), max_bytes=max_bytes).body


def logins_seen(*servers: HostileServer) -> list[str | None]:
    return [request.login for server in servers for request in server.requests]


def behind_basic(answer: Reply) -> ReplyScript:
    return lambda request: answer if request.login else make_reply(401, **ASKS_BASIC)


def test_a_login_is_shown_once_it_is_asked_for(serve: Serve) -> None:
    server = serve(behind_basic(make_reply(200, b"hello")))
    with make_client(server) as http:
        assert get(http, server) == b"hello"
        assert get(http, server) == b"hello"
    assert logins_seen(server) == [None, BASIC, BASIC]
    assert {r.headers["accept-encoding"] for r in server.requests} == {"identity"}
    assert all("cookie" not in r.headers for r in server.requests)


def test_a_token_of_ours_is_shown_at_once(serve: Serve) -> None:
    server = serve(make_reply(200, b"hello"))
    with make_client(server, secret="xpt_1") as http:
        get(http, server)
    assert logins_seen(server) == ["Bearer xpt_1"]


def test_another_registry_never_sees_the_login(serve: Serve) -> None:
    mine, other = serve(make_reply(401, **ASKS_BASIC)), serve(make_reply(401, **ASKS_BASIC))
    with (
        make_client(mine, secret="xpt_1") as http,
        pytest.raises(UnauthenticatedError, match="log"),
    ):
        raise_hint(http, other)
    assert logins_seen(other) == [None]


def raise_hint(http: RegistryHttp, server: HostileServer) -> None:
    try:
        get(http, server)
    except UnauthenticatedError as error:
        raise UnauthenticatedError(error.hint) from error


def test_the_token_of_another_host_stays_here(serve: Serve, tmp_path: Path) -> None:  # attack 103
    server, right = serve(make_reply(401, **ASKS_BASIC)), "r.example"
    environment = {"EXPERT_TOKEN": "xpt_" + "s" * 43, "EXPERT_REGISTRY": right}
    store = CredentialStore(tmp_path / "credentials.json")
    with RegistryHttp(store, environment=environment) as http, pytest.raises(UnauthenticatedError):
        get(http, server)
    assert logins_seen(server) == [None]
    environment["EXPERT_REGISTRY"] = server.url
    with RegistryHttp(store, environment=environment) as http, pytest.raises(UnauthenticatedError):
        get(http, server)
    assert logins_seen(server) == [None, "Bearer " + environment["EXPERT_TOKEN"]]


# attack 90: the realm of a Bearer challenge


def bearer(realm: str) -> bytes:
    return make_reply(401, WWW_Authenticate=f'Bearer realm="{realm}",service="s"')


def test_the_own_realm_gets_the_login_and_its_token_opens(serve: Serve) -> None:
    def script(request: ReceivedRequest) -> Reply:
        if request.path == "/token":
            return make_reply(200, b'{"token": "short", "expires_in": 300}')
        opened = request.login == "Bearer short"
        return (
            make_reply(200, b"in") if opened else bearer(f"http://{request.headers['host']}/token")
        )

    server = serve(script)
    with make_client(server) as http:
        call = RegistryRequest("GET", server.address, "/x", scope="repository:a/b:pull")
        assert http.request(call, max_bytes=10).body == b"in"
        assert http.request(call, max_bytes=10).body == b"in"
        assert http.has_authenticated(server.address)
    assert logins_seen(server) == [None, BASIC, "Bearer short", "Bearer short"]
    assert server.requests[1].target == "/token?service=s&scope=repository%3Aa%2Fb%3Apull"


def test_a_realm_on_another_host_gets_no_login(serve: Serve) -> None:
    thief = serve(make_reply(200, b'{"token": "anonymous"}'))
    server = serve(
        lambda r: make_reply(200, b"public") if r.login else bearer(thief.alias_url + "/t")
    )
    with make_client(server) as http:
        assert get(http, server) == b"public"
    assert logins_seen(thief) == [None]
    assert logins_seen(server) == [None, "Bearer anonymous"]


def test_a_realm_on_another_port_is_another_host(serve: Serve) -> None:
    thief = serve(make_reply(200, b'{"token": "anonymous"}'))
    server = serve(lambda r: make_reply(200) if r.login else bearer(thief.url + "/t"))
    with make_client(server) as http, pytest.raises(RegistryError, match="within a network"):
        get(http, server)
    assert thief.requests == []


def test_a_realm_that_the_person_named_gets_the_login(serve: Serve) -> None:
    trusted = serve(make_reply(200, b'{"token": "t"}'))
    server = serve(lambda r: make_reply(200) if r.login else bearer(trusted.alias_url + "/t"))
    with make_client(server, realm=trusted.alias_url) as http:
        get(http, server)
    assert logins_seen(trusted) == [BASIC]


@pytest.mark.parametrize(
    "realm",
    ["http://169.254.169.254/latest/meta-data", "http://2852039166/", "http://[::1]:1/t",
     "file:///etc/passwd", "http://metadata.google.internal/x"],
)  # fmt: skip
def test_a_realm_within_the_network_is_not_asked(serve: Serve, realm: str) -> None:
    server = serve(bearer(realm))
    with make_client(server) as http, pytest.raises(RegistryError, match="it sends logins to"):
        get(http, server)
    assert logins_seen(server) == [None]


class FarRegistry(httpx2.BaseTransport):
    """A registry that no socket leads to, with a realm on a host that is reached as usual."""

    def __init__(self, realm: str) -> None:
        self.realm = realm
        self.wire = RegistryTransport(timeouts=Timeouts(), ca_file=None, environment={})

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if str(request.url).startswith(self.realm):
            return self.wire.handle_request(request)
        headers = {"WWW-Authenticate": f'Bearer realm="{self.realm}/t",service="s"'}
        return httpx2.Response(401, headers=headers, stream=httpx2.ByteStream(b""))

    def close(self) -> None:
        self.wire.close()


@pytest.mark.parametrize(
    ("registry", "addresses"),
    [
        ("http://r.example", ["127.0.0.1"]),
        ("http://r.example", ["93.184.215.14", "127.0.0.1"]),
        ("http://r.example", ["10.1.2.3"]),
        ("http://r.example", ["169.254.169.254"]),
        ("http://r.example", ["::1"]),
        ("http://r.example", ["::ffff:127.0.0.1"]),
        ("http://r.example", ["fd00::1"]),
        ("http://10.0.0.5", ["127.0.0.1"]),
        ("http://10.0.0.5", ["169.254.169.254"]),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_realm_whose_name_leads_into_a_network_is_not_asked(
    serve: Serve, resolver: Resolver, registry: str, addresses: list[str], named: bool
) -> None:
    """Attack 90 by a name that anybody can register, whether or not the person named it too."""
    inside = serve(make_reply(200, b'{"token": "t"}'))
    resolver.addresses = addresses
    realm = f"http://auth.example:{inside.port}"
    there = RegistryAddress.parse(registry, allow_http=True)
    login = UnsavedCredential(there, Credential("me", SECRET, realm if named else None))
    with (
        RegistryHttp(login, transport=FarRegistry(realm)) as http,
        pytest.raises(RegistryError, match=r"auth\.example.*an address within a network"),
    ):
        http.request(RegistryRequest("GET", there, "/x"), max_bytes=10)
    assert inside.requests == []
    assert resolver.asked == ["auth.example"]


def test_a_realm_is_asked_at_the_address_that_was_checked(serve: Serve, resolver: Resolver) -> None:
    """Of a registry on this machine, which may lead to this machine; resolved once, so that a
    second answer of the name server counts for nothing."""
    auth = serve(make_reply(200, b'{"token": "t"}'))
    realm = f"http://auth.example:{auth.port}/t"
    server = serve(lambda request: make_reply(200, b"in") if request.login else bearer(realm))
    resolver.addresses = ["127.0.0.1"]
    with make_client(server) as http:
        assert get(http, server) == b"in"
    assert auth.requests[0].headers["host"] == f"auth.example:{auth.port}"
    assert logins_seen(auth) == [None]
    assert resolver.asked == ["auth.example"]


def test_an_unencrypted_realm_of_an_encrypted_registry_is_not_asked(
    serve: Serve, tmp_path: Path
) -> None:
    tls, ca = make_self_signed(tmp_path)
    thief = serve(make_reply(200, b'{"token": "t"}'))
    server = serve(bearer(thief.alias_url + "/t"), tls)
    with (
        make_client(server, ca_file=ca) as http,
        pytest.raises(RegistryError, match="not encrypted"),
    ):
        get(http, server)
    assert thief.requests == []


def test_a_realm_that_redirects_is_not_followed(serve: Serve) -> None:
    thief = serve(make_reply(200, b'{"token": "t"}'))

    def script(request: ReceivedRequest) -> Reply:
        if request.path == "/token":
            return make_reply(307, Location=thief.url + "/steal")
        return bearer(f"http://{request.headers['host']}/token")

    server = serve(script)
    with make_client(server) as http, pytest.raises(RegistryError, match="asking for a token"):
        get(http, server)
    assert thief.requests == []


# attack 92: redirects


def test_a_redirect_to_another_host_is_followed_without_the_login(serve: Serve) -> None:
    storage = serve(make_reply(200, b"blob"))
    server = serve(lambda r: make_reply(307, Location=storage.alias_url + "/signed?key=1"))
    with make_client(server, secret="xpt_1") as http:
        call = RegistryRequest("GET", server.address, "/blob", headers={"Range": "bytes=0-"})
        assert http.request(call, max_bytes=10).body == b"blob"
    assert logins_seen(server, storage) == ["Bearer xpt_1", None]
    assert storage.requests[0].headers["range"] == "bytes=0-"
    assert storage.requests[0].target == "/signed?key=1"


def test_a_401_after_a_redirect_away_is_not_answered(serve: Serve) -> None:
    thief = serve(make_reply(401, **ASKS_BASIC))
    server = serve(make_reply(302, Location=thief.alias_url))
    with make_client(server) as http, pytest.raises(UnauthenticatedError):
        get(http, server)
    assert logins_seen(server, thief) == [None, None]


def test_a_redirect_away_and_back_does_not_bring_the_login_back(serve: Serve) -> None:
    def script(request: ReceivedRequest) -> Reply:
        return (
            make_reply(302, Location=f"{other.alias_url}/")
            if request.path == "/x"
            else make_reply(200)
        )

    server = serve(script)
    other = serve(lambda _: make_reply(302, Location=f"{server.url}/private"))
    with make_client(server, secret="xpt_1") as http:
        get(http, server)
    assert [(r.path, r.login) for r in server.requests] == [
        ("/x", "Bearer xpt_1"),
        ("/private", None),
    ]


def test_a_redirect_within_the_registry_keeps_the_login(serve: Serve) -> None:
    server = serve(lambda r: make_reply(200) if r.path == "/y" else make_reply(308, Location="y"))
    with make_client(server, secret="xpt_1") as http:
        get(http, server)
    assert logins_seen(server) == ["Bearer xpt_1", "Bearer xpt_1"]


def test_an_encrypted_registry_cannot_redirect_to_an_unencrypted_host(
    serve: Serve, tmp_path: Path
) -> None:
    tls, ca = make_self_signed(tmp_path)
    thief = serve(make_reply(200, b"evil"))
    server = serve(make_reply(302, Location=thief.alias_url), tls)
    with (
        make_client(server, ca_file=ca) as http,
        pytest.raises(RegistryError, match="not encrypted"),
    ):
        get(http, server)
    assert thief.requests == []


def test_a_redirect_in_a_loop_is_named(serve: Serve) -> None:
    server = serve(lambda r: make_reply(302, Location="/b" if r.path == "/a" else "/a"))
    with make_client(server) as http, pytest.raises(RegistryError, match="in a loop"):
        get(http, server, "/a")
    assert len(server.requests) == 2


def test_redirects_without_end_are_cut_off(serve: Serve) -> None:
    server = serve(lambda r: make_reply(302, Location=r.path + "x"))
    with make_client(server) as http, pytest.raises(RegistryError, match="more than 5 redirects"):
        get(http, server)
    assert len(server.requests) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    "location",
    ["", "file:///etc/passwd", "gopher://x/", "http://user:pw@localhost/", "http://", "http://[::",
     "javascript:alert(1)", "x" * 20_000],
)  # fmt: skip
def test_a_redirect_to_nowhere_is_refused(serve: Serve, location: str) -> None:
    server = serve(make_reply(302, Location=location))
    with make_client(server) as http, pytest.raises(RegistryError):
        get(http, server)


@pytest.mark.parametrize(
    ("registry", "location", "followed"),
    [
        ("https://r.example", "https://storage.example/signed", True),
        ("https://r.example", "https://127.0.0.1:2375/containers", False),
        ("https://r.example", "https://localhost/x", False),
        ("https://r.example", "https://localhost./x", False),
        ("https://r.example", "https://10.1.2.3/blob", False),
        ("https://r.example", "https://192.168.1.1/blob", False),
        ("https://r.example", "https://169.254.169.254/latest/meta-data", False),
        ("https://r.example", "https://[fe80::1]/x", False),
        ("https://r.example", "https://[fd00::1]/x", False),
        ("https://r.example", "https://[::ffff:127.0.0.1]/x", False),
        ("https://r.example", "https://[64:ff9b::7f00:1]/x", False),
        ("https://r.example", "https://[64:ff9b:1::7f00:1]/x", False),
        ("https://r.example", "https://[fec0::1]/x", False),
        ("https://r.example", "https://[::7f00:1]/x", False),
        ("https://r.example", "https://[2606:4700::6810:84e5]/blob", True),
        ("https://r.example", "https://0x7f.1/x", False),
        ("https://r.example", "https://0.0.0.0/x", False),
        ("https://r.example", "https://93.184.215.14/blob", True),
        ("https://10.0.0.5", "https://10.0.0.6/blob", True),
        ("https://10.0.0.5", "https://127.0.0.1/x", False),
        ("https://10.0.0.5", "https://169.254.169.254/x", False),
        ("http://127.0.0.1:5000", "http://169.254.169.254/latest/meta-data", False),
        ("http://127.0.0.1:5000", "http://localhost:9000/blob", True),
        ("http://r.example", "http://169.254.169.254/latest/meta-data", False),
        ("http://r.example", "http://2852039166/latest", False),
        ("http://r.example", "http://storage.example/blob", True),
        ("http://r.example", "https://storage.example/blob", True),
    ],
)
def test_a_registry_elsewhere_cannot_redirect_into_this_network(
    registry: str, location: str, followed: bool
) -> None:
    seen: list[str] = []

    def script(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        if len(seen) == 1:
            stream = httpx2.ByteStream(b"")
            return httpx2.Response(302, headers={"Location": location}, stream=stream)
        return httpx2.Response(200, stream=httpx2.ByteStream(b"blob"))

    address = RegistryAddress.parse(registry, allow_http=True)
    with RegistryHttp(transport=httpx2.MockTransport(script)) as http:
        call = RegistryRequest("GET", address, "/x")
        if followed:
            assert http.request(call, max_bytes=10).body == b"blob"
        else:
            with pytest.raises(RegistryError, match="within a network"):
                http.request(call, max_bytes=10)
        http.interrupt()  # there is nothing to interrupt
    assert seen == [f"{registry}/x", location][: 1 + followed]


def test_a_redirect_to_a_name_of_this_machine_is_not_connected_to(
    serve: Serve, resolver: Resolver
) -> None:
    """A name that anybody can register may mean an address in here, and mean another one later."""
    inside = serve(make_reply(200, b"secret"))
    for addresses in (["127.0.0.1"], ["93.184.215.14", "127.0.0.1"], ["10.0.0.1"]):
        resolver.addresses = addresses
        wire = RegistryTransport(timeouts=Timeouts(), ca_file=None, environment={})
        request = httpx2.Request(
            "GET",
            f"http://storage.example:{inside.port}/x",
            extensions={"allowed_scopes": frozenset({"global"})},
        )
        with pytest.raises(RegistryError, match="an address within a network"):
            wire.handle_request(request)
        wire.close()
    assert inside.requests == []


def test_a_redirect_is_followed_to_the_address_that_was_checked(
    serve: Serve, resolver: Resolver
) -> None:
    storage = serve(make_reply(200, b"blob"))
    resolver.addresses = ["127.0.0.1"]
    server = serve(make_reply(307, Location=f"http://storage.example:{storage.port}/blob"))
    with make_client(server) as http:  # the registry is on this machine, and so may its storage be
        assert get(http, server) == b"blob"
    assert storage.requests[0].headers["host"] == f"storage.example:{storage.port}"


@pytest.mark.parametrize("host", ["a..example", f"{'a' * 64}.example", ".example"])
def test_a_redirect_to_what_is_no_name_is_an_error(serve: Serve, host: str) -> None:
    server = serve(make_reply(307, Location=f"https://{host}/x"))
    with (
        make_client(server, attempts=1) as http,
        pytest.raises(UnreachableError, match="no connection"),
    ):
        get(http, server)


def test_a_redirect_is_followed_where_the_first_address_of_a_host_cannot_be_reached(
    serve: Serve, resolver: Resolver
) -> None:
    """As in a network whose IPv6 leads nowhere."""
    storage = serve(make_reply(200, b"blob"))
    resolver.addresses = ["::1", "127.0.0.1"]
    server = serve(make_reply(307, Location=f"http://storage.example:{storage.port}/blob"))
    with make_client(server) as http:
        assert get(http, server) == b"blob"


def test_an_answer_whose_connection_was_reset_behind_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that refuses an upload early answers, and closes with bytes that it never read."""
    with socket(AF_INET, SOCK_STREAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        place = listening.getsockname()

        def refuse() -> None:
            there, _ = listening.accept()
            there.settimeout(30)
            there.recv(100)
            there.sendall(make_reply(413, b"too large"))
            there.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            there.close()

        begin = wire_module._WatchedStream.start_body

        def late(stream: wire_module._WatchedStream) -> None:
            refusing.result(timeout=120)  # the reset is here before the answer is looked at
            begin(stream)

        monkeypatch.setattr(wire_module._WatchedStream, "start_body", late)
        wire = RegistryTransport(timeouts=Timeouts(), ca_file=None, environment={})
        with ThreadPoolExecutor(1) as pool:
            refusing = pool.submit(refuse)
            url = f"http://{place[0]}:{place[1]}/x"
            answer = wire.handle_request(httpx2.Request("PUT", url, content=b"x" * 10))
        assert answer.status_code == 413
        wire.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_what_writes_is_not_redirected(serve: Serve, method: str) -> None:
    thief = serve(make_reply(200))
    server = serve(make_reply(307, Location=thief.alias_url))
    with make_client(server) as http, pytest.raises(RegistryError, match="not followed"):
        http.request(RegistryRequest(method, server.address, "/x", body=b"private"), max_bytes=10)
    assert thief.requests == []


# attack 93, 95: bodies and texts


def test_an_endless_body_is_cut_off(serve: Serve) -> None:
    def endless(_: ReceivedRequest) -> Iterator[bytes]:
        yield make_reply(200, length=-1)
        while True:
            yield b"x" * 65536

    server = serve(endless)
    with make_client(server) as http, pytest.raises(RegistryError, match="more than 1000 bytes"):
        get(http, server)


def test_a_body_that_promises_too_much_is_not_read(serve: Serve) -> None:
    server = serve(lambda _: [make_reply(200, length=10**12), StallMarker()])
    with make_client(server) as http, pytest.raises(RegistryError, match="more than 1000 bytes"):
        get(http, server)


@pytest.mark.parametrize("cut", range(len(make_reply(200, b'{"a": 1}'))))
def test_an_answer_that_ends_early_is_never_taken_for_whole(serve: Serve, cut: int) -> None:
    server = serve(make_reply(200, b'{"a": 1}')[:cut])
    with make_client(server, attempts=1) as http, pytest.raises(UnreachableError):
        get(http, server)


@pytest.mark.parametrize("sent", [b"", make_reply(200, b"x" * 10)[:-10], b"HTTP/1.1 200"])
def test_an_answer_that_stalls_is_given_up(serve: Serve, sent: bytes) -> None:
    server = serve(lambda _: [sent, StallMarker()])
    with (
        make_client(server, attempts=1, stall=0.1) as http,
        pytest.raises(UnreachableError, match="stalled"),
    ):
        get(http, server)


def test_an_answer_that_trickles_is_given_up(serve: Serve) -> None:
    tick = threading.Event()

    def trickle(_: ReceivedRequest) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nX: "
        while not tick.wait(0.02):
            yield b"y"

    server = serve(trickle)
    with (
        make_client(server, attempts=1, stall=0.2) as http,
        pytest.raises(UnreachableError, match="stalled"),
    ):
        get(http, server)
    tick.set()


def drip(_: ReceivedRequest) -> Iterator[bytes]:
    """A body of which a little comes again and again."""
    yield make_reply(200, length=10**9)
    tick = threading.Event()
    while not tick.wait(0.01):
        yield b"x" * 2000


def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds pass between two looks at the clock, however fast the machine is."""
    clock = iter(range(0, 10**6, 10))
    fake = SimpleNamespace(monotonic=lambda: float(next(clock)))
    monkeypatch.setattr("expertctl.registry.http.time", fake)


def test_a_body_that_comes_too_slowly_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read brings something, and never enough: 100 bytes a second would take for ever."""
    server = serve(drip)
    slow_clock(monkeypatch)
    with (
        make_client(server, attempts=1, rate=1e9) as http,
        pytest.raises(UnreachableError, match="comes too slowly"),
    ):
        get(http, server, max_bytes=10**10)


def test_a_blob_that_comes_too_slowly_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(drip)
    slow_clock(monkeypatch)
    with (
        make_client(server, rate=1e9) as http,
        http.open_stream(RegistryRequest("GET", server.address, "/x")) as answer,
        pytest.raises(UnreachableError, match="comes too slowly"),
    ):
        for _ in answer.chunks:
            pass


def test_an_answer_that_never_gets_to_the_point_is_given_up(serve: Serve) -> None:
    def hesitant(_: ReceivedRequest) -> Iterator[bytes]:
        while True:
            yield b"HTTP/1.1 100 Continue\r\n\r\n" * 100

    server = serve(hesitant)
    with (
        make_client(server, attempts=1) as http,
        pytest.raises(UnreachableError, match="headers are too long"),
    ):
        get(http, server)


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_server_may_think_about_what_it_was_sent(serve: Serve, method: str) -> None:
    thinking = threading.Event()

    def script(_: ReceivedRequest) -> Reply:
        thinking.wait(0.3)
        return make_reply(200, b"done")

    server = serve(script)
    with make_client(server, attempts=1, stall=0.1) as http:
        call = RegistryRequest(method, server.address, "/x", body=b"large")
        assert http.request(call, max_bytes=10).body == b"done"


def test_an_answer_that_takes_for_ever_is_given_up(serve: Serve) -> None:
    ended = threading.Event()

    def slow(_: ReceivedRequest) -> Iterator[bytes]:
        yield make_reply(200, length=-1)
        while not ended.wait(0.01):
            yield b"x" * 2000

    server = serve(slow)
    timeouts = Timeouts(connect=5.0, stall=20.0, answer=0.2)
    with (
        RegistryHttp(timeouts=timeouts, retries=RetrySchedule(attempts=1)) as http,
        pytest.raises(UnreachableError, match="takes too long"),
    ):
        get(http, server, max_bytes=1 << 40)
    ended.set()


def test_a_refusal_with_an_endless_text_is_known_by_its_status(serve: Serve) -> None:
    server = serve(make_reply(403, b"x" * 100_000))
    with make_client(server) as http, pytest.raises(ForbiddenError, match=r"not allowed$"):
        get(http, server)


def test_a_compressed_answer_is_refused(serve: Serve) -> None:
    server = serve(make_reply(200, gzip.compress(b"x" * 100), Content_Encoding="gzip"))
    with make_client(server) as http, pytest.raises(RegistryError, match="compressed"):
        get(http, server)


def test_headers_without_end_are_refused(serve: Serve) -> None:
    def endless(_: ReceivedRequest) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n"
        while True:
            yield b"X-More: " + b"y" * 8000 + b"\r\n"

    server = serve(endless)
    with make_client(server, attempts=1) as http, pytest.raises(UnreachableError, match="not HTTP"):
        get(http, server)


def test_what_is_not_http_is_named(serve: Serve) -> None:
    server = serve(b"SSH-2.0-OpenSSH_9.2\r\n")
    with make_client(server, attempts=1) as http, pytest.raises(UnreachableError, match="not HTTP"):
        get(http, server)


def test_control_characters_of_a_server_reach_no_terminal(serve: Serve) -> None:
    body = b'{"errors": [{"code": "DENIED", "message": "\\u001b]0;owned\\u0007\\u202egnp.exe"}]}'
    server = serve(make_reply(403, body, Warning="299 - \x1b[31mevil"))
    with make_client(server) as http, pytest.raises(ForbiddenError) as caught:
        get(http, server, "/%1b[2J")
    assert caught.value.message.isprintable()
    assert "]0;owned gnp.exe" in caught.value.message


def test_the_message_of_a_server_is_bounded(serve: Serve) -> None:
    body = b'{"error": {"code": "x", "message": "' + b"a" * 60_000 + b'", "hint": "b"}}'
    server = serve(make_reply(400, body))
    with make_client(server) as http, pytest.raises(RegistryError) as caught:
        get(http, server)
    assert len(caught.value.message) < 1000
    assert caught.value.hint == "b"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RegistryError), (401, UnauthenticatedError), (403, ForbiddenError),
     (404, NotFoundError), (409, ConflictError), (413, BudgetError), (429, RateLimitError),
     (500, UnreachableError), (503, UnreachableError), (301, RegistryError)],
)  # fmt: skip
def test_a_status_is_one_kind_of_error(
    serve: Serve, status: int, kind: type[RegistryError]
) -> None:
    server = serve(make_reply(status, b"<html>"))
    with make_client(server, attempts=1) as http, pytest.raises(kind, match=server.address.host):
        get(http, server)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(403, "budget", BudgetError), (422, "invalid_package", InvalidPackageError),
     (400, "unheard_of", RegistryError)],
)  # fmt: skip
def test_our_own_server_may_say_more_than_a_status(
    serve: Serve, status: int, code: str, kind: type[RegistryError]
) -> None:
    detail = f'{{"errors": [{{"message": "m", "detail": {{"code": "{code}", "hint": "h"}}}}]}}'
    server = serve(make_reply(status, detail.encode()))
    with make_client(server) as http, pytest.raises(kind, match="m") as caught:
        get(http, server)
    assert caught.value.hint == "h"


# bad networks


def test_a_server_that_is_busy_is_asked_again_after_growing_pauses(serve: Serve) -> None:
    answers = iter(
        [make_reply(503), make_reply(429, Retry_After="7"), b"", make_reply(200, b"at last")]
    )
    server, pauses = serve(lambda _: next(answers)), RecordedPauses()
    with make_client(server, attempts=5, pauses=pauses) as http:
        assert get(http, server) == b"at last"
    assert pauses.seconds == [0.5, 7.0, 2.0]


def test_the_last_failure_names_host_reason_and_number(serve: Serve) -> None:
    server = serve(make_reply(502))
    with make_client(server, attempts=3) as http, pytest.raises(UnreachableError) as caught:
        get(http, server, "/x?secret=1")
    expected = f"{server.address.host}: GET /x: the proxy got no answer (tried 3 times)"
    assert caught.value.message == expected
    assert len(server.requests) == 3


def test_a_pause_of_an_hour_is_not_waited_for(serve: Serve) -> None:
    server, pauses = serve(make_reply(429, Retry_After="3600")), RecordedPauses()
    with (
        make_client(server, pauses=pauses) as http,
        pytest.raises(RateLimitError, match="3600 sec"),
    ):
        get(http, server)
    assert pauses.seconds == []


def test_what_may_have_arrived_is_not_posted_twice(serve: Serve) -> None:
    server = serve(b"")
    with make_client(server) as http, pytest.raises(UnreachableError):
        http.request(RegistryRequest("POST", server.address, "/x", body=b"once"), max_bytes=10)
    assert len(server.requests) == 1


def test_what_cannot_have_arrived_is_tried_again() -> None:
    with socket(AF_INET, SOCK_STREAM) as unused:
        unused.bind(("127.0.0.1", 0))
        address = RegistryAddress.parse(f"127.0.0.1:{unused.getsockname()[1]}")
        pauses = RecordedPauses()
        with make_client(pauses=pauses) as http, pytest.raises(UnreachableError) as refused:
            http.request(RegistryRequest("POST", address, "/x", body=b"x"), max_bytes=10)
    assert len(pauses.seconds) == 2
    assert refused.value.message == (
        f"{address.host}: no connection: Connection refused (tried 3 times)"
    )
    assert "expertctl registry serve" in refused.value.hint


def test_ctrl_c_ends_what_other_threads_wait_for(serve: Serve) -> None:
    asked = threading.Semaphore(0)

    def stall(_: ReceivedRequest) -> Iterator[bytes | StallMarker]:
        asked.release()
        yield StallMarker()

    server = serve(stall)
    with make_client(server, stall=60.0) as http:

        def press_ctrl_c() -> None:
            with ThreadPoolExecutor(2) as pool, http.interrupt_on_ctrl_c():
                jobs.extend(pool.submit(get, http, server) for _ in range(2))
                assert all(asked.acquire(timeout=120) for _ in jobs)
                raise KeyboardInterrupt

        jobs: list[Future[bytes]] = []
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
        assert all(isinstance(job.exception(), RegistryError) for job in jobs)
        with pytest.raises(RegistryError, match="GET /x: stopped"):
            get(http, server)
    assert len(server.requests) == 2  # neither was tried again


def test_offline_nothing_is_sent(serve: Serve) -> None:
    server = serve(make_reply(200))
    with RegistryHttp(None, offline=True) as http, pytest.raises(OfflineError, match="offline"):
        get(http, server)
    assert server.requests == []


def test_a_streamed_answer_comes_as_it_is_sent(serve: Serve) -> None:
    server = serve(make_reply(200, b"x" * 200_000))
    with (
        make_client(server) as http,
        http.open_stream(RegistryRequest("GET", server.address, "/x")) as answer,
    ):
        assert sum(len(chunk) for chunk in answer.chunks) == 200_000
    with (
        make_client(server) as http,
        http.open_stream(RegistryRequest("GET", server.address, "/x")),
    ):
        pass  # what is not read is not waited for


def test_one_connection_serves_for_many_requests() -> None:
    connections: set[object] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            connections.add(self.client_address)
            allowed = self.headers.get("authorization") is not None
            self.send_response(200 if allowed else 401)
            self.send_header("WWW-Authenticate", 'Basic realm="x"')
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello" if self.command == "GET" else b"")

        do_HEAD = do_GET  # noqa: N815  # the name that the library looks for

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        address = RegistryAddress.parse(f"127.0.0.1:{server.server_port}")
        with RegistryHttp(UnsavedCredential(address, Credential("me", "x"))) as http:
            for method in ("HEAD", "GET", "HEAD", "GET"):
                http.request(RegistryRequest(method, address, "/x"), max_bytes=10)
        server.shutdown()
        thread.join()
    assert len(connections) == 1


def test_a_body_is_begun_anew_for_every_attempt(serve: Serve) -> None:
    answers = iter([make_reply(401, **ASKS_BASIC), make_reply(503), make_reply(201)])
    server = serve(lambda _: next(answers))
    body = {"Content-Length": "3"}
    with make_client(server) as http:
        call = RegistryRequest(
            "PUT", server.address, "/x", headers=body, body=lambda: iter([b"abc"])
        )
        http.request(call, max_bytes=10, accept={201})
    assert [request.body for request in server.requests] == [b"abc"] * 3


# attack 96, 97: proxies and certificates


def test_a_self_signed_certificate_is_refused_and_accepted_with_its_ca_file(
    serve: Serve, tmp_path: Path
) -> None:
    tls, ca = make_self_signed(tmp_path)
    server, pauses = serve(make_reply(200, b"private"), tls), RecordedPauses()
    with make_client(server, pauses=pauses) as http, pytest.raises(RegistryError) as caught:
        get(http, server)
    assert "its certificate is not accepted: self-signed certificate" in caught.value.message
    assert "ca_file" in caught.value.hint
    assert (server.requests, pauses.seconds) == ([], [])
    with make_client(server, ca_file=ca) as http:
        assert get(http, server) == b"private"


def test_a_certificate_for_another_name_is_refused(serve: Serve, tmp_path: Path) -> None:
    tls, ca = make_self_signed(tmp_path, name="other.example")
    server = serve(make_reply(200), tls)
    there = RegistryAddress.parse(server.alias_url)
    with make_client(ca_file=ca) as http, pytest.raises(RegistryError, match="not accepted"):
        http.request(RegistryRequest("GET", there, "/"), max_bytes=10)
    assert server.requests == []


def test_a_certificate_that_names_its_host_as_common_name_alone_is_refused(
    serve: Serve, tmp_path: Path
) -> None:
    tls, ca = make_self_signed(tmp_path, alternative=False)
    server = serve(make_reply(200), tls)
    there = RegistryAddress.parse(server.alias_url)
    with (
        make_client(ca_file=ca) as http,
        pytest.raises(RegistryError, match="not accepted") as caught,
    ):
        http.request(RegistryRequest("GET", there, "/"), max_bytes=10)
    assert "subjectAltName" in caught.value.hint
    assert server.requests == []


def test_what_is_no_tls_at_all_is_named(serve: Serve) -> None:
    server = serve(make_reply(200))
    there = RegistryAddress.parse(server.url.replace("http:", "https:"))
    with (
        make_client(attempts=1, connect=0.5) as http,
        pytest.raises(UnreachableError, match="no connection"),
    ):
        http.request(RegistryRequest("GET", there, "/"), max_bytes=10)


def test_the_settings_say_which_ca_is_believed(
    serve: Serve, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, ca = make_self_signed(tmp_path)
    server = serve(make_reply(200, b"private"), tls)
    monkeypatch.setenv("EXPERT_CA_FILE", str(ca))
    with open_http(load_settings()) as http:
        assert get(http, server) == b"private"


def test_a_proxy_never_sees_what_is_for_this_machine(serve: Serve) -> None:
    proxy, server = serve(make_reply(200, b"proxy")), serve(make_reply(200, b"direct"))
    environment = {"http_proxy": proxy.url, "HTTPS_PROXY": proxy.url, "ALL_PROXY": proxy.url}
    with make_client(server, environment=environment) as http:
        assert get(http, server) == b"direct"
    assert proxy.requests == []


def test_a_proxy_is_used_for_other_machines_and_sees_no_login_of_theirs(serve: Serve) -> None:
    proxy = serve(make_reply(407))
    environment = {"HTTPS_PROXY": proxy.url.replace("://", "://user:pw@")}
    there = RegistryAddress.parse("registry.example")
    with (
        make_client(environment=environment, attempts=1) as http,
        pytest.raises(UnreachableError, match=r"registry\.example: the proxy refuses"),
    ):
        http.request(RegistryRequest("GET", there, "/v2/"), max_bytes=10)
    [request] = proxy.requests
    assert (request.method, request.target) == ("CONNECT", "registry.example:443")
    assert request.headers["proxy-authorization"] == "Basic dXNlcjpwdw=="
    assert request.login is None
