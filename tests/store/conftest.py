from tests.store.shop import house, shop

__all__ = ["house", "shop"]
