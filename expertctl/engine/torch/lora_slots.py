"""LoRA slots: the plans of a batch, stacked at fixed addresses.

For each linear layer, the A matrices of all slots are concatenated, and so are the B matrices; the
scale vectors of all slots are the rows of tables. A row of a batch names the slot of its plan, 0
for none. All low-rank products of a layer are two products; in between, each row is masked to the
columns of its own plan. So nothing is gathered, and the plan of a row is a number that a captured
step reads.

Ranks are rounded up to powers of two, per kind of layer, and padded with zeros. When a plan needs
more, the slots are recreated, and so are the graphs captured with them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from weakref import ref

import torch
from torch import Tensor

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.base_files import is_routed_expert
from expertctl.engine.torch.functional import (
    Linear,
    PlanDeltas,
    TorchDelta,
    TorchDeltas,
    apply_linear,
)
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig

NO_SLOT = 0
"""Slot number of a row without a plan."""
MIN_RANK = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class LoRASpec:
    """Requirements of the slots of one kind of layer: a rank, and which scale vectors."""

    rank: int = 0
    inputs: bool = False
    outputs: bool = False
    bias: bool = False

    @classmethod
    def from_delta(cls, delta: TorchDelta) -> "LoRASpec":
        """Return the requirements of one layer of a plan."""
        return cls(
            0 if delta.a is None else round_up_rank(len(delta.a)),
            delta.input_scale is not None,
            delta.output_scale is not None,
            delta.bias_scale is not None,
        )

    def merge(self, other: "LoRASpec") -> "LoRASpec":
        """Return requirements that satisfy both."""
        return LoRASpec(
            max(self.rank, other.rank),
            self.inputs or other.inputs,
            self.outputs or other.outputs,
            self.bias or other.bias,
        )


_PlanReference = Callable[[], TorchDeltas | None]
LoRAShape = Mapping[str, LoRASpec]
"""Requirements by kind of layer: ``self_attn.q_proj``, …, ``lm_head``."""


@dataclass(frozen=True, slots=True, eq=False)
class StackedLoRA:
    """The changes of all slots in one layer."""

    rank: int
    a: Tensor | None  # [slots * rank, in]
    b: Tensor | None  # [slots * rank, out]
    inputs: Tensor | None  # u, [slots + 1, in]
    outputs: Tensor | None  # d, [slots + 1, out]
    bias: Tensor | None  # e, [slots + 1, out]

    @classmethod
    def create_empty(
        cls, need: LoRASpec, slots: int, shape: tuple[int, int], device: torch.device
    ) -> "StackedLoRA":
        """Return neutral slots for a layer of shape (out, in)."""
        out, width = shape
        rows = slots * need.rank

        def zeros(columns: int) -> Tensor | None:
            return torch.zeros(rows, columns, device=device) if rows else None

        def ones(columns: int, *, wanted: bool) -> Tensor | None:
            return torch.ones(slots + 1, columns, device=device) if wanted else None

        return cls(
            need.rank,
            a=zeros(width),
            b=zeros(out),
            inputs=ones(width, wanted=need.inputs),
            outputs=ones(out, wanted=need.outputs),
            bias=ones(out, wanted=need.bias),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parts that are not None."""
        parts = (self.a, self.b, self.inputs, self.outputs, self.bias)
        return tuple(part for part in parts if part is not None)

    def write_slot(self, slot: int, delta: TorchDelta | None) -> None:
        """Write the change of a plan, or a neutral one, into a slot (1 or higher)."""
        begin, end = (slot - 1) * self.rank, slot * self.rank
        factors = delta or LinearDelta()
        columns = None if factors.b is None else factors.b.T
        for place, part in ((self.a, factors.a), (self.b, columns)):
            if place is not None:
                filled = 0 if part is None else len(part)
                if part is not None:
                    place[begin : begin + filled].copy_(part)
                place[begin + filled : end].zero_()
        for table, factor in (
            (self.inputs, factors.input_scale),
            (self.outputs, factors.output_scale),
            (self.bias, factors.bias_scale),
        ):
            if table is not None:
                table[slot].fill_(1.0) if factor is None else table[slot].copy_(factor)


class LoRASlots:
    """Memory of ``slots`` plans at once.

    Plans are referenced weakly, so that one in a slot can be evicted; then its slot is free. Only
    mappings that have no weak references stay referenced.
    """

    def __init__(
        self, config: ModelConfig, shape: LoRAShape, *, slots: int, device: torch.device
    ) -> None:
        """Allocate the memory, once."""
        self.shape, self.slots = shape, slots
        self.stacks = {
            module: StackedLoRA.create_empty(shape[get_module_kind(module)], slots, sizes, device)
            for module, sizes in config.linear_shapes().items()
            if get_module_kind(module) in shape
        }
        self.columns = {  # slot of each column between A and B, by rank
            rank: torch.arange(1, slots + 1, device=device).repeat_interleave(rank)
            for rank in {need.rank for need in shape.values() if need.rank}
        }
        self._plans: dict[int, _PlanReference] = {}  # by slot, the most recently used last

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks and tables."""
        stacks = sum(part.nbytes for stack in self.stacks.values() for part in stack.tensors)
        return stacks + sum(columns.nbytes for columns in self.columns.values())

    def contains(self, plans: Iterable[TorchDeltas]) -> bool:
        """Return whether all these plans are in slots."""
        there = {id(plan) for plan in self.list_plans().values()}
        return there >= {id(plan) for plan in plans}

    def list_plans(self) -> dict[int, TorchDeltas]:
        """Return the plans by slot, the most recently used last; slots of freed ones are free."""
        held = {slot: get_plan() for slot, get_plan in self._plans.items()}
        self._plans = {slot: self._plans[slot] for slot, plan in held.items() if plan is not None}
        return {slot: plan for slot, plan in held.items() if plan is not None}

    def assign_slots(self, plans: Sequence[TorchDeltas]) -> list[int]:
        """Return the slots of plans, `NO_SLOT` for an empty one.

        Raises:
            IncompatibleError: when numbers of a plan are not finite: multiplied by zero, they would
                reach rows of other plans.
        """
        there = {id(plan): slot for slot, plan in self.list_plans().items()}
        wanted = {id(plan): plan for plan in plans if plan}
        for key in wanted.keys() & there.keys():
            self._plans[there[key]] = self._plans.pop(there[key])
        for key in wanted.keys() - there.keys():
            there[key] = self._write_plan(wanted[key])
        return [there[id(plan)] if plan else NO_SLOT for plan in plans]

    def mask_foreign_columns(self, slots: Tensor) -> dict[int, Tensor]:
        """Mask the columns of other plans for each row: bool [rows, slots * rank] by rank."""
        return {rank: columns != slots[:, None] for rank, columns in self.columns.items()}

    def _write_plan(self, plan: TorchDeltas) -> int:
        """Write a plan into a free slot, or into the least recently used one."""
        _check_finite(plan)
        free = (slot for slot in range(1, self.slots + 1) if slot not in self._plans)
        slot = next(free, None) or next(iter(self._plans))
        self._plans.pop(slot, None)  # the slot is empty if writing fails
        for module, stack in self.stacks.items():
            stack.write_slot(slot, plan.get(module))
        self._plans[slot] = _make_reference(plan)
        return slot


def apply_stacked_lora(
    x: Tensor,
    layer: Linear,
    stacked: StackedLoRA | None,
    slots: Tensor,
    foreign: Mapping[int, Tensor],
) -> Tensor:
    """Apply a linear layer with the plan of each row: [rows, in] -> [rows, out].

    ``foreign`` is the result of `LoRASlots.mask_foreign_columns` for ``slots``, int64 [rows].
    """
    if stacked is None:
        return apply_linear(x, layer.weight, layer.bias, None)
    y = _scaled_product(x, layer, stacked, slots)
    if stacked.a is None or stacked.b is None:
        return y
    inner = torch.mm(x, stacked.a.T)  # [rows, slots * rank]
    return torch.addmm(y, inner.masked_fill(foreign[stacked.rank], 0.0), stacked.b)


def find_shape(plans: Iterable[TorchDeltas]) -> LoRAShape:
    """Return the requirements of slots that can hold any of these plans."""
    needs = (
        {get_module_kind(module): LoRASpec.from_delta(delta)}
        for plan in plans
        for module, delta in plan.items()
    )
    return reduce(merge_shapes, needs, {})


def merge_shapes(one: LoRAShape, other: LoRAShape) -> LoRAShape:
    """Return requirements that satisfy both."""
    kinds = one.keys() | other.keys()
    return {kind: one.get(kind, LoRASpec()).merge(other.get(kind, LoRASpec())) for kind in kinds}


def round_up_rank(rank: int) -> int:
    """Return the rank of a slot for plans of this rank."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def get_module_kind(module: str) -> str:
    """Return the module name without the layer number: ``mlp.up_proj``."""
    return module.split(".", 3)[-1]


def estimate_slots_bytes(config: ModelConfig, *, slots: int, rank: int) -> int:
    """Return the maximum bytes of slots for plans of up to ``rank`` that change every layer.

    Plans that change routed experts have no slots.
    """
    rows, total = slots * round_up_rank(rank), 0
    shapes = {n: shape for n, shape in config.linear_shapes().items() if not is_routed_expert(n)}
    for out, width in shapes.values():
        total += rows * (out + width) + (slots + 1) * (width + 2 * out)
    kinds = len({get_module_kind(module) for module in shapes})
    return _FLOAT_BYTES * (total + 2 * kinds * rows)


def _scaled_product(x: Tensor, layer: Linear, stack: StackedLoRA, slots: Tensor) -> Tensor:
    """Return ``d * (W (u * x)) + e * b``."""
    scaled = x if stack.inputs is None else x * stack.inputs.index_select(0, slots)
    if stack.outputs is None and (stack.bias is None or layer.bias is None):
        return apply_linear(scaled, layer.weight, layer.bias, None)
    y = apply_linear(scaled, layer.weight, None, None)
    if stack.outputs is not None:
        y = y * stack.outputs.index_select(0, slots)
    if layer.bias is None:
        return y
    if stack.bias is None:
        return y + layer.bias
    return y + layer.bias * stack.bias.index_select(0, slots)


def _make_reference(plan: TorchDeltas) -> _PlanReference:
    return ref(plan) if isinstance(plan, PlanDeltas) else lambda: plan


def _check_finite(plan: TorchDeltas) -> None:
    finite = [torch.isfinite(part).all() for delta in plan.values() for part in delta.tensors]
    if not bool(torch.stack(finite).all()):
        raise IncompatibleError(
            "a weight of an expert is infinite or not a number",
            hint="the weights of an expert are damaged",
        )
