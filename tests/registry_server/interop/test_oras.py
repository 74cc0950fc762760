"""The oras client against our registry: files and packages, with both ways to log in."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oras.client import OrasClient

from expertctl.package.read import read_package
from expertctl.reference import Digest
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.live_registry import PackageWorkspace, tiny_base, trust, workspace
from tests.registry_server.interop.tools import USER, InteropRegistry, exchange
from tests.registry_server.oci.images import random_bytes

pytestmark = pytest.mark.all

__all__ = ["exchange", "expertctl", "tiny_base", "trust", "workspace"]

REFUSED = "Issue with|Issue retrieving session|Cannot respond to request for authentication"
FILES = {"weights.bin": random_bytes(3_000_000), "empty": b"", "notes.md": b"# Notes\n"}


def oras(exchange: InteropRegistry, secret: str = "", *, way: str = "token") -> OrasClient:
    """A client that is logged in; ``basic`` sends the secret with each request."""
    client = OrasClient(hostname=exchange.host, insecure=True, auth_backend=way)
    client.auth.set_basic_auth(USER, secret or exchange.created.token)
    return client


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client tries everything again, refusals too, and waits minutes in all between."""
    monkeypatch.setattr("oras.decorator.time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files to push, where the client runs: it takes paths below it only."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    monkeypatch.chdir(folder)
    return folder


def push(client: OrasClient, target: str, **options: Any) -> None:
    client.push(target=target, files=list(FILES), quiet=True, **options)


def pulled(client: OrasClient, target: str, folder: Path) -> dict[str, bytes]:
    """Pull into a new folder; return what lies there by its path."""
    client.pull(target=target, outdir=str(folder))
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("way", ["token", "basic"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "in chunks"])
def test_files_come_back_as_they_went(
    exchange: InteropRegistry, folder: Path, tmp_path: Path, way: str, chunked: bool
) -> None:
    target = f"{exchange.host}/plain/some/files:v1"
    push(oras(exchange, way=way), target, do_chunked=chunked, chunk_size=1 << 20)
    assert pulled(oras(exchange, way=way), target, tmp_path / "pulled") == FILES
    assert oras(exchange, way=way).get_tags(f"{exchange.host}/plain/some/files") == ["v1"]


def test_a_package_is_pulled_blob_by_blob(
    exchange: InteropRegistry,
    workspace: PackageWorkspace,
    expertctl: CommandRunner,
    home: Path,
    tmp_path: Path,
) -> None:
    exchange.log_in(home)
    public = workspace.key.public.pem().decode()
    exchange.send_request("POST", "/api/v1/namespaces/acme/keys", public_key=public)
    path = workspace.package()
    expertctl("publish", path, "--registry", exchange.host)
    contents = read_package(path)
    target = f"{exchange.host}/acme/sql@{contents.package_digest}"
    found = pulled(oras(exchange), target, tmp_path / "pulled")
    assert {name: str(Digest.compute(data)) for name, data in found.items()} == {
        str(file.digest): str(file.digest) for file in contents.layout.layers
    }


def test_files_are_no_package(exchange: InteropRegistry, folder: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        push(oras(exchange), f"{exchange.host}/acme/sql:1.0.0")
    assert exchange.list_versions("acme/sql") == []


def test_a_tag_is_deleted(exchange: InteropRegistry, folder: Path) -> None:
    client, repository = oras(exchange), f"{exchange.host}/plain/files"
    for tag in ("v1", "v2"):
        (folder / "notes.md").write_bytes(tag.encode())
        push(client, f"{repository}:{tag}")
    assert client.delete_tags(repository, ["v1"]) == ["v1"]
    assert client.get_tags(repository) == ["v2"]


def test_a_wrong_secret_opens_nothing(
    exchange: InteropRegistry, folder: Path, tmp_path: Path
) -> None:
    target = f"{exchange.host}/plain/files:v1"
    for way in ("token", "basic"):
        stranger = oras(exchange, f"xpt_{'0' * 43}", way=way)
        with pytest.raises(ValueError, match=REFUSED):
            push(stranger, target)
    with pytest.raises(ValueError, match=REFUSED):
        pulled(oras(exchange, f"xpt_{'0' * 43}"), target, tmp_path / "pulled")


def test_what_is_public_is_pulled_by_anybody_and_pushed_by_nobody(
    exchange: InteropRegistry, folder: Path, tmp_path: Path
) -> None:
    exchange.create_namespace("open", "oci", read="public")
    target = f"{exchange.host}/open/files:v1"
    push(oras(exchange), target)
    nobody = OrasClient(hostname=exchange.host, insecure=True)
    assert pulled(nobody, target, tmp_path / "pulled") == FILES
    with pytest.raises(ValueError, match=REFUSED):
        push(OrasClient(hostname=exchange.host, insecure=True), target)
