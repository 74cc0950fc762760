"""A server whose answers are known by heart, and clients of it."""

from collections.abc import Iterator

import pytest

from tests.server.harness import ServerHarness, run_app
from tests.server.openai.client import Client, make_client
from tests.server.openai.scripted_base import make_scripted_packages


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    """One server for all that change nothing of it."""
    folder = tmp_path_factory.mktemp("openai")
    stock = make_scripted_packages(folder / "stock")
    with run_app(stock.make_home(folder / "home")) as served:
        yield served


@pytest.fixture
def client(scripted: ServerHarness) -> Iterator[Client]:
    """The official client, in process."""
    with make_client(scripted) as client:
        yield client
