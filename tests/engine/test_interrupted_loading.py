"""An interrupt at any line of a load leaves nobody waiting for what is not coming."""

import inspect
import sys
from contextlib import suppress
from threading import Thread
from types import FrameType
from typing import Any

import pytest

from expertctl.engine.memory import adapter_cache as module
from expertctl.engine.memory.adapter_cache import AdapterCache, CacheRequest, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.reference import Digest

SECONDS = 60
"""After which something that should be over is not."""
_SETTLING = frozenset({"_finish_load", "check_integrity"})
_WHOLE = ("_finish_load", "with self._lock")
"""In lines that leave a lock, the interpreter looks for signals only once they have left it."""


def wanted(name: str) -> CacheRequest[bytes]:
    return CacheRequest((Tier.RAM, Digest.compute(name.encode())), 10, name, lambda: name.encode())


class InterruptAt:
    """Raises KeyboardInterrupt at one line of the module's, counted from the first that is run."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.lines = inspect.getsource(module).splitlines()

    def __call__(self, frame: FrameType, event: str, _: Any) -> "InterruptAt | None":
        if frame.f_code.co_filename != module.__file__ or frame.f_code.co_name in _SETTLING:
            return None
        line = self.lines[frame.f_lineno - 1]
        if event == "line" and not any(part in line for part in _WHOLE):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_after_an_interrupt_at_any_line_the_next_request_gets_what_it_needs(
    names: tuple[str, ...],
) -> None:
    was, number = sys.gettrace(), 0
    while True:
        number += 1
        budget = MemoryBudget(1000)
        tiers, interrupt = AdapterCache(ram=budget, device=budget), InterruptAt(number)
        sys.settrace(interrupt)
        try:
            with suppress(KeyboardInterrupt), tiers.pin([wanted(name) for name in names]):
                pass
        finally:
            sys.settrace(was)
        assert what_another_gets(tiers, names) == [name.encode() for name in names], number
        if interrupt.left > 0:
            assert number > 35, "so many lines a load has at least"
            return


def what_another_gets(tiers: AdapterCache, names: tuple[str, ...]) -> list[bytes]:
    found: list[bytes] = []

    def ask() -> None:
        with tiers.pin([wanted(name) for name in names]) as values:
            found.extend(values)

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SECONDS)
    return found
