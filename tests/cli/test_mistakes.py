"""What people get wrong first, and what they are told."""

from pathlib import Path

import pytest

from expertctl.settings import Home
from expertctl.store.bases import BaseStore
from expertctl.trust.trust_store import TrustStore
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base, write_lora
from tests.registry.live_registry import (
    LiveRegistry,
    PackageWorkspace,
    alice,
    live,
    store_credential,
    tiny_base,
    trust,
    workspace,
)

__all__ = ["alice", "expertctl", "live", "tiny_base", "trust", "workspace"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def test_an_adapter_given_to_base_add_is_called_one(
    base: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    adapter = write_lora(tmp_path / "lora", base)
    error = expertctl("base", "add", adapter, "--json", exit_code=3).document["error"]
    assert error["message"] == f"{adapter} is an adapter, not a base model"
    assert f"`expertctl build {adapter}`" in error["hint"]


def test_a_folder_without_an_adapter_is_told_in_one_line(
    base: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    (tmp_path / "empty").mkdir()
    error = expertctl("build", tmp_path / "empty", "--json", exit_code=3).document["error"]
    assert (
        error["message"]
        == f"{tmp_path}/empty: there is no adapter here: adapter_config.json is missing"
    )
    assert f"`expertctl base add {base}`" in expertctl("build", base, exit_code=3).err


@pytest.mark.parametrize("words", [["build", "lora"], ["init", "lora"], ["base", "remove"]])
def test_an_unknown_base_lists_those_known(
    words: list[str], base: Path, home: Path, tmp_path: Path, expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_lora(tmp_path / "lora", base)
    name = ["nowhere"] if words[0] == "base" else ["--base", "nowhere"]
    assert "none is known yet" in expertctl(*words, *name, exit_code=3).err
    BaseStore(Home(home).bases).add(base, name="Qwen/Qwen3-0.6B")
    BaseStore(Home(home).bases).add(write_base(tmp_path / "b", seed=1), name="smollm2")
    assert (
        "hint: known: Qwen/Qwen3-0.6B, smollm2; `exp" in expertctl(*words, *name, exit_code=3).err
    )
    name[-1] = "smolm2"
    assert "hint: did you mean smollm2? known: " in expertctl(*words, *name, exit_code=3).err


def test_of_many_bases_an_error_names_some(
    base: Path, home: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    for number in range(11):
        BaseStore(Home(home).bases).add(base, name=f"base-{number:02}")
    said = expertctl("base", "remove", "nowhere", exit_code=3).err
    assert "base-06, base-07 and 3 more; " in said


def test_a_key_that_may_not_sign_is_told_of_when_it_signs_and_can_be_granted_more(
    base: Path, home: Path, tmp_path: Path, expertctl: CommandRunner
) -> None:
    BaseStore(Home(home).bases).add(base)
    adapter, package = write_lora(tmp_path / "lora", base), tmp_path / "sql.expert"
    expertctl("keys", "new", "me")
    grant = "`expertctl keys grant me --namespace acme`"
    said = expertctl("build", adapter, "--name", "acme/sql", "-o", package, "--sign", "me")
    assert f"warning: your key me is not trusted for acme/* here; {grant} changes that" in said.err
    assert grant in expertctl("sign", package, "--key", "me").err
    assert grant in expertctl("install", package, exit_code=5).err
    expertctl("keys", "grant", "me", "--namespace", "acme")
    assert "keys grant" not in expertctl("sign", package, "--key", "me").err
    expertctl("install", package)


def test_a_bare_name_is_looked_for_by_search(expertctl: CommandRunner) -> None:
    error = expertctl("install", "sql", "--json", exit_code=3).document["error"]
    assert error["message"] == "sql is not namespace/name, and there is no such file"
    assert error["hint"].startswith("`expertctl search sql` finds experts; ")
    hostile = expertctl("install", "$(reboot)\x1b[31m", "--json", exit_code=3).document["error"]
    assert "search" not in hostile["hint"]
    assert "'$(reboot)'" in expertctl("install", "$(reboot)", exit_code=3).err


@pytest.fixture
def offered(
    live: LiveRegistry,
    alice: str,
    home: Path,
    workspace: PackageWorkspace,
    expertctl: CommandRunner,
) -> LiveRegistry:
    """A registry that is trusted, with acme/sorting and acme/sql on offer."""
    expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    expertctl("publish", workspace.package("acme/sorting"), workspace.package("acme/sql"))
    fingerprint = live.served.registry.index_key.public.key_id
    expertctl("trust", "registry", "add", live.url, "--fingerprint", fingerprint)
    return live


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(
    offered: LiveRegistry, expertctl: CommandRunner
) -> None:
    for wrong in ("acme/sortin", "acme/sortings", "acne/sorting"):
        error = expertctl("install", wrong, "--json", exit_code=3).document["error"]
        assert error["message"].startswith(f"{wrong} is not there: ")
        assert error["hint"] == "did you mean acme/sorting?"


def test_a_name_like_that_of_an_installed_expert_is_suggested_without_a_registry(
    base: Path, workspace: PackageWorkspace, home: Path, expertctl: CommandRunner
) -> None:
    BaseStore(Home(home).bases).add(workspace.base_dir)
    expertctl("install", workspace.package("acme/sorting"))
    said = expertctl("install", "acme/sortin", exit_code=3).err
    assert "no registry is set" in said
    assert "hint: did you mean acme/sorting?" in said


def test_what_may_be_private_is_told_with_the_login(
    offered: LiveRegistry, home: Path, expertctl: CommandRunner
) -> None:
    store_credential(offered, home, offered.served.create_user("bob"))
    for wanted in ("nobody/knows", "acme/other"):
        said = expertctl("install", wanted, exit_code=3).err
        assert f"{offered.host} has no package {wanted} that you may read" in said
        assert f"is private, `expertctl login {offered.host}` first" in said


@pytest.mark.parametrize(
    ("folder", "name", "told"),
    [
        ("ünï-lora", "local/uni-lora", ""),
        ("Straße Łódź", "local/strasse-lodz", ""),
        ("ﬁne_Œuvre²", "local/fine-oeuvre2", ""),
        ("юни-lora", "local/lora", "is what remains of 'юни-lora' in ASCII; set another name"),
        ("模型", "local/expert", "is what remains of '模型' in ASCII"),
    ],
)
def test_a_folder_with_other_letters_gives_a_name_in_ascii(
    folder: str,
    name: str,
    told: str,
    base: Path,
    home: Path,
    tmp_path: Path,
    expertctl: CommandRunner,
) -> None:
    BaseStore(Home(home).bases).add(base)
    adapter = write_lora(tmp_path / folder, base)
    said = expertctl("build", adapter, "-o", tmp_path / "x.expert", "--json")
    assert said.document["ref"] == f"{name}@0.1.0"
    assert told in said.err
    assert ("in ASCII" in said.err) == bool(told)
    assert "in ASCII" not in expertctl("init", adapter, "--name", "acme/x").err


@pytest.mark.parametrize(
    "words", [["list"], ["keys", "new", "me"], ["config", "set", "offline", "y"]]
)
@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("file", "that is a file"),
        ("file/below", "file is not a folder"),
        ("/dev/null/x", "/dev/null is not a folder"),
        ("a" * 300, "File name too long"),
    ],
)
def test_a_home_that_cannot_exist_is_told_by_every_command(
    words: list[str], place: str, problem: str, tmp_path: Path, expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERT_HOME", str(tmp_path / place))
    said = expertctl(*words, exit_code=1).err
    assert problem in said
    assert "\n\nhint: EXPERT_HOME is " in said
    assert "set it to a writable folder" in said


def test_a_home_that_cannot_be_made_is_told_with_the_way_out(
    base: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_HOME", "/proc/nowhere")
    said = expertctl("base", "add", base, exit_code=1).err
    assert said.endswith("hint: EXPERT_HOME is /proc/nowhere: set it to a writable folder\n")


def test_a_grant_is_kept_where_trust_is(home: Path, expertctl: CommandRunner) -> None:
    expertctl("keys", "new", "me")
    said = expertctl("keys", "grant", "me", "--namespace", "acme").out
    assert "trusted for acme/*, local/*" in said
    assert TrustStore(Home(home).trust).find_key("me").namespaces == ("acme", "local")


@pytest.mark.all
def test_a_folder_with_an_adapter_where_an_expert_is_meant_leads_to_build(
    tmp_path: Path, expertctl: CommandRunner
) -> None:
    folder = tmp_path / "upper"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    for words in (["install", folder], ["run", "--expert", folder, "hello"]):
        said = expertctl(*words, exit_code=8)
        assert f"`expertctl build {folder}` packs it" in said.err
