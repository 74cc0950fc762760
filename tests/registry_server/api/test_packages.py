from collections.abc import Callable

import pytest
from sqlalchemy import update

from expertctl.digest import Digest
from registry_server.access.rights import TokenScope
from registry_server.database.tables import RELEASES
from tests.registry_server.harness import JsonApiClient, Publish, RegistryHarness

Clients = Callable[[str | None], JsonApiClient]


def test_a_package_is_shown_with_its_versions_the_newest_first(
    served: RegistryHarness, publish: Publish, olga: JsonApiClient, key: object
) -> None:
    for version in ("1.9.0", "1.10.0", "2.0.0-rc.1"):
        publish("acme/sql", version, description=f"SQL as of {version}.")
    with served.registry.database.write() as connection:
        connection.execute(
            update(RELEASES).where(RELEASES.c.version == "1.9.0").values(downloads=7)
        )
    status, page = olga("GET", "packages/acme/sql")
    assert status == 200
    assert (page["name"], page["latest"], page["owners"]) == ("acme/sql", "1.10.0", ["olga"])
    assert page["description"] == "SQL as of 1.10.0."
    assert [v["version"] for v in page["versions"]] == ["2.0.0-rc.1", "1.10.0", "1.9.0"]
    assert [v["downloads"] for v in page["versions"]] == [0, 0, 7]
    newest = page["versions"][0]
    assert set(newest) == {
        "version",
        "published",
        "yanked",
        "revoked",
        "size",
        "content_digest",
        "package_digest",
        "signer",
        "downloads",
        "kinds",
        "base",
        "requires",
        "conflicts",
    }
    assert newest["kinds"] == ["lora"]
    assert newest["yanked"] is None
    assert newest["revoked"] is None
    assert newest["base"]["arch"].startswith("sha256:")


def test_a_version_is_shown_with_its_manifest_and_its_files(
    publish: Publish, olga: JsonApiClient
) -> None:
    publish("acme/sql", "1.0.0")
    listed = olga("GET", "packages/acme/sql")[1]["versions"][0]
    status, page = olga("GET", "packages/acme/sql/1.0.0")
    assert status == 200
    assert page.items() >= listed.items()
    assert (page["manifest"]["name"], page["manifest"]["version"]) == ("acme/sql", "1.0.0")
    files = {file["path"]: file for file in page["files"]}
    assert {"expert.json", "model.sig"} < set(files)
    assert sum(f["size"] for f in files.values()) >= page["size"]
    assert all(Digest.parse(f["digest"]) for f in files.values())


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("packages/acme/other", 404),
        ("packages/acme/sql/9.9.9", 404),
        ("packages/acme/sql/1.0", 400),
        ("packages/acme/sql/01.0.0", 400),
        ("packages/acme/SQL", 400),
        ("packages/other/sql", 404),
        ("packages/acme", 404),
    ],
)
def test_what_is_not_there(publish: Publish, olga: JsonApiClient, path: str, status: int) -> None:
    publish("acme/sql", "1.0.0")
    assert olga("GET", path)[0] == status


def test_reading_takes_the_right(
    served: RegistryHarness, publish: Publish, nobody: JsonApiClient, asking: Clients
) -> None:
    publish("acme/sql", "1.0.0")
    publish("open/sql", "1.0.0", read="public")
    for path in ("sql", "sql/1.0.0"):
        assert nobody("GET", f"packages/acme/{path}")[0] == 401
        assert nobody("GET", f"packages/open/{path}")[0] == 200
        narrow = asking(served.create_token("olga", TokenScope.parse("read:acme/sql")))
        assert narrow("GET", f"packages/acme/{path}")[0] == 200
    assert narrow("GET", "packages/acme/other")[0] == 403


def test_an_owner_yanks_with_a_reason_and_takes_it_back(
    publish: Publish, olga: JsonApiClient
) -> None:
    publish("acme/sql", "1.0.0")
    publish("acme/sql", "1.1.0")
    path = "packages/acme/sql/1.1.0/yank"
    assert olga("PUT", path, {"reason": "wrong weights"}) == (204, {})
    page = olga("GET", "packages/acme/sql")[1]
    assert page["latest"] == "1.0.0"
    assert [v["yanked"] for v in page["versions"]] == ["wrong weights", None]
    assert olga("DELETE", path) == (204, {})
    assert olga("GET", "packages/acme/sql")[1]["latest"] == "1.1.0"
    assert olga("PUT", "packages/acme/sql/3.0.0/yank", {"reason": "why"})[0] == 404


def test_attack_79_others_yank_nothing(
    served: RegistryHarness,
    publish: Publish,
    olga: JsonApiClient,
    nobody: JsonApiClient,
    asking: Clients,
) -> None:
    publish("acme/sql", "1.0.0")
    eve, paul = asking(served.create_user("eve")), asking(served.create_user("paul"))
    olga("PUT", "namespaces/acme/members/paul", {"role": "publisher"})
    narrow = asking(served.create_token("olga", TokenScope.parse("push:acme")))
    other = asking(served.create_token("olga", TokenScope.parse("yank:acme/other")))
    path = "packages/acme/sql/1.0.0/yank"
    for who in (eve, paul, narrow, other):
        assert who("PUT", path, {"reason": "because"})[0] == 403
        assert who("DELETE", path)[0] == 403
    assert nobody("PUT", path, {"reason": "because"})[0] == 401
    assert olga("GET", "packages/acme/sql")[1]["versions"][0]["yanked"] is None


@pytest.mark.parametrize("reason", ["", " ", "a\nb", "\x1b[31mred", "a" * 501])
def test_attack_79_a_reason_is_one_printable_line(
    publish: Publish, olga: JsonApiClient, reason: str
) -> None:
    publish("acme/sql", "1.0.0")
    assert olga("PUT", "packages/acme/sql/1.0.0/yank", {"reason": reason})[0] == 400


def test_attack_79_markup_in_a_reason_stays_a_text_in_json(
    publish: Publish, olga: JsonApiClient
) -> None:
    publish("acme/sql", "1.0.0")
    reason = "<script>alert('1')</script>"
    assert olga("PUT", "packages/acme/sql/1.0.0/yank", {"reason": reason})[0] == 204
    answer = olga.client.get("/api/v1/packages/acme/sql")
    assert answer.json()["versions"][0]["yanked"] == reason
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_package_of_yanked_versions_alone_has_no_latest(
    publish: Publish, olga: JsonApiClient
) -> None:
    publish("acme/sql", "1.0.0")
    olga("PUT", "packages/acme/sql/1.0.0/yank", {"reason": "wrong"})
    assert olga("GET", "packages/acme/sql")[1]["latest"] is None


def test_counts_are_of_what_one_may_read(
    served: RegistryHarness, publish: Publish, olga: JsonApiClient, nobody: JsonApiClient
) -> None:
    publish("acme/sql", "1.0.0")
    publish("acme/sql", "1.1.0")
    publish("open/sql", "1.0.0", read="public")
    with served.registry.database.write() as connection:
        connection.execute(update(RELEASES).values(downloads=3))
    size = olga("GET", "packages/open/sql")[1]["versions"][0]["size"]
    assert nobody("GET", "stats") == (
        200,
        {
            "namespaces": 1,
            "packages": 1,
            "versions": 1,
            "yanked": 0,
            "bytes": size,
            "downloads": 3,
        },
    )
    everything = olga("GET", "stats")[1]
    assert everything["bytes"] > size
    assert everything | {"bytes": 0} == {
        "namespaces": 2,
        "packages": 2,
        "versions": 3,
        "yanked": 0,
        "bytes": 0,
        "downloads": 9,
    }


def test_counts_are_those_of_the_lists(publish: Publish, olga: JsonApiClient) -> None:
    """What is yanked is in neither, and is counted separately."""
    publish("acme/sql", "1.0.0")
    publish("acme/sql", "1.1.0")
    publish("acme/tone", "1.0.0")
    olga("PUT", "packages/acme/sql/1.1.0/yank", {"reason": "wrong"})
    olga("PUT", "packages/acme/tone/1.0.0/yank", {"reason": "wrong"})
    counts, found = olga("GET", "stats")[1], olga("GET", "search")[1]
    assert counts["packages"] == found["total"] == len(found["results"]) == 1
    assert (counts["versions"], counts["yanked"]) == (1, 2)
