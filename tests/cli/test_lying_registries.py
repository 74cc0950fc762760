"""``expertctl install`` from registries that lie: the right exit code, and nothing changes."""

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import pytest

from expertctl.reference import FileDigest, PackageName
from expertctl.registry.errors import RetrySchedule
from expertctl.registry.index_document import IndexDocument, KeyEntry, sign_index
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.hostile_registry import (
    TIME,
    HostileRegistry,
    ReceivedRequest,
    RecordedPauses,
    Reply,
    make_reply,
    run_hostile_registry,
)
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    build_template,
)
from tests.store.fixtures import HomeFixture, make_key

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

TRUST, REGISTRY = 5, 6
KEPT = "acme/kept@1.0.0"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sleeps between two tries."""
    patient = RetrySchedule(attempts=2, sleep=RecordedPauses(), jitter=lambda: 1.0)
    monkeypatch.setattr("expertctl.registry.http.RetrySchedule", lambda tell=None: patient)


@dataclass(frozen=True)
class LyingRegistryScene:
    """A registry that may lie, and a home that installed something from it while it did not."""

    hostile_registry: HostileRegistry
    parcel: InMemoryPackage
    user_home: HomeFixture
    expertctl: CommandRunner

    def path(self, what: str) -> str:
        """Where the registry is asked for the index, the manifest, or the largest file."""
        name = self.parcel.name
        match what:
            case "index":
                return f"/tuf/targets/index/{name}.json"
            case "manifest":
                return f"/v2/{name}/manifests/{self.parcel.package_digest}"
            case _:
                return f"/v2/{name}/blobs/{self.file.digest}"

    @property
    def file(self) -> FileDigest:
        return max(self.parcel.layout.layers, key=lambda file: file.size)

    @property
    def bytes(self) -> bytes:
        return self.parcel.blobs[self.file.digest]

    def refuses(self, code: int) -> None:
        """Install; what is in the store stays as it is, and the person is told who it was."""
        before = self.user_home.read_files()
        said = self.expertctl("install", "acme/one", "--json", exit_code=code)
        assert self.user_home.read_files() == before
        assert self.user_home.refs() == [KEPT]
        self.user_home.check_integrity()
        error = said.document["error"]
        assert "acme/one" in error["message"] or self.hostile_registry.host in error["message"], (
            error
        )


@pytest.fixture
def scene(
    home: Path, template: PackageTemplate, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LyingRegistryScene]:
    one = template.make_package(
        "acme/one", key=make_key("acme"), files={"README.md": b"text " * 100_000}
    )
    kept = template.make_package("acme/kept", key=make_key("acme"))
    with run_hostile_registry(one, kept) as hostile_registry:
        user_home = HomeFixture(home)
        user_home.trust.add_registry(hostile_registry.known)
        monkeypatch.setenv("EXPERT_REGISTRY", hostile_registry.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        expertctl("install", "acme/kept")
        yield LyingRegistryScene(hostile_registry, one, user_home, expertctl)


def endless(_: LyingRegistryScene) -> Reply:
    """More than anybody wants, without a length."""
    return chain([make_reply(length=-1)], repeat(bytes(1 << 16), 4096))


def cut_off(_: LyingRegistryScene) -> Reply:
    return make_reply(body=b"{", length=1000)


def of_a_stranger(scene: LyingRegistryScene) -> Reply:
    key = KeyEntry(make_key("acme").public, None)
    document = IndexDocument(scene.parcel.name, 9, TIME, "", (), (key,))
    return make_reply(body=sign_index(document, make_key("stranger")))


def of_another_package(scene: LyingRegistryScene) -> Reply:
    key = KeyEntry(make_key("acme").public, None)
    document = IndexDocument(PackageName.parse("acme/two"), 9, TIME, "", (), (key,))
    return make_reply(body=sign_index(document, scene.hostile_registry.key))


def altered(scene: LyingRegistryScene) -> Reply:
    """Attack 93: the right length, one bit of it another."""
    return make_reply(body=scene.bytes[:-1] + bytes([scene.bytes[-1] ^ 1]))


def too_long(scene: LyingRegistryScene) -> Reply:
    return make_reply(body=scene.bytes + b"more")


def too_short(scene: LyingRegistryScene) -> Reply:
    return make_reply(body=scene.bytes[:-1])


def partial(scene: LyingRegistryScene) -> Reply:
    """Attack 93: a part that nobody asked for."""
    size = len(scene.bytes)
    return make_reply(206, scene.bytes[100:], Content_Range=f"bytes 100-{size - 1}/{size}")


def compressed(scene: LyingRegistryScene) -> Reply:
    return make_reply(body=gzip.compress(scene.bytes), Content_Encoding="gzip")


def inward(_: LyingRegistryScene) -> Reply:
    return make_reply(307, Location="http://169.254.169.254/latest/meta-data")


def in_a_loop(scene: LyingRegistryScene) -> Reply:
    return make_reply(307, Location=scene.path("file"))


def failing(_: LyingRegistryScene) -> Reply:
    return make_reply(500)


@pytest.mark.parametrize(
    ("what", "lie", "code"),
    [
        ("index", of_a_stranger, TRUST),
        ("index", of_another_package, TRUST),
        ("index", cut_off, REGISTRY),
        ("index", endless, REGISTRY),
        ("index", failing, REGISTRY),
        ("index", inward, REGISTRY),
        ("manifest", of_a_stranger, TRUST),
        ("manifest", cut_off, REGISTRY),
        ("manifest", endless, REGISTRY),
        ("manifest", failing, REGISTRY),
        ("file", altered, TRUST),
        ("file", too_long, TRUST),
        ("file", too_short, TRUST),
        ("file", partial, REGISTRY),
        ("file", cut_off, TRUST),
        ("file", endless, TRUST),
        ("file", compressed, TRUST),
        ("file", inward, REGISTRY),
        ("file", in_a_loop, REGISTRY),
        ("file", failing, REGISTRY),
    ],
)
def test_a_lie_is_refused_and_changes_nothing(
    scene: LyingRegistryScene, what: str, lie: Callable[[LyingRegistryScene], Reply], code: int
) -> None:
    """Attacks 93 and 94; once the registry tells the truth, the same command goes through."""
    scene.hostile_registry.overrides[scene.path(what)] = lambda _: lie(scene)
    scene.refuses(code)
    del scene.hostile_registry.overrides[scene.path(what)]
    scene.expertctl("install", "acme/one")
    assert scene.user_home.refs() == [KEPT, "acme/one@1.0.0"]
    scene.user_home.check_integrity()


def test_a_blob_whose_rest_comes_from_another_is_refused(scene: LyingRegistryScene) -> None:
    """Attack 93: it breaks off, and the rest comes from elsewhere under another ETag."""

    def said(request: ReceivedRequest) -> Reply:
        if "range" not in request.headers:
            return make_reply(body=scene.bytes[:300_000], length=len(scene.bytes), ETag='"one"')
        return make_reply(
            206,
            bytes(len(scene.bytes) - 300_000),
            ETag='"two"',
            Content_Range=f"bytes 300000-{len(scene.bytes) - 1}/{len(scene.bytes)}",
        )

    scene.hostile_registry.overrides[scene.path("file")] = said
    before = scene.user_home.read_files()
    assert scene.expertctl("install", "acme/one", exit_code=TRUST).err
    assert scene.user_home.read_files() == before
