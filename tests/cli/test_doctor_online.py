"""`doctor --online` asks about every package, whatever one registry does, over real sockets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from expertctl.reference import Digest
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.hostile_registry import (
    HostileRegistry,
    ReceivedRequest,
    Reply,
    make_reply,
    run_hostile_registry,
)
from tests.registry_server.publishing.package_fixtures import PackageTemplate, build_template
from tests.store.fixtures import HomeFixture, make_key

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

BROKEN, TRUST, NETWORK = 1, 5, 6
NAMES = ("acme/one", "acme/three", "acme/two")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@dataclass(frozen=True)
class DoctorScene:
    """A registry with three packages, all of them installed."""

    hostile_registry: HostileRegistry
    user_home: HomeFixture
    expertctl: CommandRunner

    def answer(self, name: str, said: Reply | Callable[[ReceivedRequest], Reply]) -> None:
        said_to = said if callable(said) else lambda _: said
        self.hostile_registry.overrides[f"/tuf/targets/index/{name}.json"] = said_to

    @property
    def host(self) -> str:
        return self.user_home.trust.read().registries[0].host

    def lines(self, *, code: int) -> list[str]:
        """What `doctor --online` says of packages, one line each, without the hints."""
        said = self.expertctl("doctor", "--online", exit_code=code).out.splitlines()
        return [line for line in said if line.startswith(("unchecked: ", "broken: ", "note: "))
                and "base toy/" not in line and "its base" not in line]  # fmt: skip

    def subjects(self, kind: str, *, code: int) -> list[str]:
        findings = self.expertctl("doctor", "--online", "--json", exit_code=code).document[
            "findings"
        ]
        return [finding["subject"] for finding in findings if finding[kind]]

    def named(self, *names: str) -> list[str]:
        return [f"{self.host}/{name}" for name in names]


@pytest.fixture
def scene(
    home: Path,
    template: PackageTemplate,
    tmp_path: Path,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[DoctorScene]:
    parcels = [template.make_package(name, key=make_key("acme")) for name in NAMES]
    with run_hostile_registry(*parcels) as hostile_registry:
        user_home = HomeFixture(home)
        user_home.trust.add_registry(hostile_registry.known)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("EXPERT_REGISTRY", hostile_registry.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        expertctl("install", *NAMES)
        yield DoctorScene(hostile_registry, user_home, expertctl)


def test_where_all_registries_answer_nothing_is_unchecked(scene: DoctorScene) -> None:
    said = scene.expertctl("doctor", "--online", "--json").document
    assert said["unchecked"] is False
    assert not any(finding["unchecked"] for finding in said["findings"])


@pytest.mark.parametrize(
    "said",
    [make_reply(body=b"{"), make_reply(body=b"[]"), make_reply(404), make_reply(401),
     make_reply(403), make_reply(429),
     make_reply(500), make_reply(302, Location="http://169.254.169.254/x"),
     make_reply(body=b"x", length=99)],
    ids=["cut", "no object", "404", "401", "403", "429", "500", "leads elsewhere", "ends early"],
)  # fmt: skip
def test_one_index_that_cannot_be_had_is_one_line_and_ends_nothing(
    scene: DoctorScene, said: Reply
) -> None:
    scene.hostile_registry.edit_release = lambda release: replace(release, yanked="wrong joins")
    scene.hostile_registry.revision += 1
    scene.answer("acme/one", said)
    lines = scene.lines(code=NETWORK)
    [unchecked] = [line for line in lines if line.startswith("unchecked: ")]
    assert unchecked.startswith(f"unchecked: {scene.host}/acme/one: ")
    yanked = [f"note: acme/{name}@1.0.0: it was yanked: wrong joins" for name in ("three", "two")]
    assert [line for line in lines if "yanked: wrong" in line] == yanked
    assert scene.subjects("unchecked", code=NETWORK) == scene.named("acme/one")


def test_every_package_of_a_registry_that_is_down_is_reported(scene: DoctorScene) -> None:
    scene.hostile_registry.hostile_server.stop()
    lines = scene.lines(code=NETWORK)
    assert [line.split(": ")[1] for line in lines] == scene.named(*NAMES)
    said = scene.expertctl("doctor", "--online", "--json", exit_code=NETWORK).document
    assert said["healthy"] is True
    assert said["unchecked"] is True


def test_a_changed_version_counts_for_more_than_an_index_that_cannot_be_had(
    scene: DoctorScene,
) -> None:
    scene.answer("acme/one", make_reply(503))
    scene.answer("acme/two", make_reply(body=b"{"))
    other = Digest.compute(b"other content")
    scene.hostile_registry.edit_release = lambda release: replace(release, content_digest=other)
    scene.hostile_registry.revision += 1
    assert scene.subjects("unchecked", code=TRUST) == scene.named("acme/one", "acme/two")
    assert scene.subjects("untrusted", code=TRUST) == ["acme/three@1.0.0"]


def test_an_index_that_another_key_signed_is_a_matter_of_trust_and_ends_nothing(
    scene: DoctorScene,
) -> None:
    scene.answer("acme/one", make_reply(500))
    scene.hostile_registry.key = make_key("mallory")
    scene.hostile_registry.revision += 1
    assert scene.subjects("untrusted", code=TRUST) == scene.named("acme/three", "acme/two")
    assert scene.subjects("unchecked", code=TRUST) == scene.named(*NAMES)


def test_what_cannot_be_read_of_an_earlier_answer_ends_nothing(scene: DoctorScene) -> None:
    registries = scene.user_home.home.registries
    [path] = registries.glob("*/index/*/acme/one.json")
    path.write_bytes(b"damaged")
    scene.hostile_registry.hostile_server.stop()
    assert scene.subjects("unchecked", code=NETWORK) == scene.named(*NAMES)
    assert scene.subjects("broken", code=NETWORK) == [scene.host]


def test_a_trust_file_that_cannot_be_read_is_reported_beside_all_else(scene: DoctorScene) -> None:
    scene.user_home.home.trust.write_bytes(b"{")
    assert scene.subjects("unchecked", code=NETWORK) == ["registries"]
    assert scene.subjects("broken", code=NETWORK) == [str(scene.user_home.home.trust)]


def test_a_refusal_over_many_lines_stays_one(scene: DoctorScene) -> None:
    problems = b'{"payload": 1, "payloadType": 2, "signatures": 3, "more": "\\u001b[2J"}'
    scene.answer("acme/one", make_reply(body=problems))
    [line] = scene.lines(code=NETWORK)
    assert line.startswith(f"unchecked: {scene.host}/acme/one: ")
    assert "\x1b" not in line
