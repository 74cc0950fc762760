"""Fewer experts: the least goes first, nothing stays without what it requires, the order stays."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.reference import Reference
from expertctl.routing.candidate import InstalledExpert, find_eligible_experts
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import RoutingIndex
from expertctl.routing.plan import compute_plan_identity
from expertctl.routing.planner import DroppedExpert, PlannedPrompt, drop_lowest_scoring
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.routing.router import route_prompt
from expertctl.schema.manifest import Decoding
from expertctl.store.base_record import StoredBase
from expertctl.user_request import SamplingOverrides
from tests.routing.experts import make_base, make_installed, make_manifest, make_numeric_settings

WHY = "the plan of them: 3.0 MiB needed, but only 1.0 MiB are free"
Plan = Callable[..., tuple[PlannedPrompt, RouteRequest]]


def expert(name: str, *requires: str, **options: Any) -> InstalledExpert:
    return make_installed(
        make_manifest(f"acme/{name}", composition={"requires": requires}, **options)
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> StoredBase:
    return make_base(tmp_path_factory.mktemp("fewer") / "base")


@pytest.fixture(scope="module")
def plan(base: StoredBase) -> Plan:
    index = RoutingIndex(base.path / "home", LexicalEncoder())

    def make(*experts: InstalledExpert, force: str, scores: dict[str, float], **wanted: Any) -> Any:
        """Force experts, and say what their scores are."""
        named = tuple(ForcedExpert(Reference.parse(f"acme/{name}")) for name in force)
        request = RouteRequest(prompt="Hello", force=named, **wanted)
        by_digest = {e.digest: e for e in experts}
        routed = route_prompt(
            request,
            find_eligible_experts(request, experts, base=base, index=index),
            base=base,
            index=index,
        )
        plan = replace(
            routed.plan,
            experts=tuple(
                replace(e, score=scores.get(by_digest[e.content_digest].stored.package.name, 0.5))
                for e in routed.plan.experts
            ),
        )
        result = replace(routed, plan=plan)
        chosen = tuple(by_digest[e.content_digest] for e in result.plan.experts)
        return PlannedPrompt(result, base, chosen), request

    return make


def names(planned: PlannedPrompt) -> str:
    refs = [e.ref for e in planned.result.plan.experts]
    assert refs == [e.ref for e in planned.experts]
    assert refs == [c.expert.ref for c in planned.result.selected]
    return "".join(ref[5] for ref in refs)


def gone(dropped: tuple[DroppedExpert, ...]) -> str:
    return "".join(d.ref[5] for d in dropped)


def test_the_lowest_score_goes_first_and_the_rest_keeps_its_order(plan: Plan) -> None:
    planned, request = plan(
        *map(expert, "abcd"), force="dbca", scores={"a": 0.9, "b": 0.1, "c": 0.8, "d": 0.3}
    )
    orders = [names(planned)]
    while planned.experts:
        planned, _ = drop_lowest_scoring(planned, request, reason=WHY)
        orders.append(names(planned))
    assert orders == ["dbca", "dca", "ca", "a", ""]


def test_among_equals_the_later_one_goes(plan: Plan) -> None:
    planned, request = plan(*map(expert, "abc"), force="bca", scores={})
    planned, dropped = drop_lowest_scoring(planned, request, reason=WHY)
    assert (names(planned), gone(dropped)) == ("bc", "a")


def test_what_was_dropped_is_told_with_the_reason(plan: Plan) -> None:
    one = expert("a")
    planned, request = plan(one, expert("b"), force="ab", scores={"a": 0.1})
    _, [dropped] = drop_lowest_scoring(planned, request, reason=WHY)
    assert dropped.to_json() == {
        "ref": "acme/a@1.0.0",
        "content_digest": str(one.digest),
        "reason": WHY,
    }
    assert dropped.warning == f"acme/a@1.0.0 was left out: {WHY}"


def test_what_requires_the_least_goes_with_it(plan: Plan) -> None:
    experts = [expert("a"), expert("b", "acme/a"), expert("c", "acme/b@^1"), expert("d")]
    planned, request = plan(*experts, force="cd", scores={"a": 0.0, "c": 1.0})
    assert names(planned) == "abcd"
    planned, dropped = drop_lowest_scoring(planned, request, reason=WHY)
    assert (names(planned), gone(dropped)) == ("d", "abc")
    assert [d.reason for d in dropped] == [
        WHY,
        f"it requires acme/a@1.0.0, which was left out: {WHY}",
        f"it requires acme/b@1.0.0, which was left out: {WHY}",
    ]


def test_what_came_only_for_the_least_goes_too(plan: Plan) -> None:
    experts = [expert("a", "acme/b"), expert("b"), expert("c")]
    planned, request = plan(*experts, force="ac", scores={"a": 0.0, "b": 1.0})
    assert names(planned) == "bac"
    planned, dropped = drop_lowest_scoring(planned, request, reason=WHY)
    assert (names(planned), gone(dropped)) == ("c", "ba")
    assert dropped[0].reason == f"only experts left out with acme/a@1.0.0 required it: {WHY}"


def test_what_another_one_requires_or_the_user_named_stays(plan: Plan) -> None:
    experts = [expert("a", "acme/b"), expert("b"), expert("c", "acme/b")]
    for force, left in (("ac", "bc"), ("ba", "b")):
        planned, request = plan(*experts, force=force, scores={"a": 0.0, "b": 1.0})
        planned, _ = drop_lowest_scoring(planned, request, reason=WHY)
        assert names(planned) == left


def test_experts_that_require_each_other_go_together(plan: Plan) -> None:
    circle = [expert("a", "acme/b"), expert("b", "acme/c"), expert("c", "acme/b"), expert("d")]
    planned, request = plan(*circle, force="ad", scores={"a": 0.0})
    planned, dropped = drop_lowest_scoring(planned, request, reason=WHY)
    assert (names(planned), sorted(gone(dropped))) == ("d", list("abc"))


def test_the_plan_of_the_rest_is_made_anew(plan: Plan, base: StoredBase) -> None:
    hot = expert("a", decoding=Decoding(temperature=1.5, max_tokens=7))
    cool = expert("b", decoding=Decoding(temperature=0.3))
    planned, request = plan(hot, cool, force="ab", scores={"a": 0.0})
    assert planned.result.plan.params.temperature == 1.5
    fewer, _ = drop_lowest_scoring(planned, request, reason=WHY)
    result = fewer.result.plan
    numerics = make_numeric_settings(base)
    assert result.identity == compute_plan_identity(numerics, [(cool.digest, 1.0)])
    assert (result.params.temperature, result.params.max_tokens) == (0.3, 2048)
    assert result.seed == planned.result.plan.seed
    assert result.experts == planned.result.plan.experts[1:]


def test_overrides_stay_and_the_base_alone_says_why(plan: Plan) -> None:
    wishes = SamplingOverrides(max_tokens=3, temperature=0.9)
    planned, request = plan(expert("a"), force="a", scores={}, seed=5, sampling=wishes)
    fewer, _ = drop_lowest_scoring(planned, request, reason=WHY)
    assert (fewer.result.plan.seed, fewer.result.plan.params.max_tokens) == (5, 3)
    assert fewer.result.notes[-1].endswith("no expert fits into the remaining memory")


def test_warnings_of_what_went_go_and_the_others_stay(plan: Plan) -> None:
    unsigned = [replace(e, stored=replace(e.stored, signer=None)) for e in map(expert, "ab")]
    planned, request = plan(*unsigned, force="ab", scores={"a": 0.0})
    planned = replace(
        planned, result=replace(planned.result, warnings=("of the home", *planned.warnings))
    )
    assert len(planned.warnings) == 3
    fewer, _ = drop_lowest_scoring(planned, request, reason=WHY)
    told = "acme/b@1.0.0 is unsigned, so its publisher is unknown"
    assert fewer.warnings == ("of the home", told)


@settings(deadline=None, max_examples=60)
@given(
    requires=st.lists(st.sets(st.integers(0, 5), max_size=2), min_size=6, max_size=6),
    scores=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6),
    force=st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True),
)
def test_nothing_is_ever_left_without_what_it_requires(
    plan: Plan, requires: list[set[int]], scores: list[float], force: list[int]
) -> None:
    letters = "abcdef"
    needs = [[f"acme/{letters[n]}" for n in sorted(some)] for some in requires]
    planned, request = plan(
        *(expert(name, *wanted) for name, wanted in zip(letters, needs, strict=True)),
        force="".join(letters[n] for n in force),
        scores=dict(zip(letters, scores, strict=True)),
    )
    while planned.experts:
        before = planned.result.plan.experts
        lowest = min(e.score for e in before)
        least = [e.ref for e in before if e.score == lowest][-1]
        planned, dropped = drop_lowest_scoring(planned, request, reason=WHY)
        kept = [e.ref for e in planned.experts]
        assert least not in kept
        assert kept == [e.ref for e in before if e.ref in kept]
        assert sorted([*kept, *(d.ref for d in dropped)]) == sorted(e.ref for e in before)
        for e in planned.experts:
            assert {f"{text}@1.0.0" for text in e.manifest.composition.requires} <= set(kept)
