"""Whose packages are installed from a live registry: honest, taken over, rolled back, moved."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from sqlalchemy import update

from expertctl.errors import ExpertError, NotFoundError, RevokedError, StoreError, TrustError
from expertctl.install.doctor import examine
from expertctl.install.sources import open_sources
from expertctl.package.write import write_package
from expertctl.reference import PackageName, Reference
from expertctl.registry.index_store import IndexStore
from expertctl.registry.key_statement import sign_statement
from expertctl.routing.planner import Planner
from expertctl.store.signers import read_signers
from registry_server.database.tables import PACKAGES
from registry_server.publishing.index import signed_index
from tests.install.market import Buyer, Market, market_at
from tests.registry_server.publishing.parcels import Template
from tests.store.shop import a_key

SQL = PackageName("acme", "sql")
OLD, NEW, MALLORY = a_key("acme"), a_key("new"), a_key("mallory")
Refused = type[ExpertError]


def vouched() -> bytes:
    return sign_statement(namespace="acme", new=NEW.public, by=OLD)


def refused(buyer: Buyer, *refs: str, error: Refused = TrustError, match: str = ".") -> ExpertError:
    """Buying fails and changes nothing in the store."""
    before = buyer.house.files()
    with pytest.raises(error, match=match) as told:
        buyer.buy(*refs)
    assert buyer.house.files() == before
    return told.value


def asked(buyer: Buyer, ref: str) -> None:
    """Only look what there is, as `outdated` does."""
    with open_sources(buyer.settings, buyer.house.trust) as sources:
        sources.candidates(Reference.parse(ref), by_hand=True)


def revoked_experts(buyer: Buyer) -> dict[str, list[str]]:
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
    diagnosis = examine(
        house.store, bases=house.bases, trust=house.trust, catalogue=house.catalogue
    )
    return {
        "list": [e.ref for e in house.store.experts() if signers.has_revoked(e)],
        "run": [e.ref for e in planner.inventory().experts if e.revoked],
        "doctor": [f.subject for f in diagnosis.findings if "was revoked" in f.problem],
    }


def test_the_first_install_pins_the_keys_of_the_namespace(market: Market, buyer: Buyer) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    [expert] = buyer.store.experts()
    assert expert.registry == market.host
    record = buyer.house.trust.read()
    assert record.pinned_keys(market.host, "acme") == [OLD.public]
    assert record.homes("acme") == (market.host,)


def test_a_registry_that_was_taken_over_cannot_have_its_own_packages_installed(
    market: Market, buyer: Buyer
) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    market.accept("acme", MALLORY).sell("acme/sql@1.1.0", key=MALLORY)
    market.sell("acme/other@1.0.0", key=MALLORY)
    error = refused(buyer, "acme/other")
    assert f"--namespace acme --registry {market.host}" in error.hint
    refused(buyer, "acme/sql@1.1.0")
    assert not buyer.house.trust.read().trusted(MALLORY.public.key_id)


def test_what_the_person_adds_is_installed_all_the_same(market: Market, buyer: Buyer) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    market.accept("acme", NEW).sell("acme/other@1.0.0", key=NEW)
    refused(buyer, "acme/other")
    buyer.house.trust.add(NEW.public, name="new", namespaces=["acme"], registry=market.host)
    buyer.buy("acme/other")
    assert buyer.refs() == ["acme/other@1.0.0", "acme/sql@1.0.0"]


def test_a_new_key_is_followed_by_the_word_of_the_old_one(market: Market, buyer: Buyer) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    market.accept("acme", NEW, statement=vouched()).sell("acme/other@1.0.0", key=NEW)
    buyer.buy("acme/other")
    pinned = buyer.house.trust.read().pinned_keys(market.host, "acme")
    assert {key.key_id for key in pinned} == {OLD.public.key_id, NEW.public.key_id}


def test_a_lost_key_is_revoked_and_the_same_content_comes_under_another(
    market: Market, buyer: Buyer
) -> None:
    """The drill for a publisher's key: revoke, sign again, and the client converges."""
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    market.accept("acme", NEW, statement=vouched())
    asked(buyer, "acme/sql")
    buyer.buy("acme/sql")
    market.revoke("acme", OLD)
    assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}
    asked(buyer, "acme/sql")
    both = ["acme/sql@1.0.0"]
    assert revoked_experts(buyer) == {"list": both, "run": both, "doctor": both}
    refused(buyer, "acme/sql@1.0.0", error=RevokedError, match="revoked")
    market.sell("acme/sql@1.0.0", key=NEW)
    buyer.buy("acme/sql")
    [expert] = buyer.store.experts()
    assert expert.signer == NEW.public.key_id
    assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}


def test_what_a_registry_revoked_does_not_come_back_from_a_file(
    market: Market, buyer: Buyer, tmp_path: Path
) -> None:
    parcel = market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    file = tmp_path / "sql.expert"
    write_package(file, parcel.layout, lambda digest: BytesIO(parcel.blobs[digest]))
    buyer.house.install(file)
    market.revoke("acme", OLD)
    asked(buyer, "acme/sql")
    buyer.house.trust.add(OLD.public, name="mine", namespaces=["acme"])
    before = buyer.house.files()
    with pytest.raises(RevokedError, match=f"revoked by {market.host}"):
        buyer.house.install(file)
    assert buyer.house.files() == before


def test_an_index_that_was_rolled_back_is_refused(market: Market, buyer: Buyer) -> None:
    """Attack: the registry shows the state of before a revocation."""
    market.sell("acme/sql@1.0.0")
    database = market.live.served.registry.database
    with database.read() as connection:
        old = signed_index(connection, SQL)
    market.accept("acme", NEW, statement=vouched())
    market.revoke("acme", OLD)
    market.sell("acme/sql@1.0.1", key=NEW)
    with database.read() as connection:
        newest = signed_index(connection, SQL)
    asked(buyer, "acme/sql")
    with database.write() as connection:
        connection.execute(update(PACKAGES).values(index_document=old))
    refused(buyer, "acme/sql", match="an older state is shown")
    with database.write() as connection:
        connection.execute(update(PACKAGES).values(index_document=newest))
    buyer.buy("acme/sql")
    assert buyer.refs() == ["acme/sql@1.0.1"]


def test_a_namespace_is_not_taken_from_another_registry_by_a_higher_version(
    market: Market, buyer: Buyer, template: Template, tmp_path: Path
) -> None:
    """Attack: dependency confusion."""
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    with market_at(tmp_path / "other", template) as other:
        other.open("acme", key=MALLORY).sell("acme/sql@9.0.0", key=MALLORY)
        other.sell("acme/other@1.0.0", key=MALLORY)
        other.open("zoo").sell("zoo/ants@1.0.0", requires=[f"{other.host}/acme/other"])
        buyer.house.trust.add_registry(other.known)
        moved = replace(buyer, settings=replace(buyer.settings, registry=other.host))
        moved.buy("acme/sql")
        assert buyer.refs() == ["acme/sql@1.0.0"]
        refused(moved, "acme/other", error=NotFoundError, match=f"{market.host} has no package")
        refused(moved, "zoo/ants", match=f"namespace acme from {other.host}, but it belongs to")
        moved.buy(f"{other.host}/acme/other")
        assert [e.registry for e in buyer.store.experts()] == [other.host, market.host]
        assert revoked_experts(buyer) == {"list": [], "run": [], "doctor": []}


def test_an_explicit_install_from_elsewhere_replaces_nothing_of_the_own_registry(
    market: Market, buyer: Buyer, template: Template, tmp_path: Path
) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    with market_at(tmp_path / "other", template) as other:
        other.open("acme", key=MALLORY).sell("acme/sql@9.0.0", key=MALLORY)
        other.sell("acme/sql@1.0.0", key=MALLORY)
        buyer.house.trust.add_registry(other.known)
        buyer.buy(f"{other.host}/acme/sql")
        done = buyer.buy(f"{other.host}/acme/sql@1.0.0")
        assert buyer.house.trust.read().homes("acme") == (market.host,)
        experts = {e.ref: (e.registry, e.signer) for e in buyer.store.experts()}
        assert experts == {
            "acme/sql@1.0.0": (market.host, OLD.public.key_id),
            "acme/sql@9.0.0": (other.host, MALLORY.public.key_id),
        }
        [item] = done.installed
        assert item.outcome == "already installed"
        assert "stays that of" in item.warnings[0]
        market.sell("acme/sql@1.1.0")
        buyer.buy("acme/sql")  # without a host it means what it meant before
        house = buyer.house
        planner = Planner(
            store=house.store, bases=house.bases, trust=house.trust, catalogue=house.catalogue,
            index=house.index, home=house.home,
        )  # fmt: skip
        homes = {e.ref: e.home for e in planner.inventory().experts}
        assert homes == {
            "acme/sql@1.0.0": None,
            "acme/sql@1.1.0": None,
            "acme/sql@9.0.0": market.host,
        }
        market.revoke("acme", OLD)
        refused(buyer, "acme/sql@1.0.0", error=RevokedError)


def test_a_floor_that_cannot_be_read_stops_installing_and_is_found_by_doctor(
    market: Market, buyer: Buyer
) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    indexes = IndexStore(buyer.house.home.registries)

    def found() -> list[str]:
        house = buyer.house
        diagnosis = examine(
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
    market.sell("acme/sql@1.1.0")
    refused(buyer, "acme/sql@1.1.0", error=StoreError, match="cannot be read")
    path.unlink()
    buyer.buy("acme/sql@1.1.0")
    assert found() == []


def test_an_index_of_another_key_is_refused_whatever_it_offers(
    market: Market, buyer: Buyer
) -> None:
    market.sell("acme/sql@1.0.0")
    impostor = replace(market.known, index_key=MALLORY.public)
    buyer.house.trust.add_registry(impostor)
    refused(buyer, "acme/sql", match="the registry's index key is")
