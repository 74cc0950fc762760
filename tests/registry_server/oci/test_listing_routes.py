"""Lists of tags and of referrers, page by page."""

import re

import pytest
from starlette.testclient import TestClient

from registry_server.oci import manifests
from tests.registry_server.oci.images import (
    IMAGE,
    INDEX,
    compute_digest,
    encode_json,
    make_descriptor,
    make_image,
    make_image_index,
    push_blob,
    push_image,
    put_manifest,
    read_error_code,
)

TAGS = ["1.0.0", "1.0.0-rc.1", "A", "Z", "_x", "a", "b"]
"""In the order of their bytes."""
SUBJECT = compute_digest(b"subject")
LIST = "/v2/acme/x/tags/list"
REFERRERS = f"/v2/acme/x/referrers/{SUBJECT}"


@pytest.fixture
def tagged(alice: TestClient) -> TestClient:
    content = make_image(push_blob(alice, "acme/x", b"{}"))
    query = "&".join(f"tag={tag}" for tag in sorted(TAGS, reverse=True))
    digest = push_image(alice, "acme/x", "b")
    assert put_manifest(alice, "acme/x", f"{digest}?{query}", content).status_code == 201
    return alice


def next_of(link: str) -> str:
    match = re.fullmatch(r'<(/v2/[^>]+)>; rel="next"', link)
    assert match is not None
    return match[1]


def test_all_tags_come_in_the_order_of_their_bytes(tagged: TestClient) -> None:
    answer = tagged.get(LIST)
    assert answer.json() == {"name": "acme/x", "tags": TAGS}
    assert "Link" not in answer.headers


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8])
def test_pages_of_tags_give_each_tag_once(tagged: TestClient, size: int) -> None:
    address, seen, pages = f"{LIST}?n={size}", [], 0
    while address:
        answer = tagged.get(address)
        assert len(answer.json()["tags"]) <= size
        seen += answer.json()["tags"]
        pages += 1
        address = next_of(answer.headers["Link"]) if "Link" in answer.headers else ""
    assert seen == TAGS
    assert pages == -(-len(TAGS) // size)


def test_tags_begin_behind_the_last_one_whether_it_is_there_or_not(tagged: TestClient) -> None:
    assert tagged.get(LIST, params={"last": "Z"}).json()["tags"] == ["_x", "a", "b"]
    assert tagged.get(LIST, params={"last": "M"}).json()["tags"] == ["Z", "_x", "a", "b"]
    assert tagged.get(LIST, params={"last": "zzz"}).json()["tags"] == []


def test_no_tags_are_listed_when_none_are_asked_for(tagged: TestClient) -> None:
    answer = tagged.get(f"{LIST}?n=0")
    assert (answer.json()["tags"], "Link" in answer.headers) == ([], False)


@pytest.mark.parametrize("number", ["-1", "1.5", "x", "", "1e3", "0x10", "+1", "\u0661", "9" * 13])
def test_a_number_of_tags_that_is_none_is_refused(tagged: TestClient, number: str) -> None:
    answer = tagged.get(LIST, params={"n": number})
    assert (answer.status_code, read_error_code(answer)) == (400, "PAGINATION_NUMBER_INVALID")


def test_a_huge_number_of_tags_is_a_page(tagged: TestClient) -> None:
    assert tagged.get(f"{LIST}?n=1000000000").json()["tags"] == TAGS


@pytest.mark.parametrize(
    ("last", "status"),
    [("' OR 1=1 --", 200), ("%", 200), ("\x00", 200), ('"><script>', 200), ("a" * 129, 400)],
)
def test_last_is_a_value_and_never_a_part_of_the_query(
    tagged: TestClient, last: str, status: int
) -> None:
    answer = tagged.get(LIST, params={"last": last, "n": "1"})
    assert answer.status_code == status
    if status == 200:
        after = [tag for tag in TAGS if tag > last][:1]
        assert answer.json()["tags"] == after
        assert "script" not in answer.headers.get("Link", "")


def test_tags_of_a_repository_that_never_was_are_404(alice: TestClient) -> None:
    answer = alice.get("/v2/acme/never/tags/list")
    assert (answer.status_code, read_error_code(answer)) == (404, "NAME_UNKNOWN")


def refer(client: TestClient, *, artifact_type: str, note: str = "") -> str:
    """Push an artifact that has `SUBJECT` as its subject."""
    config = push_blob(client, "acme/x", b"{}")
    more = {"artifactType": artifact_type, "annotations": {"note": note}}
    document = make_image(config, subject=make_descriptor(SUBJECT, 5, IMAGE), **more)
    answer = put_manifest(client, "acme/x", compute_digest(encode_json(document)), document)
    assert answer.status_code == 201
    return str(answer.headers["Docker-Content-Digest"])


def test_nothing_refers_to_what_was_never_pushed(alice: TestClient) -> None:
    answer = alice.get(f"/v2/acme/never/referrers/{SUBJECT}")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == INDEX
    assert answer.json() == {"schemaVersion": 2, "mediaType": INDEX, "manifests": []}


def test_referrers_are_described_as_they_describe_themselves(alice: TestClient) -> None:
    digest = refer(alice, artifact_type="a/b", note="hello")
    size = int(alice.head(f"/v2/acme/x/manifests/{digest}").headers["Content-Length"])
    [found] = alice.get(REFERRERS).json()["manifests"]
    assert found == {
        "mediaType": IMAGE,
        "digest": digest,
        "size": size,
        "artifactType": "a/b",
        "annotations": {"note": "hello"},
    }


def test_an_image_without_an_artifact_type_is_of_the_type_of_its_config(alice: TestClient) -> None:
    config = push_blob(alice, "acme/x", b"{}")
    put_manifest(
        alice, "acme/x", "v1", make_image(config, subject=make_descriptor(SUBJECT, 5, IMAGE))
    )
    [found] = alice.get(REFERRERS).json()["manifests"]
    assert found["artifactType"] == "application/vnd.oci.image.config.v1+json"
    assert "annotations" not in found


def test_an_index_refers_too_and_has_no_artifact_type_of_its_own(alice: TestClient) -> None:
    put_manifest(
        alice, "acme/x", "v1", make_image_index(subject=make_descriptor(SUBJECT, 5, IMAGE))
    )
    refer(alice, artifact_type="a/b")
    [found] = alice.get(REFERRERS, params={"artifactType": ""}).json()["manifests"]
    assert (found["mediaType"], "artifactType" in found) == (INDEX, False)


def test_referrers_of_one_type_alone_can_be_asked_for(alice: TestClient) -> None:
    wanted = refer(alice, artifact_type="a/b")
    refer(alice, artifact_type="c/d")
    answer = alice.get(REFERRERS, params={"artifactType": "a/b"})
    assert [entry["digest"] for entry in answer.json()["manifests"]] == [wanted]
    assert answer.headers["OCI-Filters-Applied"] == "artifactType"
    assert "OCI-Filters-Applied" not in alice.get(REFERRERS).headers
    assert alice.get(REFERRERS, params={"artifactType": "x/y"}).json()["manifests"] == []
    assert alice.get(REFERRERS, params={"artifactType": "a" * 256}).status_code == 400


@pytest.mark.parametrize(("name", "limit"), [("MAX_REFERRERS", 2), ("MAX_REFERRER_BYTES", 1100)])
def test_many_referrers_come_in_pages(
    alice: TestClient, monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(manifests, name, limit)
    pushed = {refer(alice, artifact_type="a/b", note=str(number)) for number in range(5)}
    address, seen = f"{REFERRERS}?artifactType=a%2Fb", []
    while address:
        answer = alice.get(address)
        assert len(answer.json()["manifests"]) <= 2
        assert answer.headers["OCI-Filters-Applied"] == "artifactType"
        seen += [entry["digest"] for entry in answer.json()["manifests"]]
        address = next_of(answer.headers["Link"]) if "Link" in answer.headers else ""
    assert seen == sorted(pushed)


@pytest.mark.parametrize("digest", ["latest", "sha256:AB", "md5:" + "0" * 32])
def test_only_what_has_a_digest_has_referrers(alice: TestClient, digest: str) -> None:
    answer = alice.get(f"/v2/acme/x/referrers/{digest}")
    assert (answer.status_code, read_error_code(answer)) == (400, "DIGEST_INVALID")
    refused = alice.get(REFERRERS, params={"last": digest})
    assert refused.status_code in {200, 400}


def test_a_removed_referrer_is_no_longer_listed(alice: TestClient) -> None:
    digest = refer(alice, artifact_type="a/b")
    alice.delete(f"/v2/acme/x/manifests/{digest}")
    assert alice.get(REFERRERS).json()["manifests"] == []


def test_an_index_under_the_tag_that_old_registries_need_is_an_ordinary_tag(
    alice: TestClient,
) -> None:
    tag = SUBJECT.replace(":", "-")
    assert put_manifest(alice, "acme/x", tag, make_image_index()).status_code == 201
    assert alice.get(LIST).json()["tags"] == [tag]
    assert alice.get(REFERRERS).json()["manifests"] == []


def test_there_is_no_catalogue_for_anybody(alice: TestClient) -> None:
    assert alice.get("/v2/_catalog").status_code == 404
