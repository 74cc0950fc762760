"""What is known of a base: of either kind of file, for this base alone, hostile files refused."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.engine.moe.cache_plan import select_pinned
from expertctl.engine.moe.profile_codecs import (
    parse_profile,
    parse_prompt_counts,
    read_profile,
    write_activity,
    write_prompt_counts,
)
from expertctl.engine.moe.usage_profile import (
    LayerUsage,
    UsageProfile,
    build_prompt_profile,
)
from expertctl.engine_config import SharePins
from expertctl.errors import (
    ExpertError,
    IncompatibleError,
    InvalidPackageError,
    NotFoundError,
    StoreError,
)
from expertctl.package.architectures import ExpertsConfig

ROUTED = ExpertsConfig(
    count=8, used=2, intermediate_size=16, layers=(1, 3), scoring="softmax", normalised=True,
    choice_bias=False, scale=1.0, shared_size=0, shared_gate=False,
)  # fmt: skip
COUNTED = UsageProfile(
    "update", (LayerUsage(1, calls=9, hot={3: 5}, cold={0: 7, 3: 1}, cold_per_call=0.9),), 8, 2
)
PROFILE = build_prompt_profile({3: {5: 20, 2: 4}}, experts=8, prompts=24)
EXAMPLES = Path(__file__).parents[3] / "schemas" / "examples"


@pytest.mark.parametrize(
    "data", [write_activity(COUNTED), write_prompt_counts(PROFILE, experts=8, model="acme/moe")]
)
def test_a_document_that_was_read_says_the_same_as_its_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(data)
    assert parse_profile(json.loads(data), ROUTED, what=str(path)) == read_profile(path, ROUTED)


def test_counts_of_tokens_are_a_profile_whose_prompts_are_tokens() -> None:
    usage = COUNTED
    assert (usage.tokens, usage.counted_preset, usage.counts) == (7, "tokens", {1: {0: 7, 3: 6}})
    assert usage.list_universal(1, 0.5) == [0, 3]


def test_a_layer_that_fewer_tokens_asked_is_measured_by_those() -> None:
    """A prompt asks the last layer for one token: a share of pins means the same in each."""
    first, last = LayerUsage(0, raw={0: 60, 1: 60, 2: 40}), LayerUsage(1, raw={5: 6, 6: 4})
    usage = UsageProfile("update", (first, last), experts=8, used=2)
    assert usage.tokens == 80
    pins = [select_pinned(SharePins(0.7), usage, layer, capacity=8) for layer in (0, 1)]
    assert pins == [frozenset({0, 1}), frozenset({5, 6})]


def test_prompts_that_tokens_were_added_to_are_all_prompts_of_each_layer() -> None:
    """How many of them asked a layer is not told: a prompt may list any number of experts."""
    counts = LayerUsage(0, raw={3: 20, 5: 2, 7: 2})
    usage = UsageProfile("update", (counts,), experts=8, used=4, prompts=24)
    assert usage.tokens == 24
    assert select_pinned(SharePins(0.5), usage, 0, capacity=8) == frozenset({3})


def test_a_profile_is_read_as_counts(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(write_prompt_counts(PROFILE, experts=8, model="acme/moe"))
    guide = read_profile(path, ROUTED)
    assert (guide.layer_counts(3), guide.layer_counts(1)) == ({2: 4, 5: 20}, {})
    assert guide.layers[0].raw == {2: 4, 5: 20}


@pytest.mark.parametrize("activity", [replace(PROFILE, preset="mixed 70/30"), COUNTED])
def test_a_profile_that_is_written_and_read_is_written_the_same(
    activity: UsageProfile,
) -> None:
    first = write_prompt_counts(activity, experts=8, model="acme/moe")
    again = parse_prompt_counts(json.loads(first), what="ours")
    assert write_prompt_counts(again, experts=8, model="acme/moe") == first


def test_tokens_that_ask_for_another_number_of_experts_are_of_another_base(tmp_path: Path) -> None:
    path = tmp_path / "activity.json"
    path.write_bytes(write_activity(replace(COUNTED, used=3)))
    with pytest.raises(IncompatibleError, match="has 3 experts per token, the base has 2"):
        read_profile(path, ROUTED)


def test_a_file_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    for path in (loop, tmp_path / ("x" * 300)):
        with pytest.raises(StoreError, match="cannot be read"):
            read_profile(path, ROUTED)


def test_an_activity_document_is_read(tmp_path: Path) -> None:
    path = tmp_path / "activity.json"
    path.write_bytes(write_activity(COUNTED))
    guide = read_profile(path, ROUTED)
    assert guide.layer_counts(1) == {0: 7, 3: 6}
    assert guide.rank_experts(1) == [0, 3]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"num_prompts": 1, "num_experts": 9, "layers": {}}, "has 9 routed experts"),
        (
            {"num_prompts": 1, "num_experts": 8, "layers": {"2": {"activation_counts": {}}}},
            "layer 2, which has no routed experts",
        ),
    ],
)
def test_a_profile_of_another_base_is_refused(
    document: dict[str, object], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(document))
    with pytest.raises(IncompatibleError, match=told) as caught:
        read_profile(path, ROUTED)
    assert caught.value.hint


def test_an_expert_that_the_base_does_not_have_is_refused() -> None:
    counted = UsageProfile("update", (LayerUsage(1, raw={8: 1}),))
    with pytest.raises(IncompatibleError, match="counts expert 8, the base has 8"):
        replace(counted, source="a file").check_fits(ROUTED)


@pytest.mark.parametrize(
    "data",
    [
        write_activity(UsageProfile("off")),
        b'{"num_prompts": 1, "num_experts": 8, "layers": {"1": {"activation_counts": {"3": 0}}}}',
    ],
)
def test_a_file_that_tells_of_nobody_is_refused(data: bytes, tmp_path: Path) -> None:
    """So it is with counting off; to take it would forget what was learnt."""
    path = tmp_path / "off.json"
    path.write_bytes(data)
    with pytest.raises(IncompatibleError, match=r"off\.json counts no expert") as caught:
        read_profile(path, ROUTED)
    assert "recorded while requests" in caught.value.hint


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"schema": "other"}', b"\xff", b"{}"])
def test_a_file_that_is_neither_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    path.write_bytes(data)
    with pytest.raises(InvalidPackageError):
        read_profile(path, ROUTED)


def test_another_document_is_told_from_a_profile_that_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"text": "Hello", "plan": {}}')
    with pytest.raises(InvalidPackageError, match="neither an activity document") as told:
        read_profile(path, ROUTED)
    assert len(told.value.problems) == 1
    path.write_text('{"num_prompts": 3}')
    with pytest.raises(InvalidPackageError, match="required"):
        read_profile(path, ROUTED)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_profile(tmp_path / "gone.json", ROUTED)
    with pytest.raises(InvalidPackageError, match="not a regular file"):
        read_profile(Path("/dev/zero"), ROUTED)


@pytest.mark.parametrize(
    "path",
    [*EXAMPLES.glob("moe-profile/*/*.json"), *EXAMPLES.glob("moe-activity/*/*.json")],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_an_example_is_read_or_refused_as_what_it_is(path: Path) -> None:
    with suppress(ExpertError):
        assert read_profile(path, ROUTED).experts in (0, 8)
