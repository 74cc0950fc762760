"""Which proxy is used for what, and which is not one."""

from pathlib import Path

import httpx2
import pytest

from expertctl.errors import UsageError
from expertctl.registry.address import RegistryAddress
from expertctl.registry.http import RegistryRequest
from expertctl.registry.transport import find_proxy
from tests.registry.hostile_registry import make_client

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://r.example/", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://r.example/", {"https_proxy": PROXY, "HTTPS_PROXY": "http://x"}, PROXY),
        ("https://r.example/", {"ALL_PROXY": PROXY}, PROXY),
        ("http://r.example/", {"HTTPS_PROXY": PROXY}, None),
        ("http://r.example/", {"HTTP_PROXY": PROXY}, PROXY),
        ("https://r.example/", {}, None),
        ("https://127.0.0.1:1/", {"HTTPS_PROXY": PROXY}, None),
        ("https://localhost/", {"ALL_PROXY": PROXY}, None),
        ("https://[::1]/", {"ALL_PROXY": PROXY}, None),
        ("https://r.example/", {"HTTPS_PROXY": PROXY, "NO_PROXY": "r.example"}, None),
        ("https://a.r.example/", {"HTTPS_PROXY": PROXY, "NO_PROXY": "x, .r.example"}, None),
        ("https://a.r.example/", {"HTTPS_PROXY": PROXY, "no_proxy": "*.r.example"}, None),
        ("https://notr.example/", {"HTTPS_PROXY": PROXY, "NO_PROXY": "r.example"}, PROXY),
        ("https://r.example/", {"HTTPS_PROXY": PROXY, "NO_PROXY": "r.example:8443"}, PROXY),
        ("https://r.example:8443/", {"HTTPS_PROXY": PROXY, "NO_PROXY": "r.example:8443"}, None),
        ("https://r.example/", {"HTTPS_PROXY": PROXY, "NO_PROXY": "*"}, None),
        ("https://r.example/", {"HTTPS_PROXY": PROXY, "NO_PROXY": ","}, PROXY),
    ],
)
def test_the_environment_names_proxies_for_other_machines(
    url: str, environment: dict[str, str], proxy: str | None
) -> None:
    assert find_proxy(httpx2.URL(url), environment) == proxy


@pytest.mark.parametrize("proxy", ["socks5://p:1", "http://", "http://[::", "ftp://x"])
def test_what_is_no_http_proxy_is_named(proxy: str) -> None:
    there = RegistryAddress.parse("r.example")
    with (
        make_client(environment={"HTTPS_PROXY": proxy}) as http,
        pytest.raises(UsageError, match="the proxy of the environment"),
    ):
        http.request(RegistryRequest("GET", there, "/"), max_bytes=10)


@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_a_ca_file_without_certificates_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    there = RegistryAddress.parse("r.example")
    with make_client(ca_file=file) as http, pytest.raises(UsageError, match="no certificates"):
        http.request(RegistryRequest("GET", there, "/"), max_bytes=10)
