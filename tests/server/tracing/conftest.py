"""Servers in process that send their traces to a collector of the test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from expertctl.engine_config import EngineConfig
from expertctl.server.settings import ServeSettings
from expertctl.server.tracing import Tracing
from tests.server.harness import ServedPackages, ServerHarness, run_app
from tests.server.tracing.collector import TraceCollector, run_collector

SETTINGS = ServeSettings(engine=EngineConfig(memory_budget=64 << 20))


@dataclass
class TracedServer:
    """A server and who collects its traces; `collector.spans` are there once it is closed."""

    served: ServerHarness
    collector: TraceCollector

    @property
    def tracing(self) -> Tracing:
        assert self.served.service.tracing is not None
        return self.served.service.tracing

    def close(self) -> None:
        self.tracing.close(seconds=30)


MakeTraced = Callable[..., TracedServer]


@pytest.fixture(scope="session", autouse=True)
def plain_environment() -> Iterator[None]:
    """Let no variable of whoever runs the tests say anything about traces."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("OTEL_")]:
            patch.delenv(name)
        yield


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with run_collector() as one:
        yield one


@pytest.fixture(scope="module")
def traced(
    stock: ServedPackages, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TracedServer]:
    """A server for all tests of a file, which closes it when it has asked all it wants."""
    user_home = stock.make_home(tmp_path_factory.mktemp("traced") / "home")
    with (
        run_collector() as one,
        run_app(user_home, replace(SETTINGS, traces=one.address)) as served,
    ):
        made = TracedServer(served, one)
        made.tracing.open()
        yield made
        made.close()


@pytest.fixture
def make_traced(
    stock: ServedPackages, collector: TraceCollector, tmp_path: Path
) -> Iterator[MakeTraced]:
    """Make servers that send traces to ``address``, or to the collector of the test."""
    with ExitStack() as stack:

        def make(address: str | None = None) -> TracedServer:
            settings = replace(SETTINGS, traces=address or collector.address)
            user_home = stock.make_home(tmp_path / "home")
            made = TracedServer(stack.enter_context(run_app(user_home, settings)), collector)
            made.tracing.open()
            stack.callback(made.tracing.close, seconds=0.01)
            return made

        yield make
