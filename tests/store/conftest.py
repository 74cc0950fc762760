from tests.store.shop import fast, house, shop

__all__ = ["fast", "house", "shop"]
