"""all-MiniLM-L6-v2 in numpy: a BERT encoder, mean pooling, unit length.

The weights are mapped from their safetensors file as they are, and copied only when they are not
float32, so opening takes milliseconds. Equal to the reference within 1e-4. Any BERT encoder with
mean pooling in the same files works: the setting ``encoder`` may name a directory of one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from expertctl.digest import Digest, hash_file
from expertctl.errors import InvalidPackageError
from expertctl.package.tensor_file import BASE_LIMITS, TensorInfo, read_table
from expertctl.routing.bert import Bert, Floats, bert_config, weight_shapes
from expertctl.routing.encoded import Encoded
from expertctl.routing.vector_table import Vectors
from expertctl.routing.words import MAX_CHARACTERS
from expertctl.schema.strict_json import canonical, load_object

MAX_TOKENS = 256
"""Where the model was trained to stop; the rest of a text is not seen."""

DEEP_PARTS = 3
"""A deep row is made of the row itself, of the context gathered before, and of the bare tokens."""

VERSION = 4
"""Raised whenever the same weights give other rows or deep rows, so that all are made again."""

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
FILES = (CONFIG, TOKENIZER, WEIGHTS)
_MAX_CONFIG_BYTES = 1 << 20
_BATCH = 512
_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


class MiniLmEncoder:
    """The model in one directory; its weights stay mapped as long as it lives."""

    name = "minilm"

    def __init__(self, directory: Path, bert: Bert, tokenizer: Tokenizer) -> None:
        """Keep the parts; `open_minilm` makes them."""
        self.directory = directory
        self._bert = bert
        self._tokenizer = tokenizer

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return self._bert.config.hidden_size

    @property
    def stamp(self) -> str:
        """Path, size and time of the files."""
        return model_stamp(self.directory)

    @property
    def deep_dimensions(self) -> int:
        """The length of a deep row: a vector for each of its parts."""
        return DEEP_PARTS * self.dimensions

    @property
    def token_embeddings(self) -> Floats:
        """The vector of each token, before any of the layers."""
        return self._bert.weights["embeddings.word_embeddings.weight"]

    def digest(self) -> Digest:
        """Hash configuration, tokenizer and weights: 50 ms, so the stamp is compared first."""
        digests = [str(hash_file(self.directory / name)[1]) for name in FILES]
        return Digest.of(canonical([self.name, VERSION, MAX_TOKENS, digests]))

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text."""
        return self.encode_deep(texts).rows

    def encode_deep(self, texts: Sequence[str]) -> Encoded:
        """Return rows and deep rows; texts of similar length are computed together."""
        encodings = self._tokenizer.encode_batch_fast([text[:MAX_CHARACTERS] for text in texts])
        tokens = [encoding.ids for encoding in encodings]
        rows = np.zeros((len(tokens), self.dimensions), np.float32)
        deep = np.zeros((len(tokens), self.deep_dimensions), np.float32)
        for batch in _batches([len(ids) for ids in tokens]):
            means = self._bert.means([tokens[i] for i in batch])
            rows[batch] = _unit(means.last)
            deep[batch] = _joined([rows[batch], _unit(means.context), _unit(means.embedded)])
        return Encoded(rows, deep)

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Return them as they are: the thresholds were made for this model."""
        return cosines


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Put texts, the shortest first, in batches of about `_BATCH` tokens."""
    batch: list[int] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and width + lengths[i] > _BATCH:
            yield batch
            batch, width = [], 0
        batch.append(i)
        width += lengths[i]
    if batch:
        yield batch


def _joined(parts: Sequence[Vectors]) -> Vectors:
    """Return the parts side by side, as unit rows in which each has the same share."""
    joined = np.concatenate(parts, axis=1)
    joined /= np.float32(math.sqrt(len(parts)))
    return joined


def _unit(rows: Vectors) -> Vectors:
    norms = np.sqrt(np.square(rows).sum(1, keepdims=True))
    unit: Vectors = rows / np.maximum(norms, np.float32(1e-12))
    return unit


def open_minilm(directory: Path) -> MiniLmEncoder:
    """Open the model in a directory with `FILES`.

    Raises:
        InvalidPackageError: when the files are not a BERT encoder that can be read.
    """
    what = f"encoder {directory}"
    data = (directory / CONFIG).read_bytes()
    config = bert_config(
        load_object(data, what=f"{what}: {CONFIG}", max_bytes=_MAX_CONFIG_BYTES),
        what=f"{what}: {CONFIG}",
    )
    weights = _map_weights(directory / WEIGHTS, weight_shapes(config), what=f"{what}: {WEIGHTS}")
    tokenizer = _open_tokenizer(directory / TOKENIZER, what=f"{what}: {TOKENIZER}")
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InvalidPackageError(what, ["the tokenizer has more tokens than the model"])
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(MAX_TOKENS, config.max_position_embeddings))
    return MiniLmEncoder(directory, Bert(config, weights), tokenizer)


def model_stamp(directory: Path) -> str:
    """Return what tells the files of a model from others without reading them."""
    stats = [(directory / name).stat() for name in FILES]
    marks = [[str(s.st_size), str(s.st_mtime_ns), str(s.st_ino)] for s in stats]
    return str(Digest.of(canonical([str(directory.resolve()), marks])))


def _open_tokenizer(path: Path, *, what: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InvalidPackageError(what, [f"not a tokenizer: {str(error)[:200]}"]) from error


def _map_weights(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, what: str
) -> dict[str, Floats]:
    table = read_table(path, limits=BASE_LIMITS)
    prefix = "" if next(iter(shapes)) in table.tensors else "bert."
    problems = [
        f"{name}: {tuple(shape)} of {', '.join([*_DTYPES, 'BF16'])} was expected"
        for name, shape in shapes.items()
        if not _fits(table.tensors.get(prefix + name), shape)
    ]
    if problems:
        raise InvalidPackageError(what, problems[:20])
    data = np.memmap(path, np.uint8, "r", table.data_offset)
    return {name: _as_float32(data, table.tensors[prefix + name]) for name in shapes}


def _fits(tensor: TensorInfo | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.shape == shape and tensor.dtype in {*_DTYPES, "BF16"}


def _as_float32(data: np.memmap, tensor: TensorInfo) -> Floats:
    raw = np.asarray(data[tensor.begin : tensor.end])
    if tensor.dtype == "BF16":
        wide = raw.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(tensor.shape)
    return raw.view(_DTYPES[tensor.dtype]).reshape(tensor.shape).astype(np.float32, copy=False)
