from tests.install.market import buyer, market, template
from tests.store.shop import fast, house, shop

__all__ = ["buyer", "fast", "house", "market", "shop", "template"]
