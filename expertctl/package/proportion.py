"""What a count of right answers says of the share behind it: 95 % intervals, and one test.

- the share of one: Wilson's score interval (Wilson 1927, *J. Am. Stat. Assoc.* 22:209-212);
- the difference of two shares on the same prompts: the Wald interval with the adjustment of
  Bonett and Price (2012, *J. Educ. Behav. Stat.* 37:479-488);
- whether there is a difference: McNemar's exact test (McNemar 1947, *Psychometrika* 12:153-157).
"""

from dataclasses import dataclass
from math import sqrt

Z = 1.959963984540054
"""The 97.5 % point of the normal distribution: all intervals are 95 % ones."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a figure may really lie, with 95 % confidence."""

    low: float
    high: float


def share_interval(right: int, n: int) -> Interval:
    """Return Wilson's interval of a share: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    share, shrink = right / n, 1 + Z * Z / n
    middle = (share + Z * Z / (2 * n)) / shrink
    reach = Z * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / shrink
    low, high = middle - reach, middle + reach
    return Interval(max(0.0, min(low, share)), min(1.0, max(high, share)))  # rounding aside


def gain_interval(gained: int, lost: int, n: int) -> Interval:
    """Return Bonett and Price's interval of a paired difference.

    ``gained`` prompts are right only now, ``lost`` ones were right only before. It is
    p - q ± z √((p + q - (p - q)²) / (n + 2)) with p = (gained + 1) / (n + 2) and
    q = (lost + 1) / (n + 2).
    """
    more, less = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    middle = more - less
    reach = Z * sqrt((more + less - middle * middle) / (n + 2))
    return Interval(max(-1.0, middle - reach), min(1.0, middle + reach))


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided exact p: as many changes, or more, one way among ``gained + lost``."""
    changes, fewer = gained + lost, min(gained, lost)
    term = tail = 1  # the binomial coefficient, and the sum of those so far
    for i in range(fewer):
        term = term * (changes - i) // (i + 1)
        tail += term
    share: float = 2 * tail / (1 << changes)
    return min(1.0, share)
