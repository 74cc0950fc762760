"""all-MiniLM-L6-v2 in numpy: a BERT encoder, mean pooling, unit length.

The weights are mapped from their safetensors file and copied only if they are not float32, so
opening takes milliseconds. The result equals the reference within 1e-4. Any BERT encoder with mean
pooling in the same files works: the setting ``encoder`` may name its directory.

Shapes: h hidden, n heads of d, c texts of one length, t tokens of a text, w tokens of all texts,
concatenated. A token is a column: the weights as stored in the file, [out, in], times [in, w] take
half the time of the usual product with rows of tokens. Texts need no padding, as only attention
separates them; the few columns that pad w to a multiple of `COLUMN_ALIGNMENT` belong to no text.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from expertctl.digest import Digest, hash_file
from expertctl.errors import InvalidPackageError
from expertctl.package.tensor_file import BASE_LIMITS, TensorInfo, read_table
from expertctl.routing.features import MAX_CHARACTERS
from expertctl.routing.vector_table import EncodedTexts, Vectors
from expertctl.schema.strict_json import JsonObject, encode_canonical, load_object

Floats = npt.NDArray[np.float32]

_LIMITS = {
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_attention_heads": 128,
    "intermediate_size": 32768,
    "max_position_embeddings": 65536,
    "vocab_size": 1_000_000,
}
COLUMN_ALIGNMENT = 16
"""The number of tokens is padded to a multiple of this, the width of a 512-bit vector unit."""

_GELU = (-1.5956551533, -0.0729398634, 2.509523236e-4, 6.093441144e-5, -2.225264237e-6)
"""p of gelu(x) = x / (1 + exp(x · p(x²))), lowest power first; minimax fit, error 4e-6."""
_FEW_COLUMNS = 128
_CACHE_BLOCK = 1 << 18
"""How many weights are brought into the cache at a time when there are few columns."""
_CACHE_LINE = 16

_GELU_BLOCK = 1 << 16
"""How many numbers are processed at a time by gelu, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The fields of ``config.json`` that the forward pass needs."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    layer_norm_eps: float


def parse_bert_config(document: JsonObject, *, what: str) -> BertConfig:
    """Parse ``config.json``.

    Raises:
        InvalidPackageError: when it is not a supported BERT.
    """
    problems = [
        f"{name}: a whole number from 1 to {limit} was expected"
        for name, limit in _LIMITS.items()
        if not (type(document.get(name)) is int and 1 <= document[name] <= limit)  # type: ignore[operator]  # an int by then
    ]
    for name, value in (("model_type", "bert"), ("hidden_act", "gelu")):
        if document.get(name) != value:
            problems.append(f"{name} is {document.get(name)!r}, only {value!r} is computed here")
    if document.get("position_embedding_type", "absolute") != "absolute":
        problems.append("position_embedding_type: only absolute positions are computed here")
    epsilon = document.get("layer_norm_eps", 1e-12)
    if not (isinstance(epsilon, float) and 0 < epsilon < 1):
        problems.append("layer_norm_eps: a small positive number was expected")
    if not problems and document["hidden_size"] % document["num_attention_heads"]:  # type: ignore[operator]  # ints by now
        problems.append("hidden_size is not a multiple of num_attention_heads")
    if problems:
        raise InvalidPackageError(what, problems)
    fields: dict[str, Any] = {name: document[name] for name in _LIMITS}
    return BertConfig(**fields, layer_norm_eps=float(epsilon))  # type: ignore[arg-type]  # a float by now


def list_weight_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the forward pass reads."""
    h, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, h),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, h),
        "embeddings.token_type_embeddings.weight": (2, h),
        **_norm_shapes("embeddings.LayerNorm", h),
    }
    for layer in range(config.num_hidden_layers):
        at = f"encoder.layer.{layer}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear_shapes(f"{at}.attention.{part}", h, h)
        shapes |= _norm_shapes(f"{at}.attention.output.LayerNorm", h)
        shapes |= _linear_shapes(f"{at}.intermediate.dense", wide, h)
        shapes |= _linear_shapes(f"{at}.output.dense", h, wide)
        shapes |= _norm_shapes(f"{at}.output.LayerNorm", h)
    return shapes


@dataclass(frozen=True, slots=True)
class _LengthGroup:
    """Consecutive texts of one length."""

    start: int
    texts: int
    length: int

    def select_columns(self, x: Floats, *, heads: int) -> Floats:
        """Return the columns of these texts as a view [c, n, d, t]."""
        columns = x[:, self.start : self.start + self.texts * self.length]
        parts = columns.reshape(heads, -1, self.texts, self.length)
        return parts.transpose(2, 0, 1, 3)


@dataclass(frozen=True, slots=True)
class PooledLayers:
    """Three poolings of texts [texts, h], each the mean over all tokens of a text."""

    embedded: Floats
    """The input of the first layer."""
    context: Floats
    """The attention output of the second to last layer, heads concatenated."""
    last: Floats
    """The output of the last layer."""


class Bert:
    """The forward pass over weights that it does not own."""

    def __init__(self, config: BertConfig, weights: Mapping[str, Floats]) -> None:
        """Keep the weights, named as in `list_weight_shapes`."""
        self.config = config
        self.weights = weights

    def pool_layers(self, texts: Sequence[Sequence[int]]) -> PooledLayers:
        """Run the model over texts given as token ids; fastest when sorted by length."""
        lengths = np.array([len(text) for text in texts])
        runs = _group_by_length(lengths.tolist())
        x = self._embed(texts, width=-int(lengths.sum()) // COLUMN_ALIGNMENT * -COLUMN_ALIGNMENT)
        embedded, context = _mean_pool(x, lengths), None
        for layer in range(self.config.num_hidden_layers):
            mixed = self._attend(f"encoder.layer.{layer}", x, runs)
            if layer == max(0, self.config.num_hidden_layers - 2):
                context = _mean_pool(mixed, lengths)
            x = self._run_layer(f"encoder.layer.{layer}", x, mixed)
        assert context is not None, "a model has a layer"
        return PooledLayers(embedded, context, _mean_pool(x, lengths))

    def _embed(self, texts: Sequence[Sequence[int]], *, width: int) -> Floats:
        """Return the input of the first layer [h, w]; padding columns are those of token 0."""
        ids, places = np.zeros(width, np.int64), np.zeros(width, np.int64)
        used = sum(map(len, texts))
        ids[:used] = np.concatenate([np.asarray(text, np.int64) for text in texts])
        places[:used] = np.concatenate([np.arange(len(text)) for text in texts])
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x += self.weights["embeddings.position_embeddings.weight"][places]
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._layer_norm("embeddings.LayerNorm", np.ascontiguousarray(x.T))

    def _run_layer(self, prefix: str, x: Floats, mixed: Floats) -> Floats:
        """Return the output of a layer, given the output of its attention."""
        attended = self._linear(f"{prefix}.attention.output.dense", mixed)
        attended += x
        x = self._layer_norm(f"{prefix}.attention.output.LayerNorm", attended)
        wide = self._linear(f"{prefix}.intermediate.dense", x)
        apply_gelu(wide)
        result = self._linear(f"{prefix}.output.dense", wide)
        result += x
        return self._layer_norm(f"{prefix}.output.LayerNorm", result)

    def _attend(self, prefix: str, x: Floats, runs: Sequence[_LengthGroup]) -> Floats:
        """Return the attention-weighted values within each text [h, w].

        The bias of the keys adds a constant to all scores of a query and cancels in the softmax;
        that of the values is added once, as the attention weights sum to 1.
        """
        heads = self.config.num_attention_heads
        q = self._linear(f"{prefix}.attention.self.query", x)
        q *= np.float32(1 / math.sqrt(len(x) // heads))
        k = multiply_blocked(self.weights[f"{prefix}.attention.self.key.weight"], x)
        v = multiply_blocked(self.weights[f"{prefix}.attention.self.value.weight"], x)
        mixed = np.zeros_like(x)
        for run in runs:
            mine, keys, values = (run.select_columns(part, heads=heads) for part in (q, k, v))
            shares = keys.transpose(0, 1, 3, 2) @ mine  # [c, n, t keys, t]
            sums = exponentiate(shares)
            part = values @ shares  # [c, n, d, t]
            np.divide(part, sums, out=run.select_columns(mixed, heads=heads))
        mixed += self.weights[f"{prefix}.attention.self.value.bias"][:, None]
        return mixed

    def _linear(self, name: str, x: Floats) -> Floats:
        result = multiply_blocked(self.weights[f"{name}.weight"], x)
        result += self.weights[f"{name}.bias"][:, None]
        return result

    def _layer_norm(self, name: str, x: Floats) -> Floats:
        """Normalise each column to mean 0 and variance 1, then scale and shift, in place."""
        average = np.full(len(x), 1 / len(x), np.float32)
        x -= average @ x
        deviation = average @ (x * x)
        deviation += np.float32(self.config.layer_norm_eps)
        x /= np.sqrt(deviation, out=deviation)
        x *= self.weights[f"{name}.weight"][:, None]
        x += self.weights[f"{name}.bias"][:, None]
        return x


def multiply_blocked(weight: Floats, x: Floats) -> Floats:
    """Return the matrix product; with few columns, weights are prefetched into the cache.

    The weights do not fit the cache, and a product that waits for each part of them takes up to a
    third longer than first reading one number of each cache line at full speed.
    """
    if x.shape[1] > _FEW_COLUMNS:
        return weight @ x
    result = np.empty((len(weight), x.shape[1]), np.float32)
    step = max(1, _CACHE_BLOCK // weight.shape[1])
    for start in range(0, len(weight), step):
        block = weight[start : start + step]
        block.reshape(-1)[::_CACHE_LINE].max()
        np.matmul(block, x, out=result[start : start + step])
    return result


def exponentiate(x: Floats) -> Floats:
    """Exponentiate in place, shifted so that the maximum of each column is 1; return the sums.

    Divided by these sums [..., 1, columns] the columns are a softmax.
    """
    x -= x.max(-2, keepdims=True)
    np.exp(x, out=x)
    sums: Floats = x.sum(-2, keepdims=True)
    return sums


def apply_gelu(x: Floats) -> None:
    """Apply the exact (erf) GELU within 4e-6, in place, to a contiguous array."""
    flat = x.reshape(-1)
    squares, powers = np.empty((2, min(_GELU_BLOCK, len(flat))), np.float32)
    with np.errstate(over="ignore"):  # x / (1 + ∞) is correctly 0
        for start in range(0, len(flat), _GELU_BLOCK):
            block = flat[start : start + _GELU_BLOCK]
            _gelu_block(block, squares[: len(block)], powers[: len(block)])


def _gelu_block(x: Floats, squares: Floats, powers: Floats) -> None:
    np.multiply(x, x, out=squares)
    np.multiply(squares, np.float32(_GELU[-1]), out=powers)
    for coefficient in _GELU[-2:0:-1]:
        powers += np.float32(coefficient)
        powers *= squares
    powers += np.float32(_GELU[0])
    powers *= x
    np.exp(powers, out=powers)
    powers += np.float32(1)
    np.divide(x, powers, out=x)


def _group_by_length(lengths: Sequence[int]) -> list[_LengthGroup]:
    """Return the runs of equal lengths."""
    runs, start = [], 0
    for length, same in groupby(lengths):
        count = len(list(same))
        runs.append(_LengthGroup(start, count, length))
        start += count * length
    return runs


def _mean_pool(x: Floats, lengths: npt.NDArray[np.int64]) -> Floats:
    """Return the mean of the columns of each text [texts, h]."""
    starts = np.cumsum(lengths) - lengths
    means: Floats = np.add.reduceat(x[:, : lengths.sum()], starts, axis=1)  # [h, texts]
    means /= lengths.astype(np.float32)
    return means.T


def _linear_shapes(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm_shapes(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


MAX_TOKENS = 256
"""The length the model was trained for; longer texts are truncated."""

RERANK_PARTS = 3
"""A rerank row consists of the row, of an attention output, and of the token embeddings."""

VERSION = 4
"""Incremented whenever the same weights give other rows, so that stored vectors are rebuilt."""

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
FILES = (CONFIG, TOKENIZER, WEIGHTS)
_MAX_CONFIG_BYTES = 1 << 20
_BATCH_TOKENS = 512
_DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64}


class MiniLmEncoder:
    """The model in one directory; its weights stay mapped as long as it lives."""

    name = "minilm"

    def __init__(self, directory: Path, bert: Bert, tokenizer: Tokenizer) -> None:
        """Keep the parts; `open_minilm` creates them."""
        self.directory = directory
        self._bert = bert
        self._tokenizer = tokenizer

    @property
    def dimensions(self) -> int:
        """The length of a vector."""
        return self._bert.config.hidden_size

    @property
    def stamp(self) -> str:
        """Path, size and modification time of the files."""
        return stamp_model(self.directory)

    @property
    def rerank_dimensions(self) -> int:
        """The length of a rerank row: one vector for each of its parts."""
        return RERANK_PARTS * self.dimensions

    @property
    def token_embeddings(self) -> Floats:
        """The embedding of each token [tokens, h]."""
        return self._bert.weights["embeddings.word_embeddings.weight"]

    def digest(self) -> Digest:
        """Hash configuration, tokenizer and weights: 50 ms, so the stamp is compared first."""
        digests = [str(hash_file(self.directory / name)[1]) for name in FILES]
        return Digest.compute(encode_canonical([self.name, VERSION, MAX_TOKENS, digests]))

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text."""
        return self.encode_for_rerank(texts).rows

    def encode_for_rerank(self, texts: Sequence[str]) -> EncodedTexts:
        """Return rows and rerank rows; texts of similar length are computed together."""
        encodings = self._tokenizer.encode_batch_fast([text[:MAX_CHARACTERS] for text in texts])
        tokens = [encoding.ids for encoding in encodings]
        rows = np.zeros((len(tokens), self.dimensions), np.float32)
        deep = np.zeros((len(tokens), self.rerank_dimensions), np.float32)
        for batch in _batch_by_length([len(ids) for ids in tokens]):
            means = self._bert.pool_layers([tokens[i] for i in batch])
            rows[batch] = _to_unit(means.last)
            deep[batch] = _concatenate_unit(
                [rows[batch], _to_unit(means.context), _to_unit(means.embedded)]
            )
        return EncodedTexts(rows, deep)

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Return them unchanged: the thresholds were made for this model."""
        return cosines


def _batch_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of text indices of about `_BATCH_TOKENS` tokens, the shortest texts first."""
    batch: list[int] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and width + lengths[i] > _BATCH_TOKENS:
            yield batch
            batch, width = [], 0
        batch.append(i)
        width += lengths[i]
    if batch:
        yield batch


def _concatenate_unit(parts: Sequence[Vectors]) -> Vectors:
    """Concatenate parts to unit rows in which all parts have the same norm."""
    joined = np.concatenate(parts, axis=1)
    joined /= np.float32(math.sqrt(len(parts)))
    return joined


def _to_unit(rows: Vectors) -> Vectors:
    norms = np.sqrt(np.square(rows).sum(1, keepdims=True))
    unit: Vectors = rows / np.maximum(norms, np.float32(1e-12))
    return unit


def open_minilm(directory: Path) -> MiniLmEncoder:
    """Open the model in a directory with `FILES`.

    Raises:
        InvalidPackageError: when the files are not a readable BERT encoder.
    """
    what = f"encoder {directory}"
    data = (directory / CONFIG).read_bytes()
    config = parse_bert_config(
        load_object(data, what=f"{what}: {CONFIG}", max_bytes=_MAX_CONFIG_BYTES),
        what=f"{what}: {CONFIG}",
    )
    weights = _map_weights(
        directory / WEIGHTS, list_weight_shapes(config), what=f"{what}: {WEIGHTS}"
    )
    tokenizer = _open_tokenizer(directory / TOKENIZER, what=f"{what}: {TOKENIZER}")
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise InvalidPackageError(what, ["the tokenizer has more tokens than the model"])
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(MAX_TOKENS, config.max_position_embeddings))
    return MiniLmEncoder(directory, Bert(config, weights), tokenizer)


def stamp_model(directory: Path) -> str:
    """Return an identifier of the files of a model that does not require reading them."""
    stats = [(directory / name).stat() for name in FILES]
    marks = [[str(s.st_size), str(s.st_mtime_ns), str(s.st_ino)] for s in stats]
    return str(Digest.compute(encode_canonical([str(directory.resolve()), marks])))


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
    return {name: _to_float32(data, table.tensors[prefix + name]) for name in shapes}


def _fits(tensor: TensorInfo | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.shape == shape and tensor.dtype in {*_DTYPES, "BF16"}


def _to_float32(data: np.memmap, tensor: TensorInfo) -> Floats:
    raw = np.asarray(data[tensor.begin : tensor.end])
    if tensor.dtype == "BF16":
        wide = raw.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).reshape(tensor.shape)
    return raw.view(_DTYPES[tensor.dtype]).reshape(tensor.shape).astype(np.float32, copy=False)
