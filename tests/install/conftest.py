from tests.install.fixtures import buyer, publisher, template
from tests.store.fixtures import fast, package_factory, user_home

__all__ = ["buyer", "fast", "package_factory", "publisher", "template", "user_home"]
