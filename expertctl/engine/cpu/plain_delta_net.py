"""Gated DeltaNet (arXiv:2412.06464) in numpy: what a layer without keys and values computes.

A head keeps a matrix ``S`` [key_dim, value_dim]. Each token decays it, replaces what it has for the
key by a part of the value, and reads it: ``S = exp(g) S``, ``S += k^T (beta (v - k S))``,
``o = q S``. Several tokens are read at once with products of matrices (arXiv:2406.06484): all
updates of a segment follow from one triangular system. Before that, a convolution along the text
sums queries, keys and values of the last few tokens, channel by channel.

States are float32 and never changed once a pass has made them, so a cache may keep any of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from expertctl.engine.arrays import AnyArray, widen
from expertctl.engine.cpu.plain_functional import normalise, sigmoid, silu_gate
from expertctl.engine.cpu.plain_weights import WeightTensors
from expertctl.package.delta_net_config import DeltaNetConfig

SEGMENT_TOKENS = 64
"""Maximum number of tokens that are read at once."""
_FLOAT_BYTES = 4
_NORM_EPS = 1e-6
"""That of queries and keys, whatever the base has for others."""


@dataclass(frozen=True, slots=True, eq=False)
class _HeadInputs:
    """What the heads of a layer read, [value_heads, tokens, ...]; queries and keys are repeated."""

    queries: AnyArray
    keys: AnyArray
    values: AnyArray
    decay: AnyArray  # logarithms [value_heads, tokens]
    beta: AnyArray  # [value_heads, tokens]

    def take(self, tokens: slice) -> "_HeadInputs":
        """Return some tokens."""
        return _HeadInputs(
            self.queries[:, tokens],
            self.keys[:, tokens],
            self.values[:, tokens],
            self.decay[:, tokens],
            self.beta[:, tokens],
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlainDeltaNet:
    """The heads of a layer: all but its linear layers."""

    config: DeltaNetConfig
    kernel: AnyArray  # [kernel, channels]
    decay: AnyArray  # [value_heads]
    decay_bias: AnyArray  # [value_heads]
    norm: AnyArray  # [value_dim]
    eps: float

    def __call__(
        self, made: AnyArray, state: AnyArray | None, kept: Mapping[int, AnyArray]
    ) -> AnyArray:
        """Read tokens after those of a state: [tokens, inputs] -> [tokens, values].

        ``made`` is what the linear layers of the input return, in their order. States are float32
        [numbers], None: that of no token. Those after as many tokens of ``made`` as a key of
        ``kept`` says are written to its value; one is after all.
        """
        net, tokens = self.config, len(made)
        begin = net.channels + net.values
        window = self._join_window(made[:, : net.channels], state)
        heads = self._split_heads(self._convolve(window), made[:, begin:])
        matrix = self._load_matrix(state)
        out = np.empty((tokens, net.value_heads, net.value_dim), np.float32)
        for first, last in _iter_segments(tokens, kept):
            _read_segment(heads.take(slice(first, last)), matrix, out[first:last])
            if last in kept:
                conv, rest = np.split(kept[last], [net.conv_numbers])
                conv.reshape(-1, net.channels)[...] = window[last : last + net.kernel - 1]
                rest.reshape(matrix.shape)[...] = matrix
        normalise(out, self.norm, self.eps, out=out)
        gate = made[:, net.channels : begin].reshape(out.shape)
        return silu_gate(gate, out).reshape(tokens, net.values)

    def _join_window(self, mixed: AnyArray, state: AnyArray | None) -> AnyArray:
        """Return the inputs of the convolution, those of earlier tokens first."""
        net = self.config
        window = np.zeros((net.kernel - 1 + len(mixed), net.channels), np.float32)
        window[net.kernel - 1 :] = mixed
        if state is not None:
            window[: net.kernel - 1] = state[: net.conv_numbers].reshape(-1, net.channels)
        return window

    def _convolve(self, window: AnyArray) -> AnyArray:
        """Return ``silu`` of the weighted sums of inputs: [tokens, channels]."""
        tokens = len(window) - len(self.kernel) + 1
        found = window[:tokens] * self.kernel[0]
        for place, weights in enumerate(self.kernel[1:], start=1):
            found += window[place : place + tokens] * weights
        return silu_gate(found, np.ones((), np.float32))

    def _split_heads(self, mixed: AnyArray, gates: AnyArray) -> _HeadInputs:
        """Return what heads read: [tokens, channels] and [tokens, 2 * value_heads]."""
        net, tokens = self.config, len(mixed)

        def split(first: int, heads: int, dims: int) -> AnyArray:
            part = mixed[:, first : first + heads * dims].reshape(tokens, heads, dims)
            return part.swapaxes(0, 1)

        def norm(first: int, factor: float) -> AnyArray:
            heads = split(first, net.key_heads, net.key_dim)
            normed = normalise(heads, np.full(1, factor, np.float32), _NORM_EPS / net.key_dim)
            return np.repeat(normed, net.value_heads // net.key_heads, axis=0)

        shifted = gates[:, net.value_heads :] + self.decay_bias
        return _HeadInputs(
            queries=norm(0, 1 / net.key_dim),
            keys=norm(net.keys, net.key_dim**-0.5),
            values=split(2 * net.keys, net.value_heads, net.value_dim),
            decay=(np.logaddexp(np.float32(0), shifted) * -self.decay).T,
            beta=sigmoid(gates[:, : net.value_heads]).T,
        )

    def _load_matrix(self, state: AnyArray | None) -> AnyArray:
        """Return a copy of the matrices of all heads."""
        net = self.config
        shape = (net.value_heads, net.key_dim, net.value_dim)
        if state is None:
            return np.zeros(shape, np.float32)
        return state[net.conv_numbers :].reshape(shape).copy()


def build_delta_net(
    config: DeltaNetConfig, weights: WeightTensors, layer: str, *, eps: float
) -> PlainDeltaNet:
    """Return the heads of a layer by its prefix; ``eps`` is that of its norm."""
    tensors, name = weights.tensors, f"{layer}.linear_attn"
    kernel: AnyArray = widen(tensors[f"{name}.conv1d.weight"])[:, 0]
    return PlainDeltaNet(
        config,
        kernel=np.ascontiguousarray(kernel.T),
        decay=np.exp(tensors[f"{name}.A_log"]),
        decay_bias=tensors[f"{name}.dt_bias"],
        norm=tensors[f"{name}.norm.weight"],
        eps=eps,
    )


def delta_net_bytes(config: DeltaNetConfig, tokens: int) -> int:
    """Return the maximum bytes that a layer needs for a pass, besides linear layers and states."""
    passing = tokens * (5 * config.channels + 4 * config.keys + 5 * config.values)
    passing += tokens * 12 * config.value_heads + config.conv_numbers
    segment = min(tokens, SEGMENT_TOKENS)
    heads = segment * (6 * segment + 5 * (config.key_dim + config.value_dim))
    matrix = 4 * config.key_dim * config.value_dim
    shares = config.value_heads // config.key_heads
    passing += tokens * 2 * shares * config.keys
    return _FLOAT_BYTES * (passing + config.value_heads * (heads + matrix))


def _iter_segments(tokens: int, kept: Mapping[int, AnyArray]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the parts of a pass; a part ends at each place of ``kept``."""
    begin = 0
    for end in sorted({*kept, tokens}):
        while begin < end:
            last = min(begin + SEGMENT_TOKENS, end)
            yield begin, last
            begin = last


def _read_segment(heads: _HeadInputs, matrix: AnyArray, out: AnyArray) -> None:
    """Read some tokens: changes the matrices, and writes [tokens, value_heads, value_dim]."""
    total = np.cumsum(heads.decay, axis=1)  # logarithms of the decay since the segment began
    grown = np.exp(total)[..., None]
    queries = heads.queries * grown
    if heads.keys.shape[1] == 1:
        fresh = (heads.values - np.matmul(heads.keys * grown, matrix)) * heads.beta[..., None]
        scores = np.matmul(heads.queries, heads.keys.swapaxes(1, 2))
    else:
        fresh, scores = _solve_updates(heads, total, grown, matrix)
    made = np.matmul(queries, matrix)
    made += np.matmul(scores, fresh)
    out[...] = made.swapaxes(0, 1)
    matrix *= grown[:, -1:]
    left = heads.keys * np.exp(total[:, -1:] - total)[..., None]
    matrix += np.matmul(left.swapaxes(1, 2), fresh)


def _solve_updates(
    heads: _HeadInputs, total: AnyArray, grown: AnyArray, matrix: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """Return what each token adds for its key, and how much of it each later token reads.

    Those are [heads, tokens, value_dim] and [heads, tokens, tokens].
    """
    between = total[:, :, None] - total[:, None]
    tokens = between.shape[1]
    between[:, ~np.tri(tokens, dtype=np.bool_)] = -np.inf
    np.exp(between, out=between)  # the decay from one token to a later one
    turned, beta = heads.keys.swapaxes(1, 2), heads.beta[..., None]
    scores = np.matmul(heads.queries, turned)
    scores *= between
    system = np.matmul(heads.keys * beta, turned)
    system *= between
    places = np.arange(tokens)
    system[:, places, places] = 1
    wanted = (heads.values - np.matmul(heads.keys * grown, matrix)) * beta
    return np.linalg.solve(system, wanted), scores
