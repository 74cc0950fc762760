"""Publishing over plain OCI, as any client that can push does it."""

import httpx2
import pytest
from starlette.testclient import TestClient

from expertctl.trust.keys import PrivateKey
from registry_server.publishing.releases import add_key
from tests.registry_server.harness import RegistryHarness
from tests.registry_server.oci.images import IMAGE, read_error_code
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    build_template,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def olga(served: RegistryHarness, key: PrivateKey) -> TestClient:
    """The owner of `acme`, a namespace of packages for which `key` signs."""
    secret = served.create_user("olga")
    served.create_namespace("acme", kind="expert", owner="olga")
    owner = served.authenticate(secret)
    pem = key.public.pem()
    add_key(served.registry, owner, namespace="acme", public_key=pem, statement=None)
    return served.client(secret)


def push(client: TestClient, parcel: InMemoryPackage) -> None:
    for digest, data in parcel.blobs.items():
        path = f"/v2/{parcel.name}/blobs/uploads/"
        assert client.post(path, params={"digest": str(digest)}, content=data).status_code == 201


def put(client: TestClient, parcel: InMemoryPackage, tag: str) -> httpx2.Response:
    path = f"/v2/{parcel.name}/manifests/{tag}"
    headers = {"Content-Type": IMAGE}
    return client.put(path, content=parcel.layout.manifest, headers=headers)


def test_the_put_of_a_version_publishes_it_and_again_is_no_harm(
    olga: TestClient, template: PackageTemplate, key: PrivateKey
) -> None:
    parcel = template.make_package(key=key)
    push(olga, parcel)
    answers = [put(olga, parcel, "1.0.0"), put(olga, parcel, "1.0.0")]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].headers["Docker-Content-Digest"] == str(parcel.package_digest)
    assert olga.get(answers[0].headers["Location"]).content == parcel.layout.manifest
    assert olga.get("/v2/acme/sql/tags/list").json()["tags"] == ["1.0.0"]
    assert olga.get("/tuf/targets/index/acme/sql.json").status_code == 200


def test_attack_76_other_content_of_a_version_and_a_moved_tag_are_refused(
    olga: TestClient, template: PackageTemplate, key: PrivateKey
) -> None:
    first = template.make_package(key=key)
    other = template.make_package(key=key, description="something else")
    push(olga, first)
    push(olga, other)
    assert put(olga, first, "1.0.0").status_code == 201
    refused = put(olga, other, "1.0.0")
    assert (refused.status_code, read_error_code(refused)) == (409, "DENIED")
    assert refused.json()["errors"][0]["detail"]["code"] == "conflict"
    removed = olga.delete("/v2/acme/sql/manifests/1.0.0")
    assert (removed.status_code, read_error_code(removed)) == (405, "UNSUPPORTED")
    kept = olga.get("/v2/acme/sql/manifests/1.0.0")
    assert kept.headers["Docker-Content-Digest"] == str(first.package_digest)


@pytest.mark.parametrize(
    "tag", ["1.0", "v1.0.0", "01.0.0", "1.0.0-", "1.0.0.0", "latest", "1.0.0-rc.01", "2.0.0"]
)
def test_attack_76_a_tag_that_is_not_the_version_publishes_nothing(
    olga: TestClient, template: PackageTemplate, key: PrivateKey, tag: str
) -> None:
    parcel = template.make_package(key=key)
    push(olga, parcel)
    assert put(olga, parcel, tag).status_code in {400, 405, 409}
    assert olga.get("/v2/acme/sql/tags/list").json()["tags"] == []
    assert olga.get("/tuf/targets/index/acme/sql.json").status_code == 404


def test_a_package_whose_blobs_were_not_pushed_here_is_refused(
    served: RegistryHarness, olga: TestClient, template: PackageTemplate, key: PrivateKey
) -> None:
    parcel = template.make_package(key=key)
    answer = put(olga, parcel, "1.0.0")
    assert answer.status_code in {400, 404}
    assert olga.get("/tuf/targets/index/acme/sql.json").status_code == 404


def test_a_fetch_of_a_version_is_a_download_and_a_look_is_none(
    served: RegistryHarness, olga: TestClient, template: PackageTemplate, key: PrivateKey
) -> None:
    parcel = template.make_package(key=key)
    push(olga, parcel)
    put(olga, parcel, "1.0.0")
    for method in ("HEAD", "GET", "GET"):
        assert olga.request(method, "/v2/acme/sql/manifests/1.0.0").status_code == 200
    served.registry.downloads.flush(served.registry.database)
    [version] = olga.get("/api/v1/packages/acme/sql").json()["versions"]
    assert version["downloads"] == 2


def test_counts_are_written_in_between_when_there_are_many(
    served: RegistryHarness, olga: TestClient, template: PackageTemplate, key: PrivateKey
) -> None:
    parcel = template.make_package(key=key)
    push(olga, parcel)
    put(olga, parcel, "1.0.0")
    for number in range(999):
        served.registry.downloads.count("acme/none", str(number))
    assert olga.get("/v2/acme/sql/manifests/1.0.0").status_code == 200
    [version] = olga.get("/api/v1/packages/acme/sql").json()["versions"]
    assert version["downloads"] == 1
