"""Who may stand in one plan, what comes along, and in which order, as the router applies it."""

from typing import Any

import pytest

from expertctl.errors import ConflictError, IncompatibleError
from expertctl.routing.candidate import InstalledExpert
from expertctl.routing.request import parse_forced
from expertctl.routing.router import RoutingResult
from tests.routing.experts import (
    Router,
    find_candidate,
    list_refs,
    make_soft_prompt_expert,
    make_sort_expert,
    make_sql_expert,
)


def test_a_second_expert_joins_only_when_both_declare_it(router: Router) -> None:
    def pair(first: dict[str, Any], second: dict[str, Any]) -> RoutingResult:
        return router(
            make_sort_expert("acme/sort", composition=first),
            make_sort_expert("acme/style", composition=second),
        )

    task = {"role": "task", "composes_with": ("style",)}
    style = {"role": "style", "composes_with": ("task",)}
    assert list_refs(pair(task, style)) == ["acme/sort@1.0.0", "acme/style@1.0.0"]
    assert list_refs(pair(task, {**style, "load_order": 1})) == [
        "acme/style@1.0.0",
        "acme/sort@1.0.0",
    ]
    alone = pair(task, {"role": "style"})
    assert list_refs(alone) == ["acme/sort@1.0.0"]
    assert find_candidate(alone, "acme/style").reason.endswith(
        "acme/style@1.0.0 does not declare that it composes with acme/sort@1.0.0"
    )
    assert list_refs(pair({"role": "task"}, style)) == ["acme/sort@1.0.0"]
    assert list_refs(pair({}, {})) == ["acme/sort@1.0.0"]


def test_a_plan_has_no_more_experts_than_allowed(router: Router) -> None:
    both = {"role": "task", "composes_with": ("task",)}
    experts = [make_sort_expert(f"acme/e{n}", composition=both) for n in range(4)]
    assert len(list_refs(router(*experts))) == 4
    result = router(*experts, max_experts=2)
    assert list_refs(result) == ["acme/e0@1.0.0", "acme/e1@1.0.0"]
    assert "at most 2 are allowed" in find_candidate(result, "acme/e3").reason
    short = [make_sort_expert(f"acme/e{n}", composition={**both, "max_chain": 3}) for n in range(4)]
    assert len(list_refs(router(*short))) == 3


def test_conflicting_experts_never_stand_in_one_plan(router: Router) -> None:
    both = {"role": "task", "composes_with": ("task",)}
    hostile = {**both, "conflicts": ("acme/one@^1",)}
    result = router(
        make_sort_expert("acme/one", composition=both),
        make_sort_expert("acme/two", composition=hostile),
    )
    assert list_refs(result) == ["acme/one@1.0.0"]
    assert "conflicts with acme/one@1.0.0: it declares acme/one@^1" in (
        find_candidate(result, "acme/two").reason
    )


def test_what_an_expert_requires_comes_with_it_and_is_shown(router: Router) -> None:
    english = make_sql_expert(
        "acme/english", "1.2.0", composition={"requires": ("acme/letters@*",)}
    )
    letters = make_sql_expert("acme/letters")
    needy = make_sort_expert(composition={"requires": ("acme/english@^1",)})
    result = router(needy, english, letters, make_sql_expert("acme/english", "2.0.0"))
    assert list_refs(result) == ["acme/letters@1.0.0", "acme/english@1.2.0", "acme/sort@1.0.0"]
    reasons = [expert.reason for expert in result.plan.experts]
    assert reasons[:2] == ["required by acme/sort@1.0.0"] * 2
    assert find_candidate(result, "acme/letters").chosen


def test_an_expert_that_lacks_what_it_requires_is_refused(router: Router) -> None:
    result = router(
        make_sort_expert(composition={"requires": ("acme/english@^1",)}),
        make_sort_expert("zed/sort"),
    )
    assert list_refs(result) == ["zed/sort@1.0.0"]
    assert find_candidate(result, "acme/sort").reason == (
        "acme/sort@1.0.0 requires acme/english@^1, and no such expert can be used"
    )


def test_what_is_required_stands_before_whatever_load_order_says(router: Router) -> None:
    needy = make_sort_expert(composition={"requires": ("acme/english@^1",), "load_order": 1})
    middle = {"requires": ("acme/letters@*",), "load_order": 3}
    english, letters = (
        make_sql_expert("acme/english", composition=middle),
        make_sql_expert("acme/letters"),
    )
    assert list_refs(router(needy, english, letters)) == [
        "acme/letters@1.0.0",
        "acme/english@1.0.0",
        "acme/sort@1.0.0",
    ]


def test_what_is_required_counts_in_the_longest_chain_that_an_expert_allows(
    router: Router,
) -> None:
    short = {"requires": ("acme/english@^1",), "max_chain": 2}
    english = make_sql_expert("acme/english", composition={"requires": ("acme/letters@*",)})
    experts = (make_sort_expert(composition=short), english, make_sql_expert("acme/letters"))
    result = router(*experts)
    assert list_refs(result) == []
    told = "acme/sort@1.0.0 allows at most 2 experts in a plan, this one has 3"
    assert find_candidate(result, "acme/sort").reason == told
    with pytest.raises(IncompatibleError, match=told):
        router(*experts, force=(parse_forced("acme/sort"),))


def test_what_is_required_may_not_conflict(router: Router) -> None:
    needy = make_sort_expert(
        composition={"requires": ("acme/english@^1",), "conflicts": ("acme/letters",)}
    )
    english = make_sql_expert("acme/english", composition={"requires": ("acme/letters@*",)})
    experts = (needy, english, make_sql_expert("acme/letters"))
    told = "acme/sort@1.0.0 conflicts with acme/letters@1.0.0: it declares acme/letters"
    assert find_candidate(router(*experts), "acme/sort").reason == told
    with pytest.raises(ConflictError, match=told):
        router(*experts, force=(parse_forced("acme/sort"),))


def chain(length: int) -> list[InstalledExpert]:
    """Experts that each require the next one; the first is for the prompt."""
    return [
        (make_sort_expert if n == 0 else make_sql_expert)(
            f"acme/e{n}", composition={"requires": (f"acme/e{n + 1}",) if n + 1 < length else ()}
        )
        for n in range(length)
    ]


def test_ten_experts_can_require_one_another_and_eleven_cannot(router: Router) -> None:
    forced = (parse_forced("acme/e0"),)
    assert list_refs(router(*chain(10))) == [f"acme/e{n}@1.0.0" for n in reversed(range(10))]
    assert len(list_refs(router(*chain(10), force=forced))) == 10
    told = "acme/e0@1.0.0 with all its requirements is more than 10 experts"
    for length in (11, 3000):
        assert find_candidate(router(*chain(length)), "acme/e0@").reason == told
        with pytest.raises(IncompatibleError, match=told):
            router(*chain(length), force=forced)


def test_soft_prompts_leave_something_of_the_context(router: Router) -> None:
    context = 32768
    both = (
        make_soft_prompt_expert("acme/a", context // 2),
        make_soft_prompt_expert("acme/b", context // 2),
    )
    force = [parse_forced(name) for name in ("acme/a", "acme/b")]
    with pytest.raises(IncompatibleError, match=f"{context} virtual tokens, the base reads"):
        router(*both, force=tuple(force))
    assert list_refs(router(*both, force=(force[0],))) == ["acme/a@1.0.0"]
    idle = parse_forced("acme/b:0")
    assert list_refs(router(*both, force=(force[0], idle))) == ["acme/a@1.0.0", "acme/b@1.0.0"]
    assert (
        "virtual tokens"
        in find_candidate(router(make_soft_prompt_expert("acme/a", context)), "acme/a").reason
    )


def test_experts_that_require_each_other_come_together(router: Router) -> None:
    one = make_sort_expert("acme/one", composition={"requires": ("acme/two@*",)})
    two = make_sql_expert("acme/two", composition={"requires": ("acme/one@*",)})
    assert sorted(list_refs(router(one, two))) == ["acme/one@1.0.0", "acme/two@1.0.0"]
    forced = router(one, two, force=(parse_forced("acme/two"),))
    assert sorted(list_refs(forced)) == ["acme/one@1.0.0", "acme/two@1.0.0"]


def test_an_expert_that_requires_itself_is_used(router: Router) -> None:
    assert list_refs(router(make_sort_expert(composition={"requires": ("acme/sort@*",)}))) == [
        "acme/sort@1.0.0"
    ]


def test_an_expert_that_declares_everything_does_not_attach_itself(router: Router) -> None:
    leech = {"role": "task", "composes_with": ("task", "style", "language")}
    result = router(
        make_sort_expert("acme/sort", composition={"role": "task", "composes_with": ("style",)}),
        make_sort_expert("evil/leech", composition=leech),
    )
    assert list_refs(result) == ["acme/sort@1.0.0"]


def test_a_pair_that_was_measured_to_gain_stands_together_without_declaring_it(
    router: Router,
) -> None:
    one, two = make_sort_expert("acme/one"), make_sort_expert("acme/two")
    third = make_sort_expert("acme/third")
    assert list_refs(router(one, two, gains={(one.digest, two.digest): 0.1})) == [one.ref, two.ref]
    assert list_refs(router(one, two, gains={(two.digest, one.digest): 0.1})) == [one.ref, two.ref]
    assert list_refs(router(one, two, gains={(one.digest, two.digest): 0.0})) == [one.ref]
    result = router(one, two, third, gains={(one.digest, two.digest): 0.1})
    assert list_refs(result) == [one.ref, two.ref]
    assert "does not declare that it composes with" in find_candidate(result, "acme/third").reason
