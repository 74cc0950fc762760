"""``/moe``: what is counted of routed experts, who changes that, and what others are told."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from expertctl.engine.moe.activity_document import read_activity
from expertctl.schema.strict_json import loads
from expertctl.schema.validation import problems_of
from expertctl.server.readiness import Readiness
from tests.server.routed import EXPERTS, LAYERS, USED, serving_routed
from tests.server.served import BASE, Served
from tests.server.test_described_answers import check_answer, closed

OFF = b'{"enabled":false,"mode":"off","schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[]}'
ASKED: dict[str, Any] = {"prompt": "Sort: 3, 1, 2", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose base is larger than its memory."""
    with serving_routed(tmp_path_factory.mktemp("observed") / "home") as one:
        yield one


@pytest.fixture
def client(routed: Served) -> TestClient:
    """A client of it, with everything counted from now on."""
    client = routed.client()
    assert client.post("/moe", json={"mode": "full", "reset": True}).status_code == 200
    return client


def answered(client: TestClient) -> dict[str, Any]:
    answer = client.post("/v1/infer", json=ASKED)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_the_document_is_a_profile_and_says_what_it_is_of(client: TestClient) -> None:
    told = answered(client)["moe"]
    answer = client.get("/moe")
    assert problems_of(loads(answer.content, what="ours", max_bytes=1 << 20), "moe-activity") == []
    document = read_activity(answer.content, what="ours")
    assert document.is_usable
    assert (document.mode, document.experts, document.used) == ("full", EXPERTS, USED)
    assert [layer.layer for layer in document.layers] == [1, 2, 3]
    assert sum(layer.requests for layer in document.layers) == told["requests"]
    assert sum(layer.missed_requests for layer in document.layers) == told["misses"] > 0
    assert all(layer.times.parallel_hot_lane_wall > 0 for layer in document.layers)
    body = answer.json()
    assert body["base"] == BASE
    same = ("miss", "layers", "experts", "slots", "in_memory", "cold")
    assert body["residence"] == {name: told[name] for name in same}


def test_whoever_reads_changes_nothing(client: TestClient) -> None:
    answered(client)
    bodies = {client.get("/moe").content for _ in range(3)}
    assert len(bodies) == 1
    assert client.get("/moe", params={"mode": "off", "reset": "true"}).content in bodies
    assert client.head("/moe").content == b""
    assert client.delete("/moe").status_code == 405
    assert client.get("/moe").content in bodies


def test_a_reset_begins_again_and_the_same_mode_does_not(client: TestClient) -> None:
    answered(client)
    for _ in range(2):
        same = client.post("/moe", json={"mode": "full"})
        assert same.status_code == 200
        assert same.json()["updates"] > 0
        assert same.content == client.get("/moe").content
    for _ in range(2):
        begun = client.post("/moe", json={"reset": True}).json()
        assert begun["updates"] == begun["summary"]["layer_calls"] == 0
        assert (begun["mode"], begun["layers"][0]["experts"]) == ("full", [])


def test_what_is_off_counts_nothing_and_another_mode_begins_again(client: TestClient) -> None:
    answered(client)
    assert client.post("/moe", json={"mode": "off"}).content == OFF
    told = answered(client)["moe"]
    assert told["requests"] > 0, "results tell of it all the same"
    assert client.get("/moe").content == OFF
    assert "expertctl_moe_layer" not in client.get("/metrics").text
    begun = client.post("/moe", json={"mode": "update"}).json()
    assert (begun["mode"], begun["updates"]) == ("update", 0)
    answered(client)
    body = client.get("/moe").json()
    assert body["schema"] == "llama.cpp.moe_layer_opt_perf.v1"
    assert body["updates"] > 0
    assert "total_moe_time_per_call_us" not in body["layers"][0]


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "mode"), ({"reset": False}, "mode"), ({"mode": "on"}, "mode"), ({"what": 1}, "what")],
)
def test_a_body_that_says_no_change_is_refused(
    client: TestClient, body: dict[str, object], field: str
) -> None:
    before = client.get("/moe").content
    answer = client.post("/moe", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "usage"
    assert field in answer.json()["error"]["message"] + answer.json()["error"]["hint"]
    assert client.get("/moe").content == before


def test_only_json_is_read(client: TestClient) -> None:
    answer = client.post("/moe", content=b"mode=off", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_a_snapshot_is_of_one_moment_while_passes_are_counted(client: TestClient) -> None:
    """Whoever reads while texts are written finds every layer called equally often."""
    done = threading.Event()
    seen: list[Any] = []

    def ask() -> None:
        for _ in range(4):
            answered(client)
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    while not done.is_set():
        body = client.get("/moe").json()
        seen.append(body)
        calls = {layer["calls"] for layer in body["layers"]}
        assert len(calls) == 1
        for layer in body["layers"]:
            assert sum(count for _, count in layer["hot_experts"]) == layer["hot_slots_total"]
            assert sum(count for _, count in layer["cold_experts"]) == layer["cold_slots_total"]
    asking.join()
    updates = [body["updates"] for body in seen]
    assert updates == sorted(updates)


def test_metrics_have_a_series_for_each_layer_and_no_more(client: TestClient) -> None:
    told = answered(client)["moe"]
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    document = client.get("/moe").json()
    for name, key in (
        ("hits", "hot_slots_total"),
        ("misses", "cold_slots_total"),
        ("requests", "requests"),
        ("missed_requests", "missed_requests"),
        ("swaps", "swaps"),
        ("fallback_rate", "fallback_rate"),
        ("hot_slot_ratio", "hot_slot_ratio"),
    ):
        samples = families[f"expertctl_moe_layer_{name}"].samples
        assert {s.labels["layer"]: s.value for s in samples} == {
            str(layer["layer"]): layer[key] for layer in document["layers"]
        }
    lanes = families["expertctl_moe_layer_seconds"].samples
    assert len(lanes) == 2 * LAYERS
    assert {frozenset(s.labels) for s in lanes} == {frozenset(("layer", "lane"))}
    assert all(s.value > 0 for s in lanes if s.labels["lane"] == "compute")
    assert families["expertctl_moe_experts_in_memory"].samples[0].value == told["in_memory"]
    assert families["expertctl_moe_loads"].samples[0].value >= told["loads"]
    assert families["expertctl_moe_overflow_resets"].samples[0].value == 0


def test_answers_are_described(client: TestClient) -> None:
    described = closed(client.get("/openapi.json").json())
    answered(client)
    check_answer(described, "get", "/moe", client.get("/moe"))
    for body in ({"mode": "update"}, {"mode": "off"}, {"mode": "full", "reset": True}, {}):
        check_answer(described, "post", "/moe", client.post("/moe", json=body))


def test_a_dense_base_observes_nothing_and_changes_nothing(served: Served) -> None:
    client = served.client()
    assert client.get("/moe").content == OFF
    assert "expertctl_moe" not in client.get("/metrics").text
    for body in ({"mode": "off"}, {"mode": "full"}, {"reset": True}):
        answer = client.post("/moe", json=body)
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert error["code"] == "incompatible"
        assert "it has no routed experts, or all of them are in memory" in error["message"]
        assert "--memory-budget" in error["hint"]
    assert client.get("/moe").content == OFF


def test_nothing_is_told_before_the_base_is_there(
    routed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed.service.readiness, "state", Readiness("loading").state)
    for answer in (
        routed.client().get("/moe"),
        routed.client().post("/moe", json={"mode": "off"}),
    ):
        assert answer.status_code == 503
        assert "the base is being loaded" in json.dumps(answer.json())


def test_where_there_are_keys_reading_and_changing_want_one(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with serving_routed(tmp_path_factory.mktemp("keyed") / "home") as keyed:
        secret = keyed.service.keys.make("one", now=time.time()).secret
        nobody, somebody = keyed.client(), keyed.client(secret)
        assert nobody.get("/moe").status_code == 401
        assert nobody.post("/moe", json={"mode": "off"}).status_code == 401
        page = {"Origin": "https://elsewhere.example"}
        assert somebody.post("/moe", json={"mode": "off"}, headers=page).status_code == 403
        assert somebody.get("/moe").json()["mode"] == "full"
        assert somebody.post("/moe", json={"mode": "off"}).content == OFF
