"""The server as a process: where it listens, how it ends, and that there is one of it."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from expertctl.errors import StoreError, UsageError
from expertctl.http.server import ListenAddress
from registry_server.__main__ import main
from registry_server.operation.serve import DATA_VARIABLE, application, serve
from registry_server.settings import ServerSettings, read_settings, write_settings
from tests.registry_server.operation.server_process import (
    WAIT,
    ServerProcess,
    init_registry_folder,
    run_server,
)

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "registry"
    init_registry_folder(folder)
    return folder


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[ServerProcess]:
    with run_server(data) as server:
        yield server


def never(_: ListenAddress) -> None:
    raise AssertionError("it must not get that far")


def raw(server: ServerProcess, request: bytes) -> bytes:
    """Send bytes and return the answer until the server closes."""
    with server.socket() as connection:
        connection.sendall(request)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def test_it_tells_the_real_port_and_answers_there(server: ServerProcess) -> None:
    assert server.port > 0
    assert server.get("/healthz") == (200, b"ok\n")
    status, body = server.get("/readyz")
    assert (status, json.loads(body)["ready"]) == (200, True)
    assert f"listening on http://127.0.0.1:{server.port}" in server.log.read_text()


def test_the_log_is_one_json_object_a_request(tmp_path: Path) -> None:
    init_registry_folder(tmp_path / "registry")
    with run_server(tmp_path / "registry") as server:
        server.get("/nowhere?token=xpt_" + "a" * 43)
        server.stop()
    lines = [json.loads(x) for x in server.log.read_text().splitlines() if x.startswith("{")]
    (line,) = [x for x in lines if x.get("path") == "/nowhere"]
    assert (line["method"], line["status"], line["user"]) == ("GET", 404, None)
    assert line["address"] == "127.0.0.1"
    assert "xpt_a" not in server.log.read_text()


def test_a_second_server_on_the_same_data_is_refused(data: Path, server: ServerProcess) -> None:
    with pytest.raises(StoreError, match="a server runs on this registry already"):
        serve(read_settings(data), workers=1, insecure=False, report=never)
    assert server.get("/healthz")[0] == 200


def test_a_port_that_another_server_has_is_refused(
    tmp_path: Path, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    init_registry_folder(tmp_path / "other")
    code = main([str(tmp_path / "other"), "--port", str(server.port)])
    said = capsys.readouterr().err
    assert (code, "error: cannot listen on 127.0.0.1:" in said) == (1, True)
    assert "hint: choose another" in said


def test_a_killed_server_leaves_no_lock_and_no_worker_behind(tmp_path: Path) -> None:
    init_registry_folder(tmp_path / "registry")
    with run_server(tmp_path / "registry") as first:
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        with run_server(tmp_path / "registry", "--port", str(first.port)) as second:
            assert second.get("/healthz")[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_0_when_told_to(number: signal.Signals, tmp_path: Path) -> None:
    init_registry_folder(tmp_path / "registry")
    with run_server(tmp_path / "registry") as server:
        server.get("/healthz")
        assert server.stop(number) == 0
    assert "Traceback" not in server.log.read_text()


def test_a_request_that_runs_when_it_is_told_to_end_is_finished(tmp_path: Path) -> None:
    init_registry_folder(tmp_path / "registry")
    head = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n12345"
    with run_server(tmp_path / "registry") as server, server.socket() as connection:
        connection.sendall(head)
        ended = threading.Thread(target=server.stop)
        ended.start()
        await_refusal(server)
        connection.sendall(b"67890")
        assert connection.recv(1000).startswith(b"HTTP/1.1 405")
        ended.join(WAIT)
        assert server.process.returncode == 0


def await_refusal(server: ServerProcess) -> None:
    """Ask for new connections until there are none any more."""
    for _ in range(100_000):
        try:
            server.socket().close()
        except OSError:
            return
    raise AssertionError("the server still listens")


def test_several_workers_count_together(tmp_path: Path) -> None:
    init_registry_folder(tmp_path / "registry")
    with run_server(tmp_path / "registry", "--workers", "2") as server:
        for _ in range(20):
            assert server.get("/healthz")[0] == 200
        status, body = server.get("/metrics")
        assert status == 200
        assert b'requests_total{method="GET",route="/healthz",status="200"} 20.0' in body
        assert server.stop() == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_clear_text_to_others_is_refused(host: str, data: Path) -> None:
    settings = ServerSettings(data=data, host=host, port=0)
    with pytest.raises(UsageError, match="clear text") as caught:
        serve(settings, workers=1, insecure=False, report=never)
    assert "--tls-cert" in caught.value.hint


@pytest.mark.parametrize("workers", [0, -1, 65])
def test_the_number_of_workers_is_bounded(workers: int, data: Path) -> None:
    with pytest.raises(UsageError, match="there can be 1 to 64"):
        serve(read_settings(data), workers=workers, insecure=False, report=never)


def test_a_certificate_that_is_none_is_refused_before_anything_listens(tmp_path: Path) -> None:
    made = init_registry_folder(tmp_path / "registry")
    for name in ("certificate", "key"):
        (tmp_path / name).write_text("nonsense")
    settings = ServerSettings(
        data=made.settings.data,
        port=0,
        certificate=tmp_path / "certificate",
        private_key=tmp_path / "key",
    )
    with pytest.raises(UsageError, match="not a certificate and its key"):
        serve(settings, workers=1, insecure=False, report=never)


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain, secret = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return chain, secret


def test_with_a_certificate_it_speaks_tls_and_nothing_else(tmp_path: Path) -> None:
    init_registry_folder(tmp_path / "registry")
    chain, secret = certificate(tmp_path)
    words = ("--tls-cert", str(chain), "--tls-key", str(secret))
    with run_server(tmp_path / "registry", *words) as server:
        context = ssl.create_default_context(cafile=str(chain))
        with (
            server.socket() as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(
                b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert f"listening on https://127.0.0.1:{server.port}" in server.log.read_text()
        with server.socket() as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" not in plain.recv(1000)
        assert server.stop() == 0


@pytest.mark.parametrize(
    "request_",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n",
        b"Content-Length: 4\r\nContent-Length: 6\r\n\r\nabcdef",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: +4\r\n\r\nabcd",
        b"X: a\r\n b\r\n\r\n",
    ],
    ids=["both", "two lengths", "two encodings", "unknown encoding", "signed", "folded"],
)
def test_a_request_with_two_readings_is_not_read_twice(
    request_: bytes, server: ServerProcess
) -> None:
    """Attack 85, request smuggling: at most one answer, then the connection ends."""
    head = b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = raw(server, head + request_)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.split()[1] in {b"400", b"405"}


def test_huge_headers_are_refused(server: ServerProcess) -> None:
    """Attack 85."""
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    assert raw(server, head + b"X: " + b"a" * 40_000 + b"\r\n\r\n").split()[1] == b"431"
    assert raw(server, head + b"X: y\r\n" * 200 + b"\r\n")[:13].split()[1] in {b"431", b"400"}
    assert server.get("/healthz")[0] == 200


def test_a_foreign_host_is_refused_and_never_shown_in_an_answer(server: ServerProcess) -> None:
    """Attack 85, host poisoning and DNS rebinding."""
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::2]"):
        answer = raw(
            server,
            b"GET /v2/ HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host.encode(),
        )
        assert answer.split()[1] == b"421"
        assert host.encode() not in answer


def test_forwarded_headers_of_strangers_change_nothing(server: ServerProcess) -> None:
    """Attack 85, X-Forwarded-* trust."""
    strange = {"X_Forwarded_Host": "evil.example", "X_Forwarded_Proto": "https"}
    status, body = server.get("/v2/", **strange, Forwarded="host=evil.example")
    assert (status, b"evil" in body) == (401, False)


def test_a_rebound_websocket_gets_nothing(server: ServerProcess) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with server.socket() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + upgrade + key + b"\r\n")
        assert b" 101 " not in connection.recv(1000)


def test_the_application_runs_under_uvicorn_too(tmp_path: Path) -> None:
    init_registry_folder(tmp_path / "registry")
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        command = [sys.executable, "-m", "uvicorn", "--factory", "--log-level", "critical"]
        command += ["--fd", str(listener.fileno()), "registry_server.operation.serve:application"]
        process = subprocess.Popen(
            command,
            pass_fds=[listener.fileno()],
            env={**os.environ, DATA_VARIABLE: str(tmp_path / "registry")},
            stderr=subprocess.DEVNULL,
        )
        server = ServerProcess(process, listener.getsockname()[1], tmp_path / "none")
        try:
            assert server.get("/healthz") == (200, b"ok\n")
            with pytest.raises(StoreError, match="a server runs"):
                serve(read_settings(tmp_path / "registry"), workers=1, insecure=False, report=never)
            assert server.stop() in {0, -signal.SIGTERM}
        finally:
            process.kill()
            process.wait()


def test_the_application_wants_a_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(UsageError, match="EXPERT_REGISTRY_DATA is not set"):
        application()


def test_the_application_holds_the_lock_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_registry_folder(tmp_path / "registry")
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "registry"))
    app = application()
    try:
        with pytest.raises(StoreError, match="a server runs"):
            application()
    finally:
        app.state.lock.close()
        app.state.registry.close()


def test_the_module_serves_like_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    assert "there is no registry here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0


def test_a_registry_without_its_key_is_told_before_anything_listens(tmp_path: Path) -> None:
    made = init_registry_folder(tmp_path / "registry", port=0)
    made.settings.index_key.unlink()
    write_settings(made.settings)
    with pytest.raises(StoreError, match="index key"):
        serve(made.settings, workers=1, insecure=False, report=never)
