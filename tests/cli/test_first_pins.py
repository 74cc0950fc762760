"""When the publisher keys of a namespace are pinned at first, and what is said of it."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from expertctl.errors import StoreError
from expertctl.install import installer as install_module
from expertctl.reference import Digest
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.hostile_registry import TIME, HostileRegistry, make_reply, run_hostile_registry
from tests.registry_server.publishing.package_fixtures import (
    InMemoryPackage,
    PackageTemplate,
    build_template,
)
from tests.store.fixtures import HomeFixture, make_key

__all__ = ["expertctl"]

KEY_ID = make_key("acme").public.key_id
TRUST, CONFLICT, FAILURE = 5, 4, 1


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> PackageTemplate:
    return build_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def hostile_registry(
    home: Path, template: PackageTemplate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[HostileRegistry]:
    with run_hostile_registry(template.make_package("zoo/ants", key=make_key("acme"))) as running:
        HomeFixture(home).trust.add_registry(running.known)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("EXPERT_REGISTRY", running.host)
        monkeypatch.setenv("EXPERT_ENCODER", "lexical")
        yield running


def get_only_package(hostile_registry: HostileRegistry) -> InMemoryPackage:
    [found] = hostile_registry.packages.values()
    return found


def is_pinned(home: Path, hostile_registry: HostileRegistry) -> bool:
    return HomeFixture(home).trust.read().is_pinned(hostile_registry.host, "zoo")


def fails_unpinned(
    home: Path, hostile_registry: HostileRegistry, expertctl: CommandRunner, code: int
) -> None:
    before = HomeFixture(home).home.trust.read_bytes()
    said = expertctl("install", "zoo/ants", exit_code=code)
    assert "pinned for" not in said.err
    assert HomeFixture(home).home.trust.read_bytes() == before
    assert HomeFixture(home).refs() == []


def test_an_install_whose_signature_is_another_keys_pins_nothing(
    home: Path,
    hostile_registry: HostileRegistry,
    template: PackageTemplate,
    expertctl: CommandRunner,
) -> None:
    """The index names acme's key as the signer; the package was signed by another."""
    hostile_registry.publish(template.make_package("zoo/ants", key=make_key("mallory")))
    fails_unpinned(home, hostile_registry, expertctl, TRUST)


def test_an_install_whose_signature_was_made_for_another_package_pins_nothing(
    home: Path,
    hostile_registry: HostileRegistry,
    template: PackageTemplate,
    expertctl: CommandRunner,
) -> None:
    """Attack 38: the files are right, and the statement that was signed names another package."""
    from expertctl.package.write import build_signed_layout
    from expertctl.trust.bundle import sign_files

    files = get_only_package(hostile_registry).layout.files
    for name in ("zoo/bees@1.0.0", "zoo/ants@2.0.0"):
        signature = sign_files(files, name=name, key=make_key("acme"))
        layout = build_signed_layout(files, signature)
        blobs = {**get_only_package(hostile_registry).blobs, Digest.compute(signature): signature}
        hostile_registry.publish(
            InMemoryPackage(get_only_package(hostile_registry).name, "1.0.0", layout, blobs)
        )
        said = expertctl("install", "zoo/ants", exit_code=TRUST)
        assert f"model.sig was made for {name}, and this is zoo/ants@1.0.0" in said.err
        assert not is_pinned(home, hostile_registry)


def test_an_install_whose_download_fails_pins_nothing(
    home: Path, hostile_registry: HostileRegistry, expertctl: CommandRunner
) -> None:
    file = max(get_only_package(hostile_registry).layout.layers, key=lambda layer: layer.size)
    hostile_registry.overrides[f"/v2/zoo/ants/blobs/{file.digest}"] = lambda _: make_reply(404)
    fails_unpinned(home, hostile_registry, expertctl, 3)


def test_an_install_of_other_bytes_pins_nothing(
    home: Path, hostile_registry: HostileRegistry, expertctl: CommandRunner
) -> None:
    file = max(get_only_package(hostile_registry).layout.layers, key=lambda layer: layer.size)
    wrong = bytes(file.size)
    hostile_registry.overrides[f"/v2/zoo/ants/blobs/{file.digest}"] = lambda _: make_reply(
        body=wrong
    )
    fails_unpinned(home, hostile_registry, expertctl, TRUST)


def test_keys_are_told_when_the_install_fails_after_its_signature_was_checked(
    home: Path,
    hostile_registry: HostileRegistry,
    template: PackageTemplate,
    expertctl: CommandRunner,
) -> None:
    expertctl("install", "zoo/ants")
    HomeFixture(home).trust.remove_registry(hostile_registry.host)
    HomeFixture(home).trust.add_registry(hostile_registry.known)
    assert not is_pinned(home, hostile_registry)
    hater = template.make_package(
        "zoo/bees", key=make_key("acme"), composition={"conflicts": ["zoo/ants"]}
    )
    hostile_registry.publish(hater)
    said = expertctl("install", "zoo/bees", "--json", exit_code=CONFLICT)
    assert f"pinned for zoo/* of {hostile_registry.host}: key {KEY_ID} (first install" in said.err
    assert json.loads(said.out)["error"]["code"] == "conflict"
    assert is_pinned(home, hostile_registry)
    assert HomeFixture(home).refs() == ["zoo/ants@1.0.0"]


def test_an_install_that_ends_between_pinning_and_publishing_can_be_repeated(
    home: Path,
    hostile_registry: HostileRegistry,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise StoreError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(install_module, "_publish_candidates", killed)
        said = expertctl("install", "zoo/ants", exit_code=FAILURE)
    assert "pinned for zoo/*" in said.err
    assert is_pinned(home, hostile_registry)
    assert HomeFixture(home).refs() == []
    HomeFixture(home).trust.check_integrity()
    again = expertctl("install", "zoo/ants")
    assert "pinned for" not in again.err
    assert HomeFixture(home).refs() == ["zoo/ants@1.0.0"]


def test_an_index_that_is_older_than_its_registry_says_it_may_be_is_warned_of(
    hostile_registry: HostileRegistry, expertctl: CommandRunner
) -> None:
    """Attack 24: a mirror goes on showing what was true once."""
    hostile_registry.interval_days = 7
    before = (datetime.now(UTC) - datetime.fromisoformat(TIME)).days
    said = expertctl("install", "zoo/ants", "--json")
    after = (datetime.now(UTC) - datetime.fromisoformat(TIME)).days
    warning = f"warning: the index of zoo/ants from {hostile_registry.host} is "
    assert said.err.count(warning) == 1
    [told] = [note for note in said.document["notes"] if note.startswith(warning)]
    age, _, rest = told.removeprefix(warning).partition(" ")
    assert before <= int(age) <= after  # midnight may pass meanwhile
    assert rest.startswith("days old, and it is updated every 7 days: ")
