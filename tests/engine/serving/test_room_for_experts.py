"""A server of routed experts leaves its installed experts the room that they take."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertctl.engine.serving import memory_report
from expertctl.engine.serving.memory_report import AdapterHeadroom
from expertctl.engine.serving.request import JobFailed
from expertctl.engine_config import (
    DEFAULT_WARMUP,
    BatchingConfig,
    EngineConfig,
    TopPins,
    WarmupConfig,
)
from expertctl.errors import BudgetError
from expertctl.package.base_model import read_base
from expertctl.user_request import NO_OVERRIDES
from tests.engine.moe.test_cached_runs import LARGE, PARTS
from tests.engine.package_fixtures import EnginePackages
from tests.engine.serving.harness import EngineHarness, make_request, open_engine_harness
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["fast", "user_home"]
EXPERTS = 16
PROMPT = "Sort: 3, 1, 2"
CHANGED = ("q_proj", *(f"experts.{n}.{part}" for n in range(EXPERTS) for part in PARTS))


@dataclass(frozen=True)
class RoutedExpertsSetup:
    """A base of routed experts, what it takes, and experts that change all of them."""

    user_home: HomeFixture
    engine_packages: EnginePackages
    size: int

    def install(self, name: str, rank: int, *, dtype: str = "float32", **manifest: Any) -> None:
        options = {"targets": CHANGED, "rank": rank, "scale": 0.4, "seed": rank, "dtype": dtype}
        package = self.engine_packages.package(
            f"acme/{name}", adapters=[("lora", options)], **manifest
        )
        self.user_home.install(package)

    def settings(
        self, tenths: int, *, rows: int = 1, moe: WarmupConfig = DEFAULT_WARMUP
    ) -> EngineConfig:
        return EngineConfig(
            memory_budget=self.size * tenths // 10, moe=moe, batching=BatchingConfig(rows=rows)
        )

    def answers(self, settings: EngineConfig, *names: str) -> "HeadroomAnswers":
        with open_engine_harness(self.user_home.home, settings, numpy_below=0) as harness:
            tokens = [answer(harness, name) for name in names]
            (alone,) = harness.answer(make_request()).results
            assert alone.moe is not None
            return HeadroomAnswers(tokens, alone.moe.residence.slots, "\n".join(harness.messages))


@dataclass(frozen=True)
class HeadroomAnswers:
    """Tokens of an answer with each of some experts (None: refused), slots, and what was told."""

    tokens: list[list[int] | None]
    slots: int
    told: str


def answer(harness: EngineHarness, name: str) -> list[int] | None:
    asked = harness.answer(make_request(PROMPT, name))
    *_, last = asked.events
    if isinstance(last, JobFailed):
        assert isinstance(last.error, BudgetError)
        return None
    (result,) = asked.results
    return list(result.generated.tokens)


@pytest.fixture
def routed_setup(user_home: HomeFixture, tmp_path: Path) -> RoutedExpertsSetup:
    base = write_base(
        tmp_path / "base",
        arch="qwen3_moe",
        tie=False,
        seed=3,
        layers=3,
        hidden=64,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=3,
        moe_intermediate_size=576,
        max_position_embeddings=16384,
    )
    user_home.bases.add(base)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    return RoutedExpertsSetup(
        user_home, EnginePackages(tmp_path / "market", base, read_base(base)), size
    )


@pytest.mark.parametrize(("tenths", "rows"), [(20, 1), (22, 1), (22, 2)])
def test_who_takes_most_has_room_and_the_others_take_turns(
    tenths: int, rows: int, routed_setup: RoutedExpertsSetup
) -> None:
    routed_setup.install("small", 2)
    routed_setup.install("large", 16)
    names = ("large", "small", "large")
    right = routed_setup.answers(
        EngineConfig(memory_budget=LARGE, batching=BatchingConfig(rows=rows)), *names
    )
    assert right.slots == EXPERTS
    assert "room" not in right.told
    found = routed_setup.answers(routed_setup.settings(tenths, rows=rows), *names)
    assert found.tokens == right.tokens
    assert 0 < found.slots < EXPERTS
    assert "slots of routed experts leave room for acme/large" in found.told


def test_who_takes_most_is_not_who_has_the_largest_files(routed_setup: RoutedExpertsSetup) -> None:
    routed_setup.install("long", 16)
    routed_setup.install("narrow", 30, dtype="bfloat16")
    sizes = {e.ref: e.resident_bytes for e in inventory(routed_setup)}
    assert sizes["acme/narrow@1.0.0"] < sizes["acme/long@1.0.0"]
    found = routed_setup.answers(routed_setup.settings(24), "long", "narrow")
    assert None not in found.tokens
    assert "leave room for acme/narrow" in found.told


def test_where_one_cannot_have_room_the_next_one_has(routed_setup: RoutedExpertsSetup) -> None:
    routed_setup.install("small", 2)
    routed_setup.install("large", 16)
    right = routed_setup.answers(
        EngineConfig(memory_budget=LARGE, batching=BatchingConfig(rows=1)), "small"
    )
    found = routed_setup.answers(routed_setup.settings(16), "small", "large")
    assert found.tokens == [*right.tokens, None]
    assert 0 < found.slots < EXPERTS
    assert "leave room for acme/small" in found.told
    assert "there is not enough memory for acme/large@1.0.0" in found.told


def test_room_is_for_an_answer_as_long_as_the_expert_says(routed_setup: RoutedExpertsSetup) -> None:
    routed_setup.install("code", 4, routing={"task": "code_generation"})
    wanted = make_request(PROMPT, "code")
    wanted = replace(wanted, route=replace(wanted.route, sampling=NO_OVERRIDES))
    with open_engine_harness(
        routed_setup.user_home.home, routed_setup.settings(20), numpy_below=0
    ) as harness:
        asked = harness.submit(wanted)
        harness.step_until(lambda: asked.is_over or asked.state.stage == "running")
        assert not asked.is_over, asked.events
        assert harness.runner.base.backend.cache is not None, "not all slots"


def test_whoever_pins_more_than_that_is_told_who_has_no_room(
    routed_setup: RoutedExpertsSetup,
) -> None:
    routed_setup.install("small", 2)
    routed_setup.install("large", 16)
    plain = routed_setup.answers(routed_setup.settings(16), "small")
    assert None not in plain.tokens  # and something is learnt
    pinned = routed_setup.answers(
        routed_setup.settings(16, moe=WarmupConfig(pins=TopPins(9))), "small"
    )
    assert pinned.tokens == [None]
    assert pinned.told.count("cannot pin 9 routed experts of each layer: layer") == 1
    assert "there is not enough memory for acme/large@1.0.0, acme/small@1.0.0" in pinned.told
    fewer = routed_setup.answers(
        routed_setup.settings(16, moe=WarmupConfig(pins=TopPins(2))), "small"
    )
    assert fewer.tokens == plain.tokens
    assert "leave room for acme/small" in fewer.told
    assert "there is not enough memory for acme/large@1.0.0" in fewer.told


def test_damaged_and_unreadable_experts_keep_no_server_from_starting(
    routed_setup: RoutedExpertsSetup,
) -> None:
    routed_setup.install("small", 2)
    routed_setup.install("large", 16)
    routed_setup.install("gone", 4)
    for expert in inventory(routed_setup):
        for file in () if "small" in expert.ref else expert.stored.files:
            blob = routed_setup.user_home.store.paths.blob(file.digest)
            if "gone" in expert.ref:
                blob.unlink()
            else:
                blob.chmod(0o600)
                blob.write_bytes(b"\0" * 8)
    found = routed_setup.answers(routed_setup.settings(17), "small")
    assert None not in found.tokens


def test_of_many_experts_no_more_than_so_many_are_looked_at(
    routed_setup: RoutedExpertsSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_report, "MAX_MEASURED", 2)
    for number in range(1, 6):
        routed_setup.install(f"rank-{number}", 13 + number)
    few = routed_setup.answers(routed_setup.settings(13))
    assert "there is not enough memory for acme/rank-5@1.0.0, acme/rank-4@1.0.0" in few.told
    assert "warning: memory was estimated for 2 of 5 experts" in few.told
    monkeypatch.setattr(memory_report, "MAX_MEASURED", 100)
    many = routed_setup.answers(routed_setup.settings(13)).told
    assert "acme/rank-5@1.0.0, acme/rank-4@1.0.0, acme/rank-3@1.0.0 and 2 others" in many
    monkeypatch.setattr(memory_report, "MAX_MEASURE_SECONDS", 0.0)
    hasty = routed_setup.answers(routed_setup.settings(13)).told
    assert "memory was estimated for 1 of 5" in hasty


def test_a_base_is_not_opened_for_experts_that_have_no_room_beside_any(
    routed_setup: RoutedExpertsSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even beside what is no routed expert: to open it takes time, and changes nothing."""
    for name, rank in (("small", 2), ("huge", 40), ("larger", 41)):
        routed_setup.install(name, rank)
    opened = list[str]()
    opens = AdapterHeadroom._open_with_room

    def watched(self: AdapterHeadroom, wish: Any, base: Any, open_beside: Any, why: Any) -> Any:
        def watched_open(size: int) -> Any:
            opened.append(wish.ref)
            return open_beside(size)

        return opens(self, wish, base, watched_open, why)

    monkeypatch.setattr(AdapterHeadroom, "_open_with_room", watched)
    found = routed_setup.answers(routed_setup.settings(16), "small", "huge")
    assert found.tokens[0] is not None
    assert found.tokens[1] is None
    assert set(opened) == {"acme/small@1.0.0"}
    assert "there is not enough memory for acme/larger@1.0.0, acme/huge@1.0.0" in found.told
    assert "leave room for acme/small" in found.told


def test_a_search_for_room_that_takes_long_ends_and_says_how_far_it_came(
    routed_setup: RoutedExpertsSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        routed_setup.install(f"rank-{number}", 14 + number)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    looks = AdapterHeadroom._open_with_room

    def slowly(self: AdapterHeadroom, *wished: Any) -> Any:
        clock.now += memory_report.MAX_MEASURE_SECONDS * 0.6
        return looks(self, *wished)

    monkeypatch.setattr(memory_report, "time", clock)
    monkeypatch.setattr(AdapterHeadroom, "_open_with_room", slowly)
    told = routed_setup.answers(routed_setup.settings(13)).told
    assert "warning: headroom was computed for 2 of 4 experts" in told
    assert "there is not enough memory for acme/rank-3@1.0.0, acme/rank-2@1.0.0\n" in f"{told}\n"


def inventory(routed_setup: RoutedExpertsSetup) -> list[Any]:
    with open_engine_harness(
        routed_setup.user_home.home, EngineConfig(memory_budget=LARGE), numpy_below=0
    ) as harness:
        return list(harness.processor.get_inventory().result().experts)
