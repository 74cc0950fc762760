"""Experts that come at once, so that no clock says how many of those who are asked for hit."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from expertctl.engine.moe import arrivals


class AtOnce(Executor):
    """Does what it is given before anything else is done."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_running_or_notify_cancel()
        done.set_result(fn(*args, **options))
        return done


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whoever is wanted, or foreseen, at once."""
    monkeypatch.setattr(arrivals, "ThreadPoolExecutor", AtOnce)
