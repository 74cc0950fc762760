"""``--engine transformers`` from the outside: a foreign base from `base add` to its answer."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from expertctl.errors import format_install_command
from expertctl.routing import plan as plan_module
from tests.cli.command_runner import CommandRunner, expertctl
from tests.engine.compat_models import CompatModel, copy_adapter, write_model
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["expertctl", "fast", "user_home"]

pytestmark = pytest.mark.all

PROMPT = "Sort: 3, 1, 2"
QUIET = ("--engine", "transformers", "--greedy", "--max-tokens", "6")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> CompatModel:
    return write_model(tmp_path_factory.mktemp("gpt2"), "gpt2", seed=3)


@pytest.fixture
def installed(
    gpt2: CompatModel, expertctl: CommandRunner, user_home: HomeFixture, tmp_path: Path
) -> CompatModel:
    """Nothing but commands: base add, keys new, build, sign, install."""
    lora = copy_adapter(gpt2.get_adapter("lora"), tmp_path / "my-lora")
    package = tmp_path / "my.expert"
    assert "--engine transformers" in expertctl("base", "add", gpt2.directory).err
    expertctl("keys", "new", "me", "--namespace", "acme")
    named = ("--name", "acme/sorting", "--version", "1.0.0", "--license", "MIT")
    told = ("--description", "Sorts numbers", "--base", "gpt2", "-o", package)
    expertctl("build", lora, *named, *told)
    expertctl("sign", package, "--key", "me")
    expertctl("install", package)
    return gpt2


def test_the_whole_way_gives_a_text_and_says_what_made_it(
    installed: CompatModel, expertctl: CommandRunner
) -> None:
    said = expertctl("run", PROMPT, "--expert", "acme/sorting", *QUIET, "--json")
    document = said.document
    assert [expert["ref"] for expert in document["plan"]["experts"]] == ["acme/sorting@1.0.0"]
    assert document["plan"]["base"] == "gpt2"
    assert document["warnings"][0].startswith("transformers and PEFT generated the text, slowly")
    assert "is an estimate" in said.err
    shown = expertctl("run", PROMPT, "--expert", "acme/sorting", *QUIET)
    assert shown.out.rstrip("\n") == document["text"].rstrip("\n")


def test_without_the_engine_the_base_is_refused_with_the_way_out(
    installed: CompatModel, expertctl: CommandRunner
) -> None:
    for words in (("run", PROMPT), ("run", PROMPT, "--expert", "acme/sorting"), ("route", PROMPT)):
        said = expertctl(*words, exit_code=4)
        assert "does not run the base gpt2" in said.err
        assert "--engine transformers" in said.err


def test_a_routed_plan_is_saved_and_run_by_the_same_engine(
    installed: CompatModel, expertctl: CommandRunner, tmp_path: Path
) -> None:
    words = ("--expert", "acme/sorting", "--engine", "transformers", "--json")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(expertctl("route", PROMPT, *words).document))
    document = expertctl("run", PROMPT, "--plan", plan, *QUIET, "--json").document
    saved = json.loads(plan.read_text())["plan"]
    assert document["plan"]["identity"] == saved["identity"]


def test_without_its_libraries_the_extra_is_named(
    installed: CompatModel, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plan_module, "version", absent)
    said = expertctl("run", PROMPT, *QUIET, exit_code=3)
    assert format_install_command("compat") in said.err
