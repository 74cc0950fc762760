"""Whoever looks at the store sees every change of refs and blobs, even of a killed process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from expertctl.store import transaction
from tests.store.fixtures import HomeFixture, PackageFactory


class ProcessKilledError(BaseException):
    """The process ends here."""


def killed(*_: object) -> None:
    raise ProcessKilledError


@pytest.fixture
def installed(user_home: HomeFixture, package_factory: PackageFactory) -> HomeFixture:
    user_home.install(package_factory.package())
    return user_home


def test_blobs_that_are_repaired_are_seen_though_the_ref_stays(
    installed: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = installed.store.list_experts()
    installed.store.blob_path(expert.find_file("expert.json").digest).unlink()
    before = installed.store.revision()
    (again,) = installed.install(package_factory.package())
    assert again.outcome == "already installed"
    assert installed.store.revision() != before


@pytest.mark.parametrize(
    "change",
    [
        lambda user_home, _: user_home.store.remove(user_home.store.list_experts()[0]),
        lambda user_home, package: user_home.install(package),
    ],
    ids=["removing", "installing"],
)
def test_whoever_is_killed_before_the_folder_is_flushed_is_seen(
    change: Callable[[HomeFixture, Path], object],
    installed: HomeFixture,
    package_factory: PackageFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, before = package_factory.package("acme/other"), installed.store.revision()
    monkeypatch.setattr(transaction, "sync_folder", killed)
    with pytest.raises(ProcessKilledError):
        change(installed, package)
    assert installed.store.revision() != before
