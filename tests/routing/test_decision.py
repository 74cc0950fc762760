"""One decision: who runs, who leads, and who counts beside the leader."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from expertctl.routing.candidate import Installed
from expertctl.routing.decision import ASKED_LAST, JOINS, Decision, decide
from expertctl.routing.features import features_of
from expertctl.routing.head import FEW, judge
from expertctl.routing.index import RoutingIndex
from expertctl.routing.request import RouteRequest, parse_target
from expertctl.routing.roster import Roster
from expertctl.routing.router import roster_of
from expertctl.store.base_record import StoredBase
from expertctl.store.flags import Flag
from tests.routing.routed import PROMPT, SORT, sorting, sql
from tests.routing.unrelated import UNRELATED

TASK = {"role": "task", "composes_with": ("style",)}
STYLE = {"role": "style", "composes_with": ("task",)}
SHOUT = ("Answer in capital letters", "Shout the answer in capital letters")
BOTH = "Answer in capital letters. Sort these numbers: 8, 3, 99"
Decide = Callable[..., tuple[Roster, Decision]]


def shouting(**kwargs: Any) -> Installed:
    return sorting("acme/shout", examples=SHOUT, description="Answers in capitals.", **kwargs)


@pytest.fixture
def decided(base: StoredBase, index: RoutingIndex) -> Decide:
    def run(*experts: Installed, prompt: str = PROMPT, **how: Any) -> tuple[Roster, Decision]:
        rates = how.pop("rates", {})
        exclude = tuple(map(parse_target, how.pop("exclude", ())))
        request = RouteRequest(prompt=prompt, exclude=exclude)
        roster = roster_of(request, experts, base=base, index=index, **how)
        encoded = index.encoded(prompt)
        success = lambda expert: rates.get(expert.digest)  # noqa: E731  # a value, not a step
        return roster, decide(roster, index, features_of(prompt), encoded, success)

    return run


def name(roster: Roster, at: int | None) -> str | None:
    return None if at is None else roster.by_position[at].manifest.name


def names(roster: Roster, positions: Any) -> set[str | None]:
    return {name(roster, at) for at in positions}


def test_the_best_leads_and_every_candidate_has_a_standing(decided: Decide) -> None:
    roster, decision = decided(sorting(), sql())
    assert name(roster, decision.leader) == "acme/sort"
    assert names(roster, decision.standings) == {"acme/sort", "acme/sql"}
    assert decision.vetoes == {}


def test_without_experts_nobody_leads(decided: Decide) -> None:
    _, decision = decided()
    assert (decision.leader, decision.standings, len(decision.found)) == (None, {}, 0)


def test_a_prompt_for_nobody_has_no_leader(decided: Decide) -> None:
    roster, decision = decided(sorting(), sql(), prompt="Tell me a joke")
    assert decision.leader is None
    assert len(decision.standings) == 2
    assert max(each.score for each in decision.standings.values()) < 0.5
    assert len(roster.usable) == 2


@pytest.mark.parametrize(
    ("routing", "prompt", "why"),
    [
        ({"exclude_keywords": ("numbers",)}, PROMPT, "not for prompts with 'numbers'"),
        ({"hint": "has_code=true"}, PROMPT, "says its hint 'has_code=true'"),
        (
            {"languages": ("en",)},
            f"{PROMPT} отсортируй числа по порядку",
            "not for prompts in 'ru'",
        ),
    ],
)
def test_who_refuses_a_prompt_does_not_run(
    decided: Decide, routing: dict[str, Any], prompt: str, why: str
) -> None:
    roster, decision = decided(sorting(**routing), sql(), prompt=prompt)
    ((at, told),) = decision.vetoes.items()
    assert name(roster, at) == "acme/sort"
    assert why in told
    assert decision.leader is None
    assert names(roster, decision.standings) == {"acme/sql"}


def test_where_all_refuse_nobody_is_compared(decided: Decide) -> None:
    _, decision = decided(sorting(exclude_keywords=("numbers",)))
    assert (decision.leader, decision.standings) == (None, {})


def test_a_hint_that_holds_promotes_nobody(decided: Decide) -> None:
    plain_roster, plain = decided(sorting(), sql(), prompt="Tell me some joke")
    roster, hinted = decided(
        sorting("zed/sort", hint="keyword(joke)"), sql("zed/sql"), prompt="Tell me some joke"
    )
    assert hinted.leader is None
    shares = {name(roster, at)[4:]: each.share for at, each in hinted.standings.items()}  # type: ignore[index]
    for at, each in plain.standings.items():
        assert shares[name(plain_roster, at)[5:]] == pytest.approx(each.share)  # type: ignore[index]


@pytest.mark.parametrize("code", ["copied", "near-copy"])
def test_a_copy_is_left_out_where_the_original_runs(decided: Decide, code: str) -> None:
    original, copy = sorting("acme/sort"), sorting("aaa/sort", priority=1.0)
    flags = {copy.digest: (Flag(code, "its examples are those of acme/sort", "acme/sort"),)}
    roster, decision = decided(original, copy, flags=flags)
    assert name(roster, decision.leader) == "acme/sort"
    assert list(decision.vetoes.values()) == [
        "it repeats what acme/sort says, which was here first"
    ]
    roster, alone = decided(copy, flags=flags)
    assert name(roster, alone.leader) == "aaa/sort"
    other = {copy.digest: (Flag("stuffed", "it has 150 keywords", "acme/sort"),)}
    assert decided(original, copy, flags=other)[1].vetoes == {}


def test_who_composes_counts_beside_the_leader_and_does_not_compete(decided: Decide) -> None:
    pair = (sorting(composition=TASK), shouting(composition=STYLE))
    roster, decision = decided(*pair, sql(), prompt=BOTH)
    scores = {name(roster, at): each.score for at, each in decision.standings.items()}
    assert scores["acme/sort"] >= 0.5
    assert scores["acme/shout"] >= 0.5
    apart_roster, apart = decided(
        sorting("zed/sort"),
        sorting("zed/shout", examples=SHOUT, description="Answers in capitals."),
        sql("zed/sql"),
        prompt=BOTH,
    )
    competing = {name(apart_roster, at): each.score for at, each in apart.standings.items()}
    for each in ("sort", "shout"):
        assert competing[f"zed/{each}"] <= scores[f"acme/{each}"]
    least = min(competing["zed/sort"], competing["zed/shout"])
    assert least < min(scores["acme/sort"], scores["acme/shout"]) - 0.1


def test_where_some_compose_those_that_are_not_the_closest_are_compared_too(
    decided: Decide,
) -> None:
    topics = ("pizza toppings", "train times", "chess openings", "cloud shapes", "river names")
    others = [
        sorting(f"acme/e{n}", examples=(f"Tell me about {topic}",), description=f"Knows {topic}.")
        for n, topic in enumerate(topics)
    ]
    pair = (sorting(composition=TASK), shouting(composition=STYLE))
    _, apart = decided(sorting(), sql(), *others, prompt=SORT[0])
    assert len(apart.standings) == FEW.candidates
    _, joined = decided(*pair, *others, prompt=SORT[0])
    assert len(joined.standings) == len(others) + 2


def test_a_style_joins_however_many_tasks_are_closer(decided: Decide) -> None:
    things = [
        "pears",
        "figs",
        "plums",
        "kites",
        "doors",
        "boats",
        "lamps",
        "rings",
        "coins",
        "books",
    ]
    others = [
        sorting(
            f"acme/z{thing}",
            examples=(f"Sort these {thing}: 3, 1, 2", f"Sort the {thing} by size"),
            description=f"Sorts {thing}.",
            composition=TASK,
        )
        for thing in things
    ]
    pair = (sorting(composition=TASK), shouting(composition=STYLE))
    prompt = "Sort these numbers: 8, 3, 99, all in capital letters"
    roster, decision = decided(*pair, *others, prompt=prompt)
    scores = {name(roster, at): each.score for at, each in decision.standings.items()}
    assert min(scores["acme/sort"], scores["acme/shout"]) >= 0.5


def test_who_composes_and_has_no_part_in_a_prompt_gains_nothing(decided: Decide) -> None:
    pair = (sorting(composition=TASK), shouting(composition=STYLE))
    roster, decision = decided(*pair, sql(), prompt=SORT[0])
    standings = {name(roster, at): each for at, each in decision.standings.items()}
    assert standings["acme/shout"].share < JOINS
    assert standings["acme/shout"].score < 0.5


def test_a_measured_gain_admits_a_pair_that_declares_nothing(decided: Decide) -> None:
    one, two = sorting(), shouting()
    roster, decision = decided(one, two, sql(), prompt=BOTH, gains={(one.digest, two.digest): 0.1})
    scores = {name(roster, at): each.score for at, each in decision.standings.items()}
    assert min(scores["acme/sort"], scores["acme/shout"]) >= 0.5


def test_copies_that_compose_do_not_count_twice(decided: Decide, index: RoutingIndex) -> None:
    both = {"role": "task", "composes_with": ("task",)}
    alike = [sorting(f"acme/e{n}", composition=both) for n in range(3)]
    prompt = "Sort these"
    roster, decision = decided(*alike, prompt=prompt)
    verdict = judge(
        roster.deep, roster.deep_at[decision.found.experts], index.encoded(prompt).deep[0]
    )
    most = np.maximum(verdict.shares, 1).max() + verdict.support - verdict.windfall
    scores = [decision.standings[at].score for at in decision.found.experts.tolist()]
    bounds = [index.calibration.score(evidence) for evidence in most.tolist()]
    assert (np.array(scores) <= np.array(bounds) + 1e-6).all()


def test_bad_answers_take_the_lead_away(decided: Decide) -> None:
    expert = sorting()
    roster, decision = decided(expert, rates={expert.digest: 0.0})
    assert decision.leader is None
    assert decision.standings[next(iter(roster.by_position))].score <= 0.5


def test_attack_105_a_package_about_everything_is_asked_last(decided: Decide) -> None:
    everything = sorting("evil/all", examples=(PROMPT, *SHOUT, *UNRELATED))
    flags = {everything.digest: (Flag("grab-all", "its examples have little in common"),)}
    roster, decision = decided(sorting(), sql(), everything)
    assert name(roster, decision.leader) == "evil/all"
    roster, decision = decided(sorting(), sql(), everything, flags=flags)
    assert name(roster, decision.leader) == "acme/sort"
    assert decision.vetoes == dict.fromkeys(roster.grabbing, ASKED_LAST)
    assert names(roster, decision.standings) == {"acme/sort", "acme/sql"}


def test_attack_105_a_package_about_everything_needs_more_than_one_close_text(
    decided: Decide,
) -> None:
    everything = sorting("evil/all", examples=(*SHOUT, *UNRELATED))
    flags = {everything.digest: (Flag("grab-all", "its examples have little in common"),)}
    prompt = UNRELATED[0]
    roster, decision = decided(sorting(), sql(), everything, prompt=prompt)
    assert name(roster, decision.leader) == "evil/all"
    (at,) = (at for at, e in roster.by_position.items() if e is everything)
    before = decision.standings[at]
    roster, decision = decided(sorting(), sql(), everything, prompt=prompt, flags=flags)
    assert names(roster, decision.standings) == {"acme/sort", "acme/sql", "evil/all"}
    after = decision.standings[at]
    assert after.share == pytest.approx(before.share)
    assert after.support < before.support / 2
    assert decision.vetoes == {}


def test_a_package_about_everything_that_is_alone_may_answer(decided: Decide) -> None:
    everything = sorting()
    flags = {everything.digest: (Flag("grab-all", "its examples have little in common"),)}
    roster, decision = decided(everything, flags=flags)
    assert name(roster, decision.leader) == "acme/sort"
