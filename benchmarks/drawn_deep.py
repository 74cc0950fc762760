"""Deep rows to go with drawn rows: three views of each text, of which the first is its row.

An expert has a description, for which the index has no row here, and ten examples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.drawn_rows import (
    CLUSTER,
    DIMENSIONS,
    ENCODER,
    PART,
    SEED,
    DrawnEncoder,
    around,
    centres,
    drawn_prompts,
)
from expertctl.routing.encoded import Encoded
from expertctl.routing.vector_files import VectorFiles
from expertctl.routing.vector_table import Vectors, VectorTable

VIEWS = 3
DEEP = VIEWS * DIMENSIONS
_TEXTS = 1 + CLUSTER
_OTHERS = range(1, VIEWS)
_OPEN = 5


@dataclass(frozen=True, slots=True)
class DeepEncoder(DrawnEncoder):
    """The encoder that these rows are said to be of; it counts as the one whose spectrum it is."""

    name: str = "minilm"
    deep_dimensions: int = DEEP


def write_deep(folder: Path, table: VectorTable) -> None:
    """Write deep rows for the experts of a drawn table, a part of them at a time in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = (len(table) * _TEXTS, DEEP)
    scratch = folder / "scratch"
    rows = np.memmap(scratch, np.float32, mode="w+", shape=shape)
    at = 0
    for part in _parts(table):
        rows[at : at + len(part)] = part
        at += len(part)
    deep = VectorTable(
        encoder=ENCODER,
        stamp=table.stamp,
        keys=table.keys,
        counts=np.full(len(table), _TEXTS, np.int64),
        alive=table.alive,
        rows=rows,
    )
    VectorFiles(folder, dimensions=DEEP).replace(deep)
    del rows, deep
    scratch.unlink()


def deep_prompts(count: int, *, rows: int) -> list[Encoded]:
    """Draw prompts for some of the experts of a table of that size, as an encoder gives them.

    One prompt of five lies half way to another: that makes the right expert as uncertain as it is
    for real ones.
    """
    last = min(PART, rows // CLUSTER)
    experts = np.random.default_rng(SEED).integers(0, last, count)  # those of `drawn_prompts`
    others = [around(centres(0, last, view=view)[experts], 1, seed=10 + view) for view in _OTHERS]
    views = [_blended(each) for each in (drawn_prompts(count, rows=rows), *others)]
    deep = _joined(views)
    return [Encoded(views[0][n : n + 1], deep[n : n + 1]) for n in range(count)]


def _blended(rows: Vectors) -> Vectors:
    blended = rows.copy()
    blended[:-1:_OPEN] += rows[1::_OPEN]
    unit: Vectors = blended / np.linalg.norm(blended, axis=1, keepdims=True)
    return unit


def _parts(table: VectorTable) -> Iterator[Vectors]:
    bounds = [*range(0, len(table), PART), len(table)]
    for start, end in pairwise(bounds):
        described = around(centres(start, end), 1, seed=10)
        examples = table.rows[start * CLUSTER : end * CLUSTER].reshape(-1, CLUSTER, DIMENSIONS)
        first = np.concatenate([described[:, None], examples], axis=1).reshape(-1, DIMENSIONS)
        others = (around(centres(start, end, view=v), _TEXTS, seed=20 + v) for v in _OTHERS)
        yield _joined([first, *others])


def _joined(views: list[Vectors]) -> Vectors:
    joined: Vectors = np.concatenate(views, axis=1) / np.float32(VIEWS**0.5)
    return joined
