"""``--base`` takes a name or a folder, in every command that has it."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from expertctl.cli.named_base import known_base
from expertctl.errors import ConflictError, NotFoundError
from expertctl.routing.base_choice import DEMO
from expertctl.settings import Home, Settings
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from tests.factories import write_base

COMMANDS = ("run:route", "run:run", "chat:chat", "serve:serve", "evaluating:evaluate",
            "bench:bench", "bench_moe:bench_moe")  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(Home(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_base(tmp_path / "models" / "mine", layers=1, hidden=16, heads=2, kv_heads=1)


def ask(wanted: str | None, settings: Settings) -> str | None:
    return known_base(wanted, settings, as_json=False)


def test_without_the_option_no_base_is_named(settings: Settings) -> None:
    assert ask(None, settings) is None
    assert not settings.home.bases.exists()


def test_in_a_new_home_the_demo_is_there_as_soon_as_it_is_named(tmp_path: Path) -> None:
    settings = Settings(Home(tmp_path / "home"), encoder="lexical")
    assert ask(DEMO, settings) == DEMO
    assert Store(settings.home.store).experts()
    bases = BaseStore(settings.home.bases)
    bases.remove(bases.find(DEMO))
    with pytest.raises(NotFoundError, match="no base is called"):
        ask(DEMO, settings)


def test_a_folder_that_was_never_added_is_added_where_it_is(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(str(folder), settings) == "mine"
    [base] = BaseStore(settings.home.bases).bases()
    assert (base.name, base.path, base.copied) == ("mine", folder, False)
    told = capsys.readouterr().err
    assert told == "added the base mine; `expertctl base remove mine` forgets it\n"


def test_a_folder_that_was_added_is_known_by_its_name_and_not_added_again(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BaseStore(settings.home.bases).add(folder, name="acme/mine")
    assert ask(str(folder), settings) == ask("acme/mine", settings) == "acme/mine"
    assert len(BaseStore(settings.home.bases).bases()) == 1
    assert capsys.readouterr().err == ""


def test_a_folder_does_not_replace_another_base_of_its_name(
    settings: Settings, folder: Path, tmp_path: Path
) -> None:
    bases = BaseStore(settings.home.bases)
    kept = bases.add_copy(folder)
    other = write_base(tmp_path / "other" / "mine", layers=1, hidden=16, heads=2, kv_heads=1)
    for place in (folder, other):
        with pytest.raises(ConflictError, match="another base is called mine") as caught:
            ask(str(place), settings)
        assert f"expertctl base add {place} --name" in caught.value.hint
    assert bases.bases() == [kept]
    bases.check(kept)


@pytest.mark.parametrize("wanted", ["", " ", "nobody/knows", "./nowhere", "~nobody-there/x"])
def test_neither_a_name_nor_a_folder_is_not_found(wanted: str, settings: Settings) -> None:
    with pytest.raises(NotFoundError, match="no base is called"):
        ask(wanted, settings)


def test_a_folder_without_a_base_is_told_what_it_lacks(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        ask(str(tmp_path), settings)
    assert BaseStore(settings.home.bases).bases() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_with_a_base_says_that_it_takes_a_folder(command: str) -> None:
    module, _, name = command.partition(":")
    function = getattr(import_module(f"expertctl.cli.{module}"), name)
    told = inspect.signature(function).parameters["base"].annotation.__metadata__[0]
    assert told.metavar == "NAME|DIR"
    assert "folder" in told.help
