"""A further prompt: routed again; experts stay only where it needs what was said before."""

import pytest

from expertctl.errors import NotFoundError, RevokedError
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.session import KEPT_REASON, PlanningSession, is_follow_up, plan_follow_up
from tests.routing.test_planner import PLURALS, PROMPT, SORTING, named, planner, refs
from tests.store.fixtures import (
    HomeFixture,
    PackageFactory,
    fast,
    make_key,
    package_factory,
    user_home,
)

__all__ = ["fast", "package_factory", "planner", "user_home"]

OTHER = "Guten Morgen"


@pytest.fixture
def before(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> PlannedPrompt:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    force = (named("acme/plurals", 0.5), named("acme/sorting"))
    return planner.plan(RouteRequest(prompt=PROMPT, force=force))


def follow(
    planner: Planner, before: PlannedPrompt, prompt: str = OTHER, **route: bool
) -> PlannedPrompt:
    request = RouteRequest(prompt=prompt, **route)
    return plan_follow_up(PlanningSession(planner), request, before.result.plan)


def test_who_answered_before_stays_in_order_with_the_weights(
    planner: Planner, before: PlannedPrompt
) -> None:
    kept = follow(planner, before)
    assert kept.result.plan.identity == before.result.plan.identity
    assert [(e.weight, e.reason) for e in kept.result.plan.experts] == [
        (0.5, KEPT_REASON),
        (1.0, KEPT_REASON),
    ]
    assert {c.reason for c in kept.result.candidates if c.chosen} == {KEPT_REASON}


def test_an_expert_for_the_prompt_comes_first(planner: Planner, before: PlannedPrompt) -> None:
    assert refs(follow(planner, before, PROMPT)) == ["acme/sorting@1.0.0"]


def test_without_anybody_before_or_when_none_is_wanted_nobody_stays(
    planner: Planner, before: PlannedPrompt
) -> None:
    assert refs(follow(planner, before, base_alone=True)) == []
    alone = planner.plan(RouteRequest(prompt=OTHER))
    assert refs(follow(planner, alone)) == []


def test_an_expert_that_may_not_be_used_any_more_is_named(
    user_home: HomeFixture, planner: Planner, before: PlannedPrompt
) -> None:
    user_home.trust.revoke(make_key("acme").public.key_id)
    with pytest.raises(RevokedError, match="acme/plurals"):
        follow(planner, before)


def test_an_expert_that_is_gone_is_named_with_the_way_out(
    user_home: HomeFixture, planner: Planner, before: PlannedPrompt
) -> None:
    user_home.store.remove(before.experts[0].stored)
    with pytest.raises(NotFoundError, match=r"acme/plurals@1\.0\.0") as caught:
        follow(planner, before)
    assert "start a new conversation" in caught.value.hint


@pytest.mark.parametrize(
    "prompt",
    [
        "And 9, 8, 7",
        "9, 8, 7, 30, 12, 5",
        "pear, apple, fig, red plum",
        "Once more",
        "Thanks!",
        "Und jetzt bitte in umgekehrter Reihenfolge der Zahlen",
        "And now the other way round",
        "Can you make it shorter?",
        "Please put them in a table",
        "What about the second one?",
        "Write your answer in French",
        "Mach es bitte ein wenig kürzer",
        "No, I meant in ascending order",
        "No I meant in ascending order",
        "Please continue with the rest of the list",
        "Use commas instead of semicolons in the last answer",
        "And what is the result of that?",
        "Sum up everything from above.",
        "Now swap only the first two",
        "もう一度",
        "",
    ],
)
def test_a_short_or_referring_message_needs_what_was_said(prompt: str) -> None:
    assert is_follow_up(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "What is the capital of France?",
        "Tell me a joke about cats",
        "Why is the sky blue?",
        "Write a poem that rhymes",
        "Is it raining in Paris today?",
        "Explain how a bicycle stays upright",
        "Wie hoch ist der Mont Blanc?",
        "フランスの首都はどこですか",
        "Hello, how are you today",
        "What can I bake with instead of butter?",
        "Is the Nile longer than the Amazon?",
        "My printer no longer works with my laptop",
        "What is the temperature above the Arctic circle?",
        "Should my son continue studying law next year?",
        "Who were the first two presidents of France?",
        "What is the result of seven times eight?",
        "No internet on my phone, what can I do?",
        "Ma voiture est en panne, que faire ?",
        "Tell me the history of Rome again " + "and of the people who lived there " * 5,
    ],
)
def test_a_message_that_says_what_it_is_about_needs_nothing(prompt: str) -> None:
    assert not is_follow_up(prompt)


def test_a_message_that_suits_nobody_goes_back_to_the_base(
    planner: Planner, before: PlannedPrompt
) -> None:
    assert refs(follow(planner, before, "What is the capital of France?")) == []


@pytest.mark.parametrize(
    "text",
    [
        "it " * 200_000,
        "a, " * 200_000,
        "\u3042" * 500_000,
        f"Which gene has this sequence: {'acgt' * 125_000}",
        f"Say what the{' ' * 500_000}x means here",
        f"Say what we{' ' * 500_000}x means here",
    ],
    ids=["words", "data", "Japanese", "one long word", "much space", "space behind any word"],
)
def test_a_very_long_message_is_looked_at_in_linear_time(text: str) -> None:
    assert is_follow_up(text) in {True, False}
