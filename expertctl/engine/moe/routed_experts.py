"""The routed experts of a base as a decoder sees them, and what one pass computes with.

`RoutedExperts` is the owner of the experts. `RoutingChoices` holds the choices of the tokens of one
pass, layer by layer; they stay until the next pass, so that they can be counted. `RoutedWorkspace`
is the memory in which the CPU backend computes a pass; its bytes are known before it is allocated.
A *position* is one expert of one token; those of one expert are adjacent.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from expertctl.engine.kernels.memory import aligned_zeros
from expertctl.engine.kernels.moe_routing import allocate_permutation
from expertctl.engine.kernels.packed_format import FLOAT_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.kernels.quantisation import (
    PreparedActivations,
    allocate_activations,
    wrap_float_activations,
)
from expertctl.engine.kernels.simd import LANES
from expertctl.engine.moe.counters import Phase
from expertctl.package.model_config import ModelConfig

Array = np.ndarray[Any, Any]
NO_EXPERT = -1
"""Id where a token chose no expert; kernels write it where one is skipped."""


class RoutingChoices(Protocol):
    """The choices of a pass; layers are routed ones, counted from 0."""

    selected: Array
    """The experts of each token, int64 [layers, tokens, used]; `NO_EXPERT` if it chose none."""
    weights: Array
    """Their weights, float32 [layers, tokens, used]."""
    skipped: Array
    """The weight of a token that was skipped, float32 [layers, tokens]."""
    likely: Array
    """Choices of a layer as predicted by the one before it; unused for the first."""


def mask_last_layer(choices: RoutingChoices, first: int, tokens: int) -> None:
    """Remove the choices of tokens from ``first`` up to ``tokens`` in the last layer."""
    choices.selected[-1, first:tokens] = NO_EXPERT
    choices.weights[-1, first:tokens] = 0
    choices.skipped[-1, first:tokens] = 0


class HostRoutingChoices:
    """Choices that were made on a device, in host memory."""

    def __init__(self, *, layers: int, tokens: int, used: int) -> None:
        """Allocate for ``tokens`` tokens."""
        self.selected = np.zeros((layers, tokens, used), np.int64)
        self.weights = np.zeros((layers, tokens, used), np.float32)
        self.skipped = np.zeros((layers, tokens), np.float32)
        self.likely = np.zeros((layers, tokens, used), np.int64)
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class MissPolicy:
    """What happens when an expert is missing: it is read, or skipped within a cap.

    ``cap`` is the largest share of a token's weight that may be skipped. With ``prefetches``,
    predicted experts of the next layer are read early; how fast that is decides what is skipped.
    """

    skips: bool = False
    cap: float = 1.0
    prefetches: bool = True


EXACT_POLICY = MissPolicy()


_FLOAT_BYTES, _LONG_BYTES = 4, 8


class RoutedWorkspace:
    """Memory for passes of up to ``tokens`` tokens, each with all its experts."""

    def __init__(self, config: ModelConfig, scheme: Scheme, *, tokens: int) -> None:
        """Allocate it for a base in a scheme."""
        routed = config.experts
        assert routed is not None, "a base with routed experts"
        positions, layers = tokens * routed.used, len(routed.layers)
        self.logits = aligned_zeros((tokens, _pad_columns(routed.count)), np.float32)
        self.selected = aligned_zeros((layers, tokens, routed.used), np.int64)
        self.weights = aligned_zeros((layers, tokens, routed.used), np.float32)
        self.skipped = aligned_zeros((layers, tokens), np.float32)
        """The weight of a token that was skipped."""
        self.likely = aligned_zeros((layers, tokens, routed.used), np.int64)
        """Choices of a layer as predicted by the one before it; unused for the first."""
        self.likely_weights = aligned_zeros((tokens, routed.used), np.float32)
        self.absent = aligned_zeros(1, np.int64)
        """1 + the id of an expert that was chosen but not in memory: a bug of ours."""
        self.order = allocate_permutation(routed.count, positions)
        self.rows = _allocate_rows(scheme, positions, config.hidden_size)
        self.gates = aligned_zeros(
            (positions, _pad_columns(2 * routed.intermediate_size)), np.float32
        )
        self.middle = _allocate_rows(scheme, positions, routed.intermediate_size, here=self.gates)
        self.down = aligned_zeros((positions, _pad_columns(config.hidden_size)), np.float32)
        self.scratch = aligned_zeros((tokens, _pad_columns(config.hidden_size)), np.float32)
        """A row for each token, for results other than those of its experts."""
        self.shares = aligned_zeros((tokens, LANES), np.float32)


def estimate_workspace_bytes(config: ModelConfig, scheme: Scheme, *, tokens: int) -> int:
    """Return the bytes of a `RoutedWorkspace`; 0 without routed experts."""
    routed = config.experts
    if routed is None:
        return 0
    hidden, middle = config.hidden_size, routed.intermediate_size
    floats = _pad_columns(2 * middle) + _pad_columns(hidden)
    position = _FLOAT_BYTES * floats + 2 * _LONG_BYTES
    position += _row_bytes(scheme, hidden) + (
        0 if scheme in FLOAT_SCHEMES else _row_bytes(scheme, middle)
    )
    chosen = (_LONG_BYTES + _FLOAT_BYTES) * routed.used + _FLOAT_BYTES
    token = _FLOAT_BYTES * (_pad_columns(routed.count) + _pad_columns(hidden) + LANES)
    token += len(routed.layers) * (chosen + _LONG_BYTES * routed.used)
    token += routed.used * (position + _FLOAT_BYTES)
    return tokens * token + _LONG_BYTES * (3 * routed.count + 3)


def _allocate_rows(
    scheme: Scheme, positions: int, columns: int, *, here: Array | None = None
) -> PreparedActivations:
    """Allocate rows in the form of a scheme; floats may stay in ``here``."""
    if scheme not in FLOAT_SCHEMES:
        return allocate_activations(scheme, positions, columns)
    if here is None:
        here = aligned_zeros((positions, _pad_columns(columns)), np.float32)
    return wrap_float_activations(here)


def _row_bytes(scheme: Scheme, columns: int) -> int:
    if scheme in FLOAT_SCHEMES:
        return _FLOAT_BYTES * _pad_columns(columns)
    layout = scheme.layout
    return layout.count_vectors(
        columns
    ) * layout.columns * layout.row_bytes + 8 * layout.count_groups(columns)


def _pad_columns(columns: int) -> int:
    return -(-columns // LANES) * LANES


class RoutedExperts(Protocol):
    """The owner of the experts of all layers; one pass at a time uses it.

    Routed layers are counted from 0, whatever their numbers in the base. Programs read the tables
    at each run, so their addresses never change.
    """

    @property
    def shape(self) -> ExpertShape:
        """The contents of the block of an expert."""

    @property
    def is_whole(self) -> bool:
        """Whether no expert is ever missing."""

    @property
    def skips(self) -> bool:
        """Whether missing experts may be skipped."""

    def places(self, layer: int) -> Array:
        """Return the addresses of a layer's experts, int64 [experts]; 0 if missing."""

    def hits(self, layer: int) -> Array:
        """Return float32 [experts], 1 for resident experts and 0 for missing ones."""

    def request(
        self, layer: int, choices: RoutingChoices, tokens: int, *, predicts_next: bool = True
    ) -> bool:
        """Request the choices of tokens in a layer; return whether to wait for experts.

        Meanwhile those that have an address may be computed. ``predicts_next``: the choices have a
        prediction for the next layer. The last layer may be requested for fewer tokens than others.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """

    def wait_for_some(self) -> bool:
        """Wait for some of the requested experts; return whether others are still missing.

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """

    def end_pass(self, choices: RoutingChoices, tokens: int, *, phase: Phase) -> None:
        """Learn from the choices of all layers of a pass that ended."""
