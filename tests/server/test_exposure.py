"""A server for others has keys, and no key crosses a network in clear text."""

from pathlib import Path

import pytest

from expertctl.errors import UsageError
from expertctl.server.settings import ServeSettings, require_secure

TLS = {"certificate": Path("c"), "private_key": Path("k")}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
@pytest.mark.parametrize("keyed", [True, False])
def test_this_machine_needs_neither(host: str, keyed: bool) -> None:
    require_secure(ServeSettings(host=host), keyed=keyed, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "box.local"])
@pytest.mark.parametrize("insecure", [True, False])
def test_nobody_else_is_answered_without_keys(host: str, insecure: bool) -> None:
    with pytest.raises(UsageError, match="no API keys"):
        require_secure(ServeSettings(host=host, **TLS), keyed=False, insecure=insecure)


def test_keys_cross_a_network_encrypted_or_where_that_is_asked_for() -> None:
    with pytest.raises(UsageError, match="clear text") as caught:
        require_secure(ServeSettings(host="0.0.0.0"), keyed=True, insecure=False)
    assert "--tls-cert" in caught.value.hint
    require_secure(ServeSettings(host="0.0.0.0", **TLS), keyed=True, insecure=False)
    require_secure(ServeSettings(host="0.0.0.0"), keyed=True, insecure=True)


def test_a_proxy_before_the_server_lets_others_reach_it() -> None:
    behind = ServeSettings(url="https://experts.example.org")
    with pytest.raises(UsageError, match=r"reach experts\.example\.org, and there are no API keys"):
        require_secure(behind, keyed=False, insecure=True)
    require_secure(behind, keyed=True, insecure=False)
    require_secure(ServeSettings(url="https://localhost:8443"), keyed=False, insecure=False)


def test_a_proxy_that_does_not_encrypt_needs_to_be_asked_for() -> None:
    clear = ServeSettings(url="http://experts.example.org")
    with pytest.raises(UsageError, match="clear text"):
        require_secure(clear, keyed=True, insecure=False)
    require_secure(clear, keyed=True, insecure=True)
