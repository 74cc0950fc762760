"""Tests of benchmarks run in `make test-all`, with the same kernels as the engine's tests."""

from pathlib import Path

import pytest

from tests.engine.kernel_cache import keeps_all_code, keeps_code, kept_folder

__all__ = ["keeps_all_code", "keeps_code", "kept_folder"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them before pytest selects tests by marks; the hook sees those of other folders, too."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.all)
