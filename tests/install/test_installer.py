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
    user_home: HomeFixture, error: type[Exception], match: str, *paths: Path, **options: object
) -> str:
    """Demand a refusal that leaves no trace; return its hint."""
    before = user_home.read_files()
    with pytest.raises(error, match=match) as raised:
        user_home.install(*paths, **options)
    assert user_home.read_files() == before
    assert not list(user_home.store.paths.staging.iterdir())
    return str(getattr(raised.value, "hint", ""))


@pytest.fixture
def user_home(user_home: HomeFixture, package_factory: PackageFactory) -> HomeFixture:
    """A house with one expert, so that there is something to lose."""
    user_home.install(package_factory.package("acme/first", seed=7))
    return user_home


def test_a_signed_package_is_installed_and_indexed(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    index = RoutingIndex(user_home.root, LexicalEncoder())
    file = package_factory.package(description="Writes SQL queries.")
    (done,) = user_home.install(file, catalogue=user_home.catalogue, index=index)
    assert (done.outcome, done.expert.ref) == ("installed", "acme/sql@1.0.0")
    assert done.expert.signer == make_key("acme").public.key_id
    assert user_home.catalogue.list_refs() == ["acme/sql@1.0.0"]
    assert set(index.table.digests) == {done.expert.content_digest}
    user_home.check_integrity()


def test_nothing_to_install_is_a_usage_error(user_home: HomeFixture) -> None:
    refuses(user_home, UsageError, "nothing to install")


def test_a_file_that_is_not_there_is_named(
    user_home: HomeFixture, tmp_path: Path, package_factory: PackageFactory
) -> None:
    refuses(
        user_home,
        NotFoundError,
        r"absent\.expert",
        package_factory.package(),
        tmp_path / "absent.expert",
    )


@pytest.mark.parametrize("given", list(permutations(["base", "middle", "top"])))
def test_what_requires_each_other_may_come_in_any_order(
    given: tuple[str, ...], user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    files = {
        "base": package_factory.package("acme/base"),
        "middle": package_factory.package(
            "acme/middle", composition={"requires": ["acme/base@^1"]}
        ),
        "top": package_factory.package("acme/top", composition={"requires": ["acme/middle"]}),
    }
    done = user_home.install(*[files[name] for name in given])
    assert [item.expert.package.name for item in done] == ["base", "middle", "top"]


def test_a_missing_requirement_is_named_and_nothing_is_installed(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    needy = package_factory.package("acme/needy", composition={"requires": ["acme/base@^1"]})
    hint = refuses(
        user_home,
        MissingDependencyError,
        r"acme/needy@1\.0\.0 requires acme/base@\^1",
        package_factory.package("acme/innocent"),
        needy,
    )
    assert "acme/base@^1" in hint
    user_home.install(package_factory.package("acme/base"))
    user_home.install(needy)


def test_a_conflict_is_refused_from_both_sides(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    hater = package_factory.package("acme/hater", composition={"conflicts": ["acme/first@*"]})
    refuses(
        user_home, ConflictError, r"acme/hater@1\.0\.0 conflicts with acme/first@1\.0\.0", hater
    )
    user_home.store.remove(user_home.store.find(Reference.parse("acme/first")))
    user_home.install(hater)
    refuses(
        user_home, ConflictError, "conflicts with", package_factory.package("acme/first", seed=7)
    )


def test_other_content_for_a_version_is_refused_before_anything_is_published(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    refuses(
        user_home,
        ChangedVersionError,
        r"acme/first@1\.0\.0 has another content than before",
        package_factory.package("acme/new"),
        package_factory.package("acme/first", seed=8),
    )


def test_two_contents_for_one_version_in_one_command_are_refused(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    files = [
        package_factory.package("acme/twice", seed=1),
        package_factory.package("acme/twice", seed=2),
    ]
    refuses(user_home, ConflictError, "two files with different content", *files)


def test_the_same_package_given_twice_is_installed_once_and_signed(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    files = [package_factory.package("acme/twice", key=None), package_factory.package("acme/twice")]
    for given in (files, files[::-1]):
        (done,) = user_home.install(*given, allow_unsigned=True)
        assert done.expert.signer
    assert done.outcome == "already installed"


def test_unsigned_packages_need_leave_and_carry_a_warning(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    file = package_factory.package("acme/unsigned", key=None)
    hint = refuses(user_home, UnsignedError, "is not signed", file)
    assert "--allow-unsigned" in hint
    (done,) = user_home.install(file, allow_unsigned=True)
    assert done.expert.signer is None
    assert any("nobody vouches" in warning for warning in done.warnings)


def test_a_signature_is_never_taken_away(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (signed,) = user_home.install(package_factory.package())
    (done,) = user_home.install(package_factory.package(key=None), allow_unsigned=True)
    assert done.outcome == "already installed"
    assert done.expert == signed.expert
    assert user_home.store.find(Reference.parse("acme/sql")).signer
    user_home.check_integrity()


def test_leave_for_unsigned_packages_is_no_leave_for_foreign_signatures(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    file = package_factory.package(key="stranger")
    refuses(user_home, TrustError, "is not trusted", file, allow_unsigned=True)


def test_a_revoked_signer_is_refused_until_a_re_sign(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package())
    user_home.trust.revoke(make_key("acme").public.key_id, "stolen")
    refuses(user_home, RevokedError, "revoked: stolen", package_factory.package("acme/new"))
    refuses(user_home, RevokedError, "revoked", package_factory.package())
    user_home.trust_keys("other")
    (done,) = user_home.install(package_factory.package(key="other"))
    assert done.outcome == "re-signed"


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_file_changes_nothing(
    damage: str, user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    data = package_factory.package().read_bytes()
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
        user_home.install(package_factory.package("acme/good"), file)
    assert user_home.refs() == ["acme/first@1.0.0"]
    assert not list(user_home.store.paths.staging.iterdir())
    user_home.check_integrity()


def test_a_file_that_changes_after_it_was_verified_is_stored_as_it_was_verified(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    file = tmp_path / "race.expert"
    file.write_bytes(package_factory.package().read_bytes())
    contents = read_package(file)

    def change(_: int) -> None:
        file.unlink(missing_ok=True)

    (done,) = user_home.install(file, progress=change)
    assert done.expert.content_digest == contents.content_digest
    user_home.check_integrity()


def test_a_base_that_is_not_added_is_a_warning_of_the_moment(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (done,) = user_home.install(package_factory.package())
    assert any(f"{BASE_NAME} is not added yet" in warning for warning in done.warnings)
    assert done.expert.warnings == ()
    user_home.bases.add(package_factory.base_dir)
    (done,) = user_home.install(package_factory.package())
    assert (done.outcome, done.warnings) == ("already installed", ())


def test_another_base_of_that_name_is_refused_unless_allowed(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "other", layers=1, hidden=16, heads=2, kv_heads=1, seed=3)
    user_home.bases.add(other, name=BASE_NAME)
    hint = refuses(user_home, BaseMismatchError, "the weights differ", package_factory.package())
    assert "--allow-base-mismatch" in hint
    (done,) = user_home.install(package_factory.package(), allow_base_mismatch=True)
    assert done.expert.allows_mismatch
    assert user_home.store.list_experts()[-1].warnings == done.expert.warnings
    user_home.bases.remove(user_home.bases.find(BASE_NAME))
    user_home.bases.add(package_factory.base_dir)
    (done,) = user_home.install(package_factory.package())
    assert not user_home.store.find(Reference.parse("acme/sql")).allows_mismatch
    assert not done.expert.allows_mismatch


def test_a_base_of_another_name_with_the_same_content_fits(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.bases.add(package_factory.base_dir, name="renamed")
    (done,) = user_home.install(package_factory.package())
    assert done.warnings == ()


def test_tensors_that_no_module_of_the_base_takes_are_refused(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    """A package that states the base's digests but was made for more layers."""
    deeper = write_base(tmp_path / "deeper", layers=2, hidden=16, heads=2, kv_heads=1)
    user_home.bases.add(package_factory.base_dir)
    claimed = BaseFacts(package_factory.base.identity, read_base(deeper).shapes)
    lying = package_factory.package("acme/lying", base_dir=deeper, base=claimed)
    refuses(
        user_home, BaseMismatchError, r"model\.layers\.1\.self_attn\.q_proj: the base has no", lying
    )


def test_a_package_without_weights_digest_says_that_content_was_not_checked(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.bases.add(package_factory.base_dir)
    unread = BaseFacts(
        replace(package_factory.base.identity, weights=None), package_factory.base.shapes
    )
    (done,) = user_home.install(package_factory.package("acme/loose", base=unread))
    assert any("content of the base was not checked" in text for text in done.expert.warnings)


def test_an_index_that_cannot_be_written_does_not_undo_the_install(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (done,) = user_home.install(
        package_factory.package(), catalogue=Catalogue(tmp_path / "file" / "index.db")
    )
    assert "reindex" in done.warnings[-1]
    assert "acme/sql@1.0.0" in user_home.refs()


def test_progress_tells_every_byte_of_every_file(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    seen: list[int] = []
    done = user_home.install(
        package_factory.package(), package_factory.package("acme/more"), progress=seen.append
    )
    assert sum(seen) == sum(item.expert.size for item in done)


def test_a_store_that_is_no_folder_is_told(tmp_path: Path, package_factory: PackageFactory) -> None:
    user_home = HomeFixture(tmp_path / "elsewhere").trust_keys("acme")
    (tmp_path / "elsewhere" / "store").write_text("")
    with pytest.raises(StoreError):
        user_home.install(package_factory.package())


def test_the_known_bases_are_read_once_for_all(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    other = write_base(tmp_path / "wide", layers=1, hidden=32, heads=2, kv_heads=1)
    user_home.bases.add(package_factory.base_dir)
    user_home.bases.add(other)
    wide = package_factory.package("acme/wide", base_dir=other, base=read_base(other))
    done = user_home.install(package_factory.package(), wide)
    assert [item.warnings for item in done] == [(), ()]
