"""Servers in process: one for each file of tests, and others with settings of their own.

They compute with the same kernels as the engine's tests, compiled once.
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from expertctl.http.connections import allow_files
from expertctl.server.settings import ServeSettings
from tests.engine.kept_code import keeps_all_code, keeps_code, kept_folder
from tests.server.served import Served, Stock, make_stock, serving

__all__ = ["keeps_all_code", "keeps_code", "kept_folder"]

MakeServed = Callable[..., Served]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """The base and the packages that are served."""
    return make_stock(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def served(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the settings of everybody, for all tests of one file."""
    house = stock.house(tmp_path_factory.mktemp("served") / "home")
    with serving(house) as one:
        yield one


@pytest.fixture
def make_served(stock: Stock, tmp_path: Path) -> Iterator[MakeServed]:
    """Make servers with settings of their own, each in a home of its own."""
    with ExitStack() as stack:
        count = 0

        def make(settings: ServeSettings | None = None) -> Served:
            nonlocal count
            count += 1
            house = stock.house(tmp_path / f"served-{count}")
            return stack.enter_context(serving(house, settings))

        yield make


@pytest.fixture
def open_files() -> Iterator[None]:
    """As many as are needed, here; afterwards what it was before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_files()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
