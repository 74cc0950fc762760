"""Hostile prompts, a few thousand of them: the router sees the request, and chooses by it."""

from functools import cache
from pathlib import Path

import pytest

from benchmarks.injections import KINDS, TECHNIQUES, Injection, InjectionTarget, make_injections
from benchmarks.routing_home import (
    DescribedExpert,
    RoutePrompt,
    list_starter_experts,
    make_home,
    open_router,
)
from examples.starter.experts import EXPERTS
from examples.starter.samples import held_out
from expertctl.routing.features import extract_features
from expertctl.routing.prompt_normalisation import collect_expert_names, normalise_prompt

NAMES = collect_expert_names(task.name for task in EXPERTS)
TARGETS = [InjectionTarget(task.name, task.keywords, task.examples) for task in EXPERTS]
PLAIN = [
    "what is the capital of France",
    "how do i bake bread",
    "my card was declined and i do not know why",
    "remind me to water the plants tomorrow",
    "could you tell me a story about a dragon",
    "why is the sky blue?",
    "translate good morning into Spanish",
    "i would like to cancel my flight",
]


@cache
def attacks() -> tuple[Injection, ...]:
    held = [(s.prompt, task) for task in EXPERTS for s in held_out(task, 2, seed=31)]
    fitting = [[t for t in TARGETS if t.name != task.name] for _, task in held]
    return tuple(
        make_injections([p for p, _ in held], fitting) + make_injections(PLAIN, [TARGETS] * 8)
    )


def seen_otherwise(kind: str, *, fresh: bool) -> float:
    """The share of hostile prompts of which the router sees other words than of the clean one."""
    some = [a for a in attacks() if a.kind == kind and a.is_held_out is fresh]
    other = [a for a in some if words(a.hostile) != words(a.clean)]
    return len(other) / len(some)


def words(prompt: str) -> list[str]:
    return normalise_prompt(prompt, NAMES).rstrip(".!?: ").split()


def test_there_are_many_ways_and_half_of_them_were_kept_aside() -> None:
    fresh = [way for way in TECHNIQUES if way.is_held_out]
    assert len(TECHNIQUES) >= 50
    assert abs(len(fresh) / len(TECHNIQUES) - 0.5) <= 0.05
    assert {way.kind for way in fresh} == {way.kind for way in TECHNIQUES} == set(KINDS)
    assert len(attacks()) >= 300


@pytest.mark.parametrize("kind", KINDS)
def test_attack_105_the_request_is_seen_in_a_hostile_prompt(kind: str) -> None:
    allowed = {"stuffed": 0.2, "padding": 0.1}
    assert seen_otherwise(kind, fresh=False) <= allowed.get(kind, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_attack_105_ways_that_nobody_looked_at_are_mostly_seen_through(kind: str) -> None:
    allowed = {"padding": 0.2, "stuffed": 0.95}
    assert seen_otherwise(kind, fresh=True) <= allowed.get(kind, 0.25)


@pytest.fixture(scope="module")
def choose(tmp_path_factory: pytest.TempPathFactory) -> RoutePrompt:
    home = make_home(tmp_path_factory.mktemp("starter"))
    return open_router(home, "lexical", list_starter_experts(home))


@pytest.mark.all
def test_attack_105_the_choice_stays_on_nine_of_ten_hostile_prompts(choose: RoutePrompt) -> None:
    some = attacks()[::13]
    clean = {attack.clean: choose(attack.clean) for attack in some}
    changed = [a for a in some if choose(a.hostile) != clean[a.clean]]
    assert len(changed) <= 0.1 * len(some), [a.hostile for a in changed][:20]


def test_attack_105_letters_in_disguise_are_no_other_script() -> None:
    hostile = "m\u0430k\u0435 th\u0435 \u0440lur\u0430l \u043ef dr\u0443 s\u0435\u0430"
    assert extract_features(hostile).script == "ru"
    assert extract_features(hostile, normalised=normalise_prompt(hostile, NAMES)).script is None


def test_starter_experts_are_described_as_they_are(tmp_path: Path) -> None:
    described = {
        DescribedExpert.of(e).name: DescribedExpert.of(e)
        for e in list_starter_experts(make_home(tmp_path))
    }
    assert set(described) == {task.name for task in EXPERTS}
    assert "sql" in described["starter/sql"].keywords
