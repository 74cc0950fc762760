"""Debian's skopeo carries packages: out of our registry, through others, and into ours."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from expertctl.package.read import PackageContents, read_package
from expertctl.reference import hash_file
from expertctl.settings import Home
from expertctl.store.store import Store
from expertctl.trust.keys import PrivateKey
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.docker_registry import DockerRegistry, docker_registry
from tests.registry.live_registry import PackageWorkspace, tiny_base, trust, workspace
from tests.registry_server.interop.tools import (
    InteropRegistry,
    Skopeo,
    exchange,
    run_interop_registry,
    skopeo,
)

pytestmark = pytest.mark.all

__all__ = [
    "docker_registry", "exchange", "expertctl", "skopeo", "tiny_base", "trust", "workspace",
]  # fmt: skip


@pytest.fixture
def publisher(
    exchange: InteropRegistry, home: Path, workspace: PackageWorkspace
) -> InteropRegistry:
    """The registry, where the person of the workshop is logged in and may sign acme/*."""
    exchange.log_in(home)
    public = workspace.key.public.pem().decode()
    answer = exchange.send_request("POST", "/api/v1/namespaces/acme/keys", public_key=public)
    assert answer.is_success, answer.text
    return exchange


@pytest.fixture
def branch(tmp_path: Path) -> Iterator[InteropRegistry]:
    """A second registry of ours, in which ``acme`` is for anything."""
    with run_interop_registry(tmp_path / "branch") as running:
        running.create_namespace("acme", "oci")
        yield running


@dataclass(frozen=True)
class OtherHome:
    """Somebody else's home."""

    root: Path
    expertctl: CommandRunner

    def installs(self, reference: str, contents: PackageContents) -> None:
        """Install it; what is there then has the digests of the published package."""
        self.expertctl("install", reference)
        (there,) = Store(Home(self.root).store).list_experts()
        assert there.package_digest == contents.package_digest
        assert there.content_digest == contents.content_digest
        Store(Home(self.root).store).check_integrity()


@pytest.fixture
def reader(tmp_path: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> OtherHome:
    """Made when the publisher is ready: commands run in this home from now on."""
    root = tmp_path / "reader"
    monkeypatch.setenv("EXPERT_HOME", str(root))
    return OtherHome(root, expertctl)


@pytest.fixture
def published(
    publisher: InteropRegistry, workspace: PackageWorkspace, expertctl: CommandRunner
) -> PackageContents:
    """``acme/sql@1.0.0``, published with the command."""
    path = workspace.package()
    expertctl("publish", path, "--registry", publisher.host)
    return read_package(path)


def copied(
    published: PackageContents, publisher: InteropRegistry, skopeo: Skopeo, folder: Path
) -> str:
    """Copy the package out to a folder, look at every byte of it; return how skopeo calls it."""
    skopeo.log_in(publisher)
    skopeo.copy(f"docker://{publisher.host}/acme/sql:1.0.0", f"oci:{folder}:it")
    (entry,) = json.loads((folder / "index.json").read_bytes())["manifests"]
    assert entry["digest"] == str(published.package_digest)
    blobs = list((folder / "blobs" / "sha256").iterdir())
    assert {path.name for path in blobs} == {hash_file(path)[1].hex for path in blobs}
    assert {file.digest.hex for file in published.layout.layers} < {path.name for path in blobs}
    return f"oci:{folder}:it"


def test_a_published_expert_goes_through_another_registry_of_ours(
    published: PackageContents,
    publisher: InteropRegistry,
    branch: InteropRegistry,
    skopeo: Skopeo,
    reader: OtherHome,
    tmp_path: Path,
) -> None:
    image = copied(published, publisher, skopeo, tmp_path / "out")
    skopeo.log_in(branch)
    skopeo.copy(image, f"docker://{branch.host}/acme/sql:1.0.0")
    branch.log_in(reader.root)
    reader.installs(f"{branch.host}/acme/sql@{published.package_digest}", published)


def test_a_published_expert_goes_through_debians_registry(
    published: PackageContents,
    publisher: InteropRegistry,
    docker_registry: DockerRegistry,
    skopeo: Skopeo,
    reader: OtherHome,
) -> None:
    skopeo.log_in(publisher)
    host = docker_registry.address.host
    skopeo.copy(f"docker://{publisher.host}/acme/sql:1.0.0", f"docker://{host}/acme/sql:1.0.0")
    reader.installs(f"{host}/acme/sql@{published.package_digest}", published)


def test_an_expert_of_debians_registry_is_published_by_copying_it(
    publisher: InteropRegistry,
    docker_registry: DockerRegistry,
    skopeo: Skopeo,
    workspace: PackageWorkspace,
    expertctl: CommandRunner,
    reader: OtherHome,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, host = workspace.package(), docker_registry.address.host
    monkeypatch.setenv("EXPERT_HOME", str(home))
    expertctl("publish", path, "--registry", host)
    skopeo.log_in(publisher)
    skopeo.copy(f"docker://{host}/acme/sql:1.0.0", f"docker://{publisher.host}/acme/sql:1.0.0")
    assert publisher.list_versions("acme/sql") == ["1.0.0"]
    monkeypatch.setenv("EXPERT_HOME", str(reader.root))
    install_from_the_index(publisher, reader, read_package(path))


def install_from_the_index(
    publisher: InteropRegistry, reader: OtherHome, contents: PackageContents
) -> None:
    """Install by name alone: only the signed index can tell which bytes that is."""
    publisher.log_in(reader.root)
    fingerprint = publisher.created.fingerprint
    reader.expertctl("trust", "registry", "add", publisher.host, "--fingerprint", fingerprint)
    reader.expertctl("config", "set", "registry", publisher.host)
    reader.installs("acme/sql", contents)


def archive(path: Path, expertctl: CommandRunner) -> str:
    """Export a package file as an OCI archive; return how skopeo calls it."""
    target = path.with_suffix(".tar")
    expertctl("export", path, "--oci", "-o", target)
    return f"oci-archive:{target}"


def test_copying_an_archive_to_a_version_publishes_it(
    publisher: InteropRegistry,
    skopeo: Skopeo,
    workspace: PackageWorkspace,
    expertctl: CommandRunner,
    reader: OtherHome,
) -> None:
    path = workspace.package()
    image, target = archive(path, expertctl), f"docker://{publisher.host}/acme/sql:1.0.0"
    skopeo.log_in(publisher)
    skopeo.copy(image, target)
    skopeo.copy(image, target)
    assert publisher.list_versions("acme/sql") == ["1.0.0"]
    install_from_the_index(publisher, reader, read_package(path))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("acme/sql:latest", "latest"),
        ("acme/sql:1.0", "1.0"),
        ("acme/sql:2.0.0", "2.0.0"),
        ("acme/other:1.0.0", "acme/other"),
        ("other/sql:1.0.0", ""),
    ],
)
def test_an_archive_under_another_name_is_refused(
    publisher: InteropRegistry,
    skopeo: Skopeo,
    workspace: PackageWorkspace,
    expertctl: CommandRunner,
    place: str,
    said: str,
) -> None:
    image = archive(workspace.package(), expertctl)
    skopeo.log_in(publisher)
    assert said in skopeo.copy(image, f"docker://{publisher.host}/{place}", code=1)
    assert publisher.list_versions(place.partition(":")[0]) == []


@pytest.mark.parametrize("key", [None, PrivateKey.generate()], ids=["unsigned", "by a stranger"])
def test_an_archive_that_nobody_of_the_namespace_signed_is_refused(
    publisher: InteropRegistry,
    skopeo: Skopeo,
    workspace: PackageWorkspace,
    expertctl: CommandRunner,
    key: PrivateKey | None,
) -> None:
    image = archive(workspace.package(key=key), expertctl)
    skopeo.log_in(publisher)
    said = skopeo.copy(image, f"docker://{publisher.host}/acme/sql:1.0.0", code=1)
    assert "sign" in said
    assert publisher.list_versions("acme/sql") == []


def test_another_content_never_takes_the_place_of_a_version(
    published: PackageContents,
    publisher: InteropRegistry,
    skopeo: Skopeo,
    workspace: PackageWorkspace,
    expertctl: CommandRunner,
) -> None:
    other = workspace.package(output=workspace.folder / "other.expert", lora={"seed": 3})
    skopeo.log_in(publisher)
    image, target = archive(other, expertctl), f"docker://{publisher.host}/acme/sql:1.0.0"
    assert "other content" in skopeo.copy(image, target, code=1)
    assert skopeo.inspect(target, "--raw").encode() == published.layout.manifest


def test_what_was_published_is_not_deleted_but_yanked(
    published: PackageContents, publisher: InteropRegistry, skopeo: Skopeo
) -> None:
    image = f"docker://{publisher.host}/acme/sql:1.0.0"
    skopeo.log_in(publisher)
    skopeo("delete", "--tls-verify=false", image, code=1)
    assert skopeo.list_tags(f"docker://{publisher.host}/acme/sql") == ["1.0.0"]
    assert skopeo.inspect(image, "--raw").encode() == published.layout.manifest
