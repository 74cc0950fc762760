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
from tests.cli.commands import Commands, expertctl
from tests.install.liar import Liar, lying
from tests.registry_server.publishing.parcels import Parcel, Template, make_template
from tests.store.shop import House, a_key

__all__ = ["expertctl"]

TRUST, USAGE = 5, 2
ACCEPT = "--accept-changed"
REF = "acme/one@1.0.0"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


def version(template: Template, text: str, number: str = "1.0.0", key: str = "acme") -> Parcel:
    return template.parcel("acme/one", number, key=a_key(key), files={"README.md": text.encode()})


def written(file: Path, parcel: Parcel) -> Path:
    write_package(file, parcel.layout, lambda digest: BytesIO(parcel.blobs[digest]))
    return file


@dataclass(frozen=True)
class Scene:
    """A registry with one version, and a home in whose project that version is wanted."""

    liar: Liar
    before: Parcel
    after: Parcel
    house: House
    expertctl: Commands
    template: Template

    def refuses(self, *words: str) -> str:
        """A command ends with 5, tells both contents with who signed each, and changes nothing."""
        experts = self.house.store.experts()
        said = self.expertctl(*words, "--json", code=TRUST)
        error = json.loads(said.out)["error"]
        assert error["code"] == "changed"
        for parcel in (self.before, self.after):
            assert str(parcel.content_digest) in error["message"]
        assert f"signed by {a_key('acme').public.key_id}" in error["message"]
        assert f"{ACCEPT} {REF}" in error["hint"]
        assert self.house.store.experts() == experts
        return str(error["message"])

    def content(self) -> list[str]:
        return [str(expert.content_digest) for expert in self.house.store.experts()]


@pytest.fixture
def scene(
    home: Path,
    template: Template,
    tmp_path: Path,
    expertctl: Commands,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Scene]:
    before, after = version(template, "first"), version(template, "second")
    with lying(before) as liar:
        house = House(home)
        house.trust.add_registry(liar.known)
        (tmp_path / "work").mkdir()
        monkeypatch.chdir(tmp_path / "work")
        monkeypatch.setenv("EXPERT_REGISTRY", liar.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        Path("experts.toml").write_text('[experts]\n"acme/one" = "1.0.0"\n')
        yield Scene(liar, before, after, house, expertctl, template)


@pytest.mark.parametrize(
    "words",
    [["install"], ["install", "--locked"], ["install", "acme/one"], ["install", REF], ["update"],
     ["lock"]],
    ids=" ".join,
)  # fmt: skip
def test_an_installed_version_that_changed_is_refused(scene: Scene, words: list[str]) -> None:
    scene.expertctl("install")
    scene.liar.publish(scene.after)
    assert "what is installed has" in scene.refuses(*words)


def test_outdated_and_doctor_report_a_changed_version(scene: Scene) -> None:
    scene.expertctl("install")
    scene.liar.publish(scene.after)
    [entry] = json.loads(scene.expertctl("outdated", "--json", code=TRUST).out)["experts"]
    assert entry["changed"]
    [notice] = entry["notices"]
    digests = {content["content_digest"] for content in notice["contents"]}
    assert digests == {str(p.content_digest) for p in (scene.before, scene.after)}
    said = scene.expertctl("doctor", "--online", code=TRUST)
    assert f"broken: {REF}: it has another content than before" in said.out


def test_a_changed_version_replaces_the_installed_one_when_it_is_accepted(scene: Scene) -> None:
    scene.expertctl("install")
    scene.liar.publish(scene.after)
    said = scene.expertctl("install", ACCEPT, REF)
    assert f"replaced: {REF}" in said.out
    assert scene.content() == [str(scene.after.content_digest)]
    scene.house.check()
    assert str(scene.after.content_digest) in Path("expert.lock").read_text()
    for words in (["install"], ["install", "--locked"], ["update"], ["doctor", "--online"]):
        scene.expertctl(*words)


def test_only_the_version_that_is_named_is_accepted(scene: Scene) -> None:
    scene.expertctl("install")
    scene.liar.publish(scene.after)
    scene.refuses("install", ACCEPT, "acme/one@1.0.1")
    digest = f"acme/one@{scene.after.package_digest}"
    for text in ("acme/one", "acme/one@^1", f"{scene.liar.host}/{REF}", digest):
        assert "one exact version" in scene.expertctl("install", ACCEPT, text, code=USAGE).err


def test_what_is_accepted_must_still_be_signed_by_a_key_that_counts(scene: Scene) -> None:
    scene.expertctl("install")
    scene.liar.publish(version(scene.template, "second", key="mallory"))
    scene.liar.signers[REF] = "mallory"
    before = scene.house.files()
    scene.expertctl("install", ACCEPT, REF, code=TRUST)
    assert scene.house.files() == before


def test_a_version_that_is_only_remembered_from_an_index_is_refused(scene: Scene) -> None:
    scene.expertctl("lock")
    Path("expert.lock").unlink()
    scene.liar.publish(scene.after)
    assert f"{scene.liar.host}, before, has" in scene.refuses("install")
    scene.refuses("lock")
    scene.refuses("install", REF)
    scene.expertctl("install", ACCEPT, REF)
    assert scene.content() == [str(scene.after.content_digest)]
    scene.expertctl("install")


def test_a_version_that_vanished_and_came_back_as_another_is_refused(scene: Scene) -> None:
    scene.expertctl("lock")
    Path("expert.lock").unlink()
    scene.liar.publish(version(scene.template, "other", "0.9.0"))
    scene.expertctl("lock", code=3)
    scene.liar.publish(scene.after)
    scene.refuses("install")
    scene.liar.publish(scene.before)
    scene.expertctl("install")


@pytest.mark.parametrize(
    "words",
    [["install"], ["lock"], ["install", "--locked"], ["update"], ["update", "acme/one"],
     ["install", "acme/one"], ["install", REF]],
    ids=" ".join,
)  # fmt: skip
def test_a_lock_file_on_a_fresh_machine_is_not_overruled(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    scene.expertctl("lock")
    lock = Path("expert.lock").read_text()
    scene.liar.publish(scene.after)
    fresh = House(tmp_path / "second-home")
    fresh.trust.add_registry(scene.liar.known)
    monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
    said = scene.expertctl(*words, "--json", code=TRUST)
    error = json.loads(said.out)["error"]
    assert f"expert.lock has {scene.before.content_digest}" in error["message"]
    assert f"{scene.liar.host} has {scene.after.content_digest} (signed by" in error["message"]
    assert f"{ACCEPT} {REF}" in error["hint"]
    assert Path("expert.lock").read_text() == lock
    assert fresh.refs() == []
    scene.expertctl("lock", ACCEPT, REF)
    scene.expertctl("install", "--locked")
    assert [e.content_digest for e in fresh.store.experts()] == [scene.after.content_digest]


def test_saving_another_expert_does_not_overrule_the_lock_file(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.expertctl("lock")
    lock = Path("expert.lock").read_text()
    other = scene.template.parcel("acme/two", "1.0.0", key=a_key("acme"))
    scene.liar.publish(scene.after, other)
    fresh = House(tmp_path / "second-home")
    fresh.trust.add_registry(scene.liar.known)
    monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
    said = scene.expertctl("install", "acme/two", "--save", code=TRUST)
    assert f"expert.lock has {scene.before.content_digest}" in said.err
    assert Path("expert.lock").read_text() == lock
    assert "acme/two" not in Path("experts.toml").read_text()
    assert fresh.refs() == []
    scene.expertctl("install", "acme/two", "--save", ACCEPT, REF)
    assert str(scene.after.content_digest) in Path("expert.lock").read_text()


def test_update_to_another_version_does_not_look_at_what_was_locked(scene: Scene) -> None:
    Path("experts.toml").write_text('[experts]\n"acme/one" = "^1"\n')
    scene.expertctl("lock")
    scene.liar.publish(scene.after, version(scene.template, "next", "1.1.0"))
    assert "~ acme/one@1.0.0 -> 1.1.0" in scene.expertctl("update").out


def test_a_locked_range_does_not_drift_to_another_version(scene: Scene) -> None:
    """What was locked changed; the next version would fit, and is not taken silently."""
    Path("experts.toml").write_text('[experts]\n"acme/one" = "^1"\n')
    scene.expertctl("lock")
    scene.liar.publish(scene.after, version(scene.template, "next", "1.1.0"))
    scene.refuses("install")


def test_update_goes_on_to_a_version_that_never_changed_and_warns_of_the_other(
    scene: Scene,
) -> None:
    Path("experts.toml").write_text('[experts]\n"acme/one" = "^1"\n')
    scene.expertctl("install")
    scene.liar.publish(scene.after, version(scene.template, "next", "1.1.0"))
    said = scene.expertctl("update")
    assert "~ acme/one@1.0.0 -> 1.1.0" in said.out
    assert f"warning: {REF} has another content than before" in said.err


def test_a_file_does_not_change_an_installed_version(scene: Scene, tmp_path: Path) -> None:
    scene.expertctl("install")
    file = written(tmp_path / "one.expert", scene.after)
    scene.refuses("install", str(file))
    scene.expertctl("install", str(file), ACCEPT, REF)
    assert scene.content() == [str(scene.after.content_digest)]


@pytest.mark.parametrize("form", ["a file", "a file beside a reference", "a set"])
def test_a_file_does_not_overrule_the_lock_file_on_a_fresh_machine(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    other = scene.template.parcel("acme/two", "1.0.0", key=a_key("acme"))
    scene.liar.publish(scene.before, other)
    scene.expertctl("lock")
    fresh = House(tmp_path / "second-home").trusting("acme")
    fresh.trust.add_registry(scene.liar.known)
    monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
    file = written(tmp_path / "one.expert", scene.after)
    words = ["import" if form == "a set" else "install", str(file)]
    words += ["acme/two"] if form == "a file beside a reference" else []
    if form == "a set":
        elsewhere = House(tmp_path / "third-home").trusting("acme")
        elsewhere.install(file)
        monkeypatch.setenv("EXPERT_HOME", str(elsewhere.home.root))
        scene.expertctl("export", "acme/one", "-o", tmp_path / "one.experts")
        monkeypatch.setenv("EXPERT_HOME", str(fresh.home.root))
        words = ["import", str(tmp_path / "one.experts")]
    error = json.loads(scene.expertctl(*words, "--json", code=TRUST).out)["error"]
    assert error["code"] == "changed"
    assert f"expert.lock has {scene.before.content_digest}" in error["message"]
    signed = f"the file has {scene.after.content_digest} (signed by {a_key('acme').public.key_id})"
    assert signed in error["message"]
    assert f"{ACCEPT} {REF}" in error["hint"]
    assert fresh.refs() == []
    scene.expertctl(*words, ACCEPT, "acme/one@1.0.1", code=TRUST)
    scene.expertctl(*words, ACCEPT, REF)
    assert scene.after.content_digest in [e.content_digest for e in fresh.store.experts()]


def test_a_file_with_the_locked_content_is_installed(scene: Scene, tmp_path: Path) -> None:
    scene.expertctl("lock")
    scene.house.trusting("acme")
    scene.expertctl("install", written(tmp_path / "one.expert", scene.before))
    assert scene.content() == [str(scene.before.content_digest)]


def test_an_accepted_replacement_is_taken_back_when_another_package_fails(scene: Scene) -> None:
    scene.expertctl("install")
    other = scene.template.parcel("acme/two", "1.0.0", key=a_key("acme"))
    scene.liar.publish(scene.after, other)
    obstacle = next((scene.house.home.store / "refs").glob("*/acme")) / "two"
    obstacle.write_text("in the way of the folder of acme/two")
    before = scene.house.files()
    for refs in (["acme/one", "acme/two"], ["acme/two", "acme/one"]):
        scene.expertctl("install", *refs, ACCEPT, REF, code=1)
        assert scene.house.files() == before
        scene.house.store.check_integrity()
    obstacle.unlink()
    scene.expertctl("install", "acme/one", "acme/two", ACCEPT, REF)
    assert scene.content() == [str(scene.after.content_digest), str(other.content_digest)]
    scene.house.check()
    assert scene.house.store.garbage().blobs == ()


def test_a_replacement_by_a_file_is_taken_back_with_its_signature(
    scene: Scene, tmp_path: Path
) -> None:
    """The version came from a registry, and stays from there."""
    scene.expertctl("install")
    scene.house.trusting("acme")
    parcels = [scene.after, scene.template.parcel("acme/two", "1.0.0", key=a_key("acme"))]
    files = [written(tmp_path / f"{number}.expert", p) for number, p in enumerate(parcels)]
    obstacle = scene.house.home.store / "refs" / "local" / "acme" / "two"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("in the way of the folder of acme/two")
    before, experts = scene.house.files(), scene.house.store.experts()
    scene.expertctl("install", *files, ACCEPT, REF, code=1)
    assert scene.house.files() == before
    assert scene.house.store.experts() == experts
