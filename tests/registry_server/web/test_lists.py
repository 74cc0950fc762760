"""Lists, filters and counts of the pages: bounded, in agreement, and harmless."""

import json

import pytest
from starlette.testclient import TestClient

from expertctl.reference import PackageName
from registry_server.access.rights import Identity
from registry_server.database.tables import PACKAGES, RELEASES, SIGNED_FORMS
from registry_server.publishing.releases import yank_release
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import PackageTemplate
from tests.registry_server.web.conftest import Publish
from tests.registry_server.web.test_markdown import ParsedHtml
from tests.registry_server.web.test_routes import check_no_active_content, text_of


def multiply_packages(served: RegistryHarness, count: int) -> None:
    """Make so many packages of one, as rows only."""
    own = {"id": "i", "package_id": "i", "release_id": "i"}
    own |= {"name": "'copy-' || i", "skeleton": "'copy-' || i", "index_document": "x'00'"}
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 2 UNION SELECT i + 1 FROM n WHERE i < {count})"
    with served.registry.database.write() as connection:
        for table in (PACKAGES, RELEASES, SIGNED_FORMS):
            names = [column.name for column in table.columns]
            values = ", ".join(own.get(name, name) for name in names)
            first = "release_id = 1" if table is SIGNED_FORMS else "id = 1"
            connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({', '.join(names)}) {numbers} "
                f"SELECT {values} FROM {table.name}, n WHERE {first}"
            )


def test_lists_of_ten_thousand_packages_are_bounded(
    browser: TestClient, publish: Publish, served: RegistryHarness
) -> None:
    publish()
    multiply_packages(served, 10_000)
    assert "10,000 experts" in text_of(browser.get("/").text)
    seen = 0
    for path in ("/search", "/search?q=sql&kind=lora", "/namespaces/acme", "/search?cursor=9980"):
        page = browser.get(path)
        assert page.status_code == 200
        assert len(page.text) < 40_000
        links = [link for link in ParsedHtml(page.text).links if link]
        packages = {link for link in links if link.startswith("/packages/")}
        assert len(packages) == 20
        seen += len(packages)
    assert not [link for link in ParsedHtml(page.text).links if link and "cursor=100" in link]
    assert "9,981 to 10,000 of 10,000 experts" in text_of(page.text)
    assert browser.get("/search?cursor=10000").status_code == 400
    assert browser.get("/namespaces/acme?cursor=10000").status_code == 400


def test_versions_are_listed_page_after_page(
    browser: TestClient, publish: Publish, served: RegistryHarness
) -> None:
    publish()
    with served.registry.database.write() as connection:
        for table, owner in ((RELEASES, "id"), (SIGNED_FORMS, "release_id")):
            own = {owner: "i"} | ({"version": "'1.0.' || i"} if table is RELEASES else {"id": "i"})
            names = [column.name for column in table.columns]
            values = ", ".join(own.get(name, name) for name in names)
            connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({', '.join(names)}) "
                "WITH RECURSIVE n(i) AS (SELECT 2 UNION SELECT i + 1 FROM n WHERE i < 150) "
                f"SELECT {values} FROM {table.name}, n WHERE {owner} = 1"
            )
    seen: set[str] = set()
    path: str | None = "/packages/acme/sql"
    while path is not None:
        links = [link for link in ParsedHtml(browser.get(path).text).links if link]
        seen |= {link for link in links if link.startswith("/packages/acme/sql/")}
        path = next((link for link in links if "cursor=100" in link), None)
    assert len(seen) == 150
    assert browser.get("/packages/acme/sql?cursor=x").status_code == 400


def test_namespaces_are_listed_page_after_page(
    browser: TestClient, served: RegistryHarness, publish: Publish
) -> None:
    for number in range(120):
        served.create_namespace(f"team-{number:03}", read="public")
    seen: list[str] = []
    path: str | None = "/browse/namespaces"
    while path is not None:
        links = [link for link in ParsedHtml(browser.get(path).text).links if link]
        seen += [link for link in links if link.startswith("/namespaces/")]
        path = next((link for link in links if link.endswith("cursor=100")), None)
    assert seen == ["/namespaces/acme", *(f"/namespaces/team-{n:03}" for n in range(120))]


HOSTILE_BASE = "<b>org</b>/\u202ebase\"'&?x=1#y"


def test_a_base_with_a_hostile_name_is_only_text_and_still_found(
    browser: TestClient, publish: Publish, template: PackageTemplate
) -> None:
    base = json.loads(template.files["expert.json"])["base"]
    publish("acme/odd", base=base | {"name": HOSTILE_BASE})
    publish("acme/sql")
    for path in ("/", "/browse", "/browse/bases", "/search", "/packages/acme/odd"):
        page = browser.get(path)
        check_no_active_content(page.text)
        assert "\u202e" not in text_of(page.text)
        assert "<b>org" not in page.text
    links = ParsedHtml(browser.get("/browse/bases").text).links
    (link,) = [link for link in links if link and "org" in link]
    found = [a for a in ParsedHtml(browser.get(link).text).links if a and a.startswith("/packages")]
    assert found == ["/packages/acme/odd"]
    options = [a for tag, a in ParsedHtml(browser.get(link).text).tags if tag == "option"]
    (chosen,) = [a["value"] for a in options if "selected" in a]
    assert chosen == HOSTILE_BASE  # so that filtering again finds it again


@pytest.mark.parametrize(
    "query",
    ["kind=qlora", "kind=%22", f"namespace={'a' * 65}", f"base={'a' * 201}", "cursor=%D9%A1"],
)
def test_a_filter_beyond_its_limits_is_a_page_too(query: str, browser: TestClient) -> None:
    answer = browser.get(f"/search?{query}")
    assert (answer.status_code, "text/html" in answer.headers["content-type"]) == (400, True)
    check_no_active_content(answer.text)


def test_a_search_keeps_its_filters_on_all_pages(browser: TestClient, publish: Publish) -> None:
    for number in range(21):
        publish(f"acme/skill-{number}")
    first = browser.get("/search?q=skill&namespace=acme&kind=lora").text
    (following,) = [a for a in ParsedHtml(first).links if a and "cursor=20" in a]
    assert following == "/search?q=skill&namespace=acme&kind=lora&cursor=20"
    second = browser.get(following).text
    assert "21 to 21 of 21 experts" in text_of(second)
    assert "/search?q=skill&namespace=acme&kind=lora" in ParsedHtml(second).links
    assert browser.get("/search?q=skill&namespace=acme&kind=dora").text.count("/packages/") == 0


def test_counts_leave_out_what_is_yanked(
    browser: TestClient, publish: Publish, served: RegistryHarness, owner: Identity
) -> None:
    publish("acme/sql", "1.0.0")
    publish("acme/sql", "1.1.0")
    publish("acme/tone")
    for name, version in (("acme/sql", "1.1.0"), ("acme/tone", "1.0.0")):
        package = PackageName.parse(name)
        yank_release(served.registry, owner, name=package, version=version, reason="Bad.")
    assert "1 expert 1 version 1 namespace" in text_of(browser.get("/").text)
    assert "1 to 1 of 1 expert" in text_of(browser.get("/search").text)
    assert "1 expert" in text_of(browser.get("/namespaces/acme").text)
    browse = text_of(browser.get("/browse").text)
    assert "1 expert in 1 version; yanked ones (2) are not counted" in browse
    assert "LoRA 1" in browse
    assert "acme 1" in browse
    assert "Versions 2, 1 yanked" in text_of(browser.get("/packages/acme/sql").text)


def test_what_is_not_there_offers_to_search_for_its_name(browser: TestClient) -> None:
    page = browser.get("/packages/acme/sqk").text
    assert 'value="acme sqk"' in page
    assert 'href="/login?next=/packages/acme/sqk"' in page
    assert 'value=""' in browser.get("/packages/ACME/%3Cb%3E").text


def test_publishing_is_explained_for_this_registry(browser: TestClient) -> None:
    text = text_of(browser.get("/publish").text)
    assert "expertctl login http://127.0.0.1:8080" in text
    assert "expertctl publish sql.expert --dry-run" in text
