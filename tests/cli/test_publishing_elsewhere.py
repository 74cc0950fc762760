"""``publish`` to registries that are not ours: any OCI registry takes packages."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from expertctl.package.read import read_package
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import OciClient
from expertctl.registry.http import RegistryHttp
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.docker_registry import DockerRegistry, docker_registry
from tests.registry.live_registry import (
    LiveRegistry,
    PackageWorkspace,
    run_live_registry,
    store_credential,
    tiny_base,
    trust,
    workspace,
)

__all__ = ["docker_registry", "expertctl", "tiny_base", "trust", "workspace"]


def without_api(app: ASGIApp) -> ASGIApp:
    """Hide what is ours; a registry of others has only ``/v2/``."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        hidden = not scope["path"].startswith(("/v2/", "/token"))
        await (PlainTextResponse("404", 404) if hidden else app)(scope, receive, send)

    return plain


@pytest.fixture
def plain(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRegistry]:
    with run_live_registry(tmp_path / "plain", middleware=without_api) as running:
        secret = running.served.create_user("alice")
        running.served.create_namespace("acme", kind="oci", owner="alice")
        store_credential(running, home, secret)
        monkeypatch.setenv("EXPERT_REGISTRY", running.host)
        yield running


def test_without_an_index_others_are_told_the_bytes(
    expertctl: CommandRunner, plain: LiveRegistry, workspace: PackageWorkspace
) -> None:
    path = workspace.package()
    digest = read_package(path).package_digest
    said = expertctl("publish", path, "--json")
    (package,) = said.document["packages"]
    assert (said.document["user"], package["outcome"]) == (None, "published")
    assert (package["quota"], package["used"]) == (None, None)
    assert package["install"] == f"expertctl install {plain.host}/acme/sql@{digest}"
    assert f"{plain.host} has no signed index" in said.err


def test_there_too_a_version_never_changes(
    expertctl: CommandRunner, plain: LiveRegistry, workspace: PackageWorkspace
) -> None:
    path = workspace.package()
    assert "would be published" in expertctl("publish", path, "--dry-run").out
    expertctl("publish", path)
    assert expertctl("publish", path).out.startswith("already published")
    other = workspace.package(output=workspace.folder / "other.expert", lora={"seed": 3})
    assert "a version never changes" in expertctl("publish", other, exit_code=4).err


@pytest.mark.all
@pytest.mark.skipif(not shutil.which("docker-registry"), reason="docker-registry is missing")
def test_debians_docker_registry_has_the_same_bytes(
    expertctl: CommandRunner, docker_registry: DockerRegistry, workspace: PackageWorkspace
) -> None:
    path = workspace.package()
    contents = read_package(path)
    host = docker_registry.address.host
    expertctl("publish", path, "--registry", host)
    with RegistryHttp() as http:
        manifest = OciClient(http, RegistryAddress.parse(host)).fetch_manifest("acme/sql", "1.0.0")
    assert manifest.data == contents.layout.manifest
    again = expertctl("publish", path, "--registry", host, "--json")
    assert again.document["packages"][0]["outcome"] == "already published"
