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
def house(house: HomeFixture, shop: PackageFactory) -> HomeFixture:
    """`acme/top` requires `acme/needed`."""
    house.install(
        shop.package("acme/needed"),
        shop.package("acme/top", composition={"requires": ["acme/needed@^1"]}),
        catalogue=house.catalogue,
        index=house.index,
    )
    return house


def test_a_removed_expert_is_gone_everywhere(house: HomeFixture) -> None:
    expert = house.store.find(Reference.parse("acme/top"))
    removed = remove_expert(
        "acme/top", store=house.store, catalogue=house.catalogue, index=house.index
    )
    assert (removed.ref, removed.warnings) == ("acme/top@1.0.0", ())
    assert removed.freed.size > 0
    assert house.refs() == house.catalogue.list_refs() == ["acme/needed@1.0.0"]
    assert expert.content_digest not in house.index.table.digests


def test_an_expert_is_removed_by_its_digest(house: HomeFixture) -> None:
    expert = house.store.find(Reference.parse("acme/top"))
    assert remove_expert(str(expert.package_digest), store=house.store).ref == "acme/top@1.0.0"


def test_what_others_require_stays_unless_forced(house: HomeFixture) -> None:
    before = house.read_files()
    with pytest.raises(ConflictError, match=r"needed by acme/top@1\.0\.0") as error:
        remove_expert("acme/needed", store=house.store)
    assert "--force" in error.value.hint
    assert house.read_files() == before
    removed = remove_expert("acme/needed", store=house.store, force=True)
    assert removed.warnings == ("acme/top@1.0.0 requires acme/needed and will not run",)


def test_a_base_is_needed_by_packages_of_both_versions(
    house: HomeFixture, shop: PackageFactory
) -> None:
    base = house.bases.add(shop.base_dir)
    required = house.store.find(Reference.parse("acme/top")).base
    assert required.tokenizer_version == 2
    old = replace(required, tokenizer=base.identity.tokenizer, tokenizer_version=1)
    assert fits_base(required, base)
    assert fits_base(old, base)
    assert not fits_base(replace(old, tokenizer=required.tokenizer), base)
    assert not fits_base(replace(required, tokenizer=old.tokenizer), base)


def test_a_version_that_another_one_replaces_may_go(
    house: HomeFixture, shop: PackageFactory
) -> None:
    house.install(shop.package("acme/needed", "1.1.0"))
    assert remove_expert("acme/needed@1.0.0", store=house.store).ref == "acme/needed@1.0.0"
    with pytest.raises(ConflictError):
        remove_expert("acme/needed", store=house.store)


def test_what_is_not_there_cannot_be_removed(house: HomeFixture) -> None:
    with pytest.raises(NotFoundError) as error:
        remove_expert("acme/toq", store=house.store)
    assert "acme/top" in error.value.hint
    with pytest.raises(UsageError):
        remove_expert("../../etc", store=house.store)


def test_a_damaged_record_can_be_removed_by_its_name(house: HomeFixture) -> None:
    path = house.home.store / "refs" / "local" / "acme" / "top" / "1.0.0"
    path.write_bytes(b"\x00" * 10)
    with pytest.raises(StoreError):
        house.store.collect_garbage()
    removed = remove_expert("acme/top@1.0.0", store=house.store)
    assert "damaged" in removed.warnings[0]
    assert not path.exists()
    assert house.store.collect_garbage().size > 0
    assert house.refs() == ["acme/needed@1.0.0"]


def test_an_index_that_cannot_be_written_is_a_warning(house: HomeFixture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = Catalogue(tmp_path / "file" / "index.db")
    removed = remove_expert("acme/top", store=house.store, catalogue=blocked)
    assert "reindex" in removed.warnings[0]


def test_a_base_that_experts_need_stays_unless_forced(
    house: HomeFixture, shop: PackageFactory
) -> None:
    house.bases.add(shop.base_dir)
    with pytest.raises(ConflictError, match=r"needed by acme/needed@1\.0\.0, acme/top@1\.0\.0"):
        remove_base(BASE_NAME, bases=house.bases, store=house.store)
    removed = remove_base(BASE_NAME, bases=house.bases, store=house.store, force=True)
    assert len(removed.warnings) == 2
    assert house.bases.list_bases() == []
    assert (shop.base_dir / "config.json").exists()


def test_a_base_that_another_one_replaces_may_go(
    house: HomeFixture, shop: PackageFactory, tmp_path: Path
) -> None:
    house.bases.add(shop.base_dir)
    house.bases.add(shop.base_dir, name="same")
    other = write_base(tmp_path / "other", layers=1, hidden=16, heads=2, kv_heads=1, seed=5)
    house.bases.add(other)
    for name in ("other", BASE_NAME):
        assert remove_base(name, bases=house.bases, store=house.store).warnings == ()
    with pytest.raises(ConflictError):
        remove_base("same", bases=house.bases, store=house.store)


def test_reindexing_makes_everything_again(house: HomeFixture) -> None:
    house.home.index.unlink()
    for path in house.root.glob("vectors*"):
        path.unlink()
    done = reindex(house.store, catalogue=house.catalogue, index=house.index)
    assert (done.experts, done.warnings) == (2, ())
    assert house.catalogue.list_refs() == house.refs()
    digests = {expert.content_digest for expert in house.store.list_experts()}
    assert set(house.index.table.digests) == digests


def test_reindexing_leaves_out_what_is_damaged_and_says_so(house: HomeFixture) -> None:
    expert = house.store.find(Reference.parse("acme/top"))
    house.store.blob_path(expert.find_file("expert.json").digest).unlink()
    path = house.home.store / "refs" / "local" / "acme" / "needed" / "1.0.0"
    path.write_bytes(b"")
    done = reindex(house.store, catalogue=house.catalogue, index=house.index)
    assert done.experts == 0
    assert [("acme/needed@1.0.0" in w, "acme/top@1.0.0" in w) for w in done.warnings] == [
        (True, False),
        (False, True),
    ]


def test_a_record_that_was_mended_meanwhile_is_not_removed(
    house: HomeFixture, shop: PackageFactory
) -> None:
    path = house.home.store / "refs" / "local" / "acme" / "needed" / "1.0.0"
    path.write_bytes(b"")

    class Mended(Store):
        def begin_transaction(self) -> AbstractContextManager[StoreTransaction]:
            house.install(shop.package("acme/needed"))
            return super().begin_transaction()

    with pytest.raises(NotFoundError, match="replaced meanwhile"):
        remove_expert("acme/needed@1.0.0", store=Mended(house.home.store))
    assert house.refs() == ["acme/needed@1.0.0", "acme/top@1.0.0"]
