"""Every way to hold experts reads and writes the same texts, and tells who was missing."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine.backend import LoadConfig
from expertctl.engine.load_plan import open_base
from expertctl.engine.moe.bench import RoutedBenchConfig, configure_backend, measure_routed
from expertctl.engine.moe.bench_result import ResidencyCase, RoutedBenchResult
from expertctl.engine.moe.warmup import WarmupPlan
from expertctl.engine.torch import devices
from expertctl.engine_config import EngineConfig, TopPins, WarmupConfig
from expertctl.errors import BudgetError, IncompatibleError, NotFoundError, UsageError
from expertctl.routing.planner import Planner
from expertctl.store.quantised_cache import UsageProfileFile
from tests.engine.moe.fakes import at_once
from tests.engine.test_loaded_base import loaded, slot
from tests.engine.test_local_engine import planner
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["at_once", "fast", "user_home"]

pytestmark = pytest.mark.all
LAYERS, EXPERTS, USED = 3, 8, 2
WANTED = RoutedBenchConfig(shares=(1.0, 0.5), prompt_tokens=6, tokens=8, rounds=2, threads=1)
BUDGET = 128 << 20


def write_routed(folder: Path, **config: object) -> Path:
    return write_base(
        folder,
        arch="qwen3_moe",
        tie=False,
        layers=LAYERS,
        hidden=64,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=USED,
        moe_intermediate_size=256,
        **config,
    )


@pytest.fixture
def stocked(user_home: HomeFixture, tmp_path: Path) -> Planner:
    user_home.bases.add(write_routed(tmp_path / "routed"), name="routed")
    user_home.bases.add(write_base(tmp_path / "dense", head_dim=16), name="dense")
    return planner(user_home)


def measured(
    stocked: Planner, wanted: RoutedBenchConfig, *, budget: int = BUDGET
) -> RoutedBenchResult:
    return measure_routed(stocked, adapt(wanted, memory_budget=budget), base="routed")


def adapt(wanted: RoutedBenchConfig, **engine: Any) -> RoutedBenchConfig:
    return replace(wanted, engine=replace(wanted.engine, **engine))


def test_all_ways_are_measured_and_counted(stocked: Planner) -> None:
    done: list[int] = []
    found = measure_routed(
        stocked, adapt(WANTED, memory_budget=BUDGET), base="routed", progress=done.append
    )
    assert sum(done) == WANTED.run_count == 3 * 2
    cases = [row.case for row in found.rows]
    assert cases == [ResidencyCase(1.0), ResidencyCase(0.5, "exact"), ResidencyCase(0.5, "skip")]
    assert (found.layers, found.experts, found.used) == (LAYERS, EXPERTS, USED)
    for row in found.rows:
        assert [len(each) for each in row.steps.rounds] == [8], "the first round does not count"
        assert [tokens for tokens, _ in row.prompts] == [6]
        assert all(seconds > 0 for each in row.steps.rounds for seconds in each)
    whole, exact, skip = found.rows
    assert found.resident_row is whole
    assert (whole.hit_rate, whole.layers, whole.timeline.tokens) == (1.0, {}, ())
    assert exact.memory < whole.memory
    assert exact.report.residence.slots == 4
    for row in (exact, skip):
        assert list(row.layers) == [0, 1, 2]
        assert all(layer.calls == 9 for layer in row.layers.values()), "a prompt and 8 tokens"
        assert sum(layer.requests for layer in row.layers.values()) == row.report.activity.requests
        assert 0 < row.hit_rate < 1
        assert (row.timeline.tokens, row.first_counted_token) == ((4, 8, 12, 16), 8)
        assert row.timeline.rates.shape == (LAYERS, 4)
        waited = row.report.activity.waited_ms
        assert 0 <= row.prefill_wait_ms <= waited
        assert row.waited_ms_per_token == pytest.approx((waited - row.prefill_wait_ms) / 8)
    assert exact.prefill_wait_ms > 0, "a prompt of six tokens asks for nearly all"
    assert exact.report.skipped_share == 0
    assert (found.skip_cap, found.seed) == (WANTED.engine.moe_skip_cap, WANTED.seed)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_way_to_hold_experts_takes_what_it_says(share: float, tmp_path: Path) -> None:
    """As in a run: with what is known of who follows whom."""
    user_home = HomeFixture(tmp_path / "home")
    stored = user_home.bases.add(write_routed(tmp_path / "base"))
    base = open_base(user_home.bases, stored, LoadConfig(), rehash=False)
    backend = configure_backend(
        base,
        ResidencyCase(share, "exact"),
        WarmupPlan(),
        EngineConfig(moe_skip_cap=1.0, moe_cold="read"),
    )
    budget, place = slot(backend.weight_bytes)
    place.reserve(replace(base, backend=backend))
    model = loaded(place, replace(base, backend=backend))
    assert model.nbytes == backend.weight_bytes == budget.reserved_bytes("base")
    place.unload()


@pytest.mark.usefixtures("at_once")
def test_what_follows_a_prompt_is_the_same_wherever_nothing_is_skipped(stocked: Planner) -> None:
    """Then all ways ask for the same experts, token by token."""
    wanted = RoutedBenchConfig(
        shares=(0.75, 0.5), misses=("exact",), prompts=("Sort these", "Hello"), tokens=6, rounds=2
    )
    found = measured(stocked, wanted)
    more, fewer = found.rows
    assert (found.skip_cap, found.seed) == (None, None), "nothing is skipped, and nothing is drawn"
    assert [tokens for tokens, _ in more.prompts] == [tokens for tokens, _ in fewer.prompts]
    requests = [[layer.requests for layer in row.layers.values()] for row in (more, fewer)]
    assert requests[0] == requests[1]
    assert more.hit_rate > fewer.hit_rate


def test_one_round_counts_itself(stocked: Planner) -> None:
    wanted = RoutedBenchConfig(
        shares=(0.5,), misses=("exact",), prompt_tokens=4, tokens=5, rounds=1
    )
    (row,) = measured(stocked, wanted).rows
    assert all(layer.calls == 6 for layer in row.layers.values())
    assert (row.timeline.tokens, row.first_counted_token) == ((4, 5), 0), "to the last token"


def test_what_does_not_fit_is_left_out_and_told(stocked: Planner) -> None:
    _, half, _ = measured(stocked, WANTED).rows
    wanted = RoutedBenchConfig(shares=(1.0, 0.5), misses=("exact",), prompt_tokens=6, tokens=8)
    least = _least(stocked, wanted, low=half.memory)
    found = measured(stocked, wanted, budget=least)
    assert [row.case.share for row in found.rows] == [0.5]
    assert found.resident_row is None
    (told,) = found.warnings
    assert told.startswith("left out: all resident: ")
    with pytest.raises(BudgetError, match=r"^50 % resident, exact: the ") as refused:
        measured(stocked, wanted, budget=half.memory // 2)
    assert "--resident a smaller share" in refused.value.hint


def _least(stocked: Planner, wanted: RoutedBenchConfig, *, low: int) -> int:
    """The least memory, to 512 KiB, in which half of the experts fit with their texts."""
    budget = low
    while True:
        try:
            measured(stocked, wanted, budget=budget)
        except BudgetError:
            budget += 512 << 10
        else:
            return budget


def test_what_is_no_subject_is_refused(stocked: Planner) -> None:
    with pytest.raises(NotFoundError):
        measure_routed(stocked, WANTED, base="nobody")
    with pytest.raises(IncompatibleError, match="dense has no routed experts"):
        measure_routed(stocked, WANTED, base="dense")
    with pytest.raises(UsageError, match="exceed the context of the base, 512"):
        measured(stocked, RoutedBenchConfig(prompt_tokens=500, tokens=20))


def test_a_bench_that_is_given_up_leaves_no_thread(stocked: Planner) -> None:
    before = threading.active_count()

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_routed(
            stocked, adapt(WANTED, memory_budget=BUDGET), base="routed", progress=interrupt
        )
    assert threading.active_count() == before


def test_nothing_is_learnt_of_what_is_measured(stocked: Planner) -> None:
    measured(stocked, WANTED)
    for stored in stocked.bases.list_bases():
        assert UsageProfileFile(stocked.bases, stored).read() is None


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Counts by which the last two experts of each layer come first."""
    file, counts = tmp_path / "profile.json", {"6": 9, "7": 8}
    layers = {str(layer): {"activation_counts": counts} for layer in range(LAYERS)}
    file.write_text(json.dumps({"num_prompts": 9, "num_experts": EXPERTS, "layers": layers}))
    return file


def test_a_way_begins_as_it_is_wished_and_tells_how(stocked: Planner, profile: Path) -> None:
    start = WarmupConfig(
        profile=profile, pins=TopPins(2), warmup="full", exchange=0.5, learns=False
    )
    wanted = adapt(replace(WANTED, shares=(0.5,), misses=("exact",)), moe=start, moe_cold="read")
    found = measured(stocked, wanted)
    (row,) = found.rows
    told = found.to_json()["measured"]
    assert isinstance(told, dict)
    assert told["start"] == {
        "profile": str(profile),
        "pin": "2",
        "warmup": "full",
        "exchange": 0.5,
        "cold": "read",
    }
    assert row.report.residence.cold == "read"
    assert row.timeline.rates.shape == (LAYERS, 4), "the picture has all that was written"


@pytest.mark.parametrize("wishes", [{"pins": TopPins(1)}, {"exchange": 0.1}])
def test_nobody_is_pinned_or_exchanged_by_no_profile(
    stocked: Planner, wishes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="needs a profile") as caught:
        measured(stocked, adapt(WANTED, moe=WarmupConfig(learns=False, **wishes)))
    assert "--moe-profile" in caught.value.hint


def test_more_pins_than_slots_are_refused_before_anything_is_measured(
    stocked: Planner, profile: Path
) -> None:
    start = WarmupConfig(profile=profile, pins=TopPins(5), learns=False)
    done: list[int] = []
    with pytest.raises(UsageError, match="with 50% resident a layer has only 4 slots") as caught:
        measure_routed(
            stocked,
            adapt(WANTED, moe=start, memory_budget=BUDGET),
            base="routed",
            progress=done.append,
        )
    assert "--resident" in caught.value.hint
    assert done == []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is the processor, with memory of its own."""
    monkeypatch.setattr(devices, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(devices, "is_cuda_available", lambda: True)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: BUDGET + devices.LIBRARY_RESERVE)


def test_on_a_device_the_same_is_asked_for_as_on_a_processor(
    stocked: Planner, device: None
) -> None:
    here = measured(stocked, WANTED)
    there = measured(stocked, adapt(WANTED, device="cuda"))
    assert (here.device, there.device) == (None, "cpu"), "the processor stands in its place"
    assert there.warnings == ()
    assert [row.case for row in there.rows] == [row.case for row in here.rows]
    for mine, theirs in zip(there.rows, here.rows, strict=True):
        assert mine.report.activity.requests == theirs.report.activity.requests > 0
        assert mine.report.residence.slots == theirs.report.residence.slots
        assert mine.layers.keys() == theirs.layers.keys()
    whole, exact, skip = there.rows
    assert exact.memory < whole.memory
    assert exact.report.activity.loads > 0
    assert skip.report.skipped_share > 0


def test_what_does_not_fit_on_a_device_is_left_out(stocked: Planner, device: None) -> None:
    wanted = adapt(replace(WANTED, misses=("exact",)), device="cuda")
    whole, _ = measured(stocked, wanted).rows
    found = measured(stocked, wanted, budget=whole.memory)
    assert [row.case.share for row in found.rows] == [0.5]
    assert "all resident" in found.warnings[0]


def test_a_device_that_is_not_there_is_not_measured(
    stocked: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_cuda_available", lambda: False)
    with pytest.raises(NotFoundError, match="CUDA"):
        measured(stocked, adapt(WANTED, device="cuda"))
