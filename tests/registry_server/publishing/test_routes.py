"""Index documents over HTTP: the signed bytes, who may read them, and when they are not sent."""

import hashlib

import pytest
from starlette.testclient import TestClient

from expertctl.reference import PackageName
from expertctl.registry.index_document import open_index
from expertctl.trust.keys import PrivateKey
from registry_server.access.rights import Action, Identity, TokenScope
from registry_server.publishing.releases import add_key, yank_release
from registry_server.registry import Registry
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.publishing.package_fixtures import PackageTemplate, upload_and_publish

PATH = "/tuf/targets/index/acme/sql.json"
SQL = PackageName("acme", "sql")


@pytest.fixture(autouse=True)
def published(
    registry: Registry, owner: Identity, template: PackageTemplate, alice: PrivateKey
) -> None:
    upload_and_publish(registry, owner, template.make_package(key=alice))


@pytest.fixture
def client(served: RegistryHarness, published: None) -> TestClient:
    return served.client(served.create_token("olga"))


def test_the_document_is_signed_and_its_digest_is_the_etag(
    client: TestClient, registry: Registry
) -> None:
    answer = client.get(PATH)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["etag"] == f'"sha256:{hashlib.sha256(answer.content).hexdigest()}"'
    index = open_index(answer.content, key=registry.index_key.public, package=SQL)
    assert index.revision == 1


def test_who_has_the_document_gets_nothing(client: TestClient) -> None:
    etag = client.get(PATH).headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        answer = client.get(PATH, headers={"If-None-Match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == etag


def test_a_change_has_another_etag(client: TestClient, registry: Registry, owner: Identity) -> None:
    before = client.get(PATH)
    yank_release(registry, owner, name=SQL, version="1.0.0", reason="bad")
    after = client.get(PATH, headers={"If-None-Match": before.headers["etag"]})
    assert after.status_code == 200
    assert after.content != before.content


def test_head_says_what_get_would(client: TestClient) -> None:
    got, headed = client.get(PATH), client.head(PATH)
    assert headed.content == b""
    for name in ("etag", "content-length", "content-type"):
        assert headed.headers[name] == got.headers[name]


def test_no_shared_cache_keeps_a_document(client: TestClient) -> None:
    headers = client.get(PATH).headers
    assert headers["cache-control"] == "private, no-cache"
    assert "authorization" in headers["vary"].lower()


@pytest.mark.parametrize(
    "path",
    [
        "/tuf/targets/index/acme/none.json",
        "/tuf/targets/index/nowhere/sql.json",
        "/tuf/targets/index/acme/SQL.json",
        "/tuf/targets/index/acme/sql",
        "/tuf/targets/index/acme/.json",
    ],
)
def test_a_package_that_is_not_there_has_no_document(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"code", "message", "hint"}


@pytest.mark.parametrize("part", ["acme/..%2fsql", "acme%2fsql", "../sql", "acme//sql"])
def test_a_path_that_two_readers_could_take_apart_differently_leads_nowhere(
    client: TestClient, part: str
) -> None:
    assert client.get(f"/tuf/targets/index/{part}.json").status_code in {400, 404}


def test_a_private_namespace_tells_strangers_nothing(served: RegistryHarness) -> None:
    answers = [served.client().get(path) for path in (PATH, PATH.replace("sql", "none"))]
    assert [answer.status_code for answer in answers] == [401, 401]
    assert answers[0].json() == answers[1].json()


def test_a_token_for_another_package_may_not_read(served: RegistryHarness) -> None:
    secret = served.create_token("olga", TokenScope(Action.READ, "acme", "other"))
    assert served.client(secret).get(PATH).status_code == 403


def test_anybody_reads_a_public_namespace(
    served: RegistryHarness,
    registry: Registry,
    owner: Identity,
    template: PackageTemplate,
    alice: PrivateKey,
) -> None:
    served.create_namespace("open", kind="expert", read="public", owner="olga")
    add_key(registry, owner, namespace="open", public_key=alice.public.pem(), statement=None)
    upload_and_publish(registry, owner, template.make_package("open/sql", key=alice))
    assert served.client().get("/tuf/targets/index/open/sql.json").status_code == 200
