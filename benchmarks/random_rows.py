"""Rows as the texts of experts have them, drawn instead of encoded: clusters of ten.

How the cosines fall is that of MiniLM on 15,000 real requests of 150 kinds: the centres vary along
few directions (the n-th in proportion to n^-0.8), the texts of one expert along many.

Deep rows to go with drawn rows: three views of each text, of which the first is its row.

An expert has a description, for which the index has no row here, and ten examples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from expertctl.reference import Digest
from expertctl.routing.vector_files import VectorFiles
from expertctl.routing.vector_table import EncodedTexts, Vectors, VectorTable

CLUSTER, DIMENSIONS = 10, 384
ENCODER_DIGEST = Digest.compute(b"drawn rows")
BATCH_ROWS = 10_000
_MEAN_COSINE = 0.29
SEED = 0


@dataclass(frozen=True, slots=True)
class RandomEncoder:
    """The encoder that drawn rows are said to be of."""

    name: str = "drawn"
    dimensions: int = DIMENSIONS
    rerank_dimensions: int = DIMENSIONS
    stamp: str = "drawn"

    def digest(self) -> Digest:
        """Return the digest of drawn rows."""
        return ENCODER_DIGEST

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Draw rows that are unrelated to the texts."""
        rng = np.random.default_rng(len(texts))
        return _normalise(rng.standard_normal((len(texts), DIMENSIONS), np.float32))

    def encode_for_rerank(self, texts: Sequence[str]) -> EncodedTexts:
        """Draw rows that are as deep as they are."""
        return EncodedTexts.from_rows(self.encode(texts))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Leave cosines as they are."""
        return cosines


def make_random_table(rows: int) -> VectorTable:
    """Draw a table of experts with ten rows each."""
    experts = rows // CLUSTER
    bounds = [*range(0, experts, BATCH_ROWS), experts]
    parts = [make_rows_around(make_centres(start, end), CLUSTER) for start, end in pairwise(bounds)]
    return VectorTable(
        encoder=ENCODER_DIGEST,
        stamp="drawn",
        keys=np.random.default_rng(SEED).integers(0, 256, (experts, 32)).astype(np.uint8),
        counts=np.full(experts, CLUSTER, np.int64),
        alive=np.ones(experts, np.bool_),
        rows=np.concatenate(parts),
    )


def make_random_prompts(count: int, *, rows: int) -> Vectors:
    """Draw prompts for some of the experts of a table of that size."""
    last = min(BATCH_ROWS, rows // CLUSTER)
    experts = np.random.default_rng(SEED).integers(0, last, count)
    return make_rows_around(make_centres(0, last)[experts], 1, seed=1)


def make_centres(start: int, end: int, *, view: int = 0) -> Vectors:
    """Draw what some experts are about, in one of several views of their texts."""
    mean = np.zeros(DIMENSIONS, np.float32)
    mean[0] = _MEAN_COSINE
    rng = np.random.default_rng((SEED, start, view) if view else (SEED, start))
    drawn = rng.standard_normal((end - start, DIMENSIONS), np.float32)
    return mean + drawn * _compute_deviations(
        _make_variances() ** -0.79 * np.exp(-_make_variances() / 150), total=0.43
    )


def make_rows_around(middles: Vectors, count: int, *, seed: int = 0) -> Vectors:
    """Draw so many unit rows around each of these."""
    rng = np.random.default_rng((SEED, len(middles), seed))
    drawn = rng.standard_normal((len(middles), count, DIMENSIONS), np.float32)
    texts = middles[:, None] + drawn * _compute_deviations(
        np.exp(-_make_variances() / 110), total=0.48
    )
    return _normalise(texts.reshape(-1, DIMENSIONS))


def _make_variances() -> Vectors:
    return np.arange(1, DIMENSIONS + 1, dtype=np.float32)


def _compute_deviations(variances: Vectors, *, total: float) -> Vectors:
    """Return the standard deviation along each direction, of this total variance."""
    deviations: Vectors = np.sqrt(variances * (total / variances.sum())).astype(np.float32)
    return deviations


def _normalise(rows: Vectors) -> Vectors:
    scaled: Vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled


VIEWS = 3
DEEP = VIEWS * DIMENSIONS
_TEXTS = 1 + CLUSTER
_OTHERS = range(1, VIEWS)
_OPEN_EXPERTS = 5


@dataclass(frozen=True, slots=True)
class RandomDeepEncoder(RandomEncoder):
    """The encoder that these rows are said to be of; it counts as the one whose spectrum it is."""

    name: str = "minilm"
    rerank_dimensions: int = DEEP


def write_random_deep_rows(folder: Path, table: VectorTable) -> None:
    """Write deep rows for the experts of a drawn table, a part of them at a time in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (len(table) * _TEXTS, DEEP)
    scratch = folder / "scratch"
    rows = np.memmap(scratch, np.float32, mode="w+", shape=shape)
    at = 0
    for part in _iterate_parts(table):
        rows[at : at + len(part)] = part
        at += len(part)
    deep = VectorTable(
        encoder=ENCODER_DIGEST,
        stamp=table.stamp,
        keys=table.keys,
        counts=np.full(len(table), _TEXTS, np.int64),
        alive=table.alive,
        rows=rows,
    )
    VectorFiles(folder, dimensions=DEEP).replace(deep)
    del rows, deep
    scratch.unlink()


def make_random_deep_prompts(count: int, *, rows: int) -> list[EncodedTexts]:
    """Draw prompts for some of the experts of a table of that size, as an encoder gives them.

    One prompt of five lies half way to another: that makes the right expert as uncertain as it is
    for real ones.
    """
    last = min(BATCH_ROWS, rows // CLUSTER)
    experts = np.random.default_rng(SEED).integers(0, last, count)  # those of `make_random_prompts`
    others = [
        make_rows_around(make_centres(0, last, view=view)[experts], 1, seed=10 + view)
        for view in _OTHERS
    ]
    views = [_blend_rows(each) for each in (make_random_prompts(count, rows=rows), *others)]
    deep = _join_views(views)
    return [EncodedTexts(views[0][n : n + 1], deep[n : n + 1]) for n in range(count)]


def _blend_rows(rows: Vectors) -> Vectors:
    blended = rows.copy()
    blended[:-1:_OPEN_EXPERTS] += rows[1::_OPEN_EXPERTS]
    unit: Vectors = blended / np.linalg.norm(blended, axis=1, keepdims=True)
    return unit


def _iterate_parts(table: VectorTable) -> Iterator[Vectors]:
    bounds = [*range(0, len(table), BATCH_ROWS), len(table)]
    for start, end in pairwise(bounds):
        described = make_rows_around(make_centres(start, end), 1, seed=10)
        examples = table.rows[start * CLUSTER : end * CLUSTER].reshape(-1, CLUSTER, DIMENSIONS)
        first = np.concatenate([described[:, None], examples], axis=1).reshape(-1, DIMENSIONS)
        others = (
            make_rows_around(make_centres(start, end, view=v), _TEXTS, seed=20 + v) for v in _OTHERS
        )
        yield _join_views([first, *others])


def _join_views(views: list[Vectors]) -> Vectors:
    joined: Vectors = np.concatenate(views, axis=1) / np.float32(VIEWS**0.5)
    return joined
