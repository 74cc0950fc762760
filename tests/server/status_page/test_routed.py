"""What is shown of routed experts is what results and `/moe` tell of them; of others, nothing."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from expertctl.engine.moe.counters import ExpertActivity, ExpertResidency, RoutedExpertStats
from expertctl.engine_config import WarmupConfig
from expertctl.server.pages import build_figures, describe_routed_experts
from tests.server.harness import ROUTED_EXPERTS, ROUTED_LAYERS, ServerHarness, run_routed_app
from tests.server.status_page.test_figures import NONE, snapshot

ASKED = {"prompt": "Sort: 3, 1, 2", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    root = tmp_path_factory.mktemp("routed") / "home"
    with run_routed_app(root, moe=WarmupConfig(warmup="none", learns=False)) as one:
        yield one.client()


def test_layers_are_those_that_were_counted(client: TestClient) -> None:
    client.post("/moe", json={"mode": "full", "reset": True})
    told = client.post("/v1/infer", json=ASKED).json()["moe"]
    shown, counted = client.get("/status/data").json()["routed"], client.get("/moe").json()
    assert (shown["miss"], shown["cold"]) == (told["miss"], told["cold"])
    assert (shown["experts"], shown["in_memory"]) == (
        ROUTED_LAYERS * ROUTED_EXPERTS,
        told["in_memory"],
    )
    assert shown["whole"] is False
    assert shown["loads"] >= told["loads"] > 0
    assert shown["mass"] > 0
    assert shown["skipped"] == 0
    assert [
        (one["layer"], one["hits"], one["misses"], one["swaps"]) for one in shown["layers"]
    ] == [
        (layer["layer"], layer["hot_slots_total"], layer["cold_slots_total"], layer["swaps"])
        for layer in counted["layers"]
    ]
    for layer in shown["layers"]:
        assert 0 < layer["resident"] <= told["slots"]
        assert layer["experts"] == ROUTED_EXPERTS


def test_what_is_not_counted_has_no_layers(client: TestClient) -> None:
    client.post("/moe", json={"mode": "off"})
    shown = client.get("/status/data").json()["routed"]
    assert shown["layers"] == []
    assert shown["in_memory"] > 0


def test_room_for_all_is_not_all_in_memory() -> None:
    """Compact experts leave room for all before each has a slot, and was read."""
    before = snapshot()
    for slots, whole in ((5, False), (8, True)):
        held = ExpertResidency(layers=2, experts=8, slots=slots, blocks=16)
        shown = describe_routed_experts(
            replace(before, routed=RoutedExpertStats(held, ExpertActivity(requests=4)))
        )
        assert shown is not None
        assert (shown["experts"], shown["in_memory"], shown["whole"]) == (16, 16, whole)


def test_a_dense_base_has_none(served: ServerHarness) -> None:
    assert served.client().get("/status/data").json()["routed"] is None
    assert build_figures(snapshot(), NONE)["routed"] is None
