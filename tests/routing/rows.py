"""Tables of rows in clusters, as the texts of experts are."""

from collections.abc import Mapping

import numpy as np

from expertctl.digest import Digest
from expertctl.routing.vector_table import Vectors, VectorTable

TEXTS, DIMENSIONS = 8, 16


def table_of(entries: Mapping[Digest, Vectors], *, encoder: bytes = b"encoder") -> VectorTable:
    """A table in memory with these entries."""
    empty = VectorTable.empty(encoder=Digest.of(encoder), stamp="s", dimensions=DIMENSIONS)
    return empty.with_entries(entries)


def clusters(
    count: int, *, seed: int = 0, name: str = "e", encoder: bytes = b"encoder"
) -> VectorTable:
    """A table of so many experts, each with eight rows around a centre."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((count, 1, DIMENSIONS))
    rows = centres + 0.5 * rng.standard_normal((count, TEXTS, DIMENSIONS))
    unit = (rows / np.linalg.norm(rows, axis=2, keepdims=True)).astype(np.float32)
    entries = {expert(n, name=name): unit[n] for n in range(count)}
    return table_of(entries, encoder=encoder)


def expert(number: int, *, name: str = "e") -> Digest:
    """The digest of an expert of `clusters`."""
    return Digest.of(f"{name}{number}".encode())
