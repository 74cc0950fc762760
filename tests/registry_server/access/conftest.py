"""A database with tables, lent for writing."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from tests.registry_server.harness import RegistryHarness


@pytest.fixture
def connection(served: RegistryHarness) -> Iterator[Connection]:
    with served.registry.database.write() as connection:
        yield connection
