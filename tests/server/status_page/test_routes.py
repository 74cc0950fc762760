"""The pages as a browser gets them, without one."""

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from expertctl.server.pages import FILES, HEADERS
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, EXPERTS, ServerHarness

STATIC = Path(__file__).parents[3] / "expertctl" / "server" / "static"
TEMPLATES = STATIC.parent / "templates"
PAGES = ("/status", "/chat", "/docs")
PATHS = (*PAGES, *(f"/static/{name}" for name in FILES))


def test_the_address_of_the_server_leads_to_the_page(served: ServerHarness) -> None:
    answer = served.client().get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/status")


@pytest.mark.parametrize("path", PATHS)
def test_a_file_of_the_page_comes_with_its_type_and_a_strict_policy(
    path: str, served: ServerHarness
) -> None:
    answer = served.client().get(path)
    assert answer.status_code == 200
    kind = FILES.get(path.rpartition("/")[2], "text/html")
    assert answer.headers["content-type"].partition(";")[0] == kind
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert ("script-src" in policy) is (path != "/docs")
    assert "set-cookie" not in answer.headers


def test_every_static_file_is_served_and_asked_for() -> None:
    assert {path.name for path in STATIC.iterdir()} == set(FILES)
    named = set[str]()
    for path in (*TEMPLATES.glob("*.html"), *STATIC.glob("*.js")):
        named |= set(re.findall(r'(?:/static/|from "\./)([a-z]+\.[a-z]+)"', path.read_text()))
    assert named == set(FILES)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_nothing_from_elsewhere_and_no_script_of_its_own(
    path: str, served: ServerHarness
) -> None:
    page = served.client().get(path).text
    assert re.findall(r'(?:src|href)="(?!/|#)[^"]*"', page) == []
    assert re.findall(r"<script(?![^>]* src=)", page) == []
    assert re.findall(r"<[^>]*(?:\son\w+=|\sstyle=|javascript:)", page) == []


def test_scripts_make_no_markup_of_text_and_store_nothing() -> None:
    for script in STATIC.glob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"localStorage|sessionStorage|document\.cookie|indexedDB", text)


@pytest.mark.parametrize("name", ["status.html", "nothing", "..%2fpage.html", "%2e%2e/app.js"])
def test_there_are_no_other_files(name: str, served: ServerHarness) -> None:
    assert served.client().get(f"/static/{name}").status_code in {400, 404}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["/status/data", "/chat", "/docs"])
def test_the_pages_are_only_read(path: str, method: str, served: ServerHarness) -> None:
    assert served.client().request(method, path, json={}).status_code == 405


def test_the_numbers_say_what_was_done(served: ServerHarness) -> None:
    client = served.client()
    before = client.get("/status/data").json()
    body = {"prompt": "sort these numbers", "max_tokens": 5, "force_experts": [EXPERTS[0]]}
    answer = client.post("/v1/infer", json=body).json()
    after = client.get("/status/data").json()
    assert after["base"] == BASE
    assert after["context"] == served.engine.context
    assert after["run"] == before["run"]
    assert after["uptime"] > before["uptime"]
    assert after["jobs"]["finished"] == before["jobs"]["finished"] + 1
    assert after["ttft"]["count"] == before["ttft"]["count"] + 1
    took = after["ttft"]["seconds"] - before["ttft"]["seconds"]
    assert took == pytest.approx(answer["timings_ms"]["ttft"] / 1e3, abs=1e-6)
    read = after["tokens"]["prompt"] - before["tokens"]["prompt"]
    assert read == answer["tokens"]["prompt"] - answer["cache"]["kv_reused_tokens"]
    assert set(after["memory"]["held"]) == {"base", "experts", "kv", "buffers"}
    assert 0 < sum(after["memory"]["held"].values()) <= after["memory"]["limit"]
    assert after["experts"] == []


def test_the_experts_in_memory_are_named_with_their_size(served: ServerHarness) -> None:
    client = served.client()
    body = {"prompt": "sort these numbers", "max_tokens": 2, "force_experts": [EXPERTS[1]]}
    assert client.post("/v1/infer", json=body).status_code == 200
    told = client.get("/status/experts").json()
    installed = {one["ref"]: one for one in client.get("/v1/experts").json()["experts"]}
    assert told["able"] == len(EXPERTS)
    listed = {one["ref"]: one["size"] for one in told["listed"]}
    assert f"{EXPERTS[1]}@1.0.0" in listed
    assert listed == {r: one["size"] for r, one in installed.items() if one["in_memory"]}
    assert told["in_memory"] == len(listed)
    again = client.post("/v1/infer", json=body)
    assert again.status_code == 200
    jobs = [{o["ref"]: o["requests"] for o in t["listed"]} for t in (told, _experts(client))]
    assert jobs[1][f"{EXPERTS[1]}@1.0.0"] == jobs[0][f"{EXPERTS[1]}@1.0.0"] + 1


def _experts(client: TestClient) -> Any:
    return client.get("/status/experts").json()


def test_numbers_want_a_key_where_there_are_keys_and_the_page_does_not(
    make_served: MakeServed,
) -> None:
    served = make_served()
    made = served.service.keys.create("status", now=0.0)
    for path in PATHS:
        assert served.client().get(path).status_code == 200
    for path in ("/status/data", "/status/experts"):
        assert served.client().get(path).status_code == 401
        answer = served.client(made.secret).get(path)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-store"


def test_the_page_is_there_before_the_base_is_and_the_numbers_say_why_not(
    make_served: MakeServed,
) -> None:
    served = make_served()
    served.service.readiness.state = "loading"
    assert [served.client().get(path).status_code for path in PAGES] == [200] * 3
    answer = served.client().get("/status/data")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the base is being loaded"


def test_nothing_of_the_page_is_kept_where_it_could_be_framed_or_sniffed() -> None:
    assert HEADERS["X-Frame-Options"] == "DENY"
    assert HEADERS["Cross-Origin-Resource-Policy"] == "same-origin"
