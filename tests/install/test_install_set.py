"""Sets that were exported elsewhere: the checks of ordinary installs, all or nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.errors import (
    BaseMismatchError,
    ChangedVersionError,
    ConflictError,
    DigestError,
    InvalidPackageError,
    MissingDependencyError,
    RevokedError,
    SignatureError,
    TrustError,
    UnsignedError,
)
from expertctl.install.installer import install_set
from expertctl.install.publication import InstalledPackage
from expertctl.package.base_model import read_base
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import RoutingIndex
from tests.factories import write_base
from tests.package.forged_packages import (
    list_set_members,
    make_archive,
    read_archive,
    read_packed_files,
    write_frame,
)
from tests.store.fixtures import BASE_NAME, HomeFixture, PackageFactory, make_key

Make = Callable[..., Path]


def name_of(package: Path) -> str:
    from expertctl.package.read import read_package

    return read_package(package).manifest.ref.replace("@", ":")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Packs packages into a set, whatever they are."""

    def pack(*packages: Path) -> Path:
        files = {name_of(package): read_packed_files(read_archive(package)) for package in packages}
        return write_frame(make_archive(list_set_members(files)), tmp_path / "x.experts")

    return pack


def import_set(house: HomeFixture, path: Path, **options: Any) -> list[InstalledPackage]:
    return install_set(path, store=house.store, bases=house.bases, trust=house.trust, **options)


def refuses(
    house: HomeFixture, error: type[Exception], match: str, path: Path, **options: object
) -> str:
    """Demand a refusal that leaves no trace; return its hint."""
    before = house.read_files()
    with pytest.raises(error, match=match) as raised:
        import_set(house, path, **options)
    assert house.read_files() == before
    assert not list(house.store.paths.staging.iterdir())
    return str(getattr(raised.value, "hint", ""))


@pytest.fixture
def house(house: HomeFixture, shop: PackageFactory) -> HomeFixture:
    """A house with one expert, so that there is something to lose."""
    house.install(shop.package("acme/first", seed=7))
    return house


@pytest.fixture
def chain(shop: PackageFactory) -> Sequence[Path]:
    """Three experts that require each other."""
    return (
        shop.package("acme/low", seed=1),
        shop.package("acme/middle", composition={"requires": ["acme/low@^1"]}, seed=2),
        shop.package("acme/top", composition={"requires": ["acme/middle"]}, seed=3),
    )


def test_a_set_is_installed_in_order_and_indexed(
    house: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    index = RoutingIndex(house.root, LexicalEncoder())
    done = import_set(house, make(*chain), catalogue=house.catalogue, index=index)
    refs = ["acme/low@1.0.0", "acme/middle@1.0.0", "acme/top@1.0.0"]
    assert [(item.expert.ref, item.outcome) for item in done] == [(r, "installed") for r in refs]
    assert house.catalogue.list_refs() == refs
    assert {item.expert.signer for item in done} == {make_key("acme").public.key_id}
    house.check_integrity()


def test_a_set_leaves_the_store_as_installing_its_files_does(
    house: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    house.install(*chain)
    expected = house.read_files()
    for expert in house.store.list_experts():
        if expert.package.name != "first":
            house.store.remove(expert)
    import_set(house, make(*chain))
    assert house.read_files() == expected


def test_installing_a_set_again_changes_nothing(
    house: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    path = make(*chain)
    import_set(house, path)
    before = house.read_files()
    assert {item.outcome for item in import_set(house, path)} == {"already installed"}
    assert house.read_files() == before


def test_a_plain_archive_is_installed_too(
    house: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    path = make(*chain)
    path.write_bytes(read_archive(path))
    assert len(import_set(house, path)) == 3
    house.check_integrity()


def test_experts_that_share_all_their_weights_are_each_complete(
    house: HomeFixture, make: Make, shop: PackageFactory
) -> None:
    twins = [shop.package(f"acme/twin{number}", seed=5) for number in range(3)]
    done = import_set(house, make(*twins))
    assert len({max(item.expert.files, key=lambda f: f.size).digest for item in done}) == 1
    house.check_integrity()


def test_what_a_set_requires_may_be_there_already(
    house: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    path = make(*chain[1:])
    hint = refuses(house, MissingDependencyError, r"requires acme/low@\^1", path)
    assert "acme/low@^1" in hint
    house.install(chain[0])
    assert len(import_set(house, path)) == 2


def test_one_bad_signature_refuses_all(
    house: HomeFixture, make: Make, shop: PackageFactory, chain: Sequence[Path], tmp_path: Path
) -> None:
    refuses(house, TrustError, "not trusted", make(*chain, shop.package("acme/x", key="eve")))
    files = {name_of(package): read_packed_files(read_archive(package)) for package in chain}
    swapped = dict(zip(files, [f["model.sig"] for f in files.values()][::-1], strict=True))
    forged = {name: {**f, "model.sig": swapped[name]} for name, f in files.items()}
    path = write_frame(make_archive(list_set_members(forged)), tmp_path / "forged.experts")
    refuses(house, SignatureError, r"acme/low@1\.0\.0: model\.sig does not fit", path)


def test_a_revoked_key_refuses_all(house: HomeFixture, make: Make, chain: Sequence[Path]) -> None:
    house.trust.revoke(make_key("acme").public.key_id, "lost")
    refuses(house, RevokedError, "revoked", make(*chain))


def test_unsigned_packages_need_leave(house: HomeFixture, make: Make, shop: PackageFactory) -> None:
    path = make(shop.package("acme/signed"), shop.package("acme/unsigned", key=None))
    hint = refuses(house, UnsignedError, "is not signed", path)
    assert "--allow-unsigned" in hint
    done = import_set(house, path, allow_unsigned=True)
    assert [item.expert.signer is None for item in done] == [False, True]
    assert any("nobody vouches" in warning for warning in done[1].warnings)


def test_a_strange_base_needs_leave(
    house: HomeFixture, make: Make, shop: PackageFactory, tmp_path: Path
) -> None:
    house.bases.add(shop.base_dir, name=BASE_NAME)
    other = write_base(tmp_path / BASE_NAME, layers=1, hidden=16, heads=2, kv_heads=1, seed=9)
    path = make(shop.package("acme/strange", base_dir=other, base=read_base(other)))
    refuses(house, BaseMismatchError, "the weights differ", path)
    (done,) = import_set(house, path, allow_base_mismatch=True)
    assert (done.outcome, done.expert.ref) == ("installed", "acme/strange@1.0.0")
    assert done.expert.allows_mismatch
    assert any("the weights differ" in warning for warning in done.warnings)


def test_a_conflict_refuses_all(house: HomeFixture, make: Make, shop: PackageFactory) -> None:
    hater = shop.package("acme/hater", composition={"conflicts": ["acme/first"]})
    refuses(house, ConflictError, "conflicts with", make(hater, shop.package("acme/other")))
    changed = make(shop.package("acme/first", seed=8), shop.package("acme/other"))
    refuses(house, ChangedVersionError, "has another content than before", changed)


SLOW = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(at=st.integers(0, 10**6), flip=st.integers(0, 255))
@SLOW
def test_a_set_that_was_tampered_with_or_cut_changes_nothing(
    at: int, flip: int, house: HomeFixture, make: Make, shop: PackageFactory, tmp_path: Path
) -> None:
    path = make(shop.package("acme/a", seed=1), shop.package("acme/b", seed=2))
    data = bytearray(read_archive(path))
    at %= len(data)
    if flip:
        data[at] ^= flip
    else:
        del data[at:]
    path.write_bytes(data)
    before = house.read_files()
    with pytest.raises((InvalidPackageError, DigestError, TrustError)):
        import_set(house, path)
    assert house.read_files() == before
    assert not list(house.store.paths.staging.iterdir())
