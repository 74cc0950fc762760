"""``--base`` takes a name or a folder, in every command that has it."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from expertctl.cli.engine import resolve_base
from expertctl.errors import ConflictError, NotFoundError
from expertctl.reference import DEMO_BASE
from expertctl.settings import Home, Settings
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base, write_lora
from tests.gguf_files import write_gguf

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

COMMANDS = ("run:route", "run:run", "chat:chat", "serve:serve", "evaluation:evaluate",
            "bench:bench", "bench_moe:bench_moe")  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(Home(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_base(tmp_path / "models" / "mine", layers=1, hidden=16, heads=2, kv_heads=1)


def ask(wanted: str | None, settings: Settings) -> str | None:
    return resolve_base(wanted, settings, as_json=False)


def test_without_the_option_no_base_is_named(settings: Settings) -> None:
    assert ask(None, settings) is None
    assert not settings.home.bases.exists()


def test_in_a_new_home_the_demo_is_there_as_soon_as_it_is_named(tmp_path: Path) -> None:
    settings = Settings(Home(tmp_path / "home"), encoder="lexical")
    assert ask(DEMO_BASE, settings) == DEMO_BASE
    assert Store(settings.home.store).list_experts()
    bases = BaseStore(settings.home.bases)
    bases.remove(bases.find(DEMO_BASE))
    with pytest.raises(NotFoundError, match="no base is called"):
        ask(DEMO_BASE, settings)


def test_a_folder_that_was_never_added_is_added_where_it_is(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(str(folder), settings) == "mine"
    [base] = BaseStore(settings.home.bases).list_bases()
    assert (base.name, base.path, base.copied) == ("mine", folder, False)
    assert capsys.readouterr().err.splitlines() == [
        "registered the base mine; `expertctl base remove mine` unregisters it",
        "the starter pack was not installed; `--base starter/base` installs it",
    ]


def test_after_a_folder_in_a_new_home_its_base_answers_and_the_demo_comes_when_it_is_named(
    settings: Settings, folder: Path, expertctl: CommandRunner, home: Path
) -> None:
    said = expertctl("route", "Hello", "--base", folder)
    assert "the starter pack was not installed" in said.err
    assert expertctl("list", "--json").document["experts"] == []
    later = expertctl("route", "Sort these numbers: 3, 1, 2", "--json")
    assert later.document["plan"]["base"] == "mine"
    assert later.err == ""
    again = expertctl("route", "Hello", "--base", DEMO_BASE, "--json")
    assert again.document["plan"]["base"] == DEMO_BASE
    assert "installed the starter pack: " in again.err
    assert expertctl("route", "Hello", "--json").document["plan"]["base"] == "mine"


def test_in_a_home_with_a_base_another_folder_says_nothing_of_the_starter_pack(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    BaseStore(settings.home.bases).add(folder)
    other = write_base(tmp_path / "other", layers=1, hidden=16, heads=2, kv_heads=1, seed=4)
    assert ask(str(other), settings) == "other"
    assert "starter" not in capsys.readouterr().err


@pytest.mark.parametrize(("wanted", "width"), [("mine", 16), ("./mine", 32)])
def test_build_takes_a_known_name_first_and_a_folder_by_its_path(
    wanted: str, width: int, expertctl: CommandRunner, home: Path, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The adapter fits the base that is meant, and none of another width."""
    BaseStore(Home(home).bases).add(folder)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    beside = write_base(Path("mine"), layers=1, hidden=32, heads=2, kv_heads=1)
    write_lora(Path("lora"), folder if width == 16 else beside)
    assert expertctl("build", "lora", "--base", wanted, "-o", "x.expert").exit_code == 0
    other = "./mine" if wanted == "mine" else "mine"
    assert f"hidden size {width}" in expertctl("build", "lora", "--base", other, exit_code=8).err


def test_a_folder_that_was_added_is_known_by_its_name_and_not_added_again(
    settings: Settings, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BaseStore(settings.home.bases).add(folder, name="acme/mine")
    assert ask(str(folder), settings) == ask("acme/mine", settings) == "acme/mine"
    assert len(BaseStore(settings.home.bases).list_bases()) == 1
    assert capsys.readouterr().err == ""


def test_a_folder_does_not_replace_another_base_of_its_name(
    settings: Settings, folder: Path, tmp_path: Path
) -> None:
    bases = BaseStore(settings.home.bases)
    kept = bases.add_copy(folder)
    other = write_base(tmp_path / "other" / "mine", layers=1, hidden=16, heads=2, kv_heads=1)
    for place in (folder, other):
        with pytest.raises(ConflictError, match="the name mine is taken") as caught:
            ask(str(place), settings)
        assert f"expertctl base add {place} --name" in caught.value.hint
    assert bases.list_bases() == [kept]
    bases.check(kept)


@pytest.mark.parametrize("wanted", ["", " ", "nobody/knows", "./nowhere", "~nobody-there/x"])
def test_neither_a_name_nor_a_folder_is_not_found(wanted: str, settings: Settings) -> None:
    with pytest.raises(NotFoundError, match="no base is called"):
        ask(wanted, settings)


def test_a_folder_without_a_base_is_told_what_it_lacks(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        ask(str(tmp_path), settings)
    assert BaseStore(settings.home.bases).list_bases() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_with_a_base_says_that_it_takes_a_folder(command: str) -> None:
    module, _, name = command.partition(":")
    function = getattr(import_module(f"expertctl.cli.{module}"), name)
    told = inspect.signature(function).parameters["base"].annotation.__metadata__[0]
    assert told.metavar == "NAME|DIR"
    assert "folder" in told.help


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_gguf_file_answers_as_its_folder(
    kind: str, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    dtype = "bfloat16" if kind == "BF16" else "float32"
    folder = write_base(tmp_path / "folder", arch="llama", dtype=dtype)
    file = write_gguf(tmp_path / "file.gguf", folder, kind=kind)
    options = ("--greedy", "--max-tokens", 12, "--json", "Hello")
    texts = [
        expertctl("run", "--base", place, "--no-experts", *options).document["text"]
        for place in (folder, file)
    ]
    assert texts[0] == texts[1]
    assert texts[0]
    (known,) = [
        base for base in BaseStore(tmp_path / "home" / "bases").list_bases() if base.is_derived
    ]
    assert known.source == file
    shown = expertctl("base", "list").out
    assert str(file) in shown


def test_a_package_is_built_for_a_gguf_file_that_was_added(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / "home"))
    folder = write_base(tmp_path / "folder", intermediate=64)
    file = write_gguf(tmp_path / "file.gguf", folder, kind="Q8_0")
    lora = write_lora(tmp_path / "lora", folder)
    words = ("build", lora, "-o", tmp_path / "my.expert", "--base", file)
    refused = expertctl(*words, "--description", "An example.", "--license", "MIT", exit_code=3)
    assert f"expertctl base add {file}" in refused.err
    expertctl("base", "add", file)
    expertctl(*words, "--description", "An example.", "--license", "MIT")
    expertctl("install", tmp_path / "my.expert", "--allow-unsigned")
    answer = expertctl("run", "--base", "file", "--expert", "local/lora", "--max-tokens", 4, "Hi")
    assert answer.out
    expertctl("base", "add", folder)
    misfit = expertctl(
        *("run", "--base", "folder", "--expert", "local/lora", "--max-tokens", 4, "Hi"), exit_code=4
    )
    assert "--allow-base-mismatch" in misfit.err
    allowed = expertctl(
        *("run", "--base", "folder", "--expert", "local/lora", "--max-tokens", 4),
        *("--allow-base-mismatch", "Hi"),
    )
    assert "base mismatch allowed: the weights differ" in allowed.err
