"""The routed experts of a base that is whole in memory: where they are, and what is asked for.

No expert is ever missing. What passes ask for is counted all the same: a run in less memory begins
with it. It is kept until it is worth counting, as in `pass_log`. How long a layer took is unknown,
because all layers are one program.
"""

import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.moe.choices import Choices
from expertctl.engine.moe.counters import Counters, requested_by_layer
from expertctl.engine.moe.exchanges import Scores
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.report import Activity, Residence, RoutedReport
from expertctl.engine.packed_base import PackedBase, expert_shape

Numbers = np.ndarray[Any, Any]
AT_ONCE = 64
"""Passes that are counted together: only what they asked for is kept of them."""
TOKENS_AT_ONCE = 512
"""Passes are also counted once they have read so many tokens: what is kept must not grow."""


class WholeExperts:
    """All experts are in memory and stay there. One thread asks; any thread reads the counts."""

    is_whole, skips = True, False
    slots: tuple[LayerSlots, ...] = ()
    scores: Sequence[Scores] = ()
    exchange_rate = 0.0

    def __init__(
        self,
        shape: ExpertShape,
        blocks: Mapping[tuple[int, int], Numbers],
        numbers: Sequence[int],
    ) -> None:
        """Take the block of each expert, by layer and number, and keep it alive.

        ``numbers`` are those of routed layers in the base.
        """
        self.shape = shape
        by_layer: dict[int, list[int]] = {}
        for (layer, _), block in sorted(blocks.items(), key=lambda item: item[0]):
            by_layer.setdefault(layer, []).append(block.ctypes.data)
        self._kept, self._places = blocks, np.array(list(by_layer.values()), np.int64)
        self._hits = np.ones(self._places.shape, np.float32)
        self._counters = Counters(numbers, experts=self._places.shape[1])
        self._over: list[Numbers] = []
        """What passes asked for that is not counted yet, [layers, tokens, used] each."""
        self._tokens = 0
        self._lock = threading.Lock()

    @property
    def counters(self) -> Counters:
        """What its layers were asked for until now, up to date."""
        self._flush()
        return self._counters

    def report(self) -> RoutedReport:
        """Return what was asked for until now."""
        layers, experts = self._places.shape
        residence = Residence(
            layers=layers, experts=experts, slots=experts, blocks=layers * experts
        )
        activity = Activity(requests=self.counters.in_all().summary.requests)
        return RoutedReport(residence, activity)

    def places(self, layer: int) -> Numbers:
        """Return the addresses of a layer's experts, int64 [experts]."""
        row: Numbers = self._places[layer]
        return row

    def hits(self, layer: int) -> Numbers:
        """Return ones, float32 [experts]."""
        row: Numbers = self._hits[layer]
        return row

    def ask(self, layer: int, room: Choices, tokens: int, *, foresees: bool = True) -> bool:
        """Return False: all are there."""
        return False

    def wait_for_some(self) -> bool:
        """Return False: all are there."""
        return False

    def passed(self, room: Choices, tokens: int, *, phase: Phase) -> None:
        """Note what was chosen in all layers of a pass that is over."""
        with self._lock:
            self._over.append(room.selected[:, :tokens].copy())
            self._tokens += tokens
        if len(self._over) >= AT_ONCE or self._tokens >= TOKENS_AT_ONCE:
            self._flush()

    def guide(self, scores: Sequence[Scores], *, rate: float) -> None:
        """Do nothing: no expert has to go for another."""

    def take_notes(self) -> tuple[str, ...]:
        """Return nothing: no expert is to come."""
        return ()

    def _flush(self) -> None:
        with self._lock:
            over, self._over, self._tokens = self._over, [], 0
            for _, alike in groupby(over, key=lambda asked: asked.shape):
                self._count(np.stack(list(alike)))

    def _count(self, asked: Numbers) -> None:
        """Count passes that read the same number of tokens, [passes, layers, tokens, used]."""
        passes, layers, tokens, used = asked.shape
        experts = self._places.shape[1]
        if tokens == 1:  # which asks for each expert once
            ids = asked.transpose(1, 0, 2, 3).reshape(layers, passes * used)
            chosen = requested_by_layer(ids, experts)
            different = chosen.sum(-1)
        else:
            each = requested_by_layer(asked.reshape(passes * layers, tokens * used), experts)
            by_pass = each.reshape(passes, layers, experts)
            chosen, different = by_pass.sum(0), np.count_nonzero(by_pass, axis=-1).sum(0)
        self._counters.count_hits(chosen, calls=passes, requests=different)


def whole_experts(base: PackedBase) -> WholeExperts | None:
    """Return the experts of a base that holds all of them, if it has any."""
    routed = base.config.experts
    if routed is None:
        return None
    return WholeExperts(expert_shape(base.config, base.scheme), base.experts, routed.layers)
