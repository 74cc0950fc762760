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
    before = buyer.user_home.read_files()
    with pytest.raises(error, match=match) as told:
        buyer.install(*refs)
    assert buyer.user_home.read_files() == before
    return told.value


def asked(buyer: InstallClient, ref: str) -> None:
    """Only look what there is, as `outdated` does."""
    with open_sources(buyer.settings, buyer.user_home.trust) as sources:
        sources.find_candidates(Reference.parse(ref), by_hand=True)


def revoked_experts(buyer: InstallClient) -> dict[str, list[str]]:
    """What is marked as revoked by whom."""
    user_home = buyer.user_home
    signers = read_signers(user_home.home.trust)
    planner = Planner(
        store=user_home.store,
        bases=user_home.bases,
        trust=user_home.trust,
        catalogue=user_home.catalogue,
        index=user_home.index,
        home=user_home.home,
    )
    diagnosis = examine_store(
        user_home.store, bases=user_home.bases, trust=user_home.trust, catalogue=user_home.catalogue
    )
    return {
        "list": [e.ref for e in user_home.store.list_experts() if signers.has_revoked(e)],
        "run": [e.ref for e in planner.read_inventory().experts if e.revoked],
        "doctor": [f.subject for f in diagnosis.findings if "was revoked" in f.problem],
    }


def test_the_first_install_pins_the_keys_of_the_namespace(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    [expert] = buyer.store.list_experts()
    assert expert.registry == publisher.host
    record = buyer.user_home.trust.read()
    assert record.list_pinned_keys(publisher.host, "acme") == [OLD.public]
    assert record.list_registries_for("acme") == (publisher.host,)


def test_a_registry_that_was_taken_over_cannot_have_its_own_packages_installed(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    publisher.accept_key("acme", MALLORY).publish("acme/sql@1.1.0", key=MALLORY)
    publisher.publish("acme/other@1.0.0", key=MALLORY)
    error = refused(buyer, "acme/other")
    assert f"--namespace acme --registry {publisher.host}" in error.hint
    refused(buyer, "acme/sql@1.1.0")
    assert not buyer.user_home.trust.read().find_key(MALLORY.public.key_id)


def test_what_the_person_adds_is_installed_all_the_same(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    publisher.accept_key("acme", NEW).publish("acme/other@1.0.0", key=NEW)
    refused(buyer, "acme/other")
    buyer.user_home.trust.add(NEW.public, name="new", namespaces=["acme"], registry=publisher.host)
    buyer.install("acme/other")
    assert buyer.refs() == ["acme/other@1.0.0", "acme/sql@1.0.0"]


def test_a_new_key_is_followed_by_the_word_of_the_old_one(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    publisher.accept_key("acme", NEW, statement=vouched()).publish("acme/other@1.0.0", key=NEW)
    buyer.install("acme/other")
    pinned = buyer.user_home.trust.read().list_pinned_keys(publisher.host, "acme")
    assert {key.key_id for key in pinned} == {OLD.public.key_id, NEW.public.key_id}


def test_a_lost_key_is_revoked_and_the_same_content_comes_under_another(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    """The drill for a publisher's key: revoke, sign again, and the client converges."""
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    publisher.accept_key("acme", NEW, statement=vouched())
    asked(buyer, "acme/sql")
    buyer.install("acme/sql")
    publisher.revoke("acme", OLD)
    assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}
    asked(buyer, "acme/sql")
    both = ["acme/sql@1.0.0"]
    assert revoked_experts(buyer) == {"list": both, "run": both, "doctor": both}
    refused(buyer, "acme/sql@1.0.0", error=RevokedError, match="revoked")
    publisher.publish("acme/sql@1.0.0", key=NEW)
    buyer.install("acme/sql")
    [expert] = buyer.store.list_experts()
    assert expert.signer == NEW.public.key_id
    assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}


def test_what_a_registry_revoked_does_not_come_back_from_a_file(
    publisher: PublishingRegistry, buyer: InstallClient, tmp_path: Path
) -> None:
    parcel = publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    file = tmp_path / "sql.expert"
    write_package(file, parcel.layout, lambda digest: BytesIO(parcel.blobs[digest]))
    buyer.user_home.install(file)
    publisher.revoke("acme", OLD)
    asked(buyer, "acme/sql")
    buyer.user_home.trust.add(OLD.public, name="mine", namespaces=["acme"])
    before = buyer.user_home.read_files()
    with pytest.raises(RevokedError, match=f"revoked by {publisher.host}"):
        buyer.user_home.install(file)
    assert buyer.user_home.read_files() == before


def test_an_index_that_was_rolled_back_is_refused(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    """Attack: the registry shows the state of before a revocation."""
    publisher.publish("acme/sql@1.0.0")
    database = publisher.live.served.registry.database
    with database.read() as connection:
        old = load_signed_index(connection, SQL)
    publisher.accept_key("acme", NEW, statement=vouched())
    publisher.revoke("acme", OLD)
    publisher.publish("acme/sql@1.0.1", key=NEW)
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
    publisher: PublishingRegistry, buyer: InstallClient, template: PackageTemplate, tmp_path: Path
) -> None:
    """Attack: dependency confusion."""
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    with run_publishing_registry(tmp_path / "other", template) as other:
        other.create_namespace("acme", key=MALLORY).publish("acme/sql@9.0.0", key=MALLORY)
        other.publish("acme/other@1.0.0", key=MALLORY)
        other.create_namespace("zoo").publish(
            "zoo/ants@1.0.0", requires=[f"{other.host}/acme/other"]
        )
        buyer.user_home.trust.add_registry(other.known)
        moved = replace(buyer, settings=replace(buyer.settings, registry=other.host))
        moved.install("acme/sql")
        assert buyer.refs() == ["acme/sql@1.0.0"]
        refused(moved, "acme/other", error=NotFoundError, match=f"{publisher.host} has no package")
        refused(moved, "zoo/ants", match=f"namespace acme from {other.host}, but it belongs to")
        moved.install(f"{other.host}/acme/other")
        assert [e.registry for e in buyer.store.list_experts()] == [other.host, publisher.host]
        assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}


def test_an_explicit_install_from_elsewhere_replaces_nothing_of_the_own_registry(
    publisher: PublishingRegistry, buyer: InstallClient, template: PackageTemplate, tmp_path: Path
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    with run_publishing_registry(tmp_path / "other", template) as other:
        other.create_namespace("acme", key=MALLORY).publish("acme/sql@9.0.0", key=MALLORY)
        other.publish("acme/sql@1.0.0", key=MALLORY)
        buyer.user_home.trust.add_registry(other.known)
        buyer.install(f"{other.host}/acme/sql")
        done = buyer.install(f"{other.host}/acme/sql@1.0.0")
        assert buyer.user_home.trust.read().list_registries_for("acme") == (publisher.host,)
        experts = {e.ref: (e.registry, e.signer) for e in buyer.store.list_experts()}
        assert experts == {
            "acme/sql@1.0.0": (publisher.host, OLD.public.key_id),
            "acme/sql@9.0.0": (other.host, MALLORY.public.key_id),
        }
        [item] = done.installed
        assert item.outcome == "already installed"
        assert "stays that of" in item.warnings[0]
        publisher.publish("acme/sql@1.1.0")
        buyer.install("acme/sql")  # without a host it means what it meant before
        user_home = buyer.user_home
        planner = Planner(
            store=user_home.store,
            bases=user_home.bases,
            trust=user_home.trust,
            catalogue=user_home.catalogue,
            index=user_home.index,
            home=user_home.home,
        )
        homes = {e.ref: e.home for e in planner.read_inventory().experts}
        assert homes == {
            "acme/sql@1.0.0": None,
            "acme/sql@1.1.0": None,
            "acme/sql@9.0.0": publisher.host,
        }
        publisher.revoke("acme", OLD)
        refused(buyer, "acme/sql@1.0.0", error=RevokedError)


def test_a_floor_that_cannot_be_read_stops_installing_and_is_found_by_doctor(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    publisher.publish("acme/sql@1.0.0")
    buyer.install("acme/sql")
    indexes = IndexStore(buyer.user_home.home.registries)

    def found() -> list[str]:
        user_home = buyer.user_home
        diagnosis = examine_store(
            user_home.store,
            bases=user_home.bases,
            trust=user_home.trust,
            catalogue=user_home.catalogue,
            indexes=indexes,
        )
        return [f.hint for f in diagnosis.findings if f.subject == publisher.host]

    assert found() == []
    path = indexes.path(publisher.known, SQL)
    path.write_bytes(path.read_bytes()[:-1])
    [hint] = found()
    assert str(path) in hint
    publisher.publish("acme/sql@1.1.0")
    refused(buyer, "acme/sql@1.1.0", error=StoreError, match="cannot be read")
    path.unlink()
    buyer.install("acme/sql@1.1.0")
    assert found() == []


def test_an_index_of_another_key_is_refused_whatever_it_offers(
    publisher: PublishingRegistry, buyer: InstallClient
) -> None:
    publisher.publish("acme/sql@1.0.0")
    impostor = replace(publisher.known, index_key=MALLORY.public)
    buyer.user_home.trust.add_registry(impostor)
    refused(buyer, "acme/sql", match="the registry's index key is")
