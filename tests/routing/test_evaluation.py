"""Evaluation of routing: figures against counting by hand, decisions against `plan`."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import NotFoundError
from expertctl.package.evaluation import wilson_interval
from expertctl.reference import DEMO_BASE, PackageName
from expertctl.routing.evaluation import (
    ExpertScore,
    LabelledPrompts,
    Latency,
    Proportion,
    RoutingEvaluation,
    evaluate_routing,
    read_labelled_prompts,
)
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest
from expertctl.settings import Home, Settings
from tests.factories import write_base
from tests.routing.evaluations import make_decision, make_evaluation, make_evaluation_of
from tests.store.fixtures import (
    HomeFixture,
    PackageFactory,
    fast,
    make_key,
    package_factory,
    user_home,
)

__all__ = ["fast", "package_factory", "user_home"]

SORT, DAYS, HELLO = "Sort these numbers: 3, 1, 2", "Which day of the week is it?", "Hello there"
SORTING = {"description": "Sorts numbers.", "routing": {"examples": [SORT], "keywords": ["sort"]}}
DATES = {"description": "Names days.", "routing": {"examples": [DAYS], "keywords": ["day"]}}
HAND = [
    ("sorting", "sorting", 0.9),
    ("sorting", "dates", 0.8),
    ("sorting", "sorting", 0.4),
    ("dates", "dates", 0.5),
    (None, "dates", 0.7),
    (None, "dates", 0.2),
    (None, None, None),
]
NAMES = st.none() | st.sampled_from(["a", "b", "c"])
ROWS = st.lists(
    st.tuples(NAMES, NAMES, st.floats(0, 1)).map(
        lambda row: row if row[1] else (row[0], None, None)
    ),
    min_size=1,
    max_size=30,
)


def test_the_shares_are_what_counting_by_hand_gives() -> None:
    found = make_evaluation(HAND)
    assert found.accuracy == Proportion(4, 7)
    assert found.in_scope == Proportion(2, 4)
    assert found.abstention == Proportion(1, 4)
    assert found.out_of_scope == Proportion(2, 3)
    assert found.precision == Proportion(2, 4)
    assert found.coverage == Proportion(4, 7)
    assert found.accuracy.interval == wilson_interval(4, 7)
    assert [wrong.prompt.line for wrong in found.mistakes] == [2, 3, 5]


def test_a_share_of_nothing_is_none() -> None:
    only_in = make_evaluation([("a", "a", 0.1)])
    assert (only_in.out_of_scope, only_in.precision) == (None, None)
    assert make_evaluation([(None, None, None)]).in_scope is None


def test_experts_come_with_the_worst_first() -> None:
    sorting, dates = PackageName("acme", "sorting"), PackageName("acme", "dates")
    assert make_evaluation(HAND).score_experts() == [
        ExpertScore(sorting, expected=3, correct=1, abstained=1, answered=1),
        ExpertScore(dates, expected=1, correct=1, abstained=0, answered=3),
    ]


def test_the_confusion_counts_each_prompt_once() -> None:
    sorting, dates = PackageName("acme", "sorting"), PackageName("acme", "dates")
    assert make_evaluation(HAND).confusion == {
        (sorting, sorting): 1,
        (sorting, dates): 1,
        (sorting, None): 1,
        (dates, dates): 1,
        (None, dates): 1,
        (None, None): 2,
    }


def test_the_guess_is_the_first_candidate_whether_or_not_it_answers() -> None:
    guesses = [d.prediction for d in make_evaluation(HAND).decisions]
    assert [guess.is_correct for guess in guesses] == [True, False, True, True, False, False, False]
    assert [guess.in_scope for guess in guesses] == [True] * 4 + [False] * 3


@given(ROWS)
def test_the_figures_agree_with_each_other(
    rows: list[tuple[str | None, str | None, float]],
) -> None:
    found = make_evaluation(rows)
    n = len(rows)
    inside, outside = found.in_scope, found.out_of_scope
    assert found.accuracy.n == n == sum(found.confusion.values())
    assert found.accuracy.correct == sum(s.correct for s in (inside, outside) if s)
    assert len(found.mistakes) == n - found.accuracy.correct
    scores = found.score_experts()
    assert sum(score.expected for score in scores) == (inside.n if inside else 0)
    assert sum(score.answered for score in scores) == found.coverage.correct
    assert sum(score.abstained for score in scores) == (found.abstention.correct if inside else 0)  # type: ignore[union-attr]  # there where in_scope is


def test_the_first_prompt_is_left_out_of_latencies() -> None:
    rows = [
        make_decision(i, ("a", "a", 0.9), ms=ms) for i, ms in enumerate([100.0, 1.0, 3.0, 2.0], 1)
    ]
    assert make_evaluation_of(rows).measure_latencies() == {
        "encode": Latency(2.0, 3.0),
        "plan": Latency(4.0, 6.0),
    }
    assert make_evaluation_of(rows[:1]).measure_latencies()["encode"] == Latency(100.0, 100.0)


def test_the_95th_percentile_is_the_nearest_rank() -> None:
    rows = [make_decision(i, ("a", "a", 0.9), ms=float(i)) for i in range(101)]
    assert make_evaluation_of(rows).measure_latencies()["encode"] == Latency(50.5, 95.0)


def test_plans_of_several_experts_are_counted() -> None:
    rows = [make_decision(i, ("a", "a", 0.9), experts=i) for i in (0, 1, 2, 3)]
    assert make_evaluation_of(rows).composed_count == 2


@pytest.fixture
def planner(user_home: HomeFixture, package_factory: PackageFactory) -> Planner:
    user_home.bases.add(package_factory.base_dir)
    user_home.trust_keys("acme")
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/dates", **DATES),
    )
    return Planner.open(Settings(Home(user_home.root), encoder="lexical"))


@pytest.fixture
def data(tmp_path: Path) -> LabelledPrompts:
    return labelled(
        tmp_path, (SORT, "acme/sorting"), (DAYS, "acme/dates"), (HELLO, None), (SORT, "acme/dates")
    )


def labelled(folder: Path, *rows: tuple[str, str | None]) -> LabelledPrompts:
    path = folder / "held-out.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "expert": e}) + "\n" for p, e in rows))
    return read_labelled_prompts(path)


def test_each_prompt_is_decided_as_route_decides_it(
    planner: Planner, data: LabelledPrompts
) -> None:
    counted: list[int] = []
    found = evaluate_routing(planner, data, progress=counted.append)
    assert found.accuracy == Proportion(3, 4)
    assert counted == [1] * 4
    assert (found.experts, found.encoder, found.bases) == (2, "lexical", ("tiny-base",))
    for made in found.decisions:
        plan = planner.plan(RouteRequest(prompt=made.prompt.prompt)).result.plan
        refs = [expert.ref for expert in plan.experts]
        assert refs == ([f"{made.expert}@1.0.0"] if made.expert else [])
        assert [made.confidence] == [e.score for e in plan.experts] or made.expert is None
        assert {"encode", "total", "plan"} <= made.timings_ms.keys()
    assert any("repeated" in warning for warning in found.warnings)


def test_who_comes_first_without_answering_is_known(planner: Planner, tmp_path: Path) -> None:
    unlike = "Why do cats purr when they are stroked?"
    found = evaluate_routing(planner, labelled(tmp_path, (unlike, "acme/sorting")))
    (made,) = found.decisions
    assert made.expert is None
    assert str(made.first) in {"acme/sorting", "acme/dates"}
    assert made.confidence is not None
    assert made.confidence < found.threshold
    assert made.reason
    assert not made.is_correct


def test_the_home_is_read_once(
    planner: Planner, data: LabelledPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    inventory = Planner.read_inventory
    monkeypatch.setattr(Planner, "read_inventory", lambda self: read.append(0) or inventory(self))
    evaluate_routing(planner, data)
    assert len(read) == 1


def test_an_expert_that_is_not_installed_ends_it_before_anything_is_routed(
    planner: Planner, tmp_path: Path
) -> None:
    counted: list[int] = []
    with pytest.raises(NotFoundError, match="did you mean acme/sorting"):
        evaluate_routing(
            planner, labelled(tmp_path, (SORT, "acme/sortin")), progress=counted.append
        )
    assert counted == []


def test_an_unknown_base_is_not_found(planner: Planner, data: LabelledPrompts) -> None:
    with pytest.raises(NotFoundError, match="no base is called"):
        evaluate_routing(planner, data, base="nobody/knows")
    assert evaluate_routing(planner, data, base="tiny-base").bases == ("tiny-base",)


def test_a_wanted_expert_that_nobody_vouches_for_is_warned_of(
    planner: Planner, user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    user_home.install(package_factory.package("acme/raw", key=None), allow_unsigned=True)
    found = evaluate_routing(planner, labelled(tmp_path, (SORT, "acme/raw")))
    (warning,) = found.warnings
    assert warning.startswith("acme/raw@1.0.0 is never chosen: refused: unsigned")


def test_a_wanted_expert_for_another_base_is_warned_of_where_no_base_suits(
    planner: Planner, data: LabelledPrompts, user_home: HomeFixture, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other-base", layers=2, hidden=16, heads=2, kv_heads=1, seed=9)
    user_home.bases.add(other)
    assert not any("never chosen" in w for w in evaluate_routing(planner, data).warnings)
    found = evaluate_routing(planner, data, base="other-base")
    assert sum("is never chosen: refused:" in warning for warning in found.warnings) == 2
    assert found.coverage.correct == 0


def test_a_wanted_expert_for_the_demo_is_warned_of_once_there_is_a_real_base(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    user_home.trust_keys("acme")
    user_home.bases.add(package_factory.base_dir, name=DEMO_BASE)
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    data = labelled(tmp_path, (SORT, "acme/sorting"))
    assert evaluate_routing(planner, data).warnings == ()
    user_home.bases.add(
        write_base(tmp_path / "real", layers=2, hidden=16, heads=2, kv_heads=1, seed=9)
    )
    (warning,) = evaluate_routing(planner, data).warnings
    assert warning.startswith("acme/sorting@1.0.0 is never chosen: refused:")
    assert evaluate_routing(planner, data, base=DEMO_BASE).warnings == ()


def test_a_revoked_expert_is_never_chosen_and_said_to_be(
    planner: Planner, data: LabelledPrompts, user_home: HomeFixture
) -> None:
    user_home.trust.revoke(make_key("acme").public.key_id)
    found = evaluate_routing(planner, data)
    assert found.coverage.correct == 0
    assert any("acme/dates@1.0.0 is never chosen" in w and "revoked" in w for w in found.warnings)


def test_evaluating_counts_as_no_use(
    planner: Planner, data: LabelledPrompts, user_home: HomeFixture
) -> None:
    before = [
        (e.ref, planner.catalogue.read_success_rates().find_rate(e.digest))
        for e in planner.read_inventory().experts
    ]
    found: RoutingEvaluation = evaluate_routing(planner, data)
    assert found.decisions
    after = [
        (e.ref, planner.catalogue.read_success_rates().find_rate(e.digest))
        for e in planner.read_inventory().experts
    ]
    assert before == after


def test_a_home_without_experts_leaves_every_prompt_to_the_base(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    user_home.bases.add(package_factory.base_dir)
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    found = evaluate_routing(planner, labelled(tmp_path, (SORT, None)))
    assert (found.accuracy, found.experts, found.coverage) == (
        Proportion(1, 1),
        0,
        Proportion(0, 1),
    )
    assert found.decisions[0].first is None
