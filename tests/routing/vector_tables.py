"""Tables of rows in clusters, as the texts of experts are.

What an index finds for a prompt, by content digest.
"""

from collections.abc import Mapping

import numpy as np

from expertctl.reference import Digest
from expertctl.routing.index import RoutingIndex
from expertctl.routing.vector_table import Vectors, VectorTable

TEXTS, DIMENSIONS = 8, 16


def make_table(entries: Mapping[Digest, Vectors], *, encoder: bytes = b"encoder") -> VectorTable:
    """A table in memory with these entries."""
    empty = VectorTable.empty(encoder=Digest.compute(encoder), stamp="s", dimensions=DIMENSIONS)
    return empty.add_entries(entries)


def make_clusters(
    count: int, *, seed: int = 0, name: str = "e", encoder: bytes = b"encoder"
) -> VectorTable:
    """A table of so many experts, each with eight rows around a centre."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((count, 1, DIMENSIONS))
    rows = centres + 0.5 * rng.standard_normal((count, TEXTS, DIMENSIONS))
    unit = (rows / np.linalg.norm(rows, axis=2, keepdims=True)).astype(np.float32)
    entries = {make_expert_digest(n, name=name): unit[n] for n in range(count)}
    return make_table(entries, encoder=encoder)


def make_expert_digest(number: int, *, name: str = "e") -> Digest:
    """The digest of an expert of `make_clusters`."""
    return Digest.compute(f"{name}{number}".encode())


def encode_prompt(index: RoutingIndex, prompt: str) -> Vectors:
    """The unit vector of a prompt."""
    row: Vectors = index.encode_prompt(prompt).rows[0]
    return row


def find_closest(index: RoutingIndex, prompt: str) -> dict[Digest, tuple[float, int]]:
    """The cosine of every expert that is found, and which of its texts is the closest."""
    found = index.search(encode_prompt(index, prompt))
    told = zip(found.experts.tolist(), found.cosines.tolist(), found.texts.tolist(), strict=True)
    return {index.table.digest_at(at): (cosine, text) for at, cosine, text in told}
