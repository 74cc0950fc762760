"""A version that a registry gives another content, over real sockets: refused, or accepted by name.

Attack 113: after an install, with a lock file on a fresh machine, with a remembered index.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

from expertctl.package.write import write_package
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.hostile_registry import HostileRegistry, run_hostile_registry
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    build_template,
)
from tests.store.fixtures import HomeFixture, make_key

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

TRUST, USAGE = 5, 2
ACCEPT = "--accept-changed"
REF = "acme/one@1.0.0"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


def version(
    template: PackageTemplate, text: str, number: str = "1.0.0", key: str = "acme"
) -> InMemoryPackage:
    return template.make_package(
        "acme/one", number, key=make_key(key), files={"README.md": text.encode()}
    )


def written(file: Path, parcel: InMemoryPackage) -> Path:
    write_package(file, parcel.layout, lambda digest: BytesIO(parcel.blobs[digest]))
    return file


@dataclass(frozen=True)
class ChangedVersionScene:
    """A registry with one version, and a home in whose project that version is wanted."""

    hostile_registry: HostileRegistry
    before: InMemoryPackage
    after: InMemoryPackage
    user_home: HomeFixture
    expertctl: CommandRunner
    template: PackageTemplate

    def refuses(self, *words: str) -> str:
        """A command ends with 5, tells both contents with who signed each, and changes nothing."""
        experts = self.user_home.store.list_experts()
        said = self.expertctl(*words, "--json", exit_code=TRUST)
        error = json.loads(said.out)["error"]
        assert error["code"] == "changed"
        for parcel in (self.before, self.after):
            assert str(parcel.content_digest) in error["message"]
        assert f"signed by {make_key('acme').public.key_id}" in error["message"]
        assert f"{ACCEPT} {REF}" in error["hint"]
        assert self.user_home.store.list_experts() == experts
        return str(error["message"])

    def content(self) -> list[str]:
        return [str(expert.content_digest) for expert in self.user_home.store.list_experts()]


@pytest.fixture
def scene(
    home: Path,
    template: PackageTemplate,
    tmp_path: Path,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ChangedVersionScene]:
    before, after = version(template, "first"), version(template, "second")
    with run_hostile_registry(before) as hostile_registry:
        user_home = HomeFixture(home)
        user_home.trust.add_registry(hostile_registry.known)
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        monkeypatch.setenv("EXPERT_REGISTRY", hostile_registry.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        Path("experts.toml").write_text('[experts]\n"acme/one" = "1.0.0"\n')
        yield ChangedVersionScene(hostile_registry, before, after, user_home, expertctl, template)


@pytest.mark.parametrize(
    "words",
    [["install"], ["install", "--locked"], ["install", "acme/one"], ["install", REF], ["update"],
     ["lock"]],
    ids=" ".join,
)  # fmt: skip
def test_an_installed_version_that_changed_is_refused(
    scene: ChangedVersionScene, words: list[str]
) -> None:
    scene.expertctl("install")
    scene.hostile_registry.publish(scene.after)
    assert "what is installed has" in scene.refuses(*words)


def test_outdated_and_doctor_report_a_changed_version(scene: ChangedVersionScene) -> None:
    scene.expertctl("install")
    scene.hostile_registry.publish(scene.after)
    [entry] = json.loads(scene.expertctl("outdated", "--json", exit_code=TRUST).out)["experts"]
    assert entry["changed"]
    [notice] = entry["notices"]
    digests = {content["content_digest"] for content in notice["contents"]}
    assert digests == {str(p.content_digest) for p in (scene.before, scene.after)}
    said = scene.expertctl("doctor", "--online", exit_code=TRUST)
    assert f"broken: {REF}: it has another content than before" in said.out


def test_a_changed_version_replaces_the_installed_one_when_it_is_accepted(
    scene: ChangedVersionScene,
) -> None:
    scene.expertctl("install")
    scene.hostile_registry.publish(scene.after)
    said = scene.expertctl("install", ACCEPT, REF)
    assert f"replaced: {REF}" in said.out
    assert scene.content() == [str(scene.after.content_digest)]
    scene.user_home.check_integrity()
    assert str(scene.after.content_digest) in Path("expert.lock").read_text()
    for words in (["install"], ["install", "--locked"], ["update"], ["doctor", "--online"]):
        scene.expertctl(*words)


def test_only_the_version_that_is_named_is_accepted(scene: ChangedVersionScene) -> None:
    scene.expertctl("install")
    scene.hostile_registry.publish(scene.after)
    scene.refuses("install", ACCEPT, "acme/one@1.0.1")
    digest = f"acme/one@{scene.after.package_digest}"
    for text in ("acme/one", "acme/one@^1", f"{scene.hostile_registry.host}/{REF}", digest):
        assert "one exact version" in scene.expertctl("install", ACCEPT, text, exit_code=USAGE).err


def test_what_is_accepted_must_still_be_signed_by_a_key_that_counts(
    scene: ChangedVersionScene,
) -> None:
    scene.expertctl("install")
    scene.hostile_registry.publish(version(scene.template, "second", key="mallory"))
    scene.hostile_registry.signers[REF] = "mallory"
    before = scene.user_home.read_files()
    scene.expertctl("install", ACCEPT, REF, exit_code=TRUST)
    assert scene.user_home.read_files() == before


def test_a_version_that_is_only_remembered_from_an_index_is_refused(
    scene: ChangedVersionScene,
) -> None:
    scene.expertctl("lock")
    Path("expert.lock").unlink()
    scene.hostile_registry.publish(scene.after)
    assert f"{scene.hostile_registry.host}, before, has" in scene.refuses("install")
    scene.refuses("lock")
    scene.refuses("install", REF)
    scene.expertctl("install", ACCEPT, REF)
    assert scene.content() == [str(scene.after.content_digest)]
    scene.expertctl("install")


def test_a_version_that_vanished_and_came_back_as_another_is_refused(
    scene: ChangedVersionScene,
) -> None:
    scene.expertctl("lock")
    Path("expert.lock").unlink()
    scene.hostile_registry.publish(version(scene.template, "other", "0.9.0"))
    scene.expertctl("lock", exit_code=3)
    scene.hostile_registry.publish(scene.after)
    scene.refuses("install")
    scene.hostile_registry.publish(scene.before)
    scene.expertctl("install")


@pytest.mark.parametrize(
    "words",
    [["install"], ["lock"], ["install", "--locked"], ["update"], ["update", "acme/one"],
     ["install", "acme/one"], ["install", REF]],
    ids=" ".join,
)  # fmt: skip
def test_a_lock_file_on_a_fresh_machine_is_not_overruled(
    scene: ChangedVersionScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    scene.expertctl("lock")
    lock = Path("expert.lock").read_text()
    scene.hostile_registry.publish(scene.after)
    fresh = HomeFixture(tmp_path / "second-home")
    fresh.trust.add_registry(scene.hostile_registry.known)
    monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
    said = scene.expertctl(*words, "--json", exit_code=TRUST)
    error = json.loads(said.out)["error"]
    assert f"expert.lock has {scene.before.content_digest}" in error["message"]
    assert (
        f"{scene.hostile_registry.host} has {scene.after.content_digest} (signed by"
        in error["message"]
    )
    assert f"{ACCEPT} {REF}" in error["hint"]
    assert Path("expert.lock").read_text() == lock
    assert fresh.refs() == []
    scene.expertctl("lock", ACCEPT, REF)
    scene.expertctl("install", "--locked")
    assert [e.content_digest for e in fresh.store.list_experts()] == [scene.after.content_digest]


def test_saving_another_expert_does_not_overrule_the_lock_file(
    scene: ChangedVersionScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.expertctl("lock")
    lock = Path("expert.lock").read_text()
    other = scene.template.make_package("acme/two", "1.0.0", key=make_key("acme"))
    scene.hostile_registry.publish(scene.after, other)
    fresh = HomeFixture(tmp_path / "second-home")
    fresh.trust.add_registry(scene.hostile_registry.known)
    monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
    said = scene.expertctl("install", "acme/two", "--save", exit_code=TRUST)
    assert f"expert.lock has {scene.before.content_digest}" in said.err
    assert Path("expert.lock").read_text() == lock
    assert "acme/two" not in Path("experts.toml").read_text()
    assert fresh.refs() == []
    scene.expertctl("install", "acme/two", "--save", ACCEPT, REF)
    assert str(scene.after.content_digest) in Path("expert.lock").read_text()


def test_update_to_another_version_does_not_look_at_what_was_locked(
    scene: ChangedVersionScene,
) -> None:
    Path("experts.toml").write_text('[experts]\n"acme/one" = "^1"\n')
    scene.expertctl("lock")
    scene.hostile_registry.publish(scene.after, version(scene.template, "next", "1.1.0"))
    assert "~ acme/one@1.0.0 -> 1.1.0" in scene.expertctl("update").out


def test_a_locked_range_does_not_drift_to_another_version(scene: ChangedVersionScene) -> None:
    """What was locked changed; the next version would fit, and is not taken silently."""
    Path("experts.toml").write_text('[experts]\n"acme/one" = "^1"\n')
    scene.expertctl("lock")
    scene.hostile_registry.publish(scene.after, version(scene.template, "next", "1.1.0"))
    scene.refuses("install")


def test_update_goes_on_to_a_version_that_never_changed_and_warns_of_the_other(
    scene: ChangedVersionScene,
) -> None:
    Path("experts.toml").write_text('[experts]\n"acme/one" = "^1"\n')
    scene.expertctl("install")
    scene.hostile_registry.publish(scene.after, version(scene.template, "next", "1.1.0"))
    said = scene.expertctl("update")
    assert "~ acme/one@1.0.0 -> 1.1.0" in said.out
    assert f"warning: {REF} has another content than before" in said.err


def test_a_file_does_not_change_an_installed_version(
    scene: ChangedVersionScene, tmp_path: Path
) -> None:
    scene.expertctl("install")
    file = written(tmp_path / "one.expert", scene.after)
    scene.refuses("install", str(file))
    scene.expertctl("install", str(file), ACCEPT, REF)
    assert scene.content() == [str(scene.after.content_digest)]


@pytest.mark.parametrize("form", ["a file", "a file beside a reference", "a set"])
def test_a_file_does_not_overrule_the_lock_file_on_a_fresh_machine(
    scene: ChangedVersionScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    other = scene.template.make_package("acme/two", "1.0.0", key=make_key("acme"))
    scene.hostile_registry.publish(scene.before, other)
    scene.expertctl("lock")
    fresh = HomeFixture(tmp_path / "second-home").trust_keys("acme")
    fresh.trust.add_registry(scene.hostile_registry.known)
    monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
    file = written(tmp_path / "one.expert", scene.after)
    words = ["import" if form == "a set" else "install", str(file)]
    words += ["acme/two"] if form == "a file beside a reference" else []
    if form == "a set":
        elsewhere = HomeFixture(tmp_path / "third-home").trust_keys("acme")
        elsewhere.install(file)
        monkeypatch.setenv("EXPERT_HOME", str(elsewhere.home.root))
        scene.expertctl("export", "acme/one", "-o", tmp_path / "one.experts")
        monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
        words = ["import", str(tmp_path / "one.experts")]
    error = json.loads(scene.expertctl(*words, "--json", exit_code=TRUST).out)["error"]
    assert error["code"] == "changed"
    assert f"expert.lock has {scene.before.content_digest}" in error["message"]
    signed = (
        f"the file has {scene.after.content_digest} (signed by {make_key('acme').public.key_id})"
    )
    assert signed in error["message"]
    assert f"{ACCEPT} {REF}" in error["hint"]
    assert fresh.refs() == []
    scene.expertctl(*words, ACCEPT, "acme/one@1.0.1", exit_code=TRUST)
    scene.expertctl(*words, ACCEPT, REF)
    assert scene.after.content_digest in [e.content_digest for e in fresh.store.list_experts()]


def test_a_file_with_the_locked_content_is_installed(
    scene: ChangedVersionScene, tmp_path: Path
) -> None:
    scene.expertctl("lock")
    scene.user_home.trust_keys("acme")
    scene.expertctl("install", written(tmp_path / "one.expert", scene.before))
    assert scene.content() == [str(scene.before.content_digest)]


def test_an_accepted_replacement_is_taken_back_when_another_package_fails(
    scene: ChangedVersionScene,
) -> None:
    scene.expertctl("install")
    other = scene.template.make_package("acme/two", "1.0.0", key=make_key("acme"))
    scene.hostile_registry.publish(scene.after, other)
    obstacle = next((scene.user_home.home.store / "refs").glob("*/acme")) / "two"
    obstacle.write_text("in the way of the folder of acme/two")
    before = scene.user_home.read_files()
    for refs in (["acme/one", "acme/two"], ["acme/two", "acme/one"]):
        scene.expertctl("install", *refs, ACCEPT, REF, exit_code=1)
        assert scene.user_home.read_files() == before
        scene.user_home.store.check_integrity()
    obstacle.unlink()
    scene.expertctl("install", "acme/one", "acme/two", ACCEPT, REF)
    assert scene.content() == [str(scene.after.content_digest), str(other.content_digest)]
    scene.user_home.check_integrity()
    assert scene.user_home.store.find_garbage().blobs == ()


def test_a_replacement_by_a_file_is_taken_back_with_its_signature(
    scene: ChangedVersionScene, tmp_path: Path
) -> None:
    """The version came from a registry, and stays from there."""
    scene.expertctl("install")
    scene.user_home.trust_keys("acme")
    parcels = [scene.after, scene.template.make_package("acme/two", "1.0.0", key=make_key("acme"))]
    files = [written(tmp_path / f"{number}.expert", p) for number, p in enumerate(parcels)]
    obstacle = scene.user_home.home.store / "refs" / "local" / "acme" / "two"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("in the way of the folder of acme/two")
    before, experts = scene.user_home.read_files(), scene.user_home.store.list_experts()
    scene.expertctl("install", *files, ACCEPT, REF, exit_code=1)
    assert scene.user_home.read_files() == before
    assert scene.user_home.store.list_experts() == experts
