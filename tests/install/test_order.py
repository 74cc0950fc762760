"""Installing from a registry over a real socket: what travels, what is checked, what is refused."""

from tests.install.market import Buyer, Market


def test_an_expert_is_installed_from_the_default_registry(buyer: Buyer, market: Market) -> None:
    parcel = market.sell("acme/sql@1.0.0")
    (done,) = buyer.buy("acme/sql").installed
    assert (done.outcome, done.expert.ref) == ("installed", "acme/sql@1.0.0")
    assert done.expert.registry == market.host
    assert done.expert.package_digest == parcel.package_digest
    buyer.house.check()
