"""A base in the shape of OLMoE-1B-7B, with fewer layers, whose tokens encode their experts.

Weights are random except for a part of the residual stream, one element per expert for each layer:
the embedding writes the experts that the token requests there, nothing else writes there, and the
layer's router reads only that part. So routing is computed as in any base, by all programs, and
follows the trace: token ``n`` of the vocabulary requests the experts in row ``n`` of the trace.

A trace has the routed experts that each token requests: drawn from a distribution, or recorded from
a trained model. It is int [tokens, layers, used]; its file is ``.npy`` with int16.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache_policies import Trace, make_drifting_trace
from expertctl.engine.cpu.base_loader import draw_random_floats
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.model_config import ModelConfig, parse_model_config
from expertctl.schema.strict_json import JsonObject

Numbers = np.ndarray[Any, Any]
_DRAWN = 1 << 20
_REQUEST_SCALES, _STEP = 4.0, 0.125
"""The value in the residual stream for the first expert of a token; further ones have less."""

_TOKENIZER: JsonObject = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}
"""No text is generated, but a base needs a tokenizer."""


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """Dimensions of a base; by default those of OLMoE-1B-7B, except for its sixteen layers."""

    layers: int
    hidden: int = 2048
    heads: int = 16
    experts: int = 64
    used: int = 8
    intermediate: int = 1024
    vocabulary: int = 50304

    def make_document(self) -> JsonObject:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.used,
            "norm_topk_prob": False,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "dtype": "bfloat16",
        }

    def make_config(self) -> ModelConfig:
        """Return the configuration of the base."""
        return parse_model_config(self.make_document())


def write_base(directory: Path, shape: RoutedShape, trace: Trace, *, seed: int = 0) -> Path:
    """Write a bfloat16 base whose tokens request the experts of a trace, [tokens, layers, used]."""
    assert trace.shape[1:] == (shape.layers, shape.used)
    assert len(trace) <= shape.vocabulary
    assert shape.layers * shape.experts <= shape.hidden
    (directory / "config.json").write_text(json.dumps(shape.make_document()))
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    shapes = shape.make_config().tensor_shapes()
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(_make_header(shapes))
        for part in _iterate_tensors(shape, shapes, trace, np.random.default_rng(seed)):
            stream.write(part)
        os.fsync(stream.fileno())  # else the system could not forget its pages
    return directory


def _make_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, sizes in shapes.items():
        end = begin + 2 * int(np.prod(sizes))
        entries[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _iterate_tensors(
    shape: RoutedShape,
    shapes: dict[str, tuple[int, ...]],
    trace: Trace,
    rng: np.random.Generator,
) -> Iterator[memoryview]:
    """Yield the bytes of all tensors, in the order of the header."""
    drawn = draw_random_floats(Scheme.BFLOAT16, _DRAWN, rng).view(np.uint16)
    for name, sizes in shapes.items():
        begin = int(rng.integers(_DRAWN))
        tensor = np.resize(np.roll(drawn, begin), sizes)
        if name.endswith("embed_tokens.weight"):
            tensor[:, : shape.layers * shape.experts] = 0
            _write_requests(tensor, trace, shape)
        elif name.endswith("mlp.gate.weight"):
            tensor[...] = _make_router(shape, int(name.split(".")[2]))
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[: shape.layers * shape.experts] = 0
        elif len(sizes) == 1:
            tensor[...] = _to_bfloat16(np.ones(sizes, np.float32))
        yield tensor.data.cast("B")


def _write_requests(embedding: Numbers, trace: Trace, shape: RoutedShape) -> None:
    """Write the requested experts of each token into its row."""
    tokens = np.arange(len(trace))[:, None]
    for layer in range(shape.layers):
        for place in range(shape.used):
            columns = layer * shape.experts + trace[:, layer, place, None]
            loud = np.full(columns.shape, _REQUEST_SCALES - _STEP * place, np.float32)
            embedding[tokens, columns] = _to_bfloat16(loud)


def _make_router(shape: RoutedShape, layer: int) -> Numbers:
    rows = np.zeros((shape.experts, shape.hidden), np.float32)
    rows[np.arange(shape.experts), layer * shape.experts + np.arange(shape.experts)] = 1
    return _to_bfloat16(rows)


def _to_bfloat16(numbers: Numbers) -> Numbers:
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


SKEW = 1.0
_SEED = 0


def make_trace(shape: RoutedShape, tokens: int, *, every: int = 0) -> Trace:
    """Return requests drawn from Zipf's law; ``every`` is the interval of changes, in tokens."""
    return make_drifting_trace(
        tokens,
        layers=shape.layers,
        experts=shape.experts,
        used=shape.used,
        skew=SKEW,
        every=every,
        seed=_SEED,
    )


def read_trace(path: Path) -> Trace:
    """Return the trace in a file.

    Raises:
        ValueError: if the file contains no trace.
    """
    trace: Trace = np.load(path, allow_pickle=False)
    if trace.dtype != np.int16 or trace.ndim != 3 or not trace.size or trace.min() < 0:
        raise ValueError(f"{path} does not hold int16 [tokens, layers, used], none below 0")
    ordered = np.sort(trace, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError(f"{path}: a token asks twice for an expert of a layer")
    return trace


def make_shape(trace: Trace, *, layers: int) -> RoutedShape:
    """Return the dimensions of OLMoE-1B-7B with as many experts as a trace has.

    At most ``layers`` of its layers are used.
    """
    _, there, used = trace.shape
    return RoutedShape(layers=min(layers, there), experts=int(trace.max()) + 1, used=used)
