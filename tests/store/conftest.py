from tests.store.lean import lean
from tests.store.shop import fast, house, shop

__all__ = ["fast", "house", "lean", "shop"]
