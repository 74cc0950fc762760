"""A further prompt: routed anew, and without anybody for it the experts before stay."""

import pytest

from expertctl.errors import NotFoundError, RevokedError
from expertctl.routing.follow_up import KEPT, plan_follow_up
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.session import PlanningSession
from tests.routing.test_planner import PLURALS, PROMPT, SORTING, named, planner, refs
from tests.store.shop import House, Shop, a_key, fast, house, shop

__all__ = ["fast", "house", "planner", "shop"]

OTHER = "Guten Morgen"


@pytest.fixture
def before(house: House, shop: Shop, planner: Planner) -> Planned:
    house.install(shop.package("acme/sorting", **SORTING), shop.package("acme/plurals", **PLURALS))
    force = (named("acme/plurals", 0.5), named("acme/sorting"))
    return planner.plan(RouteRequest(prompt=PROMPT, force=force))


def follow(planner: Planner, before: Planned, prompt: str = OTHER, **route: bool) -> Planned:
    request = RouteRequest(prompt=prompt, **route)
    return plan_follow_up(PlanningSession(planner), request, before.result.plan)


def test_who_answered_before_stays_in_order_with_the_weights(
    planner: Planner, before: Planned
) -> None:
    kept = follow(planner, before)
    assert kept.result.plan.identity == before.result.plan.identity
    assert [(e.weight, e.reason) for e in kept.result.plan.experts] == [(0.5, KEPT), (1.0, KEPT)]
    assert {c.reason for c in kept.result.candidates if c.chosen} == {KEPT}


def test_an_expert_for_the_prompt_comes_first(planner: Planner, before: Planned) -> None:
    assert refs(follow(planner, before, PROMPT)) == ["acme/sorting@1.0.0"]


def test_without_anybody_before_or_when_none_is_wanted_nobody_stays(
    planner: Planner, before: Planned
) -> None:
    assert refs(follow(planner, before, base_alone=True)) == []
    alone = planner.plan(RouteRequest(prompt=OTHER))
    assert refs(follow(planner, alone)) == []


def test_an_expert_that_may_not_be_used_any_more_is_named(
    house: House, planner: Planner, before: Planned
) -> None:
    house.trust.revoke(a_key("acme").public.key_id)
    with pytest.raises(RevokedError, match="acme/plurals"):
        follow(planner, before)


def test_an_expert_that_is_gone_is_named_with_the_way_out(
    house: House, planner: Planner, before: Planned
) -> None:
    house.store.remove(before.experts[0].stored)
    with pytest.raises(NotFoundError, match=r"acme/plurals@1\.0\.0") as caught:
        follow(planner, before)
    assert "begin anew" in caught.value.hint
