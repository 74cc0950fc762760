"""Who may stand in one plan, what comes along, and in which order, as the router applies it."""

from typing import Any

import pytest

from expertctl.errors import ConflictError, IncompatibleError
from expertctl.routing.candidate import Installed
from expertctl.routing.request import parse_forced
from expertctl.routing.router import RoutingResult
from tests.routing.routed import Router, of, refs, soft, sorting, sql


def test_a_second_expert_joins_only_when_both_declare_it(router: Router) -> None:
    def pair(first: dict[str, Any], second: dict[str, Any]) -> RoutingResult:
        return router(
            sorting("acme/sort", composition=first), sorting("acme/style", composition=second)
        )

    task = {"role": "task", "composes_with": ("style",)}
    style = {"role": "style", "composes_with": ("task",)}
    assert refs(pair(task, style)) == ["acme/sort@1.0.0", "acme/style@1.0.0"]
    assert refs(pair(task, {**style, "load_order": 1})) == ["acme/style@1.0.0", "acme/sort@1.0.0"]
    alone = pair(task, {"role": "style"})
    assert refs(alone) == ["acme/sort@1.0.0"]
    assert of(alone, "acme/style").reason.endswith(
        "acme/style@1.0.0 does not declare that it composes with acme/sort@1.0.0"
    )
    assert refs(pair({"role": "task"}, style)) == ["acme/sort@1.0.0"]
    assert refs(pair({}, {})) == ["acme/sort@1.0.0"]


def test_a_plan_has_no_more_experts_than_allowed(router: Router) -> None:
    both = {"role": "task", "composes_with": ("task",)}
    experts = [sorting(f"acme/e{n}", composition=both) for n in range(4)]
    assert len(refs(router(*experts))) == 4
    result = router(*experts, max_experts=2)
    assert refs(result) == ["acme/e0@1.0.0", "acme/e1@1.0.0"]
    assert "at most 2 are allowed" in of(result, "acme/e3").reason
    short = [sorting(f"acme/e{n}", composition={**both, "max_chain": 3}) for n in range(4)]
    assert len(refs(router(*short))) == 3


def test_conflicting_experts_never_stand_in_one_plan(router: Router) -> None:
    both = {"role": "task", "composes_with": ("task",)}
    hostile = {**both, "conflicts": ("acme/one@^1",)}
    result = router(sorting("acme/one", composition=both), sorting("acme/two", composition=hostile))
    assert refs(result) == ["acme/one@1.0.0"]
    assert "conflicts with acme/one@1.0.0: it declares acme/one@^1" in (
        of(result, "acme/two").reason
    )


def test_what_an_expert_requires_comes_with_it_and_is_shown(router: Router) -> None:
    english = sql("acme/english", "1.2.0", composition={"requires": ("acme/letters@*",)})
    letters = sql("acme/letters")
    needy = sorting(composition={"requires": ("acme/english@^1",)})
    result = router(needy, english, letters, sql("acme/english", "2.0.0"))
    assert refs(result) == ["acme/letters@1.0.0", "acme/english@1.2.0", "acme/sort@1.0.0"]
    reasons = [expert.reason for expert in result.plan.experts]
    assert reasons[:2] == ["required by acme/sort@1.0.0"] * 2
    assert of(result, "acme/letters").chosen


def test_an_expert_that_lacks_what_it_requires_is_refused(router: Router) -> None:
    result = router(sorting(composition={"requires": ("acme/english@^1",)}), sorting("zed/sort"))
    assert refs(result) == ["zed/sort@1.0.0"]
    assert of(result, "acme/sort").reason == (
        "acme/sort@1.0.0 requires acme/english@^1, and no such expert can be used"
    )


def test_what_is_required_stands_before_whatever_load_order_says(router: Router) -> None:
    needy = sorting(composition={"requires": ("acme/english@^1",), "load_order": 1})
    middle = {"requires": ("acme/letters@*",), "load_order": 3}
    english, letters = sql("acme/english", composition=middle), sql("acme/letters")
    assert refs(router(needy, english, letters)) == [
        "acme/letters@1.0.0",
        "acme/english@1.0.0",
        "acme/sort@1.0.0",
    ]


def test_what_is_required_counts_in_the_longest_chain_that_an_expert_allows(
    router: Router,
) -> None:
    short = {"requires": ("acme/english@^1",), "max_chain": 2}
    english = sql("acme/english", composition={"requires": ("acme/letters@*",)})
    experts = (sorting(composition=short), english, sql("acme/letters"))
    result = router(*experts)
    assert refs(result) == []
    told = "acme/sort@1.0.0 allows at most 2 experts in a plan, this one has 3"
    assert of(result, "acme/sort").reason == told
    with pytest.raises(IncompatibleError, match=told):
        router(*experts, force=(parse_forced("acme/sort"),))


def test_what_is_required_may_not_conflict(router: Router) -> None:
    needy = sorting(composition={"requires": ("acme/english@^1",), "conflicts": ("acme/letters",)})
    english = sql("acme/english", composition={"requires": ("acme/letters@*",)})
    experts = (needy, english, sql("acme/letters"))
    told = "acme/sort@1.0.0 conflicts with acme/letters@1.0.0: it declares acme/letters"
    assert of(router(*experts), "acme/sort").reason == told
    with pytest.raises(ConflictError, match=told):
        router(*experts, force=(parse_forced("acme/sort"),))


def chain(length: int) -> list[Installed]:
    """Experts that each require the next one; the first is for the prompt."""
    return [
        (sorting if n == 0 else sql)(
            f"acme/e{n}", composition={"requires": (f"acme/e{n + 1}",) if n + 1 < length else ()}
        )
        for n in range(length)
    ]


def test_ten_experts_can_require_one_another_and_eleven_cannot(router: Router) -> None:
    forced = (parse_forced("acme/e0"),)
    assert refs(router(*chain(10))) == [f"acme/e{n}@1.0.0" for n in reversed(range(10))]
    assert len(refs(router(*chain(10), force=forced))) == 10
    told = "acme/e0@1.0.0 and all that it requires are more than 10 experts"
    for length in (11, 3000):
        assert of(router(*chain(length)), "acme/e0@").reason == told
        with pytest.raises(IncompatibleError, match=told):
            router(*chain(length), force=forced)


def test_soft_prompts_leave_something_of_the_context(router: Router) -> None:
    context = 32768
    both = (soft("acme/a", context // 2), soft("acme/b", context // 2))
    force = [parse_forced(name) for name in ("acme/a", "acme/b")]
    with pytest.raises(IncompatibleError, match=f"{context} virtual tokens, the base reads"):
        router(*both, force=tuple(force))
    assert refs(router(*both, force=(force[0],))) == ["acme/a@1.0.0"]
    idle = parse_forced("acme/b:0")
    assert refs(router(*both, force=(force[0], idle))) == ["acme/a@1.0.0", "acme/b@1.0.0"]
    assert "virtual tokens" in of(router(soft("acme/a", context)), "acme/a").reason


def test_experts_that_require_each_other_come_together(router: Router) -> None:
    one = sorting("acme/one", composition={"requires": ("acme/two@*",)})
    two = sql("acme/two", composition={"requires": ("acme/one@*",)})
    assert sorted(refs(router(one, two))) == ["acme/one@1.0.0", "acme/two@1.0.0"]
    forced = router(one, two, force=(parse_forced("acme/two"),))
    assert sorted(refs(forced)) == ["acme/one@1.0.0", "acme/two@1.0.0"]


def test_an_expert_that_requires_itself_is_used(router: Router) -> None:
    assert refs(router(sorting(composition={"requires": ("acme/sort@*",)}))) == ["acme/sort@1.0.0"]


def test_an_expert_that_declares_everything_does_not_attach_itself(router: Router) -> None:
    leech = {"role": "task", "composes_with": ("task", "style", "language")}
    result = router(
        sorting("acme/sort", composition={"role": "task", "composes_with": ("style",)}),
        sorting("evil/leech", composition=leech),
    )
    assert refs(result) == ["acme/sort@1.0.0"]


def test_a_pair_that_was_measured_to_gain_stands_together_without_declaring_it(
    router: Router,
) -> None:
    one, two = sorting("acme/one"), sorting("acme/two")
    third = sorting("acme/third")
    assert refs(router(one, two, gains={(one.digest, two.digest): 0.1})) == [one.ref, two.ref]
    assert refs(router(one, two, gains={(two.digest, one.digest): 0.1})) == [one.ref, two.ref]
    assert refs(router(one, two, gains={(one.digest, two.digest): 0.0})) == [one.ref]
    result = router(one, two, third, gains={(one.digest, two.digest): 0.1})
    assert refs(result) == [one.ref, two.ref]
    assert "does not declare that it composes with" in of(result, "acme/third").reason
