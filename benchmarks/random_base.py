"""A packed base with random weights, made as it lies in memory: nothing is packed or quantised."""

from typing import Any

import numpy as np

from benchmarks.gguf import SPREAD, Bytes, drawn_floats
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_base import PackedBase, PackedLayer
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]

_DRAWN_NUMBERS = 1 << 20
_LEVELS = {Scheme.INT8: 1 << 8, Scheme.INT4: 1 << 4}


def random_base(config: ModelConfig, scheme: Scheme, *, seed: int = 0) -> PackedBase:
    """Return a base without biases whose head is its embedding; norms are ones."""
    assert config.tied, "the head is the embedding"
    drawing = _Drawing(config, scheme, np.random.default_rng(seed))
    embedding = drawing.matrix(config.vocab_size, config.hidden_size)
    layers = tuple(drawing.layer(number) for number in range(config.layers))
    return PackedBase(config, scheme, embedding, embedding, _ones(config.hidden_size), layers)


def base_bytes(base: PackedBase) -> int:
    """Return the bytes of its matrices, which decoding a token reads once."""
    return sum(matrix.nbytes for matrix in base_matrices(base))


def base_matrices(base: PackedBase) -> tuple[PackedMatrix, ...]:
    """Return its matrices, in the order in which they are read; the head comes last."""
    layers = (
        matrix
        for layer in base.layers
        for matrix in (layer.inputs, layer.output, layer.gate_up, layer.down)
    )
    return (*layers, base.head)


class _Drawing:
    """Repeats some drawn bytes, as the weights that llama.cpp is given do."""

    def __init__(self, config: ModelConfig, scheme: Scheme, rng: np.random.Generator) -> None:
        self._config, self._scheme = config, scheme
        self._drawn = _drawn(scheme, rng)

    def layer(self, number: int) -> PackedLayer:
        config = self._config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        head_norm = _ones(config.head_dim) if config.qk_norm else None
        return PackedLayer(
            input_norm=_ones(config.hidden_size),
            inputs=self.matrix(queries + 2 * keys, config.hidden_size),
            input_bias=None,
            query_norm=head_norm,
            key_norm=head_norm,
            output=self.matrix(config.hidden_size, queries),
            output_bias=None,
            mlp_norm=_ones(config.hidden_size),
            gate_up=self.matrix(2 * config.intermediate_size, config.hidden_size),
            gate_up_bias=None,
            down=self.matrix(config.hidden_size, config.intermediate_size),
            down_bias=None,
            window=config.windows[number],
        )

    def matrix(self, rows: int, columns: int) -> PackedMatrix:
        layout, blocks = self._scheme.layout, -(-rows // LANES)
        data = aligned(blocks * layout.vectors(columns) * layout.vector_bytes, np.uint8)
        for begin in range(0, len(data), len(self._drawn)):
            part = data[begin : begin + len(self._drawn)]
            part[...] = self._drawn[: len(part)]
        scales = aligned((blocks, layout.groups(columns), LANES), np.float32)
        scales[...] = SPREAD * 12**0.5 / _LEVELS.get(self._scheme, 1)
        return PackedMatrix(self._scheme, rows, columns, data, scales)


def _drawn(scheme: Scheme, rng: np.random.Generator) -> Bytes:
    if scheme in _LEVELS:
        return rng.integers(0, 256, _DRAWN_NUMBERS, np.uint8)
    return drawn_floats(scheme, _DRAWN_NUMBERS, rng)


def _ones(count: int) -> Numbers:
    return np.ones(count, np.float32)
