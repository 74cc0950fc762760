"""What rows and timelines say of counts that are known."""

import math

import numpy as np

from expertctl.engine.bench_result import Series
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.report import Activity, Residence, RoutedReport
from expertctl.engine.routed_bench_result import Holding, Moment, RoutedRow, Timeline

HOT_AND_COLD = np.array([0, -1])


def moments() -> list[Moment]:
    """Layer 4 hits 1 of 4 slots and then 3 of 4; layer 7 is asked in the second stretch alone."""
    counters = Counters([4, 7], experts=2)
    found = [Moment(0, counters.observed())]
    counters.count_call(4, np.array([1, 3]), HOT_AND_COLD)
    found.append(Moment(8, counters.observed()))
    counters.count_call(4, np.array([3, 1]), HOT_AND_COLD)
    counters.count_call(7, np.array([2, 0]), HOT_AND_COLD)
    return [*found, Moment(16, counters.observed())]


def row(share: float, seconds: float) -> RoutedRow:
    residence = Residence(layers=2, experts=4, slots=round(4 * share), blocks=6)
    did = Activity(requests=10, misses=4, mass=8.0, skipped=2.0, waited_ms=3.0)
    seen = moments()
    return RoutedRow(
        holding=Holding(share, "skip"),
        steps=Series(((seconds, seconds), (seconds, seconds))),
        prompts=((10, 0.25), (30, 0.75)),
        report=RoutedReport(residence, did),
        layers=dict(seen[-1].seen.layers),
        timeline=Timeline.of(seen),
        counted_from=8,
        waited_reading_ms=1.0,
        memory=1000,
    )


def test_a_timeline_has_the_rate_of_each_stretch_and_none_where_nothing_was_asked() -> None:
    line = Timeline.of(moments())
    assert (line.tokens, line.layers) == ((8, 16), (4, 7))
    assert line.rates[0].tolist() == [0.25, 0.75]
    assert math.isnan(line.rates[1, 0])
    assert line.to_json() == {
        "tokens": [8, 16],
        "layers": [4, 7],
        "hit_rates": [[0.25, 0.75], [None, 1.0]],
    }


def test_a_timeline_of_nothing_is_empty() -> None:
    assert Timeline.of([]).to_json() == {"tokens": [], "layers": [], "hit_rates": []}


def test_a_row_is_compared_with_all_experts_in_memory() -> None:
    part, whole = row(0.5, 0.02), row(1.0, 0.01)
    told = part.to_json(whole)
    assert told["case"] == "50 % resident, skip"
    assert (told["ours"], told["theirs"], told["ratio"]) == (50, 100, 0.5)
    assert (told["rival"], told["unit"], told["better"]) == ("all resident", "tok/s", "higher")
    assert told["read_tokens_per_s"] == 40
    assert (told["hit_rate"], told["fallback_rate"], told["skipped_mass"]) == (0.6, 0.4, 0.25)
    assert (told["slots"], told["in_memory"], told["waited_ms"]) == (2, 6, 3)
    assert (part.waited_ms_per_token, told["waited_reading_ms"]) == (0.5, 1), (
        "of four tokens written"
    )
    assert isinstance(told["by_layer"], list)
    assert [layer["layer"] for layer in told["by_layer"] if isinstance(layer, dict)] == [4, 7]
    assert isinstance(told["timeline"], dict)
    assert told["timeline"]["counted_from"] == 8
    alone = whole.to_json(whole)
    assert (alone["rival"], alone["theirs"], alone["ratio"]) == (None, None, None)


def test_where_nobody_counts_everybody_is_there() -> None:
    whole = row(1.0, 0.01)
    assert whole.holding.case == "all resident"
    assert (
        RoutedRow(
            holding=whole.holding,
            steps=whole.steps,
            prompts=whole.prompts,
            report=RoutedReport(whole.report.residence, Activity()),
            layers={},
            timeline=Timeline.of([]),
            counted_from=0,
            waited_reading_ms=0.0,
            memory=1,
        ).to_json(None)["hit_rate"]
        == 1.0
    )
