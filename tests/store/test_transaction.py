"""Whoever looks at the store sees every change of refs and blobs, even of a killed process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from expertctl.store import transaction
from tests.store.shop import House, Shop


class KilledError(BaseException):
    """The process ends here."""


def killed(*_: object) -> None:
    raise KilledError


@pytest.fixture
def installed(house: House, shop: Shop) -> House:
    house.install(shop.package())
    return house


def test_blobs_that_are_repaired_are_seen_though_the_ref_stays(
    installed: House, shop: Shop
) -> None:
    (expert,) = installed.store.experts()
    installed.store.blob_path(expert.file("expert.json").digest).unlink()
    before = installed.store.revision()
    (again,) = installed.install(shop.package())
    assert again.outcome == "already installed"
    assert installed.store.revision() != before


@pytest.mark.parametrize(
    "change",
    [
        lambda house, _: house.store.remove(house.store.experts()[0]),
        lambda house, package: house.install(package),
    ],
    ids=["removing", "installing"],
)
def test_whoever_is_killed_before_the_folder_is_flushed_is_seen(
    change: Callable[[House, Path], object],
    installed: House,
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, before = shop.package("acme/other"), installed.store.revision()
    monkeypatch.setattr(transaction, "sync_folder", killed)
    with pytest.raises(KilledError):
        change(installed, package)
    assert installed.store.revision() != before
