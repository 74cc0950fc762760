"""The memory that a decoder's programs compute in, made before them and known in bytes.

One room is enough for prompts and for steps, since one call runs at a time.
"""

from typing import Any

import numpy as np

from expertctl.engine.kernels.batch import BatchTable, table_bytes
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.rows import PreparedRows, room_for_rows
from expertctl.engine.kernels.scheme import FLOATING, Scheme
from expertctl.engine.moe.choices import end_asking
from expertctl.engine.moe.routed_room import RoutedRoom, routed_bytes
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
_FLOAT_BYTES, _LONG_BYTES = 4, 8


class DecoderRoom:
    """Room for ``tokens`` that are read at a time and ``rows`` that are scored at a time."""

    def __init__(self, config: ModelConfig, scheme: Scheme, *, tokens: int, rows: int) -> None:
        """Make it for a base in a scheme; what plans need is added when they come."""
        self.size, self._config, self._scheme = (tokens, rows), config, scheme
        self.tokens, self.positions, self.tables = (aligned(tokens, np.int64) for _ in range(3))
        widths = _widths(config)
        self.rotations = aligned((tokens, 2, config.head_dim), np.float32)
        self.hidden = aligned((tokens, widths["hidden"]), np.float32)
        self.normed = aligned((tokens, widths["normed"]), np.float32)
        self.heads = aligned((tokens, widths["heads"]), np.float32)
        self.attended = aligned((tokens, widths["attended"]), np.float32)
        self.gates = aligned((tokens, widths["gates"]), np.float32)
        self.scaled = aligned((tokens, widths["scaled"]), np.float32)
        self.settled = aligned((tokens, widths["settled"]), np.float32)
        self.logits = aligned((rows, filled(config.vocab_size)), np.float32)
        routed = config.experts is not None
        self.routed = RoutedRoom(config, scheme, tokens=tokens) if routed else None
        self._prepared: dict[tuple[Scheme, int], PreparedRows] = {}
        self._batches: dict[Scheme | None, BatchTable] = {}
        self._routed_batches: dict[Scheme | None, BatchTable] = {}
        for columns in _columns(config):
            self.prepared(scheme, columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, with what plans needed so far."""
        tokens, rows = self.size
        prepared = [key for key in self._prepared if key[0] is not self._scheme]
        of_plans = sum(_prepared_bytes(each, columns) * tokens for each, columns in prepared)
        batches = (*self._batches.values(), *self._routed_batches.values())
        tables = sum(batch.nbytes for batch in batches)
        return room_bytes(self._config, self._scheme, tokens=tokens, rows=rows) + of_plans + tables

    def begin_pass(self) -> None:
        """Forget what went wrong in the pass before."""
        if self.routed is not None:
            self.routed.absent[0] = 0

    def keep_row(self, row: int, *, of: int) -> None:
        """Let one of ``of`` rows go on, as the first; the keys and values of all are written.

        The others ask for no expert in the last layer, where that is a routed one.
        """
        for each in (self.hidden, self.heads, self.positions, self.tables):
            each[0] = each[row]
        if self.routed is not None and self._config.is_routed(self._config.layers - 1):
            end_asking(self.routed, 1, of)

    def prepared(self, scheme: Scheme, columns: int) -> PreparedRows | None:
        """Return room for rows as a scheme wants them; None where it takes them as they are."""
        if scheme in FLOATING:
            return None
        key = (scheme, columns)
        if key not in self._prepared:
            self._prepared[key] = room_for_rows(scheme, self.size[0], columns)
        return self._prepared[key]

    def batch(self, scheme: Scheme | None) -> BatchTable:
        """Return the table of plans in one scheme; None: of all plans, for their vectors."""
        if scheme not in self._batches:
            self._batches[scheme] = BatchTable(scheme or Scheme.FLOAT32, rows=self.size[0])
        return self._batches[scheme]

    def routed_batch(self, scheme: Scheme | None) -> BatchTable:
        """Return `batch` for plans that change routed experts: no columns lie between A and B."""
        if scheme not in self._routed_batches:
            self._routed_batches[scheme] = BatchTable(Scheme.FLOAT32, rows=self.size[0])
        return self._routed_batches[scheme]


def room_bytes(config: ModelConfig, scheme: Scheme, *, tokens: int, rows: int) -> int:
    """Return the bytes of a room without plans."""
    widths = sum(_widths(config).values()) + 2 * config.head_dim
    prepared = sum(_prepared_bytes(scheme, columns) for columns in _columns(config))
    each = 3 * _LONG_BYTES + _FLOAT_BYTES * widths + prepared
    routed = routed_bytes(config, scheme, tokens=tokens)
    return tokens * each + routed + rows * _FLOAT_BYTES * filled(config.vocab_size)


def plan_bytes(
    config: ModelConfig, scheme: Scheme, adapters: Scheme, *, tokens: int, width: int
) -> int:
    """Return the bytes that the A and B of plans of one scheme add, so wide at most."""
    each = 0 if adapters is scheme else sum(_prepared_bytes(adapters, n) for n in _columns(config))
    prepared = each * tokens
    return prepared + table_bytes(adapters, rows=tokens, width=width)


def factor_bytes(config: ModelConfig, *, tokens: int, schemes: int) -> int:
    """Return the bytes that factors of plans add to a room, and plans that change routed experts.

    The latter are in so many ``schemes``.
    """
    routed = 0 if config.experts is None else schemes + 1
    return (1 + routed) * table_bytes(Scheme.FLOAT32, rows=tokens, width=0)


def filled(rows: int) -> int:
    """Return a number of rows filled to whole blocks."""
    return -(-rows // LANES) * LANES


def _widths(config: ModelConfig) -> dict[str, int]:
    """Return how many float32 the buffers have for each token."""
    return {
        "hidden": filled(config.hidden_size),
        "normed": filled(config.hidden_size),
        "heads": filled((config.heads + 2 * config.kv_heads) * config.head_dim),
        "attended": filled(config.heads * config.head_dim),
        "gates": filled(2 * max(_middles(config), default=0)),
        "scaled": max(_columns(config)),
        "settled": filled(config.hidden_size),
    }


def _columns(config: ModelConfig) -> frozenset[int]:
    """Return how many columns multiplied rows may have."""
    attended = config.heads * config.head_dim
    return frozenset({config.hidden_size, attended, *_middles(config)})


def _middles(config: ModelConfig) -> set[int]:
    """Return how wide the MLPs are that every token passes, if there are any."""
    routed = config.experts
    if routed is None:
        return {config.intermediate_size}
    dense = {config.intermediate_size} if len(routed.layers) < config.layers else set()
    return dense | ({routed.shared_size} if routed.shared_size else set())


def _prepared_bytes(scheme: Scheme, columns: int) -> int:
    if scheme in FLOATING:
        return 0
    layout = scheme.layout
    return layout.vectors(columns) * layout.columns * layout.row_bytes + 8 * layout.groups(columns)
