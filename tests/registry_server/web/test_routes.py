"""The pages, as a browser gets them."""

import base64
import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from expertctl.reference import PackageName
from registry_server.access import namespaces
from registry_server.access.rights import Identity, TokenScope
from registry_server.publishing.index import load_publisher_keys
from registry_server.publishing.releases import revoke_key, yank_release
from registry_server.web.rendering import SECURITY_HEADERS
from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.web.conftest import Browser, Publish
from tests.registry_server.web.test_markdown import ATTACKS, ParsedHtml

SCRIPT = "<script>alert(1)</script>"
MARK = '"><img src=x onerror=alert(1)>'
EVALUATION = {"task": "exact sql", "dataset_sha256": "0" * 64, "n": 200, "metric": "exact_match"}
EVALUATION |= {"base": 0.06, "expert": 0.91, "date": "2026-11-20"}


def text_of(html: str) -> str:
    return " ".join(ParsedHtml(html).text.split())


def check_no_active_content(html: str) -> None:
    """Demand a page without anything that runs, loads from elsewhere or submits elsewhere."""
    for tag, attributes in ParsedHtml(html).tags:
        assert tag not in {"iframe", "object", "embed", "svg", "math", "style", "base"}
        if tag == "script":
            assert (attributes.get("src") or "").startswith("/static/copy.js?v=")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href", "action"):
            value = attributes.get(name) or "/"
            assert value.startswith(("/", "#", "https://", "http://")), value
            assert not value.startswith("//")
        if tag in {"img", "link", "form"}:
            assert (attributes.get("src") or attributes.get("href") or attributes["action"] or "")[
                0
            ] == "/"


def test_home_says_how_to_install_from_here(
    browser: TestClient, served: RegistryHarness, publish: Publish
) -> None:
    publish("acme/sql", description="Writes SQL.")
    answer = browser.get("/")
    text = text_of(answer.text)
    key = served.registry.index_key.public.key_id
    assert answer.status_code == 200
    assert f"expertctl trust registry add http://127.0.0.1:8080 --fingerprint {key}" in text
    assert "expertctl install 127.0.0.1:8080/acme/sql" in text
    assert "1 expert 1 version 1 namespace" in text
    assert "Writes SQL." in text
    assert "This registry shows its experts to people with an account" in text
    check_no_active_content(answer.text)


def test_an_empty_registry_has_a_home(browser: TestClient) -> None:
    assert "expertctl install 127.0.0.1:8080/namespace/name" in text_of(browser.get("/").text)


@pytest.mark.parametrize(
    "path", ["/", "/search", "/login", "/packages/acme/sql", "/nothing", "/static/style.css"]
)
def test_every_answer_allows_a_browser_little(
    path: str, browser: TestClient, publish: Publish
) -> None:
    publish()
    answer = browser.get(path)
    assert {name: answer.headers[name] for name in SECURITY_HEADERS} == dict(SECURITY_HEADERS)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert not [word for word in ("unsafe", "http", "*", "data:") if word in policy]
    assert "script-src 'self';" in policy
    assert "strict-transport-security" not in answer.headers
    assert ("set-cookie" in answer.headers) == (path == "/login")


def test_search_finds_by_words_and_keeps_the_question(
    browser: TestClient, publish: Publish
) -> None:
    publish("acme/sql", description="Writes queries.")
    publish("acme/tone", description="Keeps a tone.")
    answer = browser.get("/search", params={"q": "queries"})
    links = [
        link for link in ParsedHtml(answer.text).links if link and link.startswith("/packages")
    ]
    assert links == ["/packages/acme/sql"]
    assert 'value="queries"' in answer.text
    assert "Nothing matches" in text_of(browser.get("/search?q=zebra").text)


def test_search_goes_on_where_a_page_ends(browser: TestClient, publish: Publish) -> None:
    for number in range(21):
        publish(f"acme/skill-{number}")
    seen: list[str] = []
    path: str | None = "/search?q=skill"
    while path is not None:
        links = ParsedHtml(browser.get(path).text).links
        seen += [link for link in links if link and link.startswith("/packages/")]
        path = next((link for link in links if link and "cursor=" in link), None)
    assert sorted(seen) == sorted(f"/packages/acme/skill-{n}" for n in range(21))


@pytest.mark.parametrize(
    "query", [f"q={'a' * 201}", "cursor=-1", "cursor=x", "cursor=99999", "q=a+b+c+d+e+f+g+h+i"]
)
def test_a_search_beyond_its_limits_is_a_page_too(query: str, browser: TestClient) -> None:
    answer = browser.get(f"/search?{query}")
    assert (answer.status_code, "text/html" in answer.headers["content-type"]) == (400, True)


def test_a_package_page_says_what_it_is(
    browser: TestClient, publish: Publish, served: RegistryHarness, owner: Identity
) -> None:
    parcel = publish(
        version="1.0.0",
        description="Writes SQL.",
        license="Apache-2.0",
        authors=["Ada <ada@example.org>"],
        homepage="https://example.org/sql",
        tags=["databases"],
        composition={"requires": ["acme/english@^1"], "conflicts": ["other.example/x/y@*"]},
        evaluation=[EVALUATION],
        limitations=[{"pattern": "CTE", "description": "None.", "workaround": "Use joins."}],
        files={"README.md": b"# Hello\n\nSee [docs](https://docs.example)."},
    )
    publish(version="1.1.0-rc.1")
    publish(version="0.9.0")
    yank_release(served.registry, owner, name=parcel.name, version="0.9.0", reason="It was wrong.")
    answer = browser.get("/packages/acme/sql")
    check_no_active_content(answer.text)
    text, links = text_of(answer.text), ParsedHtml(answer.text).links
    for part in (
        "expertctl install 127.0.0.1:8080/acme/sql",
        "Hello See docs.",
        "exact sql exact_match, 200 prompts, 2026-11-20 6 % 12 of 200 91 % 182 of 200 86 to 94 % "
        "+85 points",
        "CTE: None. Use joins.",
        "0.9.0 yanked It was wrong.",
        "1.0.0 latest",
        "1.1.0-rc.1",
        "Apache-2.0",
        "Ada <ada@example.org>",
        "Owners olga",
        "acme/english@^1",
        "other.example/x/y@*",
        "databases",
        str(parcel.package_digest),
        str(parcel.content_digest),
        "README.md",
    ):
        assert part in text
    assert {"https://docs.example", "https://example.org/sql", "/packages/acme/english"} <= {*links}
    assert not [link for link in links if link and "x/y" in link]


def test_a_version_has_a_page_of_its_own(
    browser: TestClient, publish: Publish, served: RegistryHarness, owner: Identity
) -> None:
    publish(version="1.0.0", description="The old one.")
    publish(version="2.0.0", description="The new one.")
    yank_release(
        served.registry, owner, name=PackageName.parse("acme/sql"), version="1.0.0", reason="Old."
    )
    text = text_of(browser.get("/packages/acme/sql/1.0.0").text)
    assert "The old one." in text
    assert "This version was yanked. Old. New installations do not choose it" in text
    assert "expertctl install 127.0.0.1:8080/acme/sql@1.0.0" in text


def test_a_package_with_all_versions_yanked_still_has_a_page(
    browser: TestClient, publish: Publish, served: RegistryHarness, owner: Identity
) -> None:
    publish()
    yank_release(
        served.registry, owner, name=PackageName.parse("acme/sql"), version="1.0.0", reason="Bad."
    )
    text = text_of(browser.get("/packages/acme/sql").text)
    assert "This version was yanked. Bad." in text


def test_a_version_whose_key_was_revoked_is_marked(
    browser: TestClient, publish: Publish, served: RegistryHarness, owner: Identity
) -> None:
    publish(version="1.0.0")
    with served.registry.database.read() as connection:
        [key] = load_publisher_keys(connection, namespaces.get_namespace(connection, "acme").id)
    reason = "<b>stolen</b>"
    revoke_key(served.registry, owner, namespace="acme", key_id=key.key_id, reason=reason)
    page = browser.get("/packages/acme/sql").text
    assert "<b>stolen" not in page
    text = text_of(page)
    assert f"The key that signed this version was revoked. {reason}" in text
    assert f"1.0.0 latest key revoked {reason}" in text


def test_a_package_without_a_readme_has_none(browser: TestClient, publish: Publish) -> None:
    publish()
    assert "readme" not in browser.get("/packages/acme/sql").text


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/packages",
        "/packages/acme",
        "/packages/acme/none",
        "/packages/acme/sql/9.9.9",
        "/packages/acme/sql/not-a-version",
        "/packages/ACME/sql",
        "/packages/acme/a..b",
        "/packages/acme/%E2%80%AEqls",
        "/static/none.css",
        "/static/..css",
    ],
)
def test_what_is_not_there_is_a_404_page(path: str, browser: TestClient, publish: Publish) -> None:
    publish()
    answer = browser.get(path)
    assert (answer.status_code, "Back to the start" in answer.text) == (404, True)
    assert 'action="/search"' in answer.text
    check_no_active_content(answer.text)


@pytest.mark.parametrize("path", ["/v2/none/none/x", "/api/v1/none", "/tuf/none"])
def test_programs_are_told_in_their_own_language(path: str, browser: TestClient) -> None:
    assert browser.get(path).headers["content-type"] == "application/json"


def test_a_hidden_package_is_as_good_as_none(
    browser: TestClient, publish: Publish, served: RegistryHarness
) -> None:
    """No oracle: who may not read cannot tell what is there, in any list, count or answer."""
    publish("hidden/plan", description="Nobody may see this.")
    hidden, none = (browser.get(f"/packages/{name}") for name in ("hidden/plan", "gone/plan"))
    assert (hidden.status_code, none.status_code) == (404, 404)
    assert hidden.text.replace("hidden", "gone") == none.text
    assert "www-authenticate" not in hidden.headers
    spaces = [browser.get(f"/namespaces/{name}") for name in ("hidden", "gone")]
    assert [answer.status_code for answer in spaces] == [404, 404]
    assert spaces[0].text.replace("hidden", "gone") == spaces[1].text
    assert "hidden" not in browser.get("/").text
    assert "hidden/" not in browser.get("/search?q=nobody").text
    for path in ("/browse", "/browse/namespaces", "/browse/bases", "/search?namespace=hidden"):
        answer = browser.get(path)
        assert "hidden/" not in answer.text
        assert "/hidden" not in answer.text
    assert "0 experts" in text_of(browser.get("/").text)


def test_a_program_may_read_pages_with_a_token(
    browser: TestClient, publish: Publish, served: RegistryHarness
) -> None:
    publish("hidden/plan", description="For us.")
    pair = base64.b64encode(f"uli:{served.create_user('uli')}".encode()).decode()
    browser.headers["Authorization"] = f"Basic {pair}"
    page = browser.get("/packages/hidden/plan")
    assert page.status_code == 200
    assert "logged in as uli" in text_of(page.text)
    assert page.headers["cache-control"] == "private, no-cache"
    assert page.headers["vary"] == "Authorization, Cookie"


def test_a_token_for_one_namespace_finds_no_other(
    browser: TestClient, publish: Publish, served: RegistryHarness
) -> None:
    publish("hidden/plan")
    secret = served.create_token("olga", TokenScope.parse("read:acme"))
    browser.headers["Authorization"] = f"Bearer {secret}"
    hidden, none = (browser.get(f"/packages/{name}") for name in ("hidden/plan", "gone/plan"))
    assert (hidden.status_code, none.status_code) == (404, 404)
    assert hidden.text.replace("hidden", "gone") == none.text


HOSTILE: dict[str, Any] = {
    "description": f"{SCRIPT}{MARK}\u202etxt\x07",
    "license": MARK,
    "authors": [SCRIPT, MARK],
    "tags": ["a"],
    "homepage": "https://ok.example/'-alert(1)-'<script>",
    "limitations": [
        {"pattern": MARK, "description": SCRIPT, "example": MARK, "workaround": SCRIPT}
    ],
    "evaluation": [
        {
            "task": MARK,
            "dataset_sha256": "0" * 64,
            "n": 1,
            "metric": SCRIPT,
            "base": 0.0,
            "expert": 1.0,
            "date": "2026-01-01",
        }
    ],
}


@pytest.mark.parametrize("field", sorted(HOSTILE))
def test_no_field_of_a_package_runs_anything(
    field: str, browser: TestClient, publish: Publish, served: RegistryHarness
) -> None:
    """Attack 83: stored XSS; what the schema refuses already cannot be shown."""
    publish(**{field: HOSTILE[field]})
    for path in ("/", "/search?q=sql", "/packages/acme/sql", "/packages/acme/sql/1.0.0"):
        answer = browser.get(path)
        assert answer.status_code == 200
        check_no_active_content(answer.text)
        assert "\u202e" not in answer.text
        assert "\x07" not in answer.text


def test_no_readme_of_a_package_runs_anything(browser: TestClient, publish: Publish) -> None:
    """Attack 83: README, with a character that is no text."""
    readme = "\n\n".join(ATTACKS).encode() + b"\x00"
    publish(files={"README.md": readme})
    check_no_active_content(browser.get("/packages/acme/sql").text)


def test_no_yank_reason_runs_anything(
    browser: TestClient, publish: Publish, served: RegistryHarness, owner: Identity
) -> None:
    """Attack 83."""
    publish()
    reason = f"{SCRIPT} {MARK}"
    yank_release(
        served.registry, owner, name=PackageName.parse("acme/sql"), version="1.0.0", reason=reason
    )
    answer = browser.get("/packages/acme/sql")
    check_no_active_content(answer.text)
    assert SCRIPT in text_of(answer.text)


@pytest.mark.parametrize(
    "query",
    [SCRIPT, MARK, "%3Cscript%3E", "\u202e", "'; DROP TABLE packages; --", "%", "_", "\\", "\x00"],
)
def test_no_question_comes_back_as_anything_but_text(query: str, browser: TestClient) -> None:
    """Attack 83, reflected."""
    answer = browser.get("/search", params={"q": query})
    assert answer.status_code in {200, 400}
    check_no_active_content(answer.text)


@pytest.mark.parametrize("path", ["/%3Cscript%3Ealert(1)%3C/script%3E", "/packages/acme/%22%3E%3C"])
def test_no_address_comes_back_as_anything_but_text(path: str, browser: TestClient) -> None:
    answer = browser.get(path)
    assert answer.status_code == 404
    check_no_active_content(answer.text)
    assert "alert" not in answer.text


def test_pages_take_nothing_but_questions(browser: TestClient) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert browser.request(method, "/").status_code == 405
        assert browser.request(method, "/search").status_code == 405
        answer = browser.request(method, "/search")
        assert "is not allowed here" in text_of(answer.text)
        assert answer.headers["allow"]
        check_no_active_content(answer.text)


def test_a_head_has_no_body(browser: TestClient) -> None:
    assert (browser.head("/").status_code, browser.head("/").content) == (200, b"")


def test_the_style_is_named_by_its_content(browser: TestClient) -> None:
    links = [link for link in ParsedHtml(browser.get("/").text).links if link and "style" in link]
    assert len(links) == 1
    answer = browser.get(links[0])
    assert answer.headers["content-type"].startswith("text/css")
    assert b"prefers-color-scheme: dark" in answer.content


def test_a_broken_registry_is_a_page_too(
    browser: TestClient, served: RegistryHarness, publish: Publish
) -> None:
    """Attack 88: the database is gone; a browser gets a page, and no trace."""
    publish()
    served.registry.database.close()
    served.settings.database.unlink()
    answer = browser.get("/packages/acme/sql")
    assert answer.status_code in {500, 503}
    assert "Traceback" not in answer.text
    assert str(served.settings.data) not in answer.text


def test_every_new_version_is_counted(served: RegistryHarness, publish: Publish) -> None:
    publish(version="1.0.0")
    publish(version="1.1.0")
    text = served.registry.metrics.render_exposition(served.registry.database).decode()
    assert "expertctl_registry_publishes_total 2.0" in text
    assert "expertctl_registry_releases 2.0" in text


def test_browsers_get_limits_as_pages_and_programs_as_json(make_registry: NewRegistry) -> None:
    served = make_registry(requests_per_minute=1)
    client = served.client()
    client.get("/")
    page = client.get("/search", headers={"Accept": "text/html"})
    assert (page.status_code, "too many requests" in text_of(page.text).lower()) == (429, True)
    assert int(page.headers["retry-after"]) > 0
    check_no_active_content(page.text)
    for path, kind in (("/search", "*/*"), ("/api/v1/search", "text/html")):
        answer = client.get(path, headers={"Accept": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit")
        assert int(answer.headers["retry-after"]) > 0


def test_tables_that_become_lists_on_narrow_screens_are_still_tables_to_readers(
    browser: TestClient, publish: Publish, olga: Browser
) -> None:
    roles = {"table": "table", "thead": "rowgroup", "tbody": "rowgroup", "tr": "row"}
    roles |= {"th": "columnheader", "td": "cell"}
    publish(evaluation=[EVALUATION])
    for text, count in ((browser.get("/packages/acme/sql").text, 2), (olga.get("/account")[1], 1)):
        tables = re.findall(r'<table class="(?:stacked|versions)".*?</table>', text, re.S)
        assert len(tables) == count
        tags = [each for table in tables for each in ParsedHtml(table).tags if each[0] in roles]
        assert {(tag, a.get("role")) for tag, a in tags} == set(roles.items())
