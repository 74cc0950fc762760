"""Whose packages are installed from a live registry: honest, taken over, rolled back, moved."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from sqlalchemy import update

from expertctl.errors import ExpertError, NotFoundError, RevokedError, StoreError, TrustError
from expertctl.install.doctor import examine_store
from expertctl.install.sources import open_sources
from expertctl.package.write import write_package
from expertctl.reference import PackageName, Reference
from expertctl.registry.index_store import IndexStore
from expertctl.routing.planner import Planner
from expertctl.store.preference import read_signers
from expertctl.trust.dsse import sign_key_statement
from registry_server.database.tables import PACKAGES
from registry_server.publishing.index import load_signed_index
from tests.install.fixtures import InstallClient, PublishingRegistry, run_publishing_registry
from tests.registry_server.publishing.package_fixtures import PackageTemplate
from tests.store.fixtures import make_key

SQL = PackageName("acme", "sql")
OLD, NEW, MALLORY = make_key("acme"), make_key("new"), make_key("mallory")
Refused = type[ExpertError]


def vouched() -> bytes:
    return sign_key_statement(namespace="acme", new=NEW.public, by=OLD)


def refused(
    buyer: InstallClient, *refs: str, error: Refused = TrustError, match: str = "."
) -> ExpertError:
    """Buying fails and changes nothing in the store."""
    before = buyer.house.read_files()
    with pytest.raises(error, match=match) as told:
        buyer.install(*refs)
    assert buyer.house.read_files() == before
    return told.value


def asked(buyer: InstallClient, ref: str) -> None:
    """Only look what there is, as `outdated` does."""
    with open_sources(buyer.settings, buyer.house.trust) as sources:
        sources.find_candidates(Reference.parse(ref), by_hand=True)


def revoked_experts(buyer: InstallClient) -> dict[str, list[str]]:
    """What is marked as revoked by whom."""
    house = buyer.house
    signers = read_signers(house.home.trust)
    planner = Planner(
        store=house.store,
        bases=house.bases,
        trust=house.trust,
        catalogue=house.catalogue,
        index=house.index,
        home=house.home,
    )
    diagnosis = examine_store(
        house.store, bases=house.bases, trust=house.trust, catalogue=house.catalogue
    )
    return {
        "list": [e.ref for e in house.store.list_experts() if signers.has_revoked(e)],
        "run": [e.ref for e in planner.read_inventory().experts if e.revoked],
        "doctor": [f.subject for f in diagnosis.findings if "was revoked" in f.problem],
    }


def test_the_first_install_pins_the_keys_of_the_namespace(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    [expert] = buyer.store.list_experts()
    assert expert.registry == market.host
    record = buyer.house.trust.read()
    assert record.list_pinned_keys(market.host, "acme") == [OLD.public]
    assert record.list_registries_for("acme") == (market.host,)


def test_a_registry_that_was_taken_over_cannot_have_its_own_packages_installed(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    market.accept_key("acme", MALLORY).publish("acme/sql@1.1.0", key=MALLORY)
    market.publish("acme/other@1.0.0", key=MALLORY)
    error = refused(buyer, "acme/other")
    assert f"--namespace acme --registry {market.host}" in error.hint
    refused(buyer, "acme/sql@1.1.0")
    assert not buyer.house.trust.read().find_key(MALLORY.public.key_id)


def test_what_the_person_adds_is_installed_all_the_same(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    market.accept_key("acme", NEW).publish("acme/other@1.0.0", key=NEW)
    refused(buyer, "acme/other")
    buyer.house.trust.add(NEW.public, name="new", namespaces=["acme"], registry=market.host)
    buyer.install("acme/other")
    assert buyer.refs() == ["acme/other@1.0.0", "acme/sql@1.0.0"]


def test_a_new_key_is_followed_by_the_word_of_the_old_one(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    market.accept_key("acme", NEW, statement=vouched()).publish("acme/other@1.0.0", key=NEW)
    buyer.install("acme/other")
    pinned = buyer.house.trust.read().list_pinned_keys(market.host, "acme")
    assert {key.key_id for key in pinned} == {OLD.public.key_id, NEW.public.key_id}


def test_a_lost_key_is_revoked_and_the_same_content_comes_under_another(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    """The drill for a publisher's key: revoke, sign again, and the client converges."""
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    market.accept_key("acme", NEW, statement=vouched())
    asked(buyer, "acme/sql")
    buyer.install("acme/sql")
    market.revoke("acme", OLD)
    assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}
    asked(buyer, "acme/sql")
    both = ["acme/sql@1.0.0"]
    assert revoked_experts(buyer) == {"list": both, "run": both, "doctor": both}
    refused(buyer, "acme/sql@1.0.0", error=RevokedError, match="revoked")
    market.publish("acme/sql@1.0.0", key=NEW)
    buyer.install("acme/sql")
    [expert] = buyer.store.list_experts()
    assert expert.signer == NEW.public.key_id
    assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}


def test_what_a_registry_revoked_does_not_come_back_from_a_file(
    market: PublishingRegistry, buyer: InstallClient, tmp_path: Path
) -> None:
    parcel = market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    file = tmp_path / "sql.expert"
    write_package(file, parcel.layout, lambda digest: BytesIO(parcel.blobs[digest]))
    buyer.house.install(file)
    market.revoke("acme", OLD)
    asked(buyer, "acme/sql")
    buyer.house.trust.add(OLD.public, name="mine", namespaces=["acme"])
    before = buyer.house.read_files()
    with pytest.raises(RevokedError, match=f"revoked by {market.host}"):
        buyer.house.install(file)
    assert buyer.house.read_files() == before


def test_an_index_that_was_rolled_back_is_refused(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    """Attack: the registry shows the state of before a revocation."""
    market.publish("acme/sql@1.0.0")
    database = market.live.served.registry.database
    with database.read() as connection:
        old = load_signed_index(connection, SQL)
    market.accept_key("acme", NEW, statement=vouched())
    market.revoke("acme", OLD)
    market.publish("acme/sql@1.0.1", key=NEW)
    with database.read() as connection:
        newest = load_signed_index(connection, SQL)
    asked(buyer, "acme/sql")
    with database.write() as connection:
        connection.execute(update(PACKAGES).values(index_document=old))
    refused(buyer, "acme/sql", match="an older state is shown")
    with database.write() as connection:
        connection.execute(update(PACKAGES).values(index_document=newest))
    buyer.install("acme/sql")
    assert buyer.refs() == ["acme/sql@1.0.1"]


def test_a_namespace_is_not_taken_from_another_registry_by_a_higher_version(
    market: PublishingRegistry, buyer: InstallClient, template: PackageTemplate, tmp_path: Path
) -> None:
    """Attack: dependency confusion."""
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    with run_publishing_registry(tmp_path / "other", template) as other:
        other.create_namespace("acme", key=MALLORY).publish("acme/sql@9.0.0", key=MALLORY)
        other.publish("acme/other@1.0.0", key=MALLORY)
        other.create_namespace("zoo").publish(
            "zoo/ants@1.0.0", requires=[f"{other.host}/acme/other"]
        )
        buyer.house.trust.add_registry(other.known)
        moved = replace(buyer, settings=replace(buyer.settings, registry=other.host))
        moved.install("acme/sql")
        assert buyer.refs() == ["acme/sql@1.0.0"]
        refused(moved, "acme/other", error=NotFoundError, match=f"{market.host} has no package")
        refused(moved, "zoo/ants", match=f"namespace acme from {other.host}, but it belongs to")
        moved.install(f"{other.host}/acme/other")
        assert [e.registry for e in buyer.store.list_experts()] == [other.host, market.host]
        assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}


def test_an_explicit_install_from_elsewhere_replaces_nothing_of_the_own_registry(
    market: PublishingRegistry, buyer: InstallClient, template: PackageTemplate, tmp_path: Path
) -> None:
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    with run_publishing_registry(tmp_path / "other", template) as other:
        other.create_namespace("acme", key=MALLORY).publish("acme/sql@9.0.0", key=MALLORY)
        other.publish("acme/sql@1.0.0", key=MALLORY)
        buyer.house.trust.add_registry(other.known)
        buyer.install(f"{other.host}/acme/sql")
        done = buyer.install(f"{other.host}/acme/sql@1.0.0")
        assert buyer.house.trust.read().list_registries_for("acme") == (market.host,)
        experts = {e.ref: (e.registry, e.signer) for e in buyer.store.list_experts()}
        assert experts == {
            "acme/sql@1.0.0": (market.host, OLD.public.key_id),
            "acme/sql@9.0.0": (other.host, MALLORY.public.key_id),
        }
        [item] = done.installed
        assert item.outcome == "already installed"
        assert "stays that of" in item.warnings[0]
        market.publish("acme/sql@1.1.0")
        buyer.install("acme/sql")  # without a host it means what it meant before
        house = buyer.house
        planner = Planner(
            store=house.store, bases=house.bases, trust=house.trust, catalogue=house.catalogue,
            index=house.index, home=house.home,
        )  # fmt: skip
        homes = {e.ref: e.home for e in planner.read_inventory().experts}
        assert homes == {
            "acme/sql@1.0.0": None,
            "acme/sql@1.1.0": None,
            "acme/sql@9.0.0": market.host,
        }
        market.revoke("acme", OLD)
        refused(buyer, "acme/sql@1.0.0", error=RevokedError)


def test_a_floor_that_cannot_be_read_stops_installing_and_is_found_by_doctor(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    market.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    indexes = IndexStore(buyer.house.home.registries)

    def found() -> list[str]:
        house = buyer.house
        diagnosis = examine_store(
            house.store,
            bases=house.bases,
            trust=house.trust,
            catalogue=house.catalogue,
            indexes=indexes,
        )
        return [f.hint for f in diagnosis.findings if f.subject == market.host]

    assert found() == []
    path = indexes.path(market.known, SQL)
    path.write_bytes(path.read_bytes()[:-1])
    [hint] = found()
    assert str(path) in hint
    market.publish("acme/sql@1.1.0")
    refused(buyer, "acme/sql@1.1.0", error=StoreError, match="cannot be read")
    path.unlink()
    buyer.install("acme/sql@1.1.0")
    assert found() == []


def test_an_index_of_another_key_is_refused_whatever_it_offers(
    market: PublishingRegistry, buyer: InstallClient
) -> None:
    market.publish("acme/sql@1.0.0")
    impostor = replace(market.known, index_key=MALLORY.public)
    buyer.house.trust.add_registry(impostor)
    refused(buyer, "acme/sql", match="the registry's index key is")
