"""Which routed experts of one layer are resident, in which slot, and which are worth keeping.

A layer has ``capacity`` slots. `LayerSlots.lookup` maps an expert to its slot, and an absent one to
the slot behind the last, which holds the all-zero dummy: never to a slot of another expert.
`LayerSlots` moves no bytes. Its owner first writes an expert into a slot, then assigns it here,
between two passes.

The priority of an expert is ``count * 0.25 ** (age / 128)``, the age in tokens since it was last
chosen. The count is one for each token that chose it, not for each window in which one did: a
window of twenty tokens may hide twenty activations. After ``tokens`` an activation counts ``0.25 **
(tokens / 48)``, so that favourites of an old topic give way. Counts outlive residency: an evicted
expert that is chosen again does not start at one, and one that is chosen once does not evict a
favourite.

The predicted chance of each expert to be chosen by the next token counts too: ``worth = priority +
3 * 35.1 * chance``. An expert that every token chooses with some chance reaches a count of 35.1
times that chance: what is likely next counts three times as much as the past.

`TransitionModel` predicts the next token of a sequence. For each expert ``s`` and each expert ``e``
of a layer it keeps the chance that ``e`` is chosen one token after ``s``, updated after each token
that chose ``s``:

    chance[s, e] += 0.02 * ((1 if e was chosen else 0) - chance[s, e])

So a chance is the share of recent such tokens with ``e`` chosen next; one that was 34 of them ago
counts half. The prediction after a token is the mean of the rows of its experts. This is the
predictor of D. Joseph and D. Grunwald, "Prefetching using Markov predictors" (ISCA 1997), with
chances instead of the last few successors. All chances start at 0. If tokens do not depend on each
other, all it learns is how often each expert is chosen.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from expertctl.engine.memory.budget import AGE_PERIOD, DECAY
from expertctl.errors import UsageError

DECAY_TOKENS = 48
"""Tokens after which an activation counts a quarter."""
PREDICTION_WEIGHT = 3.0 / (1 - DECAY ** (1 / DECAY_TOKENS))
"""How many activations a certain prediction is worth."""
_CHUNK_TOKENS = 1024
"""Tokens counted at once: with more, the decayed first ones would be lost in rounding."""
EMPTY_SLOT = -1
"""The id in a slot that holds no expert."""
Ids = NDArray[np.integer]
Worths = NDArray[np.float64]


class LayerSlots:
    """The slots of one layer; its owner changes them between passes only."""

    def __init__(self, *, experts: int, capacity: int, pinned: Collection[int] = ()) -> None:
        """Start with empty slots; ``pinned`` experts stay once they are resident.

        Raises:
            UsageError: when more experts are pinned than there are slots.
        """
        if not 0 <= capacity <= experts:
            raise ValueError(f"{capacity} slots for {experts} experts")
        self.experts, self.capacity = experts, capacity
        self.pin(pinned)
        self.ids: NDArray[np.int32] = np.full(capacity, EMPTY_SLOT, np.int32)
        self.lookup: NDArray[np.int32] = np.full(experts, capacity, np.int32)
        self.hit_mask: NDArray[np.float32] = np.zeros(experts, np.float32)
        self.resident_set: set[int] = set()
        """The experts of the hit mask; for few lookups a set is faster than numpy."""
        self.counts: NDArray[np.float64] = np.zeros(experts)
        """Activations of each expert, resident or not, decayed as of the last of them."""
        self.last_used: NDArray[np.int64] = np.zeros(experts, np.int64)
        self.chances: Worths = np.zeros(experts)
        """Predicted chance of each expert to be chosen by the next token."""
        self.step = 0
        """Tokens that were counted."""

    @property
    def resident_ids(self) -> list[int]:
        """The resident experts, in the order of their slots."""
        return [int(expert) for expert in self.ids if expert != EMPTY_SLOT]

    @property
    def has_all(self) -> bool:
        """Whether each expert of the layer has a slot."""
        return len(self.resident_set) == self.experts

    @property
    def free_slots(self) -> list[int]:
        """The slots that hold no expert."""
        slots: list[int] = (self.ids == EMPTY_SLOT).nonzero()[0].tolist()
        return slots

    def choose_initial_experts(self, ranked: Iterable[int] = ()) -> list[int]:
        """Return experts for the empty slots: pinned ones, then as ranked, then by id."""
        order = dict.fromkeys([*sorted(self.pinned), *ranked, *range(self.experts)])
        absent = [expert for expert in order if not self.hit_mask[expert]]
        return absent[: len(self.free_slots)]

    def pin(self, pinned: Collection[int]) -> None:
        """Pin these experts and no others: they stay once they are resident.

        Raises:
            UsageError: when more experts are pinned than there are slots.
        """
        if not all(0 <= expert < self.experts for expert in pinned):
            raise ValueError(f"an expert to pin is not in 0 to {self.experts - 1}")
        if len(set(pinned)) > self.capacity:
            raise UsageError(
                f"{len(set(pinned))} routed experts of a layer are pinned, but it has only "
                f"{self.capacity} slots",
                hint="pin fewer experts, or raise --memory-budget",
            )
        self.pinned = frozenset(pinned)

    def record_tokens(self, selected: Ids) -> None:
        """Count the choices of tokens, oldest first; ``selected`` is [tokens, k].

        Ids that name no expert, such as padding, are not counted.
        """
        if len(selected) == 1 and self._are_distinct(selected[0].tolist()):
            self._record_token(selected[0])
            return
        for begin in range(0, len(selected), _CHUNK_TOKENS):
            self._record_chunk(selected[begin : begin + _CHUNK_TOKENS])

    def priorities(self) -> Worths:
        """Return the priority of each expert, resident or not."""
        return compute_priority(self.counts, self.step - self.last_used)

    def worths(self) -> Worths:
        """Return the worth of each expert: its priority, and the prediction for the next token."""
        worth: Worths = self.priorities() + PREDICTION_WEIGHT * self.chances
        return worth

    def rank_evictable(
        self, requested: Collection[int] = (), *, worths: Worths | None = None
    ) -> list[int]:
        """Return the slots whose experts may go, the least valuable first, then the lower slot.

        Experts that are pinned or ``requested`` now stay. ``worths`` are the `worths`, if known.
        """
        stays = np.zeros(self.experts + 1, bool)  # the last is that of EMPTY_SLOT
        stays[[*self.pinned, *requested, EMPTY_SLOT]] = True
        slots = (~stays[self.ids]).nonzero()[0]
        worth = (self.worths() if worths is None else worths)[self.ids[slots]]
        order: list[int] = slots[worth.argsort(kind="stable")].tolist()
        return order

    def assign(self, *, slot: int, expert: int) -> int | None:
        """Record that a slot now holds another expert; return the evicted one, if any.

        An expert that was never chosen counts as if chosen once, now.
        """
        if not 0 <= expert < self.experts:
            raise ValueError(f"expert {expert} is not in 0 to {self.experts - 1}")
        if self.hit_mask[expert]:
            raise ValueError(f"expert {expert} is in slot {self.lookup[expert]} already")
        gone = self.clear(slot=slot)
        self.ids[slot] = expert
        self.lookup[expert], self.hit_mask[expert] = slot, 1
        self.resident_set.add(expert)
        if not self.counts[expert]:
            self.counts[expert], self.last_used[expert] = 1, self.step
        return gone

    def clear(self, *, slot: int) -> int | None:
        """Record that a slot holds no expert any more; return the evicted one, if any."""
        if not 0 <= slot < self.capacity:
            raise ValueError(f"slot {slot} is not in 0 to {self.capacity - 1}")
        gone = int(self.ids[slot])
        if gone == EMPTY_SLOT:
            return None
        if gone in self.pinned:
            raise ValueError(f"expert {gone} is pinned in slot {slot}")
        self.ids[slot] = EMPTY_SLOT
        self.lookup[gone], self.hit_mask[gone] = self.capacity, 0
        self.resident_set.remove(gone)
        return gone

    def check_integrity(self) -> None:
        """Assert that slots, lookup and hit mask agree."""
        residents = self.resident_ids
        assert len(set(residents)) == len(residents) <= self.capacity
        assert self.resident_set == set(residents)
        assert len(residents) + len(self.free_slots) == self.capacity
        where = {int(expert): slot for slot, expert in enumerate(self.ids) if expert != EMPTY_SLOT}
        for expert in range(self.experts):
            assert self.lookup[expert] == where.get(expert, self.capacity)
            assert self.hit_mask[expert] == float(expert in where)
        assert (self.counts >= 0).all()
        assert (self.last_used <= self.step).all()

    def _are_distinct(self, asked: list[int]) -> bool:
        """Tell whether they are different experts of the layer, as those of a token usually are."""
        different = set(asked)
        return len(different) == len(asked) > 0 <= min(asked) <= max(asked) < self.experts

    def _record_token(self, asked: Ids) -> None:
        """Do what `_record_chunk` does for one token with different experts, the usual case."""
        self.step += 1
        kept = self.counts[asked] * _decay(self.step - self.last_used[asked])
        self.counts[asked] = kept + 1
        self.last_used[asked] = self.step

    def _record_chunk(self, selected: Ids) -> None:
        tokens, used = selected.shape
        requested, at = selected.ravel(), np.arange(1, tokens + 1).repeat(used)
        valid = (requested >= 0) & (requested < self.experts)
        if not valid.all():
            requested, at = requested[valid], at[valid]
        uses = np.bincount(requested, _decay(tokens - at), minlength=self.experts)  # as of the end
        there = uses.nonzero()[0]
        before = self.last_used[there]
        self.last_used[requested] = self.step + at  # of equal ids the last counts
        self.step += tokens
        last = self.last_used[there]
        kept = self.counts[there] * _decay(last - before)
        self.counts[there] = kept + uses[there] / _decay(self.step - last)


def compute_priority(counts: NDArray[np.float64], ages: NDArray[np.int64]) -> Worths:
    """Return ``count * 0.25 ** (age / 128)``."""
    worth: Worths = counts * DECAY ** (ages / AGE_PERIOD)
    return worth


def _decay(tokens: NDArray[np.int64] | int) -> NDArray[np.float64] | float:
    """Return what is left of an activation after some tokens."""
    share: NDArray[np.float64] | float = DECAY ** (tokens / DECAY_TOKENS)
    return share


LEARNING_RATE = 0.02
"""The weight of the next token in a chance."""
_CHANCE_DTYPE = np.dtype(np.float32)
MAX_SEQUENCES = 16
"""Up to this many tokens of a pass are of different sequences, or guesses; more are of one."""
MAX_LEARNT_PAIRS = 64
"""How many of the last tokens of a prompt are learnt from."""


def estimate_transition_bytes(*, layers: int, experts: int) -> int:
    """Return the bytes of a `TransitionModel`."""
    return layers * experts * experts * _CHANCE_DTYPE.itemsize


class TransitionModel:
    """Owner of the chances of all layers, float32; one pass at a time reports its choices."""

    def __init__(self, *, layers: int, experts: int) -> None:
        """Start with all chances at 0."""
        self._layers, self._experts = layers, experts
        self._chances = np.zeros((layers * experts, experts), _CHANCE_DTYPE)
        self._previous: NDArray[np.int64] | None = None
        """The choices of the last tokens, [tokens, layers, used] as rows of chances."""

    @property
    def nbytes(self) -> int:
        """Bytes of all chances."""
        return self._chances.nbytes

    def predict(self, layer: int, selected: Ids) -> Worths:
        """Return the chance of each expert to be chosen next, after ``selected`` [tokens, used].

        With several sequences the chances of all are summed.
        """
        last = selected if len(selected) <= MAX_SEQUENCES else selected[-1:]
        rows = self._chances.take(last.ravel() + layer * self._experts, axis=0)
        found: Worths = np.add.reduce(rows, axis=0, dtype=np.float64)
        found /= last.shape[1]
        return found

    def observe_pass(self, asked: Sequence[Ids], tokens: int) -> None:
        """Learn from a pass over ``tokens``; ``asked`` holds the choices [tokens, k] of each layer.

        The last layer may be computed for a prompt's last token only; then nothing is learnt for
        it.
        """
        base = np.arange(self._layers)[:, None] * self._experts
        last = np.array([ids[-1] for ids in asked]) + base  # [layers, used]
        layers = len(asked) - (len(asked[-1]) < tokens)
        shape = layers, tokens, last.shape[1]
        rows = np.array(asked[:layers], np.int64).reshape(shape).swapaxes(0, 1) + base[:layers]
        if tokens <= MAX_SEQUENCES and layers == len(asked):
            self._learn_sequences(self._previous, rows)
            self._previous = rows
            return
        for before, after in pairwise(rows[-MAX_LEARNT_PAIRS - 1 :]):
            self._learn_transition(before, after)
        self._previous = last[None]

    def _learn_sequences(self, before: NDArray[np.int64] | None, after: NDArray[np.int64]) -> None:
        """Learn from one token of each of several sequences, if the pass before had as many."""
        if before is not None and len(before) == len(after):
            for one, next_one in zip(before, after, strict=True):
                self._learn_transition(one, next_one)

    def _learn_transition(self, before: NDArray[np.int64], after: NDArray[np.int64]) -> None:
        rows, used = before.ravel(), before.shape[1]
        found = self._chances[rows] * _CHANCE_DTYPE.type(1 - LEARNING_RATE)
        requested = (after % self._experts).repeat(used, axis=0)  # [layers * used, used]
        found[np.arange(len(rows))[:, None], requested] += _CHANCE_DTYPE.type(LEARNING_RATE)
        self._chances[rows] = found
