"""Debian's skopeo uses a plain namespace as it uses any registry, and logs in both ways."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.registry_server.interop.tools import InteropRegistry, Skopeo, exchange, skopeo
from tests.registry_server.oci.images import Fields, compute_digest, encode_json

pytestmark = pytest.mark.all

__all__ = ["exchange", "skopeo"]

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True)
class ImageFolder:
    """An OCI image layout, written by hand."""

    folder: Path
    entries: list[Fields] = field(default_factory=list)

    def blob(self, data: bytes, media_type: str, **more: object) -> Fields:
        """Write a blob; return what describes it."""
        digest = compute_digest(data)
        path = self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {"mediaType": media_type, "digest": digest, "size": len(data), **more}

    def image(self, architecture: str) -> Fields:
        """Write a small image for one architecture."""
        layer = self.blob(bytes(1024), LAYER)
        rootfs = {"type": "layers", "diff_ids": [layer["digest"]]}
        config = {"architecture": architecture, "os": "linux", "rootfs": rootfs, "config": {}}
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.blob(encode_json(config), CONFIG),
            "layers": [layer],
        }
        platform = {"architecture": architecture, "os": "linux"}
        return self.blob(encode_json(document), MANIFEST, platform=platform)

    def index(self, *images: Fields) -> Fields:
        """Write an index of images."""
        document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": list(images)}
        return self.blob(encode_json(document), INDEX)

    def name(self, name: str, entry: Fields) -> str:
        """Give something in it a name; return how skopeo calls it."""
        annotations = {"org.opencontainers.image.ref.name": name}
        self.entries.append({**entry, "annotations": annotations})
        document = {"schemaVersion": 2, "manifests": self.entries}
        (self.folder / "index.json").write_bytes(encode_json(document))
        (self.folder / "oci-layout").write_bytes(encode_json({"imageLayoutVersion": "1.0.0"}))
        return f"oci:{self.folder}:{name}"


@pytest.fixture
def images(tmp_path: Path) -> ImageFolder:
    folder = tmp_path / "images"
    folder.mkdir()
    return ImageFolder(folder)


def test_an_image_with_an_index_goes_there_and_back(
    exchange: InteropRegistry, skopeo: Skopeo, images: ImageFolder, tmp_path: Path
) -> None:
    index = images.index(images.image("amd64"), images.image("arm64"))
    there = f"docker://{exchange.host}/plain/deep/er/image:v1"
    skopeo.log_in(exchange)
    skopeo.copy(images.name("v1", index), there, "--all", "--preserve-digests")
    assert compute_digest(skopeo.inspect(there, "--raw").encode()) == index["digest"]
    skopeo.copy(there, f"oci:{tmp_path / 'back'}:v1", "--all", "--preserve-digests")
    (entry,) = json.loads((tmp_path / "back" / "index.json").read_bytes())["manifests"]
    assert entry["digest"] == index["digest"]
    blobs = {p.name: p.read_bytes() for p in (tmp_path / "back" / "blobs" / "sha256").iterdir()}
    assert blobs == {p.name: p.read_bytes() for p in images.folder.glob("blobs/sha256/*")}


def test_one_image_of_an_index_is_looked_at(
    exchange: InteropRegistry, skopeo: Skopeo, images: ImageFolder
) -> None:
    index = images.index(images.image("amd64"), images.image("arm64"))
    there = f"docker://{exchange.host}/plain/image"
    skopeo.log_in(exchange)
    skopeo.copy(images.name("v1", index), f"{there}:v1", "--all", "--preserve-digests")
    for architecture in ("amd64", "arm64"):
        words = ("--override-arch", architecture, "inspect", "--tls-verify=false", f"{there}:v1")
        shown = json.loads(skopeo(*words))
        assert (shown["Architecture"], shown["RepoTags"]) == (architecture, ["v1"])


def test_tags_are_listed_moved_and_deleted(
    exchange: InteropRegistry, skopeo: Skopeo, images: ImageFolder
) -> None:
    there = f"docker://{exchange.host}/plain/image"
    skopeo.log_in(exchange)
    old = images.name("old", images.image("amd64"))
    new = images.name("new", images.image("arm64"))
    for image, tag in ((old, "a"), (new, "b"), (new, "a"), (old, "c")):
        skopeo.copy(image, f"{there}:{tag}", "--preserve-digests")
    assert skopeo.list_tags(there) == ["a", "b", "c"]
    assert skopeo.inspect(f"{there}:a", "--raw") == skopeo.inspect(f"{there}:b", "--raw")
    skopeo("delete", "--tls-verify=false", f"{there}:c")
    assert skopeo.list_tags(there) == ["a", "b"]
    skopeo.inspect(f"{there}:c", "--raw", code=1)


def test_an_image_is_taken_over_from_another_repository(
    exchange: InteropRegistry, skopeo: Skopeo, images: ImageFolder
) -> None:
    one, two = (f"docker://{exchange.host}/plain/{name}:v1" for name in ("one", "two"))
    skopeo.log_in(exchange)
    image = images.name("v1", images.image("amd64"))
    skopeo.copy(image, one, "--preserve-digests")
    skopeo.copy(one, two, "--preserve-digests")
    assert skopeo.inspect(two, "--raw") == skopeo.inspect(one, "--raw")


def test_a_wrong_secret_is_no_login(exchange: InteropRegistry, skopeo: Skopeo) -> None:
    said = skopeo.log_in(exchange, f"xpt_{'0' * 43}", code=1)
    assert "invalid username/password" in said or "unauthorized" in said


def test_without_a_login_only_what_is_public_is_read(
    exchange: InteropRegistry, skopeo: Skopeo, images: ImageFolder
) -> None:
    exchange.create_namespace("open", "oci", read="public")
    image = images.name("v1", images.image("amd64"))
    login = ("--dest-creds", exchange.login, "--preserve-digests")
    places = [f"docker://{exchange.host}/{name}/image:v1" for name in ("open", "plain")]
    for place in places:
        skopeo.copy(image, place, *login)
    skopeo.inspect(places[0], "--raw")
    skopeo.inspect(places[1], "--raw", code=1)
    skopeo.copy(image, places[0], code=1)


def test_a_token_that_only_reads_pushes_nothing(
    exchange: InteropRegistry, skopeo: Skopeo, images: ImageFolder
) -> None:
    there = f"docker://{exchange.host}/plain/image:v1"
    image = images.name("v1", images.image("amd64"))
    skopeo.copy(image, there, "--dest-creds", exchange.login)
    answer = exchange.send_request("POST", "/api/v1/tokens", name="reader", scopes=["read"])
    assert answer.is_success, answer.text
    reader = f"admin:{answer.json()['token']}"
    skopeo.inspect(there, "--creds", reader, "--raw")
    skopeo.copy(image, f"{there}2", "--dest-creds", reader, code=1)
    assert skopeo("delete", "--tls-verify=false", "--creds", reader, there, code=1)
