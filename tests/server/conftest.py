"""Servers in process: one for each file of tests, and others with settings of their own.

They compute with the same kernels as the engine's tests, compiled once.
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from expertctl.http.server import raise_file_limit
from expertctl.server.settings import ServeSettings
from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder
from tests.server.harness import (
    CHAT_TEMPLATE,
    ServedPackages,
    ServerHarness,
    make_served_packages,
    run_app,
)

__all__ = ["keeps_all_code", "keeps_code", "kept_folder"]

MakeServed = Callable[..., ServerHarness]


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> ServedPackages:
    """The base and the packages that are served."""
    return make_served_packages(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def served(
    stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerHarness]:
    """A server with the settings of everybody, for all tests of one file."""
    user_home = stock.make_home(tmp_path_factory.mktemp("served") / "home")
    with run_app(user_home) as one:
        yield one


@pytest.fixture
def make_served(stock: ServedPackages, tmp_path: Path) -> Iterator[MakeServed]:
    """Make servers with settings of their own, each in a home of its own."""
    with ExitStack() as stack:
        count = 0

        def make(
            settings: ServeSettings | None = None, *, chat_template: str | None = CHAT_TEMPLATE
        ) -> ServerHarness:
            nonlocal count
            count += 1
            packages = stock
            if chat_template != CHAT_TEMPLATE:
                folder = tmp_path / f"packages-{count}"
                packages = make_served_packages(folder, chat_template=chat_template)
            user_home = packages.make_home(tmp_path / f"served-{count}")
            return stack.enter_context(run_app(user_home, settings))

        yield make


@pytest.fixture
def open_files() -> Iterator[None]:
    """As many as are needed, here; afterwards what it was before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
