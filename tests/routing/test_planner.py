"""What a home offers to a prompt: its experts, its bases, and what is wrong with them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.digest import Digest
from expertctl.engine_config import EngineConfig
from expertctl.errors import (
    BaseMismatchError,
    DigestError,
    IncompatibleError,
    NotFoundError,
    RevokedError,
    UnsignedError,
    UsageError,
)
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.plan import Plan, parse_plan
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides
from tests.factories import make_route_request, write_base
from tests.gpt2_base import write_gpt2
from tests.store.fixtures import (
    HomeFixture,
    PackageFactory,
    fast,
    make_key,
    package_factory,
    user_home,
)

__all__ = ["fast", "package_factory", "user_home"]

PROMPT = "Sort these numbers in ascending order: 3, 1, 2"
SORTING = {"description": "Sorts numbers in ascending order.", "routing": {"keywords": ["sort"]}}
PLURALS = {"description": "Writes plurals of English nouns.", "routing": {"keywords": ["plural"]}}


@pytest.fixture
def planner(user_home: HomeFixture, package_factory: PackageFactory) -> Planner:
    user_home.bases.add(package_factory.base_dir)
    user_home.trust_keys("acme")
    return Planner.open(Settings(Home(user_home.root), encoder="lexical"))


def named(text: str, weight: float = 1.0) -> ForcedExpert:
    return ForcedExpert(Reference.parse(text), weight)


def refs(planned: PlannedPrompt) -> list[str]:
    return [expert.ref for expert in planned.experts]


def test_vectors_that_are_made_when_somebody_waits_are_told_of_once(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    told: list[str] = []
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    waited_for = replace(planner, notify=told.append)
    for _ in range(2):
        waited_for.plan(RouteRequest(prompt=PROMPT))
    assert told == ["computing the routing vectors of 2 experts with lexical, once"]
    waited_for.index.remove([user_home.store.list_experts()[0].content_digest])
    waited_for.plan(RouteRequest(prompt=PROMPT))
    assert told[1:] == ["computing the routing vectors of 1 expert with lexical, once"]


def test_vectors_that_another_process_made_are_not_told_of(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    told: list[str] = []
    waited_for = replace(planner, notify=told.append)
    user_home.install(package_factory.package("acme/sorting", **SORTING), index=user_home.index)
    waited_for.plan(RouteRequest(prompt=PROMPT))
    user_home.install(package_factory.package("acme/plurals", **PLURALS), index=user_home.index)
    waited_for.plan(RouteRequest(prompt=PROMPT))
    assert told == []
    waited_for.index.check_integrity()


def test_the_prompt_finds_the_expert_for_it(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    planned = planner.plan(RouteRequest(prompt=PROMPT))
    assert refs(planned) == ["acme/sorting@1.0.0"]
    assert planned.base.name == package_factory.base_dir.name
    assert planned.warnings == ()


def test_named_experts_come_in_the_order_named(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    force = (named("acme/plurals"), named("acme/sorting", 0.5))
    planned = planner.plan(RouteRequest(prompt=PROMPT, force=force))
    assert refs(planned) == ["acme/plurals@1.0.0", "acme/sorting@1.0.0"]
    assert [expert.weight for expert in planned.result.plan.experts] == [1.0, 0.5]


def test_without_a_base_the_way_out_is_named(user_home: HomeFixture) -> None:
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    with pytest.raises(NotFoundError, match="no base model is known") as caught:
        planner.plan(RouteRequest(prompt=PROMPT))
    assert "base add" in caught.value.hint


def test_an_unknown_base_is_not_found(planner: Planner) -> None:
    with pytest.raises(NotFoundError, match="no base is called"):
        planner.plan(RouteRequest(prompt=PROMPT), base="nobody/knows")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_base(tmp_path / "other-base", layers=2, hidden=16, heads=2, kv_heads=1, seed=9)


def test_the_experts_decide_which_base_answers(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner, other: Path
) -> None:
    user_home.bases.add(other)
    assert planner.plan(RouteRequest(prompt=PROMPT)).base.name == "other-base"
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    planned = planner.plan(RouteRequest(prompt=PROMPT))
    assert (planned.base.name, refs(planned)) == (
        package_factory.base_dir.name,
        ["acme/sorting@1.0.0"],
    )
    forced = RouteRequest(prompt="Hello", force=(named("acme/sorting"),))
    assert planner.plan(forced).base.name == package_factory.base_dir.name


def test_a_base_that_the_engine_does_not_run_never_answers_by_itself(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner, tmp_path: Path
) -> None:
    user_home.bases.add(write_gpt2(tmp_path / "gpt2"))
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    alone = RouteRequest(prompt=PROMPT, base_alone=True)
    for request in (alone, RouteRequest(prompt=PROMPT)):
        assert planner.plan(request).base.name == package_factory.base_dir.name
    compat = planner.plan(replace(alone, config=EngineConfig(engine="transformers")))
    assert compat.base.name == "gpt2"
    with pytest.raises(IncompatibleError, match="does not run the base gpt2") as caught:
        planner.plan(alone, base="gpt2")
    assert "--engine transformers" in caught.value.hint


def test_a_base_of_an_older_version_goes_on_and_is_told_to_be_added_again(
    user_home: HomeFixture, tmp_path: Path
) -> None:
    directory = write_gpt2(tmp_path / "gpt2", scale_attn_by_inverse_layer_idx=False)
    assert not user_home.bases.add(directory).foreign
    [record] = (user_home.root / "bases").glob("gpt2*/base.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "foreign": True}))
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    alone = RouteRequest(prompt=PROMPT, base_alone=True)
    compat = planner.plan(replace(alone, config=EngineConfig(engine="transformers")))
    assert compat.base.name == "gpt2"
    with pytest.raises(IncompatibleError) as caught:
        planner.plan(alone, base="gpt2")
    assert "`expertctl base remove gpt2`" in caught.value.hint


def test_where_no_base_can_run_the_engine_that_could_is_named(
    user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_gpt2(tmp_path / "gpt2"))
    planner = Planner.open(Settings(Home(user_home.root), encoder="lexical"))
    with pytest.raises(IncompatibleError) as caught:
        planner.plan(RouteRequest(prompt=PROMPT))
    assert "--engine transformers" in caught.value.hint


def test_of_two_bases_the_one_with_the_better_expert_answers(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner, other: Path
) -> None:
    user_home.bases.add(other)
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", base_dir=other, base=read_base(other), **PLURALS),
    )
    assert refs(planner.plan(RouteRequest(prompt=PROMPT))) == ["acme/sorting@1.0.0"]
    planned = planner.plan(RouteRequest(prompt="Write plurals of English nouns: dog, ox"))
    assert (planned.base.name, refs(planned)) == ("other-base", ["acme/plurals@1.0.0"])


def test_the_base_alone_is_the_one_added_last(
    planner: Planner, user_home: HomeFixture, other: Path
) -> None:
    user_home.bases.add(other)
    planned = planner.plan(RouteRequest(prompt=PROMPT, base_alone=True))
    assert (planned.base.name, refs(planned)) == ("other-base", [])
    assert planned.result.notes == ("the base answers alone, as asked",)


def test_a_base_that_is_named_is_taken_whatever_the_experts_say(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner, other: Path
) -> None:
    user_home.bases.add(other)
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    planned = planner.plan(RouteRequest(prompt=PROMPT), base="other-base")
    assert (planned.base.name, refs(planned)) == ("other-base", [])
    assert "made for" in planned.result.candidates[0].reason


def test_a_damaged_expert_is_left_out_and_said_so(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    damage(user_home, "acme/plurals")
    planned = planner.plan(RouteRequest(prompt=PROMPT))
    assert refs(planned) == ["acme/sorting@1.0.0"]
    assert len(planned.warnings) == 1
    assert planned.warnings[0].startswith("acme/plurals@1.0.0 was left out: ")
    assert "doctor" in planned.warnings[0]


def test_a_damaged_expert_that_is_named_is_an_error(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    damage(user_home, "acme/plurals")
    with pytest.raises(DigestError, match=r"acme/plurals@1\.0\.0"):
        planner.plan(RouteRequest(prompt=PROMPT, force=(named("acme/plurals"),)))
    with pytest.raises(NotFoundError, match="acme/nothing is not installed"):
        planner.plan(RouteRequest(prompt=PROMPT, force=(named("acme/nothing"),)))


def test_a_damaged_record_is_said_so(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    (user_home.store.paths.refs / "local" / "acme" / "plurals" / "1.0.0").write_bytes(b"{x")
    planned = planner.plan(RouteRequest(prompt=PROMPT))
    assert refs(planned) == ["acme/sorting@1.0.0"]
    told = "the record of acme/plurals@1.0.0 is damaged; see `expertctl doctor`"
    assert planned.warnings == (told,)
    assert planned.result.to_json()["warnings"] == [told]


@pytest.mark.parametrize("gone", [".", "config.json"])
def test_a_base_that_is_gone_is_told_with_the_way_out(
    gone: str, planner: Planner, user_home: HomeFixture, other: Path
) -> None:
    user_home.bases.add(other, name="my/base")
    (other / gone).resolve().rename(other.with_name("elsewhere"))
    with pytest.raises(BaseMismatchError, match="the base my/base is not what was") as caught:
        planner.plan(RouteRequest(prompt=PROMPT))
    assert "`expertctl base remove my/base --force` and add it again" in caught.value.hint


def damage(user_home: HomeFixture, name: str) -> None:
    expert = user_home.store.find(Reference.parse(name))
    blob = user_home.store.blob_path(expert.find_file("expert.json").digest)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes().replace(b"1.0.0", b"1.0.1"))


def test_what_a_revoked_key_signed_is_not_chosen_and_refused_when_named(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    user_home.trust.revoke(make_key("acme").public.key_id)
    planned = planner.plan(RouteRequest(prompt=PROMPT))
    assert refs(planned) == []
    assert "revoked" in planned.result.candidates[0].reason
    with pytest.raises(RevokedError, match="revoked"):
        planner.plan(RouteRequest(prompt=PROMPT, force=(named("acme/sorting"),)))


def test_an_unsigned_expert_answers_only_when_it_is_named(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    package = package_factory.package("acme/sorting", key=None, **SORTING)
    with pytest.raises(UnsignedError):
        user_home.install(package)
    user_home.install(package, allow_unsigned=True)
    assert refs(planner.plan(RouteRequest(prompt=PROMPT))) == []
    planned = planner.plan(RouteRequest(prompt=PROMPT, force=(named("acme/sorting"),)))
    assert refs(planned) == ["acme/sorting@1.0.0"]
    assert any("unsigned" in warning for warning in planned.warnings)


def saved_plan(planner: Planner, **request: Any) -> Plan:
    """A plan on its way through a file."""
    planned = planner.plan(make_route_request(prompt=PROMPT, **request))
    return parse_plan(json.dumps(planned.result.to_json()).encode()).plan


def test_a_saved_plan_is_repeated_whatever_the_prompt(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    force = (named("acme/plurals", 0.5), named("acme/sorting"))
    saved = saved_plan(
        planner, force=force, sampling=SamplingOverrides(temperature=0.9, stop=(";",))
    )
    again = planner.replay(saved, RouteRequest(prompt="Guten Morgen")).result.plan
    assert [(e.ref, e.weight) for e in again.experts] == [
        ("acme/plurals@1.0.0", 0.5),
        ("acme/sorting@1.0.0", 1.0),
    ]
    assert (again.identity, again.seed, again.params) == (saved.identity, saved.seed, saved.params)
    assert (again.params.temperature, again.params.stop) == (0.9, (";",))
    other = planner.replay(
        saved, RouteRequest(prompt=PROMPT, seed=5, sampling=SamplingOverrides(max_tokens=3))
    ).result.plan
    assert (other.seed, other.params) == (5, replace(saved.params, max_tokens=3))
    greedy = RouteRequest(prompt=PROMPT, sampling=SamplingOverrides(greedy=True))
    assert planner.replay(saved, greedy).result.plan.params == saved.params.to_greedy()


def test_a_saved_plan_of_the_base_alone_stays_that(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    saved = saved_plan(planner, base_alone=True)
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    assert refs(planner.replay(saved, RouteRequest(prompt=PROMPT))) == []


def test_a_saved_plan_that_would_not_give_the_same_is_refused(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    saved, request = saved_plan(planner), RouteRequest(prompt=PROMPT)
    [expert] = saved.experts
    edited = replace(saved, experts=(replace(expert, weight=0.5),))
    for plan, asked, why in (
        (
            saved,
            replace(request, config=EngineConfig(dtype="bf16")),
            "was made with --dtype float32",
        ),
        (edited, request, "was edited"),
    ):
        with pytest.raises(IncompatibleError, match=f"the plan {why}"):
            planner.replay(plan, asked)
    for wanted in (replace(request, base_alone=True), replace(request, force=(named("acme/x"),))):
        with pytest.raises(UsageError, match="already determines"):
            planner.replay(saved, wanted)
    with pytest.raises(UsageError, match="forced and excluded"):
        planner.replay(saved, replace(request, exclude=(Reference.parse("acme/sorting"),)))
    user_home.trust.revoke(make_key("acme").public.key_id)
    with pytest.raises(RevokedError):
        planner.replay(saved, request)


def test_a_saved_plan_of_what_is_not_installed_names_it(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    saved = saved_plan(planner, force=(named("acme/plurals"), named("acme/sorting")))
    user_home.store.remove(user_home.store.find(Reference.parse("acme/plurals")))
    with pytest.raises(NotFoundError, match=r"acme/plurals@1\.0\.0 .* not installed") as caught:
        planner.replay(saved, RouteRequest(prompt=PROMPT))
    assert "expertctl install acme/plurals@1.0.0" in caught.value.hint


def test_a_saved_plan_of_an_expert_with_another_content_names_it(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    saved = saved_plan(planner)
    [expert] = saved.experts
    other = replace(saved, experts=(replace(expert, content_digest=Digest("9" * 64)),))
    with pytest.raises(DigestError, match=r"acme/sorting@1\.0\.0 .* sha256:999999999999…"):
        planner.replay(other, RouteRequest(prompt=PROMPT))


def test_an_expert_that_was_signed_anew_is_used_and_named(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.trust_keys("bob")
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    saved = saved_plan(planner)
    user_home.install(package_factory.package("acme/sorting", key="bob", **SORTING))
    [now] = user_home.store.list_experts()
    [before] = saved.experts
    assert now.content_digest == before.content_digest
    assert now.package_digest != before.package_digest
    planned = planner.replay(saved, RouteRequest(prompt=PROMPT))
    assert refs(planned) == ["acme/sorting@1.0.0"]
    [warning] = planned.warnings
    assert "acme/sorting@1.0.0 was signed again after the plan was saved" in warning
    assert str(now.package_digest) in warning
    assert str(before.package_digest) in warning
    assert planner.replay(planned.result.plan, RouteRequest(prompt=PROMPT)).warnings == ()


def test_a_saved_plan_of_a_damaged_expert_names_it(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    saved = saved_plan(planner)
    damage(user_home, "acme/sorting")
    with pytest.raises(DigestError, match=r"acme/sorting@1\.0\.0: expert\.json"):
        planner.replay(saved, RouteRequest(prompt=PROMPT))


@pytest.mark.parametrize("edit", [{"ref": "acme/other@1.0.0"}, {"kind": "ia3"}])
def test_a_saved_plan_that_says_something_else_of_its_experts_was_edited(
    edit: dict[str, Any], user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    saved = saved_plan(planner)
    [expert] = saved.experts
    edited = replace(saved, experts=(replace(expert, **edit),))
    with pytest.raises(IncompatibleError, match="it was edited"):
        planner.replay(edited, RouteRequest(prompt=PROMPT))


def test_a_saved_plan_in_another_order_was_edited(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    user_home.install(
        package_factory.package("acme/sorting", **SORTING),
        package_factory.package("acme/plurals", **PLURALS),
    )
    saved = saved_plan(planner, force=(named("acme/plurals"), named("acme/sorting")))
    edited = replace(saved, experts=saved.experts[::-1])
    with pytest.raises(IncompatibleError, match="the plan was edited"):
        planner.replay(edited, RouteRequest(prompt=PROMPT))


def test_a_saved_plan_with_requirements_is_repeated_in_its_order(
    user_home: HomeFixture, package_factory: PackageFactory, planner: Planner
) -> None:
    needy = package_factory.package(
        "acme/sorting", composition={"requires": ["acme/plurals@^1"]}, **SORTING
    )
    user_home.install(package_factory.package("acme/plurals", **PLURALS), needy)
    saved = saved_plan(planner)
    assert [e.ref for e in saved.experts] == ["acme/plurals@1.0.0", "acme/sorting@1.0.0"]
    user_home.install(package_factory.package("acme/plurals", "1.1.0", **PLURALS))
    again = planner.replay(saved, RouteRequest(prompt="Guten Morgen")).result.plan
    assert (again.identity, [e.ref for e in again.experts]) == (
        saved.identity,
        [e.ref for e in saved.experts],
    )
