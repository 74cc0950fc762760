"""The torch decoder: dense bases and bases with routed experts, with the deltas of a plan.

Prefill and decode are separate calls with separate results. A decoder has no generation state: that
is in the `KVCache` of each call, so several generations may alternate. Activations are float32,
[tokens, features]; base weights are read-only.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.steps import EMPTY_DELTAS
from expertctl.engine.arrays import AnyArray
from expertctl.engine.base_files import is_routed_expert
from expertctl.engine.decoding import (
    PREFILL_CHUNK,
    DecodeResult,
    LayerTimer,
    PrefillResult,
    check_modules,
    check_soft_prompt,
    check_tokens,
)
from expertctl.engine.moe.counters import Phase
from expertctl.engine.text.prompt import LOGIT_ROWS, RecordLogits
from expertctl.engine.torch.functional import (
    AttentionMask,
    FeedForward,
    Linear,
    TorchDeltas,
    apply_rope,
    compute_rope_table,
    make_attention_mask,
    make_feed_forward,
    make_linear,
    round_up_positions,
    scaled_dot_product_attention,
)
from expertctl.engine.torch.routed_mlp import RoutedMlp, build_routed_mlp, estimate_routed_floats
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import EMBEDDING_TENSOR, ModelConfig

if TYPE_CHECKING:
    from expertctl.engine.torch.stacked_mlp import StackedLayers, StackedMlp


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer of a decoder; without a ``window`` it attends to all earlier tokens.

    Norms of queries and keys are as long as one head, or as all of them.
    """

    input_norm: Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    mlp: "FeedForward | RoutedMlp | StackedMlp"
    window: int | None


def build_layers(
    config: ModelConfig, weights: BaseWeights, stacked: "Mapping[int, StackedMlp] | None" = None
) -> list[DecoderLayer]:
    """Return all layers in order; the MLPs of layers with stacked experts are given."""
    given = stacked or {}
    return [
        _build_layer(
            config, weights, number, given.get(number) or _build_mlp(config, weights, number)
        )
        for number in range(config.layers)
    ]


def build_output_layer(weights: BaseWeights) -> Linear:
    """Return the output layer, whose matrix may be tied to the embedding."""
    return Linear("lm_head", weights.get_output_matrix(), None)


def _build_layer(
    config: ModelConfig,
    weights: BaseWeights,
    number: int,
    mlp: "FeedForward | RoutedMlp | StackedMlp",
) -> DecoderLayer:
    tensors, prefix = weights.tensors, f"model.layers.{number}"

    return DecoderLayer(
        input_norm=tensors[f"{prefix}.input_layernorm.weight"],
        query=make_linear(tensors, f"{prefix}.self_attn.q_proj"),
        key=make_linear(tensors, f"{prefix}.self_attn.k_proj"),
        value=make_linear(tensors, f"{prefix}.self_attn.v_proj"),
        output=make_linear(tensors, f"{prefix}.self_attn.o_proj"),
        query_norm=tensors.get(f"{prefix}.self_attn.q_norm.weight"),
        key_norm=tensors.get(f"{prefix}.self_attn.k_norm.weight"),
        mlp_norm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        mlp=mlp,
        window=config.windows[number],
    )


def _build_mlp(config: ModelConfig, weights: BaseWeights, number: int) -> FeedForward | RoutedMlp:
    layer = f"model.layers.{number}"
    if config.experts is None or not config.is_routed(number):
        return make_feed_forward(weights.tensors, f"{layer}.mlp")
    return build_routed_mlp(weights.tensors, config.experts, layer=layer)


_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _PassTensors:
    """What all layers share in one pass: rotations [tokens, dim] and one mask per window."""

    cos: Tensor
    sin: Tensor
    views: dict[int | None, AttentionMask]


class Decoder:
    """A base model that can be run; its weights are shared by all generations."""

    def __init__(
        self, config: ModelConfig, weights: BaseWeights, *, stacked: "StackedLayers | None" = None
    ) -> None:
        """Group the weights by layer; ``stacked`` are the layers whose experts are in a stack."""
        self.config = config
        self.device = weights.device
        self.modules = frozenset(config.linear_shapes())
        self._weights = weights
        self._experts = None if stacked is None else stacked.experts
        self._embedding = weights.tensors[EMBEDDING_TENSOR]
        self._norm = weights.tensors["model.norm.weight"]
        self._head = build_output_layer(weights)
        self._layers = build_layers(config, weights, None if stacked is None else stacked.mlps)
        self._rotations = torch.empty(2, 0, config.head_dim, device=weights.device)
        self._times: LayerTimer | None = None

    @contextmanager
    def time_layers(self, times: LayerTimer) -> Iterator[None]:
        """Add the time of each part to ``times`` inside the ``with`` block."""
        self._times = times
        try:
            yield
        finally:
            self._times = None

    @torch.inference_mode()
    def prefill(
        self,
        ids: Sequence[int],
        cache: KVCache,
        deltas: TorchDeltas = EMPTY_DELTAS,
        *,
        soft_prompt: AnyArray | None = None,
        chunk: int = PREFILL_CHUNK,
        progress: Progress = ignore_progress,
        scores: RecordLogits | None = None,
    ) -> PrefillResult:
        """Read a prompt, ``chunk`` tokens at a time; ``progress`` counts them and may raise.

        The rows of ``soft_prompt``, float32 [virtual tokens, hidden], precede the first token of a
        cache and count like tokens. ``scores`` gets the logits of every position.

        Raises:
            UsageError: for a prompt without tokens.
            BudgetError: when the cache is too small; nothing was read then.
            IncompatibleError: for a token, a delta or a soft prompt that does not fit this base.
        """
        begin, started = cache.length, time.perf_counter()
        tokens = self._check_tokens(ids, deltas)
        before = self._load_soft_prompt(soft_prompt, cache)
        read = len(before) + len(tokens)
        cache.ensure_capacity(read)
        hidden = before
        try:
            for start in range(0, read, chunk):
                part = self._embed(before, tokens, start, start + chunk)
                first, whole = cache.length, scores is not None
                hidden = self._forward(part, cache, deltas, Phase.PROMPT, whole=whole)
                if scores is not None:
                    self._record_scores(hidden, deltas, first, scores)
                progress(len(part))
        except BaseException:
            cache.rewind(begin)
            raise
        return PrefillResult(
            self._compute_logits(hidden, deltas), read, self._measure_elapsed_ms(started)
        )

    @torch.inference_mode()
    def decode(
        self, token: int, cache: KVCache, deltas: TorchDeltas = EMPTY_DELTAS
    ) -> DecodeResult:
        """Read one more token.

        Raises:
            BudgetError: when the cache is full.
            IncompatibleError: for a token or a delta that this base does not have.
        """
        position, started = cache.length, time.perf_counter()
        tokens = self._check_tokens([token], deltas)
        cache.ensure_capacity(1)
        hidden = self._forward(self._embedding[tokens].float(), cache, deltas, Phase.DECODE)
        logits = self._compute_logits(hidden, deltas)
        return DecodeResult(logits, position, self._measure_elapsed_ms(started))

    def free_buffers(self) -> None:
        """Free the tensors shared by all steps of one generation (rotary tables).

        They count as buffers of its passes.
        """
        self._rotations = torch.empty(2, 0, self.config.head_dim, device=self.device)

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self._rotations.numel() == 0

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""
        if module == self._head.module:
            return self._head.weight
        if self._experts is not None and is_routed_expert(module):
            return self._experts.read_matrix(module)
        return self._weights.tensors[f"{module}.weight"]

    def _check_tokens(self, ids: Sequence[int], deltas: TorchDeltas) -> Tensor:
        check_modules(deltas, self.modules)
        return torch.from_numpy(check_tokens(ids, self.config.vocab_size)).to(self.device)

    def _load_soft_prompt(self, soft_prompt: AnyArray | None, cache: KVCache) -> Tensor:
        """Return the rows before the first token, [virtual tokens, hidden], often none."""
        width = self.config.hidden_size
        if soft_prompt is None:
            return torch.empty(0, width, device=self.device)
        check_soft_prompt(soft_prompt, width, length=cache.length)
        return torch.tensor(soft_prompt, device=self.device)

    def _embed(self, before: Tensor, tokens: Tensor, start: int, end: int) -> Tensor:
        """Return some rows of [soft prompt, embedded tokens]: [end - start, hidden], float32."""
        virtual = len(before)
        part = self._embedding[tokens[max(start - virtual, 0) : max(end - virtual, 0)]].float()
        return part if start >= virtual else torch.cat((before[start:end], part))

    def _forward(
        self, x: Tensor, cache: KVCache, deltas: TorchDeltas, phase: Phase, *, whole: bool = False
    ) -> Tensor:
        """Run all layers over one part of a sequence: [tokens, hidden] -> [tokens, hidden].

        For a prompt only the last row is returned unless ``whole`` is set: the last layer writes
        the keys and values of all tokens, but its output for the other rows is not needed.
        """
        tokens = len(x)
        step = asking = self._compute_pass_tensors(cache.length, tokens)
        for number, layer in enumerate(self._layers):
            if phase is Phase.PROMPT and number == len(self._layers) - 1 and not whole:
                asking = self._compute_pass_tensors(cache.length + tokens - 1, 1)
            with self._time_place(f"layers.{number}.attention"):
                made = self._attention(x, layer, number, step, asking, cache, deltas)
                x = x[-len(made) :] + made
            with self._time_place(f"layers.{number}.mlp"):
                x = x + layer.mlp(self._normalise(x, layer.mlp_norm), deltas)
        if self._experts is not None:
            self._experts.end_pass(tokens, phase=phase)
        cache.advance(tokens)
        return x

    def _attention(
        self,
        x: Tensor,
        layer: DecoderLayer,
        number: int,
        step: _PassTensors,
        query_rows: _PassTensors,
        cache: KVCache,
        deltas: TorchDeltas,
    ) -> Tensor:
        """Write keys and values of all rows; return the attention output of the ``query_rows``."""
        x = self._normalise(x, layer.input_norm)
        keys = self._split_heads(layer.key(x, deltas), layer.key_norm)
        values = self._split_heads(layer.value(x, deltas), None)
        keys, values = cache.write(number, apply_rope(keys, step.cos, step.sin), values)
        rows = x[-len(query_rows.cos) :]
        queries = self._split_heads(layer.query(rows, deltas), layer.query_norm)
        view = query_rows.views[layer.window]
        out = scaled_dot_product_attention(
            apply_rope(queries, query_rows.cos, query_rows.sin), keys, values, view
        )
        return layer.output(out, deltas)

    def _split_heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[tokens, heads * dim] -> [heads, tokens, dim], normed per head or over all heads."""
        if norm is not None:
            x = self._normalise(x.view(len(x), -1, len(norm)), norm)
        return x.view(len(x), -1, self.config.head_dim).transpose(0, 1)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _compute_logits(self, hidden: Tensor, deltas: TorchDeltas) -> AnyArray:
        """Compute the logits after the last token, in host memory: [tokens, hidden] -> [vocab]."""
        with self._time_place("head"):
            logits = self._head(self._normalise(hidden[-1:], self._norm), deltas)[0]
        return _to_array(logits)

    def _record_scores(
        self, hidden: Tensor, deltas: TorchDeltas, first: int, scores: RecordLogits
    ) -> None:
        """Pass on the logits of all rows [tokens, hidden] in parts; ``first`` is their position."""
        for begin in range(0, len(hidden), LOGIT_ROWS):
            rows = self._normalise(hidden[begin : begin + LOGIT_ROWS], self._norm)
            scores(first + begin, _to_array(self._head(rows, deltas)))

    def _time_place(self, place: str) -> AbstractContextManager[None]:
        return nullcontext() if self._times is None else self._measure(self._times, place)

    @contextmanager
    def _measure(self, times: LayerTimer, place: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        times.add(place, self._measure_elapsed_ms(started) / 1e3)

    def _compute_pass_tensors(self, start: int, tokens: int) -> _PassTensors:
        end = start + tokens
        if end > self._rotations.shape[1]:
            positions = round_up_positions(end)
            self._rotations = compute_rope_table(self.config.rope, positions, device=self.device)
        cos, sin = self._rotations[:, start:end]
        windows = set(self.config.windows)
        views = {w: make_attention_mask(start, tokens, w, device=self.device) for w in windows}
        return _PassTensors(cos, sin, views)

    def _measure_elapsed_ms(self, started: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) * 1e3


def _to_array(logits: Tensor) -> AnyArray:
    """Return logits as float32 in host memory."""
    return logits.float().cpu().numpy()


def estimate_pass_bytes(config: ModelConfig, capacity: int, *, chunk: int = PREFILL_CHUNK) -> int:
    """Estimate the maximum bytes of a pass besides weights and cache."""
    rows = min(chunk, capacity)
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    inner = 3 * config.intermediate_size
    if config.experts is not None:
        inner = max(inner, estimate_routed_floats(config.experts, hidden=config.hidden_size))
    per_token = 4 * config.hidden_size + inner + 3 * heads
    kinds = len({w for w in config.windows if w} | {None})
    masks = rows * capacity * (kinds + _FLOAT_BYTES)  # all as bool, one widened by attention
    rotations = 4 * round_up_positions(capacity) * config.head_dim  # the old table and the new one
    routers = 0 if config.experts is None else config.experts.count * config.hidden_size
    # one router is widened
    numbers = rows * per_token + rotations + 2 * config.vocab_size + routers
    return masks + _FLOAT_BYTES * numbers
