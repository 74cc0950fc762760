"""`StaticKVCache`: keys and values of several texts at addresses that never change, for captured steps.

Layout ``[layer, row, kv_head, capacity + 1, head_dim]``: a text is a row, and the rows of a batch
are the first ones, so nothing is gathered. Where a row of a batch has no text, its last position is
written. A row is cleared for each text: attention over a length bucket multiplies by zero what no
token has written, which makes zero of finite numbers only, and a text may leave NaN.

One more token of several texts, as a function over tensors that stay where they are.

Nothing in it asks the device for a number or depends on one that only the device knows, so a CUDA
graph may record it; on a processor it is called as it is. What changes from step to step, tokens,
positions and plan slots, is written into `StepRoom.inputs` before, and the scores are in
`StepRoom.logits` after. Activations are float32, [rows, features].
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.kv.sequence_cache import KVCache, KVCacheBase
from expertctl.engine.model.decoder import (
    DecoderLayer,
    LayerTimer,
    build_layers,
    build_output_layer,
)
from expertctl.engine.model.functional import FeedForward, Linear, apply_rope, compute_rope_table
from expertctl.engine.model.lora_slots import LoRASlots, apply_stacked_lora
from expertctl.engine.model.weights import BaseWeights
from expertctl.engine.moe.routed_mlp import SharedExpert, StackedLayers, StackedMlp, merge_rows
from expertctl.package.model_config import EMBEDDING_TENSOR, ModelConfig

SCRATCH_ROWS = 1
"""Positions of a row beyond its capacity."""


class StaticKVCache:
    """Room for ``rows`` texts of ``capacity`` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the memory, once."""
        shape = (config.layers, rows, config.kv_heads, capacity + SCRATCH_ROWS, config.head_dim)
        self.rows, self.capacity = rows, capacity
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, filled or not."""
        return self.keys.nbytes + self.values.nbytes

    def get_row(self, number: int) -> "StaticKVRow":
        """Return the room of one text, cleared; each has one owner."""
        return StaticKVRow(self, number)


class StaticKVRow(KVCache):
    """The room of one text in an arena."""

    def __init__(self, arena: StaticKVCache, number: int) -> None:
        """Begin without a token, in memory that is there; clear it."""
        KVCacheBase.__init__(self, arena.capacity)
        self.arena, self.number = arena, number
        self._keys = arena.keys[:, number]  # [layer, kv_head, capacity + 1, head_dim]
        self._values = arena.values[:, number]
        self._keys.zero_()
        self._values.zero_()


def estimate_static_kv_bytes(
    config: ModelConfig, *, capacity: int, dtype: torch.dtype, rows: int = 1
) -> int:
    """Return what an arena takes."""
    return rows * config.count_kv_bytes(capacity + SCRATCH_ROWS, itemsize=dtype.itemsize)


_INPUTS = 3
_INT_BYTES, _FLOAT_BYTES = 8, 4


class StaticInputs:
    """What steps over one arena read and write, for up to ``rows`` texts."""

    def __init__(self, config: ModelConfig, arena: StaticKVCache, *, rows: int) -> None:
        """Take the memory, once."""
        device, positions = arena.keys.device, arena.capacity + SCRATCH_ROWS
        pinned = device.type == "cuda"
        self.arena, self.rows = arena, rows
        self.host = torch.zeros(_INPUTS, rows, dtype=torch.long, pin_memory=pinned)
        self.inputs = torch.zeros(_INPUTS, rows, dtype=torch.long, device=device)
        self.places = torch.arange(positions, device=device)
        self.rotations = compute_rope_table(config.rope, positions, device=device)
        self.logits = torch.empty(rows, config.vocab_size, device=device)
        self.asked = torch.zeros(
            _compute_routed_shape(config, rows), dtype=torch.long, device=device
        )
        """Which routed experts each row chose, [routed layers, rows, used]; not for stages."""
        self.scores = torch.empty_like(self.logits, device="cpu", pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.inputs, self.places, self.rotations, self.logits, self.asked)
        return sum(part.nbytes for part in parts)

    def clear_rows(self) -> None:
        """Make every row one without a text: it writes to a position that is never read."""
        self.host.zero_()
        self.host[1].fill_(self.arena.capacity)

    def set_row(self, row: int, *, token: int, position: int, slot: int) -> None:
        """Say what is read in a row."""
        self.host[0, row], self.host[1, row], self.host[2, row] = token, position, slot

    def copy_to_device(self) -> None:
        """Hand over to the device what was set."""
        self.inputs.copy_(self.host, non_blocking=True)

    def wait_for_scores(self, rows: int) -> Tensor:
        """Wait for a step; return its scores, [rows, vocab], which are there until the next."""
        self.scores[:rows].copy_(self.logits[:rows], non_blocking=True)
        if self.logits.is_cuda:
            torch.cuda.current_stream(self.logits.device).synchronize()
        return self.scores[:rows]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlans:
    """What all linear layers share in one step: which plan each row has."""

    lora_slots: LoRASlots | None
    slots: Tensor  # int64 [rows]
    foreign: Mapping[int, Tensor]  # see `LoRASlots`


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors(StepPlans):
    """What all layers share in one step."""

    arena: StaticKVCache
    length: int
    cos: Tensor  # [rows, 1, head_dim]
    sin: Tensor
    writes: Tensor  # where each row's keys and values go, int64 [rows, kv_heads, 1, head_dim]
    visible: Mapping[int | None, Tensor]  # by window, bool [rows, 1, 1, length]
    routed_experts: Tensor  # see `StaticInputs`


class GraphedStep:
    """The step of one base."""

    def __init__(
        self, config: ModelConfig, weights: BaseWeights, *, stacked: StackedLayers | None = None
    ) -> None:
        """Sort the weights into layers; ``stacked`` are those whose experts are in a stack."""
        self.times: LayerTimer | None = None
        """Gets the time of each part while steps are timed; nothing is captured then."""
        self._config, self._device = config, weights.device
        self._embedding = weights.tensors[EMBEDDING_TENSOR]
        self._norm = weights.tensors["model.norm.weight"]
        self._head = build_output_layer(weights)
        self._layers = build_layers(config, weights, None if stacked is None else stacked.mlps)
        self._asked = None if stacked is None else stacked.experts.device_counts

    @torch.inference_mode()
    def __call__(
        self, inputs: StaticInputs, *, rows: int, length: int, plans: LoRASlots | None
    ) -> None:
        """Read a token in each of the first rows, which see the first ``length`` positions."""
        shared = self.build_step_tensors(inputs, rows=rows, length=length, plans=plans)
        x = self.run_layers(self.embed(inputs, rows), range(self.layer_count), shared)
        self.score(x, inputs, shared)

    def count_routed(self, inputs: StaticInputs, texts: Sequence[int]) -> None:
        """Count which experts the rows of texts chose in a step; after it, in no graph."""
        if self._asked is not None:
            chosen = [inputs.asked[:, place] for place in texts]
            self._asked.count_step(torch.stack(chosen, dim=1))  # by an index the host would wait

    def fetch_routed_counts(self) -> None:
        """Fetch what was counted."""
        if self._asked is not None:
            self._asked.fetch_counts()

    @property
    def layer_count(self) -> int:
        """How many there are."""
        return len(self._layers)

    def embed(self, inputs: StaticInputs, rows: int) -> Tensor:
        """Return what the first layer reads, [rows, hidden]."""
        return self._embedding.index_select(0, inputs.inputs[0, :rows]).float()

    def run_layers(self, x: Tensor, numbers: Iterable[int], shared: StepTensors) -> Tensor:
        """Read some layers whole: [rows, hidden] -> [rows, hidden]."""
        for number in numbers:
            x = self.run_attention(x, number, shared)
            with self.time_place(f"layers.{number}.mlp"):
                x = self._run_mlp(x, number, shared)
        return x

    def run_attention(self, x: Tensor, number: int, shared: StepTensors) -> Tensor:
        """Read a layer up to what follows attention."""
        with self.time_place(f"layers.{number}.attention"):
            return x + self._attention(x, self._layers[number], number, shared.arena, shared)

    def norm_for_mlp(self, x: Tensor, number: int) -> Tensor:
        """Return the normed input of what follows attention in a layer."""
        return self._normalise(x, self._layers[number].mlp_norm)

    def apply_shared(self, x: Tensor, expert: SharedExpert, shared: StepPlans) -> Tensor:
        """Apply the shared expert, which reads every token, with the plan of each row."""
        out = _apply_gated_mlp(x, expert.mlp, shared)
        return out if expert.gate is None else out * _apply_linear(x, expert.gate, shared).sigmoid()

    def score(self, x: Tensor, inputs: StaticInputs, shared: StepTensors) -> None:
        """Write the scores of what the last layer left."""
        with self.time_place("head"):
            logits = _apply_linear(self._normalise(x, self._norm), self._head, shared)
            inputs.logits[: len(x)].copy_(logits)

    def build_step_plans(
        self, inputs: StaticInputs, *, rows: int, plans: LoRASlots | None
    ) -> StepPlans:
        """Return which plan each of the first rows has."""
        slots = inputs.inputs[2, :rows]
        return StepPlans(plans, slots, {} if plans is None else plans.mask_foreign_columns(slots))

    def build_step_tensors(
        self, inputs: StaticInputs, *, rows: int, length: int, plans: LoRASlots | None
    ) -> StepTensors:
        """Return what all layers share, by what was set in a room."""
        _, positions, slots = inputs.inputs[:, :rows]
        cos, sin = inputs.rotations.index_select(1, positions)[:, :, None]
        shape = (rows, self._config.kv_heads, 1, self._config.head_dim)
        keys = inputs.places[:length]
        return StepTensors(
            arena=inputs.arena,
            length=length,
            cos=cos,
            sin=sin,
            writes=positions.view(rows, 1, 1, 1).expand(shape),
            visible={w: _compute_visibility(keys, positions, w) for w in set(self._config.windows)},
            routed_experts=inputs.asked,
            lora_slots=plans,
            slots=slots,
            foreign={} if plans is None else plans.mask_foreign_columns(slots),
        )

    def _attention(
        self, x: Tensor, layer: DecoderLayer, number: int, arena: StaticKVCache, shared: StepTensors
    ) -> Tensor:
        x = self._normalise(x, layer.input_norm)
        queries = self._split_heads(_apply_linear(x, layer.query, shared), layer.query_norm)
        keys = self._split_heads(_apply_linear(x, layer.key, shared), layer.key_norm)
        values = self._split_heads(_apply_linear(x, layer.value, shared), None)
        all_keys, all_values = arena.keys[number, : len(x)], arena.values[number, : len(x)]
        keys = apply_rope(keys, shared.cos, shared.sin)[:, :, None]  # [rows, kv_heads, 1, head_dim]
        all_keys.scatter_(2, shared.writes, keys.to(all_keys.dtype))
        all_values.scatter_(2, shared.writes, values[:, :, None].to(all_values.dtype))
        queries = apply_rope(queries, shared.cos, shared.sin).to(all_keys.dtype)
        out = F.scaled_dot_product_attention(  # heads that share keys are tokens of one head
            queries.view(len(x), self._config.kv_heads, -1, self._config.head_dim),
            all_keys[:, :, : shared.length],
            all_values[:, :, : shared.length],
            attn_mask=shared.visible[layer.window],
        )
        return _apply_linear(out.flatten(1).float(), layer.output, shared)

    def _run_mlp(self, x: Tensor, number: int, shared: StepTensors) -> Tensor:
        normed, mlp = self.norm_for_mlp(x, number), self._layers[number].mlp
        if isinstance(mlp, FeedForward):
            return x + _apply_gated_mlp(normed, mlp, shared)
        assert isinstance(mlp, StackedMlp), "experts that are routed are in a stack"
        routed = mlp.route(normed)
        shared.routed_experts[mlp.layer_index, : len(x)].copy_(routed.selected)
        rows = mlp.experts.look_up(mlp.layer_index, routed.selected)
        made = mlp.experts.stack.apply(normed, rows)
        beside = x if mlp.shared is None else x + self.apply_shared(normed, mlp.shared, shared)
        return beside + merge_rows(made, mlp.experts.mask_weights(routed, rows))

    def _split_heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[rows, heads * dim] -> [rows, heads, dim], normed head by head or all together."""
        if norm is not None:
            x = self._normalise(x.view(len(x), -1, len(norm)), norm)
        return x.view(len(x), -1, self._config.head_dim)

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self._config.norm_eps
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, weight.shape, None, eps) * weight  # else seven kernels, not two

    @contextmanager
    def time_place(self, place: str) -> Iterator[None]:
        """Add the time of a part, while steps are timed."""
        if self.times is None:
            yield
            return
        started = self._now()
        yield
        self.times.add(place, self._now() - started)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def estimate_input_bytes(config: ModelConfig, *, capacity: int, rows: int) -> int:
    """Return what a `StaticInputs` takes on the device."""
    positions = capacity + SCRATCH_ROWS
    numbers = 2 * positions * config.head_dim + rows * config.vocab_size
    asked = math.prod(_compute_routed_shape(config, rows))
    return _INT_BYTES * (_INPUTS * rows + positions + asked) + _FLOAT_BYTES * numbers


def estimate_step_bytes(
    config: ModelConfig, *, capacity: int, rows: int, columns: int = 0, experts: int = 0
) -> int:
    """Return what one step makes and forgets, at most about, captured or not.

    ``columns`` is how many stand between A and B of all slots, ``experts`` what a row makes in a
    layer of routed experts.
    """
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    each = 8 * config.hidden_size + 5 * config.intermediate_size + 5 * heads + 3 * columns
    scores = (config.heads + len(set(config.windows))) * capacity
    numbers = each + 2 * scores + 2 * config.vocab_size
    return rows * (_FLOAT_BYTES * numbers + experts)


def _compute_routed_shape(config: ModelConfig, rows: int) -> tuple[int, int, int]:
    routed = config.experts
    return (0, rows, 0) if routed is None else (len(routed.layers), rows, routed.used)


def _apply_gated_mlp(x: Tensor, mlp: FeedForward, shared: StepPlans) -> Tensor:
    """Apply a gated network with the plan of each row: [rows, hidden] -> [rows, hidden]."""
    gated = F.silu(_apply_linear(x, mlp.gate, shared)) * _apply_linear(x, mlp.up, shared)
    return _apply_linear(gated, mlp.down, shared)


def _apply_linear(x: Tensor, layer: Linear, shared: StepPlans) -> Tensor:
    """Apply a linear layer with the plan of each row: [rows, in] -> [rows, out]."""
    stack = None if shared.lora_slots is None else shared.lora_slots.stacks.get(layer.module)
    return apply_stacked_lora(x, layer, stack, shared.slots, shared.foreign)


def _compute_visibility(keys: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Return which keys a row at a position sees: bool [rows, 1, 1, keys]."""
    here = positions[:, None]
    seen = keys <= here
    if window is not None:
        seen = seen & (keys > here - window)
    return seen[:, None, None]
