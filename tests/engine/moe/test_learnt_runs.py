"""Stored counts of routed experts decide the next start; answers stay bit-identical."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.moe.expert_memory import ExpertMemory
from expertctl.engine.moe.usage_store import (
    LearntUsage,
    compute_base_digest,
    encode_learnt_usage,
    load_learnt_usage,
)
from expertctl.engine.result import RunResult
from expertctl.engine_config import SharePins, TopPins, Warmup, WarmupConfig
from expertctl.errors import IncompatibleError, UsageError
from expertctl.store.quantised_cache import UsageProfileFile
from tests.engine.moe.fakes import at_once
from tests.engine.moe.test_cached_runs import LARGE, asked
from tests.engine.test_local_engine import planner, run
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["at_once", "fast", "user_home"]

pytestmark = pytest.mark.all

FULL = WarmupConfig(warmup="full")
NOT_LEARNT = WarmupConfig(warmup="full", learns=False)
Answer = Callable[..., RunResult]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly all of it is routed experts; its answer goes on and on, and repeats itself."""
    return write_base(
        tmp_path_factory.mktemp("routed") / "base",
        arch="qwen3_moe",
        tie=False,
        seed=3,
        layers=4,
        hidden=64,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1152,
    )


@pytest.fixture
def answer(base: Path, user_home: HomeFixture) -> Answer:
    """Answer once with a new engine that has memory for four fifths of the base."""
    user_home.bases.add(base)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))

    def once(wishes: WarmupConfig = FULL, **route: object) -> RunResult:
        engine = LocalEngine(planner(user_home), budget=size * 8 // 10, numpy_below=0, moe=wishes)
        result = run(engine, asked(**route))
        engine.check_integrity()
        assert engine.budget.peak <= engine.budget.limit
        engine.close()
        assert result.moe is not None
        return result

    return once


def file_of(user_home: HomeFixture) -> UsageProfileFile:
    return UsageProfileFile(user_home.bases, user_home.bases.list_bases()[0])


def hit_rate(result: RunResult) -> float:
    assert result.moe is not None
    activity = result.moe.activity
    return 1 - activity.misses / activity.requests


@pytest.mark.usefixtures("at_once")
def test_what_was_learnt_makes_the_next_start_hit_more(
    answer: Answer, user_home: HomeFixture
) -> None:
    """Of what the same text asks for: 0.906 without anything known, 0.951 after it."""
    cold = answer(NOT_LEARNT)
    assert file_of(user_home).read() is None
    first, second, third = answer(), answer(), answer()
    assert hit_rate(first) == hit_rate(cold), "nothing was known yet"
    assert hit_rate(second) > hit_rate(first) + 0.02
    assert hit_rate(third) >= hit_rate(second)
    results = (cold, first, second, third)
    assert len({result.generated.tokens for result in results}) == 1
    assert len(cold.generated.tokens) == 24


@pytest.mark.usefixtures("at_once")
def test_who_is_there_from_the_start_is_hit(answer: Answer) -> None:
    """Of the same text: 0.912 where nobody is read beforehand, 0.951 where somebody is."""
    answer()
    answer()
    none, hybrid, full = (
        hit_rate(answer(WarmupConfig(warmup=warmup))) for warmup in get_args(Warmup)
    )
    assert min(hybrid, full) > none + 0.02


def test_what_is_kept_is_what_was_asked_for(answer: Answer, user_home: HomeFixture) -> None:
    first, second = answer(), answer()
    results = (first, second)
    tokens = sum(r.prompt_tokens + len(r.generated.tokens) - 1 for r in results)
    last = sum(len(r.generated.tokens) for r in results)
    habits = load_learnt_usage(file_of(user_home))
    assert habits is not None
    assert habits.state is not None
    assert second.moe is not None
    asked = [sum(layer.hits.values()) for layer in habits.profile.layers]
    assert asked == [4 * tokens] * 3 + [4 * last], "a prompt asks the last layer for one token"
    capacities = [len(layer.cached_ids) for layer in habits.state.layers.values()]
    assert capacities == [second.moe.residence.slots] * 4
    assert all(-1 not in layer.cached_ids for layer in habits.state.layers.values())


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 4096, b"{}\n{}\n{}\n", b'{"version":9,"base":""}\n\n\n', None],
    ids=["empty", "zeros", "objects", "later version", "another base"],
)
def test_learnt_usage_that_is_invalid_is_left_out_with_a_note_and_made_anew(
    data: bytes | None, answer: Answer, user_home: HomeFixture
) -> None:
    other = encode_learnt_usage(
        LearntUsage(
            compute_base_digest(replace(user_home.bases.list_bases()[0].identity, weights=None))
        )
    )
    file_of(user_home).update(lambda _: other if data is None else data)
    result = answer()
    noted = [warning for warning in result.warnings if "the learnt usage is ignored" in warning]
    assert len(noted) == (0 if data is None else 1)
    assert load_learnt_usage(file_of(user_home)) is not None
    assert not any("learnt" in warning for warning in answer().warnings)


@pytest.mark.parametrize("exchange", [0.0, 1.0])
@pytest.mark.parametrize("warmup", get_args(Warmup))
def test_however_a_base_begins_its_answer_is_the_same(
    warmup: Warmup, exchange: float, answer: Answer
) -> None:
    """Whoever comes beside the work, or is exchanged for the profile, is a matter of time alone."""
    first = answer()
    again = answer(WarmupConfig(warmup=warmup, exchange=exchange))
    assert again.generated.tokens == first.generated.tokens


def test_nothing_is_learnt_where_nobody_wants_it(answer: Answer, user_home: HomeFixture) -> None:
    answer()
    before = file_of(user_home).read()
    answer(NOT_LEARNT)
    assert file_of(user_home).read() == before


def test_learnt_usage_that_cannot_be_written_costs_no_answer(
    answer: Answer, user_home: HomeFixture
) -> None:
    file_of(user_home).path.mkdir()
    result = answer()
    assert any("is not saved" in warning for warning in result.warnings)
    assert result.generated.tokens


def test_those_that_are_pinned_have_a_slot_from_the_start(
    answer: Answer, user_home: HomeFixture
) -> None:
    answer()
    habits = load_learnt_usage(file_of(user_home))
    assert habits is not None
    first = [habits.profile.rank_experts(layer.layer)[:2] for layer in habits.profile.layers]
    pinned = answer(WarmupConfig(warmup="full", pins=TopPins(2)))
    assert not any("pin" in warning for warning in pinned.warnings)
    habits = load_learnt_usage(file_of(user_home))
    assert habits is not None
    assert habits.state is not None
    for layer, experts in zip(habits.state.layers.values(), first, strict=True):
        assert set(experts) <= set(layer.cached_ids)
    shared = answer(WarmupConfig(warmup="full", pins=SharePins(0.2)))
    assert shared.generated.tokens == pinned.generated.tokens
    with pytest.raises(UsageError, match="cannot pin"):
        answer(WarmupConfig(pins=TopPins(32)))


def test_pins_without_anything_known_are_told(answer: Answer) -> None:
    result = answer(WarmupConfig(pins=TopPins(2)))
    assert any("pins no expert" in warning for warning in result.warnings)
    assert any("run it once more" in warning for warning in result.warnings)
    never = answer(WarmupConfig(pins=TopPins(2), learns=False))
    assert any("is unknown; give --moe-profile" in warning for warning in never.warnings)


def test_a_profile_of_another_base_is_refused(answer: Answer, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"num_prompts": 1, "num_experts": 9, "layers": {}}')
    with pytest.raises(IncompatibleError, match="has 9 routed experts"):
        answer(WarmupConfig(profile=path))


@pytest.mark.usefixtures("at_once")
def test_a_base_that_is_whole_in_memory_is_learnt_from_for_when_it_is_not(
    base: Path, user_home: HomeFixture, answer: Answer
) -> None:
    """The same text asks for the same experts, wherever they are; so the next run hits more."""
    user_home.bases.add(base)
    cold = answer(NOT_LEARNT)
    engine = LocalEngine(planner(user_home), budget=LARGE, numpy_below=0)
    whole = run(engine, asked())
    engine.close()
    assert whole.moe is not None
    assert (whole.moe.residence.slots, whole.moe.fallback_rate) == (32, 0)
    habits = load_learnt_usage(file_of(user_home))
    assert habits is not None
    assert habits.state is None, "nobody needs a slot"
    tokens, last = (
        whole.prompt_tokens + len(whole.generated.tokens) - 1,
        len(whole.generated.tokens),
    )
    asked_for = [sum(layer.hits.values()) for layer in habits.profile.layers]
    assert asked_for == [4 * tokens] * 3 + [4 * last]
    assert not any(layer.missed_requests for layer in habits.profile.layers)
    fewer = answer()
    assert fewer.generated.tokens == whole.generated.tokens
    assert fewer.moe is not None
    assert fewer.moe.activity.requests == whole.moe.activity.requests
    assert hit_rate(fewer) > hit_rate(cold) + 0.02


def test_a_base_that_is_left_gives_back_its_memory_though_it_was_learnt_from(
    base: Path, user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_home.bases.add(base)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    live = weakref.WeakSet[ExpertMemory]()
    most: list[int] = []
    begin = ExpertMemory.__init__

    def counted(self: ExpertMemory, *args: Any, **options: Any) -> None:
        gc.collect()
        begin(self, *args, **options)
        live.add(self)
        most.append(len(live))

    monkeypatch.setattr(ExpertMemory, "__init__", counted)
    engine = LocalEngine(planner(user_home), budget=size * 8 // 10, numpy_below=0, moe=FULL)
    for skips in (False, True, False):
        run(engine, asked(**({"moe_miss": "skip", "moe_skip_cap": 0.2} if skips else {})))
    run(engine, asked(dtype="int4"))
    gc.collect()
    assert most == [1, 1, 1]
    assert not live
    engine.close()
