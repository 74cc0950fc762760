from tests.store.fault_injection import lean
from tests.store.fixtures import fast, package_factory, user_home

__all__ = ["fast", "lean", "package_factory", "user_home"]
