"""What is installed, found, removed and kept."""

import multiprocessing
import os
from pathlib import Path

import pytest

from expertctl.digest import Digest
from expertctl.errors import ChangedVersionError, DigestError, NotFoundError, StoreError
from expertctl.package.read import read_package, verify_contents
from expertctl.reference import Reference
from expertctl.store.refs import StoredExpert
from expertctl.store.store import Store, find_similar_names
from expertctl.store.transaction import AddResult
from tests.store.fixtures import HomeFixture, PackageFactory, publish


def add(user_home: HomeFixture, file: Path) -> AddResult:
    """Install a signed package without any check of others."""
    with user_home.store.stage_package() as staging:
        package = verify_contents(read_package(file, sink=staging), user_home.trust)
        return publish(user_home.store, package, staging)


def put(user_home: HomeFixture, *files: Path) -> list[StoredExpert]:
    return [add(user_home, file).expert for file in files]


def test_an_empty_store_is_read_without_being_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.list_experts() == []
    assert store.collect_garbage().size == 0
    assert store.find_garbage().size == 0
    store.check_integrity()
    assert not store.root.exists()


def test_an_added_package_is_read_back_whole(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    file = package_factory.package()
    contents = read_package(file)
    (expert,) = put(user_home, file)
    assert user_home.store.list_experts() == [expert]
    assert expert.ref == "acme/sql@1.0.0"
    assert expert.registry == "local"
    assert expert.content_digest == contents.content_digest
    assert expert.package_digest == contents.package_digest
    assert expert.files == contents.files
    assert expert.signer is not None
    assert user_home.store.read_manifest(expert) == contents.manifest
    for path, data in contents.small.items():
        assert user_home.store.read(expert, path) == data
    user_home.check_integrity()


def test_the_layout_on_disk_is_that_of_the_contract(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    root = user_home.home.store
    assert (root / "refs" / "local" / "acme" / "sql" / "1.0.0").is_file()
    names = {path.name for path in (root / "blobs" / "sha256").iterdir()}
    assert names == {file.digest.hex for file in expert.layers}
    assert list((root / "staging").iterdir()) == []
    modes = {(root / "blobs" / "sha256" / name).stat().st_mode & 0o777 for name in names}
    assert modes == {0o444}


def test_versions_stand_side_by_side_and_the_newest_is_found(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    files = [package_factory.package(version=v) for v in ("1.0.0", "1.10.0", "1.9.0", "2.0.0-rc.1")]
    put(user_home, *files)
    found = {
        text: str(user_home.store.find(Reference.parse(text)).version)
        for text in ("acme/sql", "acme/sql@1.9.0", "acme/sql@~1.9", "acme/sql@2.0.0-rc.1")
    }
    assert found == {
        "acme/sql": "1.10.0",
        "acme/sql@1.9.0": "1.9.0",
        "acme/sql@~1.9": "1.9.0",
        "acme/sql@2.0.0-rc.1": "2.0.0-rc.1",
    }
    assert user_home.refs() == [
        "acme/sql@1.0.0",
        "acme/sql@1.9.0",
        "acme/sql@1.10.0",
        "acme/sql@2.0.0-rc.1",
    ]


def test_an_expert_is_found_by_either_digest(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    assert user_home.store.find(expert.content_digest) == expert
    assert user_home.store.find(expert.package_digest) == expert
    with pytest.raises(NotFoundError, match="is not installed"):
        user_home.store.find(Digest.compute(b"other"))


def test_what_is_not_there_is_told_with_what_is_near(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(
        user_home,
        package_factory.package("acme/sql-gen"),
        package_factory.package("acme/only-rc", "1.0.0-rc.1"),
    )
    with pytest.raises(NotFoundError, match="acme/sql-gne is not installed") as error:
        user_home.store.find(Reference.parse("acme/sql-gne"))
    assert error.value.hint == "did you mean acme/sql-gen?"
    with pytest.raises(NotFoundError, match="no installed version fits") as error:
        user_home.store.find(Reference.parse("acme/sql-gen@^2"))
    assert error.value.hint == "installed: 1.0.0"
    with pytest.raises(NotFoundError) as error:
        user_home.store.find(Reference.parse("acme/only-rc"))
    assert "prerelease must be named" in error.value.hint
    with pytest.raises(NotFoundError) as error:
        user_home.store.find(Reference.parse("zzz/qqq"))
    assert "expertctl list" in error.value.hint


def test_a_foreign_registry_has_nothing_of_ours(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package())
    assert user_home.store.find(Reference.parse("local/acme/sql"))
    with pytest.raises(NotFoundError):
        user_home.store.find(Reference.parse("example.com/acme/sql"))


def test_near_names_are_at_most_three() -> None:
    assert (
        find_similar_names("acme/sql", ["acme/sql1", "acme/sql2", "acme/sql3", "acme/sql4"])[3:]
        == []
    )


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("starter/sortin", ["starter/sorting"]),
        ("starter/unit", ["starter/units"]),
        ("units", ["metric/units", "starter/units"]),
        ("sortin", ["starter/sorting"]),
        ("starte/json", ["starter/json"]),
        ("starter/poems", []),
        ("other/json", []),
        ("", []),
    ],
)
def test_names_are_alike_by_what_they_do_not_share(typed: str, near: list[str]) -> None:
    known = [f"starter/{name}" for name in ("json", "past", "sorting", "units", "dates")]
    assert find_similar_names(typed, [*known, "metric/units"]) == near


def test_whoever_looks_sees_that_an_expert_came_or_went(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    seen = [user_home.store.revision()]
    put(user_home, package_factory.package())
    seen.append(user_home.store.revision())
    assert user_home.store.revision() == seen[-1]
    user_home.store.remove(user_home.store.list_experts()[0])
    assert len({*seen, user_home.store.revision()}) == 3


def test_the_same_content_again_changes_nothing(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    file = package_factory.package()
    assert add(user_home, file).outcome == "installed"
    before = user_home.read_files()
    assert add(user_home, file).outcome == "already installed"
    assert user_home.read_files() == before


def test_the_same_content_under_a_new_signature_is_a_re_sign(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    user_home.trust_keys("other")
    old = add(user_home, package_factory.package()).expert
    added = add(user_home, package_factory.package(key="other"))
    assert added.outcome == "re-signed"
    assert added.expert.content_digest == old.content_digest
    assert added.expert.package_digest != old.package_digest
    assert user_home.store.list_experts() == [added.expert]
    assert old.signature is not None
    assert not user_home.store.paths.blob(old.signature.digest).exists()
    user_home.check_integrity()


def test_other_content_for_a_version_is_refused(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package())
    before = user_home.read_files()
    with pytest.raises(ChangedVersionError, match="has another content than before") as error:
        add(user_home, package_factory.package(seed=9))
    assert "--accept-changed acme/sql@1.0.0" in error.value.hint
    assert user_home.read_files() == before


def test_adding_again_repairs_what_was_damaged(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    before = user_home.read_files()
    weights = user_home.store.blob_path(expert.find_file("adapter_model.safetensors").digest)
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    user_home.store.blob_path(expert.find_file("expert.json").digest).unlink()
    assert put(user_home, package_factory.package()) == [expert]
    assert user_home.read_files() == before
    user_home.check_integrity()


def test_removing_frees_what_nothing_else_needs(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    one, two = put(
        user_home, package_factory.package("acme/one"), package_factory.package("acme/two")
    )
    shared = {f.digest for f in one.files} & {f.digest for f in two.files}
    assert shared
    freed = user_home.store.remove(one)
    assert set(freed.blobs) == {f.digest for f in one.layers} - shared
    assert freed.size == sum(f.size for f in one.layers if f.digest not in shared)
    assert user_home.refs() == ["acme/two@1.0.0"]
    assert not (user_home.home.store / "refs" / "local" / "acme" / "one").exists()
    user_home.check_integrity()
    user_home.store.remove(two)
    assert list(user_home.store.paths.blobs.iterdir()) == []
    assert not (user_home.home.store / "refs" / "local" / "acme").exists()


def test_a_changed_file_is_never_used(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    path = user_home.store.blob_path(expert.find_file("expert.json").digest)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"acme", b"evil"))
    with pytest.raises(DigestError, match=r"expert\.json was changed") as error:
        user_home.store.read_manifest(expert)
    assert "doctor" in error.value.hint


def test_a_missing_file_is_told_with_the_way_out(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    user_home.store.blob_path(expert.files[0].digest).unlink()
    with pytest.raises(StoreError, match="missing") as error:
        user_home.store.blob_path(expert.files[0].digest)
    assert "doctor" in error.value.hint


def test_a_damaged_ref_hides_only_itself(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package("acme/one"), package_factory.package("acme/two"))
    path = user_home.home.store / "refs" / "local" / "acme" / "one" / "1.0.0"
    path.write_bytes(path.read_bytes()[:-10])
    now = user_home.store.scan()
    assert [e.ref for e in now.experts] == ["acme/two@1.0.0"]
    assert [(d.name, d.path) for d in now.damaged] == [("acme/one@1.0.0", path)]


def test_a_ref_in_the_place_of_another_is_damaged(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package("acme/one"))
    path = user_home.home.store / "refs" / "local" / "acme" / "one" / "1.0.0"
    path.rename(path.with_name("9.9.9"))
    now = user_home.store.scan()
    assert now.experts == ()
    assert now.damaged[0].problem == "it names acme/one@1.0.0 of local"


def test_strange_files_among_the_refs_are_no_experts(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package("acme/one"))
    refs = user_home.home.store / "refs"
    (refs / "file").write_bytes(b"")
    (refs / "local" / "acme" / "one" / ".1.0.0.tmp").write_bytes(b"")
    (refs / "local" / "acme" / "one" / "folder").mkdir()
    now = user_home.store.scan()
    assert (len(now.experts), now.damaged) == (1, ())


def test_nothing_is_collected_while_a_ref_is_damaged(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    one, two = put(
        user_home, package_factory.package("acme/one"), package_factory.package("acme/two")
    )
    path = user_home.home.store / "refs" / "local" / "acme" / "one" / "1.0.0"
    path.write_bytes(b"{}")
    with pytest.raises(StoreError, match=r"acme/one@1\.0\.0 is damaged"):
        user_home.store.collect_garbage()
    assert user_home.store.remove(two).blobs == ()
    assert all(user_home.store.paths.blob(f.digest).exists() for f in one.layers)
    put(user_home, package_factory.package("acme/one"))
    user_home.store.collect_garbage()
    user_home.check_integrity()
    assert {p.name for p in user_home.store.paths.blobs.iterdir()} == {
        f.digest.hex for f in one.layers
    }


def test_garbage_is_told_by_a_dry_run_and_removed_by_gc(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    stray = user_home.store.paths.blobs / Digest.compute(b"stray").hex
    stray.write_bytes(b"stray")
    (user_home.store.paths.blobs / ".half.tmp").write_bytes(b"half")
    (user_home.store.paths.blobs / "README").write_bytes(b"not ours")
    before = user_home.read_files()
    dry = user_home.store.find_garbage()
    assert (dry.blobs, dry.size) == ((Digest.compute(b"stray"),), 5)
    assert user_home.read_files() == before
    assert user_home.store.collect_garbage() == dry
    names = {path.name for path in user_home.store.paths.blobs.iterdir()}
    assert names == {f.digest.hex for f in expert.layers} | {"README"}


def test_staging_of_a_living_install_is_kept_at_any_age(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    with user_home.store.stage_package() as staging:
        package = verify_contents(
            read_package(package_factory.package(), sink=staging), user_home.trust
        )
        os.utime(staging.folder, (0, 0))
        assert user_home.store.collect_garbage().folders == ()
        publish(user_home.store, package, staging)
    user_home.check_integrity()


@pytest.mark.parametrize("clock", [0, 2**31], ids=["long ago", "in the future"])
def test_staging_of_a_dead_install_is_kept_while_it_is_young(
    clock: int, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package())
    folder = user_home.store.paths.staging / "0123456789abcdef"
    folder.mkdir()
    (folder / "lock").touch()
    (folder / ("0" * 64)).write_bytes(b"half a file")
    assert user_home.store.collect_garbage().folders == ()
    os.utime(folder, (clock, clock))
    assert user_home.store.collect_garbage().folders == (folder,)
    assert not folder.exists()


def test_the_next_install_clears_what_a_dead_one_left_long_ago(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package())
    folder = user_home.store.paths.staging / "0123456789abcdef"
    folder.mkdir()
    os.utime(folder, (0, 0))
    put(user_home, package_factory.package("acme/next"))
    assert not folder.exists()


def test_leased_blobs_outlive_their_removal(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    with user_home.store.lease_experts([expert]):
        assert user_home.store.remove(expert).blobs == ()
        assert user_home.store.collect_garbage().blobs == ()
        for file in expert.layers:
            assert user_home.store.blob_path(file.digest).stat().st_size == file.size
    assert set(user_home.store.collect_garbage().blobs) == {file.digest for file in expert.layers}
    assert list(user_home.store.paths.leases.iterdir()) == []


def test_a_lease_of_what_is_gone_is_refused(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    user_home.store.remove(expert)
    with pytest.raises(NotFoundError, match="removed"), user_home.store.lease_experts([expert]):
        pass
    empty = Store(user_home.root / "nowhere")
    with pytest.raises(NotFoundError), empty.lease_experts([expert]):
        pass
    with empty.lease_experts([]):
        assert not empty.root.exists()


def test_the_lease_of_a_killed_process_holds_nothing(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    (expert,) = put(user_home, package_factory.package())
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()

    def hold() -> None:
        with user_home.store.lease_experts([expert]):
            ready.set()
            done.wait(120)

    process = context.Process(target=hold)
    process.start()
    assert ready.wait(120)
    user_home.store.remove(expert)
    assert user_home.store.collect_garbage().blobs == ()
    process.kill()
    process.join()
    assert set(user_home.store.collect_garbage().blobs) == {file.digest for file in expert.layers}


def test_an_exception_leaves_no_staging(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    def fail() -> None:
        with user_home.store.stage_package() as staging:
            verify_contents(read_package(package_factory.package(), sink=staging), user_home.trust)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(user_home.store.paths.staging.iterdir()) == []
    assert user_home.refs() == []
