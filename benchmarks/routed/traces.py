"""Which routed experts each token asks for: drawn by a law, or recorded from a trained model.

A trace is int [tokens, layers, used]; a file of one is ``.npy`` with int16.
"""

from pathlib import Path

import numpy as np

from benchmarks.cache_oracles import Trace, drifting
from benchmarks.routed.shape import RoutedShape

SKEW = 1.0
_SEED = 0


def drawn(shape: RoutedShape, tokens: int, *, every: int = 0) -> Trace:
    """Return requests by Zipf's law; with ``every`` favourites change after so many tokens."""
    return drifting(
        tokens,
        layers=shape.layers,
        experts=shape.experts,
        used=shape.used,
        skew=SKEW,
        every=every,
        seed=_SEED,
    )


def stored(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        ValueError: for a file that holds no trace.
    """
    trace: Trace = np.load(path, allow_pickle=False)
    if trace.dtype != np.int16 or trace.ndim != 3 or not trace.size or trace.min() < 0:
        raise ValueError(f"{path} does not hold int16 [tokens, layers, used], none below 0")
    ordered = np.sort(trace, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError(f"{path}: a token asks twice for an expert of a layer")
    return trace


def shape_of(trace: Trace, *, layers: int) -> RoutedShape:
    """Return the sizes of OLMoE-1B-7B with as many experts as a trace names.

    No more than ``layers`` of its layers are taken.
    """
    _, there, used = trace.shape
    return RoutedShape(layers=min(layers, there), experts=int(trace.max()) + 1, used=used)
