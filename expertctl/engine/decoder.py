"""The decoder in torch: dense bases and those of routed experts, with a plan's deltas.

Prefill and decode are separate calls with separate results. A decoder has no state of a generation:
that is in the `KVCache` of each call, so several generations may take turns. Activations are
float32, [tokens, features]; base weights are only read.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.attention import View, attend, view_of
from expertctl.engine.base_weights import BaseWeights, is_routed_expert
from expertctl.engine.decoder_inputs import check_modules, check_soft_prompt, checked_tokens
from expertctl.engine.kv_cache import KVCache
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.layers import Layer, head_of, layers_of
from expertctl.engine.linear import NO_DELTAS, Deltas
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.routed_mlp import routed_numbers
from expertctl.engine.prompt_scores import SCORED_ROWS, ScoreRows
from expertctl.engine.rope import rotate, rotation_table, table_positions
from expertctl.package.model_config import EMBEDDING, ModelConfig

if TYPE_CHECKING:
    from expertctl.engine.moe.stacked_mlp import StackedLayers

PREFILL_CHUNK = 512
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class PrefillResult:
    """After the prompt: the scores of the first new token, float32 [vocab]."""

    logits: Tensor
    tokens: int
    ms: float


@dataclass(frozen=True, slots=True, eq=False)
class DecodeResult:
    """After one token at ``position``: the scores of the next, float32 [vocab]."""

    logits: Tensor
    position: int
    ms: float


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What all layers share in one pass: rotations [tokens, dim] and a view per window."""

    cos: Tensor
    sin: Tensor
    views: dict[int | None, View]


class Decoder:
    """A base model that can be run; its weights are shared by all generations."""

    def __init__(
        self, config: ModelConfig, weights: BaseWeights, *, stacked: "StackedLayers | None" = None
    ) -> None:
        """Sort the weights into layers; ``stacked`` are those whose experts are in a stack."""
        self.config = config
        self.device = weights.device
        self.modules = frozenset(config.linear_shapes())
        self._weights = weights
        self._experts = None if stacked is None else stacked.experts
        self._embedding = weights.tensors[EMBEDDING]
        self._norm = weights.tensors["model.norm.weight"]
        self._head = head_of(weights)
        self._layers = layers_of(config, weights, None if stacked is None else stacked.mlps)
        self._rotations = torch.empty(2, 0, config.head_dim, device=weights.device)
        self._times: LayerTimes | None = None

    @contextmanager
    def timed(self, times: LayerTimes) -> Iterator[None]:
        """Add to ``times`` how long each part of what is read meanwhile takes."""
        self._times = times
        try:
            yield
        finally:
            self._times = None

    @torch.inference_mode()
    def prefill(
        self,
        ids: Sequence[int] | Tensor,
        cache: KVCache,
        deltas: Deltas = NO_DELTAS,
        *,
        soft_prompt: Tensor | None = None,
        chunk: int = PREFILL_CHUNK,
        progress: Progress = no_progress,
        scores: ScoreRows | None = None,
    ) -> PrefillResult:
        """Read a prompt, ``chunk`` tokens at a time; ``progress`` counts them and may raise.

        The rows of ``soft_prompt``, float32 [virtual tokens, hidden], stand before the first token
        of a cache and count like tokens. ``scores`` gets the logits of every position.

        Raises:
            UsageError: for a prompt without tokens.
            BudgetError: when the cache is too small; nothing was read then.
            IncompatibleError: for a token, a delta or a soft prompt that does not fit this base.
        """
        begin, started = cache.length, time.perf_counter()
        tokens = self._checked(ids, deltas)
        before = self._checked_soft(soft_prompt, cache)
        read = len(before) + len(tokens)
        cache.require(read)
        hidden = before
        try:
            for start in range(0, read, chunk):
                part = self._embedded(before, tokens, start, start + chunk)
                first, whole = cache.length, scores is not None
                hidden = self._forward(part, cache, deltas, Phase.PROMPT, whole=whole)
                if scores is not None:
                    self._score(hidden, deltas, first, scores)
                progress(len(part))
        except BaseException:
            cache.rewind(begin)
            raise
        return PrefillResult(self._logits(hidden, deltas), read, self._ms_since(started))

    @torch.inference_mode()
    def decode(self, token: int, cache: KVCache, deltas: Deltas = NO_DELTAS) -> DecodeResult:
        """Read one more token.

        Raises:
            BudgetError: when the cache is full.
            IncompatibleError: for a token or a delta that this base does not have.
        """
        position, started = cache.length, time.perf_counter()
        tokens = self._checked([token], deltas)
        cache.require(1)
        hidden = self._forward(self._embedding[tokens].float(), cache, deltas, Phase.DECODE)
        logits = self._logits(hidden, deltas)
        return DecodeResult(logits, position, self._ms_since(started))

    def rest(self) -> None:
        """Let go of what the passes of a generation share; it was part of their buffers."""
        self._rotations = torch.empty(2, 0, self.config.head_dim, device=self.device)

    @property
    def is_at_rest(self) -> bool:
        """Whether it holds nothing but its weights."""
        return self._rotations.numel() == 0

    def matrix(self, module: str) -> Tensor:
        """Return the weights [out, in] of a linear layer, by its module name."""
        if module == self._head.module:
            return self._head.weight
        if self._experts is not None and is_routed_expert(module):
            return self._experts.matrix(module)
        return self._weights.tensors[f"{module}.weight"]

    def buffer_bytes(self, capacity: int, *, chunk: int = PREFILL_CHUNK) -> int:
        """Return how many bytes a pass needs besides weights and cache, at most about."""
        return pass_bytes(self.config, capacity, chunk=chunk)

    def _checked(self, ids: Sequence[int] | Tensor, deltas: Deltas) -> Tensor:
        check_modules(deltas, self.modules)
        return checked_tokens(ids, self.config.vocab_size, device=self.device)

    def _checked_soft(self, soft_prompt: Tensor | None, cache: KVCache) -> Tensor:
        """Return the rows before the first token, [virtual tokens, hidden], often none."""
        width = self.config.hidden_size
        if soft_prompt is None:
            return torch.empty(0, width, device=self.device)
        check_soft_prompt(soft_prompt, width, length=cache.length)
        return soft_prompt

    def _embedded(self, before: Tensor, tokens: Tensor, start: int, end: int) -> Tensor:
        """Return some rows of [soft prompt, embedded tokens]: [end - start, hidden], float32."""
        virtual = len(before)
        part = self._embedding[tokens[max(start - virtual, 0) : max(end - virtual, 0)]].float()
        return part if start >= virtual else torch.cat((before[start:end], part))

    def _forward(
        self, x: Tensor, cache: KVCache, deltas: Deltas, phase: Phase, *, whole: bool = False
    ) -> Tensor:
        """Run all layers over one part of a text: [tokens, hidden] -> [tokens, hidden].

        Of a prompt only the last row comes out unless the ``whole`` is wanted: the last layer
        writes the keys and values of all tokens, but what it would make of the others is not read.
        """
        tokens = len(x)
        step = asking = self._step(cache.length, tokens)
        for number, layer in enumerate(self._layers):
            if phase is Phase.PROMPT and number == len(self._layers) - 1 and not whole:
                asking = self._step(cache.length + tokens - 1, 1)
            with self._spent(f"layers.{number}.attention"):
                made = self._attention(x, layer, number, step, asking, cache, deltas)
                x = x[-len(made) :] + made
            with self._spent(f"layers.{number}.mlp"):
                x = x + layer.mlp(self._normed(x, layer.mlp_norm), deltas)
        if self._experts is not None:
            self._experts.passed(tokens, phase=phase)
        cache.advance(tokens)
        return x

    def _attention(
        self,
        x: Tensor,
        layer: Layer,
        number: int,
        step: _Step,
        asking: _Step,
        cache: KVCache,
        deltas: Deltas,
    ) -> Tensor:
        """Write keys and values of all rows; return the attention of the last ones, ``asking``."""
        x = self._normed(x, layer.input_norm)
        keys = self._heads(layer.key(x, deltas), layer.key_norm)
        values = self._heads(layer.value(x, deltas), None)
        keys, values = cache.write(number, rotate(keys, step.cos, step.sin), values)
        queries = self._heads(layer.query(x[-len(asking.cos) :], deltas), layer.query_norm)
        view = asking.views[layer.window]
        out = attend(rotate(queries, asking.cos, asking.sin), keys, values, view)
        return layer.output(out, deltas)

    def _heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[tokens, heads * dim] -> [heads, tokens, dim], normed head by head or all together."""
        if norm is not None:
            x = self._normed(x.view(len(x), -1, len(norm)), norm)
        return x.view(len(x), -1, self.config.head_dim).transpose(0, 1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _logits(self, hidden: Tensor, deltas: Deltas) -> Tensor:
        """Score the token that follows the last one: [tokens, hidden] -> [vocab]."""
        with self._spent("head"):
            return self._head(self._normed(hidden[-1:], self._norm), deltas)[0]

    def _score(self, hidden: Tensor, deltas: Deltas, first: int, scores: ScoreRows) -> None:
        """Give the logits of all rows [tokens, hidden], a few at a time, ``first`` the position."""
        for begin in range(0, len(hidden), SCORED_ROWS):
            rows = self._normed(hidden[begin : begin + SCORED_ROWS], self._norm)
            scores(first + begin, self._head(rows, deltas).float().cpu().numpy())

    def _spent(self, place: str) -> AbstractContextManager[None]:
        return nullcontext() if self._times is None else self._measured(self._times, place)

    @contextmanager
    def _measured(self, times: LayerTimes, place: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        times.add(place, self._ms_since(started) / 1e3)

    def _step(self, start: int, tokens: int) -> _Step:
        end = start + tokens
        if end > self._rotations.shape[1]:
            positions = table_positions(end)
            self._rotations = rotation_table(self.config.rope, positions, device=self.device)
        cos, sin = self._rotations[:, start:end]
        windows = set(self.config.windows)
        views = {w: view_of(start, tokens, w, device=self.device) for w in windows}
        return _Step(cos, sin, views)

    def _ms_since(self, started: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - started) * 1e3


def pass_bytes(config: ModelConfig, capacity: int, *, chunk: int = PREFILL_CHUNK) -> int:
    """Return how many bytes a pass needs besides weights and cache, at most about."""
    rows = min(chunk, capacity)
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    inner = 3 * config.intermediate_size
    if config.experts is not None:
        inner = max(inner, routed_numbers(config.experts, hidden=config.hidden_size))
    per_token = 4 * config.hidden_size + inner + 3 * heads
    kinds = len({w for w in config.windows if w} | {None})
    masks = rows * capacity * (kinds + _FLOAT_BYTES)  # all as bool, one widened by attention
    rotations = 4 * table_positions(capacity) * config.head_dim  # the old one and the new
    routers = 0 if config.experts is None else config.experts.count * config.hidden_size
    numbers = (
        rows * per_token + rotations + 2 * config.vocab_size + routers
    )  # one router is widened
    return masks + _FLOAT_BYTES * numbers
