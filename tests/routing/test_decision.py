"""One decision: who runs, who leads, and who counts beside the leader."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from expertctl.reference import parse_target
from expertctl.routing.candidate import EligibleExperts, InstalledExpert, find_eligible_experts
from expertctl.routing.decision import (
    CATCH_ALL_REASON,
    MIN_JOIN_PROBABILITY,
    RoutingDecision,
    score_prompt,
)
from expertctl.routing.features import extract_features
from expertctl.routing.index import RoutingIndex
from expertctl.routing.request import RouteRequest
from expertctl.routing.reranker import SMALL_RERANK, rerank
from expertctl.store.base_record import StoredBase
from expertctl.store.preference import Flag
from tests.routing.experts import PROMPT, SORT, UNRELATED, make_sort_expert, make_sql_expert

TASK = {"role": "task", "composes_with": ("style",)}
STYLE = {"role": "style", "composes_with": ("task",)}
SHOUT = ("Answer in capital letters", "Shout the answer in capital letters")
BOTH = "Answer in capital letters. Sort these numbers: 8, 3, 99"
Decide = Callable[..., tuple[EligibleExperts, RoutingDecision]]


def shouting(**kwargs: Any) -> InstalledExpert:
    return make_sort_expert(
        "acme/shout", examples=SHOUT, description="Answers in capitals.", **kwargs
    )


@pytest.fixture
def decided(base: StoredBase, index: RoutingIndex) -> Decide:
    def run(
        *experts: InstalledExpert, prompt: str = PROMPT, **how: Any
    ) -> tuple[EligibleExperts, RoutingDecision]:
        rates = how.pop("rates", {})
        exclude = tuple(map(parse_target, how.pop("exclude", ())))
        request = RouteRequest(prompt=prompt, exclude=exclude)
        roster = find_eligible_experts(request, experts, base=base, index=index, **how)
        encoded = index.encode_prompt(prompt)
        success = lambda expert: rates.get(expert.digest)  # noqa: E731  # a value, not a step
        return roster, score_prompt(roster, index, extract_features(prompt), encoded, success)

    return run


def name(roster: EligibleExperts, at: int | None) -> str | None:
    return None if at is None else roster.by_position[at].manifest.name


def names(roster: EligibleExperts, positions: Any) -> set[str | None]:
    return {name(roster, at) for at in positions}


def test_the_best_leads_and_every_candidate_has_a_standing(decided: Decide) -> None:
    roster, decision = decided(make_sort_expert(), make_sql_expert())
    assert name(roster, decision.leader) == "acme/sort"
    assert names(roster, decision.scores) == {"acme/sort", "acme/sql"}
    assert decision.vetoes == {}


def test_without_experts_nobody_leads(decided: Decide) -> None:
    _, decision = decided()
    assert (decision.leader, decision.scores, len(decision.hits)) == (None, {}, 0)


def test_a_prompt_for_nobody_has_no_leader(decided: Decide) -> None:
    roster, decision = decided(make_sort_expert(), make_sql_expert(), prompt="Tell me a joke")
    assert decision.leader is None
    assert len(decision.scores) == 2
    assert max(each.score for each in decision.scores.values()) < 0.5
    assert len(roster.usable) == 2


@pytest.mark.parametrize(
    ("routing", "prompt", "why"),
    [
        ({"exclude_keywords": ("numbers",)}, PROMPT, "not for prompts with 'numbers'"),
        ({"hint": "has_code=true"}, PROMPT, "its hint 'has_code=true'"),
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
    roster, decision = decided(make_sort_expert(**routing), make_sql_expert(), prompt=prompt)
    ((at, told),) = decision.vetoes.items()
    assert name(roster, at) == "acme/sort"
    assert why in told
    assert decision.leader is None
    assert names(roster, decision.scores) == {"acme/sql"}


def test_where_all_refuse_nobody_is_compared(decided: Decide) -> None:
    _, decision = decided(make_sort_expert(exclude_keywords=("numbers",)))
    assert (decision.leader, decision.scores) == (None, {})


def test_a_hint_that_holds_promotes_nobody(decided: Decide) -> None:
    plain_roster, plain = decided(make_sort_expert(), make_sql_expert(), prompt="Tell me some joke")
    roster, hinted = decided(
        make_sort_expert("zed/sort", hint="keyword(joke)"),
        make_sql_expert("zed/sql"),
        prompt="Tell me some joke",
    )
    assert hinted.leader is None
    shares = {name(roster, at)[4:]: each.probability for at, each in hinted.scores.items()}  # type: ignore[index]
    for at, each in plain.scores.items():
        assert shares[name(plain_roster, at)[5:]] == pytest.approx(each.probability)  # type: ignore[index]


@pytest.mark.parametrize("code", ["copied", "near-copy"])
def test_a_copy_is_left_out_where_the_original_runs(decided: Decide, code: str) -> None:
    original, copy = make_sort_expert("acme/sort"), make_sort_expert("aaa/sort", priority=1.0)
    flags = {copy.digest: (Flag(code, "its examples are those of acme/sort", "acme/sort"),)}
    roster, decision = decided(original, copy, flags=flags)
    assert name(roster, decision.leader) == "acme/sort"
    assert list(decision.vetoes.values()) == ["it repeats acme/sort, which was installed first"]
    roster, alone = decided(copy, flags=flags)
    assert name(roster, alone.leader) == "aaa/sort"
    other = {copy.digest: (Flag("stuffed", "it has 150 keywords", "acme/sort"),)}
    assert decided(original, copy, flags=other)[1].vetoes == {}


def test_who_composes_counts_beside_the_leader_and_does_not_compete(decided: Decide) -> None:
    pair = (make_sort_expert(composition=TASK), shouting(composition=STYLE))
    roster, decision = decided(*pair, make_sql_expert(), prompt=BOTH)
    scores = {name(roster, at): each.score for at, each in decision.scores.items()}
    assert scores["acme/sort"] >= 0.5
    assert scores["acme/shout"] >= 0.5
    apart_roster, apart = decided(
        make_sort_expert("zed/sort"),
        make_sort_expert("zed/shout", examples=SHOUT, description="Answers in capitals."),
        make_sql_expert("zed/sql"),
        prompt=BOTH,
    )
    competing = {name(apart_roster, at): each.score for at, each in apart.scores.items()}
    for each in ("sort", "shout"):
        assert competing[f"zed/{each}"] <= scores[f"acme/{each}"]
    least = min(competing["zed/sort"], competing["zed/shout"])
    assert least < min(scores["acme/sort"], scores["acme/shout"]) - 0.1


def test_where_some_compose_those_that_are_not_the_closest_are_compared_too(
    decided: Decide,
) -> None:
    topics = ("pizza toppings", "train times", "chess openings", "cloud shapes", "river names")
    others = [
        make_sort_expert(
            f"acme/e{n}", examples=(f"Tell me about {topic}",), description=f"Knows {topic}."
        )
        for n, topic in enumerate(topics)
    ]
    pair = (make_sort_expert(composition=TASK), shouting(composition=STYLE))
    _, apart = decided(make_sort_expert(), make_sql_expert(), *others, prompt=SORT[0])
    assert len(apart.scores) == SMALL_RERANK.candidates
    _, joined = decided(*pair, *others, prompt=SORT[0])
    assert len(joined.scores) == len(others) + 2


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
        make_sort_expert(
            f"acme/z{thing}",
            examples=(f"Sort these {thing}: 3, 1, 2", f"Sort the {thing} by size"),
            description=f"Sorts {thing}.",
            composition=TASK,
        )
        for thing in things
    ]
    pair = (make_sort_expert(composition=TASK), shouting(composition=STYLE))
    prompt = "Sort these numbers: 8, 3, 99, all in capital letters"
    roster, decision = decided(*pair, *others, prompt=prompt)
    scores = {name(roster, at): each.score for at, each in decision.scores.items()}
    assert min(scores["acme/sort"], scores["acme/shout"]) >= 0.5


def test_who_composes_and_has_no_part_in_a_prompt_gains_nothing(decided: Decide) -> None:
    pair = (make_sort_expert(composition=TASK), shouting(composition=STYLE))
    roster, decision = decided(*pair, make_sql_expert(), prompt=SORT[0])
    standings = {name(roster, at): each for at, each in decision.scores.items()}
    assert standings["acme/shout"].probability < MIN_JOIN_PROBABILITY
    assert standings["acme/shout"].score < 0.5


def test_a_measured_gain_admits_a_pair_that_declares_nothing(decided: Decide) -> None:
    one, two = make_sort_expert(), shouting()
    roster, decision = decided(
        one, two, make_sql_expert(), prompt=BOTH, gains={(one.digest, two.digest): 0.1}
    )
    scores = {name(roster, at): each.score for at, each in decision.scores.items()}
    assert min(scores["acme/sort"], scores["acme/shout"]) >= 0.5


def test_copies_that_compose_do_not_count_twice(decided: Decide, index: RoutingIndex) -> None:
    both = {"role": "task", "composes_with": ("task",)}
    alike = [make_sort_expert(f"acme/e{n}", composition=both) for n in range(3)]
    prompt = "Sort these"
    roster, decision = decided(*alike, prompt=prompt)
    verdict = rerank(
        roster.rerank_table,
        roster.rerank_positions[decision.hits.experts],
        index.encode_prompt(prompt).rerank_rows[0],
    )
    most = (
        np.maximum(verdict.probabilities, 1).max() + verdict.similarities - verdict.prior_correction
    )
    scores = [decision.scores[at].score for at in decision.hits.experts.tolist()]
    bounds = [index.calibration.score(evidence) for evidence in most.tolist()]
    assert (np.array(scores) <= np.array(bounds) + 1e-6).all()


def test_bad_answers_take_the_lead_away(decided: Decide) -> None:
    expert = make_sort_expert()
    roster, decision = decided(expert, rates={expert.digest: 0.0})
    assert decision.leader is None
    assert decision.scores[next(iter(roster.by_position))].score <= 0.5


def test_attack_105_a_package_about_everything_is_asked_last(decided: Decide) -> None:
    everything = make_sort_expert("evil/all", examples=(PROMPT, *SHOUT, *UNRELATED))
    flags = {everything.digest: (Flag("grab-all", "its examples have little in common"),)}
    roster, decision = decided(make_sort_expert(), make_sql_expert(), everything)
    assert name(roster, decision.leader) == "evil/all"
    roster, decision = decided(make_sort_expert(), make_sql_expert(), everything, flags=flags)
    assert name(roster, decision.leader) == "acme/sort"
    assert decision.vetoes == dict.fromkeys(roster.catch_alls, CATCH_ALL_REASON)
    assert names(roster, decision.scores) == {"acme/sort", "acme/sql"}


def test_attack_105_a_package_about_everything_needs_more_than_one_close_text(
    decided: Decide,
) -> None:
    everything = make_sort_expert("evil/all", examples=(*SHOUT, *UNRELATED))
    flags = {everything.digest: (Flag("grab-all", "its examples have little in common"),)}
    prompt = UNRELATED[0]
    roster, decision = decided(make_sort_expert(), make_sql_expert(), everything, prompt=prompt)
    assert name(roster, decision.leader) == "evil/all"
    (at,) = (at for at, e in roster.by_position.items() if e is everything)
    before = decision.scores[at]
    roster, decision = decided(
        make_sort_expert(), make_sql_expert(), everything, prompt=prompt, flags=flags
    )
    assert names(roster, decision.scores) == {"acme/sort", "acme/sql", "evil/all"}
    after = decision.scores[at]
    assert after.probability == pytest.approx(before.probability)
    assert after.similarity < before.similarity / 2
    assert decision.vetoes == {}


def test_a_package_about_everything_that_is_alone_may_answer(decided: Decide) -> None:
    everything = make_sort_expert()
    flags = {everything.digest: (Flag("grab-all", "its examples have little in common"),)}
    roster, decision = decided(everything, flags=flags)
    assert name(roster, decision.leader) == "acme/sort"
