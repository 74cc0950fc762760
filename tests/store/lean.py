"""A small process in which functions run that fork at every step.

Whatever runs all tests has torch and much else in memory, and copying the tables of that for a
fork takes longer than the step that is tried.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import pytest


@dataclass(frozen=True)
class Lean:
    """Such a process; it has imported what the functions need that it was given."""

    pool: ProcessPoolExecutor

    def __call__(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function of a module there; what it raises is raised here."""
        self.pool.submit(function, *arguments).result()


@pytest.fixture(scope="session")
def lean() -> Iterator[Lean]:
    """One for all tests."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield Lean(pool)
