"""Taking away experts and bases, but not from under those that need them."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.errors import ConflictError, NotFoundError, StoreError, UsageError
from expertctl.install.doctor import reindex
from expertctl.install.installed_experts import fits_base, remove_base, remove_expert
from expertctl.reference import Reference
from expertctl.store.catalogue import Catalogue
from expertctl.store.store import Store
from expertctl.store.transaction import StoreTransaction
from tests.factories import write_base
from tests.store.fixtures import BASE_NAME, HomeFixture, PackageFactory


@pytest.fixture
def user_home(user_home: HomeFixture, package_factory: PackageFactory) -> HomeFixture:
    """`acme/top` requires `acme/needed`."""
    user_home.install(
        package_factory.package("acme/needed"),
        package_factory.package("acme/top", composition={"requires": ["acme/needed@^1"]}),
        catalogue=user_home.catalogue,
        index=user_home.index,
    )
    return user_home


def test_a_removed_expert_is_gone_everywhere(user_home: HomeFixture) -> None:
    expert = user_home.store.find(Reference.parse("acme/top"))
    removed = remove_expert(
        "acme/top", store=user_home.store, catalogue=user_home.catalogue, index=user_home.index
    )
    assert (removed.ref, removed.warnings) == ("acme/top@1.0.0", ())
    assert removed.freed.size > 0
    assert user_home.refs() == user_home.catalogue.list_refs() == ["acme/needed@1.0.0"]
    assert expert.content_digest not in user_home.index.table.digests


def test_an_expert_is_removed_by_its_digest(user_home: HomeFixture) -> None:
    expert = user_home.store.find(Reference.parse("acme/top"))
    assert remove_expert(str(expert.package_digest), store=user_home.store).ref == "acme/top@1.0.0"


def test_what_others_require_stays_unless_forced(user_home: HomeFixture) -> None:
    before = user_home.read_files()
    with pytest.raises(ConflictError, match=r"needed by acme/top@1\.0\.0") as error:
        remove_expert("acme/needed", store=user_home.store)
    assert "--force" in error.value.hint
    assert user_home.read_files() == before
    removed = remove_expert("acme/needed", store=user_home.store, force=True)
    assert removed.warnings == ("acme/top@1.0.0 requires acme/needed and will not run",)


def test_a_base_is_needed_by_packages_of_both_versions(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    base = user_home.bases.add(package_factory.base_dir)
    required = user_home.store.find(Reference.parse("acme/top")).base
    assert required.tokenizer_version == 2
    old = replace(required, tokenizer=base.identity.tokenizer, tokenizer_version=1)
    assert fits_base(required, base)
    assert fits_base(old, base)
    assert not fits_base(replace(old, tokenizer=required.tokenizer), base)
    assert not fits_base(replace(required, tokenizer=old.tokenizer), base)


def test_a_version_that_another_one_replaces_may_go(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.install(package_factory.package("acme/needed", "1.1.0"))
    assert remove_expert("acme/needed@1.0.0", store=user_home.store).ref == "acme/needed@1.0.0"
    with pytest.raises(ConflictError):
        remove_expert("acme/needed", store=user_home.store)


def test_what_is_not_there_cannot_be_removed(user_home: HomeFixture) -> None:
    with pytest.raises(NotFoundError) as error:
        remove_expert("acme/toq", store=user_home.store)
    assert "acme/top" in error.value.hint
    with pytest.raises(UsageError):
        remove_expert("../../etc", store=user_home.store)


def test_a_damaged_record_can_be_removed_by_its_name(user_home: HomeFixture) -> None:
    path = user_home.home.store / "refs" / "local" / "acme" / "top" / "1.0.0"
    path.write_bytes(b"\x00" * 10)
    with pytest.raises(StoreError):
        user_home.store.collect_garbage()
    removed = remove_expert("acme/top@1.0.0", store=user_home.store)
    assert "damaged" in removed.warnings[0]
    assert not path.exists()
    assert user_home.store.collect_garbage().size > 0
    assert user_home.refs() == ["acme/needed@1.0.0"]


def test_an_index_that_cannot_be_written_is_a_warning(
    user_home: HomeFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    blocked = Catalogue(tmp_path / "file" / "index.db")
    removed = remove_expert("acme/top", store=user_home.store, catalogue=blocked)
    assert "reindex" in removed.warnings[0]


def test_a_base_that_experts_need_stays_unless_forced(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.bases.add(package_factory.base_dir)
    with pytest.raises(ConflictError, match=r"needed by acme/needed@1\.0\.0, acme/top@1\.0\.0"):
        remove_base(BASE_NAME, bases=user_home.bases, store=user_home.store)
    removed = remove_base(BASE_NAME, bases=user_home.bases, store=user_home.store, force=True)
    assert len(removed.warnings) == 2
    assert user_home.bases.list_bases() == []
    assert (package_factory.base_dir / "config.json").exists()


def test_a_base_that_another_one_replaces_may_go(
    user_home: HomeFixture, package_factory: PackageFactory, tmp_path: Path
) -> None:
    user_home.bases.add(package_factory.base_dir)
    user_home.bases.add(package_factory.base_dir, name="same")
    other = write_base(tmp_path / "other", layers=1, hidden=16, heads=2, kv_heads=1, seed=5)
    user_home.bases.add(other)
    for name in ("other", BASE_NAME):
        assert remove_base(name, bases=user_home.bases, store=user_home.store).warnings == ()
    with pytest.raises(ConflictError):
        remove_base("same", bases=user_home.bases, store=user_home.store)


def test_reindexing_makes_everything_again(user_home: HomeFixture) -> None:
    user_home.home.index.unlink()
    for path in user_home.root.glob("vectors*"):
        path.unlink()
    done = reindex(user_home.store, catalogue=user_home.catalogue, index=user_home.index)
    assert (done.experts, done.warnings) == (2, ())
    assert user_home.catalogue.list_refs() == user_home.refs()
    digests = {expert.content_digest for expert in user_home.store.list_experts()}
    assert set(user_home.index.table.digests) == digests


def test_reindexing_leaves_out_what_is_damaged_and_says_so(user_home: HomeFixture) -> None:
    expert = user_home.store.find(Reference.parse("acme/top"))
    user_home.store.blob_path(expert.find_file("expert.json").digest).unlink()
    path = user_home.home.store / "refs" / "local" / "acme" / "needed" / "1.0.0"
    path.write_bytes(b"")
    done = reindex(user_home.store, catalogue=user_home.catalogue, index=user_home.index)
    assert done.experts == 0
    assert [("acme/needed@1.0.0" in w, "acme/top@1.0.0" in w) for w in done.warnings] == [
        (True, False),
        (False, True),
    ]


def test_a_record_that_was_mended_meanwhile_is_not_removed(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    path = user_home.home.store / "refs" / "local" / "acme" / "needed" / "1.0.0"
    path.write_bytes(b"")

    class Mended(Store):
        def begin_transaction(self) -> AbstractContextManager[StoreTransaction]:
            user_home.install(package_factory.package("acme/needed"))
            return super().begin_transaction()

    with pytest.raises(NotFoundError, match="replaced meanwhile"):
        remove_expert("acme/needed@1.0.0", store=Mended(user_home.home.store))
    assert user_home.refs() == ["acme/needed@1.0.0", "acme/top@1.0.0"]
