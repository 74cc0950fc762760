"""The document that every benchmark prints, and the list of benchmarks."""

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.__main__ import benchmark_names
from benchmarks.harness import (
    Row,
    compare,
    compare_rates,
    format_table,
    judge,
    make_absent_row,
    take_turns,
    time_action,
)

FOLDER = Path(__file__).parents[2] / "benchmarks"


def sequence(*seconds: float) -> list[float]:
    return list(seconds)


def row(ratio: float) -> Row:
    return Row("a case", 1.0, "a rival", 1.0, "ms", "lower", ratio, (ratio, ratio))


def test_what_is_run_is_what_prints_a_document() -> None:
    """A module that measures can be run, and names itself to the harness or in its document."""
    measuring = set()
    for path in FOLDER.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.stem != "__main__" and 'if __name__ == "__main__":' in source:
            assert f'"{path.stem}"' in source
            measuring.add(path.stem)
    assert benchmark_names() == sorted(measuring)
    assert {"pack_verify", "routing_quality"} < measuring


def test_a_ratio_is_ours_by_theirs_of_the_medians() -> None:
    ours, theirs = sequence(9.0, 0.002, 0.004, 0.030), sequence(9.0, 0.001, 0.002, 0.010)
    found = compare(
        "a case",
        lambda: ours.pop(0),
        lambda: theirs.pop(0),
        rival="a rival",
        rounds=3,
        target="<= 1.9",
    )
    assert (found.ours, found.theirs, found.unit, found.better) == (4.0, 2.0, "ms", "lower")
    assert (found.ratio, found.spread, found.ok) == (2.0, (2.0, 2.5), False)


def test_the_first_round_warms_up_and_the_others_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return 1.0

    compare("a case", lambda: side("A"), lambda: side("B"), rival="B", rounds=2)
    assert "".join(order) == "ABABBA"


def test_several_warm_up_and_then_begin_in_turn() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = take_turns({name: (lambda name=name: side(name)) for name in "ABC"}, rounds=4)  # type: ignore[misc]  # a default
    assert "".join(order) == "ABC" + "ABC" + "BCA" + "CAB" + "ABC"
    assert found == {"A": [4, 9, 11, 13], "B": [5, 7, 12, 14], "C": [6, 8, 10, 15]}


def test_rates_are_work_by_seconds_and_more_is_better() -> None:
    found = compare_rates(
        "a case",
        sequence(1.0, 2.0, 4.0),
        sequence(4.0, 4.0, 4.0),
        work=(16.0, 8.0),
        rival="a rival",
        unit="tok/s",
        target=">= 4.1",
    )
    assert (found.ours, found.theirs, found.unit, found.better) == (8.0, 2.0, "tok/s", "higher")
    assert (found.ratio, found.spread, found.ok) == (4.0, (3.0, 6.0), False)


@pytest.mark.parametrize(
    ("ratio", "target", "met"),
    [
        (1.5, "<= 1.5", True),
        (1.501, "<= 1.5", False),
        (1.0, ">= 1.0", True),
        (0.99, ">= 1.0", False),
    ],
)
def test_a_target_is_met_or_missed(ratio: float, target: str, met: bool) -> None:
    judgement = judge(row(ratio), target)
    assert (judgement.target, judgement.ok) == (target, met)


def test_a_rival_that_is_absent_is_no_success_and_says_how_to_get_it() -> None:
    found = make_absent_row("a case", rival="a rival", install="pip install rival", target="<= 1.0")
    assert (found.ours, found.theirs, found.ratio, found.ok) == (None, None, None, False)
    document: dict[str, object] = {"name": "x", "machine": {}, "rows": [asdict(found)]}
    table = format_table(document)
    assert "pip install rival" in table
    assert "None" not in table


def test_time_is_measured() -> None:
    assert 0 <= time_action(lambda: None)() < 10
