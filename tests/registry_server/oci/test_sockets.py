"""What only a real server under granian can show: broken connections, files, raw paths, kills."""

import hashlib
import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from registry_server.operation.new_registry import init_registry
from registry_server.registry import open_registry
from registry_server.settings import ServerSettings
from tests.registry_server.oci.images import compute_digest, encode_json, make_image, random_bytes
from tests.registry_server.operation.server_process import ServerProcess, run_server

pytestmark = pytest.mark.all

DATA = random_bytes(5_000_000)
DIGEST = compute_digest(DATA)


@dataclass(frozen=True)
class SocketRegistry:
    """A server with the OCI namespace `acme`, and an admin's client."""

    running: ServerProcess
    client: httpx2.Client
    data: Path
    token: str

    def raw(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.running.port, timeout=60)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SocketRegistry]:
    data = tmp_path_factory.mktemp("live") / "registry"
    made = init_registry(ServerSettings(data=data))
    with run_server(data) as server, _client(server, made.token) as client:
        answer = client.post("/api/v1/namespaces", json={"name": "acme", "kind": "oci"})
        assert answer.status_code == 201, answer.text
        assert push(client, DATA) == 201
        yield SocketRegistry(server, client, data, made.token)


def _client(server: ServerProcess, token: str) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=60)


def push(client: httpx2.Client, data: bytes, repository: str = "acme/x") -> int:
    query = {"digest": compute_digest(data)}
    answer = client.post(f"/v2/{repository}/blobs/uploads/", params=query, content=data)
    return answer.status_code


def test_a_file_sent_by_its_path_is_the_blob(live: SocketRegistry) -> None:
    answer = live.client.get(f"/v2/acme/x/blobs/{DIGEST}")
    assert (answer.status_code, compute_digest(answer.content)) == (200, DIGEST)
    assert answer.headers["Content-Length"] == str(len(DATA))


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 5_000_000), (1_048_576, 3_145_729)])
def test_a_part_of_a_file_is_that_part(live: SocketRegistry, start: int, stop: int) -> None:
    headers = {"Range": f"bytes={start}-{stop - 1}"}
    answer = live.client.get(f"/v2/acme/x/blobs/{DIGEST}", headers=headers)
    assert (answer.status_code, answer.content == DATA[start:stop]) == (206, True)
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"


def test_an_empty_blob_can_be_sent(live: SocketRegistry) -> None:
    assert push(live.client, b"") == 201
    answer = live.client.get(f"/v2/acme/x/blobs/{compute_digest(b'')}")
    assert (answer.status_code, answer.content) == (200, b"")


def test_head_of_a_blob_sends_no_bytes_and_keeps_the_connection(live: SocketRegistry) -> None:
    with closing(live.raw()) as connection:
        headers = {"Authorization": f"Bearer {live.token}"}
        for _ in range(2):
            connection.request("HEAD", f"/v2/acme/x/blobs/{DIGEST}", headers=headers)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
            assert answer.headers["Content-Length"] == str(len(DATA))


@pytest.mark.parametrize(
    "path",
    [
        "/v2//acme/x/manifests/v1",
        "/v2/acme//x/manifests/v1",
        "/v2/acme%2fx/manifests/v1",
        "/v2/acme%2Fx/tags/list",
        "/v2/acme/x%2f..%2fy/tags/list",
        "/v2/acme/../acme/x/tags/list",
        "/v2/acme/x/../../other/tags/list",
        "/v2/acme/x;a=b/tags/list",
        "/v2/acme/%78/tags/list",
        "/v2/acme/x%00/tags/list",
        "/v2/acme/x/blobs/sha256:%2e%2e%2f%2e%2e%2fregistry.db",
        "/v2/acme\\x/tags/list",
        "/v2/%2e%2e/%2e%2e/etc/passwd",
        "/V2/acme/x/tags/list",
    ],
)
def test_a_path_has_one_reading(live: SocketRegistry, path: str) -> None:
    with closing(live.raw()) as connection:
        headers = {"Authorization": f"Bearer {live.token}"}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    assert answer.status in {400, 404}
    assert b"registry.db" not in body.replace(path.encode(), b"")


def begin(live: SocketRegistry) -> str:
    return str(live.client.post("/v2/acme/x/blobs/uploads/").headers["Location"])


def send_part(live: SocketRegistry, path: str, announced: str, part: bytes) -> None:
    """Send the beginning of a PATCH and break the connection."""
    head = (
        f"PATCH {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {live.token}\r\n{announced}\r\n\r\n"
    )
    with live.running.socket() as connection:
        connection.sendall(head.encode() + part)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)


def offset_when_free(live: SocketRegistry, path: str, content: bytes) -> httpx2.Response:
    """Go on behind what was kept, as a client does: ask again while the old request ends."""
    for _ in range(1000):
        last = int(live.client.get(path).headers["Range"].removeprefix("0-"))
        start = last + 1 if last else 0
        headers = {"Content-Range": f"{start}-{len(content) - 1}"}
        answer = live.client.patch(path, content=content[start:], headers=headers)
        if answer.status_code not in {409, 416}:
            return answer
    raise AssertionError("the upload never became free")


@pytest.mark.parametrize(
    "announced",
    ["Content-Length: 4000000", "Transfer-Encoding: chunked"],
    ids=["length", "chunked"],
)
def test_an_upload_goes_on_where_the_connection_broke(live: SocketRegistry, announced: str) -> None:
    content, path = random_bytes(4_000_000, announced), begin(live)
    part = content[:2_500_000]
    sent = part if "Length" in announced else b"2625A0\r\n" + part
    send_part(live, path, announced, sent)
    assert offset_when_free(live, path, content).status_code == 202
    done = live.client.put(path, params={"digest": compute_digest(content)})
    assert done.status_code == 201
    assert live.client.get(done.headers["Location"]).content == content


@pytest.mark.parametrize("announced", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_body_that_was_cut_off_is_no_blob(live: SocketRegistry, announced: str) -> None:
    """The bytes that came have the digest; but the request was not whole."""
    part = random_bytes(700, announced)
    sent = part if "Length" in announced else b"2BC\r\n" + part + b"\r\n"
    path = f"/v2/acme/cut/blobs/uploads/?digest={compute_digest(part)}"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {live.token}\r\n{announced}\r\n\r\n"
    )
    with live.running.socket() as connection:
        connection.sendall(head.encode() + sent)
        connection.shutdown(socket.SHUT_WR)
        assert b" 201 " not in connection.recv(1000)
    assert live.client.head(f"/v2/acme/cut/blobs/{compute_digest(part)}").status_code == 404


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/v2/acme/x/manifests/v1"), ("POST", "/api/v1/users")]
)
def test_a_body_of_no_chunks_is_the_fault_of_who_sent_it(
    live: SocketRegistry, method: str, path: str
) -> None:
    with live.running.socket() as client:
        client.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Authorization: Bearer {live.token}\r\nContent-Type: application/json\r\n"
            "Transfer-Encoding: chunked\r\n\r\nno length\r\n".encode()
        )
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    assert "traceback" not in live.running.log.read_text()


def test_two_lengths_are_no_request(live: SocketRegistry) -> None:
    path = begin(live)
    head = (
        f"PATCH {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {live.token}\r\n"
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v2/ HTTP/1.1\r\n\r\n"
    )
    with live.running.socket() as connection:
        connection.sendall(head.encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 200") == 0


@pytest.mark.parametrize("after", [1, 7, 20])
def test_an_acknowledged_push_outlives_a_kill_and_nothing_partial_does(
    tmp_path: Path, after: int
) -> None:
    data = tmp_path / "registry"
    made = init_registry(ServerSettings(data=data))
    with run_server(data) as server, _client(server, made.token) as client:
        client.post("/api/v1/namespaces", json={"name": "acme", "kind": "oci"})
        acknowledged = _killed_while_pushing(server, client, after)
    stored = _whole_blobs(data)
    with run_server(data) as server, _client(server, made.token) as client:
        for digest in acknowledged:
            assert client.get(f"/v2/acme/x/manifests/{digest}").status_code == 200
        for tag in client.get("/v2/acme/x/tags/list").json()["tags"]:
            manifest = client.get(f"/v2/acme/x/manifests/{tag}").json()
            assert manifest["config"]["digest"] in stored
        assert push(client, DATA) == 201
    assert len(acknowledged) >= after


def _killed_while_pushing(server: ServerProcess, client: httpx2.Client, after: int) -> list[str]:
    """Let three push at once, kill the server at the acknowledgement with this number."""
    acknowledged: list[str] = []
    enough = threading.Event()

    def pusher(name: int) -> None:
        with suppress(httpx2.TransportError):
            for number in range(10_000):
                acknowledged.append(_push_image(client, f"v{name}-{number}"))
                if len(acknowledged) >= after:
                    enough.set()

    threads = [threading.Thread(target=pusher, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    assert enough.wait(60)
    server.stop(signal.SIGKILL)
    for thread in threads:
        thread.join()
    return acknowledged


def _push_image(client: httpx2.Client, tag: str) -> str:
    config = json.dumps({"tag": tag}).encode()
    assert push(client, config) == 201
    document = make_image(compute_digest(config))
    headers = {"Content-Type": document["mediaType"]}
    path = f"/v2/acme/x/manifests/{tag}"
    answer = client.put(path, content=encode_json(document), headers=headers)
    assert answer.status_code == 201
    return str(answer.headers["Docker-Content-Digest"])


def _whole_blobs(data: Path) -> set[str]:
    """Every blob that lies there, each of which has its digest and its row its file."""
    registry = open_registry(ServerSettings(data=data))
    registry.check_integrity()
    registry.close()
    for blob in (data / "blobs").glob("*/*/*"):
        assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
    return {f"sha256:{blob.name}" for blob in (data / "blobs").glob("*/*/*")}
