from dataclasses import replace

import pytest

from expertctl.routing.explain import MAX_REFUSALS, explain, summary
from expertctl.routing.index import RoutingIndex
from expertctl.routing.plan import Plan, SamplingParams
from expertctl.routing.request import RouteRequest, parse_forced
from expertctl.routing.router import RoutingResult, route
from expertctl.store.base_record import StoredBase
from tests.routing.experts import installed, manifest

EXPERTS = [
    installed(manifest("acme/sort", description="Sorts numbers.", examples=("Sort 3, 1, 2",))),
    *(installed(manifest(f"acme/poems{n}", description="Writes poems.")) for n in range(14)),
]


@pytest.fixture
def result(base: StoredBase, index: RoutingIndex) -> RoutingResult:
    return route(RouteRequest(prompt="Sort 9, 8, 7", seed=1), EXPERTS, base=base, index=index)


def test_the_text_names_the_plan_the_reasons_and_the_settings(result: RoutingResult) -> None:
    lines = explain(result).splitlines()
    assert lines[0] == "plan: acme/sort@1.0.0 on acme/tiny"
    assert lines[1].startswith("  1. acme/sort@1.0.0  best of 15, score 0.8")
    assert lines[2] == "  temperature 0.6, at most 2048 tokens, seed 1"
    assert lines[3] == "not used:"
    assert lines[4].startswith("  acme/poems0@1.0.0  not similar: cosine ")
    assert lines[4 + MAX_REFUSALS] == "  … and 4 more, see --json"
    assert lines[-1].startswith("note: routing is lexical")
    assert all("\n" not in candidate.reason for candidate in result.candidates)


def test_a_plan_is_named_in_a_few_words(
    result: RoutingResult, base: StoredBase, index: RoutingIndex
) -> None:
    assert summary(replace(result.plan, experts=())) == "acme/tiny alone"
    force = (parse_forced("acme/sort:0.5"), parse_forced("acme/poems3"))
    request = RouteRequest(prompt="x", force=force, seed=1)
    forced = route(request, EXPERTS, base=base, index=index)
    assert summary(forced.plan) == "acme/sort@1.0.0:0.5 + acme/poems3@1.0.0 on acme/tiny"
    assert "not used:" not in explain(forced)


def test_greedy_settings_are_named(result: RoutingResult) -> None:
    plan: Plan = replace(result.plan, params=SamplingParams().greedy())
    assert "  greedy, at most 2048 tokens, seed 1" in explain(replace(result, plan=plan))
