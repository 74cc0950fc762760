"""`KVArena`: keys and values of several texts at addresses that never change, for captured steps.

Layout ``[layer, row, kv_head, capacity + 1, head_dim]``: a text is a row, and the rows of a batch
are the first ones, so nothing is gathered. Where a row of a batch has no text, its last position is
written. A row is cleared for each text: attention over a length bucket multiplies by zero what no
token has written, which makes zero of finite numbers only, and a text may leave NaN.
"""

import torch

from expertctl.engine.kv_cache import KVCache
from expertctl.engine.kv_room import KVRoom
from expertctl.package.model_config import ModelConfig

SPARE = 1
"""Positions of a row beyond its capacity."""


class KVArena:
    """Room for ``rows`` texts of ``capacity`` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the memory, once."""
        shape = (config.layers, rows, config.kv_heads, capacity + SPARE, config.head_dim)
        self.rows, self.capacity = rows, capacity
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, filled or not."""
        return self.keys.nbytes + self.values.nbytes

    def row(self, number: int) -> "ArenaRow":
        """Return the room of one text, cleared; each has one owner."""
        return ArenaRow(self, number)


class ArenaRow(KVCache):
    """The room of one text in an arena."""

    def __init__(self, arena: KVArena, number: int) -> None:
        """Begin without a token, in memory that is there; clear it."""
        KVRoom.__init__(self, arena.capacity)
        self.arena, self.number = arena, number
        self._keys = arena.keys[:, number]  # [layer, kv_head, capacity + 1, head_dim]
        self._values = arena.values[:, number]
        self._keys.zero_()
        self._values.zero_()


def arena_bytes(config: ModelConfig, *, capacity: int, dtype: torch.dtype, rows: int = 1) -> int:
    """Return what an arena takes."""
    return rows * config.kv_bytes(capacity + SPARE, itemsize=dtype.itemsize)
