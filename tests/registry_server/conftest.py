"""Registries in process, closed after each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.registry_server.served import Served, new_registry, new_settings

NewRegistry = Callable[..., Served]


@pytest.fixture
def make_registry(tmp_path: Path) -> Iterator[NewRegistry]:
    """Make registries, each in a folder of its own; arguments are fields of `Limits`."""
    made: list[Served] = []

    def make(**limits: float) -> Served:
        made.append(new_registry(new_settings(tmp_path / f"registry-{len(made)}", **limits)))
        return made[-1]

    yield make
    for served in made:
        served.close()


@pytest.fixture
def served(make_registry: NewRegistry) -> Served:
    """A registry with the settings of everybody."""
    return make_registry()
