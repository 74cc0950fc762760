"""What was planned for a prompt is given again to the same prompt, until something changed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine_config import EngineConfig
from expertctl.errors import NotFoundError
from expertctl.reference import Reference, parse_target
from expertctl.routing.encoder import Encoder
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.routing.session import (
    CACHE_SECONDS,
    KEPT_CANDIDATES,
    PlanCache,
    PlanCacheKey,
    PlanningSession,
    fold_prompt,
)
from expertctl.settings import Home, Settings
from expertctl.store.catalogue import RunHistory
from expertctl.store.run_record import UsedExpert
from tests.factories import write_base
from tests.store.fixtures import (
    DAY,
    NOW,
    HomeFixture,
    PackageFactory,
    fast,
    make_run,
    package_factory,
    user_home,
)

__all__ = ["fast", "package_factory", "user_home"]

SORT, DAYS = "Sort these numbers: 3, 1, 2", "Which day of the week is it?"
SORTING: dict[str, Any] = {
    "description": "Sorts numbers.",
    "routing": {"examples": [SORT], "keywords": ["sort"]},
}
DATES: dict[str, Any] = {
    "description": "Names days.",
    "routing": {"examples": [DAYS], "keywords": ["day"]},
}
SORTED = ["acme/sorting@1.0.0"]


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
def session(planner: Planner) -> PlanningSession:
    return PlanningSession(planner)


def is_remembered(planned: PlannedPrompt) -> bool:
    return "remembered" in planned.result.timings_ms


@pytest.mark.parametrize(
    ("prompt", "key"),
    [
        ("Sort  THESE\tnumbers ", "sort these numbers"),
        ("\n\n one \r\n two\n \n\n three", "one\ntwo\n\nthree"),
        ("\u3000Stra\u00dfe\u00a0 1", "strasse 1"),
        ("", ""),
    ],
)
def test_case_and_white_space_do_not_make_another_prompt(prompt: str, key: str) -> None:
    assert fold_prompt(prompt) == key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Sort 3, 1", "Sort 3, 2"),
        ("Sort 31", "Sort 3 1"),
        ("Read this\nnow", "Read this now"),
        ("Read this\n\nnow", "Read this\nnow"),
        ("what does import os do", "what does IMPORT os do"),
    ],
)
def test_digits_words_lines_and_code_make_another_prompt(one: str, other: str) -> None:
    asked = [
        PlanCacheKey.from_request(RouteRequest(prompt=prompt), None) for prompt in (one, other)
    ]
    assert asked[0] != asked[1]


def test_the_same_prompt_gets_what_was_planned_for_it(session: PlanningSession) -> None:
    first = session.plan_cached(RouteRequest(prompt=SORT, seed=1))
    again = session.plan_cached(RouteRequest(prompt=f"  {SORT.upper()} ", seed=1))
    assert not is_remembered(first)
    assert is_remembered(again)
    assert again.result.plan == first.result.plan
    assert again.experts == first.experts
    assert again.result.candidates == first.result.candidates
    assert again.result.features.length == len(SORT) + 3
    session.check_integrity()


def test_a_remembered_plan_has_the_seed_of_the_request(session: PlanningSession) -> None:
    session.plan_cached(RouteRequest(prompt=SORT, seed=1))
    assert session.plan_cached(RouteRequest(prompt=SORT, seed=2)).result.plan.seed == 2
    drawn = {session.plan_cached(RouteRequest(prompt=SORT)).result.plan.seed for _ in range(4)}
    assert len(drawn) > 1


def test_what_is_planned_plainly_is_not_remembered(session: PlanningSession) -> None:
    request = RouteRequest(prompt=SORT)
    assert not any(is_remembered(session.plan(request)) for _ in range(2))
    assert not is_remembered(session.plan_cached(request))
    assert not is_remembered(session.plan(request))


@pytest.mark.parametrize(
    "changes",
    [
        {"exclude": (parse_target("acme/sorting"),)},
        {"force": (ForcedExpert(Reference.parse("acme/dates")),)},
        {"base_alone": True},
        {"max_experts": 2},
        {"config": EngineConfig(dtype="bf16")},
    ],
)
def test_what_else_is_asked_counts(session: PlanningSession, changes: dict[str, Any]) -> None:
    request = RouteRequest(prompt=SORT, seed=1)
    session.plan_cached(request)
    other = replace(request, **changes)
    planned = session.plan_cached(other)
    assert not is_remembered(planned)
    assert planned.result.plan == session.plan(other).result.plan


def test_each_base_is_remembered_apart(
    session: PlanningSession, user_home: HomeFixture, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other-base", layers=2, hidden=16, heads=2, kv_heads=1, seed=9)
    user_home.bases.add(other)
    request = RouteRequest(prompt=SORT)
    assert session.plan_cached(request, base="other-base").experts == ()
    assert [e.ref for e in session.plan_cached(request, base="tiny-base").experts] == SORTED
    assert is_remembered(session.plan_cached(request, base="other-base"))


def test_all_is_forgotten_when_vectors_change(session: PlanningSession) -> None:
    request = RouteRequest(prompt=SORT)
    session.plan_cached(request)
    session.planner.index.rebuild({e.digest: e.manifest for e in session.inventory.experts})
    assert not is_remembered(session.plan_cached(request))
    assert is_remembered(session.plan_cached(request))


def test_all_is_forgotten_when_something_is_installed(
    session: PlanningSession, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    request = RouteRequest(prompt=SORT)
    session.plan_cached(request)
    user_home.install(package_factory.package("acme/plurals", description="Writes plurals."))
    assert not is_remembered(session.plan_cached(request))


def test_all_is_forgotten_when_a_run_failed(session: PlanningSession) -> None:
    request = RouteRequest(prompt=SORT)
    session.plan_cached(request)
    session.planner.catalogue.history.record_run(make_run(1, validation="failed"))
    assert not is_remembered(session.plan_cached(request))
    assert is_remembered(session.plan_cached(request))


def test_what_fades_with_time_is_seen_within_an_hour(planner: Planner) -> None:
    now = NOW
    planner.catalogue.history = RunHistory(planner.catalogue.database, clock=lambda: now)
    session = PlanningSession(planner, clock=lambda: now)
    request = RouteRequest(prompt=SORT, seed=1)
    (expert,) = session.plan_cached(request).experts
    used = UsedExpert(expert.ref, expert.digest)
    for number in range(8):
        planner.catalogue.history.record_run(make_run(number, used, validation="failed"))
    before = session.plan_cached(request)
    now += CACHE_SECONDS - 1
    assert is_remembered(session.plan_cached(request))
    now = NOW + 90 * DAY
    again = session.plan_cached(request)
    assert not is_remembered(again)
    assert again.result.candidates == session.plan(request).result.candidates
    assert again.result.candidates[0].success > before.result.candidates[0].success + 0.1
    now -= DAY
    assert not is_remembered(session.plan_cached(request))  # the clock was set back


def test_all_is_forgotten_when_a_base_is_added(
    session: PlanningSession, user_home: HomeFixture, tmp_path: Path
) -> None:
    request = RouteRequest(prompt=SORT)
    session.plan_cached(request)
    user_home.bases.add(
        write_base(tmp_path / "other-base", layers=2, hidden=16, heads=2, kv_heads=1, seed=9)
    )
    assert not is_remembered(session.plan_cached(request))


def test_what_cannot_be_planned_is_not_remembered(tmp_path: Path) -> None:
    session = PlanningSession(Planner.open(Settings(Home(tmp_path), encoder="lexical")))
    for _ in range(2):
        with pytest.raises(NotFoundError, match="no base model"):
            session.plan_cached(RouteRequest(prompt=SORT))


def test_a_remembered_prompt_is_not_encoded(
    session: PlanningSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.plan_cached(RouteRequest(prompt=SORT))
    session.plan_cached(RouteRequest(prompt=DAYS))
    monkeypatch.delattr(Encoder, "encode_for_rerank")
    monkeypatch.delattr(type(session.planner.index.encoder), "encode_for_rerank")
    assert [e.ref for e in session.plan_cached(RouteRequest(prompt=SORT)).experts] == SORTED


def test_the_prompt_that_was_not_asked_for_longest_goes_first(session: PlanningSession) -> None:
    planned = session.plan(RouteRequest(prompt=SORT))
    cache = PlanCache(capacity=2)
    one, two, three = (
        PlanCacheKey.from_request(RouteRequest(prompt=f"sort {n}"), None) for n in range(3)
    )
    cache.find_plan(one, revision="a")
    cache.store_plan(one, planned)
    cache.store_plan(two, planned)
    assert cache.find_plan(one, revision="a") is not None
    cache.store_plan(three, planned)
    assert cache.find_plan(two, revision="a") is None
    assert cache.find_plan(one, revision="a") is not None
    assert len(cache) == 2
    cache.check_integrity()
    assert cache.find_plan(one, revision="b") is None
    assert len(cache) == 0


@pytest.mark.parametrize("words", [1, 1_000, 50_000])
def test_a_long_prompt_takes_no_more_memory_than_a_short_one(
    session: PlanningSession, words: int
) -> None:
    prompt = SORT + " and then" * words
    planned = session.plan(RouteRequest(prompt=prompt, seed=1))
    cache, question = PlanCache(), PlanCacheKey.from_request(RouteRequest(prompt=prompt), None)
    cache.find_plan(question, revision="a")
    cache.store_plan(question, planned)
    cache.check_integrity()
    kept = cache.find_plan(question, revision="a")
    assert kept is not None
    assert kept.result.plan == planned.result.plan
    assert len(repr(question)) + len(repr(kept.result.features)) < 2_000


def test_a_prompt_of_100_000_words_is_planned_once(session: PlanningSession) -> None:
    request = RouteRequest(prompt=SORT + " and then" * 50_000)
    session.plan_cached(request)
    assert is_remembered(session.plan_cached(request))
    assert not is_remembered(session.plan_cached(replace(request, prompt=request.prompt + " stop")))


def test_a_prompt_with_half_a_surrogate_pair_is_remembered(session: PlanningSession) -> None:
    request = RouteRequest(prompt=SORT + " \ud83d")
    session.plan_cached(request)
    assert is_remembered(session.plan_cached(request))


def test_plans_for_many_prompts_share_the_record_of_their_base(session: PlanningSession) -> None:
    requests = [RouteRequest(prompt=f"{SORT}, {number}") for number in range(8)]
    for request in requests:
        session.plan_cached(request)
    bases = {id(session.plan_cached(request).base) for request in requests}
    assert len(bases) == 1
    session.check_integrity()


def test_a_base_that_was_read_anew_is_the_one_of_the_next_plan(session: PlanningSession) -> None:
    planned = session.plan(RouteRequest(prompt=SORT))
    changed = replace(planned, base=replace(planned.base, added_ns=planned.base.added_ns + 1))
    cache, question = PlanCache(), PlanCacheKey.from_request(RouteRequest(prompt=SORT), None)
    cache.find_plan(question, revision="a")
    cache.store_plan(question, planned)
    cache.store_plan(question, changed)
    assert cache.find_plan(question, revision="a") == replace(
        changed, result=replace(changed.result, features=replace(changed.result.features, words=()))
    )
    cache.check_integrity()


def test_of_many_candidates_the_first_are_kept(session: PlanningSession) -> None:
    planned = session.plan(RouteRequest(prompt=SORT))
    many = tuple(planned.result.candidates[:1] * (2 * KEPT_CANDIDATES))
    cache, question = PlanCache(), PlanCacheKey.from_request(RouteRequest(prompt=SORT), None)
    cache.find_plan(question, revision="a")
    cache.store_plan(question, replace(planned, result=replace(planned.result, candidates=many)))
    kept = cache.find_plan(question, revision="a")
    assert kept is not None
    assert kept.result.candidates == many[:KEPT_CANDIDATES]
