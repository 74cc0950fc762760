import logging
import re
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import anyio
import pytest
from sqlalchemy import text
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from expertctl.http.log import JsonFormatter
from registry_server.access import accounts, rights
from registry_server.access.authentication import AuthenticationMiddleware, RefusalLog
from registry_server.access.rights import Identity
from registry_server.app import build_error_response
from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import URL, RegistryHarness, open_harness

WHOAMI = "/api/v1/whoami"
CHALLENGES = {
    f'Bearer realm="{URL}/token",service="127.0.0.1:8080"',
    'Basic realm="expertctl registry"',
}


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket fills again during a test, however slow the machine is."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, time=time.time)
    monkeypatch.setattr("registry_server.access.authentication.time", clock)


def basic(name: str, secret: str) -> dict[str, str]:
    pair = b64encode(f"{name}:{secret}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def client_at(served: RegistryHarness, address: str) -> TestClient:
    client = TestClient(served.app, base_url=URL, client=(address, 4711))
    served.clients.append(client)
    return client


@pytest.mark.parametrize("header", [bearer, lambda s: basic("bob", s), lambda s: basic("", s)])
@pytest.mark.parametrize("path", [WHOAMI, "/v2/", "/token", "/api/v1/search"])
def test_bearer_and_basic_are_taken_everywhere(
    served: RegistryHarness, path: str, header: Callable[[str], dict[str, str]]
) -> None:
    secret = served.create_user("bob")
    assert served.client().get(path, headers=header(secret)).status_code == 200


@pytest.mark.parametrize("path", [WHOAMI, "/v2/", "/token", "/api/v1/search", "/api/v1/"])
@pytest.mark.parametrize("value", ["Bearer xpt_" + "A" * 43, "Bearer x", "Basic !", "", "x"])
def test_attack_80_a_wrong_token_is_refused_even_where_none_is_needed(
    served: RegistryHarness, path: str, value: str
) -> None:
    answer = served.client().get(path, headers={"Authorization": value})
    assert answer.status_code == 401
    assert set(answer.headers.get_list("www-authenticate")) == CHALLENGES
    assert "wrong, expired or revoked" in answer.text


def test_attack_80_without_a_token_one_is_nobody(served: RegistryHarness) -> None:
    answer = served.client().get(WHOAMI)
    assert answer.status_code == 401
    assert set(answer.headers.get_list("www-authenticate")) == CHALLENGES
    assert answer.json()["error"]["code"] == "unauthenticated"


def test_basic_with_neither_name_nor_secret_is_nobody(served: RegistryHarness) -> None:
    served.create_user("alice")
    served.create_namespace("open", owner="alice", read="public")
    served.create_namespace("shut", owner="alice")
    empty = served.client()
    assert empty.get("/v2/open/x/referrers/sha256:" + "0" * 64, headers=basic("", "")).is_success
    for path in ("/v2/", "/v2/shut/x/tags/list", WHOAMI):
        assert empty.get(path, headers=basic("", "")).status_code == 401


def test_an_empty_login_is_no_login(served: RegistryHarness) -> None:
    """Basic without a name and a secret, as skopeo sends it where it has none."""
    assert served.client().get("/api/v1/", headers=basic("", "")).status_code == 200
    assert served.client().get(WHOAMI, headers=basic("", "")).status_code == 401


def test_attack_80_an_expired_token_is_refused(served: RegistryHarness) -> None:
    served.create_user("bob")
    secret = served.create_token("bob", expires=time.time() - 1)
    assert served.client(secret).get(WHOAMI).status_code == 401


def test_attack_80_a_token_that_is_revoked_between_two_requests(served: RegistryHarness) -> None:
    secret = served.create_user("bob")
    client = served.client(secret)
    assert client.get(WHOAMI).status_code == 200
    with served.registry.database.write() as connection:
        accounts.revoke_token(connection, served.authenticate(secret).token_id or "")
    assert client.get(WHOAMI).status_code == 401


def test_attack_80_cookies_name_nobody_and_none_are_set(served: RegistryHarness) -> None:
    """So no other site can make a browser act for its user, and no session can be fixed."""
    secret = served.create_user("boss", admin=True)
    for name in ("token", "session", "Authorization", "access_token"):
        answer = served.client().get(WHOAMI, headers={"Cookie": f"{name}={secret}"})
        assert answer.status_code == 401
    body = {"name": "eve"}
    headers = {"Cookie": f"token={secret}"}
    assert served.client().post("/api/v1/users", json=body, headers=headers).status_code == 401
    for path in ("/", WHOAMI, "/token", "/v2/", "/api/v1/"):
        answer = served.client(secret).get(path)
        assert "set-cookie" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


def test_attack_80_a_form_of_another_site_changes_nothing(served: RegistryHarness) -> None:
    """What a form can send without asking is no JSON, and is refused even with a token."""
    secret = served.create_user("boss", admin=True)
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = served.client(secret).post(
            "/api/v1/users", content=b'{"name": "eve"}', headers={"Content-Type": media_type}
        )
        assert answer.status_code == 415


@pytest.mark.parametrize("name", ["token", "access_token", "authorization", "Authorization"])
def test_attack_80_a_token_in_the_url_names_nobody(served: RegistryHarness, name: str) -> None:
    secret = served.create_user("bob")
    answer = served.client().get(WHOAMI, params={name: secret})
    assert answer.status_code == 401
    assert secret not in answer.text


def test_attack_80_no_secret_is_in_a_log_or_an_answer(
    served: RegistryHarness, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    boss = served.create_user("boss", admin=True)
    client = served.client()
    session = client.get("/token", headers=bearer(boss)).json()["token"]
    wrong = "xpt_" + "Z" * 43
    texts = []
    for secret in (boss, session, wrong):
        for path in (
            WHOAMI,
            "/api/v1/users",
            f"/api/v1/search?q={secret}",
            "/v2/",
            f"/v2/{secret}/x",
        ):
            for headers in (bearer(secret), basic("boss", secret), {"Referer": f"/{secret}"}):
                texts.append(client.get(path, headers=headers).text)
    made = client.post("/api/v1/tokens", json={"name": "ci"}, headers=bearer(boss)).json()["token"]
    texts.append(client.get("/api/v1/audit", headers=bearer(boss)).text)
    own = [JsonFormatter().format(r) for r in caplog.records if r.name.startswith("registry")]
    logged = "".join([*own, *capfd.readouterr()])
    assert logged
    for secret in (boss, session, wrong, made):
        assert secret not in logged
        assert secret not in "".join(texts)


def test_attack_80_guessing_is_slowed_down_by_address(make_registry: NewRegistry) -> None:
    served = make_registry(failures_per_minute=3)
    attacker = client_at(served, "192.0.2.7")
    guesses = [f"xpt_{chr(65 + number) * 43}" for number in range(20)]
    statuses = [attacker.get(WHOAMI, headers=bearer(secret)).status_code for secret in guesses]
    assert statuses == [401] * 15 + [429] * 5
    answer = attacker.get(WHOAMI, headers=bearer(guesses[0]))
    assert 0 < int(answer.headers["retry-after"]) <= 4
    assert "too many failed logins" in answer.json()["error"]["message"]
    assert attacker.get("/api/v1/").status_code == 200
    other = client_at(served, "192.0.2.8")
    assert other.get(WHOAMI, headers=bearer(guesses[0])).status_code == 401


def test_attack_113_a_right_token_gets_through_whatever_else_its_address_sends(
    make_registry: NewRegistry,
) -> None:
    served = make_registry(failures_per_minute=2, requests_per_minute=20)
    good, office = served.create_user("bob"), client_at(served, "192.0.2.7")
    statuses = [
        office.get(WHOAMI, headers=bearer(f"xpt_{chr(65 + n) * 43}")).status_code for n in range(40)
    ]
    assert statuses == [401] * 10 + [429] * 30
    assert office.get(WHOAMI, headers=bearer(good)).status_code == 200
    session = office.get("/token", headers=basic("bob", good)).json()["token"]
    assert office.get("/v2/", headers=bearer(session)).status_code == 200
    assert office.get("/api/v1/search").status_code == 200  # nor does it silence who has none


def test_a_machine_with_an_old_token_does_not_silence_others_at_its_address(
    make_registry: NewRegistry,
) -> None:
    served = make_registry(failures_per_minute=2)
    office = client_at(served, "192.0.2.7")
    forgotten, mistyped = "xpt_" + "A" * 43, "xpt_" + "B" * 43
    statuses = [office.get(WHOAMI, headers=bearer(forgotten)).status_code for _ in range(30)]
    assert statuses == [401] * 2 + [429] * 28
    assert office.get(WHOAMI, headers=bearer(mistyped)).status_code == 401


def test_attack_113_a_wrong_token_costs_no_read_unless_it_may_be_ours(
    make_registry: NewRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = make_registry(failures_per_minute=1000)
    client, database = served.client(), type(served.registry.database)
    reads: list[str] = []
    read = database.read
    monkeypatch.setattr(database, "read", lambda self: (reads.append("read"), read(self))[1])
    for secret in ("xpt_", "password", "xps_a.b", "xpt_" + "A" * 42, "xpt_" + "A" * 44, "x" * 9000):
        assert client.get(WHOAMI, headers=bearer(secret)).status_code == 401
    assert reads == []
    assert client.get(WHOAMI, headers=bearer("xpt_" + "A" * 43)).status_code == 401
    assert reads == ["read"] * 2


def audited(served: RegistryHarness, action: str) -> list[tuple[object, ...]]:
    with served.registry.database.read() as connection:
        found = [e for e in rights.list_audit_rows(connection, limit=100) if e.action == action]
    return [(e.actor, e.address, e.target, e.detail) for e in reversed(found)]


def test_a_failed_login_leaves_a_row_without_the_secret(served: RegistryHarness) -> None:
    client = client_at(served, "192.0.2.7")
    for headers in (
        bearer("xpt_" + "Ab-_" * 10 + "xyz"),
        basic("bob", "hunter2"),
        {"Authorization": "Basic !"},
    ):
        assert client.get(WHOAMI, headers=headers).status_code == 401
    assert audited(served, "login.refused") == [
        (None, "192.0.2.7", "xpt_Ab-_Ab-_", ""),
        (None, "192.0.2.7", "not a token of this registry", ""),
    ]
    assert client.get(WHOAMI).status_code == 401  # asked without a login, as clients begin
    assert len(audited(served, "login.refused")) == 2


def test_attack_113_failed_logins_do_not_fill_the_audit_log(
    make_registry: NewRegistry,
) -> None:
    served = make_registry(failures_per_minute=10**6)
    client = client_at(served, "192.0.2.7")
    for number in range(50):
        client.get(WHOAMI, headers=bearer(f"xpt_{number:08}" + "A" * 35))
    assert len(audited(served, "login.refused")) == 20


def test_what_was_not_written_down_is_counted(served: RegistryHarness) -> None:
    now = [0.0]
    refusals = RefusalLog(served.registry.database, lambda: now[0])
    for number in range(25):
        refusals.record_failed_login("192.0.2.7", f"xpt_{number:08}")
    now[0] = 60.0
    refusals.record_failed_login("192.0.2.7", "xpt_later")
    rows = audited(served, "login.refused")
    assert len(rows) == 21
    assert rows[-1][3] == "5 earlier refusals were not recorded"


def test_long_paths_that_are_refused_do_not_fill_the_memory(served: RegistryHarness) -> None:
    refusals = RefusalLog(served.registry.database, lambda: 0.0)
    eve = served.authenticate(served.create_user("eve"))
    for number in range(100):
        refusals.record_refused_change(
            eve, method="DELETE", path=f"/{number}{'a' * 4000}", status=404
        )
    assert len(refusals._per_event) == 20


def test_failed_logins_do_not_keep_a_refused_change_out_of_the_audit_log(
    served: RegistryHarness,
) -> None:
    refusals = RefusalLog(served.registry.database, lambda: 0.0)
    for number in range(25):
        refusals.record_failed_login("192.0.2.7", f"xpt_{number:08}")
    eve = served.authenticate(served.create_user("eve"))
    refusals.record_refused_change(eve, method="DELETE", path="/v2/acme/x/manifests/v1", status=403)
    [row] = audited(served, "change.refused")
    assert row[2:] == (
        "/v2/acme/x/manifests/v1",
        "DELETE: 403; 5 earlier refusals were not recorded",
    )


def test_pushes_and_deletes_that_are_refused_leave_rows(served: RegistryHarness) -> None:
    served.create_user("alice")
    served.create_namespace("acme", owner="alice")
    eve = client_at(served, "192.0.2.7")
    headers = bearer(served.create_user("eve"))
    for method, path in (
        ("POST", "/v2/acme/x/blobs/uploads/"),
        ("PUT", "/v2/acme/x/manifests/v1"),
        ("DELETE", "/v2/acme/x/manifests/v1"),
        ("DELETE", "/v2/acme/x/manifests/v1"),
        ("GET", "/v2/acme/x/manifests/v1"),
    ):
        assert eve.request(method, path, headers=headers).status_code in {403, 404}
    rows = audited(served, "change.refused")
    assert {row[:2] for row in rows} == {("eve", "192.0.2.7")}
    assert [(row[2], str(row[3]).partition(":")[0]) for row in rows] == [
        ("/v2/acme/x/blobs/uploads/", "POST"),
        ("/v2/acme/x/manifests/v1", "PUT"),
        ("/v2/acme/x/manifests/v1", "DELETE"),
    ]


def test_a_full_disk_keeps_no_refusal_from_being_answered(served: RegistryHarness) -> None:
    with served.registry.database.write() as connection:
        connection.execute(text("ALTER TABLE audit RENAME COLUMN detail TO gone"))
    assert served.client("xpt_" + "A" * 43).get(WHOAMI).status_code == 401


def test_attack_80_guessing_through_basic_and_broken_headers_counts_too(
    make_registry: NewRegistry,
) -> None:
    served = make_registry(failures_per_minute=3)
    client = client_at(served, "192.0.2.7")
    for headers in (basic("bob", "guess"), {"Authorization": "Basic !"}, bearer("other")):
        assert client.get(WHOAMI, headers=headers).status_code == 401
    assert client.get(WHOAMI, headers=basic("bob", "guess")).status_code == 429


def test_a_secret_that_has_ended_locks_out_nobody(make_registry: NewRegistry) -> None:
    """A forgotten machine, or a client whose session of five minutes is over, guesses nothing."""
    served = make_registry(failures_per_minute=2, requests_per_minute=20)
    good, client = served.create_user("bob"), client_at(served, "192.0.2.7")
    session = client.get("/token", headers=bearer(good)).json()["token"]
    old = [served.create_token("bob", expires=time.time() - 1)]
    with served.registry.database.write() as connection:
        accounts.revoke_token(connection, served.authenticate(good).token_id or "")
    old += [good, session]
    for secret in old * 3:
        assert client.get(WHOAMI, headers=bearer(secret)).status_code == 401
    assert client.get(WHOAMI, headers=bearer(served.create_token("bob"))).status_code == 200
    statuses = [client.get(WHOAMI, headers=bearer(good)).status_code for _ in range(12)]
    assert statuses == [401] * 11 + [429]


def test_attack_85_forwarded_headers_do_not_hide_who_guesses(make_registry: NewRegistry) -> None:
    served = make_registry(failures_per_minute=3)
    attacker = client_at(served, "192.0.2.7")
    statuses = [
        attacker.get(
            WHOAMI, headers={**bearer("xpt_x"), "X-Forwarded-For": f"198.51.100.{number}"}
        ).status_code
        for number in range(5)
    ]
    assert statuses == [401, 401, 401, 429, 429]


def test_a_trusted_proxy_tells_guessers_apart(make_registry: NewRegistry) -> None:
    first = make_registry(failures_per_minute=1)
    first.registry.close()
    served = open_harness(replace(first.settings, trusted_proxies=("10.0.0.0/8",)))
    proxy = client_at(served, "10.0.0.1")
    statuses = [
        proxy.get(WHOAMI, headers={**bearer("xpt_x"), "X-Forwarded-For": address}).status_code
        for address in ("192.0.2.7", "192.0.2.7", "192.0.2.8")
    ]
    assert statuses == [401, 429, 401]
    served.close()


def test_the_audit_log_has_the_address_that_is_believed(served: RegistryHarness) -> None:
    boss = served.create_user("boss", admin=True)
    client = client_at(served, "192.0.2.7")
    headers = {**bearer(boss), "X-Forwarded-For": "198.51.100.1"}
    assert client.post("/api/v1/users", json={"name": "eve"}, headers=headers).status_code == 201
    (entry,) = client.get("/api/v1/audit", headers=headers).json()["entries"]
    assert (entry["actor"], entry["address"]) == ("boss", "192.0.2.7")
    assert (entry["action"], entry["target"]) == ("user.create", "eve")


def test_requests_are_limited_by_token_and_otherwise_by_address(
    make_registry: NewRegistry,
) -> None:
    served = make_registry(requests_per_minute=2)
    bob, eve = served.create_user("bob"), served.create_user("eve")
    client = client_at(served, "192.0.2.7")

    def status(secret: str | None) -> int:
        headers = bearer(secret) if secret else {}
        return client.get("/api/v1/search", headers=headers).status_code

    assert [status(bob) for _ in range(3)] == [200, 200, 429]
    assert [status(eve) for _ in range(3)] == [200, 200, 429]
    assert [status(None) for _ in range(3)] == [200, 200, 429]
    answer = client.get("/v2/", headers=bearer(bob))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "30"
    assert answer.json()["errors"][0]["code"] == "TOOMANYREQUESTS"


def test_a_session_is_limited_with_the_token_that_it_came_from(make_registry: NewRegistry) -> None:
    served = make_registry(requests_per_minute=2)
    secret = served.create_user("bob")
    session = served.client(secret).get("/token").json()["token"]
    assert served.client(session).get("/v2/").status_code == 200
    assert served.client(secret).get("/v2/").status_code == 429


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1:9", "localhost"])
def test_attack_85_the_realm_is_never_made_from_a_header(
    served: RegistryHarness, host: str
) -> None:
    headers = {
        "Host": host,
        "X-Forwarded-Host": "evil.example",
        "X-Forwarded-Proto": "https",
        "Forwarded": "host=evil.example",
    }
    for path in ("/v2/", WHOAMI, "/token", "/v2/acme/sql/tags/list"):
        answer = served.client("xpt_x").get(path, headers=headers)
        assert answer.status_code in {401, 421}
        assert "evil.example" not in str(answer.headers) + answer.text
        realms = re.findall(r'realm="([^"]*)"', str(answer.headers))
        assert set(realms) <= {f"{URL}/token", "expertctl registry"}


def test_the_last_use_of_a_token_is_noted_after_the_answer(served: RegistryHarness) -> None:
    secret = served.create_user("bob")
    token_id = served.authenticate(secret).token_id or ""
    served.client(secret).get(WHOAMI)
    with served.registry.database.read() as connection:
        assert accounts.get_token(connection, token_id).last_used == pytest.approx(
            time.time(), abs=60
        )


def test_what_cannot_be_noted_turns_nobody_away(served: RegistryHarness) -> None:
    secret = served.create_user("bob")
    with served.registry.database.write() as connection:
        connection.execute(text("ALTER TABLE tokens RENAME COLUMN last_used TO gone"))
    assert served.client(secret).get("/v2/").status_code == 200


@pytest.mark.parametrize("path", [WHOAMI, "/v2/", "/token", "/api/v1/search", "/api/v1/"])
def test_attack_88_without_a_database_nobody_gets_in(served: RegistryHarness, path: str) -> None:
    secret = served.create_user("bob")
    client = served.client(secret)
    assert client.get(WHOAMI).status_code == 200
    served.registry.database.close()
    for file in served.settings.data.glob("registry.db*"):
        file.unlink()
    answer = client.get(path)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert str(served.settings.data) not in answer.text


def test_attack_88_a_damaged_database_lets_nobody_in(served: RegistryHarness) -> None:
    secret = served.create_user("bob")
    with served.registry.database.write() as connection:
        connection.execute(text("DROP TABLE tokens"))
    assert served.client(secret).get(WHOAMI).status_code == 503
    with served.registry.database.write() as connection:
        connection.execute(text("DROP TABLE namespaces"))
    assert served.client().get("/api/v1/search").status_code == 503


def test_who_asks_is_told_to_one_request_alone(served: RegistryHarness) -> None:
    """Whatever the server does with the state that it hands to every request."""
    seen: list[Identity] = []
    shared: dict[str, object] = {"of": "all"}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["state"]["identity"])

    async def ask(*headers: tuple[bytes, bytes]) -> None:
        scope: Scope = {"type": "http", "path": "/", "client": None, "headers": headers}
        scope["state"] = shared
        refuse = partial(build_error_response, served.registry)
        await AuthenticationMiddleware(app, served.registry, refuse)(scope, receive, send)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError(message)

    secret = served.create_user("bob").encode()
    anyio.run(ask, (b"authorization", b"Bearer " + secret))
    anyio.run(ask)
    assert [identity.name for identity in seen] == ["bob", None]
    assert shared == {"of": "all"}


def test_what_is_no_request_passes_by(served: RegistryHarness) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def nothing(*_: object) -> Message:
        raise AssertionError

    refuse = partial(build_error_response, served.registry)
    guarded = AuthenticationMiddleware(app, served.registry, refuse)
    anyio.run(guarded, {"type": "lifespan"}, nothing, nothing)
    assert seen == ["lifespan"]
