"""Where an expert came from: one version of a name is there once, whatever its registry."""

import json
from pathlib import Path

import pytest

from expertctl.errors import ChangedVersionError
from expertctl.install.doctor import examine_store
from expertctl.package.read import read_package, verify_contents
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


def put(user_home: HomeFixture, path: Path, registry: str = LOCAL) -> AddResult:
    """Install a verified file as if it came from a registry."""
    with user_home.store.stage_package() as staging:
        contents = read_package(path, sink=staging)
        package = verify_contents(contents, user_home.trust)
        return publish(user_home.store, package, staging, registry=registry)


def only(user_home: HomeFixture) -> StoredExpert:
    [expert] = user_home.store.list_experts()
    files = [path for path in user_home.store.paths.refs.rglob("*") if path.is_file()]
    assert files == [user_home.store.paths.ref(expert.registry, expert.package, expert.version)]
    user_home.store.check_integrity()
    return expert


@pytest.fixture
def both(user_home: HomeFixture) -> HomeFixture:
    return user_home.trust_keys("other")


@pytest.mark.parametrize("host", HOSTS)
def test_a_registry_has_a_folder_that_any_system_can_name(host: str) -> None:
    package, version = PackageName("acme", "sql"), Version(1, 0, 0)
    path = StorePaths(Path("store")).ref(host, package, version)
    folder = RegistryAddress.parse(host).folder
    assert path == Path("store/refs") / folder / "acme/sql/1.0.0"
    assert not set(":[]") & set(str(path))


@pytest.mark.parametrize("host", HOSTS)
def test_an_expert_is_found_with_the_registry_that_it_came_from(
    host: str, user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    assert put(user_home, package_factory.package(), host).outcome == "installed"
    assert only(user_home).registry == host
    assert user_home.store.find(Reference.parse("acme/sql")).registry == host


def test_other_content_for_a_version_is_refused_whatever_its_registry(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package(), ONE)
    with pytest.raises(ChangedVersionError, match=f"{ONE} has sha256"):
        put(user_home, package_factory.package(seed=1), TWO)
    with pytest.raises(ChangedVersionError, match=f"{ONE} has sha256"):
        put(user_home, package_factory.package(seed=1))
    user_home.store.remove(only(user_home))
    put(user_home, package_factory.package())
    with pytest.raises(ChangedVersionError, match=f"a file has .*, but {ONE} has"):
        put(user_home, package_factory.package(seed=1), ONE)
    assert only(user_home).registry == LOCAL


def test_a_registry_takes_over_what_came_from_a_file(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package())
    assert put(user_home, package_factory.package(), ONE).outcome == "already installed"
    assert only(user_home).registry == ONE


def test_a_registry_takes_over_from_another(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package(), ONE)
    assert put(user_home, package_factory.package(), TWO).outcome == "already installed"
    assert only(user_home).registry == TWO


def test_a_file_takes_nothing_from_a_registry(
    both: HomeFixture, package_factory: PackageFactory
) -> None:
    put(both, package_factory.package(), ONE)
    assert put(both, package_factory.package()).outcome == "already installed"
    assert only(both).registry == ONE
    assert put(both, package_factory.package(key="other")).outcome == "re-signed"
    assert only(both).registry == ONE
    assert only(both).signer == make_key("other").public.key_id


def test_a_re_sign_from_a_registry_takes_over_too(
    both: HomeFixture, package_factory: PackageFactory
) -> None:
    put(both, package_factory.package())
    assert put(both, package_factory.package(key="other"), ONE).outcome == "re-signed"
    expert = only(both)
    assert (expert.registry, expert.signer) == (ONE, make_key("other").public.key_id)


def test_a_damaged_record_is_replaced_wherever_it_is(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package())
    [ref] = user_home.store.paths.find_refs(PackageName("acme", "sql"), Version(1, 0, 0))
    ref.write_bytes(b"{}")
    assert put(user_home, package_factory.package(), ONE).outcome == "installed"
    assert only(user_home).registry == ONE


def test_removing_leaves_no_record_anywhere(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    put(user_home, package_factory.package(), ONE)
    user_home.store.remove(only(user_home))
    assert user_home.store.list_experts() == []
    assert list(user_home.store.paths.refs.iterdir()) == []
    assert list(user_home.store.paths.blobs.iterdir()) == []


def two_records(user_home: HomeFixture, path: Path) -> None:
    """What a process leaves that was killed while a registry took over from a file."""
    put(user_home, path)
    paths = user_home.store.paths
    ref = paths.ref(LOCAL, PackageName("acme", "sql"), Version(1, 0, 0))
    data = ref.read_bytes()
    put(user_home, path, ONE)
    ref.parent.mkdir(parents=True)
    ref.write_bytes(data)


def test_of_two_records_of_one_content_that_of_the_registry_counts(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    two_records(user_home, package_factory.package())
    now = user_home.store.scan()
    assert [expert.registry for expert in now.experts] == [ONE]
    assert [expert.registry for expert in now.shadowed] == [LOCAL]
    user_home.store.check_integrity()
    user_home.store.collect_garbage()
    assert only(user_home).registry == ONE


def test_two_records_go_together(user_home: HomeFixture, package_factory: PackageFactory) -> None:
    two_records(user_home, package_factory.package())
    [expert] = user_home.store.list_experts()
    user_home.store.remove(expert)
    assert user_home.store.scan().experts == ()
    assert user_home.store.scan().shadowed == ()


def test_installing_again_leaves_one_of_two_records(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    two_records(user_home, package_factory.package())
    put(user_home, package_factory.package())
    assert only(user_home).registry == ONE


@pytest.mark.parametrize("key", ["acme", "other"], ids=["as it is", "re-signed"])
def test_killed_while_a_registry_takes_over_nothing_is_lost(
    key: str, package_factory: PackageFactory, fast: Path, lean: SpawnedProcess
) -> None:
    template = HomeFixture(fast / "template").trust_keys("acme", "other")
    template.install(package_factory.package(), package_factory.package("acme/kept", seed=5))
    lean(killed_while_taking_over, template, package_factory.package(key=key), fast / "copy")


def killed_while_taking_over(template: HomeFixture, file: Path, folder: Path) -> None:
    def take_over(user_home: HomeFixture) -> None:
        put(user_home, file, ONE)

    registries = {e.ref: e.registry for e in template.store.list_experts()}
    user_home = Sweep.copied(template, folder)
    whole = run_with_fault(lambda: take_over(user_home))
    assert not whole.errors, whole.trace
    after = content(user_home)
    for step in range(1, len(whole.steps) + 1):
        Sweep.copied(template, folder)
        assert run_with_fault(lambda: take_over(user_home), at=step, fault="kill").killed
        found = {e.ref: e.registry for e in user_home.store.list_experts()}
        assert found in (registries, {**registries, "acme/sql@1.0.0": ONE})
        assert content(user_home) in (content(template), after)
        take_over(user_home)
        settle(user_home)
        exact(user_home)
        assert content(user_home) == after
        assert user_home.store.find(Reference.parse("acme/sql")).registry == ONE


def test_what_its_registry_revokes_is_seen_by_doctor_and_list(
    user_home: HomeFixture, package_factory: PackageFactory
) -> None:
    signer = make_key("acme").public
    user_home.bases.add(package_factory.base_dir)
    put(user_home, package_factory.package(), ONE)
    put(user_home, package_factory.package("acme/other", seed=1))
    for host in (ONE, TWO):
        index_key = make_key("index").public
        user_home.trust.add_registry(KnownRegistry(host, f"https://{host}", index_key))
    user_home.trust.update(lambda r: r.with_pins(ONE, "acme", [signer]))

    def flagged() -> list[str]:
        signers = read_signers(user_home.home.trust)
        return [e.ref for e in user_home.store.list_experts() if signers.has_revoked(e)]

    def found() -> list[str]:
        diagnosis = examine_store(
            user_home.store,
            bases=user_home.bases,
            trust=user_home.trust,
            catalogue=user_home.catalogue,
        )
        return [f.subject for f in diagnosis.findings if "revoked by" in f.problem]

    revoke = [(signer.key_id, "lost")]
    user_home.trust.update(lambda r: r.with_registry_revocations(TWO, "acme", revoke))
    assert flagged() == found() == []
    user_home.trust.update(lambda r: r.with_registry_revocations(ONE, "acme", revoke))
    assert flagged() == found() == ["acme/other@1.0.0", "acme/sql@1.0.0"]


def test_damaged_registries_name_nobody_in_a_list(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    for registries in (1, [1], [{"host": "x"}]):
        document = {"keys": [], "revoked": [], "registries": registries}
        path.write_text(json.dumps(document))
        assert read_signers(path).revoked == frozenset()
