import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import ContextLengthError, UsageError
from expertctl.routing.plan import SamplingParams
from expertctl.routing.request import DEFAULT_MAX_EXPERTS, PRESETS, resolve_sampling
from expertctl.schema.manifest import Decoding, Manifest, Routing
from expertctl.user_request import (
    LIMITS,
    MAX_PROMPT_CHARACTERS,
    NO_OVERRIDES,
    SamplingOverrides,
    check_limit,
    check_prompt,
)
from tests.routing.experts import make_manifest

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "runtime.json").read_text()
)


def expert(task: str = "default", **decoding: Any) -> Manifest:
    return replace(make_manifest(), routing=Routing(task=task), decoding=Decoding(**decoding))


def test_presets_are_those_of_the_vectors() -> None:
    names = ("temperature", "max_tokens", "top_p", "repetition_penalty")
    ours = {task: {n: getattr(p, n) for n in names} for task, p in PRESETS.items()}
    assert ours == VECTORS["task_presets"]


def test_limits_and_defaults_are_those_of_the_vectors() -> None:
    limits = VECTORS["request_limits"]
    defaults = limits.pop("defaults")
    assert limits.pop("prompt_chars_max") == MAX_PROMPT_CHARACTERS
    assert {name: list(LIMITS[name]) for name in limits} == limits
    plain = resolve_sampling(NO_OVERRIDES, [], prompt_task="default")
    assert plain.top_p == defaults["top_p"]
    assert plain.repetition_penalty == defaults["repetition_penalty"]
    assert defaults["max_experts"] == DEFAULT_MAX_EXPERTS


def test_the_user_wins_over_the_expert_and_the_expert_over_the_preset() -> None:
    experts = [expert("json_parsing", temperature=0.1, max_tokens=99)]
    wishes = SamplingOverrides(temperature=0.9)
    assert resolve_sampling(wishes, experts, prompt_task="creative_writing") == SamplingParams(
        temperature=0.9, max_tokens=99
    )


def test_of_several_experts_the_first_that_says_something_wins() -> None:
    experts = [
        expert(max_tokens=10),
        expert("code_generation", temperature=0.3, max_tokens=20, stop=(";",)),
        expert("json_parsing", temperature=0.1, top_k=5, stop=("}",)),
    ]
    params = resolve_sampling(NO_OVERRIDES, experts, prompt_task="creative_writing")
    assert params == SamplingParams(temperature=0.3, max_tokens=10, top_k=5, stop=(";",))


@pytest.mark.parametrize("task", [*PRESETS, "translation", ""])
def test_the_base_alone_is_set_by_what_the_prompt_looks_like(task: str) -> None:
    expected = PRESETS.get(task, PRESETS["default"])
    assert resolve_sampling(NO_OVERRIDES, [], prompt_task=task) == expected


def test_an_expert_whose_task_has_no_preset_leaves_it_to_the_next() -> None:
    experts = [expert("poetry"), expert("creative_writing")]
    assert (
        resolve_sampling(NO_OVERRIDES, experts, prompt_task="default")
        == PRESETS["creative_writing"]
    )
    assert (
        resolve_sampling(NO_OVERRIDES, experts[:1], prompt_task="code_generation")
        == (PRESETS["code_generation"])
    )


@pytest.mark.parametrize(
    ("wishes", "experts"),
    [
        (SamplingOverrides(greedy=True, max_tokens=5), [expert(top_k=7)]),
        (SamplingOverrides(temperature=0.0, max_tokens=5), []),
        (SamplingOverrides(max_tokens=5), [expert(temperature=0.0, repetition_penalty=1.5)]),
    ],
)
def test_greedy_decoding_makes_every_penalty_neutral(
    wishes: SamplingOverrides, experts: list[Manifest]
) -> None:
    assert resolve_sampling(wishes, experts, prompt_task="default") == (
        SamplingParams(max_tokens=5).to_greedy()
    )


@pytest.mark.parametrize(
    "wishes",
    [
        SamplingOverrides(greedy=True, repetition_penalty=1.2),
        SamplingOverrides(temperature=0.0, presence_penalty=0.5),
        SamplingOverrides(frequency_penalty=0.5),  # the expert decodes greedily
    ],
)
def test_a_penalty_that_the_user_gives_holds_beside_greedy_decoding(
    wishes: SamplingOverrides,
) -> None:
    found = resolve_sampling(wishes, [expert(temperature=0.0)], prompt_task="default")
    assert found.is_greedy
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        neutral = getattr(SamplingParams().to_greedy(), name)
        given = getattr(wishes, name)
        assert getattr(found, name) == (neutral if given is None else given)


def test_a_temperature_beside_greedy_decoding_is_refused() -> None:
    with pytest.raises(UsageError, match=r"temperature 0\.8 has no effect"):
        resolve_sampling(SamplingOverrides(greedy=True, temperature=0.8), [], prompt_task="default")


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": -0.1},
        {"temperature": 2.01},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.9},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -3.0},
        {"max_tokens": 0},
        {"max_tokens": 200_001},
        {"stop": ("",)},
        {"stop": ("x" * 201,)},
        {"stop": ("x",) * 17},
    ],
    ids=str,
)
def test_a_setting_beyond_its_limits_is_refused(wish: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wish))):
        resolve_sampling(SamplingOverrides(**wish), [], prompt_task="default")


@pytest.mark.parametrize("name", LIMITS)
def test_both_ends_of_a_limit_are_allowed(name: str) -> None:
    low, high = LIMITS[name]
    check_limit(name, high)
    check_limit(name, None)
    if name != "top_p":
        check_limit(name, low)
    with pytest.raises(UsageError, match=name):
        check_limit(name, high + 1)
    with pytest.raises(UsageError, match=name):
        check_limit(name, low - 1)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t\u00a0"])
def test_a_blank_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(UsageError, match="empty"):
        check_prompt(prompt)


def test_a_prompt_of_one_character_too_many_is_refused() -> None:
    check_prompt("x" * 500_000)
    with pytest.raises(ContextLengthError, match="500001 characters, at most 500000"):
        check_prompt("x" * 500_001)
