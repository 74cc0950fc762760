"""Versions that were yanked after an install: which one is used, and what is said of them.

Attack 113, over real sockets.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command_runner import CommandRunner, expertctl
from tests.install.fixtures import PublishingRegistry, run_publishing_registry
from tests.registry_server.publishing.package_fixtures import PackageTemplate, build_template
from tests.store.fixtures import HomeFixture

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

PROMPT = "Count the joins of this query"
OLD, NEW = "acme/sql@1.0.0", "acme/sql@1.1.0"


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("template")


@pytest.fixture(scope="session")
def template(bases: Path) -> PackageTemplate:
    return build_template(bases)


@dataclass(frozen=True)
class YankScene:
    """A registry, a home that knows it and has its base, and an empty working folder."""

    publisher: PublishingRegistry
    user_home: HomeFixture
    expertctl: CommandRunner

    def sell(self, *refs: str) -> None:
        for ref in refs:
            self.publisher.publish(ref, routing={"examples": [PROMPT], "keywords": ["joins"]})

    def install_both(self) -> None:
        """Publish two versions, and install one after the other."""
        self.sell(OLD, NEW)
        self.expertctl("install", OLD)
        self.expertctl("install", "acme/sql")

    def routed(self, *words: str) -> str:
        """The expert that answers."""
        [expert] = self.plan(*words)["plan"]["experts"]
        return str(expert["ref"])

    def plan(self, *words: str) -> dict[str, Any]:
        return dict(self.expertctl("route", PROMPT, *words, "--json").document)

    def used(self) -> list[str]:
        experts = self.expertctl("list", "--json").document["experts"]
        return [expert["ref"] for expert in experts if expert["used"]]

    def everywhere(self) -> set[str]:
        """What routing, ``--expert``, `list` and `why` take for acme/sql."""
        [listed] = self.used()
        why = self.expertctl("why", "acme/sql", "--json").document["ref"]
        return {self.routed(), self.routed("--expert", "acme/sql"), listed, why}


@pytest.fixture
def scene(
    home: Path,
    template: PackageTemplate,
    bases: Path,
    tmp_path: Path,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[YankScene]:
    with run_publishing_registry(tmp_path / "registry", template) as running:
        running.create_namespace("acme")
        user_home = HomeFixture(home)
        user_home.trust.add_registry(running.known)
        user_home.bases.add(bases / "base")
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        monkeypatch.setenv("EXPERT_REGISTRY", running.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        yield YankScene(running, user_home, expertctl)


def test_the_newest_installed_version_that_was_not_yanked_is_used(scene: YankScene) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", "acme/sql")
    assert scene.everywhere() == {NEW}
    scene.publisher.yank(NEW, "wrong joins")
    said = scene.expertctl("update")
    assert f"+ {OLD}" in said.out
    assert scene.user_home.refs() == [OLD, NEW]
    assert scene.everywhere() == {OLD}


def test_what_a_registry_said_last_counts_offline(
    scene: YankScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.install_both()
    scene.publisher.yank(NEW, "wrong joins")
    assert scene.everywhere() == {NEW}
    scene.expertctl("outdated")
    monkeypatch.setenv("EXPERT_OFFLINE", "1")
    assert scene.everywhere() == {OLD}


def test_a_yank_that_was_taken_back_counts_no_more(scene: YankScene) -> None:
    from expertctl.reference import PackageName
    from registry_server.publishing.releases import unyank_release

    scene.install_both()
    scene.publisher.yank(NEW, "wrong joins")
    scene.expertctl("outdated")
    assert scene.everywhere() == {OLD}
    registry, name = scene.publisher.live.served.registry, PackageName("acme", "sql")
    unyank_release(registry, scene.publisher.identity, name=name, version="1.1.0")
    scene.expertctl("outdated")
    assert scene.everywhere() == {NEW}


def test_a_yanked_version_that_is_alone_is_used_and_told(scene: YankScene) -> None:
    scene.sell(OLD)
    scene.expertctl("install", "acme/sql")
    scene.publisher.yank(OLD, "wrong joins")
    scene.expertctl("outdated")
    assert scene.everywhere() == {OLD}
    warning = f"{OLD} is used although it was yanked: wrong joins; `expertctl install acme/sql`"
    assert any(text.startswith(warning) for text in scene.plan()["warnings"])
    assert f"warning: {warning}" in scene.expertctl("route", PROMPT).err
    assert "yanked" in scene.expertctl("list").out
    assert "it was yanked: wrong joins" in scene.expertctl("why", "acme/sql").out


def test_a_yanked_version_that_is_named_is_used_and_told(scene: YankScene) -> None:
    scene.install_both()
    scene.publisher.yank(OLD, "wrong joins")
    scene.expertctl("update")
    assert scene.routed("--expert", OLD) == OLD
    assert any(f"{OLD} is used" in text for text in scene.plan("--expert", OLD)["warnings"])
    assert not any("yanked" in text for text in scene.plan()["warnings"])


def test_a_yanked_version_that_is_locked_is_used_in_its_project_only(
    scene: YankScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", "acme/sql")
    Path("experts.toml").write_text('[experts]\n"acme/sql" = "1.0.0"\n')
    scene.expertctl("install")
    scene.publisher.yank(OLD, "wrong joins")
    scene.expertctl("outdated")
    assert scene.everywhere() == {OLD}
    [told] = [text for text in scene.plan()["warnings"] if "yanked" in text]
    assert f"{Path('expert.lock').absolute()} names it" in told
    [pinned] = [e for e in scene.expertctl("list", "--json").document["experts"] if e["used"]]
    assert pinned["flags"] == ["yanked", "pinned"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert scene.everywhere() == {NEW}


def test_an_older_version_that_the_lock_file_names_is_used(scene: YankScene) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", "acme/sql")
    Path("experts.toml").write_text('[experts]\n"acme/sql" = "~1.0"\n')
    scene.expertctl("install")
    assert scene.everywhere() == {OLD}
    [other] = [c for c in scene.plan()["candidates"] if c["ref"] == NEW]
    assert other["reason"] == f"{Path('expert.lock').absolute()} names {OLD}"


def test_a_version_that_was_installed_exactly_is_used_until_another_is_asked_for(
    scene: YankScene,
) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", "acme/sql")
    scene.expertctl("install", OLD)
    assert scene.everywhere() == {OLD}
    scene.expertctl("install", "acme/sql")
    assert scene.everywhere() == {NEW}


def test_a_damaged_lock_file_is_ignored_and_told(scene: YankScene) -> None:
    scene.sell(NEW)
    scene.expertctl("install", "acme/sql")
    Path("experts.toml").write_text("[experts]\n")
    Path("expert.lock").write_text("<<<<<<< ours\n")
    assert scene.everywhere() == {NEW}
    for words in (["list"], ["why", "acme/sql"], ["route", PROMPT]):
        assert "expert.lock is ignored, as it cannot be read" in scene.expertctl(*words).err


def test_the_list_marks_versions_that_are_yanked_and_unused(scene: YankScene) -> None:
    scene.install_both()
    scene.publisher.yank(OLD, "wrong joins")
    scene.expertctl("outdated")
    old, new = (line.split() for line in scene.expertctl("list").out.splitlines()[1:])
    assert old[-2:] == ["yanked", "unused"]
    assert "unused" not in new
    document = json.loads(scene.expertctl("list", "--json").out)["experts"]
    assert [(e["yanked"], e["used"]) for e in document] == [("wrong joins", False), (None, True)]
    assert f"not used if no version is named: {NEW} is" in scene.expertctl("why", OLD).out


def test_outdated_never_shows_a_yanked_version_as_the_newest(scene: YankScene) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", "acme/sql")
    scene.publisher.yank(NEW, "wrong joins")
    row = scene.expertctl("outdated").out.splitlines()[1].split()
    assert row == ["acme/sql", "1.1.0", "1.0.0", "1.0.0", "yanked"]
    scene.publisher.yank(OLD, "worse joins")
    row = scene.expertctl("outdated").out.splitlines()[1].split()
    assert row == ["acme/sql", "1.1.0", "1.1.0", "-", "yanked"]
    [entry] = scene.expertctl("outdated", "--json").document["experts"]
    assert (entry["newest"], entry["yanked"]) == (None, "wrong joins")


def test_outdated_compares_the_version_that_is_used(scene: YankScene) -> None:
    scene.install_both()
    scene.publisher.yank(NEW, "wrong joins")
    said = scene.expertctl("outdated")
    row = said.out.splitlines()[1].split()
    assert row == ["acme/sql", "1.0.0", "1.0.0", "1.0.0", "1.1.0", "yanked"]
    assert f"`expertctl remove {NEW}` removes it" in said.err
    assert "current" not in said.err
    [entry] = scene.expertctl("outdated", "--json").document["experts"]
    assert entry["yanked"] is None
    assert [(n["kind"], n["ref"], n["in_use"]) for n in entry["notices"]] == [
        ("yanked", NEW, False)
    ]


def test_every_update_tells_of_a_yanked_version_that_stays_installed(scene: YankScene) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", "acme/sql")
    scene.publisher.yank(NEW, "wrong joins")
    for _ in range(2):
        said = scene.expertctl("update")
        told = f"warning: {NEW} was yanked: wrong joins; it is still installed beside"
        assert said.err.count(told) == 1
        assert f"`expertctl remove {NEW}` removes it" in said.err
        assert "everything is up to date" not in said.err
    [notice] = scene.expertctl("update", "--json").document["notices"]
    assert (notice["kind"], notice["ref"], notice["in_use"]) == ("yanked", NEW, False)
    scene.expertctl("remove", NEW)
    assert "everything is up to date" in scene.expertctl("update").err


def test_an_update_that_keeps_a_yanked_version_says_so(scene: YankScene) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", OLD)
    scene.publisher.yank(OLD, "wrong joins")
    for _ in range(2):
        said = scene.expertctl("update")
        assert f"warning: {OLD} was yanked: wrong joins; `expertctl update` takes" in said.err
        assert "everything is up to date" not in said.err
    [notice] = scene.expertctl("update", "--json").document["notices"]
    assert (notice["kind"], notice["ref"], notice["in_use"]) == ("yanked", OLD, True)


def test_a_requirement_takes_an_installed_version_that_was_not_yanked(scene: YankScene) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", OLD)
    scene.expertctl("install", NEW)
    scene.publisher.yank(NEW, "wrong joins")
    scene.publisher.publish("acme/top@1.0.0", requires=["acme/sql@^1"])
    document = scene.expertctl("install", "acme/top", "--json").document
    assert [notice["ref"] for notice in document["notices"]] == [NEW]
    assert not document["notices"][0]["in_use"]


def test_who_installs_a_version_that_will_not_be_used_is_told(scene: YankScene) -> None:
    scene.sell(OLD, NEW)
    scene.expertctl("install", OLD)
    Path("experts.toml").write_text('[experts]\n"acme/sql" = "1.0.0"\n')
    scene.expertctl("lock")
    told = f"{NEW} is used only if named; otherwise {OLD} is, `expertctl why {OLD}` says why"
    document = scene.expertctl("install", NEW, "--json").document
    assert told in document["notes"]
    why = scene.expertctl("why", OLD).out
    assert f"used if no version is named; pinned by {Path('expert.lock').absolute()}" in why
    assert not scene.expertctl("install", NEW, "--json").document["notes"]
