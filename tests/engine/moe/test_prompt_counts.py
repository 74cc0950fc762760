"""Which experts prompts use: who is universal, who is pinned, what profiles have in common."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.moe.profile_codecs import (
    MAX_BYTES,
    load_document,
    parse_prompt_counts,
    write_prompt_counts,
)
from expertctl.engine.moe.usage_profile import UsageProfile, build_prompt_profile
from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import loads
from expertctl.schema.validation import find_problems

EXAMPLES = Path(__file__).parents[3] / "schemas" / "examples" / "moe-profile"


def read_profile(data: bytes, *, what: str) -> UsageProfile:
    return parse_prompt_counts(load_document(data, what=what), what=what)


def profile(counts: dict[int, int]) -> UsageProfile:
    return build_prompt_profile({0: counts}, experts=64, prompts=24)


def test_universal_is_whom_at_least_the_threshold_of_all_prompts_activate() -> None:
    found = profile({3: 24, 7: 12, 9: 11})
    assert found.list_universal(0, 0.5) == [3, 7]
    assert found.list_universal(0, 1) == [3]
    assert profile({3: 1, 9: 24}).list_universal(0, 0) == [3, 9]
    assert profile({3: 1}).list_universal(5, 0.5) == []


def test_the_most_universal_are_first_and_of_equals_the_lower_id() -> None:
    found = profile({9: 5, 2: 5, 4: 6, 8: 1})
    assert found.rank_experts(0) == [4, 2, 9, 8]
    assert found.rank_experts(1) == []


def test_a_written_profile_has_the_published_keys() -> None:
    data = write_prompt_counts(profile({3: 24, 7: 11}), experts=64, model="acme/moe")
    document = json.loads(data)
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
    assert found.list_universal(0, 0.5) == [3]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("valid/*.json")), ids=lambda path: path.stem)
def test_a_valid_example_is_read(path: Path) -> None:
    found, told = read_profile(path.read_bytes(), what=path.name), json.loads(path.read_bytes())
    assert (found.prompts, found.experts) == (told["num_prompts"], told["num_experts"])
    assert found.preset == told.get("prompt_preset", "")
    assert {
        str(number): {str(expert): count for expert, count in counts.items()}
        for number, counts in found.counts.items()
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
    return build_prompt_profile(
        draw(st.dictionaries(st.integers(0, 1023), counts, max_size=4)),
        experts=64,
        prompts=prompts,
        preset=draw(st.text(max_size=9)),
    )


@given(profiles(), st.text(max_size=9))
def test_what_is_written_is_read_again(found: UsageProfile, model: str) -> None:
    data = write_prompt_counts(found, experts=64, model=model)
    assert find_problems(loads(data, what="ours", max_bytes=MAX_BYTES), "moe-profile") == []
    assert read_profile(data, what="ours") == found
