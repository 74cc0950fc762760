"""What several engines learn of one base adds up; what one knows of it stays while it lives."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.habit_keeper import HabitKeeper, habits_in, learn
from expertctl.engine.moe.habits import Habits
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.saved_state import LayerState, SavedState
from expertctl.engine.moe.start import StartWishes
from expertctl.package.experts_config import ExpertsConfig
from expertctl.store.base_habits import HabitsFile
from tests.store.faults import run
from tests.store.shop import House, Shop, fast, house, shop
from tests.store.test_processes import together

__all__ = ["fast", "house", "shop"]

EXPERTS = 8
ROUTED = ExpertsConfig(
    count=EXPERTS, used=2, intermediate_size=16, layers=(1, 3), scoring="softmax", normalised=True,
    choice_bias=False, scale=1.0, shared_size=0, shared_gate=False,
)  # fmt: skip


@dataclass(frozen=True)
class Used:
    """Counters and slots as an expert cache has them."""

    counters: Counters
    slots: tuple[LayerSlots, ...]

    def ask(self, *experts: int) -> None:
        requests = np.zeros((2, EXPERTS), np.int64)
        requests[:, experts] = 1
        self.counters.count_pass(requests, np.full((2, EXPERTS), -1))


def used() -> Used:
    slots = tuple(LayerSlots(experts=EXPERTS, capacity=3) for _ in ROUTED.layers)
    for layer in slots:
        layer.exchange(slot=0, expert=6)
    return Used(Counters(ROUTED.layers, experts=EXPERTS), slots)


@pytest.fixture
def file(house: House, shop: Shop) -> HabitsFile:
    return HabitsFile(house.bases, house.bases.add(shop.base_dir))


def keeper(file: HabitsFile, **wishes: object) -> HabitKeeper:
    return HabitKeeper(file.bases, StartWishes(**wishes))  # type: ignore[arg-type]


def hits(file: HabitsFile) -> list[dict[int, int]]:
    habits = habits_in(file)
    return [] if habits is None else [layer.hits for layer in habits.activity.layers]


def test_what_is_counted_is_kept_once(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    owner.keep()
    assert hits(file) == [], "nothing was counted yet"
    for count in (1, 2):
        cache.ask(2, 5)
        owner.keep()
        owner.keep()
        assert hits(file) == [{2: count, 5: count}] * 2
    cache.counters.reset()
    cache.ask(7, 0)
    owner.forget()
    assert hits(file) == [{0: 1, 2: 2, 5: 2, 7: 1}] * 2
    cache.ask(7, 0)
    owner.keep()
    assert hits(file) == [{0: 1, 2: 2, 5: 2, 7: 1}] * 2, "nobody watches any more"
    assert owner.take_notes() == ()


def test_it_is_kept_now_and_then(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep(every=3600)
    cache.ask(2, 5)
    owner.keep(every=3600)
    assert hits(file) == [{2: 1, 5: 1}] * 2
    owner.forget()
    assert hits(file) == [{2: 2, 5: 2}] * 2


def test_another_base_is_watched_and_what_the_first_did_is_kept(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.watch(file.base, ROUTED, used())
    assert hits(file) == [{2: 1, 5: 1}] * 2


def test_a_start_is_decided_once_for_each_engine(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file)
    assert owner.start(file.base, ROUTED).guide is None
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep()
    assert owner.start(file.base, ROUTED).guide is None
    start = keeper(file).start(file.base, ROUTED)
    assert start.guide is not None
    assert start.guide.counts(3) == {2: 1, 5: 1}
    slots = {n: LayerSlots(experts=EXPERTS, capacity=3) for n in ROUTED.layers}
    assert start.ranked(slots) == [[6, 2, 5]] * 2, "who had a slot, then who was asked for"
    assert keeper(file, learns=False).start(file.base, ROUTED).guide is None


def test_a_state_of_other_experts_is_left_out_with_a_note(file: HabitsFile) -> None:
    cache = used()
    owner = keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep()
    state = SavedState(0.0, "", {1: LayerState((EXPERTS,), {}, {}, 0)})
    learn(file, lambda habits: replace(habits, state=state))
    again = keeper(file)
    assert again.start(file.base, ROUTED).guide is None
    (note,) = again.take_notes()
    assert "what was learnt before is left out" in note
    assert str(file.path) in note


def test_of_several_processes_all_counts_are_kept(fast: Path, shop: Shop) -> None:
    bases = House(fast).bases
    file = HabitsFile(bases, bases.add(shop.base_dir))

    def answer() -> None:
        cache, owner = used(), keeper(file)
        owner.watch(file.base, ROUTED, cache)
        for _ in range(5):
            cache.ask(2, 5)
            owner.keep()
        assert owner.take_notes() == ()

    assert together([answer] * 4) == ["None"] * 4
    assert hits(file) == [{2: 20, 5: 20}] * 2


def test_killed_while_it_is_kept_the_counts_before_or_after_are_there(file: HabitsFile) -> None:
    def answer() -> None:
        cache, owner = used(), keeper(file)
        owner.watch(file.base, ROUTED, cache)
        cache.ask(2, 5)
        owner.keep()

    answer()
    steps = len(run(answer).steps)
    before = hits(file)
    assert before == [{2: 2, 5: 2}] * 2
    for at in range(1, steps + 1):
        assert run(answer, at=at, fault="kill").killed
        assert hits(file) in ([{2: 2, 5: 2}] * 2, [{2: 3, 5: 3}] * 2)
        learn(file, lambda habits: Habits(habits.base))
        answer()
        answer()


def test_a_base_that_is_gone_costs_nothing_but_a_note(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    file.bases.remove(file.base)
    cache.ask(2, 5)
    owner.forget()
    (note,) = owner.take_notes()
    assert "is not kept" in note
    assert file.bases.bases() == []
