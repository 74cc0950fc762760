"""Where a server listens, and whom it lets in unencrypted."""

import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import RegistryError, UsageError
from registry_server.operation.listening import (
    Listening,
    demand_secure,
    held_address,
    is_answering,
    is_loopback,
)
from registry_server.settings import ServerSettings


def settings(**given: Any) -> ServerSettings:
    return ServerSettings(data=Path("/nowhere"), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"host": "127.0.0.1"},
        {"host": "127.8.8.8"},
        {"host": "::1"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "certificate": Path("c"), "private_key": Path("k")},
        {"host": "0.0.0.0", "url": "https://experts.example.org"},
        {"host": "10.0.0.5", "trusted_proxies": ("10.0.0.0/8",)},
    ],
)
def test_tokens_may_travel_where_nobody_reads_them(given: dict[str, Any]) -> None:
    demand_secure(settings(**given))


@pytest.mark.parametrize(
    "given",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "192.0.2.1"},
        {"host": "registry.local"},
        {"host": "0.0.0.0", "url": "http://experts.example.org"},
        {"host": "localhost.example"},
    ],
)
def test_tokens_may_not_cross_a_network_in_clear_text(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="in clear text"):
        demand_secure(settings(**given))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a", False)],
)
def test_only_this_machine_reaches_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_port_0_becomes_a_real_one_that_nobody_else_gets() -> None:
    with held_address(settings(port=0)) as address:
        assert address.port > 0
        assert address.url == f"http://127.0.0.1:{address.port}"
        with (
            pytest.raises(OSError, match="in use"),
            closing(socket.socket()) as other,
        ):
            other.bind(("127.0.0.1", address.port))


def test_a_name_is_resolved() -> None:
    with held_address(settings(port=0, host="localhost")) as address:
        assert is_loopback(address.host)


@pytest.mark.parametrize(
    "given", [{"host": "192.0.2.1"}, {"host": "no-such-host.invalid"}, {"host": "256.0.0.1"}]
)
def test_an_address_of_somebody_else_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RegistryError, match="cannot listen on"), held_address(settings(**given)):
        pass


def test_a_port_in_use_is_refused_even_by_one_that_shares() -> None:
    with closing(socket.socket()) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RegistryError, match="in use"), held_address(settings(port=port)):
            pass


def test_a_url_has_brackets_around_ipv6() -> None:
    assert Listening("::1", 443, secure=True).url == "https://[::1]:443"


def test_answering_is_accepting_connections() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = Listening("127.0.0.1", server.getsockname()[1], secure=False)
        assert is_answering(address)
    assert not is_answering(address)
