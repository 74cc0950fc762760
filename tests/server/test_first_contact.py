"""What clients do before their first prompt: look whether a server is there, and how it is called.

`/health` answers as the servers do for which such clients were written: 200 once requests are
answered, 503 before.
"""

from typing import Any

import anthropic
import openai
import pytest

from expertctl import __version__
from expertctl.engine_config import EngineConfig
from expertctl.errors import UsageError
from expertctl.server.settings import ServeSettings, check_settings
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, URL, ServerHarness

CHAT = {"model": BASE, "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
SMALL = EngineConfig(memory_budget=64 << 20)


def test_whoever_waits_for_health_is_told_when_requests_are_answered(
    make_served: MakeServed,
) -> None:
    served = make_served()
    client = served.client()
    answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    served.service.readiness.state = "loading"
    waiting = client.get("/health")
    assert (waiting.status_code, waiting.json()) == (503, {"status": "unavailable"})
    assert int(waiting.headers["retry-after"]) > 0


def test_health_and_version_need_no_key(make_served: MakeServed) -> None:
    served = make_served()
    served.service.keys.create("first", now=0.0)
    client = served.client()
    assert client.get("/v1/models").status_code == 401
    assert client.get("/health").status_code == 200
    assert client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/health/", None),
        ("GET", "/v1/models/", None),
        ("GET", f"/v1/models/{BASE}/", None),
        ("POST", "/v1/chat/completions/", CHAT),
        ("POST", "/v1/completions/", {"model": BASE, "prompt": "Hi", "max_tokens": 2}),
        ("POST", "/v1/messages/", CHAT),
    ],
)
def test_a_slash_at_the_end_of_an_address_changes_nothing(
    served: ServerHarness, method: str, path: str, body: Any
) -> None:
    assert served.client().request(method, path, json=body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models//", "/v1//models/"])
def test_slashes_that_two_programs_could_read_differently_are_refused(
    served: ServerHarness, path: str
) -> None:
    assert served.client().get(path).status_code == 400


def test_a_page_of_an_allowed_origin_may_read_limits_and_ignored_fields(
    make_served: MakeServed,
) -> None:
    origin = "http://localhost:3000"
    served = make_served(ServeSettings(allowed_origins=(origin,), engine=SMALL))
    secret = served.service.keys.create("page", now=0.0, requests_per_minute=9).secret
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = {**CHAT, "keep_alive": "5m"}
        answer = served.client(secret).post(path, json=body, headers={"Origin": origin})
        assert answer.status_code == 200
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        ours = [name for name in answer.headers if "ratelimit" in name or "expertctl" in name]
        assert len(ours) == 4
        assert set(ours) < set(exposed)


def test_a_container_may_use_the_name_that_its_settings_allow(make_served: MakeServed) -> None:
    named = {"Host": "host.docker.internal:8000"}
    refused = make_served().client().post("/v1/chat/completions", json=CHAT, headers=named)
    assert refused.status_code == 421
    settings = ServeSettings(allowed_hosts=("host.docker.internal",), engine=SMALL)
    client = make_served(settings).client()
    assert client.post("/v1/chat/completions", json=CHAT, headers=named).status_code == 200
    page = {**named, "Origin": "http://host.docker.internal:8000"}
    assert client.post("/v1/chat/completions", json=CHAT, headers=page).status_code == 200
    stranger = {**named, "Origin": "http://host.docker.internal:3000"}
    assert client.post("/v1/chat/completions", json=CHAT, headers=stranger).status_code == 403
    other = {"Host": "host.docker.internal.example.com"}
    assert client.post("/v1/chat/completions", json=CHAT, headers=other).status_code == 421


PAGE = "http://localhost:3000"


def test_a_page_of_an_allowed_origin_asks_and_reads_the_answer(make_served: MakeServed) -> None:
    client = make_served(ServeSettings(allowed_origins=(PAGE,), engine=SMALL)).client()
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",  # browsers say so of local addresses
    }
    before = client.options("/v1/chat/completions", headers=asked)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == PAGE
    assert before.headers["access-control-allow-private-network"] == "true"
    assert "authorization" in before.headers["access-control-allow-headers"].lower()
    answer = client.post("/v1/chat/completions", json=CHAT, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("origin", ["http://localhost:3001", "https://localhost:3000", "null"])
def test_attack_101_a_page_of_an_origin_that_is_not_allowed_reads_nothing(
    make_served: MakeServed, origin: str
) -> None:
    client = make_served(ServeSettings(allowed_origins=(PAGE,), engine=SMALL)).client()
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for answer in (
        client.options("/v1/chat/completions", headers=asked),
        client.post("/v1/chat/completions", json=CHAT, headers={"Origin": origin}),
    ):
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"allowed_hosts": ("http://host",)}, "not a host name"),
        ({"allowed_hosts": ("host:8000",)}, "not a host name"),
        ({"allowed_hosts": ("*",)}, "not a host name"),
        ({"allowed_origins": ("*",)}, "not the origin of a page"),
        ({"allowed_origins": ("localhost:3000",)}, "not the origin of a page"),
        ({"allowed_origins": ("http://localhost/app",)}, "not the origin of a page"),
    ],
)
def test_what_cannot_be_a_host_or_an_origin_is_refused_at_the_start(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_settings(ServeSettings(**settings))


@pytest.mark.parametrize("origin", ["app://obsidian.md", "vscode-webview://1a2b", PAGE])
def test_programs_that_are_made_of_pages_have_origins_too(origin: str) -> None:
    check_settings(ServeSettings(allowed_origins=(origin,)))


@pytest.mark.parametrize(("base", "meant"), [("", "/v1"), ("/v1/v1", "/v1")])
def test_openais_client_with_a_wrong_base_url_is_told_the_right_one(
    served: ServerHarness, base: str, meant: str
) -> None:
    inner: Any = served.client()
    with (
        openai.OpenAI(
            api_key="any", base_url=f"{URL}{base}", http_client=inner, max_retries=0
        ) as client,
        pytest.raises(openai.NotFoundError, match=f"did you mean {meant}/chat/completions") as told,
    ):
        client.chat.completions.create(**CHAT)
    assert told.value.code == "unknown_url"


def test_anthropics_client_with_a_wrong_base_url_gets_its_own_error(served: ServerHarness) -> None:
    inner: Any = served.client()
    with (
        anthropic.Anthropic(
            api_key="any", base_url=f"{URL}/v1", http_client=inner, max_retries=0
        ) as client,
        pytest.raises(anthropic.NotFoundError, match="did you mean /v1/messages") as told,
    ):
        client.messages.create(**CHAT)
    assert told.value.body["error"]["type"] == "not_found_error"


def test_an_address_of_ours_that_is_not_there_is_told_in_our_form(served: ServerHarness) -> None:
    body = served.client().get("/v1/jobs/nothing/more").json()
    assert set(body["error"]) == {"code", "message", "hint"}
    assert body["error"]["code"] == "unknown_url"
