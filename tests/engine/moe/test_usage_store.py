"""What several engines learn of one base adds up; what one knows of it stays while it lives."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from expertctl.engine.moe import usage_store
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.swap_policy import ExpertScores
from expertctl.engine.moe.usage_profile import LayerUsage, UsageProfile
from expertctl.engine.moe.usage_store import (
    ExpertUsageStore,
    LearntUsage,
    load_learnt_usage,
    update_learnt_usage,
)
from expertctl.engine.moe.warmup import LayerState, SavedCacheState
from expertctl.engine_config import WarmupConfig
from expertctl.package.architectures import ExpertsConfig
from expertctl.store.quantised_cache import UsageProfileFile
from tests.store.fault_injection import run_with_fault
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home
from tests.store.test_processes import together

__all__ = ["fast", "package_factory", "user_home"]

EXPERTS = 8
ROUTED = ExpertsConfig(
    count=EXPERTS, used=2, intermediate_size=16, layers=(1, 3), scoring="softmax", normalised=True,
    choice_bias=False, scale=1.0, shared_size=0, shared_gate=False,
)  # fmt: skip


@dataclass(frozen=True)
class CounterSource:
    """A model and its expert cache: counters and slots."""

    counters: Counters
    slots: tuple[LayerSlots, ...]
    guided: list[tuple[Sequence[ExpertScores], float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def slots_by_layer(self) -> dict[int, LayerSlots]:
        return dict(zip(ROUTED.layers, self.slots, strict=True))

    @property
    def experts(self) -> "CounterSource | None":
        return self if self.slots else None

    @property
    def scores(self) -> Sequence[ExpertScores]:
        return self.guided[-1][0]

    @property
    def exchange_rate(self) -> float:
        return self.guided[-1][1] if self.guided else 0.0

    def set_scores(self, scores: Sequence[ExpertScores], *, rate: float) -> None:
        self.guided.append((scores, rate))

    def take_notes(self) -> tuple[str, ...]:
        notes = tuple(self.notes)
        self.notes.clear()
        return notes

    def ask(self, *experts: int) -> None:
        requests = np.zeros((2, EXPERTS), np.int64)
        requests[:, experts] = 1
        self.counters.count_passes(requests[None], np.full((1, 2, EXPERTS), -1))


def used() -> CounterSource:
    slots = tuple(LayerSlots(experts=EXPERTS, capacity=3) for _ in ROUTED.layers)
    for layer in slots:
        layer.assign(slot=0, expert=6)
    return CounterSource(Counters(ROUTED.layers, experts=EXPERTS), slots)


@pytest.fixture
def file(user_home: HomeFixture, package_factory: PackageFactory) -> UsageProfileFile:
    return UsageProfileFile(user_home.bases, user_home.bases.add(package_factory.base_dir))


def keeper(file: UsageProfileFile, **wishes: object) -> ExpertUsageStore:
    return ExpertUsageStore(file.bases, WarmupConfig(**wishes))  # type: ignore[arg-type]


def hits(file: UsageProfileFile) -> list[dict[int, int]]:
    habits = load_learnt_usage(file)
    return [] if habits is None else [layer.hits for layer in habits.profile.layers]


def test_what_is_counted_is_kept_once(file: UsageProfileFile) -> None:
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    owner.save()
    assert hits(file) == [], "nothing was counted yet"
    for count in (1, 2):
        cache.ask(2, 5)
        owner.save()
        owner.save()
        assert hits(file) == [{2: count, 5: count}] * 2
    cache.counters.reset()
    cache.ask(7, 0)
    owner.stop_observing()
    assert hits(file) == [{0: 1, 2: 2, 5: 2, 7: 1}] * 2
    cache.ask(7, 0)
    owner.save()
    assert hits(file) == [{0: 1, 2: 2, 5: 2, 7: 1}] * 2, "nobody watches any more"
    assert owner.take_notes() == ()


@pytest.mark.parametrize("now", [5.0, 90_000.0], ids=["a machine just begun", "a day later"])
def test_it_is_kept_now_and_then(
    now: float, file: UsageProfileFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(usage_store, "time", clock)
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.save(interval=3600)
    cache.ask(2, 5)
    owner.save(interval=3600)
    assert hits(file) == [{2: 1, 5: 1}] * 2
    owner.stop_observing()
    assert hits(file) == [{2: 2, 5: 2}] * 2


def test_what_ails_a_base_that_is_watched_is_told_once(file: UsageProfileFile) -> None:
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    assert owner.take_notes() == ()
    cache.notes.append("expert 3 could not be read")
    told = (f"{file.base.name}: expert 3 could not be read",)
    assert (owner.take_notes(), owner.take_notes()) == (told, ())
    cache.notes.append("expert 3 could not be read")
    owner.stop_observing()
    assert (owner.take_notes(), owner.take_notes()) == (told, ())


def test_another_base_is_watched_and_what_the_first_did_is_kept(file: UsageProfileFile) -> None:
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.observe(file.base, ROUTED, used())
    assert hits(file) == [{2: 1, 5: 1}] * 2


def test_a_start_is_decided_once_for_each_engine(file: UsageProfileFile) -> None:
    cache, owner = used(), keeper(file)
    assert owner.plan_warmup(file.base, ROUTED).usage is None
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.save()
    assert owner.plan_warmup(file.base, ROUTED).usage is None
    start = keeper(file).plan_warmup(file.base, ROUTED)
    assert start.usage is not None
    assert start.usage.layer_counts(3) == {2: 1, 5: 1}
    slots = {n: LayerSlots(experts=EXPERTS, capacity=3) for n in ROUTED.layers}
    assert start.rank_experts(slots) == [[6, 2, 5]] * 2, "those with a slot first"
    assert keeper(file, learns=False).plan_warmup(file.base, ROUTED).usage is None


def test_a_state_of_other_experts_is_left_out_with_a_note(file: UsageProfileFile) -> None:
    cache = used()
    owner = keeper(file)
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.save()
    state = SavedCacheState(0.0, "", {1: LayerState((EXPERTS,), {}, {}, 0)})
    update_learnt_usage(file, ROUTED, lambda habits: replace(habits, state=state))
    again = keeper(file)
    assert again.plan_warmup(file.base, ROUTED).usage is None
    (note,) = again.take_notes()
    assert "the learnt usage is ignored" in note
    assert str(file.path) in note


def counted(*layers: int, experts: int = EXPERTS, used: int = 2) -> UsageProfile:
    told = tuple(LayerUsage(layer, calls=1, hot={1: 1}) for layer in layers)
    return UsageProfile("update", told, experts=experts, used=used)


def saved(layer: int, expert: int) -> SavedCacheState:
    return SavedCacheState(0.0, "", {layer: LayerState((expert,), {}, {}, 0)})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda h: replace(h, profile=counted(1, experts=9)), id="more experts"),
        pytest.param(lambda h: replace(h, profile=counted(1, used=3)), id="more of them used"),
        pytest.param(lambda h: replace(h, profile=counted(1, 2)), id="another layer"),
        pytest.param(lambda h: replace(h, state=saved(1, EXPERTS)), id="a slot of nobody"),
        pytest.param(lambda h: replace(h, state=saved(2, 0)), id="slots of another layer"),
    ],
)
def test_learnt_usage_that_does_not_fit_the_base_is_replaced_with_one_note(
    change: Callable[[LearntUsage], LearntUsage], file: UsageProfileFile
) -> None:
    update_learnt_usage(file, ROUTED, change)
    cache, owner = used(), keeper(file)
    assert owner.plan_warmup(file.base, ROUTED).usage is None
    owner.observe(file.base, ROUTED, cache)
    for _ in range(2):
        cache.ask(2, 5)
        owner.save()
    assert hits(file) == [{2: 2, 5: 2}] * 2
    (note,) = owner.take_notes()
    assert "the learnt usage is ignored" in note
    again = keeper(file)
    assert again.plan_warmup(file.base, ROUTED).state is not None
    assert again.take_notes() == ()


def test_whoever_learns_without_a_start_tells_what_is_left_out(file: UsageProfileFile) -> None:
    file.update(lambda _: b"of an older version")
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.save()
    assert hits(file) == [{2: 1, 5: 1}] * 2
    (note,) = owner.take_notes()
    assert "expected 3 lines" in note


def test_what_is_observed_is_nothing_to_what_is_learnt(file: UsageProfileFile) -> None:
    """A reset after which more was asked for than before it, and a time without observation."""
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.save()
    cache.counters.configure(reset=True)
    cache.ask(2, 5)
    cache.ask(2, 5)
    owner.save()
    assert hits(file) == [{2: 3, 5: 3}] * 2
    cache.counters.configure(mode="off")
    cache.ask(2, 5)
    cache.counters.configure(mode="update")
    owner.save()
    assert hits(file) == [{2: 4, 5: 4}] * 2
    assert cache.counters.observed_snapshot().summary.calls == 0


def test_what_could_not_be_kept_is_kept_the_next_time(file: UsageProfileFile) -> None:
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    file.path.mkdir()
    for _ in range(2):
        owner.save()
    notes = owner.take_notes()
    assert [note for note in notes if "is not saved" not in note] == []
    assert len(notes) == 1, notes
    file.path.rmdir()
    cache.ask(7, 0)
    owner.save()
    assert hits(file) == [{0: 1, 2: 1, 5: 1, 7: 1}] * 2


def test_scores_grow_with_what_is_learnt_and_only_where_they_count(file: UsageProfileFile) -> None:
    cache, owner = used(), keeper(file, learns=False)
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.save()
    assert cache.guided == [], "nobody exchanges by scores"
    cache.set_scores([{2: 7}, {}], rate=0.5)
    owner.save()
    assert cache.scores == [{2: 7}, {}], "what was asked for before is no part of a profile"
    cache.ask(2, 6)
    owner.save()
    assert cache.guided[1:] == [([{2: 8, 6: 1}, {2: 1, 6: 1}], 0.5)]
    assert hits(file) == [], "scores are no habits"


def test_scores_grow_more_often_than_usage_is_saved(
    file: UsageProfileFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10_000.0
    monkeypatch.setattr("expertctl.engine.moe.usage_store.time.monotonic", lambda: now)
    cache, owner = used(), keeper(file)
    cache.set_scores([{}, {}], rate=0.5)
    owner.observe(file.base, ROUTED, cache)
    for seconds, kept, scored in ((0, 1, 1), (29, 1, 1), (1, 1, 3), (30, 1, 4), (540, 5, 5)):
        now += seconds
        cache.ask(2)
        owner.save(interval=600)
        assert (hits(file)[0], cache.scores[0]) == ({2: kept}, {2: scored})


def test_a_base_whose_experts_are_all_there_is_learnt_from_without_slots(
    file: UsageProfileFile,
) -> None:
    cache, owner = CounterSource(Counters(ROUTED.layers, experts=EXPERTS), ()), keeper(file)
    update_learnt_usage(file, ROUTED, lambda habits: replace(habits, state=saved(1, 4)))
    owner.observe(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.save()
    assert hits(file) == [{2: 1, 5: 1}] * 2
    assert keeper(file).plan_warmup(file.base, ROUTED).state == saved(1, 4), "who had a slot last"


def test_of_several_processes_all_counts_are_kept(
    fast: Path, package_factory: PackageFactory
) -> None:
    bases = HomeFixture(fast).bases
    file = UsageProfileFile(bases, bases.add(package_factory.base_dir))

    def answer() -> None:
        cache, owner = used(), keeper(file)
        owner.observe(file.base, ROUTED, cache)
        for _ in range(5):
            cache.ask(2, 5)
            owner.save()
        assert owner.take_notes() == ()

    assert together([answer] * 4) == ["None"] * 4
    assert hits(file) == [{2: 20, 5: 20}] * 2


def test_killed_while_it_is_kept_the_counts_before_or_after_are_there(
    file: UsageProfileFile,
) -> None:
    def answer() -> None:
        cache, owner = used(), keeper(file)
        owner.observe(file.base, ROUTED, cache)
        cache.ask(2, 5)
        owner.save()

    answer()
    steps = len(run_with_fault(answer).steps)
    before = hits(file)
    assert before == [{2: 2, 5: 2}] * 2
    for at in range(1, steps + 1):
        assert run_with_fault(answer, at=at, fault="kill").killed
        assert hits(file) in ([{2: 2, 5: 2}] * 2, [{2: 3, 5: 3}] * 2)
        update_learnt_usage(file, ROUTED, lambda habits: LearntUsage(habits.base))
        answer()
        answer()


def test_a_base_that_is_gone_costs_nothing_but_a_note(file: UsageProfileFile) -> None:
    cache, owner = used(), keeper(file)
    owner.observe(file.base, ROUTED, cache)
    file.bases.remove(file.base)
    cache.ask(2, 5)
    owner.stop_observing()
    (note,) = owner.take_notes()
    assert "is not saved" in note
    assert file.bases.list_bases() == []
