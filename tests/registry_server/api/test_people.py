import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from registry_server.access.rights import TokenScope
from tests.registry_server.harness import JsonApiClient, RegistryHarness

Clients = Callable[[str | None], JsonApiClient]
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def test_whoami_says_who_and_with_which_token(served: RegistryHarness, asking: Clients) -> None:
    served.create_user("bob")
    ends = time.time() + 3600
    secret = served.create_token("bob", TokenScope.parse("push:acme/sql"), expires=ends)
    status, answer = asking(secret)("GET", "whoami")
    assert status == 200
    token = answer["token"]
    assert (answer["user"], answer["admin"]) == ("bob", False)
    assert (token["name"], token["scopes"]) == ("more", ["push:acme/sql"])
    assert token["expires"] == f"{datetime.fromtimestamp(ends, UTC):%Y-%m-%dT%H:%M:%SZ}"


def test_an_admin_makes_a_user_whose_token_works(boss: JsonApiClient, asking: Clients) -> None:
    status, answer = boss("POST", "users", {"name": "bob"})
    assert status == 201
    assert re.fullmatch(TIME, answer["user"]["created"])
    assert answer["user"] | {"created": ""} == {"name": "bob", "admin": False, "created": ""}
    bob = asking(answer["token"])
    assert bob("GET", "whoami")[1]["user"] == "bob"
    assert bob("GET", "whoami")[1]["token"]["scopes"] == [
        "read",
        "push",
        "delete",
        "yank",
        "manage",
    ]


def test_a_name_is_given_once(boss: JsonApiClient) -> None:
    assert boss("POST", "users", {"name": "bob"})[0] == 201
    assert boss("POST", "users", {"name": "bob"})[0] == 409
    assert boss("DELETE", "users/bob") == (204, {})
    assert boss("POST", "users", {"name": "bob"})[0] == 409
    assert boss("DELETE", "users/bob")[0] == 404


def test_attack_80_the_token_of_a_deleted_user_is_dead(
    boss: JsonApiClient, asking: Clients
) -> None:
    bob = asking(boss("POST", "users", {"name": "bob", "admin": True})[1]["token"])
    session = asking(bob.client.get("/token").json()["token"])
    assert bob("GET", "users")[0] == session("GET", "whoami")[0] == 200
    assert boss("DELETE", "users/bob")[0] == 204
    assert bob("GET", "users")[0] == session("GET", "whoami")[0] == 401


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "users", None),
        ("POST", "users", {"name": "eve", "admin": True}),
        ("DELETE", "users/boss", None),
        ("GET", "audit", None),
        ("POST", "namespaces", {"name": "eve"}),
    ],
)
def test_what_admins_do_is_for_admins(
    served: RegistryHarness,
    boss: JsonApiClient,
    olga: JsonApiClient,
    nobody: JsonApiClient,
    asking: Clients,
    method: str,
    path: str,
    body: object,
) -> None:
    assert nobody(method, path, body)[0] == 401
    assert olga(method, path, body)[0] == 403
    limited = asking(
        served.create_token("boss", *(TokenScope.parse(s) for s in ("read", "manage")))
    )
    assert limited(method, path, body)[0] == 403


def test_users_come_in_pages(boss: JsonApiClient) -> None:
    for name in ("carol", "alice"):
        boss("POST", "users", {"name": name})
    status, first = boss("GET", "users?limit=2")
    assert status == 200
    assert [user["name"] for user in first["users"]] == ["alice", "boss"]
    assert first["next"] == "boss"
    rest = boss("GET", f"users?limit=2&cursor={first['next']}")[1]
    assert [user["name"] for user in rest["users"]] == ["carol"]
    assert rest["next"] is None


def test_the_last_admin_stays(boss: JsonApiClient) -> None:
    status, answer = boss("DELETE", "users/boss")
    assert status == 409
    assert "only admin" in answer["error"]["message"]


def test_a_token_is_shown_once(olga: JsonApiClient) -> None:
    status, made = olga("POST", "tokens", {"name": "ci", "scopes": ["read"], "expires_in": 60})
    assert status == 201
    assert re.fullmatch(r"xpt_[A-Za-z0-9_-]{43}", made["token"])
    assert re.fullmatch(TIME, made["expires"])
    status, listed = olga("GET", "tokens")
    assert status == 200
    assert {"id": made["id"], "name": "ci"}.items() <= next(
        token.items() for token in listed["tokens"] if token["id"] == made["id"]
    )
    assert made["token"] not in str(listed)
    assert all("token" not in token and "hash" not in token for token in listed["tokens"])


def test_tokens_come_in_pages(olga: JsonApiClient) -> None:
    own = {olga("POST", "tokens", {"name": str(n)})[1]["id"] for n in range(3)}
    found: list[str] = []
    cursor = ""
    for _ in range(2):
        page = olga("GET", f"tokens?limit=2&cursor={cursor}")[1]
        found += [token["id"] for token in page["tokens"]]
        cursor = page["next"]
    assert cursor is None
    assert len(found) == 4
    assert own < set(found)


def test_a_token_lives_as_long_as_was_asked(olga: JsonApiClient) -> None:
    made = olga("POST", "tokens", {"name": "t", "expires_in": 3600})[1]
    lives = datetime.fromisoformat(made["expires"]) - datetime.fromisoformat(made["created"])
    assert abs(lives - timedelta(hours=1)) <= timedelta(seconds=30)
    assert olga("POST", "tokens", {"name": "t", "expires_in": None})[1]["expires"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "a" * 101},
        {"name": "t", "scopes": ["fly"]},
        {"name": "t", "scopes": "read"},
        {"name": "t", "scopes": ["read"] * 51},
        {"name": "t", "expires_in": 0},
        {"name": "t", "expires_in": 10**12},
        {"name": "t", "expires_in": "60"},
        {"name": "t", "user": "boss"},
    ],
)
def test_a_token_request_is_read_strictly(olga: JsonApiClient, body: object) -> None:
    assert olga("POST", "tokens", body)[0] == 400


def test_a_token_can_be_for_a_repository_of_many_parts(
    served: RegistryHarness, olga: JsonApiClient
) -> None:
    served.create_namespace("acme", owner="olga")
    wish = {"name": "t", "scopes": ["push:acme/a/b_c.d"]}
    assert olga("POST", "tokens", wish)[1]["scopes"] == ["push:acme/a/b_c.d"]


def test_attack_80_a_narrow_token_mints_no_wider_one(
    served: RegistryHarness, olga: JsonApiClient, asking: Clients
) -> None:
    served.create_namespace("acme", owner="olga")
    narrow = asking(served.create_token("olga", TokenScope.parse("push:acme/sql")))
    for scopes in (["push:acme"], ["push"], ["read"], ["manage:acme"], ["admin"]):
        assert narrow("POST", "tokens", {"name": "t", "scopes": scopes})[0] == 403
    made = narrow("POST", "tokens", {"name": "t"})[1]
    assert made["scopes"] == ["push:acme/sql"]
    assert olga("POST", "tokens", {"name": "t", "scopes": ["admin"]})[0] == 403


def test_attack_80_a_narrow_token_neither_sees_nor_ends_the_others(
    served: RegistryHarness, olga: JsonApiClient, asking: Clients
) -> None:
    other = olga("GET", "tokens")[1]["tokens"][0]["id"]
    narrow = asking(served.create_token("olga", TokenScope.parse("push:acme/sql")))
    assert narrow("GET", "tokens")[0] == 403
    assert narrow("DELETE", f"tokens/{other}")[0] == 404
    own = narrow("GET", "whoami")[1]["token"]["id"]
    assert narrow("DELETE", f"tokens/{own}") == (204, {})
    assert narrow("GET", "whoami")[0] == 401


def test_users_end_their_own_tokens_and_admins_those_of_all(
    boss: JsonApiClient, olga: JsonApiClient, asking: Clients
) -> None:
    made = [olga("POST", "tokens", {"name": "t"})[1] for _ in range(2)]
    eve = asking(boss("POST", "users", {"name": "eve"})[1]["token"])
    assert eve("DELETE", f"tokens/{made[0]['id']}")[0] == 404
    assert eve("DELETE", f"tokens/{'0' * 16}")[0] == 404
    assert olga("DELETE", f"tokens/{made[0]['id']}")[0] == 204
    assert olga("DELETE", f"tokens/{made[0]['id']}")[0] == 404
    assert boss("DELETE", f"tokens/{made[1]['id']}")[0] == 204
    assert [asking(m["token"])("GET", "whoami")[0] for m in made] == [401, 401]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "tokens", None),
        ("POST", "tokens", {"name": "t"}),
        ("DELETE", "tokens/" + "0" * 16, None),
        ("GET", "whoami", None),
    ],
)
def test_tokens_are_for_somebody(
    nobody: JsonApiClient, method: str, path: str, body: object
) -> None:
    assert nobody(method, path, body)[0] == 401


def test_every_change_is_in_the_audit_log_in_pages(boss: JsonApiClient) -> None:
    boss("POST", "users", {"name": "bob"})
    boss("POST", "namespaces", {"name": "acme", "owners": ["bob"]})
    boss("PATCH", "namespaces/acme", {"read": "public"})
    boss("PUT", "namespaces/acme/members/boss", {"role": "publisher"})
    boss("DELETE", "namespaces/acme/members/boss")
    token = boss("POST", "tokens", {"name": "t", "scopes": ["read"]})[1]
    boss("DELETE", f"tokens/{token['id']}")
    boss("POST", "users", {"name": "bob"})
    found: list[tuple[str, str, str]] = []
    cursor = ""
    while cursor is not None:
        status, page = boss("GET", f"audit?limit=3&cursor={cursor}")
        assert status == 200
        found += [(e["action"], e["target"], e["detail"]) for e in page["entries"]]
        assert {e["actor"] for e in page["entries"]} == {"boss"}
        cursor = page["next"]
    assert found[::-1] == [
        ("user.create", "bob", ""),
        ("namespace.create", "acme", "expert, read by token, quota None"),
        ("namespace.change", "acme", "read by public, quota None"),
        ("member.set", "acme", "boss publisher"),
        ("member.remove", "acme", "boss"),
        ("token.create", token["id"], "read"),
        ("token.revoke", token["id"], ""),
        ("change.refused", "/api/v1/users", "POST: 409"),
    ]
