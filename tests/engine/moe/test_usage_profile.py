"""Which experts prompts use: who is universal, who is pinned, what profiles have in common."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.activity import MAX_BYTES
from expertctl.engine.moe.usage_profile import (
    UsageProfile,
    compute_overlap,
    merge_profiles,
    profile_from_prompt,
    read_profile,
    write_profile,
)
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from expertctl.schema.strict_json import loads
from expertctl.schema.validation import find_problems

EXAMPLES = Path(__file__).parents[3] / "schemas" / "examples" / "moe-profile"


def profile(counts: dict[int, int], *, prompts: int = 24, threshold: float = 0.5) -> UsageProfile:
    return UsageProfile("acme/moe", prompts, 64, {0: counts}, threshold=threshold)


def test_universal_is_whom_at_least_the_threshold_of_all_prompts_activate() -> None:
    assert profile({3: 24, 7: 12, 9: 11}).list_universal(0) == [3, 7]
    assert profile({3: 24, 7: 12, 9: 11}, threshold=1).list_universal(0) == [3]
    assert profile({3: 1, 9: 24}, threshold=0).list_universal(0) == [3, 9]
    assert profile({3: 1}).list_universal(5) == []


def test_so_many_are_pinned_the_most_universal_first_and_of_equals_the_lower_id() -> None:
    found = profile({9: 5, 2: 5, 4: 6, 8: 1})
    assert found.top_experts(0, 3) == [4, 2, 9]
    assert found.top_experts(0, 0) == []
    assert found.top_experts(0, 99) == [4, 2, 9, 8]
    assert found.top_experts(1, 3) == []


def test_a_negative_number_of_pins_is_refused() -> None:
    with pytest.raises(UsageError, match="-1 experts cannot be pinned"):
        profile({}).top_experts(0, -1)


def test_the_profile_of_a_prompt_counts_each_expert_once() -> None:
    found = profile_from_prompt({1: [5, 3, 5], 0: [2]}, model="acme/moe", experts=8, preset="code")
    assert found == UsageProfile("acme/moe", 1, 8, {0: {2: 1}, 1: {3: 1, 5: 1}}, preset="code")


def test_merged_profiles_count_the_prompts_of_all() -> None:
    prompts = [{0: [1, 2]}, {0: [2]}, {0: [2, 3], 4: [7]}]
    found = merge_profiles([profile_from_prompt(asked, model="m", experts=8) for asked in prompts])
    assert found.prompts == 3
    assert found.layers == {0: {1: 1, 2: 3, 3: 1}, 4: {7: 1}}
    assert found.list_universal(0) == [2]


def test_profiles_of_different_models_are_not_merged() -> None:
    with pytest.raises(IncompatibleError, match="of m with 8 experts and of n with 8"):
        merge_profiles([profile_from_prompt({}, model=name, experts=8) for name in "mn"])
    with pytest.raises(UsageError, match="no profile"):
        merge_profiles([])


def test_the_overlap_of_profiles_is_the_mean_jaccard_index_of_universal_experts() -> None:
    one = UsageProfile("m", 1, 8, {0: {1: 1, 2: 1, 3: 1}, 1: {4: 1}})
    other = UsageProfile("m", 1, 8, {0: {2: 1, 3: 1, 4: 1}, 2: {5: 1}})
    assert compute_overlap(one, other) == pytest.approx((2 / 4 + 0 + 0) / 3)
    assert compute_overlap(one, one) == 1
    nobody = UsageProfile("m", 1, 8, {0: {}})
    assert compute_overlap(nobody, nobody) == 1


def test_a_written_profile_has_the_published_keys() -> None:
    document = json.loads(write_profile(profile({3: 24, 7: 11})))
    assert list(document) == [
        *("model", "num_prompts", "threshold", "capacity", "num_experts", "moe_layers"),
        *("prompt_preset", "layers"),
    ]
    assert document["layers"]["0"] == {
        "universal": [3],
        "activation_counts": {"3": 24, "7": 11},
        "total_unique": 2,
    }
    assert document["moe_layers"] == 1


@pytest.mark.parametrize(
    ("counts", "told"),
    [({"64": 1}, "expert 64 of only 64"), ({"3": 25}, "activated by 25 of 24 prompts")],
)
def test_numbers_that_cannot_be_are_refused(counts: dict[str, int], told: str) -> None:
    layers = {"0": {"activation_counts": counts}}
    document = {"num_prompts": 24, "num_experts": 64, "layers": layers}
    with pytest.raises(InvalidPackageError, match=told):
        read_profile(json.dumps(document).encode(), what="a profile")


def test_a_count_that_is_written_with_a_fraction_is_refused() -> None:
    with pytest.raises(InvalidPackageError, match="Expected `int`, got `float`"):
        read_profile(b'{"num_prompts":2.0,"num_experts":64,"layers":{}}', what="a profile")


def test_what_a_document_says_of_universal_experts_follows_from_its_counts() -> None:
    layers = {"0": {"universal": [9], "activation_counts": {"3": 2, "9": 0}}}
    document = {"num_prompts": 2, "num_experts": 64, "layers": layers}
    found = read_profile(json.dumps(document).encode(), what="a profile")
    assert found.list_universal(0) == [3]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("valid/*.json")), ids=lambda path: path.stem)
def test_a_valid_example_is_read(path: Path) -> None:
    found, told = read_profile(path.read_bytes(), what=path.name), json.loads(path.read_bytes())
    assert (found.prompts, found.experts) == (told["num_prompts"], told["num_experts"])
    assert found.preset == told.get("prompt_preset", "")
    assert {
        str(number): {str(expert): count for expert, count in counts.items()}
        for number, counts in found.layers.items()
    } == {number: layer["activation_counts"] for number, layer in told["layers"].items()}


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("invalid/*.json")), ids=lambda path: path.stem
)
def test_an_invalid_example_is_refused(path: Path) -> None:
    with pytest.raises(InvalidPackageError):
        read_profile(path.read_bytes(), what=path.name)


@pytest.mark.parametrize("data", [b" " * (MAX_BYTES + 1), b"[]", b"null", b"{"])
def test_what_is_no_profile_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        read_profile(data, what="nothing")


@st.composite
def profiles(draw: st.DrawFn) -> UsageProfile:
    prompts = draw(st.integers(1, 50))
    counts = st.dictionaries(st.integers(0, 63), st.integers(1, prompts), max_size=6)
    return UsageProfile(
        draw(st.text(max_size=9)),
        prompts,
        64,
        draw(st.dictionaries(st.integers(0, 1023), counts, max_size=4)),
        threshold=draw(st.floats(0, 1)),
        capacity=draw(st.integers(0, 64)),
        preset=draw(st.text(max_size=9)),
    )


@given(profiles())
def test_what_is_written_is_read_again(found: UsageProfile) -> None:
    data = write_profile(found)
    assert find_problems(loads(data, what="ours", max_bytes=MAX_BYTES), "moe-profile") == []
    assert read_profile(data, what="ours") == found
