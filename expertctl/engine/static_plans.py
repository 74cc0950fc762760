"""`PlanSlots`: the plans of a batch, stacked at addresses that never change.

For each linear layer all A stand below each other and all B too, slot after slot; the factors of
all slots are the rows of tables. A row of a batch names the slot of its plan, 0 for none. All
low-rank products of a layer are two products; in between, every row keeps its own plan's columns.
So nothing is gathered, and which plan a row has is a number that a captured step reads.

Ranks are rounded up to powers of two, by kind of layer; what a plan does not fill is zero. When a
plan needs more, the slots are made anew, and so is what was captured with them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from expertctl.engine.base_weights import is_routed_expert
from expertctl.engine.linear import Deltas, Linear, LinearDelta, linear
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig

NO_SLOT = 0
"""What a row without a plan names."""
LEAST_RANK = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Need:
    """What the slots of one kind of layer must have: a rank, and which factors."""

    rank: int = 0
    inputs: bool = False
    outputs: bool = False
    bias: bool = False

    @classmethod
    def of(cls, delta: LinearDelta) -> "Need":
        """Return what one layer of a plan needs."""
        return cls(
            0 if delta.a is None else rank_bucket(len(delta.a)),
            delta.input_scale is not None,
            delta.output_scale is not None,
            delta.bias_scale is not None,
        )

    def beside(self, other: "Need") -> "Need":
        """Return what serves both."""
        return Need(
            max(self.rank, other.rank),
            self.inputs or other.inputs,
            self.outputs or other.outputs,
            self.bias or other.bias,
        )


Shape = Mapping[str, Need]
"""What slots are made for, by kind of layer: ``self_attn.q_proj``, …, ``lm_head``."""


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """What all slots change in one layer."""

    rank: int
    a: Tensor | None  # [slots * rank, in]
    b: Tensor | None  # [slots * rank, out]
    inputs: Tensor | None  # u, [slots + 1, in]
    outputs: Tensor | None  # d, [slots + 1, out]
    bias: Tensor | None  # e, [slots + 1, out]

    @classmethod
    def empty(cls, need: Need, slots: int, shape: tuple[int, int], device: torch.device) -> "Stack":
        """Return slots that change nothing in a layer of a shape (out, in)."""
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
        """The parts that are there."""
        parts = (self.a, self.b, self.inputs, self.outputs, self.bias)
        return tuple(part for part in parts if part is not None)

    def put(self, slot: int, delta: LinearDelta | None) -> None:
        """Write what a plan changes, or nothing, into a slot from 1 on."""
        begin, end = (slot - 1) * self.rank, slot * self.rank
        low_rank = (None, None) if delta is None else (delta.a, delta.b)
        for place, part in ((self.a, low_rank[0]), (self.b, _rows(low_rank[1]))):
            if place is not None:
                filled = 0 if part is None else len(part)
                if part is not None:
                    place[begin : begin + filled].copy_(part)
                place[begin + filled : end].zero_()
        factors = delta or LinearDelta()
        for table, factor in (
            (self.inputs, factors.input_scale),
            (self.outputs, factors.output_scale),
            (self.bias, factors.bias_scale),
        ):
            if table is not None:
                table[slot].fill_(1.0) if factor is None else table[slot].copy_(factor)


class PlanSlots:
    """Room for ``slots`` plans at once; plans stay referred to while they are in one."""

    def __init__(
        self, config: ModelConfig, shape: Shape, *, slots: int, device: torch.device
    ) -> None:
        """Take the memory, once."""
        self.shape, self.slots = shape, slots
        self.stacks = {
            module: Stack.empty(shape[kind_of(module)], slots, sizes, device)
            for module, sizes in config.linear_shapes().items()
            if kind_of(module) in shape
        }
        self.columns = {  # which slot a column between A and B belongs to, by rank
            rank: torch.arange(1, slots + 1, device=device).repeat_interleave(rank)
            for rank in {need.rank for need in shape.values() if need.rank}
        }
        self._plans: dict[int, Deltas] = {}  # by slot, the one used last at the end

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks and tables."""
        stacks = sum(part.nbytes for stack in self.stacks.values() for part in stack.tensors)
        return stacks + sum(columns.nbytes for columns in self.columns.values())

    def holds(self, plans: Iterable[Deltas]) -> bool:
        """Tell whether all these plans are in slots."""
        there = {id(plan) for plan in self._plans.values()}
        return there >= {id(plan) for plan in plans}

    def place(self, plans: Sequence[Deltas]) -> list[int]:
        """Return the slots of plans, `NO_SLOT` for one that changes nothing.

        Raises:
            IncompatibleError: when numbers of a plan are not finite: multiplied by zero, they would
                reach rows of other plans.
        """
        there = {id(plan): slot for slot, plan in self._plans.items()}
        wanted = {id(plan): plan for plan in plans if plan}
        for key in wanted.keys() & there.keys():
            self._plans[there[key]] = self._plans.pop(there[key])
        for key in wanted.keys() - there.keys():
            there[key] = self._put(wanted[key])
        return [there[id(plan)] if plan else NO_SLOT for plan in plans]

    def foreign(self, slots: Tensor) -> dict[int, Tensor]:
        """Return which columns are not of each row's plan, bool [rows, slots * rank] by rank."""
        return {rank: columns != slots[:, None] for rank, columns in self.columns.items()}

    def _put(self, plan: Deltas) -> int:
        """Write a plan into a slot that is free, or that of the plan used longest ago."""
        _check_finite(plan)
        free = (slot for slot in range(1, self.slots + 1) if slot not in self._plans)
        slot = next(free, None) or next(iter(self._plans))
        self._plans.pop(slot, None)  # it has no plan, should writing fail
        for module, stack in self.stacks.items():
            stack.put(slot, plan.get(module))
        self._plans[slot] = plan
        return slot


def apply_stack(
    x: Tensor, layer: Linear, stack: Stack | None, slots: Tensor, foreign: Mapping[int, Tensor]
) -> Tensor:
    """Apply a linear layer with the plan of each row: [rows, in] -> [rows, out].

    ``foreign`` is what `PlanSlots.foreign` made of ``slots``, int64 [rows].
    """
    if stack is None:
        return linear(x, layer.weight, layer.bias, None)
    y = _scaled_product(x, layer, stack, slots)
    if stack.a is None or stack.b is None:
        return y
    inner = torch.mm(x, stack.a.T)  # [rows, slots * rank]
    return torch.addmm(y, inner.masked_fill(foreign[stack.rank], 0.0), stack.b)


def shape_of(plans: Iterable[Deltas]) -> Shape:
    """Return what slots must be made for, so that each of these plans fits into each."""
    needs = ({kind_of(module): Need.of(delta)} for plan in plans for module, delta in plan.items())
    return reduce(merged, needs, {})


def merged(one: Shape, other: Shape) -> Shape:
    """Return what serves both."""
    kinds = one.keys() | other.keys()
    return {kind: one.get(kind, Need()).beside(other.get(kind, Need())) for kind in kinds}


def rank_bucket(rank: int) -> int:
    """Return the rank that slots are made for."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def kind_of(module: str) -> str:
    """Return what layers of a base have in common: ``mlp.up_proj``."""
    return module.split(".", 3)[-1]


def slots_bytes(config: ModelConfig, *, slots: int, rank: int) -> int:
    """Return what slots take at most, for plans of up to a rank that change every layer.

    Plans that change routed experts get none.
    """
    rows, total = slots * rank_bucket(rank), 0
    shapes = {n: shape for n, shape in config.linear_shapes().items() if not is_routed_expert(n)}
    for out, width in shapes.values():
        total += rows * (out + width) + (slots + 1) * (width + 2 * out)
    kinds = len({kind_of(module) for module in shapes})
    return _FLOAT_BYTES * (total + 2 * kinds * rows)


def _scaled_product(x: Tensor, layer: Linear, stack: Stack, slots: Tensor) -> Tensor:
    """Return ``d * (W (u * x)) + e * b``."""
    scaled = x if stack.inputs is None else x * stack.inputs.index_select(0, slots)
    if stack.outputs is None and (stack.bias is None or layer.bias is None):
        return linear(scaled, layer.weight, layer.bias, None)
    y = linear(scaled, layer.weight, None, None)
    if stack.outputs is not None:
        y = y * stack.outputs.index_select(0, slots)
    if layer.bias is None:
        return y
    if stack.bias is None:
        return y + layer.bias
    return y + layer.bias * stack.bias.index_select(0, slots)


def _rows(b: Tensor | None) -> Tensor | None:
    return None if b is None else b.T


def _check_finite(plan: Deltas) -> None:
    finite = [torch.isfinite(part).all() for delta in plan.values() for part in delta.tensors]
    if not bool(torch.stack(finite).all()):
        raise IncompatibleError(
            "a number of an expert is infinite or not a number at all",
            hint="the weights of an expert are damaged",
        )
