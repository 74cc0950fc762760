"""Addresses of registries: one reading, and what it takes to be the same one."""

import pytest

from expertctl.errors import UsageError
from expertctl.reference import is_loopback
from expertctl.registry.address import RegistryAddress, looks_numeric


@pytest.mark.parametrize(
    ("text", "url", "host", "folder"),
    [
        ("r.example", "https://r.example", "r.example", "r.example"),
        ("R.EXAMPLE:443", "https://r.example", "r.example", "r.example"),
        ("https://r.example/", "https://r.example", "r.example", "r.example"),
        ("r.example:8443", "https://r.example:8443", "r.example:8443", "r.example+8443"),
        ("127.0.0.1:8080", "http://127.0.0.1:8080", "127.0.0.1:8080", "127.0.0.1+8080"),
        ("localhost", "http://localhost", "localhost:80", "localhost+80"),
        ("https://localhost:8443", "https://localhost:8443", "localhost:8443", "localhost+8443"),
        ("[::1]:8080", "http://[::1]:8080", "[::1]:8080", "++1+8080"),
        ("[0:0::1]", "http://[::1]", "[::1]:80", "++1+80"),
    ],
)  # fmt: skip
def test_an_address_is_scheme_host_and_port(text: str, url: str, host: str, folder: str) -> None:
    address = RegistryAddress.parse(text)
    assert (address.url, address.host, address.folder) == (url, host, folder)
    assert str(address) == host
    assert RegistryAddress.parse(address.url) == address


def test_the_same_host_over_http_is_another_registry() -> None:
    plain = RegistryAddress.parse("http://r.example", allow_http=True)
    assert plain != RegistryAddress.parse("r.example")
    assert plain.host == "r.example:80"


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "r.example/path", "https://r.example/v2", "https://user:pw@r.example",
        "r.example?x",
        "r.example#x", "ftp://r.example", "r.example:0", "r.example:65536", "r.example:99999",
        "r.example:", "-r.example", "r-.example", "r..example", ".r.example", "r_.example",
        "r.example\n", " r.example", "r.exam ple", "rëgistry.example", "[::1",
        "[::z]", "[1]", "[1:2:3]",
        "r.example\\@evil.example", "a" * 300, "\x1b[31mr.example",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        RegistryAddress.parse(text, allow_http=True)


def test_another_machine_is_not_spoken_to_unencrypted_unless_that_is_allowed() -> None:
    with pytest.raises(UsageError, match="unencrypted"):
        RegistryAddress.parse("http://r.example")
    assert RegistryAddress.parse("http://r.example", allow_http=True).scheme == "http"


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("a.localhost", True), ("127.1.2.3", True), ("::1", True),
     ("localhost.example", False), ("10.0.0.1", False), ("notlocalhost", False)],
)  # fmt: skip
def test_loopback_is_told_by_name(host: str, local: bool) -> None:
    assert is_loopback(host) is local
    assert RegistryAddress("r.example", 443, "https").is_loopback is False


@pytest.mark.parametrize(
    ("host", "numeric"),
    [("169.254.169.254", True), ("2852039166", True), ("0xa9fea9fe", True), ("0x7f.1", True),
     ("1.2.3.4.", True), ("fe80::1", True), ("r.example", False), ("1.example", False)],
)  # fmt: skip
def test_an_address_is_seen_in_every_writing(host: str, numeric: bool) -> None:
    assert looks_numeric(host) is numeric


@pytest.mark.parametrize("text", ["https://me:pa55word@hub.example", "me:pa55word@hub.example"])
def test_a_password_in_an_address_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError, match="contains no login") as refused:
        RegistryAddress.parse(text)
    assert "pa55word" not in refused.value.message + refused.value.hint
