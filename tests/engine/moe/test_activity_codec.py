"""The document of what was observed: llama.cpp's cases, hostile ones, and there and back again."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.profile_codecs import (
    FALLBACK_REASONS,
    LANE_TIMES,
    MAX_BYTES,
    read_activity,
    write_activity,
)
from expertctl.engine.moe.usage_profile import (
    MAX_JSON_INTEGER,
    TIMES,
    LaneTimes,
    LayerUsage,
    UsageProfile,
    add_profiles,
)
from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import loads
from expertctl.schema.validation import find_problems

FULL = "llama.cpp.moe_layer_perf.v1"
UPDATE = "llama.cpp.moe_layer_opt_perf.v1"
EXAMPLES = Path(__file__).parents[3] / "schemas" / "examples" / "moe-activity"


def read(*layers: dict[str, object], schema: str = FULL, **top: object) -> UsageProfile:
    document = {"schema": schema, "layers": layers, **top}
    return read_activity(json.dumps(document).encode(), what="a profile")


def written(document: UsageProfile) -> dict[str, object]:
    data = write_activity(document)
    back: dict[str, object] = json.loads(data)
    assert find_problems(loads(data, what="ours", max_bytes=MAX_BYTES), "moe-activity") == []
    return back


def test_a_run_that_observes_nothing_writes_exactly_these_bytes() -> None:
    expected = b'{"enabled":false,"mode":"off","schema":"%s","layers":[]}' % UPDATE.encode()
    assert write_activity(UsageProfile("off")) == expected
    back = read_activity(expected, what="off")
    assert back == UsageProfile("off")
    assert not back.is_usable


def test_zero_counts_are_dropped_and_those_of_one_expert_added_up_and_layers_sorted() -> None:
    found = read(
        {"layer": 2, "experts": [[3, 5], [1, 7], [0, 0], [3, 2]]},
        {"layer": 1, "experts": [[2, 7], [0, 1]]},
        n_expert=4,
    )
    assert [(layer.layer, layer.hits) for layer in found.layers] == [
        (1, {0: 1, 2: 7}),
        (2, {1: 7, 3: 7}),
    ]
    assert found.is_usable


def test_counts_of_branches_override_raw_ones() -> None:
    record = {
        "layer": 0,
        "experts": [[0, 100]],
        "hot_experts": [[1, 10], [3, 2], [1, 4]],
        "cold_experts": [[2, 6], [3, 5]],
    }
    [layer] = read(record).layers
    assert layer.hits == {1: 14, 2: 6, 3: 7}
    assert (layer.hot[3], layer.cold[3]) == (2, 5)
    [raw] = read({**record, "hot_experts": [], "cold_experts": [[2, 0]]}).layers
    assert raw.hits == {0: 100}, "branches that counted nothing override nothing"


def test_the_wait_of_a_cold_slot_is_that_of_a_call_or_how_much_longer_the_cold_lane_takes() -> None:
    joined, apart, unknown = read(
        {
            "layer": 0,
            "cold_experts": [[1, 1]],
            "cold_slots_per_call": 3,
            "parallel_join_wait_time_per_call_us": 18.0,
        },
        {
            "layer": 1,
            "cold_experts": [[1, 1]],
            "cold_slots_total": 40,
            "calls": 10,
            "parallel_hot_lane_wall_time_per_call_us": 10,
            "parallel_cold_lane_wall_time_per_call_us": 30.0,
        },
        {"layer": 2, "experts": [[1, 1]]},
    ).layers
    assert apart.cold_per_call == 4
    assert unknown.pressure == 0
    assert (joined.pressure, apart.pressure) == (18.0, 20.0)


def test_a_pressure_without_times_is_that_of_cold_slots() -> None:
    layer = LayerUsage(0, cold_per_call=1.5)
    assert layer.pressure == 1.5
    faster = LaneTimes(parallel_hot_lane_wall=9, parallel_cold_lane_wall=3)
    assert LayerUsage(0, cold_per_call=1.5, times=faster).pressure == 1.5


@pytest.mark.parametrize("number", ["1", 1.5, None, True, [0]])
def test_a_layer_without_a_whole_number_is_ignored(number: object) -> None:
    found = read({"layer": number, "experts": [[0, 1]]}, {"layer": 5, "experts": [[1, 1]]})
    assert [layer.layer for layer in found.layers] == [5]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"layer": 0, "experts": [[4, 1]]}, "expert 4 of only 4"),
        ({"layer": 1024, "experts": [[0, 1]]}, "layer 1024 is not from 0 to 1023"),
        ({"layer": -1, "experts": [[0, 1]]}, "layer -1 is not from 0 to 1023"),
        ({"layer": 9, "experts": [[0, 1]]}, "layer 9 appears twice"),
    ],
)
def test_numbers_that_cannot_be_are_refused(record: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidPackageError, match=told):
        read(record, {"layer": 9, "experts": [[0, 1]]}, n_expert=4)


def test_a_count_that_is_written_with_a_fraction_is_refused() -> None:
    with pytest.raises(InvalidPackageError, match="Expected `int`, got `float`"):
        read(n_expert=4.0)


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(InvalidPackageError) as refused:
        read({"layer": 0, "experts": [[1]], "hot_experts": 7}, schema="of another", n_expert=-1)
    assert len(refused.value.problems) == 4


def test_a_document_beyond_16_mib_is_refused_unread() -> None:
    with pytest.raises(InvalidPackageError, match="at most 16777216"):
        read_activity(b" " * (MAX_BYTES + 1), what="large")


def test_more_layers_than_a_base_can_have_are_refused() -> None:
    with pytest.raises(InvalidPackageError, match="layers"):
        read(*[{"layer": number} for number in range(1025)])


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema":1}', b"\xff", b'{"a":NaN}'])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        read_activity(data, what="nothing")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("valid/*.json")), ids=lambda path: path.stem)
def test_a_valid_example_is_read(path: Path) -> None:
    found, told = read_activity(path.read_bytes(), what=path.name), json.loads(path.read_bytes())
    layers = {each["layer"]: each for each in told["layers"] if isinstance(each["layer"], int)}
    assert {each.layer: +Counter(each.hits) for each in found.layers} == {
        number: asked_in(layer) for number, layer in layers.items()
    }
    numbers = (told.get(key, 0) for key in ("n_expert", "updates", "num_prompts"))
    assert (found.experts, found.updates, found.prompts) == tuple(numbers)


def asked_in(layer: dict[str, Any]) -> Counter[int]:
    """What a layer of a document says was asked for, by expert."""
    counted = Counter[int]()
    both = layer.get("hot_experts", []) + layer.get("cold_experts", [])
    for expert, count in both or layer.get("experts", []):
        counted[expert] += count
    return +counted


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("invalid/*.json")), ids=lambda path: path.stem
)
def test_an_invalid_example_is_refused(path: Path) -> None:
    with pytest.raises(InvalidPackageError):
        read_activity(path.read_bytes(), what=path.name)


MEASURED = LayerUsage(
    layer=0,
    calls=2,
    hot={1: 6},
    cold={3: 4},
    cold_per_call=2.0,
    requests=5,
    missed_requests=2,
    swaps=3,
    times=LaneTimes(
        total_moe=50.0,
        parallel_hot_lane_wall=10.0,
        parallel_cold_lane_wall=20.0,
        parallel_join_wait=5.0,
    ),
    fallbacks=2,
    reasons={"bad_split_order": 1, "threshold": 1},
)


def test_the_update_schema_has_only_what_an_exchange_needs() -> None:
    document = written(UsageProfile("update", (MEASURED,), experts=4, used=2, updates=3))
    assert (document["enabled"], document["mode"], document["schema"]) == (True, "update", UPDATE)
    assert (document["n_expert"], document["n_expert_used"], document["updates"]) == (4, 2, 3)
    [record] = document["layers"]
    assert record["hot_slot_ratio"] == 0.6
    assert record["parallel_hot_lane_wall_time_per_call_us"] == 10
    assert record["parallel_cold_lane_wall_time_per_call_us"] == 20
    assert record["parallel_join_wait_time_per_call_us"] == 5
    assert (record["requests"], record["missed_requests"]) == (5, 2)
    assert (record["fallback_rate"], record["swaps"]) == (0.4, 3)
    assert record["experts"] == [[1, 6], [3, 4]]
    assert (record["hot_experts"], record["cold_experts"]) == ([[1, 6]], [[3, 4]])
    text = json.dumps(document)
    assert "total_moe_time_per_call_us" not in text
    assert "parallel_fallbacks" not in text


def test_the_full_schema_has_all_times_and_why_lanes_ran_in_turn() -> None:
    document = written(UsageProfile("full", (MEASURED,)))
    assert document["schema"] == FULL
    [record] = document["layers"]
    assert {f"{name}_time_per_call_us" for name in TIMES} <= set(record)
    assert record["parallel_fallbacks"] == 2
    assert record["parallel_fallback_reasons"] == {"bad_split_order": 1, "threshold": 1}
    assert (record["hot_slots_per_call"], record["cold_slots_per_call"]) == (3, 2)


def test_a_summary_weighs_layers_by_their_calls() -> None:
    other = LayerUsage(
        1, calls=6, hot={0: 2}, hot1_slots=1, times=LaneTimes(total_moe=10.0), fallbacks=1
    )
    summary = written(UsageProfile("full", (MEASURED, other)))["summary"]
    assert isinstance(summary, dict)
    assert summary["layer_calls"] == 8
    assert summary["hot_slots_total"] == 8
    assert summary["hot_slots_per_call"] == 1
    assert summary["hot1_slots_total"] == 1
    assert summary["hot_slot_ratio"] == 8 / 12
    assert summary["total_moe_time_per_call_us"] == (2 * 50 + 6 * 10) / 8
    assert (summary["fallback_rate"], summary["swaps"]) == (0.4, 3)
    assert summary["parallel_fallbacks"] == 3


def test_counts_that_json_cannot_say_are_written_as_the_largest_it_can() -> None:
    saturated = LayerUsage(0, calls=2**64 - 1, hot={0: 2**64 - 1}, cold={1: 1})
    back = read_activity(
        write_activity(UsageProfile("full", (saturated,), updates=2**64 - 1)), what="saturated"
    )
    assert back.layers[0].hot == {0: MAX_JSON_INTEGER}
    assert (back.layers[0].calls, back.updates) == (MAX_JSON_INTEGER, MAX_JSON_INTEGER)


counts = st.dictionaries(st.integers(0, 63), st.integers(1, MAX_JSON_INTEGER), max_size=5)
times = st.floats(0, 1e9)


@st.composite
def layers(draw: st.DrawFn, number: int, names: tuple[str, ...], *, full: bool) -> LayerUsage:
    raw, requests = draw(st.booleans()), draw(st.integers(0, MAX_JSON_INTEGER))
    hot, cold = ({}, {}) if raw else (draw(counts), draw(counts))
    return LayerUsage(
        layer=number,
        calls=draw(st.integers(0, MAX_JSON_INTEGER)),
        hot=hot,
        cold=cold,
        raw=draw(counts) if not (hot or cold) else {},
        cold_per_call=draw(st.floats(0.1, 1e6)),
        hot1_slots=draw(st.integers(0, MAX_JSON_INTEGER)),
        hot2_slots=draw(st.integers(0, MAX_JSON_INTEGER)),
        requests=requests,
        missed_requests=draw(st.integers(0, requests)),
        swaps=draw(st.integers(0, MAX_JSON_INTEGER)),
        times=LaneTimes(**{name: draw(times) for name in names}),
        fallbacks=draw(st.integers(0, MAX_JSON_INTEGER)) if full else 0,
        reasons=draw(
            st.dictionaries(st.sampled_from(FALLBACK_REASONS), st.integers(1, MAX_JSON_INTEGER))
        )
        if full
        else {},
    )


@st.composite
def documents(draw: st.DrawFn) -> UsageProfile:
    full = draw(st.booleans())
    numbers = sorted(draw(st.sets(st.integers(0, 1023), max_size=3)))
    names = TIMES if full else LANE_TIMES
    return UsageProfile(
        "full" if full else "update",
        tuple(draw(layers(number, names, full=full)) for number in numbers),
        experts=draw(st.sampled_from([0, 64, 1024])),
        used=draw(st.integers(0, 64)),
        updates=draw(st.integers(0, MAX_JSON_INTEGER)),
        overflow_resets=draw(st.integers(0, MAX_JSON_INTEGER)),
    )


@given(documents())
def test_what_is_written_is_read_again(document: UsageProfile) -> None:
    written(document)
    assert read_activity(write_activity(document), what="ours") == document


def test_no_number_of_a_hostile_document_grows_beyond_what_is_written() -> None:
    """The sums and means of the largest that are read are numbers, too."""
    longest = {f"{name}_time_per_call_us": 1e18 for name in TIMES}
    each = {
        "calls": MAX_JSON_INTEGER,
        "requests": MAX_JSON_INTEGER,
        "swaps": MAX_JSON_INTEGER,
        "cold_slots_per_call": 1e18,
    }
    counts = [[expert, MAX_JSON_INTEGER] for expert in range(4)]
    layers = [
        {"layer": n, **each, **longest, "hot_experts": counts, "cold_experts": counts}
        for n in range(3)
    ]
    found = read(*layers, n_expert=4, num_prompts=MAX_JSON_INTEGER)
    for document in (found, add_profiles(found, found)):
        written(document)
    with pytest.raises(InvalidPackageError, match="greater than the maximum"):
        read({"layer": 0, "calls": 2, "parallel_join_wait_time_per_call_us": 1.1e18})


def test_more_misses_than_requests_are_refused() -> None:
    with pytest.raises(InvalidPackageError, match="layer 0: 5 of 3 requests missed"):
        read({"layer": 0, "requests": 3, "missed_requests": 5})


def test_the_number_of_prompts_is_written_where_there_are_prompts() -> None:
    told = UsageProfile("update", (LayerUsage(0, raw={1: 3}),), prompts=7, preset="mine")
    assert written(told)["num_prompts"] == 7
    assert read_activity(write_activity(told), what="ours") == told
    assert "num_prompts" not in written(replace(told, prompts=0))
