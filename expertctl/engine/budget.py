"""The ledger of memory: one limit over base, experts, KV and buffers that is never exceeded.

Bytes are entered before they are allocated and struck out after they are freed, so the ledger never
says less than what is live.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from expertctl.errors import BudgetError
from expertctl.settings import human_limit, human_size

Purpose = Literal["base", "experts", "kv", "buffers"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
WAYS_OUT: dict[Purpose, str] = {
    "base": "raise --memory-budget, hold a large base in --dtype int8, or choose a smaller one",
    "experts": "use fewer experts with --max-experts, or raise --memory-budget",
    "kv": "lower --max-tokens, shorten the prompt, or raise --memory-budget",
    "buffers": "lower --max-tokens, shorten the prompt, or raise --memory-budget",
}

KEPT_KV_SHARE = 4
"""Keys and values that are kept for later requests may take this part of a server's budget."""


def kept_kv_limit(wanted: int | None, budget: int) -> int:
    """Return how many bytes of a budget keys and values may take between requests."""
    return budget // KEPT_KV_SHARE if wanted is None else min(wanted, budget)


class Budget:
    """How many bytes of one memory are held, by purpose; between threads, `Tiers` guards it."""

    def __init__(self, limit: int) -> None:
        """Start with nothing held."""
        self.limit = limit
        self._held: dict[Purpose, int] = dict.fromkeys(PURPOSES, 0)
        self._peak = 0

    @property
    def used(self) -> int:
        """Bytes held now."""
        return sum(self._held.values())

    @property
    def free(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit - self.used

    @property
    def peak(self) -> int:
        """The most that was ever held."""
        return self._peak

    def held(self, purpose: Purpose) -> int:
        """Bytes held now for one purpose."""
        return self._held[purpose]

    def reserve(self, purpose: Purpose, size: int, *, what: str) -> None:
        """Enter bytes that are about to be allocated.

        Raises:
            BudgetError: when they do not fit; nothing is entered then.
        """
        if size < 0:
            raise ValueError(f"{size} bytes cannot be reserved")
        if size > self.free:
            raise self.refusal(purpose, size, what=what)
        self._held[purpose] += size
        self._peak = max(self._peak, self.used)

    def release(self, purpose: Purpose, size: int) -> None:
        """Strike out bytes that were freed."""
        if not 0 <= size <= self._held[purpose]:
            raise ValueError(f"{size} bytes of {purpose} are not held")
        self._held[purpose] -= size

    @contextmanager
    def holding(self, purpose: Purpose, size: int, *, what: str) -> Iterator[None]:
        """Hold bytes for the length of a ``with`` block.

        Raises:
            BudgetError: when they do not fit.
        """
        self.reserve(purpose, size, what=what)
        try:
            yield
        finally:
            self.release(purpose, size)

    def refusal(self, purpose: Purpose, size: int, *, what: str) -> BudgetError:
        """Return the error that says what does not fit beside what."""
        held = ", ".join(f"{p} {human_size(n)}" for p, n in self._held.items() if n) or "nothing"
        needed, free = _apart(size, self.free)
        return BudgetError(
            f"{what}: {needed} needed, but only {free} of the budget of "
            f"{human_limit(self.limit)} are free (held: {held})",
            hint=WAYS_OUT[purpose],
        )

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        assert 0 <= self.used <= self._peak <= self.limit
        assert all(size >= 0 for size in self._held.values())


def _apart(first: int, second: int) -> tuple[str, str]:
    """Return two sizes so that a person sees which is the larger."""
    shown = human_size(first), human_size(second)
    return shown if shown[0] != shown[1] else (f"{first:,} B", f"{second:,} B")
