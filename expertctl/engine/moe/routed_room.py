"""The memory that the routed experts of one pass compute in, known in bytes before it is made.

A *position* is one expert of one token; those of one expert are adjacent. What was chosen stays
until the next pass, layer by layer, so that it can be counted.
"""

from typing import Any

import numpy as np

from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.rows import PreparedRows, room_for_rows, rows_as_they_are
from expertctl.engine.kernels.scheme import FLOATING, Scheme
from expertctl.engine.kernels.sorting import room_for_order
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
_FLOAT_BYTES, _LONG_BYTES = 4, 8


class RoutedRoom:
    """Room for ``tokens`` that are read at a time, each with all its experts."""

    def __init__(self, config: ModelConfig, scheme: Scheme, *, tokens: int) -> None:
        """Make it for a base in a scheme."""
        routed = config.experts
        assert routed is not None, "a base with routed experts"
        positions, layers = tokens * routed.used, len(routed.layers)
        self.logits = aligned((tokens, _filled(routed.count)), np.float32)
        self.selected = aligned((layers, tokens, routed.used), np.int64)
        self.weights = aligned((layers, tokens, routed.used), np.float32)
        self.skipped = aligned((layers, tokens), np.float32)
        """How much of the weights of a token was skipped."""
        self.likely = aligned((layers, tokens, routed.used), np.int64)
        """What a layer will be asked for, as the one before it foresaw; unused for the first."""
        self.likely_weights = aligned((tokens, routed.used), np.float32)
        self.absent = aligned(1, np.int64)
        """1 + the id of an expert that was asked for but not there: a bug of ours."""
        self.order = room_for_order(routed.count, positions)
        self.rows = _rows(scheme, positions, config.hidden_size)
        self.gates = aligned((positions, _filled(2 * routed.intermediate_size)), np.float32)
        self.middle = _rows(scheme, positions, routed.intermediate_size, here=self.gates)
        self.down = aligned((positions, _filled(config.hidden_size)), np.float32)
        self.beside = aligned((tokens, _filled(config.hidden_size)), np.float32)
        """A row for each token, for what is made beside its experts."""
        self.shares = aligned((tokens, LANES), np.float32)


def routed_bytes(config: ModelConfig, scheme: Scheme, *, tokens: int) -> int:
    """Return the bytes of such room; 0 where no expert is routed."""
    routed = config.experts
    if routed is None:
        return 0
    hidden, middle = config.hidden_size, routed.intermediate_size
    floats = _filled(2 * middle) + _filled(hidden)
    position = _FLOAT_BYTES * floats + 2 * _LONG_BYTES
    position += _row_bytes(scheme, hidden) + (
        0 if scheme in FLOATING else _row_bytes(scheme, middle)
    )
    chosen = (_LONG_BYTES + _FLOAT_BYTES) * routed.used + _FLOAT_BYTES
    token = _FLOAT_BYTES * (_filled(routed.count) + _filled(hidden) + LANES)
    token += len(routed.layers) * (chosen + _LONG_BYTES * routed.used)
    token += routed.used * (position + _FLOAT_BYTES)
    return tokens * token + _LONG_BYTES * (3 * routed.count + 3)


def _rows(
    scheme: Scheme, positions: int, columns: int, *, here: Numbers | None = None
) -> PreparedRows:
    """Return room for rows as a scheme wants them; ``here`` where floats may stay."""
    if scheme not in FLOATING:
        return room_for_rows(scheme, positions, columns)
    if here is None:
        here = aligned((positions, _filled(columns)), np.float32)
    return rows_as_they_are(here)


def _row_bytes(scheme: Scheme, columns: int) -> int:
    if scheme in FLOATING:
        return _FLOAT_BYTES * _filled(columns)
    layout = scheme.layout
    return layout.vectors(columns) * layout.columns * layout.row_bytes + 8 * layout.groups(columns)


def _filled(columns: int) -> int:
    return -(-columns // LANES) * LANES
