"""A named expert of another base: which base it needs, and what would let it answer."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.errors import BaseMismatchError, NotFoundError
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.settings import Home, Settings
from tests.factories import write_base
from tests.store.fixtures import (
    BASE_NAME,
    HomeFixture,
    PackageFactory,
    fast,
    package_factory,
    user_home,
)

__all__ = ["fast", "package_factory", "user_home"]

NAMED = RouteRequest(prompt="Hello", force=(ForcedExpert(Reference.parse("acme/sql")),))
FLAG = "--allow-base-mismatch"


@pytest.fixture
def planner(user_home: HomeFixture, package_factory: PackageFactory) -> Planner:
    user_home.bases.add(package_factory.base_dir)
    user_home.trust_keys("acme")
    user_home.install(package_factory.package())
    return Planner.open(Settings(Home(user_home.root), encoder="lexical"))


def another(folder: Path, **sizes: int) -> Path:
    return write_base(folder / "mine", layers=1, hidden=16, heads=2, kv_heads=1, **sizes)


def refusal(planner: Planner, base: str | None = None) -> BaseMismatchError:
    with pytest.raises(BaseMismatchError) as caught:
        planner.plan(NAMED, base=base)
    return caught.value


def test_where_its_base_is_here_the_option_that_takes_it_is_named(
    planner: Planner, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_base(tmp_path / "mine", layers=1, hidden=32, heads=2, kv_heads=1))
    error = refusal(planner, base="mine")
    assert error.message == f"acme/sql@1.0.0 was made for {BASE_NAME} (hidden size 16; mine has 32)"
    assert error.hint == f"`--base {BASE_NAME}`, or leave out --base"


def test_the_flag_is_named_where_the_shapes_of_all_modules_agree(
    planner: Planner, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(another(tmp_path, seed=8))
    assert FLAG in refusal(planner, base="mine").hint
    allowed = planner.plan(replace(NAMED, allow_base_mismatch=True), base="mine")
    assert [expert.ref for expert in allowed.experts] == ["acme/sql@1.0.0"]


def test_the_flag_is_named_for_another_architecture_whose_shapes_agree(
    planner: Planner, user_home: HomeFixture, tmp_path: Path
) -> None:
    """The adapter changes q_proj alone, and a wider MLP leaves that as it is."""
    user_home.bases.add(another(tmp_path, intermediate=64))
    error = refusal(planner, base="mine")
    assert error.message.endswith(
        f"was made for {BASE_NAME}, not for mine: the architecture differs"
    )
    assert FLAG in error.hint


def test_without_its_base_the_base_and_the_command_that_adds_it_are_named(
    planner: Planner, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_base(tmp_path / "mine", layers=1, hidden=32, heads=2, kv_heads=1))
    user_home.bases.remove(user_home.bases.find(BASE_NAME))
    error = refusal(planner)
    assert error.message.endswith(f"; {BASE_NAME} is not added here")
    assert error.hint == f"add the base {BASE_NAME} with `expertctl base add DIR`"


def test_without_any_base_a_named_expert_says_which_it_needs(
    planner: Planner, user_home: HomeFixture
) -> None:
    user_home.bases.remove(user_home.bases.find(BASE_NAME))
    with pytest.raises(NotFoundError) as caught:
        planner.plan(NAMED)
    assert caught.value.message == f"no base model is known; acme/sql@1.0.0 needs {BASE_NAME}"
    assert "expertctl base add DIR" in caught.value.hint


def test_a_base_of_a_hub_is_named_with_the_command_that_downloads_it(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    facts = read_base(package_factory.base_dir, name="Acme/Tiny-1B")
    user_home.trust_keys("acme")
    user_home.install(package_factory.package(base=facts, base_dir=package_factory.base_dir))
    user_home.bases.add(write_base(tmp_path / "mine", layers=1, hidden=32, heads=2, kv_heads=1))
    error = refusal(Planner.open(Settings(Home(user_home.root), encoder="lexical")))
    assert error.hint == "`expertctl pull Acme/Tiny-1B`"


def test_experts_of_another_base_are_counted_by_that_base(
    planner: Planner, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_base(tmp_path / "mine", layers=1, hidden=32, heads=2, kv_heads=1))
    result = planner.plan(RouteRequest(prompt="Hello"), base="mine").result
    assert result.other_bases == {BASE_NAME: 1}
    (candidate,) = result.candidates
    assert candidate.other_base == BASE_NAME
    assert candidate.short_reason == f"made for {BASE_NAME} (hidden size 16; mine has 32)"
