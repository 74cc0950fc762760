"""Which registry is meant: in the order of the contract, and never by what a project says."""

import pytest

from expertctl.errors import TrustError, UsageError
from expertctl.reference import Reference
from expertctl.registry.address import RegistryAddress
from expertctl.registry.registry_trust import (
    choose_registry,
    choose_required_registry,
    find_known_registry,
    known_registry_address,
)
from expertctl.trust.grants import KnownRegistry
from expertctl.trust.trust_record import TrustRecord
from tests.registry.indexes import make_known_registry, make_named_key

ONE, TWO = "one.example.com", "two.example.com"


def secure(host: str, *namespaces: str) -> KnownRegistry:
    return KnownRegistry(host, f"https://{host}", make_named_key("index").public, namespaces)


def record(*registries: KnownRegistry) -> TrustRecord:
    result = TrustRecord()
    for registry in registries:
        result = result.with_registry(registry)
    return result


def pinned(before: TrustRecord, host: str, namespace: str = "acme") -> TrustRecord:
    return before.with_pins(host, namespace, [make_named_key(f"of {host}").public])


def chosen(text: str, trusted: TrustRecord, default: str | None = None) -> str:
    return choose_registry(Reference.parse(text), trusted, default).url


def required(text: str, trusted: TrustRecord, default: str | None = None) -> str:
    return choose_required_registry(Reference.parse(text), trusted, default).url


def test_the_host_that_a_person_names_comes_first() -> None:
    trusted = pinned(record(secure(ONE, "acme"), secure(TWO)), ONE)
    assert chosen(f"{TWO}/acme/sql", trusted, "three.example.com") == f"https://{TWO}"


def test_the_registry_that_was_named_for_a_namespace_comes_second() -> None:
    trusted = pinned(record(secure(ONE), secure(TWO, "acme")), ONE)
    assert chosen("acme/sql", trusted, "three.example.com") == f"https://{TWO}"


def test_the_registry_that_a_namespace_was_pinned_from_comes_third() -> None:
    trusted = pinned(record(secure(ONE), secure(TWO)), ONE)
    assert chosen("acme/sql", trusted, TWO) == f"https://{ONE}"


def test_the_setting_comes_last() -> None:
    trusted = pinned(record(secure(ONE), secure(TWO)), ONE)
    assert chosen("zoo/ants", trusted, TWO) == f"https://{TWO}"


def test_without_any_of_them_the_way_out_is_told() -> None:
    with pytest.raises(UsageError, match="no registry is set") as refused:
        chosen("acme/sql", TrustRecord())
    assert "config set registry" in refused.value.hint


def test_a_namespace_of_two_registries_must_be_named_in_full() -> None:
    """Keys that were trusted for two registries without an index: neither was pinned first."""
    trusted = pinned(pinned(TrustRecord(), ONE), TWO)
    with pytest.raises(TrustError, match=f"{ONE} and {TWO}") as refused:
        chosen("acme/sql", trusted, ONE)
    assert f"{ONE}/acme/sql" in refused.value.hint
    assert chosen(f"{TWO}/acme/sql", trusted) == f"https://{TWO}"


def test_a_namespace_that_is_installed_from_a_second_registry_stays_that_of_the_first() -> None:
    trusted = pinned(pinned(record(secure(ONE), secure(TWO)), ONE), TWO)
    assert chosen("acme/sql", trusted, TWO) == f"https://{ONE}"
    assert chosen(f"{TWO}/acme/sql", trusted) == f"https://{TWO}"
    with pytest.raises(TrustError, match=f"belongs to {ONE}"):
        required(f"{TWO}/acme/sql", trusted)


def test_naming_a_namespace_for_a_registry_moves_it_from_another() -> None:
    trusted = record(secure(ONE, "acme", "zoo"), secure(TWO, "acme"))
    assert chosen("acme/sql", trusted) == f"https://{TWO}"
    assert chosen("zoo/ants", trusted) == f"https://{ONE}"


def test_a_key_that_is_trusted_for_a_registry_alone_says_whose_the_namespace_is() -> None:
    trusted = pinned(TrustRecord(), ONE)
    assert chosen("acme/sql", trusted, TWO) == f"https://{ONE}"


def test_a_known_registry_is_where_its_accepted_url_says() -> None:
    plain = KnownRegistry("10.0.0.1:5000", "http://10.0.0.1:5000", make_named_key("index").public)
    assert chosen("10.0.0.1:5000/acme/sql", record(plain)) == "http://10.0.0.1:5000"
    assert known_registry_address(plain).url == "http://10.0.0.1:5000"
    assert chosen(f"{ONE.upper()}/acme/sql", record(secure(ONE))) == f"https://{ONE}"


def test_what_stands_for_files_is_no_registry() -> None:
    with pytest.raises(UsageError, match="came from files"):
        chosen("local/acme/sql", TrustRecord())
    with pytest.raises(UsageError, match="came from files"):
        record(secure("local"))


def test_a_requirement_without_a_host_comes_from_where_its_namespace_belongs() -> None:
    trusted = pinned(record(secure(ONE), secure(TWO)), ONE)
    assert required("acme/sql", trusted, TWO) == f"https://{ONE}"


def test_a_package_that_requires_from_elsewhere_cannot_move_a_namespace() -> None:
    trusted = pinned(record(secure(ONE), secure(TWO)), ONE)
    with pytest.raises(TrustError, match=f"belongs to {ONE}") as refused:
        required(f"{TWO}/acme/sql", trusted)
    assert f"trust registry add https://{TWO} --namespace acme" in refused.value.hint
    assert required(f"{ONE}/acme/sql", trusted) == f"https://{ONE}"


def test_a_project_file_that_names_an_unknown_registry_redirects_nothing() -> None:
    with pytest.raises(TrustError, match=r"the index key of evil\.example is not known"):
        required("evil.example/zoo/ants", record(secure(ONE)), ONE)
    assert required(f"{ONE}/zoo/ants", record(secure(ONE))) == f"https://{ONE}"


def test_an_unknown_registry_is_told_with_how_to_accept_it() -> None:
    address = RegistryAddress.parse(TWO)
    with pytest.raises(TrustError, match=r"its index cannot be trusted") as refused:
        find_known_registry(address, record(secure(ONE)))
    assert f"trust registry add https://{TWO} --fingerprint" in refused.value.hint
    assert find_known_registry(RegistryAddress.parse(ONE), record(secure(ONE))).host == ONE


def test_http_to_another_machine_stays_forbidden_for_unknown_registries() -> None:
    with pytest.raises(UsageError, match="unencrypted"):
        choose_registry(Reference.parse("acme/sql"), TrustRecord(), "http://10.0.0.1:5000")
    found = choose_registry(
        Reference.parse("acme/sql"), TrustRecord(), "http://10.0.0.1:5000", allow_http=True
    )
    assert found.url == "http://10.0.0.1:5000"


def test_a_loopback_registry_is_reached_by_http() -> None:
    assert known_registry_address(make_known_registry()).url == "http://127.0.0.1:8080"
