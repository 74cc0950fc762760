"""Where an expert came from: one version of a name is there once, whatever its registry."""

import json
from pathlib import Path

import pytest

from expertctl.errors import ChangedVersionError
from expertctl.install.doctor import examine_store
from expertctl.package.read import read_package
from expertctl.package.verify import verify_contents
from expertctl.reference import PackageName, Reference, Version
from expertctl.registry.address import RegistryAddress
from expertctl.store.preference import read_signers
from expertctl.store.refs import LOCAL, StoredExpert, StorePaths
from expertctl.store.transaction import AddResult
from expertctl.trust.grants import KnownRegistry
from tests.store.fault_injection import SpawnedProcess, run_with_fault
from tests.store.fixtures import HomeFixture, PackageFactory, make_key, publish
from tests.store.test_crashes import Sweep, content, exact, settle

ONE, TWO = "one.example.com", "127.0.0.1:8080"
HOSTS = [ONE, TWO, "[::1]:8080", "localhost:80"]


def put(house: HomeFixture, path: Path, registry: str = LOCAL) -> AddResult:
    """Install a verified file as if it came from a registry."""
    with house.store.stage_package() as staging:
        contents = read_package(path, sink=staging)
        package = verify_contents(contents, house.trust)
        return publish(house.store, package, staging, registry=registry)


def only(house: HomeFixture) -> StoredExpert:
    [expert] = house.store.list_experts()
    files = [path for path in house.store.paths.refs.rglob("*") if path.is_file()]
    assert files == [house.store.paths.ref(expert.registry, expert.package, expert.version)]
    house.store.check_integrity()
    return expert


@pytest.fixture
def both(house: HomeFixture) -> HomeFixture:
    return house.trust_keys("other")


@pytest.mark.parametrize("host", HOSTS)
def test_a_registry_has_a_folder_that_any_system_can_name(host: str) -> None:
    package, version = PackageName("acme", "sql"), Version(1, 0, 0)
    path = StorePaths(Path("store")).ref(host, package, version)
    folder = RegistryAddress.parse(host).folder
    assert path == Path("store/refs") / folder / "acme/sql/1.0.0"
    assert not set(":[]") & set(str(path))


@pytest.mark.parametrize("host", HOSTS)
def test_an_expert_is_found_with_the_registry_that_it_came_from(
    host: str, house: HomeFixture, shop: PackageFactory
) -> None:
    assert put(house, shop.package(), host).outcome == "installed"
    assert only(house).registry == host
    assert house.store.find(Reference.parse("acme/sql")).registry == host


def test_other_content_for_a_version_is_refused_whatever_its_registry(
    house: HomeFixture, shop: PackageFactory
) -> None:
    put(house, shop.package(), ONE)
    with pytest.raises(ChangedVersionError, match=f"{ONE} has sha256"):
        put(house, shop.package(seed=1), TWO)
    with pytest.raises(ChangedVersionError, match=f"{ONE} has sha256"):
        put(house, shop.package(seed=1))
    house.store.remove(only(house))
    put(house, shop.package())
    with pytest.raises(ChangedVersionError, match=f"a file has .*, but {ONE} has"):
        put(house, shop.package(seed=1), ONE)
    assert only(house).registry == LOCAL


def test_a_registry_takes_over_what_came_from_a_file(
    house: HomeFixture, shop: PackageFactory
) -> None:
    put(house, shop.package())
    assert put(house, shop.package(), ONE).outcome == "already installed"
    assert only(house).registry == ONE


def test_a_registry_takes_over_from_another(house: HomeFixture, shop: PackageFactory) -> None:
    put(house, shop.package(), ONE)
    assert put(house, shop.package(), TWO).outcome == "already installed"
    assert only(house).registry == TWO


def test_a_file_takes_nothing_from_a_registry(both: HomeFixture, shop: PackageFactory) -> None:
    put(both, shop.package(), ONE)
    assert put(both, shop.package()).outcome == "already installed"
    assert only(both).registry == ONE
    assert put(both, shop.package(key="other")).outcome == "re-signed"
    assert only(both).registry == ONE
    assert only(both).signer == make_key("other").public.key_id


def test_a_re_sign_from_a_registry_takes_over_too(both: HomeFixture, shop: PackageFactory) -> None:
    put(both, shop.package())
    assert put(both, shop.package(key="other"), ONE).outcome == "re-signed"
    expert = only(both)
    assert (expert.registry, expert.signer) == (ONE, make_key("other").public.key_id)


def test_a_damaged_record_is_replaced_wherever_it_is(
    house: HomeFixture, shop: PackageFactory
) -> None:
    put(house, shop.package())
    [ref] = house.store.paths.find_refs(PackageName("acme", "sql"), Version(1, 0, 0))
    ref.write_bytes(b"{}")
    assert put(house, shop.package(), ONE).outcome == "installed"
    assert only(house).registry == ONE


def test_removing_leaves_no_record_anywhere(house: HomeFixture, shop: PackageFactory) -> None:
    put(house, shop.package(), ONE)
    house.store.remove(only(house))
    assert house.store.list_experts() == []
    assert list(house.store.paths.refs.iterdir()) == []
    assert list(house.store.paths.blobs.iterdir()) == []


def two_records(house: HomeFixture, path: Path) -> None:
    """What a process leaves that was killed while a registry took over from a file."""
    put(house, path)
    paths = house.store.paths
    ref = paths.ref(LOCAL, PackageName("acme", "sql"), Version(1, 0, 0))
    data = ref.read_bytes()
    put(house, path, ONE)
    ref.parent.mkdir(parents=True)
    ref.write_bytes(data)


def test_of_two_records_of_one_content_that_of_the_registry_counts(
    house: HomeFixture, shop: PackageFactory
) -> None:
    two_records(house, shop.package())
    now = house.store.scan()
    assert [expert.registry for expert in now.experts] == [ONE]
    assert [expert.registry for expert in now.shadowed] == [LOCAL]
    house.store.check_integrity()
    house.store.collect_garbage()
    assert only(house).registry == ONE


def test_two_records_go_together(house: HomeFixture, shop: PackageFactory) -> None:
    two_records(house, shop.package())
    [expert] = house.store.list_experts()
    house.store.remove(expert)
    assert house.store.scan().experts == ()
    assert house.store.scan().shadowed == ()


def test_installing_again_leaves_one_of_two_records(
    house: HomeFixture, shop: PackageFactory
) -> None:
    two_records(house, shop.package())
    put(house, shop.package())
    assert only(house).registry == ONE


@pytest.mark.parametrize("key", ["acme", "other"], ids=["as it is", "re-signed"])
def test_killed_while_a_registry_takes_over_nothing_is_lost(
    key: str, shop: PackageFactory, fast: Path, lean: SpawnedProcess
) -> None:
    template = HomeFixture(fast / "template").trust_keys("acme", "other")
    template.install(shop.package(), shop.package("acme/kept", seed=5))
    lean(killed_while_taking_over, template, shop.package(key=key), fast / "copy")


def killed_while_taking_over(template: HomeFixture, file: Path, folder: Path) -> None:
    def take_over(house: HomeFixture) -> None:
        put(house, file, ONE)

    registries = {e.ref: e.registry for e in template.store.list_experts()}
    house = Sweep.copied(template, folder)
    whole = run_with_fault(lambda: take_over(house))
    assert not whole.errors, whole.trace
    after = content(house)
    for step in range(1, len(whole.steps) + 1):
        Sweep.copied(template, folder)
        assert run_with_fault(lambda: take_over(house), at=step, fault="kill").killed
        found = {e.ref: e.registry for e in house.store.list_experts()}
        assert found in (registries, {**registries, "acme/sql@1.0.0": ONE})
        assert content(house) in (content(template), after)
        take_over(house)
        settle(house)
        exact(house)
        assert content(house) == after
        assert house.store.find(Reference.parse("acme/sql")).registry == ONE


def test_what_its_registry_revokes_is_seen_by_doctor_and_list(
    house: HomeFixture, shop: PackageFactory
) -> None:
    signer = make_key("acme").public
    house.bases.add(shop.base_dir)
    put(house, shop.package(), ONE)
    put(house, shop.package("acme/other", seed=1))
    for host in (ONE, TWO):
        index_key = make_key("index").public
        house.trust.add_registry(KnownRegistry(host, f"https://{host}", index_key))
    house.trust.update(lambda r: r.with_pins(ONE, "acme", [signer]))

    def flagged() -> list[str]:
        signers = read_signers(house.home.trust)
        return [e.ref for e in house.store.list_experts() if signers.has_revoked(e)]

    def found() -> list[str]:
        diagnosis = examine_store(
            house.store, bases=house.bases, trust=house.trust, catalogue=house.catalogue
        )
        return [f.subject for f in diagnosis.findings if "revoked by" in f.problem]

    revoke = [(signer.key_id, "lost")]
    house.trust.update(lambda r: r.with_registry_revocations(TWO, "acme", revoke))
    assert flagged() == found() == []
    house.trust.update(lambda r: r.with_registry_revocations(ONE, "acme", revoke))
    assert flagged() == found() == ["acme/other@1.0.0", "acme/sql@1.0.0"]


def test_damaged_registries_name_nobody_in_a_list(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    for registries in (1, [1], [{"host": "x"}]):
        document = {"keys": [], "revoked": [], "registries": registries}
        path.write_text(json.dumps(document))
        assert read_signers(path).revoked == frozenset()
