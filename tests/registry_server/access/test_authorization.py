import base64

import pytest
from starlette.datastructures import Headers

from registry_server.access.authentication import MAX_AUTHORIZATION_HEADER, read_secret


def basic(pair: bytes) -> str:
    return f"Basic {base64.b64encode(pair).decode()}"


def secret(*values: str) -> str | None:
    return read_secret(Headers(raw=[(b"authorization", v.encode("latin-1")) for v in values]))


@pytest.mark.parametrize(
    "value",
    [
        "Bearer xpt_abc",
        "bearer xpt_abc",
        "BEARER  xpt_abc ",
        basic(b"alice:xpt_abc"),
        basic(b":xpt_abc"),
        basic(b"alice:xpt_abc").replace("Basic", "basic"),
    ],
)
def test_bearer_and_basic_carry_the_secret(value: str) -> None:
    assert secret(value) == "xpt_abc"


def test_a_password_may_have_colons() -> None:
    assert secret(basic(b"alice:a:b")) == "a:b"


@pytest.mark.parametrize(
    "value",
    [
        "xpt_abc",
        "Token xpt_abc",
        "Digest username=alice",
        "Basic !!!",
        "Basic YWxpY2U",
        basic("alice:é".encode()),
        "Bearer é",
        "Bearer " + "a" * MAX_AUTHORIZATION_HEADER,
        "",
    ],
)
def test_anything_else_carries_none(value: str) -> None:
    assert not secret(value)


@pytest.mark.parametrize("value", ["Bearer", "Bearer ", basic(b"alice:"), basic(b"alice")])
def test_an_empty_secret_is_none(value: str) -> None:
    assert not secret(value)


def test_attack_85_two_headers_carry_none() -> None:
    assert secret("Bearer xpt_abc", "Bearer xpt_abc") is None
    assert secret() is None
