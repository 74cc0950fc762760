"""Which base answers, as the contract orders it: named, of the experts, set, newest, the demo."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from expertctl.errors import NotFoundError
from expertctl.install.installer import read_starter_manifest
from expertctl.package.base_model import read_base
from expertctl.reference import DEMO_BASE, Reference
from expertctl.routing.base_choice import BaseSelector
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.settings import Home, Settings
from tests.factories import write_base
from tests.gpt2_base import write_gpt2
from tests.store.fixtures import HomeFixture, PackageFactory, fast, package_factory, user_home

__all__ = ["fast", "package_factory", "user_home"]

PROMPT = "Sort these numbers in ascending order: 3, 1, 2"
SORTING = {"description": "Sorts numbers in ascending order.", "routing": {"keywords": ["sort"]}}
PLURALS = {"description": "Writes plurals of English nouns.", "routing": {"keywords": ["plural"]}}


@dataclass(frozen=True)
class BaseChoiceHome:
    """A home with the demo, and what a person asks of it."""

    user_home: HomeFixture
    package_factory: PackageFactory
    folder: Path

    def add(self, name: str, *, seed: int) -> Path:
        directory = write_base(
            self.folder / name, layers=2, hidden=16, heads=2, kv_heads=1, seed=seed
        )
        self.user_home.bases.add(directory, name=name)
        return directory

    def expert(self, name: str, base: Path, **manifest: object) -> None:
        facts = read_base(base)
        self.user_home.install(
            self.package_factory.package(name, base_dir=base, base=facts, **manifest)
        )

    def planner(self, setting: str | None = None) -> Planner:
        settings = Settings(Home(self.user_home.root), encoder="lexical", base=setting)
        return Planner.open(settings)

    def ask(
        self,
        prompt: str = PROMPT,
        *,
        expert: str | None = None,
        base: str | None = None,
        setting: str | None = None,
        alone: bool = False,
    ) -> PlannedPrompt:
        force = () if expert is None else (ForcedExpert(Reference.parse(expert), 1.0),)
        request = RouteRequest(prompt=prompt, force=force, base_alone=alone)
        return self.planner(setting).plan(request, base=base)


@pytest.fixture
def base_home(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> BaseChoiceHome:
    """The demo with an expert that sorts, as a new home has it."""
    user_home.trust_keys("acme")
    user_home.bases.add(package_factory.base_dir, name=DEMO_BASE)
    user_home.install(package_factory.package("acme/sorting", **SORTING))
    return BaseChoiceHome(user_home, package_factory, tmp_path)


def test_the_demo_has_the_name_that_the_starter_pack_gives_it() -> None:
    assert read_starter_manifest().base.name == DEMO_BASE


def test_in_a_new_home_the_demo_answers_with_its_experts(base_home: BaseChoiceHome) -> None:
    planned = base_home.ask()
    assert planned.base.name == DEMO_BASE
    assert [expert.ref for expert in planned.experts] == ["acme/sorting@1.0.0"]


def test_a_real_base_that_was_added_answers_instead_of_the_demo(base_home: BaseChoiceHome) -> None:
    base_home.add("real", seed=3)
    assert base_home.ask("Hello").base.name == "real"
    assert base_home.ask(alone=True).base.name == "real"


def test_experts_of_the_demo_pull_no_answer_to_it_and_the_note_says_how_to_get_them(
    base_home: BaseChoiceHome,
) -> None:
    base_home.add("real", seed=3)
    planned = base_home.ask(PROMPT)
    assert (planned.base.name, planned.experts) == ("real", ())
    [candidate] = planned.result.candidates
    assert candidate.is_ineligible
    assert "made for" in candidate.reason
    [*_, note] = planned.result.notes
    assert "the closest is acme/sorting@1.0.0, made for tiny-base" in note
    assert "`--expert acme/sorting@1.0.0` uses it on its own base" in note


def test_an_expert_of_the_demo_that_is_named_answers_on_the_demo(base_home: BaseChoiceHome) -> None:
    base_home.add("real", seed=3)
    planned = base_home.ask(expert="acme/sorting")
    assert planned.base.name == DEMO_BASE
    assert [expert.ref for expert in planned.experts] == ["acme/sorting@1.0.0"]


def test_the_demo_answers_with_its_experts_when_it_is_named(base_home: BaseChoiceHome) -> None:
    base_home.add("real", seed=3)
    planned = base_home.ask(base=DEMO_BASE)
    assert (planned.base.name, len(planned.experts)) == (DEMO_BASE, 1)


def test_the_demo_answers_when_a_person_sets_it(base_home: BaseChoiceHome) -> None:
    base_home.add("real", seed=3)
    planned = base_home.ask(setting=DEMO_BASE)
    assert (planned.base.name, len(planned.experts)) == (DEMO_BASE, 1)


def test_of_two_real_bases_the_newest_answers_unless_another_is_set(
    base_home: BaseChoiceHome,
) -> None:
    base_home.add("older", seed=3)
    base_home.add("newer", seed=4)
    assert base_home.ask("Hello").base.name == "newer"
    assert base_home.ask("Hello", setting="older").base.name == "older"
    assert base_home.ask("Hello", setting="older", base="newer").base.name == "newer"


def test_the_demo_added_again_is_still_no_rival(base_home: BaseChoiceHome) -> None:
    base_home.add("real", seed=3)
    base_home.user_home.bases.add(base_home.package_factory.base_dir, name=DEMO_BASE)
    assert base_home.ask("Hello").base.name == "real"


def test_an_expert_of_another_real_base_that_suits_the_prompt_brings_its_base(
    base_home: BaseChoiceHome,
) -> None:
    older = base_home.add("older", seed=3)
    base_home.add("newer", seed=4)
    base_home.expert("acme/plurals", older, **PLURALS)
    plural = "Write plurals of English nouns: dog, ox"
    assert base_home.ask(plural).base.name == "older"
    assert base_home.ask(plural, setting="newer").base.name == "older"
    assert base_home.ask("Hello").base.name == "newer"
    assert base_home.ask("Hello", setting="older").base.name == "older"


def test_an_expert_that_fits_two_bases_answers_on_the_one_that_is_set(
    base_home: BaseChoiceHome,
) -> None:
    older = base_home.add("older", seed=3)
    base_home.expert("acme/plurals", older, **PLURALS)
    base_home.user_home.bases.add(older, name="the-same-again")
    assert base_home.ask(expert="acme/plurals").base.name == "the-same-again"
    assert base_home.ask(expert="acme/plurals", setting="older").base.name == "older"


def test_a_setting_that_names_no_base_is_an_error_that_names_the_setting(
    base_home: BaseChoiceHome,
) -> None:
    with pytest.raises(NotFoundError, match="the setting base: no base is called 'gone'") as caught:
        base_home.ask("Hello", setting="gone")
    assert "expertctl config set base" in caught.value.hint
    assert base_home.ask("Hello", setting="gone", base=DEMO_BASE).base.name == DEMO_BASE


def test_a_base_is_named_by_its_folder_in_the_option_and_in_the_setting(
    base_home: BaseChoiceHome,
) -> None:
    folder = base_home.add("older", seed=3)
    base_home.add("newer", seed=4)
    assert base_home.ask("Hello", base=str(folder)).base.name == "older"
    assert base_home.ask("Hello", setting=f"{folder}/../older/").base.name == "older"


def test_a_base_that_only_transformers_runs_comes_behind_those_that_run_here(
    base_home: BaseChoiceHome, tmp_path: Path
) -> None:
    base_home.add("real", seed=3)
    base_home.user_home.bases.add(write_gpt2(tmp_path / "gpt2"))
    rule = base_home.planner().base_selector
    assert [base.name for base in rule.list_by_preference()] == ["real", "gpt2", DEMO_BASE]
    assert [base.name for base in rule.list_by_preference(engine="transformers")] == [
        "gpt2",
        "real",
        DEMO_BASE,
    ]


def test_without_any_base_there_is_no_default(user_home: HomeFixture) -> None:
    assert BaseSelector(user_home.bases).find_default() is None
    assert BaseSelector(user_home.bases, "anything").find_default() is None


def test_one_rule_serves_planning_and_the_default_of_a_server(base_home: BaseChoiceHome) -> None:
    base_home.add("older", seed=3)
    base_home.add("newer", seed=4)
    for setting in (None, "older", DEMO_BASE):
        planner = base_home.planner(setting)
        alone = planner.plan(RouteRequest(prompt="?", base_alone=True))
        default = planner.base_selector.find_default()
        assert default is not None
        assert alone.base == replace(default)
