"""``install`` from a registry, ``lock``, ``outdated``, ``update``: as a person types them."""

from pathlib import Path

import pytest

from tests.cli.command_runner import CommandRunner, expertctl
from tests.install.fixtures import PublishingRegistry, publisher, template
from tests.store.fixtures import HomeFixture, PackageFactory, package_factory

__all__ = ["expertctl", "package_factory", "publisher", "template"]

pytestmark = pytest.mark.all


@pytest.fixture
def user_home(
    home: Path, publisher: PublishingRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HomeFixture:
    """A house that knows the market, and an empty working folder."""
    found = HomeFixture(home)
    found.trust.add_registry(publisher.known)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EXPERT_REGISTRY", publisher.host)
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    return found


def wants(text: str) -> None:
    Path("experts.toml").write_text(f"[experts]\n{text}\n")


def test_a_reference_is_installed_and_written_to_the_users_list(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    said = expertctl("install", "acme/sql@^1", "--json")
    (entry,) = said.document["installed"]
    assert (entry["ref"], entry["registry"]) == ("acme/sql@1.0.0", publisher.host)
    assert (user_home.root / "experts.toml").read_text() == '[experts]\n"acme/sql" = "^1"\n'
    assert not Path("experts.toml").exists()
    again = expertctl("install", "--offline", "acme/sql@1.0.0")
    assert "already installed: acme/sql@1.0.0" in again.out
    expertctl("remove", "acme/sql")
    assert '"acme/sql"' not in (user_home.root / "experts.toml").read_text()


def test_references_and_files_are_installed_together(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    publisher: PublishingRegistry,
    package_factory: PackageFactory,
) -> None:
    publisher.publish("acme/sql@1.0.0")
    user_home.trust_keys("acme")
    said = expertctl("install", "acme/sql", package_factory.package("acme/file"))
    assert said.out.count("installed: ") == 2


def test_a_project_is_installed_locked_and_checked(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/low@1.0.0")
    publisher.publish("acme/top@1.0.0", requires=["acme/low@^1"])
    wants('"acme/top" = "^1"')
    expertctl("install", "--locked", exit_code=3)
    said = expertctl("lock", "--json")
    assert said.document["changes"] == ["+ acme/low@1.0.0", "+ acme/top@1.0.0"]
    assert user_home.refs() == []
    assert "up to date" in expertctl("lock", "--check").out
    assert "installed: acme/low@1.0.0" in expertctl("install").out
    expertctl("install", "--locked", "--offline")
    wants('"acme/top" = "^2"')
    expertctl("lock", "--check", exit_code=4)
    expertctl("install", "--locked", exit_code=4)
    assert "there is 1.0.0" in expertctl("lock", exit_code=3).err


def test_a_project_file_is_changed_only_by_save(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    publisher.publish("acme/new@1.0.0")
    wants('"acme/sql" = "*"')
    said = expertctl("install", "acme/new")
    assert "--save adds what" in said.err
    assert "acme/new" not in Path("experts.toml").read_text()
    expertctl("install", "--save", "acme/new@^1")
    assert '"acme/new" = "^1"' in Path("experts.toml").read_text()
    assert 'name = "acme/new"' in Path("expert.lock").read_text()
    expertctl("install", "--locked")


@pytest.mark.parametrize("flag", ["--locked", "--save"])
def test_a_flag_of_projects_needs_one(
    expertctl: CommandRunner, user_home: HomeFixture, flag: str
) -> None:
    assert "needs an experts.toml" in expertctl("install", flag, "acme/sql", exit_code=2).err


def test_calls_that_contradict_themselves_are_usage_errors(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    wants('"acme/sql" = "*"')
    file = package_factory.package("acme/file")

    def refused(*words: object, code: int = 2) -> str:
        return str(expertctl(*words, "--json", exit_code=code).document["error"]["message"])

    locked = "--locked installs what is locked: no files, no --save"
    assert refused("install", "--locked", file) == locked
    assert refused("install", "--locked", "--save", "acme/sql") == locked
    assert refused("install", "--save") == "--save needs references"
    assert refused("install", "acme/sql@latest") == "'latest' is not a version constraint"
    neither = "no-such-thing is not namespace/name, and there is no such file"
    assert refused("install", "no-such-thing", code=3) == neither
    assert refused("update", "acme/sql@^2") == "acme/sql@^2: `update` takes names without versions"
    here = Path.cwd()
    not_there = f"acme/other is not in {here / 'experts.toml'}"
    assert refused("update", "acme/other", code=3) == not_there
    Path("experts.toml").unlink()
    assert refused("install") == "nothing to install"
    assert refused("lock", code=3) == f"there is no experts.toml in {here}"
    assert user_home.refs() == []


def test_what_is_outdated_is_shown_and_updated(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    wants('"acme/sql" = "^1"')
    expertctl("install")
    assert "the one expert of the list is up to date" in expertctl("outdated").err
    publisher.publish("acme/sql@1.1.0")
    publisher.publish("acme/sql@2.0.0")
    publisher.yank("acme/sql@1.0.0", "wrong")
    said = expertctl("outdated")
    assert said.out.splitlines()[1].split() == ["acme/sql", "1.0.0", "1.1.0", "2.0.0", "yanked"]
    assert "acme/sql@1.0.0 was yanked: wrong" in said.err
    (entry,) = expertctl("outdated", "--json").document["experts"]
    assert (entry["wanted"], entry["newest"], entry["yanked"]) == ("1.1.0", "2.0.0", "wrong")
    assert expertctl("update", "acme/sql").out == "~ acme/sql@1.0.0 -> 1.1.0\n"
    assert "acme/sql@1.0.0 was yanked: wrong; it is still" in expertctl("update", "--json").err
    assert user_home.refs() == ["acme/sql@1.0.0", "acme/sql@1.1.0"]


def test_a_version_that_waits_is_shown(
    expertctl: CommandRunner,
    user_home: HomeFixture,
    publisher: PublishingRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher.publish("acme/sql@1.0.0")
    expertctl("install", "acme/sql")
    publisher.publish("acme/sql@1.1.0")
    monkeypatch.setenv("EXPERT_MINIMUM_RELEASE_AGE", "3d")
    assert "1.1.0 waits until 20" in expertctl("outdated").out
    (entry,) = expertctl("outdated", "--json").document["experts"]
    assert (entry["wanted"], entry["waiting"]["version"]) == ("1.0.0", "1.1.0")
    assert "waits until" in expertctl("install", "acme/sql@1.1.0", exit_code=3).err
    monkeypatch.setenv("EXPERT_MINIMUM_RELEASE_AGE_EXCLUDE", "acme")
    expertctl("install", "acme/sql@1.1.0")


def test_offline_means_no_network(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    assert "was never asked" in expertctl("install", "--offline", "acme/sql", exit_code=3).err
    expertctl("install", "acme/sql")
    publisher.publish("acme/sql@1.1.0")
    expertctl("install", "--offline", "acme/sql")
    assert user_home.refs() == ["acme/sql@1.0.0"]
    expertctl("outdated", "--offline")


def test_a_project_of_a_stranger_is_refused_with_the_exit_code_of_trust(
    expertctl: CommandRunner, user_home: HomeFixture
) -> None:
    Path("experts.toml").write_text(
        '[experts]\n"acme/sql" = "*"\n[registries]\nacme = "hub.example"\n'
    )
    said = expertctl("install", exit_code=5)
    assert "index key of hub.example is not known" in said.err
    Path("experts.toml").write_text('[trust]\nall = "yes"\n')
    expertctl("install", exit_code=8)


@pytest.mark.parametrize("by_digest", [False, True])
def test_an_exact_install_says_that_update_keeps_it_and_how_to_follow(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry, by_digest: bool
) -> None:
    parcel = publisher.publish("acme/sql@1.0.0")
    exact = str(parcel.package_digest) if by_digest else "1.0.0"
    said = expertctl("install", f"acme/sql@{exact}")
    told = (
        f"{user_home.root / 'experts.toml'} pins {exact}: `expertctl update` keeps it, "
        "`expertctl install acme/sql` follows newer versions"
    )
    assert told in said.err
    assert told in expertctl("install", f"acme/sql@{exact}", "--json").document["notes"]
    publisher.publish("acme/sql@1.1.0")
    expertctl("update")
    assert user_home.refs() == ["acme/sql@1.0.0"]
    assert " pins " not in expertctl("install", "acme/sql").err
    publisher.publish("acme/sql@1.2.0")
    expertctl("update")
    assert user_home.refs() == ["acme/sql@1.0.0", "acme/sql@1.1.0", "acme/sql@1.2.0"]


def test_an_exact_version_that_is_saved_in_a_project_is_told_with_save(
    expertctl: CommandRunner, user_home: HomeFixture, publisher: PublishingRegistry
) -> None:
    publisher.publish("acme/sql@1.0.0")
    wants("")
    assert " pins " not in expertctl("install", "acme/sql@1.0.0").err
    said = expertctl("install", "--save", "acme/sql@1.0.0")
    assert "`expertctl install acme/sql --save` follows newer versions" in said.err
    assert " pins " not in expertctl("install", "--save", "acme/sql@^1").err
