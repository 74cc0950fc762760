from tests.install.fixtures import buyer, market, template
from tests.store.fixtures import fast, house, shop

__all__ = ["buyer", "fast", "house", "market", "shop", "template"]
