"""Compiled kernels are kept for all tests: between runs, and for the processes of one run.

While coverage is measured they are kept for this run alone, for what is loaded runs no compiler.
A test compiles in its own process: other processes would take the cores of other tests, and each
would compile again what functions share.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertctl.engine.kernels import compile_workers, jit
from expertctl.settings import Home

KERNEL_FOLDER_VARIABLE = "KEPT_KERNELS"


def is_measuring_coverage(config: pytest.Config) -> bool:
    """Whether it counts who compiles; processes of a test are not counted."""
    return bool(config.getoption("cov_source", default=None))


@pytest.fixture(scope="session")
def kept_folder(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Path | None:
    """Where code is kept; nowhere if others may write there."""
    place, cache = tmp_path_factory.getbasetemp(), getattr(pytestconfig, "cache", None)
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    if cache is not None and not is_measuring_coverage(pytestconfig):
        place = cache.mkdir("kernels")
    before = jit._CACHE
    jit._CACHE = jit._CacheState()
    try:
        return jit.use_kernel_cache(Home(place / "home"))
    finally:
        jit._CACHE = before


@pytest.fixture(autouse=True, scope="module")
def keeps_all_code(pytestconfig: pytest.Config, kept_folder: Path | None) -> Iterator[None]:
    """Keep compiled code there, whatever home a test has; `use_shared_kernel_cache` shares it.

    It holds before the fixtures of a whole module are made, which may be servers that compute.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "_CACHE", jit._CacheState(folder=kept_folder))
        patch.setattr(jit, "_prepare_folder", lambda home: kept_folder)
        patch.setattr(compile_workers, "choose_worker_count", lambda functions: 0)
        if kept_folder is not None and not is_measuring_coverage(pytestconfig):
            patch.setenv(KERNEL_FOLDER_VARIABLE, str(kept_folder))
        yield


@pytest.fixture(autouse=True)
def keeps_code(monkeypatch: pytest.MonkeyPatch, kept_folder: Path | None) -> None:
    """Nobody is told of it whom a test before this one named."""
    monkeypatch.setattr(jit, "_CACHE", jit._CacheState(folder=kept_folder))


def use_shared_kernel_cache() -> None:
    """Keep code where the test does that began this process."""
    if told := os.environ.get(KERNEL_FOLDER_VARIABLE):
        jit._prepare_folder = lambda home: Path(told)
        jit._CACHE = jit._CacheState(folder=Path(told))
