"""Installing from a registry over a real socket: what travels, what is checked, what is refused."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from expertctl.errors import (
    ChangedVersionError,
    ConflictError,
    ExpertError,
    MissingDependencyError,
    NotFoundError,
    OfflineError,
    RegistryError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.install.release_age import ReleaseAge
from expertctl.registry.key_statement import sign_statement
from expertctl.trust.grant import KnownRegistry
from tests.install.market import Buyer, Market, market_at
from tests.registry_server.publishing.parcels import Template, push, signed_again
from tests.store.shop import House, Shop, a_key


def refuses(buyer: Buyer, error: type[ExpertError], match: str, *refs: str) -> str:
    """Demand a refusal that leaves no trace in the store; return its hint."""
    before = buyer.house.files()
    with pytest.raises(error, match=match) as raised:
        buyer.buy(*refs)
    assert buyer.house.files() == before
    return raised.value.hint


def test_an_expert_is_installed_from_the_default_registry(buyer: Buyer, market: Market) -> None:
    parcel = market.sell("acme/sql@1.0.0")
    (done,) = buyer.buy("acme/sql").installed
    assert (done.outcome, done.expert.ref) == ("installed", "acme/sql@1.0.0")
    assert done.expert.registry == market.host
    assert done.expert.package_digest == parcel.package_digest
    buyer.house.check()
    assert not list((buyer.house.home.registries / "arrived").iterdir())


def test_what_an_expert_requires_comes_along_first(buyer: Buyer, market: Market) -> None:
    market.sell("acme/low@1.0.0")
    market.sell("acme/low@2.0.0")
    market.sell("acme/top@1.0.0", requires=["acme/low@^1"])
    done = buyer.buy("acme/top").installed
    assert [item.expert.ref for item in done] == ["acme/low@1.0.0", "acme/top@1.0.0"]


def test_what_disagrees_is_refused_before_a_byte_of_it_travels(
    buyer: Buyer, market: Market
) -> None:
    market.sell("acme/low@1.0.0")
    market.sell("acme/low@2.0.0")
    market.sell("acme/top@1.0.0", requires=["acme/low@^2"])
    match = r"you ask acme/low@\^1, but acme/top@1\.0\.0 requires acme/low@\^2; there are 1\.0\.0"
    refuses(buyer, ConflictError, match, "acme/top", "acme/low@^1")


def test_an_exact_version_that_is_here_needs_no_network(buyer: Buyer, market: Market) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    (done,) = buyer.offline().buy("acme/sql@1.0.0").installed
    assert done.outcome == "already installed"


def test_offline_the_index_of_last_time_counts(buyer: Buyer, market: Market) -> None:
    market.sell("acme/sql@1.0.0")
    market.sell("acme/sql@1.1.0")
    buyer.buy("acme/sql@1.0.0")
    refuses(buyer.offline(), OfflineError, r"acme/sql@1\.1\.0 must be fetched", "acme/sql")
    refuses(buyer.offline(), NotFoundError, "was never asked about acme/other", "acme/other")


def test_damage_in_the_store_is_made_good_from_the_registry(buyer: Buyer, market: Market) -> None:
    market.sell("acme/sql@1.0.0")
    (done,) = buyer.buy("acme/sql").installed
    blob = buyer.store.paths.blob(done.expert.layers[0].digest)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes() + b"\0")
    buyer.buy("acme/sql")
    buyer.store.check_integrity()


def test_a_new_signature_replaces_the_old_one(buyer: Buyer, market: Market) -> None:
    parcel = market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    new = a_key("new")
    by = a_key("acme")
    statement = sign_statement(namespace="acme", new=new.public, by=by)
    market.accept("acme", new, statement=statement)
    push(market.live.served.registry, market.identity, signed_again(parcel, new))
    (done,) = buyer.buy("acme/sql").installed
    assert (done.outcome, done.expert.signer) == ("re-signed", new.public.key_id)
    buyer.house.check()


def test_a_key_that_nobody_vouches_for_is_refused(buyer: Buyer, market: Market) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    thief = a_key("thief")
    market.accept("acme", thief)
    market.sell("acme/sql@1.1.0", key=thief)
    hint = refuses(buyer, TrustError, "for which no key that is trusted", "acme/sql")
    assert "trust add" in hint


def test_a_version_whose_key_was_revoked_is_passed_over_and_refused_by_name(
    buyer: Buyer, market: Market
) -> None:
    new = a_key("new")
    statement = sign_statement(namespace="acme", new=new.public, by=a_key("acme"))
    market.accept("acme", new, statement=statement)
    market.sell("acme/sql@1.0.0")
    market.sell("acme/sql@1.1.0", key=new)
    market.revoke("acme", new)
    assert [i.expert.ref for i in buyer.buy("acme/sql").installed] == ["acme/sql@1.0.0"]
    refuses(buyer, RevokedError, "revoked", "acme/sql@1.1.0")


def test_an_expert_whose_key_was_revoked_since_is_not_taken_for_installed(
    buyer: Buyer, market: Market
) -> None:
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    market.revoke("acme", a_key("acme"))
    refuses(buyer, RevokedError, "revoked", "acme/sql")
    refuses(buyer, RevokedError, r"the key of 1\.0\.0 was revoked", "acme/sql")
    refuses(buyer, RevokedError, "revoked", "acme/sql@1.0.0")


def test_a_yanked_version_comes_only_by_its_exact_name_with_a_warning(
    buyer: Buyer, market: Market
) -> None:
    market.sell("acme/sql@1.0.0")
    market.sell("acme/sql@1.1.0")
    market.yank("acme/sql@1.1.0", "learnt a password")
    assert [i.expert.ref for i in buyer.buy("acme/sql").installed] == ["acme/sql@1.0.0"]
    refuses(buyer, NotFoundError, r"1\.1\.0 was yanked: learnt a password", "acme/sql@^1.1")
    (done,) = buyer.buy("acme/sql@1.1.0").installed
    assert any("was yanked: learnt a password" in warning for warning in done.warnings)
    (again,) = buyer.offline().buy("acme/sql@1.1.0").installed
    assert any("was yanked" in warning for warning in again.warnings)


def test_a_young_version_waits_and_that_is_said(buyer: Buyer, market: Market) -> None:
    market.sell("acme/sql@1.0.0")
    soon = ReleaseAge(timedelta(days=3), (), datetime.now(UTC) + timedelta(days=4))
    buyer.buy("acme/sql", age=soon)
    market.sell("acme/sql@1.1.0")
    now = ReleaseAge.starting_now(timedelta(days=3), ())
    with pytest.raises(NotFoundError, match=r"1\.1\.0 waits until 20"):
        buyer.buy("acme/sql@1.1.0", age=now)
    age = ReleaseAge.starting_now(timedelta(days=3), ("acme",))
    assert buyer.buy("acme/sql", age=age).chosen[0].candidate.ref == "acme/sql@1.1.0"


def test_files_and_references_count_together(buyer: Buyer, market: Market, shop: Shop) -> None:
    market.sell("acme/low@1.0.0")
    market.sell("acme/other@1.0.0")
    buyer.house.trusting("acme")
    file = shop.package("acme/file", composition={"requires": ["acme/low@^1"]})
    done = buyer.buy("acme/other", files=[file]).installed
    assert sorted(i.expert.ref for i in done) == [
        "acme/file@1.0.0", "acme/low@1.0.0", "acme/other@1.0.0",
    ]  # fmt: skip
    registries = {i.expert.ref: i.expert.registry for i in done}
    assert registries["acme/file@1.0.0"] == "local"
    buyer.house.check()


def test_a_file_that_requires_what_nobody_has_installs_nothing(buyer: Buyer, shop: Shop) -> None:
    buyer.house.trusting("acme")
    file = shop.package("acme/file", composition={"requires": ["acme/absent@^1"]})
    with pytest.raises(MissingDependencyError, match=r"acme/file@1\.0\.0 requires acme/absent"):
        buyer.buy(files=[file])
    assert buyer.refs() == []


def test_nothing_to_install_is_a_usage_error(buyer: Buyer) -> None:
    with pytest.raises(UsageError, match="nothing to install"):
        buyer.buy()


def test_other_content_of_an_installed_version_is_refused(
    buyer: Buyer, market: Market, shop: Shop
) -> None:
    buyer.house.trusting("acme").install(shop.package("acme/sql"))
    market.sell("acme/sql@1.0.0")
    match = r"what is installed has sha256:\w+ \(signed by .*\), but .* has sha256:\w+ \(signed"
    refuses(buyer, ChangedVersionError, match, f"{market.host}/acme/sql@1.0.0")


def test_a_registry_that_nobody_accepted_is_believed_in_nothing(home: Path, market: Market) -> None:
    market.sell("acme/sql@1.0.0")
    stranger = Buyer.at(home)
    hint = refuses(stranger, TrustError, "index key of .* is not known", f"{market.host}/acme/sql")
    assert "trust registry add" in hint
    refuses(stranger, NotFoundError, "no registry is set", "acme/sql")


def test_a_registry_with_another_index_key_is_refused(home: Path, market: Market) -> None:
    market.sell("acme/sql@1.0.0")
    fooled = Buyer.at(home, market)
    known = KnownRegistry(market.host, market.live.url, a_key("other").public)
    fooled.house.trust.path.unlink()
    fooled.house.trust.add_registry(known)
    refuses(fooled, TrustError, "is signed by", "acme/sql")


def test_a_name_is_never_taken_from_a_second_registry_by_itself(
    buyer: Buyer, market: Market, template: Template, tmp_path: Path
) -> None:
    """Dependency confusion: the other registry, now the default, has a higher version."""
    market.sell("acme/sql@1.0.0")
    buyer.buy("acme/sql")
    with market_at(tmp_path / "second", template) as other:
        other.open("acme").sell("acme/sql@9.0.0")
        confused = Buyer.at(buyer.house.root, other)
        assert confused.buy("acme/sql").chosen[0].candidate.ref == "acme/sql@1.0.0"
        (done,) = confused.buy(f"{other.host}/acme/sql").installed
        assert (done.expert.ref, done.expert.registry) == ("acme/sql@9.0.0", other.host)


def test_a_package_cannot_send_for_its_requirement_to_a_registry_that_is_not_known(
    buyer: Buyer, market: Market, template: Template, tmp_path: Path
) -> None:
    with market_at(tmp_path / "second", template) as other:
        other.open("evil").sell("evil/low@1.0.0")
        market.sell("acme/top@1.0.0", requires=[f"{other.host}/evil/low"])
        refuses(buyer, TrustError, "index key of .* is not known", "acme/top")


def test_a_package_cannot_say_where_a_new_namespace_belongs(
    buyer: Buyer, market: Market, template: Template, tmp_path: Path
) -> None:
    """Else all of corp/* would come from there: a name that the usual registry may have, too."""
    with market_at(tmp_path / "second", template) as other:
        other.open("corp").sell("corp/low@1.0.0")
        other.open("zoo").sell("zoo/top@1.0.0", requires=[f"{other.host}/corp/low"])
        buyer.house.trust.add_registry(other.known)
        top, low = f"{other.host}/zoo/top", f"{other.host}/corp/low"
        match = rf"zoo/top@1.0.0 requires {low}, but here corp/\* comes from"
        hint = refuses(buyer, TrustError, match, top)
        assert hint == f"if that is right: `expertctl install {low}` first"
        assert buyer.house.trust.read().homes("corp") == ()
        buyer.buy(low)
        assert buyer.buy(top).installed[0].expert.ref == "zoo/top@1.0.0"
        assert buyer.house.trust.read().homes("corp") == (other.host,)


def test_a_name_that_is_not_there_is_told(buyer: Buyer, market: Market) -> None:
    refuses(buyer, NotFoundError, "acme/absent is not there: .* has no package", "acme/absent")


def test_a_registry_that_does_not_answer_is_a_network_error(buyer: Buyer, home: Path) -> None:
    house = House(home)
    known = KnownRegistry("127.0.0.1:9", "http://127.0.0.1:9", a_key("acme").public)
    house.trust.add_registry(known)
    refuses(buyer, RegistryError, "127.0.0.1:9", "127.0.0.1:9/acme/sql")
