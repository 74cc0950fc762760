"""``diff`` as a person types it."""

from pathlib import Path

import pytest

from tests.cli.command_runner import CommandRunner, expertctl
from tests.store.fixtures import (
    HomeFixture,
    PackageFactory,
    fast,
    make_key,
    package_factory,
    user_home,
)

__all__ = ["expertctl", "fast", "package_factory", "user_home"]


@pytest.fixture
def old(package_factory: PackageFactory) -> Path:
    return package_factory.package(description="one", tags=["a"])


@pytest.fixture
def new(package_factory: PackageFactory) -> Path:
    return package_factory.package(version="1.1.0", description="two\nb: c", seed=1, authors=["me"])


def test_a_file_is_compared_with_what_is_installed(
    expertctl: CommandRunner, user_home: HomeFixture, old: Path, new: Path
) -> None:
    user_home.install(old)
    said = expertctl("diff", "acme/sql", new)
    lines = said.out.splitlines()
    key = make_key("acme").public.key_id.removeprefix("sha256:")[:12]
    assert lines[0].split() == ["PACKAGE", "CONTENT", "SIGNED", "BY"]
    assert lines[1].split()[:2] == ["acme/sql", "acme/sql@1.0.0"]
    assert lines[1].endswith(f"  {key}")
    assert lines[2].endswith(f"  {key} (not verified)")
    assert "\nexpert.json\n" in said.out
    for line in (
        '+ authors: ["me"]',
        '~ description: "one" → "two\\nb: c"',
        '- tags: ["a"]',
        '~ version: "1.0.0" → "1.1.0"',
    ):
        assert f"  {line}\n" in said.out
    assert "  ~ adapter_model.safetensors  " in said.out
    assert "adapter_model.safetensors (lora)\n" in said.out
    assert lines[-1].split()[:5] == ["q_proj", "0", "2", "0", "0"]
    assert "not verified" in said.err


def test_the_document_is_complete(
    expertctl: CommandRunner, user_home: HomeFixture, old: Path, new: Path
) -> None:
    user_home.install(old)
    document = expertctl("diff", old, new, "--json").document
    assert set(document) == {"old", "new", "equal", "manifest", "files", "adapters"}
    assert document["equal"] is False
    assert document["old"]["verified"] is False
    assert document["old"]["signed_by"] == make_key("acme").public.key_id
    assert document["old"]["ref"] == "acme/sql@1.0.0"
    assert {"path": "tags", "change": "removed", "old": ["a"], "new": None} in document["manifest"]
    (adapter,) = document["adapters"]
    assert [t["change"] for t in adapter["tensors"]] == ["changed", "changed"]
    tensor = adapter["tensors"][0]
    assert set(tensor) == {"name", "change", "old", "new", "max_abs", "relative"}
    assert tensor["old"] == tensor["new"] == {"dtype": "F32", "shape": [2, 16]}
    assert tensor["max_abs"] > 0
    (kind,) = adapter["summary"]
    assert (kind["kind"], kind["changed"], kind["equal"]) == ("q_proj", 2, 0)


def test_equal_packages_are_said_to_be_equal(
    expertctl: CommandRunner, user_home: HomeFixture, package_factory: PackageFactory, old: Path
) -> None:
    user_home.install(old)
    resigned = package_factory.package(description="one", tags=["a"], key="other")
    for other in (old, resigned):
        said = expertctl("diff", "acme/sql", other)
        assert said.out.endswith("\nthe same content\n")
        assert expertctl("diff", "acme/sql", other, "--json").document["equal"] is True
    said = expertctl("diff", "acme/sql", "acme/sql@1.0.0")
    assert "not verified" not in said.out + said.err


def test_what_cannot_be_compared_is_said(
    expertctl: CommandRunner, user_home: HomeFixture, old: Path, tmp_path: Path
) -> None:
    user_home.install(old)
    (tmp_path / "bad.expert").write_bytes(b"PK\x03\x04")
    assert "bad.expert" in expertctl("diff", "acme/sql", tmp_path / "bad.expert", exit_code=8).err
    assert "none.expert" in expertctl("diff", "acme/sql", tmp_path / "none.expert", exit_code=3).err
    assert "acme/none" in expertctl("diff", "acme/none", old, exit_code=3).err
    assert "is missing" in expertctl("diff", "acme/sql", exit_code=2).err


def test_a_flipped_bit_in_the_store_is_found(
    expertctl: CommandRunner, user_home: HomeFixture, old: Path
) -> None:
    (done,) = user_home.install(old)
    largest = user_home.store.blob_path(max(done.expert.files, key=lambda f: f.size).digest)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.chmod(0o600)
    largest.write_bytes(data)
    said = expertctl("diff", "acme/sql", old, exit_code=5)
    assert said.out == ""
    assert "acme/sql" in said.err
