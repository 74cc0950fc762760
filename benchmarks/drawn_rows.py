"""Rows as the texts of experts have them, drawn instead of encoded: clusters of ten.

How the cosines fall is that of MiniLM on 15,000 real requests of 150 kinds: the centres vary along
few directions (the n-th in proportion to n^-0.8), the texts of one expert along many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.encoded import Encoded
from expertctl.routing.vector_table import Vectors, VectorTable

CLUSTER, DIMENSIONS = 10, 384
ENCODER = Digest.of(b"drawn rows")
PART = 10_000
_MEAN = 0.29
SEED = 0


@dataclass(frozen=True, slots=True)
class DrawnEncoder:
    """The encoder that drawn rows are said to be of."""

    name: str = "drawn"
    dimensions: int = DIMENSIONS
    deep_dimensions: int = DIMENSIONS
    stamp: str = "drawn"

    def digest(self) -> Digest:
        """Return the digest of drawn rows."""
        return ENCODER

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Draw rows that are unrelated to the texts."""
        rng = np.random.default_rng(len(texts))
        return _unit(rng.standard_normal((len(texts), DIMENSIONS), np.float32))

    def encode_deep(self, texts: Sequence[str]) -> Encoded:
        """Draw rows that are as deep as they are."""
        return Encoded.flat(self.encode(texts))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Leave cosines as they are."""
        return cosines


def drawn_table(rows: int) -> VectorTable:
    """Draw a table of experts with ten rows each."""
    experts = rows // CLUSTER
    bounds = [*range(0, experts, PART), experts]
    parts = [around(centres(start, end), CLUSTER) for start, end in pairwise(bounds)]
    return VectorTable(
        encoder=ENCODER,
        stamp="drawn",
        keys=np.random.default_rng(SEED).integers(0, 256, (experts, 32)).astype(np.uint8),
        counts=np.full(experts, CLUSTER, np.int64),
        alive=np.ones(experts, np.bool_),
        rows=np.concatenate(parts),
    )


def drawn_prompts(count: int, *, rows: int) -> Vectors:
    """Draw prompts for some of the experts of a table of that size."""
    last = min(PART, rows // CLUSTER)
    experts = np.random.default_rng(SEED).integers(0, last, count)
    return around(centres(0, last)[experts], 1, seed=1)


def centres(start: int, end: int, *, view: int = 0) -> Vectors:
    """Draw what some experts are about, in one of several views of their texts."""
    mean = np.zeros(DIMENSIONS, np.float32)
    mean[0] = _MEAN
    rng = np.random.default_rng((SEED, start, view) if view else (SEED, start))
    drawn = rng.standard_normal((end - start, DIMENSIONS), np.float32)
    return mean + drawn * _deviations(_order() ** -0.79 * np.exp(-_order() / 150), total=0.43)


def around(middles: Vectors, count: int, *, seed: int = 0) -> Vectors:
    """Draw so many unit rows around each of these."""
    rng = np.random.default_rng((SEED, len(middles), seed))
    drawn = rng.standard_normal((len(middles), count, DIMENSIONS), np.float32)
    texts = middles[:, None] + drawn * _deviations(np.exp(-_order() / 110), total=0.48)
    return _unit(texts.reshape(-1, DIMENSIONS))


def _order() -> Vectors:
    return np.arange(1, DIMENSIONS + 1, dtype=np.float32)


def _deviations(variances: Vectors, *, total: float) -> Vectors:
    """Return the standard deviation along each direction, of this total variance."""
    deviations: Vectors = np.sqrt(variances * (total / variances.sum())).astype(np.float32)
    return deviations


def _unit(rows: Vectors) -> Vectors:
    scaled: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled
