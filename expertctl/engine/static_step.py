"""One more token of several texts, as a function over tensors that stay where they are.

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

from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.feed_forward import FeedForward
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.layers import Layer, head_of, layers_of
from expertctl.engine.linear import Linear
from expertctl.engine.moe.routed_mlp import SharedExpert
from expertctl.engine.moe.stacked_mlp import StackedLayers, StackedMlp, merge
from expertctl.engine.rope import rotate, rotation_table
from expertctl.engine.static_kv import SPARE, KVArena
from expertctl.engine.static_plans import PlanSlots, apply_stack
from expertctl.package.model_config import EMBEDDING, ModelConfig

_INPUTS = 3
_INT_BYTES, _FLOAT_BYTES = 8, 4


class StepRoom:
    """What steps over one arena read and write, for up to ``rows`` texts."""

    def __init__(self, config: ModelConfig, arena: KVArena, *, rows: int) -> None:
        """Take the memory, once."""
        device, positions = arena.keys.device, arena.capacity + SPARE
        pinned = device.type == "cuda"
        self.arena, self.rows = arena, rows
        self.host = torch.zeros(_INPUTS, rows, dtype=torch.long, pin_memory=pinned)
        self.inputs = torch.zeros(_INPUTS, rows, dtype=torch.long, device=device)
        self.places = torch.arange(positions, device=device)
        self.rotations = rotation_table(config.rope, positions, device=device)
        self.logits = torch.empty(rows, config.vocab_size, device=device)
        self.asked = torch.zeros(_asked_shape(config, rows), dtype=torch.long, device=device)
        """Which routed experts each row chose, [routed layers, rows, used]; not for stages."""
        self.scores = torch.empty_like(self.logits, device="cpu", pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.inputs, self.places, self.rotations, self.logits, self.asked)
        return sum(part.nbytes for part in parts)

    def begin(self) -> None:
        """Make every row one without a text: it writes to a position that is never read."""
        self.host.zero_()
        self.host[1].fill_(self.arena.capacity)

    def set(self, row: int, *, token: int, position: int, slot: int) -> None:
        """Say what is read in a row."""
        self.host[0, row], self.host[1, row], self.host[2, row] = token, position, slot

    def send(self) -> None:
        """Hand over to the device what was set."""
        self.inputs.copy_(self.host, non_blocking=True)

    def receive(self, rows: int) -> Tensor:
        """Wait for a step; return its scores, [rows, vocab], which are there until the next."""
        self.scores[:rows].copy_(self.logits[:rows], non_blocking=True)
        if self.logits.is_cuda:
            torch.cuda.current_stream(self.logits.device).synchronize()
        return self.scores[:rows]


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlans:
    """What all linear layers share in one step: which plan each row has."""

    plans: PlanSlots | None
    slots: Tensor  # int64 [rows]
    foreign: Mapping[int, Tensor]  # see `PlanSlots`


@dataclass(frozen=True, slots=True, eq=False)
class Shared(SharedPlans):
    """What all layers share in one step."""

    arena: KVArena
    length: int
    cos: Tensor  # [rows, 1, head_dim]
    sin: Tensor
    writes: Tensor  # where each row's keys and values go, int64 [rows, kv_heads, 1, head_dim]
    visible: Mapping[int | None, Tensor]  # by window, bool [rows, 1, 1, length]
    asked: Tensor  # see `StepRoom`


class StaticStep:
    """The step of one base."""

    def __init__(
        self, config: ModelConfig, weights: BaseWeights, *, stacked: StackedLayers | None = None
    ) -> None:
        """Sort the weights into layers; ``stacked`` are those whose experts are in a stack."""
        self.times: LayerTimes | None = None
        """Gets the time of each part while steps are timed; nothing is captured then."""
        self._config, self._device = config, weights.device
        self._embedding = weights.tensors[EMBEDDING]
        self._norm = weights.tensors["model.norm.weight"]
        self._head = head_of(weights)
        self._layers = layers_of(config, weights, None if stacked is None else stacked.mlps)
        self._asked = None if stacked is None else stacked.experts.asked

    @torch.inference_mode()
    def __call__(self, room: StepRoom, *, rows: int, length: int, plans: PlanSlots | None) -> None:
        """Read a token in each of the first rows, which see the first ``length`` positions."""
        shared = self.share(room, rows=rows, length=length, plans=plans)
        x = self.pass_layers(self.embed(room, rows), range(self.layers), shared)
        self.score(x, room, shared)

    def count_asked(self, room: StepRoom, texts: Sequence[int]) -> None:
        """Count which experts the rows of texts chose in a step; after it, in no graph."""
        if self._asked is not None:
            chosen = [room.asked[:, place] for place in texts]
            self._asked.add_step(torch.stack(chosen, dim=1))  # by an index the host would wait

    def fetch_asked(self) -> None:
        """Fetch what was counted."""
        if self._asked is not None:
            self._asked.fetch()

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self._layers)

    def embed(self, room: StepRoom, rows: int) -> Tensor:
        """Return what the first layer reads, [rows, hidden]."""
        return self._embedding.index_select(0, room.inputs[0, :rows]).float()

    def pass_layers(self, x: Tensor, numbers: Iterable[int], shared: Shared) -> Tensor:
        """Read some layers whole: [rows, hidden] -> [rows, hidden]."""
        for number in numbers:
            x = self.attend(x, number, shared)
            with self.spent(f"layers.{number}.mlp"):
                x = self._pass_mlp(x, number, shared)
        return x

    def attend(self, x: Tensor, number: int, shared: Shared) -> Tensor:
        """Read a layer up to what follows attention."""
        with self.spent(f"layers.{number}.attention"):
            return x + self._attention(x, self._layers[number], number, shared.arena, shared)

    def norm_for_mlp(self, x: Tensor, number: int) -> Tensor:
        """Return the normed input of what follows attention in a layer."""
        return self._normed(x, self._layers[number].mlp_norm)

    def apply_shared(self, x: Tensor, expert: SharedExpert, shared: SharedPlans) -> Tensor:
        """Apply the shared expert, which reads every token, with the plan of each row."""
        out = _gated(x, expert.mlp, shared)
        return out if expert.gate is None else out * _linear(x, expert.gate, shared).sigmoid()

    def score(self, x: Tensor, room: StepRoom, shared: Shared) -> None:
        """Write the scores of what the last layer left."""
        with self.spent("head"):
            logits = _linear(self._normed(x, self._norm), self._head, shared)
            room.logits[: len(x)].copy_(logits)

    def share_plans(self, room: StepRoom, *, rows: int, plans: PlanSlots | None) -> SharedPlans:
        """Return which plan each of the first rows has."""
        slots = room.inputs[2, :rows]
        return SharedPlans(plans, slots, {} if plans is None else plans.foreign(slots))

    def share(self, room: StepRoom, *, rows: int, length: int, plans: PlanSlots | None) -> Shared:
        """Return what all layers share, by what was set in a room."""
        _, positions, slots = room.inputs[:, :rows]
        cos, sin = room.rotations.index_select(1, positions)[:, :, None]
        shape = (rows, self._config.kv_heads, 1, self._config.head_dim)
        keys = room.places[:length]
        return Shared(
            arena=room.arena,
            length=length,
            cos=cos,
            sin=sin,
            writes=positions.view(rows, 1, 1, 1).expand(shape),
            visible={w: _visible(keys, positions, w) for w in set(self._config.windows)},
            asked=room.asked,
            plans=plans,
            slots=slots,
            foreign={} if plans is None else plans.foreign(slots),
        )

    def _attention(
        self, x: Tensor, layer: Layer, number: int, arena: KVArena, shared: Shared
    ) -> Tensor:
        x = self._normed(x, layer.input_norm)
        queries = self._heads(_linear(x, layer.query, shared), layer.query_norm)
        keys = self._heads(_linear(x, layer.key, shared), layer.key_norm)
        values = self._heads(_linear(x, layer.value, shared), None)
        all_keys, all_values = arena.keys[number, : len(x)], arena.values[number, : len(x)]
        keys = rotate(keys, shared.cos, shared.sin)[:, :, None]  # [rows, kv_heads, 1, head_dim]
        all_keys.scatter_(2, shared.writes, keys.to(all_keys.dtype))
        all_values.scatter_(2, shared.writes, values[:, :, None].to(all_values.dtype))
        queries = rotate(queries, shared.cos, shared.sin).to(all_keys.dtype)
        out = F.scaled_dot_product_attention(  # heads that share keys are tokens of one head
            queries.view(len(x), self._config.kv_heads, -1, self._config.head_dim),
            all_keys[:, :, : shared.length],
            all_values[:, :, : shared.length],
            attn_mask=shared.visible[layer.window],
        )
        return _linear(out.flatten(1).float(), layer.output, shared)

    def _pass_mlp(self, x: Tensor, number: int, shared: Shared) -> Tensor:
        normed, mlp = self.norm_for_mlp(x, number), self._layers[number].mlp
        if isinstance(mlp, FeedForward):
            return x + _gated(normed, mlp, shared)
        assert isinstance(mlp, StackedMlp), "experts that are routed are in a stack"
        routed = mlp.route(normed)
        shared.asked[mlp.place, : len(x)].copy_(routed.selected)
        rows = mlp.experts.find(mlp.place, routed.selected)
        made = mlp.experts.stack.apply(normed, rows)
        beside = x if mlp.shared is None else x + self.apply_shared(normed, mlp.shared, shared)
        return beside + merge(made, mlp.experts.weights(routed, rows))

    def _heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[rows, heads * dim] -> [rows, heads, dim], normed head by head or all together."""
        if norm is not None:
            x = self._normed(x.view(len(x), -1, len(norm)), norm)
        return x.view(len(x), -1, self._config.head_dim)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self._config.norm_eps
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, weight.shape, None, eps) * weight  # else seven kernels, not two

    @contextmanager
    def spent(self, place: str) -> Iterator[None]:
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


def room_bytes(config: ModelConfig, *, capacity: int, rows: int) -> int:
    """Return what a `StepRoom` takes on the device."""
    positions = capacity + SPARE
    numbers = 2 * positions * config.head_dim + rows * config.vocab_size
    asked = math.prod(_asked_shape(config, rows))
    return _INT_BYTES * (_INPUTS * rows + positions + asked) + _FLOAT_BYTES * numbers


def passing_bytes(
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


def _asked_shape(config: ModelConfig, rows: int) -> tuple[int, int, int]:
    routed = config.experts
    return (0, rows, 0) if routed is None else (len(routed.layers), rows, routed.used)


def _gated(x: Tensor, mlp: FeedForward, shared: SharedPlans) -> Tensor:
    """Apply a gated network with the plan of each row: [rows, hidden] -> [rows, hidden]."""
    gated = F.silu(_linear(x, mlp.gate, shared)) * _linear(x, mlp.up, shared)
    return _linear(gated, mlp.down, shared)


def _linear(x: Tensor, layer: Linear, shared: SharedPlans) -> Tensor:
    """Apply a linear layer with the plan of each row: [rows, in] -> [rows, out]."""
    stack = None if shared.plans is None else shared.plans.stacks.get(layer.module)
    return apply_stack(x, layer, stack, shared.slots, shared.foreign)


def _visible(keys: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Return which keys a row at a position sees: bool [rows, 1, 1, keys]."""
    here = positions[:, None]
    seen = keys <= here
    if window is not None:
        seen = seen & (keys > here - window)
    return seen[:, None, None]
