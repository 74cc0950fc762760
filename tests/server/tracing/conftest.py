"""Servers in process that send their traces to a collector of the test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from expertctl.engine.serving.batch_settings import BatchSettings
from expertctl.server.settings import ServeSettings
from expertctl.server.tracing.tracing import Tracing
from tests.server.served import Served, Stock, serving
from tests.server.tracing.collector import Collector, collecting

SETTINGS = ServeSettings(batch=BatchSettings(budget=64 << 20))


@dataclass
class Traced:
    """A server and who collects its traces; `collector.spans` are there once it is closed."""

    served: Served
    collector: Collector

    @property
    def tracing(self) -> Tracing:
        assert self.served.service.tracing is not None
        return self.served.service.tracing

    def close(self) -> None:
        self.tracing.close(seconds=30)


MakeTraced = Callable[..., Traced]


@pytest.fixture(scope="session", autouse=True)
def plain_environment() -> Iterator[None]:
    """Let no variable of whoever runs the tests say anything about traces."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            patch.delenv(name)
        yield


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def traced(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A server for all tests of a file, which closes it when it has asked all it wants."""
    house = stock.house(tmp_path_factory.mktemp("traced") / "home")
    with collecting() as one, serving(house, replace(SETTINGS, traces=one.address)) as served:
        made = Traced(served, one)
        made.tracing.open()
        yield made
        made.close()


@pytest.fixture
def make_traced(stock: Stock, collector: Collector, tmp_path: Path) -> Iterator[MakeTraced]:
    """Make servers that send traces to ``address``, or to the collector of the test."""
    with ExitStack() as stack:

        def make(address: str | None = None) -> Traced:
            settings = replace(SETTINGS, traces=address or collector.address)
            house = stock.house(tmp_path / "home")
            made = Traced(stack.enter_context(serving(house, settings)), collector)
            made.tracing.open()
            stack.callback(made.tracing.close, seconds=0.01)
            return made

        yield make
