"""Logging in and out of the pages: cookies, sessions and their ends, and the keys of forms."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select, update
from starlette.testclient import TestClient

from registry_server.access import accounts, rights
from registry_server.access.browser_session import MAX_PER_TOKEN, MAX_SECONDS
from registry_server.database.tables import BROWSER_SESSIONS, TOKENS
from registry_server.settings import ServerSettings
from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import RegistryHarness, create_registry, open_harness
from tests.registry_server.web.conftest import Browser, Publish
from tests.registry_server.web.test_routes import check_no_active_content, text_of

WRONG = "xpt_" + "A" * 43
FORMS = ("/logout", "/account/tokens", "/account/tokens/revoke", "/namespaces/acme/members")


def new_browser(served: RegistryHarness) -> Browser:
    return Browser(served.client())


def test_a_login_shows_what_its_user_may_see(olga: Browser, publish: Publish) -> None:
    publish("hidden/plan", description="For us.")
    assert olga.get("/packages/hidden/plan")[0] == 200
    assert "hidden/plan" in olga.get("/search?q=plan")[1]
    page = olga.client.get("/account")
    assert page.headers["cache-control"] == "no-store"
    text = text_of(page.text)
    assert "olga" in text
    assert "acme: owner" in text
    assert "hidden: owner" in text
    check_no_active_content(page.text)


def test_the_cookie_is_for_no_script_and_no_other_site(
    served: RegistryHarness, visitor: Browser
) -> None:
    key = visitor.read_key("/login")
    fields = {"form_key": key, "token": served.create_user("bob")}
    answer = visitor.client.post("/login", data=fields)
    session = next(c for c in answer.headers.get_list("set-cookie") if "session" in c)
    name, _, rest = session.partition("=")
    assert name == "expertctl-session-8080"
    parts = {part.strip().lower() for part in rest.split(";")[1:]}
    assert parts == {"httponly", "samesite=strict", "path=/", f"max-age={MAX_SECONDS}"}
    assert "cache-control" in answer.headers


def make_encrypted(folder: Path, url: str) -> RegistryHarness:
    return create_registry(ServerSettings(data=folder / "registry", url=url))


def test_behind_https_cookies_and_browsers_use_nothing_else(tmp_path: Path) -> None:
    served = make_encrypted(tmp_path, "https://experts.example.org")
    client = TestClient(served.app, base_url="https://experts.example.org")
    client.follow_redirects = False
    browser = Browser(client)
    secret = served.create_user("bob")
    browser.log_in(secret)
    assert set(client.cookies) == {"__Host-expertctl-session"}
    assert browser.get("/account")[0] == 200
    for path in ("/", "/login", "/nothing", "/static/style.css", "/api/v1/", "/v2/", "/healthz"):
        assert client.get(path).headers["strict-transport-security"] == "max-age=31536000"
    response = client.post("/login", data={"token": secret}, headers={"Origin": "https://evil.org"})
    assert (response.status_code, "strict-transport-security" in response.headers) == (403, True)
    other = TestClient(served.app, base_url="https://experts.example.org")
    cookie = other.get("/login").headers["set-cookie"].lower()
    assert "secure" in cookie
    for each in (client, other):
        each.close()
    served.close()


@pytest.mark.parametrize(
    "url",
    ["http://experts.example.org", "https://localhost", "https://experts.example.org:8443"],
)
def test_no_browser_is_bound_to_https_without_a_public_one(url: str, tmp_path: Path) -> None:
    served = make_encrypted(tmp_path, url)
    answer = TestClient(served.app, base_url=url).get("/")
    assert "strict-transport-security" not in answer.headers
    served.close()


@pytest.mark.parametrize(
    ("options", "origin"),
    [
        ({"url": "https://Experts.Example.org"}, "https://experts.example.org"),
        ({"url": "HTTPS://experts.example.org:443/"}, "https://experts.example.org"),
        ({"url": "http://experts.example.org:080"}, "http://experts.example.org"),
        ({"url": "https://experts.example.org:8443"}, "https://experts.example.org:8443"),
        ({"url": "https://[2001:DB8::1]:443"}, "https://[2001:db8::1]"),
        ({"port": 80}, "http://127.0.0.1"),
        ({"port": 80}, "http://localhost"),
        ({"port": 443, "certificate": Path("chain.pem")}, "https://127.0.0.1"),
    ],
)
def test_forms_work_at_every_spelling_of_the_public_url(
    options: dict[str, Any], origin: str, tmp_path: Path
) -> None:
    served = create_registry(ServerSettings(data=tmp_path / "registry", **options))
    client = TestClient(served.app, base_url=origin)
    fields = {"form_key": Browser(client).read_key("/login"), "token": served.create_user("bob")}
    for sent, status in ((f"{origin}:9999", 403), (origin, 303)):
        headers = {"Origin": sent}
        answer = client.post("/login", data=fields, headers=headers, follow_redirects=False)
        assert answer.status_code == status
    client.close()
    served.close()


def test_registries_on_ports_of_one_host_do_not_share_a_login(tmp_path: Path) -> None:
    names = set()
    for port in (443, 8443, 9443):
        url = f"https://experts.example.org:{port}"
        served = make_encrypted(tmp_path / str(port), url)
        client = TestClient(served.app, base_url=url)
        client.follow_redirects = False
        Browser(client).log_in(served.create_user("bob"))
        names |= set(client.cookies)
        client.close()
        served.close()
    assert names == {f"__Host-expertctl-session{end}" for end in ("", "-8443", "-9443")}


def test_only_the_hash_of_a_session_is_stored(served: RegistryHarness, olga: Browser) -> None:
    secret = olga.client.cookies["expertctl-session-8080"]
    with served.registry.database.read() as connection:
        rows = connection.execute(select(BROWSER_SESSIONS.c.hash)).scalars().all()
    assert list(rows) == [accounts.hash_secret(secret)]
    assert secret.encode() not in served.settings.database.read_bytes()


def test_programs_do_not_accept_the_cookie(served: RegistryHarness, olga: Browser) -> None:
    for path in ("/api/v1/whoami", "/v2/", "/api/v1/tokens"):
        assert olga.client.get(path).status_code == 401
    body = {"name": "more"}
    assert olga.client.post("/api/v1/tokens", json=body).status_code == 401
    secret = olga.client.cookies["expertctl-session-8080"]
    for header in (f"Bearer {secret}", f"Bearer xps_{secret}"):
        answer = served.client().get("/api/v1/whoami", headers={"Authorization": header})
        assert answer.status_code == 401


def test_logout_ends_the_session_for_everybody_who_has_it(
    served: RegistryHarness, olga: Browser
) -> None:
    stolen = new_browser(served)
    stolen.client.cookies.update(olga.client.cookies)
    assert stolen.get("/account")[0] == 200
    assert olga.send("/", "/logout")[::2] == (303, "/")
    assert "expertctl-session-8080" not in olga.client.cookies
    assert stolen.client.get("/account").headers["location"] == "/login?next=/account"


def test_a_session_ends_with_its_token_and_with_its_user(
    served: RegistryHarness, visitor: Browser
) -> None:
    first, second = served.create_user("bob"), served.create_token("bob")
    visitor.log_in(first)
    other = new_browser(served).log_in(second)
    with served.registry.database.write() as connection:
        accounts.revoke_token(connection, served.authenticate(first).token_id or "")
    assert visitor.get("/account")[0] == 303
    assert other.get("/account")[0] == 200
    with served.registry.database.write() as connection:
        accounts.remove_user(connection, accounts.get_user(connection, "bob"))
    assert other.get("/account")[0] == 303


def test_a_session_ends_after_its_time_and_when_its_token_expires(
    served: RegistryHarness, olga: Browser
) -> None:
    served.create_user("bob")
    bob = new_browser(served).log_in(served.create_token("bob", expires=time.time() + 3600))
    with served.registry.database.write() as connection:
        connection.execute(update(TOKENS).where(TOKENS.c.expires.is_not(None)).values(expires=1.0))
    assert bob.get("/account")[0] == 303
    assert olga.get("/account")[0] == 200
    with served.registry.database.write() as connection:
        connection.execute(update(BROWSER_SESSIONS).values(expires=time.time() - 1))
    assert olga.get("/account")[0] == 303


def test_a_session_in_memory_ends_too(
    served: RegistryHarness, olga: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit empties the cache in between."""
    olga.get("/browse")
    assert olga.get("/browse")[1].count("Log out") == 1
    late = time.time() + MAX_SECONDS + 1
    clock = SimpleNamespace(monotonic=time.monotonic, time=lambda: late)
    monkeypatch.setattr("registry_server.access.authentication.time", clock)
    assert olga.get("/browse")[1].count("Log out") == 0


@pytest.mark.parametrize("path", FORMS)
def test_a_form_of_an_expired_session_leads_to_a_login(
    path: str, served: RegistryHarness, olga: Browser
) -> None:
    key = olga.read_key("/account")
    with served.registry.database.write() as connection:
        connection.execute(update(BROWSER_SESSIONS).values(expires=time.time() - 1))
    answer = olga.client.post(path, data={"form_key": key})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")


def test_the_cookie_of_the_login_form_is_renewed_with_each_page(visitor: Browser) -> None:
    first, second = (visitor.client.get("/login").headers["set-cookie"] for _ in range(2))
    assert first == second
    assert "max-age=3600" in second.lower()


def test_sessions_outlive_a_restart(served: RegistryHarness, olga: Browser) -> None:
    again = open_harness(served.settings)
    client = again.client()
    client.cookies.update(olga.client.cookies)
    assert client.get("/account").status_code == 200
    again.close()


def test_a_token_has_a_bounded_number_of_sessions(served: RegistryHarness) -> None:
    secret = served.create_user("bob")
    browsers = [new_browser(served).log_in(secret) for _ in range(MAX_PER_TOKEN + 2)]
    with served.registry.database.read() as connection:
        count = connection.scalar(select(func.count()).select_from(BROWSER_SESSIONS))
    assert count == MAX_PER_TOKEN
    assert [b.get("/account")[0] for b in (browsers[0], browsers[1], browsers[-1])] == [303] * 2 + [
        200
    ]


def test_a_login_replaces_the_session_of_the_browser(
    served: RegistryHarness, olga: Browser
) -> None:
    """Nobody can be made to use a session that another knows."""
    before = olga.client.cookies["expertctl-session-8080"]
    link = new_browser(served)  # a link of another site, with which no session cookie is sent
    fields = {"form_key": link.read_key("/login")}
    olga.client.cookies.update(link.client.cookies)
    answer = olga.client.post("/login", data={**fields, "token": WRONG})
    assert answer.status_code == 403
    forms = dict(
        re.findall(r'action="(/log\w+)".*?name="form_key" value="(\w+)"', answer.text, re.S)
    )
    assert forms["/login"] == fields["form_key"]
    assert forms["/logout"] == olga.read_key("/account")
    fields["token"] = served.create_user("bob")
    assert olga.client.post("/login", data=fields).status_code == 303
    assert olga.client.cookies["expertctl-session-8080"] != before
    assert "bob" in text_of(olga.get("/account")[1])
    stolen = new_browser(served)
    stolen.client.cookies["expertctl-session-8080"] = before
    assert stolen.get("/account")[0] == 303


@pytest.mark.parametrize("token", [WRONG, "x", "", "xpt_B", "xps_a.b", "\u202e", "x" * 5000])
def test_a_wrong_token_is_refused(token: str, visitor: Browser) -> None:
    status, text, _ = visitor.send("/login", "/login", token=token)
    assert status == 403
    assert "The token is wrong, expired or revoked." in text
    assert "expertctl-session-8080" not in visitor.client.cookies
    assert not token or len(token) < 4 or token not in text


def test_a_session_token_of_a_container_client_is_no_login(
    served: RegistryHarness, visitor: Browser
) -> None:
    session = served.client(served.create_user("bob")).get("/token").json()["token"]
    assert visitor.send("/login", "/login", token=session)[0] == 403


def test_guessing_by_the_form_is_limited_as_elsewhere(make_registry: NewRegistry) -> None:
    served = make_registry(failures_per_minute=2)
    secret = served.create_user("bob")
    attacker = Browser(served.client())
    key = attacker.read_key("/login")
    statuses = []
    for number in range(14):
        guess = f"xpt_{chr(65 + number) * 43}"
        answer = attacker.client.post("/login", data={"form_key": key, "token": guess})
        statuses.append(answer.status_code)
    assert statuses[:10] == [403] * 10
    assert 429 in statuses[10:]
    assert int(answer.headers["retry-after"]) > 0
    headers = {"Authorization": f"Bearer {WRONG}"}
    assert served.client().get("/api/v1/whoami", headers=headers).status_code == 429
    assert attacker.send("/login", "/login", token=secret)[0] == 303  # a valid one always works


def test_logins_are_in_the_audit_log(served: RegistryHarness, olga: Browser) -> None:
    stranger = new_browser(served)
    stranger.send("/login", "/login", token=WRONG)
    olga.send("/", "/logout")
    with served.registry.database.read() as connection:
        rows = list(rights.list_audit_rows(connection, limit=10))
    found = [(row.actor, row.action, row.target) for row in rows]
    assert ("olga", "session.start", "olga") in found
    assert ("olga", "session.end", "olga") in found
    assert (None, "login.refused", WRONG[:12]) in found


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/packages/acme/sql", "/packages/acme/sql"),
        ("/search?q=a&cursor=20", "/search?q=a&cursor=20"),
        ("", "/account"),
        ("//evil.example", "/account"),
        ("/\\evil.example", "/account"),
        ("https://evil.example/", "/account"),
        ("javascript:alert(1)", "/account"),
        ("/\t/evil.example", "/account"),
        ("/a\r\nSet-Cookie: x=y", "/account"),
        ("/" + "a" * 600, "/account"),
    ],
)
def test_a_login_leads_to_pages_of_this_registry_only(
    served: RegistryHarness, visitor: Browser, target: str, expected: str
) -> None:
    secret = served.create_user("bob")
    answer = visitor.client.get("/login", params={"next": target})
    check_no_active_content(answer.text)
    assert visitor.send("/login", "/login", token=secret, next=target)[::2] == (303, expected)
    again = visitor.client.get("/login", params={"next": target})
    assert (again.status_code, again.headers["location"]) == (303, expected)


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("key", ["", "0" * 64, "\u00e9", None])
def test_a_form_without_the_key_of_its_session_changes_nothing(
    path: str, key: str | None, served: RegistryHarness, olga: Browser
) -> None:
    fields = {"name": "x", "days": "7", "permission": "", "user": "olga", "role": "none"}
    fields |= {} if key is None else {"form_key": key}
    assert olga.client.post(path, data=fields).status_code == 403
    other = new_browser(served).log_in(served.create_user("eve"))
    fields["form_key"] = other.read_key("/account")
    assert olga.client.post(path, data=fields).status_code == 403
    assert olga.get("/account")[0] == 200


@pytest.mark.parametrize("path", ["/login", *FORMS])
def test_a_form_of_another_site_is_refused(path: str, olga: Browser) -> None:
    key = olga.read_key("/account")
    olga.client.headers["Accept"] = "text/html"
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9999"):
        answer = olga.client.post(path, data={"form_key": key}, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "set `url` in registry.toml" in text_of(answer.text).lower()
        check_no_active_content(answer.text)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]"])
def test_this_machine_may_be_called_by_all_its_names(name: str, served: RegistryHarness) -> None:
    client = TestClient(served.app, base_url=f"http://{name}:8080")
    browser, secret = Browser(client), served.create_user("bob")
    fields = {"form_key": browser.read_key("/login"), "token": secret}
    headers = {"Origin": f"http://{name}:8080"}
    answer = client.post("/login", data=fields, headers=headers, follow_redirects=False)
    assert answer.status_code == 303
    client.close()


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{}", "application/json", 415),
        (b"form_key=x", "text/plain", 415),
        (b"form_key=x", "multipart/form-data; boundary=x", 415),
        (b"form_key=%FF", "application/x-www-form-urlencoded", 400),
        (b"form_key=\xff", "application/x-www-form-urlencoded", 400),
        (b"a=1&a=2", "application/x-www-form-urlencoded", 400),
        (b"&".join(b"a%d=1" % n for n in range(21)), "application/x-www-form-urlencoded", 400),
        (b"a=" + b"x" * (16 << 10), "application/x-www-form-urlencoded", 413),
    ],
)
@pytest.mark.parametrize("path", ["/login", "/account/tokens"])
def test_a_form_is_read_strictly(
    path: str, content: bytes, media_type: str, status: int, visitor: Browser
) -> None:
    headers = {"Content-Type": media_type}
    assert visitor.client.post(path, content=content, headers=headers).status_code == status
