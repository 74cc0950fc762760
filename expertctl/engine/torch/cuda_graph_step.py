"""One decode step of several sequences over tensors at fixed addresses, for CUDA graphs.

Nothing in the step reads a number from the device or depends on one, so a CUDA graph can record it;
on a processor it is called directly. What changes between steps (tokens, positions, plan slots) is
written into `StaticInputs.inputs` before, and the logits are in `StaticInputs.logits` after.
Activations are float32, [rows, features].

`StaticKVCache` has the layout ``[layer, row, kv_head, capacity + 1, head_dim]``: a sequence is a
row, and the rows of a batch are the first ones, so nothing is gathered. An unused row writes to its
last position. A row is cleared for each sequence: attention over a length bucket multiplies
unwritten positions by zero, which gives zero only for finite numbers, and a previous sequence may
leave NaN.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import ref

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.kv.kv_cache import KVCacheBase
from expertctl.engine.torch.delta_net import DeltaNet, estimate_delta_net_floats
from expertctl.engine.torch.functional import (
    FeedForward,
    Linear,
    RotationTables,
    ScoreChange,
    changed_attention,
    list_ropes,
)
from expertctl.engine.torch.lora_slots import LoRASlots, apply_stacked_lora
from expertctl.engine.torch.sequence_cache import KVCache, make_states
from expertctl.engine.torch.stacked_experts import DeviceExpertCounts
from expertctl.engine.torch.stacked_mlp import StackedMlp, merge_rows
from expertctl.engine.torch.transformer import Transformer
from expertctl.engine.torch.varied_layers import estimate_varied_floats
from expertctl.package.block_config import RopeKind
from expertctl.package.model_config import ModelConfig

SCRATCH_ROWS = 1
"""Positions of a row beyond its capacity."""


class StaticKVCache:
    """Keys and values of ``rows`` sequences with ``capacity`` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the memory, once and as one block, so a failure leaves nothing."""
        heads = (config.kv_heads, capacity + SCRATCH_ROWS, config.head_dim)
        shape = (len(config.attention_layers), rows, *heads)
        self.rows, self.capacity = rows, capacity
        both = torch.empty(2, *shape, dtype=dtype, device=device)
        self.keys, self.values = both[0], both[1]
        self.states = make_states(config, rows, device=device)
        """The states of layers without keys and values, and those that a pass makes of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, used or not."""
        return self.keys.nbytes + self.values.nbytes + self.states.nbytes

    def get_row(self, number: int) -> "StaticKVRow":
        """Return the row of one sequence, cleared; each has one owner."""
        return StaticKVRow(self, number)


class StaticKVRow(KVCache):
    """The row of one sequence in a static cache."""

    def __init__(self, arena: StaticKVCache, number: int) -> None:
        """Start without tokens in existing memory, which is cleared."""
        KVCacheBase.__init__(self, arena.capacity)
        self.arena, self.number = arena, number
        self._keys = arena.keys[:, number]  # [layer, kv_head, capacity + 1, head_dim]
        self._values = arena.values[:, number]
        self._keys.zero_()
        self._values.zero_()
        self._use_states(arena.states[:, :, number])


def estimate_static_kv_bytes(
    config: ModelConfig, *, capacity: int, dtype: torch.dtype, rows: int = 1
) -> int:
    """Return the bytes of a static cache."""
    kept = config.count_kv_bytes(capacity + SCRATCH_ROWS, itemsize=dtype.itemsize)
    return rows * (kept + 2 * config.state_bytes)


_INPUTS = 3
_INT_BYTES, _FLOAT_BYTES = 8, 4


class StaticInputs:
    """Inputs and outputs of steps over one static cache, for up to ``rows`` sequences.

    They do not keep the static cache: its owner frees it, even between two steps.
    """

    def __init__(self, config: ModelConfig, arena: StaticKVCache, *, rows: int) -> None:
        """Allocate the memory, once."""
        device, positions = arena.keys.device, arena.capacity + SCRATCH_ROWS
        pinned = device.type == "cuda"
        self._arena, self._capacity, self.rows = ref(arena), arena.capacity, rows
        self.host = torch.zeros(_INPUTS, rows, dtype=torch.long, pin_memory=pinned)
        self.inputs = torch.zeros(_INPUTS, rows, dtype=torch.long, device=device)
        self.places = torch.arange(positions, device=device)
        self.rotations = RotationTables.compute(config, positions, device=device)
        self.logits = torch.empty(rows, config.vocab_size, device=device)
        self.asked = torch.zeros(
            _compute_routed_shape(config, rows), dtype=torch.long, device=device
        )
        """Routed experts chosen by each row, [routed layers, rows, used]; unused by piecewise
        steps."""
        self.scores = torch.empty_like(self.logits, device="cpu", pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.inputs, self.places, self.rotations, self.logits, self.asked)
        return sum(part.nbytes for part in parts)

    @property
    def arena(self) -> StaticKVCache | None:
        """The static cache; None once it was freed."""
        return self._arena()

    def clear_rows(self) -> None:
        """Mark every row as unused: it writes to a position that is never read."""
        self.host.zero_()
        self.host[1].fill_(self._capacity)

    def set_row(self, row: int, *, token: int, position: int, slot: int) -> None:
        """Set the input of a row."""
        self.host[0, row], self.host[1, row], self.host[2, row] = token, position, slot

    def copy_to_device(self) -> None:
        """Copy the inputs to the device."""
        self.inputs.copy_(self.host, non_blocking=True)

    def wait_for_scores(self, rows: int) -> Tensor:
        """Wait for a step; return its logits, [rows, vocab], valid until the next step."""
        self.scores[:rows].copy_(self.logits[:rows], non_blocking=True)
        if self.logits.is_cuda:
            torch.cuda.current_stream(self.logits.device).synchronize()
        return self.scores[:rows]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlans:
    """The plan of each row, shared by all linear layers of a step."""

    lora_slots: LoRASlots | None
    slots: Tensor  # int64 [rows]
    foreign: Mapping[int, Tensor]  # see `LoRASlots`

    @classmethod
    def build(cls, inputs: StaticInputs, *, rows: int, plans: LoRASlots | None) -> "StepPlans":
        """Return the plans of the first rows, from the current inputs."""
        slots = inputs.inputs[2, :rows]
        return cls(plans, slots, {} if plans is None else plans.mask_foreign_columns(slots))

    def apply_linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Apply a linear layer with the plan of each row: [rows, in] -> [rows, out]."""
        stack = None if self.lora_slots is None else self.lora_slots.stacks.get(layer.module)
        return apply_stacked_lora(x, layer, stack, self.slots, self.foreign)


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """What all layers of a step share."""

    arena: StaticKVCache
    plans: StepPlans
    length: int
    rotations: RotationTables  # [rows, 1, dims]
    positions: Tensor
    writes: Tensor  # positions of the new keys and values, int64 [rows, kv_heads, 1, head_dim]
    visible: Mapping[int | None, Tensor]  # by window, bool [rows, 1, 1, length]
    routed_experts: Tensor  # see `StaticInputs`
    embedded: Tensor | None  # the embeddings that each layer reads, [rows, layers, size]

    @property
    def query_rows(self) -> int:
        """All rows attend."""
        return len(self.writes)

    def rotate(self, x: Tensor, kind: RopeKind) -> Tensor:
        """Rotate the heads of all rows."""
        return self.rotations.rotate(x, kind)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of each row; return the first ``length`` of all its own."""
        rows, heads, dims = keys.shape
        all_keys = self.arena.keys[layer, :rows, :heads, :, :dims]
        all_values = self.arena.values[layer, :rows, :heads, :, :dims]
        places = self.writes[:, :heads, :, :dims]
        all_keys.scatter_(2, places, keys[:, :, None].to(all_keys.dtype))
        all_values.scatter_(2, places, values[:, :, None].to(all_values.dtype))
        return all_keys[:, :, : self.length], all_values[:, :, : self.length]

    def run_delta_net(self, layer: int, net: DeltaNet, made: Tensor) -> Tensor:
        """Read a token of each row; its state counts after the step, which may be repeated."""
        before, after = self.arena.states[:, layer, : len(made)].unbind(0)
        out, states = net(made[:, None], before)
        after.copy_(states)
        return out[:, 0]

    def read(self, layer: int, *, heads: int, dims: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of each row of a layer."""
        rows = self.query_rows
        keys, values = (
            part[layer, :rows, :heads, : self.length, :dims]
            for part in (self.arena.keys, self.arena.values)
        )
        return keys, values

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        window: int | None,
        change: ScoreChange | None,
    ) -> Tensor:
        """Attend; heads that share keys act as tokens of one head."""
        rows, kv_heads, _, width = keys.shape
        asking, seen = (
            queries.to(keys.dtype).reshape(rows, kv_heads, -1, width),
            self.visible[window],
        )
        if change is not None:
            return changed_attention(asking, keys, values, seen, change).flatten(1)
        out = F.scaled_dot_product_attention(asking, keys, values, attn_mask=seen)
        return out.flatten(1).float()


class GraphedStep:
    """The decode step of one base."""

    def __init__(
        self, transformer: Transformer, *, counts: DeviceExpertCounts | None = None
    ) -> None:
        """Run the layers of a base; ``counts`` counts the experts that rows choose."""
        self.transformer = transformer
        self._asked = counts

    @torch.inference_mode()
    def __call__(
        self, inputs: StaticInputs, *, rows: int, length: int, plans: LoRASlots | None
    ) -> None:
        """Read a token in each of the first rows, which see the first ``length`` positions."""
        shared = self.build_step_tensors(inputs, rows=rows, length=length, plans=plans)
        layers = range(self.transformer.config.layers)
        x = self.transformer.add_positions(self.embed(inputs, rows), shared)
        embedded = self.transformer.embed_for_layers(inputs.inputs[0, :rows], x, shared.plans)
        shared = replace(shared, embedded=embedded)
        x = self.run_layers(x, layers, shared)
        self.score(x, inputs, shared)

    def count_routed(self, inputs: StaticInputs, texts: Sequence[int]) -> None:
        """Count the experts chosen by the given rows; call it after the step, outside graphs."""
        if self._asked is not None:
            chosen = [inputs.asked[:, place] for place in texts]
            self._asked.count_step(torch.stack(chosen, dim=1))  # an index makes the host wait

    def fetch_routed_counts(self) -> None:
        """Fetch the counts from the device."""
        if self._asked is not None:
            self._asked.fetch_counts()

    def embed(self, inputs: StaticInputs, rows: int) -> Tensor:
        """Return the input of the first layer, [rows, hidden]."""
        return self.transformer.embed(inputs.inputs[0, :rows])

    def run_layers(self, x: Tensor, numbers: Iterable[int], shared: StepTensors) -> Tensor:
        """Run complete layers: [rows, hidden] -> [rows, hidden]."""
        for number in numbers:
            if not self.transformer.config.block.is_sequential:
                x = self.transformer.run_block(x, number, shared)
                continue
            x = self.transformer.run_attention(x, number, shared)
            with self.transformer.time_place(f"layers.{number}.mlp"):
                x = self._run_mlp(x, number, shared)
        return x

    def score(self, x: Tensor, inputs: StaticInputs, shared: StepTensors) -> None:
        """Write the logits of the last layer's output."""
        with self.transformer.time_place("head"):
            inputs.logits[: len(x)].copy_(self.transformer.compute_logits(x, shared.plans))

    def build_step_tensors(
        self, inputs: StaticInputs, *, rows: int, length: int, plans: LoRASlots | None
    ) -> StepTensors:
        """Return the tensors shared by all layers, from the current inputs."""
        config, positions, arena = self.transformer.config, inputs.inputs[1, :rows], inputs.arena
        assert arena is not None, "the sequences of a step keep it"
        shape = (rows, config.kv_heads, 1, config.head_dim)
        keys = inputs.places[:length]
        return StepTensors(
            arena=arena,
            plans=StepPlans.build(inputs, rows=rows, plans=plans),
            length=length,
            rotations=inputs.rotations.select(positions),
            positions=positions,
            writes=positions.view(rows, 1, 1, 1).expand(shape),
            visible={w: _compute_visibility(keys, positions, w) for w in set(config.windows)},
            routed_experts=inputs.asked,
            embedded=None,
        )

    def _run_mlp(self, x: Tensor, number: int, shared: StepTensors) -> Tensor:
        mlp = self.transformer.layers[number].mlp
        normed = self.transformer.norm_for_mlp(x, number)
        if isinstance(mlp, FeedForward):
            return x + mlp(normed, shared.plans)
        assert isinstance(mlp, StackedMlp), "experts that are routed are in a stack"
        routed = mlp.route(normed)
        shared.routed_experts[mlp.layer_index, : len(x)].copy_(routed.selected)
        rows = mlp.experts.look_up(mlp.layer_index, routed.selected)
        made = mlp.experts.apply(normed, mlp.layer_index, routed.selected, rows)
        residual = x if mlp.shared is None else x + mlp.shared(normed, shared.plans)
        return residual + merge_rows(made, mlp.experts.mask_weights(routed, rows))


def estimate_input_bytes(config: ModelConfig, *, capacity: int, rows: int) -> int:
    """Return the device bytes of a `StaticInputs`."""
    positions = capacity + SCRATCH_ROWS
    numbers = 2 * len(list_ropes(config)) * positions * config.head_dim + rows * config.vocab_size
    routed = math.prod(_compute_routed_shape(config, rows))
    return _INT_BYTES * (_INPUTS * rows + positions + routed) + _FLOAT_BYTES * numbers


def estimate_step_bytes(
    config: ModelConfig, *, capacity: int, rows: int, columns: int = 0, experts: int = 0
) -> int:
    """Estimate the maximum temporary bytes of one step, captured or not.

    ``columns`` is the number of columns between A and B over all slots, ``experts`` the bytes that
    a row needs in a layer of routed experts.
    """
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    each = 8 * config.hidden_size + 5 * config.intermediate_size + 5 * heads + 3 * columns
    scores = (config.heads + len(set(config.windows))) * capacity
    if config.unlike_llama:
        each += 8 * config.hidden_size + 2 * config.intermediate_size + 3 * heads
        changed = config.block.changes_scores  # keys and values are widened
        scores += (2 * config.heads + config.kv_heads * config.head_dim) * capacity * changed
    if config.block.varied is not None:
        each += estimate_varied_floats(config)
    numbers = each + 2 * scores + 2 * config.vocab_size
    if config.delta_net is not None:
        numbers += estimate_delta_net_floats(config.delta_net, tokens=1)
    return rows * (_FLOAT_BYTES * numbers + experts)


def _compute_routed_shape(config: ModelConfig, rows: int) -> tuple[int, int, int]:
    routed = config.experts
    return (0, rows, 0) if routed is None else (len(routed.layers), rows, routed.used)


def _compute_visibility(keys: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Return which keys each row sees at its position: bool [rows, 1, 1, keys]."""
    here = positions[:, None]
    seen = keys <= here
    if window is not None:
        seen = seen & (keys > here - window)
    return seen[:, None, None]
