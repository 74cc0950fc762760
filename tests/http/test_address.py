"""Where a server listens, and what of it is there already."""

import socket
from contextlib import closing

import pytest

from expertctl.errors import RegistryError
from expertctl.http.server import ListenAddress, is_answering, is_loopback, reserve_address

HERE = "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a", False)],
)
def test_only_this_machine_reaches_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_port_0_becomes_a_real_one_that_nobody_else_gets() -> None:
    with reserve_address(HERE, 0, secure=False) as address:
        assert address.port > 0
        assert address.url == f"http://127.0.0.1:{address.port}"
        with (
            pytest.raises(OSError, match="in use"),
            closing(socket.socket()) as other,
        ):
            other.bind(("127.0.0.1", address.port))


def test_a_name_is_resolved() -> None:
    with reserve_address("localhost", 0, secure=False) as address:
        assert is_loopback(address.host)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "256.0.0.1"])
def test_an_address_of_somebody_else_is_refused(host: str) -> None:
    refused = pytest.raises(RegistryError, match="cannot listen on")
    with refused, reserve_address(host, 8080, secure=False):
        pass


def test_a_port_in_use_is_refused_even_by_one_that_shares() -> None:
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused = pytest.raises(RegistryError, match="in use")
        with refused, reserve_address(HERE, port, secure=False):
            pass


def test_a_url_has_brackets_around_ipv6() -> None:
    assert ListenAddress("::1", 443, secure=True).url == "https://[::1]:443"


def test_answering_is_accepting_connections() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = ListenAddress("127.0.0.1", server.getsockname()[1], secure=False)
        assert is_answering(address)
    assert not is_answering(address)
