"""What rows and timelines say of counts that are known."""

import math

import numpy as np

from expertctl.engine.bench_result import TimingSeries
from expertctl.engine.moe.bench_result import (
    CounterSample,
    HitRateTimeline,
    ResidencyCase,
    RoutedBenchRow,
)
from expertctl.engine.moe.counters import (
    Counters,
    ExpertActivity,
    ExpertResidency,
    RoutedExpertStats,
)

LANES = np.array([[[0, -1], [0, -1]]])


def moments() -> list[CounterSample]:
    """Layer 4 hits 1 of 4 slots and then 3 of 4; layer 7 is asked in the second stretch alone."""
    counters = Counters([4, 7], experts=2)
    found = [CounterSample(0, counters.observed_snapshot())]
    counters.count_passes(np.array([[[1, 3], [0, 0]]]), LANES)
    found.append(CounterSample(8, counters.observed_snapshot()))
    counters.count_passes(np.array([[[3, 1], [2, 0]]]), LANES)
    return [*found, CounterSample(16, counters.observed_snapshot())]


def row(share: float, seconds: float) -> RoutedBenchRow:
    residence = ExpertResidency(layers=2, experts=4, slots=round(4 * share), blocks=6)
    did = ExpertActivity(
        requests=10, misses=4, router_weight=8.0, skipped_weight=2.0, waited_ms=3.0
    )
    seen = moments()
    return RoutedBenchRow(
        case=ResidencyCase(share, "skip"),
        steps=TimingSeries(((seconds, seconds), (seconds, seconds))),
        prompts=((10, 0.25), (30, 0.75)),
        report=RoutedExpertStats(residence, did),
        layers=dict(seen[-1].counters.layers),
        timeline=HitRateTimeline.from_samples(seen),
        first_counted_token=8,
        prefill_wait_ms=1.0,
        memory=1000,
    )


def test_a_timeline_has_the_rate_of_each_stretch_and_none_where_nothing_was_asked() -> None:
    line = HitRateTimeline.from_samples(moments())
    assert (line.tokens, line.layers) == ((8, 16), (4, 7))
    assert line.rates[0].tolist() == [0.25, 0.75]
    assert math.isnan(line.rates[1, 0])
    assert line.to_json() == {
        "tokens": [8, 16],
        "layers": [4, 7],
        "hit_rates": [[0.25, 0.75], [None, 1.0]],
    }


def test_a_timeline_of_nothing_is_empty() -> None:
    assert HitRateTimeline.from_samples([]).to_json() == {
        "tokens": [],
        "layers": [],
        "hit_rates": [],
    }


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
    assert whole.case.label == "all resident"
    assert (
        RoutedBenchRow(
            case=whole.case,
            steps=whole.steps,
            prompts=whole.prompts,
            report=RoutedExpertStats(whole.report.residence, ExpertActivity()),
            layers={},
            timeline=HitRateTimeline.from_samples([]),
            first_counted_token=0,
            prefill_wait_ms=0.0,
            memory=1,
        ).to_json(None)["hit_rate"]
        == 1.0
    )
