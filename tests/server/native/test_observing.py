"""``/moe``: what is counted of routed experts, who changes that, and what others are told."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from expertctl.engine.moe.profile_codecs import read_activity
from expertctl.engine.moe.usage_profile import LayerUsage, UsageProfile
from expertctl.engine.moe.usage_store import LearntUsage, compute_base_digest, encode_learnt_usage
from expertctl.engine_config import WarmupConfig
from expertctl.schema.strict_json import loads
from expertctl.schema.validation import find_problems
from expertctl.server.service import Readiness
from expertctl.store.quantised_cache import UsageProfileFile
from tests.server.harness import (
    BASE,
    EXPERTS_PER_TOKEN,
    ROUTED_EXPERTS,
    ROUTED_LAYERS,
    ServerHarness,
    run_routed_app,
)
from tests.server.test_described_answers import check_answer, closed

OFF = b'{"enabled":false,"mode":"off","schema":"llama.cpp.moe_layer_opt_perf.v1","layers":[]}'
ASKED: dict[str, Any] = {"prompt": "Sort: 3, 1, 2", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    """A server whose base is larger than its memory; what is known of it is what a test says."""
    root = tmp_path_factory.mktemp("observed") / "home"
    with run_routed_app(root, moe=WarmupConfig(learns=False)) as one:
        yield one


@pytest.fixture
def client(routed: ServerHarness) -> TestClient:
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
    assert (
        find_problems(loads(answer.content, what="ours", max_bytes=1 << 20), "moe-activity") == []
    )
    document = read_activity(answer.content, what="ours")
    assert document.is_usable
    assert (document.mode, document.experts, document.used) == (
        "full",
        ROUTED_EXPERTS,
        EXPERTS_PER_TOKEN,
    )
    assert [layer.layer for layer in document.layers] == [1, 2, 3]
    assert sum(layer.requests for layer in document.layers) == told["requests"]
    assert sum(layer.missed_requests for layer in document.layers) == told["misses"] > 0
    assert all(layer.times.parallel_hot_lane_wall > 0 for layer in document.layers)
    body = answer.json()
    assert body["base"] == BASE
    same = ("miss", "layers", "experts", "slots", "in_memory", "cold")
    assert body["residence"] == {name: told[name] for name in same}


def test_what_a_server_asked_itself_is_observed_by_nobody(tmp_path: Path) -> None:
    """Its first token is, as those of all it is warmed with: the first job is counted alone."""
    moe = WarmupConfig(learns=False)
    with run_routed_app(tmp_path / "home", moe=moe, warmup=("Hello",)) as one:
        client = one.client()
        assert client.get("/moe").json()["summary"]["requests"] == 0
        told = answered(client)["moe"]
        assert client.get("/moe").json()["summary"]["requests"] == told["requests"] > 0


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
    assert len(lanes) == 2 * ROUTED_LAYERS
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


def test_a_dense_base_observes_nothing_and_changes_nothing(served: ServerHarness) -> None:
    client = served.client()
    assert client.get("/moe").content == OFF
    assert "expertctl_moe" not in client.get("/metrics").text
    profile = {"profile": pinning({"1": 3}), "pin": 1}
    asked: tuple[dict[str, object], ...] = ({"mode": "off"}, {"mode": "full"}, {"reset": True})
    for body, hint in (
        *((each, "of 16") for each in asked),
        (profile, "--memory-budget"),
    ):
        answer = client.post("/moe", json=body)
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert error["code"] == "incompatible"
        assert "it has no routed experts, or" in error["message"]
        assert hint in error["hint"]
    assert client.get("/moe").content == OFF


def test_nothing_is_told_before_the_base_is_there(
    routed: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed.service.readiness, "state", Readiness("loading").state)
    for answer in (
        routed.client().get("/moe"),
        routed.client().post("/moe", json={"mode": "off"}),
    ):
        assert answer.status_code == 503
        assert "the base is being loaded" in json.dumps(answer.json())


def test_where_there_are_keys_reading_wants_one_and_changing_one_that_manages(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with run_routed_app(tmp_path_factory.mktemp("keyed") / "home") as keyed:
        keys, now = keyed.service.keys, time.time()
        assert keyed.client().post("/moe", json={"mode": "full"}).status_code == 200, "no key yet"
        nobody, anybody = keyed.client(), keyed.client(keys.create("one", now=now).secret)
        somebody = keyed.client(keys.create("ops", now=now, manages=True).secret)
        assert anybody.get("/moe").json()["mode"] == "full"
        refused = anybody.post("/moe", json={"mode": "off"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert "the key one may not" in refused.json()["error"]["message"]
        assert anybody.post("/moe", json="no body of it").status_code == 403, "before it is read"
        assert nobody.get("/moe").status_code == 401
        assert nobody.post("/moe", json={"mode": "off"}).status_code == 401
        page = {"Origin": "https://elsewhere.example"}
        assert somebody.post("/moe", json={"mode": "off"}, headers=page).status_code == 403
        assert somebody.get("/moe").json()["mode"] == "full"
        assert somebody.post("/moe", json={"mode": "off"}).content == OFF


def pinning(
    counts: dict[str, int], *, experts: int = ROUTED_EXPERTS, layer: str = "1"
) -> dict[str, Any]:
    """A usage profile that tells of one layer."""
    told = {"activation_counts": counts}
    return {"num_prompts": 10, "num_experts": experts, "layers": {layer: told}}


def list_resident_experts(one: ServerHarness) -> dict[int, set[int]]:
    cache = one.engine._runner.model.experts
    return dict(zip((1, 2, 3), (set(slots.resident_ids) for slots in cache.slots), strict=True))


def test_a_profile_says_who_stays_and_answers_stay_the_same(
    routed: ServerHarness, client: TestClient
) -> None:
    before = answered(client)
    body = {"profile": pinning({"20": 10, "21": 9, "3": 1}), "pin": 2, "exchange": 0.5}
    told = client.post("/moe", json=body)
    assert told.status_code == 200, told.text
    assert told.json()["guide"] == {"exchange": 0.5, "pinned": {"1": [20, 21]}}
    assert told.json()["updates"] > 0, "what was counted stays"
    for _ in range(3):
        after = answered(client)
        assert after["tokens"]["ids"] == before["tokens"]["ids"]
    assert {20, 21} <= list_resident_experts(routed)[1]
    assert client.get("/moe").json()["guide"] == told.json()["guide"]
    ended = client.post("/moe", json={**body, "pin": "0", "exchange": 0, "reset": True}).json()
    assert ended["guide"] == {"exchange": 0, "pinned": {}}
    assert ended["updates"] == 0


def test_what_was_counted_is_a_profile_of_the_same_base(client: TestClient) -> None:
    answered(client)
    document = client.get("/moe").json()
    told = client.post("/moe", json={"profile": document, "pin": "100%"}).json()
    named = {layer["layer"]: {e for e, _ in layer["experts"]} for layer in document["layers"]}
    for number, pinned in told["guide"]["pinned"].items():
        assert set(pinned) <= named[int(number)]
    check_answer(
        closed(client.get("/openapi.json").json()),
        "post",
        "/moe",
        client.post("/moe", json={"profile": document, "pin": 1}),
    )


def test_what_was_learnt_is_named_by_the_base(routed: ServerHarness, client: TestClient) -> None:
    base = routed.user_home.bases.find(BASE)
    file, digest = (
        UsageProfileFile(routed.user_home.bases, base),
        compute_base_digest(base.identity),
    )
    by_name = {"profile": BASE, "pin": 1}
    missing = client.post("/moe", json=by_name)
    assert missing.status_code == 404
    assert "no usage profile was learned for tiny" in missing.json()["error"]["message"]
    counted = UsageProfile("update", (LayerUsage(2, raw={9: 4, 1: 1}),), experts=ROUTED_EXPERTS)
    file.update(lambda _: encode_learnt_usage(LearntUsage(digest, counted)))
    told = client.post("/moe", json=by_name).json()
    assert told["guide"]["pinned"] == {"2": [9]}
    file.update(lambda _: b"{}")
    damaged = client.post("/moe", json=by_name)
    assert damaged.status_code == 422
    assert "cannot be read" in damaged.json()["error"]["message"]
    assert str(routed.user_home.root) not in damaged.text, "where it lies concerns nobody out there"
    assert client.get("/moe").json()["guide"] == told["guide"]
    file.remove()


DEEP: Any = {"layers": 1}
for _ in range(40):
    DEEP = {"x": DEEP}
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"profile": "elsewhere", "pin": 1}, 400, "this server serves tiny"),
    ({"profile": "/etc/passwd", "pin": 1}, 400, "this server serves tiny"),
    ({"profile": "../habits", "pin": 1}, 400, "this server serves tiny"),
    ({"profile": "", "pin": 1}, 400, "profile"),
    ({"profile": [], "pin": 1}, 400, "profile"),
    ({"profile": 5, "pin": 1}, 400, "profile"),
    ({"profile": {}, "pin": 1}, 422, "num_prompts"),
    ({"profile": DEEP, "pin": 1}, 400, "nested deeper"),
    ({"profile": pinning({"1": 3}, experts=8), "pin": 1}, 422, "the base has 24"),
    ({"profile": pinning({"1": 3}, layer="9"), "pin": 1}, 422, "has layer 9"),
    ({"profile": pinning({"99": 3}), "pin": 1}, 422, "expert 99"),
    ({"profile": pinning({"1": -3}), "pin": 1}, 422, "activation_counts"),
    ({"profile": pinning({"1": 11}), "pin": 1}, 422, "activated by 11 of 10"),
    ({"profile": pinning({}), "pin": 1}, 422, "counts no expert"),
    ({"profile": json.loads(OFF), "pin": 1}, 422, "counts no expert"),
    ({"profile": pinning({"1": 3})}, 400, "changes nothing"),
    ({"profile": pinning({"1": 3}), "pin": ROUTED_EXPERTS}, 400, "slots"),
    ({"profile": pinning({"1": 3}), "pin": "half"}, 400, "pin"),
    ({"profile": pinning({"1": 3}), "pin": -1}, 400, "pin"),
    ({"profile": pinning({"1": 3}), "pin": True}, 400, "pin"),
    ({"profile": pinning({"1": 3}), "pin": 10**15}, 400, "pin"),
    ({"profile": pinning({"1": 3}), "exchange": 1.5}, 400, "exchange"),
    ({"profile": pinning({"1": 3}), "exchange": -0.1}, 400, "exchange"),
    ({"pin": 1}, 400, "it requires a profile"),
    ({"mode": "full", "exchange": 0.5}, 400, "it requires a profile"),
    ({"profile": pinning({"1": 3}, layer="9"), "pin": 1, "mode": "off"}, 422, "layer 9"),
]


@pytest.mark.parametrize(("body", "status", "words"), REFUSED)
def test_a_profile_that_cannot_be_is_refused_and_changes_nothing(
    client: TestClient, body: dict[str, Any], status: int, words: str
) -> None:
    before = client.get("/moe").content
    answer = client.post("/moe", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"] + error["hint"]
    assert error["hint"]
    assert client.get("/moe").content == before
    check_answer(closed(client.get("/openapi.json").json()), "post", "/moe", answer)


HOSTILE = {
    "a key twice": b'{"mode": "off", "mode": "full"}',
    "a key of a profile twice": b'{"pin": 1, "profile": {"layers": {}, "layers": {}}}',
    "no number": b'{"exchange": NaN, "profile": "tiny"}',
    "beyond all": b'{"exchange": 1e999, "profile": "tiny"}',
    "an integer of many digits": b'{"pin": ' + b"9" * 5000 + b', "profile": "tiny"}',
    "a count of many digits": b'{"pin": 1, "profile": {"num_prompts": ' + b"9" * 5000 + b"}}",
    "half a surrogate": b'{"profile": "\\ud800", "pin": 1}',
    "no object": b"[]",
    "no JSON": b"mode=off",
    "nothing": b"",
    "another encoding": '{"mode": "off"}'.encode("utf-16"),
    "a mark in front": b'\xef\xbb\xbf{"mode": "off"}',
    "deep": b'{"profile": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an unknown key": b'{"mode": "off", "profile_file": "/etc/passwd"}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_body_that_two_readers_could_understand_differently_is_refused(
    client: TestClient, body: bytes
) -> None:
    before = client.get("/moe").content
    answer = client.post("/moe", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "usage"
    assert len(answer.content) < 2000
    assert client.get("/moe").content == before


def test_a_body_that_is_too_large_is_not_read(routed: ServerHarness, client: TestClient) -> None:
    size = routed.service.settings.body_bytes + 1
    headers = {"Content-Type": "application/json"}
    answer = client.post("/moe", content=b" " * size, headers=headers)
    assert answer.status_code == 413


LARGE: dict[str, Any] = {
    "layers without end": {
        "num_prompts": 1,
        "num_experts": ROUTED_EXPERTS,
        "layers": {str(number): {"activation_counts": {"1": 1}} for number in range(60_000)},
    },
    "pairs without end": {
        "schema": "llama.cpp.moe_layer_opt_perf.v1",
        "layers": [{"layer": 1, "experts": [[1, 1]] * 200_000}],
    },
    "a name without end": pinning({"1": 1}) | {"model": "x" * 1_000_000},
}


@pytest.mark.parametrize("profile", LARGE.values(), ids=LARGE)
def test_a_large_profile_is_refused_in_few_words(
    client: TestClient, profile: dict[str, Any]
) -> None:
    before = client.get("/moe").content
    answer = client.post("/moe", json={"profile": profile, "pin": 1})
    assert answer.status_code == 422
    assert len(answer.content) < 2000
    assert client.get("/moe").content == before


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS"])
def test_other_methods_are_told_which_there_are(client: TestClient, method: str) -> None:
    before = client.get("/moe").content
    answer = client.request(method, "/moe")
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "GET, HEAD, POST"
    assert client.get("/moe").content == before


def test_one_profile_is_taken_at_a_time_and_nobody_waits_for_it(
    routed: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, adopt = threading.Event(), threading.Event(), routed.engine.apply_profile

    def slowly(*arguments: Any) -> None:
        begun.set()
        assert goes_on.wait(120)
        adopt(*arguments)

    monkeypatch.setattr(routed.engine, "apply_profile", slowly)
    body, found = {"profile": pinning({"1": 1}), "pin": 0, "exchange": 0}, []
    asking = threading.Thread(
        target=lambda: found.append(routed.client().post("/moe", json=body).status_code)
    )
    asking.start()
    assert begun.wait(120)
    other = routed.client()
    refused = other.post("/moe", json=body)
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert other.post("/moe", json={"reset": True}).status_code == 200
    assert other.post("/v1/route", json={"prompt": "a" * 100_000}).status_code == 200
    goes_on.set()
    asking.join()
    assert found == [200]


def test_profiles_change_while_texts_are_written(routed: ServerHarness, client: TestClient) -> None:
    """Whoever writes meanwhile has the tokens that he would have had."""
    wanted = answered(client)["tokens"]["ids"]
    found: list[Any] = []
    asking = threading.Thread(
        target=lambda: found.extend(answered(client)["tokens"]["ids"] for _ in range(4))
    )
    asking.start()
    for turn in range(30):
        counts = {str((turn * 5 + place) % ROUTED_EXPERTS): 10 - place for place in range(4)}
        told = client.post("/moe", json={"profile": pinning(counts), "pin": 4, "exchange": 1})
        pinned = sorted(int(expert) for expert in counts)
        assert told.json()["guide"] == {"exchange": 1, "pinned": {"1": pinned}}
    asking.join()
    assert found == [wanted] * 4
    routed.engine._runner.model.experts.check_integrity()
    client.post("/moe", json={"profile": pinning({"1": 1}), "pin": 0, "exchange": 0})
