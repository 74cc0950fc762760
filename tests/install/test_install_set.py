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


def import_set(user_home: HomeFixture, path: Path, **options: Any) -> list[InstalledPackage]:
    locked = options.pop("locked", {})
    return install_set(path, user_home.context(**options), locked=locked)


def refuses(
    user_home: HomeFixture, error: type[Exception], match: str, path: Path, **options: object
) -> str:
    """Demand a refusal that leaves no trace; return its hint."""
    before = user_home.read_files()
    with pytest.raises(error, match=match) as raised:
        import_set(user_home, path, **options)
    assert user_home.read_files() == before
    assert not list(user_home.store.paths.staging.iterdir())
    return str(getattr(raised.value, "hint", ""))


@pytest.fixture
def user_home(user_home: HomeFixture, package_factory: PackageFactory) -> HomeFixture:
    """A house with one expert, so that there is something to lose."""
    user_home.install(package_factory.package("acme/first", seed=7))
    return user_home


@pytest.fixture
def chain(package_factory: PackageFactory) -> Sequence[Path]:
    """Three experts that require each other."""
    return (
        package_factory.package("acme/low", seed=1),
        package_factory.package("acme/middle", composition={"requires": ["acme/low@^1"]}, seed=2),
        package_factory.package("acme/top", composition={"requires": ["acme/middle"]}, seed=3),
    )


def test_a_set_is_installed_in_order_and_indexed(
    user_home: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    index = RoutingIndex(user_home.root, LexicalEncoder())
    done = import_set(user_home, make(*chain), catalogue=user_home.catalogue, index=index)
    refs = ["acme/low@1.0.0", "acme/middle@1.0.0", "acme/top@1.0.0"]
    assert [(item.expert.ref, item.outcome) for item in done] == [(r, "installed") for r in refs]
    assert user_home.catalogue.list_refs() == refs
    assert {item.expert.signer for item in done} == {make_key("acme").public.key_id}
    user_home.check_integrity()


def test_a_set_leaves_the_store_as_installing_its_files_does(
    user_home: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    user_home.install(*chain)
    expected = user_home.read_files()
    for expert in user_home.store.list_experts():
        if expert.package.name != "first":
            user_home.store.remove(expert)
    import_set(user_home, make(*chain))
    assert user_home.read_files() == expected


def test_installing_a_set_again_changes_nothing(
    user_home: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    path = make(*chain)
    import_set(user_home, path)
    before = user_home.read_files()
    assert {item.outcome for item in import_set(user_home, path)} == {"already installed"}
    assert user_home.read_files() == before


def test_a_plain_archive_is_installed_too(
    user_home: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    path = make(*chain)
    path.write_bytes(read_archive(path))
    assert len(import_set(user_home, path)) == 3
    user_home.check_integrity()


def test_experts_that_share_all_their_weights_are_each_complete(
    user_home: HomeFixture, make: Make, package_factory: PackageFactory
) -> None:
    twins = [package_factory.package(f"acme/twin{number}", seed=5) for number in range(3)]
    done = import_set(user_home, make(*twins))
    assert len({max(item.expert.files, key=lambda f: f.size).digest for item in done}) == 1
    user_home.check_integrity()


def test_what_a_set_requires_may_be_there_already(
    user_home: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    path = make(*chain[1:])
    hint = refuses(user_home, MissingDependencyError, r"requires acme/low@\^1", path)
    assert "acme/low@^1" in hint
    user_home.install(chain[0])
    assert len(import_set(user_home, path)) == 2


def test_one_bad_signature_refuses_all(
    user_home: HomeFixture,
    make: Make,
    package_factory: PackageFactory,
    chain: Sequence[Path],
    tmp_path: Path,
) -> None:
    refuses(
        user_home,
        TrustError,
        "not trusted",
        make(*chain, package_factory.package("acme/x", key="eve")),
    )
    files = {name_of(package): read_packed_files(read_archive(package)) for package in chain}
    swapped = dict(zip(files, [f["model.sig"] for f in files.values()][::-1], strict=True))
    forged = {name: {**f, "model.sig": swapped[name]} for name, f in files.items()}
    path = write_frame(make_archive(list_set_members(forged)), tmp_path / "forged.experts")
    refuses(user_home, SignatureError, r"acme/low@1\.0\.0: model\.sig does not fit", path)


def test_a_revoked_key_refuses_all(
    user_home: HomeFixture, make: Make, chain: Sequence[Path]
) -> None:
    user_home.trust.revoke(make_key("acme").public.key_id, "lost")
    refuses(user_home, RevokedError, "revoked", make(*chain))


def test_unsigned_packages_need_leave(
    user_home: HomeFixture, make: Make, package_factory: PackageFactory
) -> None:
    path = make(
        package_factory.package("acme/signed"), package_factory.package("acme/unsigned", key=None)
    )
    hint = refuses(user_home, UnsignedError, "is not signed", path)
    assert "--allow-unsigned" in hint
    done = import_set(user_home, path, allow_unsigned=True)
    assert [item.expert.signer is None for item in done] == [False, True]
    assert any("nobody vouches" in warning for warning in done[1].warnings)


def test_a_strange_base_needs_leave(
    user_home: HomeFixture, make: Make, package_factory: PackageFactory, tmp_path: Path
) -> None:
    user_home.bases.add(package_factory.base_dir, name=BASE_NAME)
    other = write_base(tmp_path / BASE_NAME, layers=1, hidden=16, heads=2, kv_heads=1, seed=9)
    path = make(package_factory.package("acme/strange", base_dir=other, base=read_base(other)))
    refuses(user_home, BaseMismatchError, "the weights differ", path)
    (done,) = import_set(user_home, path, allow_base_mismatch=True)
    assert (done.outcome, done.expert.ref) == ("installed", "acme/strange@1.0.0")
    assert done.expert.allows_mismatch
    assert any("the weights differ" in warning for warning in done.warnings)


def test_a_conflict_refuses_all(
    user_home: HomeFixture, make: Make, package_factory: PackageFactory
) -> None:
    hater = package_factory.package("acme/hater", composition={"conflicts": ["acme/first"]})
    refuses(
        user_home,
        ConflictError,
        "conflicts with",
        make(hater, package_factory.package("acme/other")),
    )
    changed = make(
        package_factory.package("acme/first", seed=8), package_factory.package("acme/other")
    )
    refuses(user_home, ChangedVersionError, "has another content than before", changed)


SLOW = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@given(at=st.integers(0, 10**6), flip=st.integers(0, 255))
@SLOW
def test_a_set_that_was_tampered_with_or_cut_changes_nothing(
    at: int,
    flip: int,
    user_home: HomeFixture,
    make: Make,
    package_factory: PackageFactory,
    tmp_path: Path,
) -> None:
    path = make(
        package_factory.package("acme/a", seed=1), package_factory.package("acme/b", seed=2)
    )
    data = bytearray(read_archive(path))
    at %= len(data)
    if flip:
        data[at] ^= flip
    else:
        del data[at:]
    path.write_bytes(data)
    before = user_home.read_files()
    with pytest.raises((InvalidPackageError, DigestError, TrustError)):
        import_set(user_home, path)
    assert user_home.read_files() == before
    assert not list(user_home.store.paths.staging.iterdir())
