import pytest
from sqlalchemy import update

from registry_server.access.rights import TokenScope
from registry_server.database.tables import PACKAGES, RELEASES
from tests.registry_server.harness import JsonApiClient, Publish, RegistryHarness


def names(who: JsonApiClient, query: str, rest: str = "") -> list[str]:
    status, page = who("GET", f"search?q={query}{rest}")
    assert status == 200
    return [result["name"] for result in page["results"]]


def test_a_result_says_what_the_package_is(publish: Publish, olga: JsonApiClient) -> None:
    publish("acme/sql", "1.0.0", description="Writes SQL.", routing={"task": "code"})
    (result,), following, total = olga("GET", "search?q=sql")[1].values()
    assert (following, total) == (None, 1)
    assert result.pop("updated").endswith("Z")
    base = result.pop("base")
    assert base == olga("GET", "packages/acme/sql")[1]["versions"][0]["base"]["name"]
    shown = olga("GET", "packages/acme/sql")[1]["versions"][0]
    assert result.pop("signer") == shown["signer"]
    assert result == {
        "name": "acme/sql",
        "version": "1.0.0",
        "description": "Writes SQL.",
        "task": "code",
        "kinds": ["lora"],
        "downloads": 0,
        "revoked": None,
    }


@pytest.mark.parametrize(
    "query",
    ["sql", "SQL", "acme/sql", "acme", "postgres", "writes+queries", "queries+acme", "grammar", ""],
)
def test_a_package_is_found_by_all_that_is_said_of_it(
    publish: Publish, olga: JsonApiClient, query: str
) -> None:
    routing = {"task": "code", "keywords": ["postgres", "join"]}
    publish("acme/sql", "1.0.0", description="Writes queries.", routing=routing, tags=["grammar"])
    assert names(olga, query) == ["acme/sql"]


@pytest.mark.parametrize("query", ["poetry", "sql+poetry", "writes+poetry"])
def test_every_word_has_to_be_there(publish: Publish, olga: JsonApiClient, query: str) -> None:
    publish("acme/sql", "1.0.0", description="Writes queries.")
    assert names(olga, query) == []


def test_what_fits_best_comes_first(publish: Publish, olga: JsonApiClient) -> None:
    publish("acme/other", description="Something like mysqlish.")
    publish("acme/words", description="Knows sql well.")
    publish("acme/my-sql", description="A dialect.")
    publish("acme/sql-gen", description="Writes.")
    publish("acme/sql", description="Exactly.")
    expected = ["acme/sql", "acme/sql-gen", "acme/my-sql", "acme/words", "acme/other"]
    assert names(olga, "sql") == expected
    assert names(olga, "acme/sql")[:2] == ["acme/sql", "acme/sql-gen"]
    assert names(olga, "sql+gen")[0] == "acme/sql-gen"


def test_among_equals_downloads_decide_then_names(
    served: RegistryHarness, publish: Publish, olga: JsonApiClient
) -> None:
    for name in ("acme/aa", "acme/bb", "acme/cc"):
        publish(name, "1.0.0", description="Same.")
    with served.registry.database.write() as connection:
        package = connection.execute(PACKAGES.select().where(PACKAGES.c.name == "cc")).one()
        connection.execute(
            update(RELEASES).where(RELEASES.c.package_id == package.id).values(downloads=5)
        )
    assert names(olga, "same") == ["acme/cc", "acme/aa", "acme/bb"]


def test_pages_follow_each_other(publish: Publish, olga: JsonApiClient) -> None:
    for name in ("acme/aa", "acme/bb", "acme/cc"):
        publish(name, "1.0.0")
    first = olga("GET", "search?limit=2")[1]
    assert [r["name"] for r in first["results"]] == ["acme/aa", "acme/bb"]
    assert first["next"] == "2"
    assert names(olga, "", "&limit=2&cursor=2") == ["acme/cc"]
    assert olga("GET", "search?limit=2&cursor=2")[1]["next"] is None


def test_a_package_that_is_yanked_whole_is_not_found(publish: Publish, olga: JsonApiClient) -> None:
    publish("acme/sql", "1.0.0", description="Old words.")
    publish("acme/sql", "1.1.0", description="New words.")
    assert names(olga, "new") == ["acme/sql"]
    olga("PUT", "packages/acme/sql/1.1.0/yank", {"reason": "wrong"})
    assert names(olga, "new") == []
    assert names(olga, "old") == ["acme/sql"]
    assert olga("GET", "search?q=sql")[1]["results"][0]["version"] == "1.0.0"
    olga("PUT", "packages/acme/sql/1.0.0/yank", {"reason": "wrong"})
    assert names(olga, "sql") == []


def test_only_what_one_may_read_is_found(
    served: RegistryHarness, publish: Publish, olga: JsonApiClient, nobody: JsonApiClient
) -> None:
    publish("acme/sql", "1.0.0")
    publish("open/sql", "1.0.0", read="public")
    assert names(nobody, "sql") == ["open/sql"]
    narrow = JsonApiClient(
        served.client(served.create_token("olga", TokenScope.parse("read:acme")))
    )
    elsewhere = JsonApiClient(
        served.client(served.create_token("olga", TokenScope.parse("read:other")))
    )
    assert names(narrow, "sql") == ["acme/sql", "open/sql"]
    assert names(elsewhere, "sql") == ["open/sql"]


@pytest.mark.parametrize("query", ["%25", "_", "*", "'", "\\", "(", "%00", '"', ";--", "[^]"])
def test_attack_84_signs_are_no_patterns_and_stand_between_words(
    publish: Publish, olga: JsonApiClient, query: str
) -> None:
    """What has no word in it finds all, as nothing does."""
    publish("acme/sql", "1.0.0")
    assert names(olga, query) == ["acme/sql"]
    assert names(olga, f"zzz{query}") == names(olga, f"{query}zzz") == []
    assert names(olga, f"acme{query}sql") == ["acme/sql"]


@pytest.mark.parametrize("query", ["'+OR+1=1--", "x')+UNION+SELECT+hash+FROM+tokens--", "sq_x"])
def test_attack_84_no_text_is_a_part_of_a_statement(
    publish: Publish, olga: JsonApiClient, query: str
) -> None:
    publish("acme/sql", "1.0.0", description="Writes.")
    assert names(olga, query) == []


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("q=" + "a" * 200, 200),
        ("q=" + "a" * 201, 400),
        ("q=" + "+".join("abcdefgh"), 200),
        ("q=" + "+".join("abcdefghi"), 400),
        ("limit=101", 400),
        ("cursor=-1", 400),
        ("cursor=99999", 400),
        ("cursor=1'", 400),
    ],
)
def test_attack_84_a_search_is_bounded(olga: JsonApiClient, query: str, status: int) -> None:
    assert olga("GET", f"search?{query}")[0] == status


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("&namespace=acme", ["acme/sql", "acme/tone"]),
        ("&namespace=acme&q=sql", ["acme/sql"]),
        ("&base=other/base", ["acme/tone"]),
        ("&base=other", []),
        ("&kind=lora", ["acme/sql", "acme/tone", "open/sql"]),
        ("&kind=dora", []),
        ("&namespace=no%25", []),
        ("&namespace=' OR 1=1 --", []),
    ],
)
def test_results_are_limited_to_a_namespace_a_base_or_a_kind(
    publish: Publish, olga: JsonApiClient, rest: str, expected: list[str]
) -> None:
    publish("acme/sql")
    base = olga("GET", "packages/acme/sql/1.0.0")[1]["manifest"]["base"]
    publish("acme/tone", base=base | {"name": "other/base"}, description="Keeps a tone.")
    publish("open/sql")
    page = olga("GET", f"search?{rest}")[1]
    assert [result["name"] for result in page["results"]] == expected
    assert page["total"] == len(expected)


@pytest.mark.parametrize("rest", ["kind=qlora", "kind=LORA", f"base={'a' * 201}"])
def test_attack_84_filters_are_bounded(olga: JsonApiClient, rest: str) -> None:
    assert olga("GET", f"search?{rest}")[0] == 400
