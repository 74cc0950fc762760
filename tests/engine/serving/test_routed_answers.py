"""What answers on a base of routed experts tell, each for itself, and what no caller is told."""

import os
import re
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.torch import devices
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.errors import IncompatibleError
from expertctl.package.base_model import read_base
from tests.engine.moe.test_cached_runs import LARGE
from tests.engine.moe.test_learnt_runs import base
from tests.engine.moe.test_routed_bench import device
from tests.engine.package_fixtures import EnginePackages
from tests.engine.serving.harness import (
    ENDLESS_TOKENS,
    EngineHarness,
    make_request,
    open_engine_harness,
)
from tests.engine.serving.test_engine import EventReader, job
from tests.engine.test_local_engine import planner
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["base", "device", "fast", "user_home"]


def test_what_becomes_of_experts_after_an_answer_is_not_told_of_it(
    base: Path, user_home: HomeFixture
) -> None:
    """The first of two answers ends while the other is not begun; both are told together."""
    stored = user_home.bases.add(base)
    settings = EngineConfig(memory_budget=stored.size * 8 // 10, batching=BatchingConfig(rows=1))
    found = []
    for texts in (1, 2):
        with open_engine_harness(user_home.home, settings, numpy_below=0) as harness:
            at_first = requests(harness)
            results = harness.answer(make_request(max_tokens=9), answers=texts).results
            found.append([result.moe.activity for result in results if result.moe is not None])
            asked = requests(harness) - at_first
            assert harness.runner.model.experts is not None
            there = re.compile(r"\d\d of 128 routed experts fit into memory")
            assert sum(there.fullmatch(line) is not None for line in harness.messages) == 1
    (alone,), (first, second) = found
    assert first.requests == alone.requests > 0
    assert first.requests + second.requests == asked


def requests(harness: EngineHarness) -> int:
    routed = harness.runner.model.routed
    assert routed is not None
    return routed.activity.requests


@pytest.mark.parametrize("while_doing", ["a pass", "loading"])
def test_where_a_base_lies_is_told_to_who_runs_the_server_and_to_no_caller(
    while_doing: str, base: Path, user_home: HomeFixture, tmp_path: Path
) -> None:
    """Its file is replaced under a server; what is missing of it cannot be read any more."""
    elsewhere = Path(shutil.copytree(base, tmp_path / "elsewhere"))
    stored = user_home.bases.add(elsewhere, name="moved")
    (weights,) = elsewhere.glob("*.safetensors")
    if while_doing == "loading":  # the gains of DoRA read the experts that it changes
        engine_packages = EnginePackages(tmp_path / "market", elsewhere, read_base(elsewhere))
        options = {"targets": ("experts.3.down_proj",), "rank": 2, "seed": 1}
        user_home.trust_keys("acme")
        user_home.install(engine_packages.package("acme/gains", adapters=[("dora", options)]))
    experts = ["gains"] if while_doing == "loading" else []
    settings = EngineConfig(
        base="moved", memory_budget=stored.size // 2, batching=BatchingConfig(rows=1)
    )
    with open_engine_harness(user_home.home, settings, numpy_below=0) as harness:
        os.utime(weights, ns=(0, 0))
        before = len(harness.messages)
        for _ in range(2):
            asked = make_request("Sort these: 7, 5, 3, 1, 9", *experts, max_tokens=40)
            refused = harness.answer(asked).error
            assert isinstance(refused, IncompatibleError), "no caller tries that again by itself"
            assert refused.message == (
                "the files of moved were changed or damaged while it is served"
            )
            assert "restart the server" in refused.hint
        assert harness.messages[before:] == [
            f"error: {weights}: it changed while the base was in memory; load the base again"
        ]


@pytest.mark.usefixtures("device")
def test_what_a_device_has_still_to_tell_is_reset_too(
    base: Path, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an answer: what was asked for before the reset is not observed after it."""
    user_home.bases.add(base)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: LARGE + devices.LIBRARY_RESERVE)
    settings = EngineConfig(device="cuda", batching=BatchingConfig(rows=1))
    engine = ServingEngine(planner(user_home), settings)
    engine.start()
    reader = EventReader(engine, job(make_request("Sort: 9, 8, 7", max_tokens=ENDLESS_TOKENS)))
    while not isinstance(reader.next(), OutputDelta):
        pass
    found = Future[list[int]]()

    def between_two_passes() -> None:
        loop, model = engine._loop, engine._runner.model
        assert loop is not None
        assert loop.batch.run_pass() == [], "a pass of an answer that goes on"
        assert engine.observe(reset=True).document.layers[0].hits == {}
        assert model.routed is not None  # it asks the device for all that was not told yet
        found.set_result([layer.requests for layer in engine.get_observation().document.layers])

    engine._scheduler.control_queue.append(between_two_passes)
    assert found.result(timeout=60) == [0, 0, 0, 0]
    engine.close()
