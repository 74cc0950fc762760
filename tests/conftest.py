"""For every test: a home and numbers of its own, one thread, no settings of who runs it.

Properties are tried on the same examples in every run and on every machine, however slow; to look
for new ones: ``pytest -m hypothesis --hypothesis-profile=search``.
"""

import gc
import itertools
import logging
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the tests in the background lets them ignore it, and so all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are collected: nothing of what is imported is garbage
_THEIRS = {"COLUMNS", "LINES", "SOURCE_DATE_EPOCH"}
_SLOW = (HealthCheck.too_slow,)
settings.register_profile("search", deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "same", settings.get_profile("search"), derandomize=True, database=None, print_blob=True
)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """What was imported stays: nobody looks for garbage there, nor do processes forked of this."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EXPERT_HOME, and no setting of the user that changes what is shown or built."""
    for name in [n for n in os.environ if n.startswith("EXPERT_") or n in _THEIRS]:
        monkeypatch.delenv(name)
    root = tmp_path / "expert-home"
    monkeypatch.setenv("EXPERT_HOME", str(root))
    return root


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds that nobody chooses, in one order: what is drawn is the same in every run."""
    numbers = itertools.count(1)
    monkeypatch.setattr(secrets, "randbelow", lambda top: next(numbers) % top)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The log of a server that a test ran here does not go on, to a stream that is closed."""
    loggers = [
        logging.getLogger(name) for name in ("registry_server", "expertctl.server", "_granian")
    ]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
