"""`StaticTable`: one vector for each token of a vocabulary, and the folder that keeps them.

It is derived once from the token embeddings of a MiniLM: without their mean, turned to the axes in
which they differ most, and weighted by how rare a token is. The folder holds it beside a copy of
the tokenizer, so that the model may be removed. Whatever is wrong with its files makes them
worthless, not dangerous: the table is derived again. It may be deleted at any time.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tokenizers import Tokenizer

from expertctl.digest import Digest
from expertctl.durable import make_folders, write_atomic
from expertctl.errors import DigestError
from expertctl.routing.bert import Floats
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import canonical

TABLE, TOKENIZER = "table.safetensors", "tokenizer.json"
FORMAT = "1"
"""Raised whenever the same embeddings give another table."""

DIMENSIONS = 256
_RARE = 1e-4
"""The share of all words at which a token counts half."""
_RANK_OFFSET = 2.7
_MEANINGLESS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROWS = "rows"
_MAX_ROWS = 1_000_000

Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class StaticTable:
    """The vectors of all tokens, and the tokenizer that knows their ids.

    ``digest`` says what vectors depend on, ``source`` is the digest of the model that the table was
    derived from, ``stamp`` how to recognise that model cheaply.
    """

    rows: Halves  # [tokens, dimensions]
    tokenizer: bytes
    digest: Digest
    source: Digest
    stamp: str

    @classmethod
    def of(cls, rows: Halves, tokenizer: bytes, *, source: Digest, stamp: str) -> Self:
        """Make a table; hashing it takes 10 ms."""
        numbers = Digest.of(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        parts = [FORMAT, rows.shape[1], str(numbers), str(Digest.of(tokenizer))]
        return cls(rows, tokenizer, Digest.of(canonical(parts)), source, stamp)


def derive_rows(embeddings: Floats, tokenizer: Tokenizer) -> Halves:
    """Return the rows of a table for the token embeddings [tokens, h] of a model.

    BERT's vocabulary is sorted by frequency, so by Zipf's law an id says how rare its token is.
    """
    centred = embeddings - embeddings.mean(0)
    _, axes = np.linalg.eigh(centred.T @ centred)  # the widest axis last
    turned = centred @ axes[:, ::-1][:, :DIMENSIONS]
    turned *= _weights(len(turned))[:, None]
    for token in _MEANINGLESS:
        place = tokenizer.token_to_id(token)
        if place is not None:
            turned[place] = 0
    scale = np.sqrt(np.square(turned).sum(1).mean())
    rows: Halves = (turned / max(scale, np.float32(1e-12))).astype(np.float16)
    return rows


def write_static(folder: Path, table: StaticTable) -> None:
    """Keep a table in a folder of its own; what was there is replaced, whole or not at all.

    Raises:
        OSError: when the folder cannot be written.
    """
    make_folders(folder, mode=0o700)
    metadata = {
        "format": FORMAT,
        "digest": str(table.digest),
        "source": str(table.source),
        "stamp": table.stamp,
    }
    write_atomic(folder / TOKENIZER, table.tokenizer, mode=0o600)
    write_atomic(folder / TABLE, save({_ROWS: table.rows}, metadata=metadata), mode=0o600)


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata of the file."""

    format: str
    digest: str
    source: str
    stamp: str


def read_static(folder: Path) -> StaticTable | None:
    """Read the table of a folder; ``None`` when it is absent or anything is wrong with it."""
    with suppress(OSError, SafetensorError, msgspec.MsgspecError, DigestError):
        tokenizer = (folder / TOKENIZER).read_bytes()
        with safe_open(folder / TABLE, framework="numpy") as file:
            metadata = shape(file.metadata(), _Metadata)
            rows = file.get_tensor(_ROWS)
        if metadata.format != FORMAT or not _is_sound(rows):
            return None
        source = Digest.parse(metadata.source)
        table = StaticTable.of(rows, tokenizer, source=source, stamp=metadata.stamp)
        return table if str(table.digest) == metadata.digest else None
    return None


def _weights(tokens: int) -> Floats:
    """Return how much each token counts: smooth inverse frequency (Arora et al. 2017)."""
    frequencies = 1 / (np.arange(tokens) + _RANK_OFFSET)
    shares = frequencies / frequencies.sum()
    weights: Floats = (_RARE / (_RARE + shares)).astype(np.float32)
    return weights


def _is_sound(rows: Halves) -> bool:
    fits = rows.dtype == np.float16 and rows.ndim == 2 and 0 < len(rows) <= _MAX_ROWS
    return fits and 0 < rows.shape[1] <= DIMENSIONS
