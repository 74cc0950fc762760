"""A session plans as a planner does, and works out who may answer only when that changed."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.errors import NotFoundError
from expertctl.reference import Reference, parse_target
from expertctl.routing.candidate import EligibleExperts, InstalledExpert
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.routing.session import MAX_ELIGIBLE_SETS, PlanningSession
from expertctl.settings import Home, Settings
from expertctl.store.base_record import StoredBase
from expertctl.store.preference import CATCH_ALL, Flag, write_flags
from expertctl.store.preference import FLAGS_FILE as FLAGGED_FILE
from tests.factories import write_base
from tests.store.fixtures import (
    HomeFixture,
    PackageFactory,
    fast,
    make_key,
    package_factory,
    user_home,
)

__all__ = ["fast", "package_factory", "user_home"]

SORT, DAYS = "Sort these numbers: 3, 1, 2", "Which day of the week is it?"
SORTING = {"description": "Sorts numbers.", "routing": {"examples": [SORT], "keywords": ["sort"]}}
DATES = {"description": "Names days.", "routing": {"examples": [DAYS], "keywords": ["day"]}}
REQUESTS = [
    RouteRequest(prompt=SORT, seed=1),
    RouteRequest(prompt=DAYS, seed=1),
    RouteRequest(prompt="Hello there", seed=1),
    RouteRequest(prompt=SORT, seed=1, exclude=(parse_target("acme/sorting"),)),
    RouteRequest(prompt=SORT, seed=1, force=(ForcedExpert(Reference.parse("acme/dates")),)),
    RouteRequest(prompt=SORT, seed=1, base_alone=True),
]


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
def made(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bases that a roster was worked out for, in order."""
    bases: list[str] = []
    roster = Planner.find_eligible

    def counted(
        self: Planner, request: RouteRequest, base: StoredBase, experts: Sequence[InstalledExpert]
    ) -> EligibleExperts:
        bases.append(base.name)
        return roster(self, request, base, experts)

    monkeypatch.setattr(Planner, "find_eligible", counted)
    return bases


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{r.prompt[:5]} {bool(r.exclude)}")
def test_a_session_plans_as_the_planner_does(planner: Planner, request_: RouteRequest) -> None:
    session = PlanningSession(planner)
    for _ in range(2):
        ours, theirs = session.plan(request_).result, planner.plan(request_).result
        assert ours.plan == theirs.plan
        assert ours.candidates == theirs.candidates
        assert ours.notes == theirs.notes
    session.check_integrity()


def test_who_may_answer_is_worked_out_once_for_each_way_of_asking(
    planner: Planner, made: list[str]
) -> None:
    session = PlanningSession(planner)
    for request in (*REQUESTS[:3], *REQUESTS[:3]):
        session.plan(request)
    assert made == ["tiny-base"]
    for _ in range(2):
        session.plan(REQUESTS[3])
    assert made == ["tiny-base"] * 2
    session.plan(REQUESTS[0])
    assert made == ["tiny-base"] * 2


def test_each_base_has_its_own(
    planner: Planner, user_home: HomeFixture, made: list[str], tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other-base", layers=2, hidden=16, heads=2, kv_heads=1, seed=9)
    user_home.bases.add(other)
    session = PlanningSession(planner)
    assert session.plan(REQUESTS[0], base="other-base").experts == ()
    assert [e.ref for e in session.plan(REQUESTS[0], base="tiny-base").experts] == [
        "acme/sorting@1.0.0"
    ]
    assert made == ["other-base", "tiny-base"]


def test_after_the_vectors_changed_it_is_worked_out_again(
    planner: Planner, made: list[str]
) -> None:
    session = PlanningSession(planner)
    session.plan(REQUESTS[0])
    manifests = {e.digest: e.manifest for e in session.inventory.experts}
    planner.index.rebuild(manifests)
    assert [e.ref for e in session.plan(REQUESTS[0]).experts] == ["acme/sorting@1.0.0"]
    assert len(made) == 2


def test_what_comes_and_goes_meanwhile_is_seen(
    planner: Planner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    session = PlanningSession(planner)
    session.plan(REQUESTS[0])
    plurals = {"description": "Writes plurals.", "routing": {"examples": ["Plural of wolf"]}}
    user_home.install(package_factory.package("acme/plurals", **plurals))
    request = RouteRequest(prompt="Plural of wolf")
    (plurals_,) = session.plan(request).experts
    assert plurals_.ref == "acme/plurals@1.0.0"
    user_home.store.remove(plurals_.stored)
    assert session.plan(request).experts == ()
    session.check_integrity()


def test_a_key_that_is_revoked_meanwhile_counts_at_once(
    planner: Planner, user_home: HomeFixture
) -> None:
    session = PlanningSession(planner)
    assert session.plan_cached(REQUESTS[0]).experts != ()
    user_home.trust.revoke(make_key("acme").public.key_id)
    assert session.plan_cached(REQUESTS[0]).experts == ()


def test_a_version_that_is_yanked_meanwhile_gives_way_at_once(
    planner: Planner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package("acme/sorting", "1.1.0", **SORTING))
    session = PlanningSession(planner)
    assert [e.ref for e in session.plan_cached(REQUESTS[0]).experts] == ["acme/sorting@1.1.0"]
    user_home.home.yanked.write_text(json.dumps({"local": {"acme/sorting@1.1.0": "wrong order"}}))
    assert [e.ref for e in session.plan_cached(REQUESTS[0]).experts] == ["acme/sorting@1.0.0"]
    user_home.home.yanked.unlink()
    assert [e.ref for e in session.plan_cached(REQUESTS[0]).experts] == ["acme/sorting@1.1.0"]
    session.check_integrity()


def test_a_version_that_is_locked_meanwhile_is_taken_at_once(
    planner: Planner, user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    user_home.install(package_factory.package("acme/sorting", "1.1.0", **SORTING))
    work = tmp_path / "work"
    work.mkdir()
    session = PlanningSession(replace(planner, folder=work))
    assert [e.ref for e in session.plan_cached(REQUESTS[0]).experts] == ["acme/sorting@1.1.0"]
    (work / "experts.toml").write_text('[experts]\n"acme/sorting" = "1.0.0"\n')
    planned = session.plan_cached(REQUESTS[0])
    assert [e.ref for e in planned.experts] == ["acme/sorting@1.0.0"]
    reasons = {c.expert.ref: c.reason for c in planned.result.candidates}
    assert reasons["acme/sorting@1.1.0"] == f"{work / 'experts.toml'} names acme/sorting@1.0.0"


def test_installed_experts_are_read_once_as_long_as_nothing_changes(planner: Planner) -> None:
    session = PlanningSession(planner)
    assert session.inventory is session.inventory
    session.plan(REQUESTS[0])
    before = session.inventory
    assert before is session.inventory


def test_an_expert_from_a_file_is_planned_with_and_not_remembered(
    planner: Planner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    session = PlanningSession(planner)
    offered = session.inventory.experts[0]
    user_home.store.remove(offered.stored)
    request = RouteRequest(prompt=SORT, seed=1, force=(ForcedExpert(offered.digest),))
    for _ in range(2):
        planned = session.plan_cached(request, files=[offered])
        assert planned.experts == (offered,)
        assert "remembered" not in planned.result.timings_ms
    with pytest.raises(NotFoundError):
        session.plan_cached(request)


def test_whoever_leaves_out_others_every_time_does_not_fill_the_memory(
    planner: Planner, made: list[str]
) -> None:
    session = PlanningSession(planner)
    for n in range(MAX_ELIGIBLE_SETS + 4):
        session.plan(RouteRequest(prompt=SORT, exclude=(parse_target(f"acme/e{n}"),)))
        session.check_integrity()
    assert made == ["tiny-base"] * (MAX_ELIGIBLE_SETS + 4)
    session.plan(
        RouteRequest(prompt=SORT, exclude=(parse_target(f"acme/e{MAX_ELIGIBLE_SETS + 3}"),))
    )
    assert len(made) == MAX_ELIGIBLE_SETS + 4
    session.plan(RouteRequest(prompt=SORT, exclude=(parse_target("acme/e0"),)))
    assert len(made) == MAX_ELIGIBLE_SETS + 5


def test_what_is_flagged_while_experts_are_listed_counts_for_the_next_prompt(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process judges between the reading of the flags and the end of encoding."""
    digest = planner.plan(REQUESTS[0]).experts[0].digest
    flags = {digest: (Flag(CATCH_ALL, "its examples are everywhere"),)}
    roster = Planner.find_eligible

    def overtaken(
        self: Planner, request: RouteRequest, base: StoredBase, experts: Sequence[InstalledExpert]
    ) -> EligibleExperts:
        made = roster(self, request, base, experts)
        write_flags(planner.index.folder / FLAGGED_FILE, flags)
        return made

    session = PlanningSession(planner)
    with monkeypatch.context() as patch:
        patch.setattr(Planner, "find_eligible", overtaken)
        session.plan_cached(REQUESTS[0])
    theirs = planner.plan(REQUESTS[0]).result.candidates
    assert session.plan_cached(REQUESTS[0]).result.candidates == theirs
    assert [c.flags for c in theirs if c.flags] == [flags[digest]]


@pytest.mark.parametrize("again", [False, True], ids=["moved", "made the default"])
def test_a_base_that_is_added_again_is_planned_with_at_once(
    again: bool,
    planner: Planner,
    user_home: HomeFixture,
    package_factory: PackageFactory,
    tmp_path: Path,
) -> None:
    other = Path(shutil.copytree(package_factory.base_dir, tmp_path / "other-base"))
    if again:
        user_home.bases.add(other, name="other-base")
    session = PlanningSession(planner)
    before = session.plan_cached(REQUESTS[0]).base
    added = user_home.bases.add(package_factory.base_dir if again else other, name="tiny-base")
    assert before != added
    assert session.plan_cached(REQUESTS[0]).base == added


def test_files_of_a_base_with_another_time_are_read_once_more_only(
    planner: Planner, user_home: HomeFixture, tmp_path: Path
) -> None:
    directory = write_base(tmp_path / "here", layers=1, hidden=16, heads=2, kv_heads=1)
    user_home.bases.add(directory)
    session = PlanningSession(planner)
    before = session.plan_cached(REQUESTS[0], base="here").base
    (directory / "config.json").touch()
    user_home.bases.check(before)
    now = session.plan_cached(REQUESTS[0], base="here").base
    assert now == user_home.bases.find("here")
    assert now != before


def test_an_expert_that_was_repaired_is_read_again(
    planner: Planner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    session = PlanningSession(planner)
    (expert,) = session.plan_cached(REQUESTS[0]).experts
    user_home.store.blob_path(expert.stored.find_file("expert.json").digest).unlink()
    session = PlanningSession(planner)
    assert session.plan_cached(REQUESTS[0]).experts == ()
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    assert session.plan_cached(REQUESTS[0]).experts == (expert,)


def test_eligible_experts_that_are_not_read_any_more_are_found(
    planner: Planner, user_home: HomeFixture
) -> None:
    session = PlanningSession(planner)
    session.plan(REQUESTS[0])
    user_home.store.remove(session.inventory.experts[0].stored)
    session.check_integrity()  # it has not looked since
    assert session._cached_inventory is not None
    mark, inventory = session._cached_inventory
    session._cached_inventory = (mark, replace(inventory, experts=()))
    with pytest.raises(AssertionError):
        session.check_integrity()
