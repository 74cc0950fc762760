"""The torch decoder of one sequence: prompts on a CUDA device, and the oracle of all decoders.

It runs a `Transformer` with the deltas of a plan over the contiguous cache of a sequence. Prefill
and decode are separate calls with separate results. A decoder has no generation state: that is in
the `KVCache` of each call, so several generations may alternate. Activations are float32,
[tokens, features]; base weights are read-only.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
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
    make_token_input_error,
)
from expertctl.engine.moe.counters import Phase
from expertctl.engine.text.prompt import LOGIT_ROWS, RecordLogits
from expertctl.engine.torch.delta_net import DeltaNet, estimate_delta_net_floats
from expertctl.engine.torch.functional import (
    AttentionMask,
    RotationTables,
    ScoreChange,
    TorchDeltas,
    attend_changed,
    list_ropes,
    make_attention_mask,
    round_up_positions,
    scaled_dot_product_attention,
)
from expertctl.engine.torch.routed_mlp import estimate_routed_floats
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.transformer import Transformer
from expertctl.engine.torch.varied_layers import estimate_varied_floats
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.block_config import RopeKind
from expertctl.package.model_config import ModelConfig

if TYPE_CHECKING:
    from expertctl.engine.torch.stacked_mlp import StackedLayers


_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _PromptPass:
    """Tokens of one sequence: rotations [tokens, dim], and one mask per window of the last rows."""

    cache: KVCache
    plans: TorchDeltas
    rotations: RotationTables  # [tokens, dims]
    positions: Tensor
    query_rows: int
    views: Mapping[int | None, AttentionMask]
    embedded: Tensor | None
    """The embeddings of tokens that each layer reads, [tokens, layers, size]."""

    def rotate(self, x: Tensor, kind: RopeKind) -> Tensor:
        tables, rows = self.rotations, len(x)
        if rows != len(self.positions):
            tables = tables.slice(slice(-rows, None))
        return tables.rotate(x.transpose(0, 1), kind).transpose(0, 1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.write(layer, keys.transpose(0, 1), values.transpose(0, 1))

    def run_delta_net(self, layer: int, net: DeltaNet, made: Tensor) -> Tensor:
        out, states = net(made[None], self.cache.get_state(layer)[None])
        self.cache.write_state(layer, states[0])
        return out[0]

    def read(self, layer: int, *, heads: int, dims: int) -> tuple[Tensor, Tensor]:
        return self.cache.read(layer, len(self.positions), heads=heads, dims=dims)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        change: ScoreChange | None,
    ) -> Tensor:
        view, asking = self.views[window], queries.transpose(0, 1)
        if change is None:
            return scaled_dot_product_attention(asking, keys, values, view)
        return attend_changed(asking, keys, values, view, change)


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
        self.transformer = Transformer(
            config, weights, stacked=None if stacked is None else stacked.mlps
        )
        self._rotations: RotationTables | None = None
        self._positions = 0

    @contextmanager
    def time_layers(self, times: LayerTimer) -> Iterator[None]:
        """Add the time of each part to ``times`` inside the ``with`` block."""
        self.transformer.times = times
        try:
            yield
        finally:
            self.transformer.times = None

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
        begin, state, started = cache.length, cache.copy_state(), time.perf_counter()
        tokens = self._check_tokens(ids, deltas)
        before = self._load_soft_prompt(soft_prompt, cache)
        read = len(before) + len(tokens)
        cache.ensure_capacity(read)
        hidden = before
        try:
            for start in range(0, read, chunk):
                part = self._embed(before, tokens, start, start + chunk)
                first, whole = cache.length, scores is not None
                own = tokens[max(start - len(before), 0) :][: len(part)]
                hidden = self._forward(part, own, cache, deltas, Phase.PROMPT, whole=whole)
                if scores is not None:
                    self._record_scores(hidden, deltas, first, scores)
                progress(len(part))
        except BaseException:
            cache.rewind_to_state(begin, state)
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
        hidden = self._forward(self.transformer.embed(tokens), tokens, cache, deltas, Phase.DECODE)
        logits = self._compute_logits(hidden, deltas)
        return DecodeResult(logits, position, self._measure_elapsed_ms(started))

    def free_buffers(self) -> None:
        """Free the tensors shared by all steps of one generation (rotary tables).

        They count as buffers of its passes.
        """
        self._rotations, self._positions = None, 0

    @property
    def holds_only_weights(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self._rotations is None

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""
        if module == self.transformer.head.module:
            return self.transformer.head.weight
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
        if self.transformer.token_inputs is not None:
            raise make_token_input_error()
        return torch.tensor(soft_prompt, device=self.device)

    def _embed(self, before: Tensor, tokens: Tensor, start: int, end: int) -> Tensor:
        """Return some rows of [soft prompt, embedded tokens]: [end - start, hidden], float32."""
        virtual = len(before)
        part = self.transformer.embed(tokens[max(start - virtual, 0) : max(end - virtual, 0)])
        if start >= virtual:
            return part
        return torch.cat((self.transformer.scale_virtual_tokens(before[start:end]), part))

    def _forward(
        self,
        x: Tensor,
        ids: Tensor,
        cache: KVCache,
        deltas: TorchDeltas,
        phase: Phase,
        *,
        whole: bool = False,
    ) -> Tensor:
        """Run all layers over one part of a sequence: [tokens, hidden] -> [tokens, hidden].

        For a prompt only the last row is returned unless ``whole`` is set: the last layer writes
        the keys and values of all tokens, but its output for the other rows is not needed.
        """
        tokens, model = len(x), self.transformer
        embedded = model.embed_for_layers(ids, x, deltas)
        step = self._start_pass(cache, deltas, tokens, embedded)
        x, has_other_blocks = model.add_positions(x, step), not self.config.block.is_sequential
        for number, layer in enumerate(model.layers):
            if phase is Phase.PROMPT and number == len(model.layers) - 1 and not whole:
                step = self._start_pass(cache, deltas, tokens, embedded, query_rows=1)
            if has_other_blocks:
                x = model.run_block(x, number, step)
                continue
            x = model.run_attention(x, number, step)
            with model.time_place(f"layers.{number}.mlp"):
                x = x + layer.mlp(model.norm_for_mlp(x, number), deltas)
        if self._experts is not None:
            self._experts.end_pass(tokens, phase=phase)
        cache.advance(tokens)
        return x

    def _compute_logits(self, hidden: Tensor, deltas: TorchDeltas) -> AnyArray:
        """Compute the logits after the last token, in host memory: [tokens, hidden] -> [vocab]."""
        with self.transformer.time_place("head"):
            logits = self.transformer.compute_logits(hidden[-1:], deltas)[0]
        return _to_array(logits)

    def _record_scores(
        self, hidden: Tensor, deltas: TorchDeltas, first: int, scores: RecordLogits
    ) -> None:
        """Pass on the logits of all rows [tokens, hidden] in parts; ``first`` is their position."""
        for begin in range(0, len(hidden), LOGIT_ROWS):
            rows = hidden[begin : begin + LOGIT_ROWS]
            scores(first + begin, _to_array(self.transformer.compute_logits(rows, deltas)))

    def _start_pass(
        self,
        cache: KVCache,
        deltas: TorchDeltas,
        tokens: int,
        embedded: Tensor | None = None,
        *,
        query_rows: int | None = None,
    ) -> _PromptPass:
        """Return a pass over the next tokens; only the last ``query_rows`` attend, None: all."""
        asking, start = query_rows or tokens, cache.length
        end = start + tokens
        if self._rotations is None or end > self._positions:
            self._rotations, self._positions = None, round_up_positions(end)
            self._rotations = RotationTables.compute(
                self.config, self._positions, device=self.device
            )
        rotations = self._rotations.slice(slice(start, end))
        positions = torch.arange(start, end, device=self.device)
        views = {
            window: make_attention_mask(end - asking, asking, window, device=self.device)
            for window in set(self.config.windows)
        }
        return _PromptPass(cache, deltas, rotations, positions, asking, views, embedded)

    def _measure_elapsed_ms(self, started: float) -> float:
        return (self.transformer.read_clock() - started) * 1e3


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
    # the old table and the new one, of each kind of layer
    rotations = 4 * len(list_ropes(config)) * round_up_positions(capacity) * config.head_dim
    if config.unlike_llama:  # more copies of hidden states and heads, capped scores and weights
        per_token += 6 * config.hidden_size + 2 * config.intermediate_size + 2 * heads
        per_token += 3 * config.heads * capacity if config.block.changes_scores else 0
    routers = 0 if config.experts is None else config.experts.count * config.hidden_size
    if config.delta_net is not None:  # and the state that a failed pass restores
        routers += estimate_delta_net_floats(config.delta_net, tokens=rows)
        routers += config.state_bytes // _FLOAT_BYTES
    # one router is widened
    if config.block.varied is not None:
        per_token += estimate_varied_floats(config)
    numbers = rows * per_token + rotations + 2 * config.vocab_size + routers
    return masks + _FLOAT_BYTES * numbers
