"""What several engines learn of one base adds up; what one knows of it stays while it lives."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from expertctl.engine.moe import habit_keeper
from expertctl.engine.moe.activity_document import ActivityDocument, LayerActivity
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.exchanges import Scores
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
    guided: list[tuple[Sequence[Scores], float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def scores(self) -> Sequence[Scores]:
        return self.guided[-1][0]

    @property
    def exchange_rate(self) -> float:
        return self.guided[-1][1] if self.guided else 0.0

    def guide(self, scores: Sequence[Scores], *, rate: float) -> None:
        self.guided.append((scores, rate))

    def take_notes(self) -> tuple[str, ...]:
        notes = tuple(self.notes)
        self.notes.clear()
        return notes

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


@pytest.mark.parametrize("now", [5.0, 90_000.0], ids=["a machine just begun", "a day later"])
def test_it_is_kept_now_and_then(
    now: float, file: HabitsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(habit_keeper, "time", clock)
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep(every=3600)
    cache.ask(2, 5)
    owner.keep(every=3600)
    assert hits(file) == [{2: 1, 5: 1}] * 2
    owner.forget()
    assert hits(file) == [{2: 2, 5: 2}] * 2


def test_what_ails_a_base_that_is_watched_is_told_once(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    assert owner.take_notes() == ()
    cache.notes.append("expert 3 could not be read")
    told = (f"{file.base.name}: expert 3 could not be read",)
    assert (owner.take_notes(), owner.take_notes()) == (told, ())
    cache.notes.append("expert 3 could not be read")
    owner.forget()
    assert (owner.take_notes(), owner.take_notes()) == (told, ())


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
    assert start.ranked(slots) == [[6, 2, 5]] * 2, "those with a slot first"
    assert keeper(file, learns=False).start(file.base, ROUTED).guide is None


def test_a_state_of_other_experts_is_left_out_with_a_note(file: HabitsFile) -> None:
    cache = used()
    owner = keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep()
    state = SavedState(0.0, "", {1: LayerState((EXPERTS,), {}, {}, 0)})
    learn(file, ROUTED, lambda habits: replace(habits, state=state))
    again = keeper(file)
    assert again.start(file.base, ROUTED).guide is None
    (note,) = again.take_notes()
    assert "what was learnt before is left out" in note
    assert str(file.path) in note


def counted(*layers: int, experts: int = EXPERTS, used: int = 2) -> ActivityDocument:
    told = tuple(LayerActivity(layer, calls=1, hot={1: 1}) for layer in layers)
    return ActivityDocument("update", told, experts=experts, used=used)


def saved(layer: int, expert: int) -> SavedState:
    return SavedState(0.0, "", {layer: LayerState((expert,), {}, {}, 0)})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda h: replace(h, activity=counted(1, experts=9)), id="more experts"),
        pytest.param(lambda h: replace(h, activity=counted(1, used=3)), id="more of them used"),
        pytest.param(lambda h: replace(h, activity=counted(1, 2)), id="another layer"),
        pytest.param(lambda h: replace(h, state=saved(1, EXPERTS)), id="a slot of nobody"),
        pytest.param(lambda h: replace(h, state=saved(2, 0)), id="slots of another layer"),
    ],
)
def test_habits_that_do_not_fit_the_base_are_replaced_and_that_is_told_once(
    change: Callable[[Habits], Habits], file: HabitsFile
) -> None:
    learn(file, ROUTED, change)
    cache, owner = used(), keeper(file)
    assert owner.start(file.base, ROUTED).guide is None
    owner.watch(file.base, ROUTED, cache)
    for _ in range(2):
        cache.ask(2, 5)
        owner.keep()
    assert hits(file) == [{2: 2, 5: 2}] * 2
    (note,) = owner.take_notes()
    assert "what was learnt before is left out" in note
    again = keeper(file)
    assert again.start(file.base, ROUTED).state is not None
    assert again.take_notes() == ()


def test_whoever_learns_without_a_start_tells_what_is_left_out(file: HabitsFile) -> None:
    file.change(lambda _: b"of an older version")
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep()
    assert hits(file) == [{2: 1, 5: 1}] * 2
    (note,) = owner.take_notes()
    assert "these are not 3 lines" in note


def test_what_is_observed_is_nothing_to_what_is_learnt(file: HabitsFile) -> None:
    """A reset after which more was asked for than before it, and a time without observation."""
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep()
    cache.counters.change(reset=True)
    cache.ask(2, 5)
    cache.ask(2, 5)
    owner.keep()
    assert hits(file) == [{2: 3, 5: 3}] * 2
    cache.counters.change(mode="off")
    cache.ask(2, 5)
    cache.counters.change(mode="update")
    owner.keep()
    assert hits(file) == [{2: 4, 5: 4}] * 2
    assert cache.counters.observed().summary.calls == 0


def test_what_could_not_be_kept_is_kept_the_next_time(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    file.path.mkdir()
    for _ in range(2):
        owner.keep()
    notes = owner.take_notes()
    assert [note for note in notes if "is not kept" not in note] == []
    assert len(notes) == 1, notes
    file.path.rmdir()
    cache.ask(7, 0)
    owner.keep()
    assert hits(file) == [{0: 1, 2: 1, 5: 1, 7: 1}] * 2


def test_scores_grow_with_what_is_learnt_and_only_where_they_count(file: HabitsFile) -> None:
    cache, owner = used(), keeper(file, learns=False)
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep()
    assert cache.guided == [], "nobody exchanges by scores"
    cache.guide([{2: 7}, {}], rate=0.5)
    owner.keep()
    assert cache.scores == [{2: 7}, {}], "what was asked for before is no part of a profile"
    cache.ask(2, 6)
    owner.keep()
    assert cache.guided[1:] == [([{2: 8, 6: 1}, {2: 1, 6: 1}], 0.5)]
    assert hits(file) == [], "scores are no habits"


def test_scores_grow_more_often_than_habits_are_kept(
    file: HabitsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10_000.0
    monkeypatch.setattr("expertctl.engine.moe.habit_keeper.time.monotonic", lambda: now)
    cache, owner = used(), keeper(file)
    cache.guide([{}, {}], rate=0.5)
    owner.watch(file.base, ROUTED, cache)
    for seconds, kept, scored in ((0, 1, 1), (29, 1, 1), (1, 1, 3), (30, 1, 4), (540, 5, 5)):
        now += seconds
        cache.ask(2)
        owner.keep(every=600)
        assert (hits(file)[0], cache.scores[0]) == ({2: kept}, {2: scored})


def test_a_base_whose_experts_are_all_there_is_learnt_from_without_slots(file: HabitsFile) -> None:
    cache, owner = Used(Counters(ROUTED.layers, experts=EXPERTS), ()), keeper(file)
    learn(file, ROUTED, lambda habits: replace(habits, state=saved(1, 4)))
    owner.watch(file.base, ROUTED, cache)
    cache.ask(2, 5)
    owner.keep()
    assert hits(file) == [{2: 1, 5: 1}] * 2
    assert keeper(file).start(file.base, ROUTED).state == saved(1, 4), "who had a slot last"


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
        learn(file, ROUTED, lambda habits: Habits(habits.base))
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
