"""A packed base with random weights, made as it lies in memory: nothing is packed or quantised.

It takes as long to run as a trained base of its shape; what it says means nothing.
"""

from typing import Any

import numpy as np

from expertctl.digest import Progress, no_progress
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_base import PackedBase, empty_base, expert_shape
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]

SPREAD = 0.02
"""Standard deviation of weights, about."""

_DRAWN_NUMBERS = 1 << 20
_LEVELS = {Scheme.INT8: 255, Scheme.INT4: 15}
"""How many steps there are, as many below 0 as above; the lowest integer is not one of them."""


def random_base(
    config: ModelConfig, scheme: Scheme, *, seed: int = 0, progress: Progress = no_progress
) -> PackedBase:
    """Return a base; norms are ones, biases zeros. ``progress`` counts its bytes."""
    base, drawn = empty_base(config, scheme), _drawn(scheme, np.random.default_rng(seed))
    for name, place in base.places().items():
        if isinstance(place, PackedMatrix):
            _repeat(drawn, place, progress)
        else:
            place[...] = 0 if name.endswith(".bias") else 1
            progress(place.nbytes)
    return base


def base_bytes(base: PackedBase) -> int:
    """Return the bytes that decoding a token reads once: of routed experts, as many as it uses."""
    routed = base.config.experts
    of_experts = 0
    if routed is not None:
        of_experts = (
            len(routed.layers) * routed.used * expert_shape(base.config, base.scheme).nbytes
        )
    return of_experts + sum(matrix.nbytes for matrix in base_matrices(base))


def base_matrices(base: PackedBase) -> tuple[PackedMatrix, ...]:
    """Return its matrices, in the order in which they are read; the head comes last.

    Those of routed experts are not among them: each token reads others.
    """
    parts = (
        part for layer in base.layers for part in (layer.inputs, layer.output, *layer.mlp.parts)
    )
    return (*(part for part in parts if isinstance(part, PackedMatrix)), base.head)


def drawn_floats(scheme: Scheme, count: int, rng: np.random.Generator) -> Numbers:
    """Return random weights of a scheme that is not one of integers, as bytes."""
    numbers = (rng.standard_normal(count) * SPREAD).astype(np.float32)
    if scheme is Scheme.BFLOAT16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return numbers.astype(scheme.value).view(np.uint8)


def _repeat(drawn: Numbers, matrix: PackedMatrix, progress: Progress) -> None:
    """Fill a matrix with drawn bytes, again and again, at places of its own."""
    for begin in range(0, len(matrix.data), len(drawn)):
        part = matrix.data[begin : begin + len(drawn)]
        part[...] = drawn[: len(part)]
        progress(len(part))
    progress(matrix.scales.nbytes)
    matrix.scales[...] = SPREAD * 12**0.5 / _LEVELS.get(matrix.scheme, 1)


def _drawn(scheme: Scheme, rng: np.random.Generator) -> Numbers:
    if scheme not in _LEVELS:
        return drawn_floats(scheme, _DRAWN_NUMBERS, rng)
    steps: Numbers = rng.integers(1, 1 + _LEVELS[scheme], 2 * _DRAWN_NUMBERS, np.uint8)
    return steps if scheme is Scheme.INT8 else steps[::2] | steps[1::2] << np.uint8(4)
