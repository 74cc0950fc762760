import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.digest import Digest
from expertctl.routing.plan import (
    NumericSettings,
    Plan,
    PlannedExpert,
    SamplingParams,
    SavedPlan,
    compute_plan_identity,
    parse_plan,
)

ONE, TWO = Digest("1" * 64), Digest("2" * 64)
SETTINGS = NumericSettings(
    arch=Digest("a" * 64),
    weights=Digest("b" * 64),
    tokenizer=Digest("c" * 64),
    rope={"rope_type": "default", "rope_theta": 1000000},
    dtype="float32",
)


def test_the_identity_is_the_digest_of_canonical_json_written_by_hand() -> None:
    text = (
        '{"adapter_dtype":"published","arch":"sha256:' + "a" * 64 + '","dtype":"float32",'
        '"engine":8,"experts":[["sha256:' + "1" * 64 + '",1],["sha256:' + "2" * 64 + '",0.5]],'
        '"recompression":null,"rope":{"rope_theta":1000000,"rope_type":"default"},'
        '"tokenizer":"sha256:' + "c" * 64 + '","weights":"sha256:' + "b" * 64 + '"}'
    )
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert compute_plan_identity(SETTINGS, [(ONE, 1.0), (TWO, 0.5)]) == Digest(expected)


@pytest.mark.parametrize(
    "changed",
    [
        {"arch": ONE},
        {"weights": ONE},
        {"weights": None},
        {"tokenizer": ONE},
        {"rope": {"rope_type": "yarn", "rope_theta": 1000000}},
        {"dtype": "int8"},
        {"adapter_dtype": "fp16"},
        {"recompression": "svd-8"},
        {"engine": 5},
    ],
    ids=str,
)
def test_everything_the_numbers_depend_on_changes_the_identity(changed: dict[str, Any]) -> None:
    assert compute_plan_identity(replace(SETTINGS, **changed)) != compute_plan_identity(SETTINGS)


def test_order_and_weight_of_experts_change_the_identity() -> None:
    plans: tuple[list[tuple[Digest, float]], ...] = (
        [(ONE, 1.0), (TWO, 1.0)],
        [(TWO, 1.0), (ONE, 1.0)],
        [(ONE, 1.0)],
        [(ONE, 0.5)],
        [],
    )
    assert len({compute_plan_identity(SETTINGS, experts) for experts in plans}) == len(plans)


def test_greedy_makes_every_penalty_neutral_and_keeps_the_limits() -> None:
    params = SamplingParams(presence_penalty=1.0, top_k=5, min_p=0.1, max_tokens=7, stop=("x",))
    assert not params.is_greedy
    assert params.to_greedy() == SamplingParams(
        temperature=0, top_p=1, repetition_penalty=1, max_tokens=7, stop=("x",)
    )
    assert params.to_greedy().is_greedy


hexes = st.text("0123456789abcdef", min_size=64, max_size=64).map(Digest)
names = st.from_regex(r"[a-z0-9]{1,5}(-[a-z0-9]{1,5}){0,2}", fullmatch=True)
refs = st.builds("{}/{}@{}.{}.0".format, names, names, st.integers(0, 99), st.integers(0, 99))
experts = st.builds(
    PlannedExpert,
    ref=refs,
    content_digest=hexes,
    package_digest=hexes,
    kind=st.sampled_from(
        ["lora", "dora", "ia3", "soft_prompt", "lora+ia3", "soft_prompt+lora+dora+ia3"]
    ),
    score=st.floats(0, 1).map(lambda score: round(score, 4)),
    weight=st.floats(-10, 10),
    reason=st.text(max_size=50),
)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 1000000),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    max_tokens=st.integers(1, 200000),
    stop=st.lists(st.text(min_size=1, max_size=200), max_size=16).map(tuple),
)
plans = st.builds(
    Plan,
    identity=hexes,
    seed=st.integers(0, 2**53 - 1),
    base=st.text(min_size=1, max_size=100),
    experts=st.lists(experts, max_size=10, unique_by=lambda e: e.content_digest).map(tuple),
    params=params,
)


@settings(deadline=None, max_examples=60)
@given(plans)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert parse_plan(json.dumps({"plan": plan.to_json()}).encode()) == SavedPlan(plan)
