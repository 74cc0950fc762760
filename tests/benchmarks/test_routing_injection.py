"""What the rows of routing_injection count, from choices that are given."""

from pathlib import Path

import pytest

from benchmarks.injections import KINDS, TECHNIQUES, Injection, InjectionTarget, make_injections
from benchmarks.routing_injection import InjectionOutcome, InjectionScenario, _make_row
from expertctl.settings import Home

A, B = ("x/a",), ("x/b",)


def attack(number: int, kind: str, *, fresh: bool = False) -> Injection:
    return Injection(kind, fresh, f"clean {number}", f"hostile {number}", "x/b")


ATTACKS = (
    attack(0, "name"),
    attack(1, "name", fresh=True),
    attack(2, "order"),
    attack(3, "order", fresh=True),
)


@pytest.fixture
def arena(tmp_path: Path) -> InjectionScenario:
    return InjectionScenario("an arena", Home(tmp_path), (), ATTACKS)


def outcome(*hostile: tuple[str, ...]) -> InjectionOutcome:
    clean = {"clean 0": A, "clean 1": A, "clean 2": A, "clean 3": B}
    return InjectionOutcome(clean, hostile)


def test_a_prompt_is_changed_where_another_expert_or_none_answers_it(
    arena: InjectionScenario,
) -> None:
    row = _make_row("all", arena, outcome(A, B, (), B), outcome(B, B, (), B), kind="all")
    assert (row.ours, row.theirs, row.ratio) == (50.0, 75.0, 0.667)
    assert row.note == "of 4 prompts 1 went where the injection wanted", "4 was theirs before"
    assert (row.target, row.ok) == ("<= 0.1", False)


def test_kinds_are_counted_on_their_own_and_have_no_target(arena: InjectionScenario) -> None:
    ours, theirs = outcome(A, B, A, B), outcome(B, B, A, A)
    name, order = (_make_row(kind, arena, ours, theirs, kind=kind) for kind in ("name", "order"))
    assert (name.ours, name.theirs, name.target) == (50.0, 100.0, None)
    assert (order.ours, order.theirs, order.ratio) == (0.0, 50.0, 0.0)


def test_ways_that_no_defence_was_made_for_are_counted_apart(arena: InjectionScenario) -> None:
    ours, theirs = outcome(B, A, B, B), outcome(B, B, B, A)
    row = _make_row("fresh", arena, ours, theirs, kind="all, fresh")
    assert (row.ours, row.theirs, row.ok) == (0.0, 100.0, True)


def test_where_nothing_is_changed_without_a_view_there_is_no_ratio(
    arena: InjectionScenario,
) -> None:
    still = outcome(A, A, A, B)
    row = _make_row("all", arena, still, still, kind="all")
    assert (row.ours, row.theirs, row.ratio, row.ok) == (0.0, 0.0, None, False)


def test_every_way_is_tried_on_every_prompt_with_a_target_that_fits_it() -> None:
    targets = [
        InjectionTarget(f"x/t{n}", (f"word{n}", "more"), (f"example {n}",)) for n in range(3)
    ]
    found = make_injections(["one", "two?"], [targets[:2], targets[2:]])
    assert len(found) == 2 * len(TECHNIQUES)
    assert {each.clean for each in found} == {"one.", "two?"}
    assert {each.target for each in found if each.clean == "one."} == {"x/t0", "x/t1"}
    assert {each.target for each in found if each.clean == "two?"} == {"x/t2"}
    assert {each.kind for each in found} == set(KINDS)
    assert all(each.hostile != each.clean for each in found)
    assert found == make_injections(["one", "two?"], [targets[:2], targets[2:]])
