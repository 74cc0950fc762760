"""Requests drawn by popularity, and the share of them that cache policies would serve.

Each policy keeps so many experts of one size, and takes in each requested one.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np


def drawn(count: int, *, experts: int, seed: int) -> list[int]:
    """Return which expert each request wants, by Zipf's law with the exponent 1."""
    weights = 1 / np.arange(1, experts + 1)
    rng = np.random.default_rng(seed)
    return [int(n) for n in rng.choice(experts, size=count, p=weights / weights.sum())]


def shifting(count: int, *, experts: int, seed: int, every: int) -> list[int]:
    """Return the same, with the popular experts drawn anew every so many requests."""
    rng = np.random.default_rng(seed)
    ranks = drawn(count, experts=experts, seed=seed)
    orders = [rng.permutation(experts) for _ in range(-(-count // every))]
    return [int(orders[at // every][rank]) for at, rank in enumerate(ranks)]


def best_static(wanted: Sequence[int], fit: int) -> float:
    """Keep the experts that are wanted most often."""
    return sum(times for _, times in Counter(wanted).most_common(fit)) / len(wanted)


def lru(wanted: Sequence[int], fit: int) -> float:
    """Evict the expert that was wanted longest ago."""
    there: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in wanted:
        hits += number in there
        there[number] = None
        there.move_to_end(number)
        if len(there) > fit:
            there.popitem(last=False)
    return hits / len(wanted)


def belady(wanted: Sequence[int], fit: int) -> float:
    """Evict the expert that is wanted again last, which no real rule can know."""
    following, seen = [0] * len(wanted), dict[int, int]()
    for at in reversed(range(len(wanted))):
        following[at] = seen.get(wanted[at], len(wanted))
        seen[wanted[at]] = at
    there: dict[int, int] = {}
    hits = 0
    for at, number in enumerate(wanted):
        hits += number in there
        if number not in there and len(there) == fit:
            del there[max(there, key=there.__getitem__)]
        there[number] = following[at]
    return hits / len(wanted)
