"""JSON of our own registry, there and back."""

import json

import pytest

from expertctl.errors import ForbiddenError, RegistryError
from expertctl.registry.client import ApiClient
from tests.registry.hostile_registry import Serve, make_client, make_reply, serve

__all__ = ["serve"]


def test_every_method_sends_json_and_reads_json(serve: Serve) -> None:
    server = serve(make_reply(200, b'{"good": true}'))
    with make_client(server) as http:
        api = ApiClient(http, server.address)
        answers = [
            api.get("whoami"),
            api.post("tokens", {"name": "ci"}),
            api.put("/packages/a/b/1.0.0/yank", {"reason": "x"}),
            api.patch("namespaces/a", {"read": "public"}),
            api.delete("tokens/1"),
            api.delete("namespaces/a/keys/1", {"reason": "lost"}),
        ]
    assert answers == [{"good": True}] * 6
    said = [(r.method, r.target, json.loads(r.body) if r.body else None) for r in server.requests]
    assert said == [
        ("GET", "/api/v1/whoami", None),
        ("POST", "/api/v1/tokens", {"name": "ci"}),
        ("PUT", "/api/v1/packages/a/b/1.0.0/yank", {"reason": "x"}),
        ("PATCH", "/api/v1/namespaces/a", {"read": "public"}),
        ("DELETE", "/api/v1/tokens/1", None),
        ("DELETE", "/api/v1/namespaces/a/keys/1", {"reason": "lost"}),
    ]
    assert {r.headers.get("content-type") for r in server.requests} == {None, "application/json"}


def test_no_content_is_an_empty_answer(serve: Serve) -> None:
    server = serve(make_reply(204))
    with make_client(server) as http:
        assert ApiClient(http, server.address).delete("tokens/1") == {}


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"a": 1, "a": 2}', b"\xff", b'{"a": NaN}'])
def test_what_is_not_strict_json_is_named(serve: Serve, body: bytes) -> None:
    server = serve(make_reply(200, body))
    with (
        make_client(server) as http,
        pytest.raises(RegistryError, match="not JSON of an expertctl registry") as caught,
    ):
        ApiClient(http, server.address).get("whoami")
    assert "is that the address" in caught.value.hint


def test_a_refusal_says_what_the_registry_says(serve: Serve) -> None:
    body = b'{"error": {"code": "forbidden", "message": "not an owner", "hint": "ask acme"}}'
    server = serve(make_reply(403, body))
    with make_client(server) as http, pytest.raises(ForbiddenError, match="not an owner") as caught:
        ApiClient(http, server.address).get("namespaces/acme")
    assert caught.value.hint == "ask acme"
