from tests.store.fault_injection import lean
from tests.store.fixtures import fast, house, shop

__all__ = ["fast", "house", "lean", "shop"]
