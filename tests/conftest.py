"""For every test: a home of its own, one thread, no settings of the person who runs it."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty EXPERT_HOME, and none of the user's EXPERT_* settings."""
    for name in [n for n in os.environ if n.startswith("EXPERT_")]:
        monkeypatch.delenv(name)
    root = tmp_path / "expert-home"
    monkeypatch.setenv("EXPERT_HOME", str(root))
    return root


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The log of a registry that a test ran here does not go on, to a stream that is closed."""
    loggers = [logging.getLogger(name) for name in ("registry_server", "_granian")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
