"""Hit rates of requests for routed experts and for experts, under several cache policies.

A trace has the experts that each token requests in each layer: int [tokens, layers, used]. Every
layer has ``capacity`` slots. They are empty at first for *LRU* and *Belady*, hold the best set for
the whole trace for *best static*, and the lowest ids for *ours*. *LRU* admits each requested expert
at once. *Belady*, which knows the future, admits an expert only if it is requested again sooner
than the one that it would evict, so no policy has more hits. *LRU by token* counts the hits of a
token before any of its misses evicts an expert. *Ours* has slots only, and the updates that runs
use, at the intervals that runs choose and one token late: the experts of the last token are still
being read.

The second part draws requests for experts by popularity, and computes the share of them that each
policy would serve. Each policy keeps a number of experts of equal size, and admits each requested
one.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.swap_policy import RequestBuffer, UpdatePolicy, plan_updates

Trace = NDArray[np.integer]
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class CacheOutcome:
    """Hits of our slots, [tokens, layers], with the number of swaps and updates."""

    hits: NDArray[np.int64]
    swaps: int
    updates: int


def make_drifting_trace(
    tokens: int, *, layers: int, experts: int, used: int, skew: float, every: int, seed: int
) -> Trace:
    """Return a trace drawn from Zipf's law; each layer's popular experts change at intervals.

    A token requests ``used`` different experts, drawn one after the other. ``every`` is the
    interval in tokens; with 0 the popular experts stay the same.
    """
    rng = np.random.default_rng(seed)
    weights = -skew * np.log(np.arange(1, experts + 1))
    lots = weights + rng.gumbel(size=(tokens, layers, experts))
    ranks = np.argsort(-lots, axis=-1)[..., :used]
    trace = np.empty_like(ranks)
    for begin in range(0, tokens, every or tokens):
        part = slice(begin, begin + (every or tokens))
        for layer in range(layers):
            trace[part, layer] = rng.permutation(experts)[ranks[part, layer]]
    return trace


def best_static(trace: Trace, capacity: int) -> int:
    """Keep the experts of each layer that the whole trace requests most often."""
    hits = 0
    for layer in _split_by_layer(trace):
        hits += int(np.sort(np.bincount(np.ravel(layer)))[::-1][:capacity].sum())
    return hits


def lru(trace: Trace, capacity: int) -> int:
    """Evict the least recently requested expert."""
    return sum(_lru(layer, capacity) for layer in _split_by_layer(trace))


def lru_by_token(trace: Trace, capacity: int) -> int:
    """Evict the least recently requested expert, but only after a token's hits are counted."""
    return sum(_lru_by_token(layer, capacity) for layer in _split_by_layer(trace))


def belady(trace: Trace, capacity: int) -> int:
    """Evict the expert whose next request is furthest in the future, as no real policy can."""
    return sum(_belady(layer, capacity) for layer in _split_by_layer(trace))


def replay_our_policy(trace: Trace, capacity: int, *, experts: int) -> CacheOutcome:
    """Update the slots between tokens, as runs do."""
    tokens, layers, _ = trace.shape
    slots = [LayerSlots(experts=experts, capacity=capacity) for _ in range(layers)]
    for layer in slots:
        for slot, expert in enumerate(layer.choose_initial_experts()):
            layer.assign(slot=slot, expert=expert)
    buffer, policy, hits = RequestBuffer(), UpdatePolicy(), np.zeros((tokens, layers), np.int64)
    swaps = updates = 0
    for number, token in enumerate(trace):
        hits[number] = [
            layer.hit_mask[asked].sum() for layer, asked in zip(slots, token, strict=True)
        ]
        buffer.append(token[:, None])
        policy.count_tokens()
        if policy.is_due():
            update = plan_updates(slots, buffer, layer_budget=policy.layer_budget)
            policy.record_update(update)
            for swap in update.swaps:
                slots[swap.layer].assign(slot=swap.slot, expert=swap.add)
            swaps, updates = swaps + len(update.swaps), updates + 1
    return CacheOutcome(hits, swaps, updates)


def _split_by_layer(trace: Trace) -> list[Tokens]:
    layers: list[Tokens] = trace.swapaxes(0, 1).tolist()
    return layers


def _lru(tokens: Tokens, capacity: int) -> int:
    there: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for asked in tokens:
        for expert in asked:
            hits += expert in there
            there[expert] = None
            there.move_to_end(expert)
            if len(there) > capacity:
                there.popitem(last=False)
    return hits


def _lru_by_token(tokens: Tokens, capacity: int) -> int:
    there: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for asked in tokens:
        found = [expert for expert in asked if expert in there]
        hits += len(found)
        for expert in dict.fromkeys([*found, *asked]):
            there[expert] = None
            there.move_to_end(expert)
        while len(there) > capacity:
            there.popitem(last=False)
    return hits


def _belady(tokens: Tokens, capacity: int) -> int:
    wanted = [expert for asked in tokens for expert in asked]
    there: dict[int, int] = {}
    hits = 0
    for expert, following in zip(wanted, _find_next_uses(wanted), strict=True):
        hits += expert in there
        there[expert] = following
        if len(there) > capacity:
            del there[max(there, key=there.__getitem__)]
    return hits


def _find_next_uses(wanted: list[int]) -> list[int]:
    """Return for each request the time of the next request for the same expert."""
    following, seen = [0] * len(wanted), dict[int, int]()
    for at in reversed(range(len(wanted))):
        following[at] = seen.get(wanted[at], len(wanted))
        seen[wanted[at]] = at
    return following


def make_requests(count: int, *, experts: int, seed: int) -> list[int]:
    """Return the number of the expert of each request, drawn from Zipf's law with exponent 1."""
    weights = 1 / np.arange(1, experts + 1)
    rng = np.random.default_rng(seed)
    return [int(n) for n in rng.choice(experts, size=count, p=weights / weights.sum())]


def make_shifting_requests(count: int, *, experts: int, seed: int, every: int) -> list[int]:
    """Return the same, with popular experts drawn anew after every ``every`` requests."""
    rng = np.random.default_rng(seed)
    ranks = make_requests(count, experts=experts, seed=seed)
    orders = [rng.permutation(experts) for _ in range(-(-count // every))]
    return [int(orders[at // every][rank]) for at, rank in enumerate(ranks)]


def best_static_hit_rate(wanted: Sequence[int], capacity: int) -> float:
    """Keep the experts that are requested most often."""
    return sum(times for _, times in Counter(wanted).most_common(capacity)) / len(wanted)


def lru_hit_rate(wanted: Sequence[int], capacity: int) -> float:
    """Evict the least recently requested expert."""
    there: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number in wanted:
        hits += number in there
        there[number] = None
        there.move_to_end(number)
        if len(there) > capacity:
            there.popitem(last=False)
    return hits / len(wanted)


def belady_hit_rate(wanted: Sequence[int], capacity: int) -> float:
    """Evict the expert whose next request is furthest in the future, as no real policy can."""
    following, seen = [0] * len(wanted), dict[int, int]()
    for at in reversed(range(len(wanted))):
        following[at] = seen.get(wanted[at], len(wanted))
        seen[wanted[at]] = at
    there: dict[int, int] = {}
    hits = 0
    for at, number in enumerate(wanted):
        hits += number in there
        if number not in there and len(there) == capacity:
            del there[max(there, key=there.__getitem__)]
        there[number] = following[at]
    return hits / len(wanted)
