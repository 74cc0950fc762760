"""A database with tables, lent for writing."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from tests.registry_server.served import Served


@pytest.fixture
def connection(served: Served) -> Iterator[Connection]:
    with served.registry.database.write() as connection:
        yield connection
