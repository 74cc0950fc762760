"""The whole application: who is let in, with what, and how it refuses."""

import json
import logging
import time
from dataclasses import replace
from typing import Any

import pytest

from expertctl.engine_config import EngineConfig
from expertctl.server.settings import ServeSettings
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, URL, ServerHarness

CHAT = "/v1/chat/completions"
POSTS = (CHAT, "/v1/completions", "/v1/messages", "/v1/infer", "/v1/jobs", "/v1/route")
TURNS = [{"role": "user", "content": "Sort: 3, 1, 2"}]
ASKED: dict[str, Any] = {"model": BASE, "messages": TURNS, "max_tokens": 3, "temperature": 0}
SETTINGS = ServeSettings(engine=EngineConfig(memory_budget=64 << 20))


def error_of(body: Any) -> str:
    """The message of an error in any of the three shapes."""
    return str(body["error"]["message"])


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.0.2.1", ""])
def test_attack_101_a_name_that_was_rebound_is_refused(
    served: ServerHarness, path: str, host: str
) -> None:
    answer = served.client().post(path, json=ASKED, headers={"Host": host})
    assert answer.status_code == 421
    assert "evil" not in answer.text
    if path == "/v1/infer":
        assert answer.json()["error"]["code"] == "misdirected"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/experts", "/metrics", "/status/data", "/"])
def test_attack_101_a_name_that_was_rebound_reads_nothing(served: ServerHarness, path: str) -> None:
    answer = served.client().get(path, headers={"Host": "evil.example:8000"})
    assert answer.status_code == 421


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:3000", f"{URL}.evil.example"]
)
def test_attack_101_a_page_of_another_site_is_refused(
    served: ServerHarness, path: str, origin: str
) -> None:
    answer = served.client().post(path, json=ASKED, headers={"Origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_attack_101_a_page_of_another_site_reads_nothing(served: ServerHarness) -> None:
    answer = served.client().get("/v1/models", headers={"Origin": "https://evil.example"})
    assert answer.status_code == 403


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain; application/json", "application/x-www-form-urlencoded", ""]
)
def test_attack_101_what_a_form_can_send_is_not_read(
    served: ServerHarness, path: str, kind: str
) -> None:
    content = json.dumps(ASKED).encode()
    answer = served.client().post(path, content=content, headers={"Content-Type": kind})
    assert answer.status_code == 415


@pytest.mark.parametrize("origin", [URL, "http://localhost:8000", "http://[::1]:8000"])
def test_a_page_of_our_own_is_answered(served: ServerHarness, origin: str) -> None:
    assert served.client().get("/v1/models", headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b'{"a": 1, "a": 1}', b"[" * 100_000],
)
def test_what_is_no_json_object_is_refused(
    served: ServerHarness, path: str, content: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    answer = served.client().post(path, content=content, headers=headers)
    assert answer.status_code == 400
    assert len(answer.content) < 1000


FOREIGN = {"lora_path": "/etc/passwd"}


def asked_at(path: str) -> dict[str, Any]:
    said = {"prompt": "x"} if path != CHAT and path != "/v1/messages" else {"messages": TURNS}
    return {"model": BASE, "max_tokens": 3, "temperature": 0, **said}


def test_a_field_that_nobody_knows_is_refused_where_a_plan_is_asked_for(
    served: ServerHarness,
) -> None:
    answer = served.client().post("/v1/route", json={"prompt": "x", **FOREIGN})
    assert answer.status_code == 400
    assert "lora_path" in answer.text
    assert "/etc/passwd" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", POSTS[:3])
def test_a_field_that_nobody_knows_is_ignored_by_published_apis_and_told(
    served: ServerHarness, path: str, stream: bool
) -> None:
    answer = served.client().post(path, json={**asked_at(path), **FOREIGN, "stream": stream})
    assert answer.status_code == 200
    assert answer.headers["x-expertctl-ignored"] == "lora_path"
    assert "fields that this server does not implement were ignored: lora_path" in answer.text
    assert "/etc/passwd" not in answer.text
    silent = served.client().post(path, json={**asked_at(path), "stream": stream})
    assert "x-expertctl-ignored" not in silent.headers
    assert "were ignored" not in silent.text


@pytest.mark.parametrize("path", POSTS[:3])
def test_a_server_with_strict_fields_refuses_what_it_does_not_know(
    make_served: MakeServed, path: str
) -> None:
    client = make_served(replace(SETTINGS, strict_fields=True)).client()
    assert client.post(path, json=asked_at(path)).status_code == 200
    answer = client.post(path, json={**asked_at(path), **FOREIGN})
    assert answer.status_code == 400
    assert "lora_path" in error_of(answer.json())
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["InferRequest"]["additionalProperties"] is False


def test_counting_tokens_ignores_what_it_does_not_know(served: ServerHarness) -> None:
    asked = {"model": BASE, "messages": TURNS}
    client = served.client()
    plain = client.post("/v1/messages/count_tokens", json=asked)
    answer = client.post("/v1/messages/count_tokens", json={**asked, "context_management": {}})
    assert answer.json() == plain.json()
    assert answer.headers["x-expertctl-ignored"] == "context_management"


def test_the_openapi_document_allows_what_is_ignored(served: ServerHarness) -> None:
    schemas = served.client().get("/openapi.json").json()["components"]["schemas"]
    bodies = ("ChatRequest", "CompletionRequest", "MessageRequest", "CountRequest", "InferRequest")
    for name in (*bodies, "Tool"):
        assert "additionalProperties" not in schemas[name]
    assert schemas["RouteFields"]["additionalProperties"] is False


def test_a_wrong_type_is_refused_by_the_name_of_its_field(served: ServerHarness) -> None:
    answer = served.client().post(CHAT, json={**ASKED, "temperature": "hot"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


def test_a_huge_body_is_refused(make_served: MakeServed) -> None:
    small = make_served(replace(SETTINGS, body_bytes=1000)).client()
    answer = small.post(CHAT, json={**ASKED, "user": "x" * 1000})
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert small.post(CHAT, json=ASKED).status_code == 200


def test_huge_headers_are_refused(served: ServerHarness) -> None:
    answer = served.client().get("/v1/models", headers={"X": "a" * (33 << 10)})
    assert answer.status_code == 431


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/v1/models/x/../y", "/v1//models"])
def test_an_address_that_is_none_is_not_found(served: ServerHarness, path: str) -> None:
    assert served.client().get(path).status_code in {400, 404}


def test_what_is_not_there_is_answered_with_the_way_out(served: ServerHarness) -> None:
    """In the native shape; those of others have no place for it."""
    client = served.client()
    nowhere, other = client.get("/nothing"), client.put("/v1/jobs/x")
    page = client.post("/v1/infer", json=ASKED, headers={"Origin": "https://evil.example"})
    hints = [answer.json()["error"]["hint"] for answer in (nowhere, other, page)]
    assert hints == [
        "GET /openapi.json lists all paths",
        "use DELETE, GET, HEAD",
        "send the request from that site's server, or start with --allow-origin ORIGIN",
    ]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [(CHAT, "POST"), ("/v1/models", "GET, HEAD"), ("/v1/jobs/x", "DELETE, GET, HEAD")],
)
def test_another_method_is_told_which_there_are(
    served: ServerHarness, path: str, allowed: str
) -> None:
    answer = served.client().put(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert "PUT is not allowed" in error_of(answer.json())


@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/nowhere"])
def test_every_answer_has_an_id_of_ours(served: ServerHarness, path: str) -> None:
    """OpenAI's clients read the one header, Anthropic's the other."""
    answer = served.client().get(path, headers={"X-Request-Id": "forged"})
    assert answer.headers["x-request-id"].startswith("req_")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_an_error_of_anthropics_api_names_the_request(served: ServerHarness) -> None:
    answer = served.client().post("/v1/messages", json={})
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_the_log_has_a_line_for_each_request_and_nothing_of_its_text(
    served: ServerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="expertctl.server")
    answer = served.client().post(CHAT, json=ASKED)
    assert answer.status_code == 200
    (record,) = [r for r in caplog.records if r.name == "expertctl.server.requests"]
    fields = record.__dict__["fields"]
    assert fields["id"] == answer.headers["x-request-id"]
    assert (fields["route"], fields["status"], fields["caller"]) == (CHAT, 200, "local")
    assert "Sort" not in str([r.__dict__ for r in caplog.records])


def test_prompts_are_logged_where_that_is_asked_for(
    make_served: MakeServed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="expertctl.server")
    make_served(replace(SETTINGS, log_prompts=True)).client().post(CHAT, json=ASKED)
    (record,) = [r for r in caplog.records if r.getMessage() == "prompt"]
    assert record.__dict__["fields"]["prompt"] == "Sort: 3, 1, 2"


def test_without_keys_this_machine_is_answered_and_with_one_it_needs_it(
    make_served: MakeServed,
) -> None:
    served = make_served(SETTINGS)
    assert served.client().get("/v1/models").status_code == 200
    made = served.service.keys.create("first", now=time.time())
    assert served.client().get("/v1/models").status_code == 401
    assert served.client(made.secret).get("/v1/models").status_code == 200
    shown = {"x-api-key": made.secret}
    assert served.client().get("/v1/models", headers=shown).status_code == 200
    served.service.keys.revoke("first")
    assert served.client(made.secret).get("/v1/models").status_code == 401
    assert served.client().get("/v1/models").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer xpk_" + "a" * 43},
        {"Authorization": "Basic {secret}"},
        {"Authorization": "Bearer {secret}x"},
        {"Authorization": "Bearer {secret}", "x-api-key": "other"},
        {"Cookie": "key={secret}"},
    ],
)
def test_who_shows_no_key_or_two_is_refused_in_the_shape_of_each_api(
    make_served: MakeServed, headers: dict[str, str]
) -> None:
    served = make_served(SETTINGS)
    secret = served.service.keys.create("first", now=time.time()).secret
    shown = {name: value.format(secret=secret) for name, value in headers.items()}
    client = served.client()
    assert client.post(CHAT, json=ASKED, headers=shown).json()["error"]["code"] == "invalid_api_key"
    told = client.post("/v1/messages", json=ASKED, headers=shown).json()
    assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
    ours = client.post(f"/v1/infer?api_key={secret}", json=ASKED, headers=shown)
    assert (ours.status_code, ours.json()["error"]["code"]) == (401, "unauthenticated")
    assert ours.headers["www-authenticate"] == "Bearer"


def test_with_keys_anybody_may_still_ask_whether_it_lives(make_served: MakeServed) -> None:
    served = make_served(SETTINGS)
    served.service.keys.create("first", now=time.time())
    client = served.client()
    assert [client.get(p).status_code for p in ("/healthz", "/readyz", "/openapi.json")] == [
        200
    ] * 3
    assert [client.get(p).status_code for p in ("/metrics", "/status/data")] == [401] * 2


def test_a_server_for_others_answers_nobody_without_a_key(make_served: MakeServed) -> None:
    served = make_served(replace(SETTINGS, host="0.0.0.0"))
    assert not served.service.keys.are_required
    assert served.client().get("/v1/models").status_code == 401


def test_a_key_has_its_requests_and_its_tokens(make_served: MakeServed) -> None:
    served = make_served(SETTINGS)
    keys, now = served.service.keys, time.time()
    seldom = keys.create("seldom", now=now, requests_per_minute=1).secret
    little = keys.create("little", now=now, tokens_per_minute=5).secret
    assert served.client(seldom).get("/v1/models").status_code == 200
    answer = served.client(seldom).get("/v1/models")
    assert (answer.status_code, int(answer.headers["retry-after"])) == (429, 60)
    assert served.client(little).post(CHAT, json=ASKED).status_code == 200
    answer = served.client(little).post(CHAT, json=ASKED)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 60
    assert "tokens" in error_of(answer.json())


def test_before_the_base_is_loaded_there_is_nothing_but_patience(make_served: MakeServed) -> None:
    served = make_served(SETTINGS)
    served.service.readiness.state = "loading"
    client = served.client()
    assert client.get("/healthz").status_code == 200
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"ready": False, "state": "loading"})
    answer = client.post(CHAT, json=ASKED)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    served.service.readiness.state = "ready"
    assert client.get("/readyz").json() == {"ready": True, "state": "ready"}


def test_what_nobody_expected_is_500_without_detail(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> float:
        raise RuntimeError("secret detail /etc/passwd")

    monkeypatch.setattr(served.service.engine, "estimate_wait", broken)
    answer = served.client().post("/v1/jobs", json={"prompt": "x"})
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert answer.headers["x-request-id"] in answer.text
