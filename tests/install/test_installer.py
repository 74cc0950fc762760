"""Installing packages from files: all that are given, or none."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from expertctl.errors import (
    BaseMismatchError,
    ChangedVersionError,
    ConflictError,
    DigestError,
    InvalidPackageError,
    MissingDependencyError,
    NotFoundError,
    RevokedError,
    StoreError,
    TrustError,
    UnsignedError,
    UsageError,
)
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.read import read_package
from expertctl.reference import Reference
from expertctl.routing.encoder import LexicalEncoder
from expertctl.routing.index import RoutingIndex
from expertctl.store.catalogue import Catalogue
from tests.factories import write_base
from tests.store.fixtures import BASE_NAME, HomeFixture, PackageFactory, make_key


def refuses(
    house: HomeFixture, error: type[Exception], match: str, *paths: Path, **options: object
) -> str:
    """Demand a refusal that leaves no trace; return its hint."""
    before = house.read_files()
    with pytest.raises(error, match=match) as raised:
        house.install(*paths, **options)
    assert house.read_files() == before
    assert not list(house.store.paths.staging.iterdir())
    return str(getattr(raised.value, "hint", ""))


@pytest.fixture
def house(house: HomeFixture, shop: PackageFactory) -> HomeFixture:
    """A house with one expert, so that there is something to lose."""
    house.install(shop.package("acme/first", seed=7))
    return house


def test_a_signed_package_is_installed_and_indexed(
    house: HomeFixture, shop: PackageFactory
) -> None:
    index = RoutingIndex(house.root, LexicalEncoder())
    file = shop.package(description="Writes SQL queries.")
    (done,) = house.install(file, catalogue=house.catalogue, index=index)
    assert (done.outcome, done.expert.ref) == ("installed", "acme/sql@1.0.0")
    assert done.expert.signer == make_key("acme").public.key_id
    assert house.catalogue.list_refs() == ["acme/sql@1.0.0"]
    assert set(index.table.digests) == {done.expert.content_digest}
    house.check_integrity()


def test_nothing_to_install_is_a_usage_error(house: HomeFixture) -> None:
    refuses(house, UsageError, "nothing to install")


def test_a_file_that_is_not_there_is_named(
    house: HomeFixture, tmp_path: Path, shop: PackageFactory
) -> None:
    refuses(house, NotFoundError, r"absent\.expert", shop.package(), tmp_path / "absent.expert")


@pytest.mark.parametrize("given", list(permutations(["base", "middle", "top"])))
def test_what_requires_each_other_may_come_in_any_order(
    given: tuple[str, ...], house: HomeFixture, shop: PackageFactory
) -> None:
    files = {
        "base": shop.package("acme/base"),
        "middle": shop.package("acme/middle", composition={"requires": ["acme/base@^1"]}),
        "top": shop.package("acme/top", composition={"requires": ["acme/middle"]}),
    }
    done = house.install(*[files[name] for name in given])
    assert [item.expert.package.name for item in done] == ["base", "middle", "top"]


def test_a_missing_requirement_is_named_and_nothing_is_installed(
    house: HomeFixture, shop: PackageFactory
) -> None:
    needy = shop.package("acme/needy", composition={"requires": ["acme/base@^1"]})
    hint = refuses(
        house,
        MissingDependencyError,
        r"acme/needy@1\.0\.0 requires acme/base@\^1",
        shop.package("acme/innocent"),
        needy,
    )
    assert "acme/base@^1" in hint
    house.install(shop.package("acme/base"))
    house.install(needy)


def test_a_conflict_is_refused_from_both_sides(house: HomeFixture, shop: PackageFactory) -> None:
    hater = shop.package("acme/hater", composition={"conflicts": ["acme/first@*"]})
    refuses(house, ConflictError, r"acme/hater@1\.0\.0 conflicts with acme/first@1\.0\.0", hater)
    house.store.remove(house.store.find(Reference.parse("acme/first")))
    house.install(hater)
    refuses(house, ConflictError, "conflicts with", shop.package("acme/first", seed=7))


def test_other_content_for_a_version_is_refused_before_anything_is_published(
    house: HomeFixture, shop: PackageFactory
) -> None:
    refuses(
        house,
        ChangedVersionError,
        r"acme/first@1\.0\.0 has another content than before",
        shop.package("acme/new"),
        shop.package("acme/first", seed=8),
    )


def test_two_contents_for_one_version_in_one_command_are_refused(
    house: HomeFixture, shop: PackageFactory
) -> None:
    files = [shop.package("acme/twice", seed=1), shop.package("acme/twice", seed=2)]
    refuses(house, ConflictError, "two files with different content", *files)


def test_the_same_package_given_twice_is_installed_once_and_signed(
    house: HomeFixture, shop: PackageFactory
) -> None:
    files = [shop.package("acme/twice", key=None), shop.package("acme/twice")]
    for given in (files, files[::-1]):
        (done,) = house.install(*given, allow_unsigned=True)
        assert done.expert.signer
    assert done.outcome == "already installed"


def test_unsigned_packages_need_leave_and_carry_a_warning(
    house: HomeFixture, shop: PackageFactory
) -> None:
    file = shop.package("acme/unsigned", key=None)
    hint = refuses(house, UnsignedError, "is not signed", file)
    assert "--allow-unsigned" in hint
    (done,) = house.install(file, allow_unsigned=True)
    assert done.expert.signer is None
    assert any("nobody vouches" in warning for warning in done.warnings)


def test_a_signature_is_never_taken_away(house: HomeFixture, shop: PackageFactory) -> None:
    (signed,) = house.install(shop.package())
    (done,) = house.install(shop.package(key=None), allow_unsigned=True)
    assert done.outcome == "already installed"
    assert done.expert == signed.expert
    assert house.store.find(Reference.parse("acme/sql")).signer
    house.check_integrity()


def test_leave_for_unsigned_packages_is_no_leave_for_foreign_signatures(
    house: HomeFixture, shop: PackageFactory
) -> None:
    file = shop.package(key="stranger")
    refuses(house, TrustError, "is not trusted", file, allow_unsigned=True)


def test_a_revoked_signer_is_refused_until_a_re_sign(
    house: HomeFixture, shop: PackageFactory
) -> None:
    house.install(shop.package())
    house.trust.revoke(make_key("acme").public.key_id, "stolen")
    refuses(house, RevokedError, "revoked: stolen", shop.package("acme/new"))
    refuses(house, RevokedError, "revoked", shop.package())
    house.trust_keys("other")
    (done,) = house.install(shop.package(key="other"))
    assert done.outcome == "re-signed"


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_file_changes_nothing(
    damage: str, house: HomeFixture, shop: PackageFactory, tmp_path: Path
) -> None:
    data = shop.package().read_bytes()
    middle = len(data) // 2
    bad = {
        "cut": data[:-20],
        "flip": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        "empty": b"",
        "text": b"not a package",
    }[damage]
    file = tmp_path / "bad.expert"
    file.write_bytes(bad)
    with pytest.raises((InvalidPackageError, DigestError)):
        house.install(shop.package("acme/good"), file)
    assert house.refs() == ["acme/first@1.0.0"]
    assert not list(house.store.paths.staging.iterdir())
    house.check_integrity()


def test_a_file_that_changes_after_it_was_verified_is_stored_as_it_was_verified(
    house: HomeFixture, shop: PackageFactory, tmp_path: Path
) -> None:
    file = tmp_path / "race.expert"
    file.write_bytes(shop.package().read_bytes())
    contents = read_package(file)

    def change(_: int) -> None:
        file.unlink(missing_ok=True)

    (done,) = house.install(file, progress=change)
    assert done.expert.content_digest == contents.content_digest
    house.check_integrity()


def test_a_base_that_is_not_added_is_a_warning_of_the_moment(
    house: HomeFixture, shop: PackageFactory
) -> None:
    (done,) = house.install(shop.package())
    assert any(f"{BASE_NAME} is not added yet" in warning for warning in done.warnings)
    assert done.expert.warnings == ()
    house.bases.add(shop.base_dir)
    (done,) = house.install(shop.package())
    assert (done.outcome, done.warnings) == ("already installed", ())


def test_another_base_of_that_name_is_refused_unless_allowed(
    house: HomeFixture, shop: PackageFactory, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other", layers=1, hidden=16, heads=2, kv_heads=1, seed=3)
    house.bases.add(other, name=BASE_NAME)
    hint = refuses(house, BaseMismatchError, "the weights differ", shop.package())
    assert "--allow-base-mismatch" in hint
    (done,) = house.install(shop.package(), allow_base_mismatch=True)
    assert done.expert.allows_mismatch
    assert house.store.list_experts()[-1].warnings == done.expert.warnings
    house.bases.remove(house.bases.find(BASE_NAME))
    house.bases.add(shop.base_dir)
    (done,) = house.install(shop.package())
    assert not house.store.find(Reference.parse("acme/sql")).allows_mismatch
    assert not done.expert.allows_mismatch


def test_a_base_of_another_name_with_the_same_content_fits(
    house: HomeFixture, shop: PackageFactory
) -> None:
    house.bases.add(shop.base_dir, name="renamed")
    (done,) = house.install(shop.package())
    assert done.warnings == ()


def test_tensors_that_no_module_of_the_base_takes_are_refused(
    house: HomeFixture, shop: PackageFactory, tmp_path: Path
) -> None:
    """A package that states the base's digests but was made for more layers."""
    deeper = write_base(tmp_path / "deeper", layers=2, hidden=16, heads=2, kv_heads=1)
    house.bases.add(shop.base_dir)
    claimed = BaseFacts(shop.base.identity, read_base(deeper).shapes)
    lying = shop.package("acme/lying", base_dir=deeper, base=claimed)
    refuses(
        house, BaseMismatchError, r"model\.layers\.1\.self_attn\.q_proj: the base has no", lying
    )


def test_a_package_without_weights_digest_says_that_content_was_not_checked(
    house: HomeFixture, shop: PackageFactory
) -> None:
    house.bases.add(shop.base_dir)
    unread = BaseFacts(replace(shop.base.identity, weights=None), shop.base.shapes)
    (done,) = house.install(shop.package("acme/loose", base=unread))
    assert any("content of the base was not checked" in text for text in done.expert.warnings)


def test_an_index_that_cannot_be_written_does_not_undo_the_install(
    house: HomeFixture, shop: PackageFactory, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (done,) = house.install(shop.package(), catalogue=Catalogue(tmp_path / "file" / "index.db"))
    assert "reindex" in done.warnings[-1]
    assert "acme/sql@1.0.0" in house.refs()


def test_progress_tells_every_byte_of_every_file(house: HomeFixture, shop: PackageFactory) -> None:
    seen: list[int] = []
    done = house.install(shop.package(), shop.package("acme/more"), progress=seen.append)
    assert sum(seen) == sum(item.expert.size for item in done)


def test_a_store_that_is_no_folder_is_told(tmp_path: Path, shop: PackageFactory) -> None:
    house = HomeFixture(tmp_path / "elsewhere").trust_keys("acme")
    (tmp_path / "elsewhere" / "store").write_text("")
    with pytest.raises(StoreError):
        house.install(shop.package())


def test_the_known_bases_are_read_once_for_all(
    house: HomeFixture, shop: PackageFactory, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "wide", layers=1, hidden=32, heads=2, kv_heads=1)
    house.bases.add(shop.base_dir)
    house.bases.add(other)
    wide = shop.package("acme/wide", base_dir=other, base=read_base(other))
    done = house.install(shop.package(), wide)
    assert [item.warnings for item in done] == [(), ()]
