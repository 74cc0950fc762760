from pathlib import Path

import pytest

from expertctl.routing.index import RoutingIndex
from expertctl.routing.lexical import LexicalEncoder
from expertctl.store.base_record import StoredBase
from tests.routing.experts import base_at


@pytest.fixture
def base(tmp_path: Path) -> StoredBase:
    return base_at(tmp_path / "base")


@pytest.fixture
def index(tmp_path: Path) -> RoutingIndex:
    return RoutingIndex(tmp_path / "home", LexicalEncoder())
