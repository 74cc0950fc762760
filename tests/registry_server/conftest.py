"""Registries in process, closed after each test."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.registry_server.harness import RegistryHarness, create_registry, make_settings

NewRegistry = Callable[..., RegistryHarness]


@pytest.fixture
def make_registry(tmp_path: Path) -> Iterator[NewRegistry]:
    """Make registries, each in a folder of its own; arguments are fields of `Limits`."""
    made: list[RegistryHarness] = []

    def make(**limits: float) -> RegistryHarness:
        made.append(create_registry(make_settings(tmp_path / f"registry-{len(made)}", **limits)))
        return made[-1]

    yield make
    for served in made:
        served.close()


@pytest.fixture
def served(make_registry: NewRegistry) -> RegistryHarness:
    """A registry with the settings of everybody."""
    return make_registry()
