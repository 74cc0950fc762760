"""``expertctl install`` from registries that lie: the right exit code, and nothing changes."""

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import pytest

from expertctl.digest import FileDigest
from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument, KeyEntry
from expertctl.registry.index_envelope import sign_index
from expertctl.registry.retry import Retries
from tests.cli.commands import Commands, expertctl
from tests.install.liar import TIME, Liar, lying
from tests.registry.hostile import Pauses, Reply, Request, reply
from tests.registry_server.publishing.parcels import Parcel, Template, make_template
from tests.store.shop import House, a_key

__all__ = ["expertctl"]

TRUST, REGISTRY = 5, 6
KEPT = "acme/kept@1.0.0"


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sleeps between two tries."""
    patient = Retries(attempts=2, sleep=Pauses(), chance=lambda: 1.0)
    monkeypatch.setattr("expertctl.registry.http.Retries", lambda tell=None: patient)


@dataclass(frozen=True)
class Scene:
    """A registry that may lie, and a home that installed something from it while it did not."""

    liar: Liar
    parcel: Parcel
    house: House
    expertctl: Commands

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
        before = self.house.files()
        said = self.expertctl("install", "acme/one", "--json", code=code)
        assert self.house.files() == before
        assert self.house.refs() == [KEPT]
        self.house.check()
        error = said.document["error"]
        assert "acme/one" in error["message"] or self.liar.host in error["message"], error


@pytest.fixture
def scene(
    home: Path, template: Template, expertctl: Commands, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    one = template.parcel("acme/one", key=a_key("acme"), files={"README.md": b"text " * 100_000})
    kept = template.parcel("acme/kept", key=a_key("acme"))
    with lying(one, kept) as liar:
        house = House(home)
        house.trust.add_registry(liar.known)
        monkeypatch.setenv("EXPERT_REGISTRY", liar.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        expertctl("install", "acme/kept")
        yield Scene(liar, one, house, expertctl)


def endless(_: Scene) -> Reply:
    """More than anybody wants, without a length."""
    return chain([reply(length=-1)], repeat(bytes(1 << 16), 4096))


def cut_off(_: Scene) -> Reply:
    return reply(body=b"{", length=1000)


def of_a_stranger(scene: Scene) -> Reply:
    key = KeyEntry(a_key("acme").public, None)
    document = IndexDocument(scene.parcel.name, 9, TIME, "", (), (key,))
    return reply(body=sign_index(document, a_key("stranger")))


def of_another_package(scene: Scene) -> Reply:
    key = KeyEntry(a_key("acme").public, None)
    document = IndexDocument(PackageName.parse("acme/two"), 9, TIME, "", (), (key,))
    return reply(body=sign_index(document, scene.liar.key))


def altered(scene: Scene) -> Reply:
    """Attack 93: the right length, one bit of it another."""
    return reply(body=scene.bytes[:-1] + bytes([scene.bytes[-1] ^ 1]))


def too_long(scene: Scene) -> Reply:
    return reply(body=scene.bytes + b"more")


def too_short(scene: Scene) -> Reply:
    return reply(body=scene.bytes[:-1])


def partial(scene: Scene) -> Reply:
    """Attack 93: a part that nobody asked for."""
    size = len(scene.bytes)
    return reply(206, scene.bytes[100:], Content_Range=f"bytes 100-{size - 1}/{size}")


def compressed(scene: Scene) -> Reply:
    return reply(body=gzip.compress(scene.bytes), Content_Encoding="gzip")


def inward(_: Scene) -> Reply:
    return reply(307, Location="http://169.254.169.254/latest/meta-data")


def in_a_loop(scene: Scene) -> Reply:
    return reply(307, Location=scene.path("file"))


def failing(_: Scene) -> Reply:
    return reply(500)


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
    scene: Scene, what: str, lie: Callable[[Scene], Reply], code: int
) -> None:
    """Attacks 93 and 94; once the registry tells the truth, the same command goes through."""
    scene.liar.answers[scene.path(what)] = lambda _: lie(scene)
    scene.refuses(code)
    del scene.liar.answers[scene.path(what)]
    scene.expertctl("install", "acme/one")
    assert scene.house.refs() == [KEPT, "acme/one@1.0.0"]
    scene.house.check()


def test_a_blob_whose_rest_comes_from_another_is_refused(scene: Scene) -> None:
    """Attack 93: it breaks off, and the rest comes from elsewhere under another ETag."""

    def said(request: Request) -> Reply:
        if "range" not in request.headers:
            return reply(body=scene.bytes[:300_000], length=len(scene.bytes), ETag='"one"')
        return reply(
            206,
            bytes(len(scene.bytes) - 300_000),
            ETag='"two"',
            Content_Range=f"bytes 300000-{len(scene.bytes) - 1}/{len(scene.bytes)}",
        )

    scene.liar.answers[scene.path("file")] = said
    before = scene.house.files()
    assert scene.expertctl("install", "acme/one", code=TRUST).err
    assert scene.house.files() == before
