"""`PairGain`: what a chain of two experts was measured to gain over the better one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from expertctl.digest import Digest

SURE = 0.05
"""A gain counts where chance alone would give it less often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGain:
    """One measurement: the difference of the shares of right answers, on one base."""

    first: Digest
    second: Digest
    base: str
    gain: float
    low: float
    high: float
    """The 95 % interval of the gain."""
    p: float
    """McNemar's: how likely such a difference is where there is none."""
    n: int
    at: float
    """Seconds since the epoch."""

    @property
    def pair(self) -> tuple[Digest, Digest]:
        """The experts in the order of the chain."""
        return self.first, self.second

    @property
    def is_sure(self) -> bool:
        """Whether chance does not explain it."""
        return self.low > 0 and self.p < SURE

    def to_row(self) -> list[object]:
        """Return the row of the table ``gains``."""
        digests = [str(self.first), str(self.second)]
        return [*digests, self.base, self.gain, self.low, self.high, self.p, self.n, self.at]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Read a row back."""
        first, second = Digest.parse(row["first"]), Digest.parse(row["second"])
        names = ("base", "gain", "low", "high", "p", "n", "at")
        return cls(first=first, second=second, **{name: row[name] for name in names})
