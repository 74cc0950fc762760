"""The token endpoint, as container clients use it."""

import base64
import json

import pytest

from registry_server.access.rights import TokenScope
from tests.registry_server.harness import RegistryHarness


def granted(served: RegistryHarness, secret: str | None, *scopes: str) -> list[str]:
    """The scopes of the session that is given for what is asked."""
    answer = served.client(secret).get("/token", params={"scope": list(scopes), "service": "x"})
    assert answer.status_code == 200
    payload = answer.json()["token"].removeprefix("xps_").partition(".")[0]
    fields = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return list(fields[1])


@pytest.fixture
def bob(served: RegistryHarness) -> str:
    """A publisher of ``acme``; ``other`` is private, ``open`` is public."""
    secret = served.create_user("bob")
    served.create_user("olga")
    served.create_namespace("acme", owner="olga", publisher="bob")
    served.create_namespace("other", owner="olga")
    served.create_namespace("open", read="public", owner="olga")
    return secret


def test_the_answer_is_what_the_protocol_says(served: RegistryHarness, bob: str) -> None:
    answer = served.client(bob).get("/token")
    body = answer.json()
    assert set(body) == {"token", "access_token", "expires_in", "issued_at"}
    assert body["token"] == body["access_token"]
    assert body["expires_in"] == 300
    assert body["issued_at"].endswith("Z")
    assert answer.headers["cache-control"] == "no-store"


def test_a_session_is_for_what_was_asked_and_is_allowed(served: RegistryHarness, bob: str) -> None:
    asked = ["repository:acme/sql:pull,push,delete", "repository:other/x:pull,push"]
    assert granted(served, bob, *asked) == ["push:acme/sql", "read:acme/sql", "read:other/x"]
    assert granted(served, bob, " ".join(asked)) == granted(served, bob, *asked)
    assert granted(served, bob) == []


def test_a_session_never_has_more_than_the_token(served: RegistryHarness, bob: str) -> None:
    narrow = served.create_token("bob", TokenScope.parse("push:acme/sql"))
    asked = ["repository:acme/sql:pull,push", "repository:acme/x:pull,push"]
    assert granted(served, narrow, *asked) == ["push:acme/sql", "read:acme/sql"]


def test_attack_86_what_is_not_allowed_and_what_is_not_there_look_the_same(
    served: RegistryHarness, bob: str
) -> None:
    narrow = served.create_token("bob", TokenScope.parse("push:acme/sql"))
    for secret in (narrow, None):
        assert granted(served, secret, "repository:other/x:pull") == []
        assert granted(served, secret, "repository:absent/x:pull") == []


def test_nobody_gets_a_session_for_public_reading(served: RegistryHarness, bob: str) -> None:
    assert granted(served, None, "repository:open/x:pull,push") == ["read:open/x"]
    session = served.client().get("/token", params={"scope": "repository:open/x:pull"}).json()
    assert served.client(session["token"]).get("/api/v1/whoami").status_code == 401


def test_a_session_does_what_it_is_for_and_no_more(served: RegistryHarness, bob: str) -> None:
    scope = {"scope": "repository:acme/sql:pull,push"}
    session = served.client(served.client(bob).get("/token", params=scope).json()["token"])
    assert session.get("/v2/").status_code == 200
    assert session.post("/v2/acme/sql/blobs/uploads/").status_code == 202
    assert session.post("/v2/acme/other/blobs/uploads/").status_code == 403
    assert session.get("/api/v1/tokens").status_code == 403
    assert session.post("/api/v1/tokens", json={"name": "t", "scopes": ["push"]}).status_code == 403


def test_attack_80_a_session_cannot_be_prolonged(served: RegistryHarness, bob: str) -> None:
    """Nor can a token that is minted with it outlive it."""
    first = served.client(bob).get("/token", params={"scope": "repository:acme/sql:push"}).json()
    session = served.client(first["token"])
    ends = session.get("/api/v1/whoami").json()["token"]["expires"]
    again = session.get("/token", params={"scope": "repository:acme/sql:push"}).json()
    second = served.client(again["token"])
    assert second.get("/api/v1/whoami").json()["token"]["expires"] == ends
    made = session.post("/api/v1/tokens", json={"name": "t", "scopes": ["push:acme/sql"]})
    assert made.status_code == 201
    assert made.json()["expires"] == ends


def test_too_much_is_not_looked_at(served: RegistryHarness, bob: str) -> None:
    answer = served.client(bob).get("/token", params={"scope": ["repository:a/b:pull"] * 51})
    assert answer.status_code == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_only_get_is_answered(served: RegistryHarness, method: str) -> None:
    answer = served.client().request(method, "/token")
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]
