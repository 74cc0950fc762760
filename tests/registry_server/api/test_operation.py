"""What every operation does with a request before its handler sees it."""

import gzip
import json
from collections.abc import Callable

import pytest

from tests.registry_server.conftest import NewRegistry
from tests.registry_server.harness import JsonApiClient, RegistryHarness


@pytest.fixture
def post(served: RegistryHarness) -> Callable[..., tuple[int, str]]:
    """Send bytes to the making of users; return the status and the message."""
    client = served.client(served.create_user("boss", admin=True))

    def send(content: bytes, media_type: str | None = "application/json") -> tuple[int, str]:
        headers = {"Content-Type": media_type} if media_type else {}
        answer = client.post("/api/v1/users", content=content, headers=headers)
        return answer.status_code, answer.json().get("error", {}).get("message", "")

    return send


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "not strict JSON"),
        (b"{", "not strict JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"name": "a", "name": "b"}', "duplicate key 'name'"),
        (b'{"name": "\xff"}', "not UTF-8"),
        (b'{"name": NaN}', "NaN is not a JSON number"),
        (b'{"name": "bob", "shoe_size": 44}', "unknown field `shoe_size`"),
        (b"{}", "missing required field `name`"),
        (b'{"name": 5}', "Expected `str`, got `int`"),
        (b'{"name": null}', "Expected `str`, got `null`"),
        (b'{"name": "bob", "admin": "yes"}', "Expected `bool`, got `str`"),
        (b'{"name": "bob", "admin": 1}', "Expected `bool`, got `int`"),
        (b'{"name": "Bob"}', "matching regex"),
        (b'{"name": "bob\\n"}', "is not a name"),
        (b'{"name": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
    ],
)
def test_a_body_is_read_strictly(
    post: Callable[..., tuple[int, str]], content: bytes, fact: str
) -> None:
    status, message = post(content)
    assert status == 400
    assert fact in message


@pytest.mark.parametrize(
    "media_type", [None, "text/plain", "application/xml", "application/x-www-form-urlencoded", "x"]
)
def test_a_body_is_json_and_says_so(
    post: Callable[..., tuple[int, str]], media_type: str | None
) -> None:
    assert post(b'{"name": "bob"}', media_type) == (415, "the body must be application/json")


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_may_be_said_in_more_ways(
    post: Callable[..., tuple[int, str]], media_type: str
) -> None:
    assert post(b'{"name": "bob"}', media_type)[0] == 201


def test_attack_85_a_compressed_body_is_refused(served: RegistryHarness) -> None:
    client = served.client(served.create_user("boss", admin=True))
    bomb = gzip.compress(b'{"name": "' + b"a" * 10_000_000 + b'"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = client.post("/api/v1/users", content=bomb, headers=headers)
    assert answer.status_code == 415
    assert "compressed" in answer.json()["error"]["message"]


def test_a_body_is_bounded(make_registry: NewRegistry) -> None:
    served = make_registry(body_bytes=1000)
    client = served.client(served.create_user("boss", admin=True))
    body = json.dumps({"name": "a" * 1000}).encode()
    headers = {"Content-Type": "application/json"}
    assert client.post("/api/v1/users", content=body, headers=headers).status_code == 413
    chunked = iter([body])
    assert client.post("/api/v1/users", content=chunked, headers=headers).status_code == 413


@pytest.mark.parametrize(
    ("query", "fact"),
    [
        ("limit=0", ">= 1"),
        ("limit=101", "<= 100"),
        ("limit=ten", "Expected `int`"),
        ("limit=1.5", "Expected `int`"),
        ("limit=", "Expected `int`"),
        ("limit=5&limit=6", "given twice"),
        ("page=2", "unknown field `page`"),
    ],
)
def test_a_query_is_read_strictly(boss: JsonApiClient, query: str, fact: str) -> None:
    status, answer = boss("GET", f"users?{query}")
    assert status == 400
    assert fact in answer["error"]["message"]


def test_a_path_is_read_strictly(boss: JsonApiClient) -> None:
    status, answer = boss("GET", "namespaces/Acme")
    assert status == 400
    assert "the path is invalid" in answer["error"]["message"]


def test_what_is_not_there_says_so_in_the_same_shape(boss: JsonApiClient) -> None:
    status, answer = boss("GET", "nonsense")
    assert status == 404
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"code", "message", "hint"}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "users", {"GET", "HEAD", "POST"}),
        ("POST", "namespaces/acme", {"GET", "HEAD", "PATCH"}),
        ("OPTIONS", "whoami", {"GET", "HEAD"}),
        ("TRACE", "whoami", {"GET", "HEAD"}),
    ],
)
def test_a_method_that_is_not_there_names_those_that_are(
    served: RegistryHarness, method: str, path: str, allowed: set[str]
) -> None:
    answer = served.client().request(method, f"/api/v1/{path}")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == allowed


def test_head_answers_like_get_without_a_body(served: RegistryHarness) -> None:
    answer = served.client().head("/api/v1/")
    assert (answer.status_code, answer.content) == (200, b"")


def test_answers_are_kept_by_nobody(served: RegistryHarness) -> None:
    answer = served.client().get("/api/v1/")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "application/json"
