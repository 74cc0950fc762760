"""The BERT encoder as plain numpy: embeddings, self-attention, feed-forward, layer norm.

Shapes: b texts, t tokens, h hidden, n heads of d. Weights keep the names and the [out, in] order of
the original file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_MASKED = np.float32(-1e9)
_LIMITS = {
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_attention_heads": 128,
    "intermediate_size": 32768,
    "max_position_embeddings": 65536,
    "vocab_size": 1_000_000,
}
_ERF_NUMERATOR = (
    2.2905065861350646e-4,
    3.4082910107109506e-3,
    5.0955695062380861e-2,
    1.8520832239976145e-1,
    1.128379143519084,
)
_ERF_DENOMINATOR = (
    -1.1791602954361697e-7,
    2.3547966471313185e-5,
    1.0179625278914885e-3,
    1.4070470171167667e-2,
    1.1098505178285362e-1,
    4.9746925110067538e-1,
    1.0,
)
_ERF_EDGE = 3.832506856900711
"""Beyond it erf is 1 in float32."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """What the forward pass needs of ``config.json``."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int
    layer_norm_eps: float


def bert_config(document: JsonObject, *, what: str) -> BertConfig:
    """Read ``config.json``.

    Raises:
        InvalidPackageError: when it is not a BERT that is computed here.
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


def weight_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
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


class Bert:
    """The forward pass over weights that somebody else owns."""

    def __init__(self, config: BertConfig, weights: Mapping[str, Floats]) -> None:
        """Keep the weights, named as in `weight_shapes`."""
        self.config = config
        self.weights = weights

    def hidden(self, ids: Ids, mask: Floats) -> list[Floats]:
        """Return the hidden states [b, t, h] after each layer, for ids and their mask [b, t]."""
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm("embeddings.LayerNorm", x)
        bias = (np.float32(1) - mask)[:, None, None, :] * _MASKED  # [b, 1, 1, t]
        states = []
        for layer in range(self.config.num_hidden_layers):
            x = self._layer(f"encoder.layer.{layer}", x, bias)
            states.append(x)
        return states

    def _layer(self, at: str, x: Floats, bias: Floats) -> Floats:
        attended = self._linear(f"{at}.attention.output.dense", self._attention(at, x, bias))
        x = self._norm(f"{at}.attention.output.LayerNorm", x + attended)
        wide = gelu(self._linear(f"{at}.intermediate.dense", x))
        return self._norm(f"{at}.output.LayerNorm", x + self._linear(f"{at}.output.dense", wide))

    def _attention(self, at: str, x: Floats, bias: Floats) -> Floats:
        b, t, h = x.shape
        heads = self.config.num_attention_heads
        q, k, v = (
            self._linear(f"{at}.attention.self.{part}", x)
            .reshape(b, t, heads, h // heads)
            .transpose(0, 2, 1, 3)  # [b, n, t, d]
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 1, 3, 2) * np.float32(1 / math.sqrt(h // heads)) + bias
        mixed: Floats = softmax(scores) @ v  # [b, n, t, t] @ [b, n, t, d]
        return mixed.transpose(0, 2, 1, 3).reshape(b, t, h)

    def _linear(self, name: str, x: Floats) -> Floats:
        result: Floats = x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return result

    def _norm(self, name: str, x: Floats) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        variance = np.square(centred).mean(-1, keepdims=True)
        scaled = centred / np.sqrt(variance + np.float32(self.config.layer_norm_eps))
        result: Floats = scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        return result


def softmax(x: Floats) -> Floats:
    """Return the exponentials of the last axis, scaled to sum 1."""
    powers: Floats = np.exp(x - x.max(-1, keepdims=True))
    result: Floats = powers / powers.sum(-1, keepdims=True)
    return result


def gelu(x: Floats) -> Floats:
    """Return the exact (erf) GELU, not its tanh approximation."""
    result: Floats = x * (np.float32(0.5) + np.float32(0.5) * erf(x * np.float32(math.sqrt(0.5))))
    return result


def erf(x: Floats) -> Floats:
    """Return the error function within 3e-7: a rational approximation made for float32."""
    clipped = np.clip(x, -_ERF_EDGE, _ERF_EDGE)
    square = clipped * clipped
    numerator = _polynomial(_ERF_NUMERATOR, square)
    result: Floats = clipped * numerator / _polynomial(_ERF_DENOMINATOR, square)
    return result


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Return the polynomial by Horner's rule, highest power first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += np.float32(coefficient)
    return result


def _linear_shapes(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def _norm_shapes(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
