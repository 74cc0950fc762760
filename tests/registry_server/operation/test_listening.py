"""Whom a registry lets in unencrypted."""

from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import UsageError
from registry_server.operation.serve import require_encryption
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
    require_encryption(settings(**given))


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
        require_encryption(settings(**given))
