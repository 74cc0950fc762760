"""A server whose answers are known by heart, and clients of it."""

from collections.abc import Iterator

import anthropic
import pytest

from tests.server.anthropic.clients import a_client
from tests.server.openai.scripted_base import scripted_stock
from tests.server.served import Served, serving


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all that change nothing of it."""
    folder = tmp_path_factory.mktemp("anthropic")
    stock = scripted_stock(folder / "stock")
    with serving(stock.house(folder / "home")) as served:
        yield served


@pytest.fixture
def client(scripted: Served) -> Iterator[anthropic.Anthropic]:
    """The official client, in process."""
    with a_client(scripted) as client:
        yield client
