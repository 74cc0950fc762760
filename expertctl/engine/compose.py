"""A plan as the closed form of decision 10: per linear layer, whatever the chain of experts.

``y = d * (W (u * x)) + B (A x) + e * b``. A and B are the experts' blocks one below (beside) the
other: rank concatenation is exact where adding A to A and B to B is not. Every factor is folded
into its own block, in float32, once per plan: into tensors for torch, or packed for kernels. Soft
prompts stand in plan order too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.chain import Link
from expertctl.engine.delta_tensors import DeltaTensors
from expertctl.engine.dora import DoraTensors
from expertctl.engine.fit import check_fit
from expertctl.engine.fold import Folded, fold
from expertctl.engine.linear import LinearDelta
from expertctl.engine.packed_delta import PackedDeltas, Packing
from expertctl.engine.threads import usable_cores
from expertctl.errors import IncompatibleError

if TYPE_CHECKING:
    from expertctl.engine.packed_plan import PackedPlan

Gains = Mapping[str, tuple[Tensor, ...]]
"""The gains of one expert's DoRA steps on one base: per module, one ``c`` [out] each."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a plan is compiled for: the base's layers, a token's width, activations, device.

    With ``packing`` it is packed for kernels, not made into tensors. To look at a matrix of a
    routed expert that may not be in memory, ``routed_bytes`` are read first: the whole expert.
    """

    shapes: Mapping[str, tuple[int, int]]
    width: int
    dtype: torch.dtype
    device: torch.device
    packing: Packing | None = None
    routed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Weighted:
    """One expert of a chain, its weight in the plan, and its gains if it has DoRA."""

    adapter: LoadedAdapter
    weight: float = 1.0
    gains: Gains = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """What a plan changes in each linear layer and puts before the first token.

    ``soft_prompt`` is float32 [virtual tokens, hidden]; ``nbytes`` were allocated for all. A plan
    for kernels is ``packed`` and has no ``deltas``.
    """

    deltas: Mapping[str, LinearDelta]
    soft_prompt: Tensor | None
    nbytes: int
    packed: PackedDeltas | None = None

    @property
    def width(self) -> int:
        """How wide rows between A and B are, as the room for them depends on it."""
        if self.packed is not None:
            return self.packed.width
        ranks = (1 if delta.a is None else len(delta.a) for delta in self.deltas.values())
        return max(ranks, default=0)


BASE_ALONE = CompiledPlan({}, None, 0)

_WORTH_THREADS = 128 << 20
"""Below so many bytes threads that write small blocks wait for each other more than they gain."""


@dataclass(frozen=True, slots=True)
class Composition:
    """A chain that fits, folded layer by layer; what it costs is known before it is compiled."""

    deltas: "DeltaTensors | PackedPlan"
    soft_prompts: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """What `compile` will allocate."""
        virtual = sum(prompt.numel() for prompt in self.soft_prompts)
        return self.deltas.nbytes + virtual * torch.float32.itemsize

    @property
    def width(self) -> int:
        """How wide rows between A and B are, as the room for them depends on it."""
        return self.deltas.width

    @property
    def scratch_bytes(self) -> int:
        """What `compile` needs besides, at most."""
        return self.deltas.scratch_bytes(_workers(self.nbytes))

    @property
    def uses_in_place(self) -> bool:
        """Whether the compiled plan will refer to memory of its experts."""
        return self.deltas.uses_in_place

    def compile(self) -> CompiledPlan:
        """Multiply every block by its factors and put it in its place.

        Raises:
            IncompatibleError: when numbers are beyond those of the type they are to be kept in.
        """
        size = self.nbytes
        prompts = [prompt.to(torch.float32) for prompt in self.soft_prompts]
        joined = torch.cat(prompts) if prompts else None
        deltas = self.deltas.compile(_workers(size))
        if isinstance(deltas, PackedDeltas):
            return CompiledPlan({}, joined, size, deltas)
        return CompiledPlan(deltas, joined, size)


def compose(experts: Sequence[Weighted], form: Form) -> Composition:
    """Fold an ordered chain of weighted experts; weight 0 equals leaving the expert out.

    Raises:
        IncompatibleError: when a tensor of any expert has no place in the base, or a soft prompt
            has a weight.
    """
    for expert in experts:
        check_fit(expert.adapter, form.shapes, width=form.width)
    there = [expert for expert in experts if expert.weight != 0.0]
    for expert in there:
        _check_soft_prompts(expert)
    prompts = [prompt for expert in there for prompt in expert.adapter.soft_prompts]
    return Composition(_deltas(_layers(there), form), tuple(prompts))


def _deltas(layers: Mapping[str, Folded], form: Form) -> "DeltaTensors | PackedPlan":
    if form.packing is None:
        return DeltaTensors(layers, form.dtype, form.device)
    from expertctl.engine.packed_plan import PackedPlan  # it imports numba, which takes 0.4 s

    return PackedPlan(layers, form.shapes, form.packing)


def _workers(size: int) -> int:
    """Return how many threads compile a plan of so many bytes."""
    return usable_cores() if size >= _WORTH_THREADS else 1


def _layers(experts: Sequence[Weighted]) -> dict[str, Folded]:
    """Return every layer that the plan changes, folded."""
    links: dict[str, list[Link]] = {}
    for expert in experts:
        for module, steps in expert.adapter.modules.items():
            gains = iter(expert.gains.get(module, ()))
            links.setdefault(module, []).extend(
                Link(step, expert.weight, next(gains) if isinstance(step, DoraTensors) else None)
                for step in steps
            )
    return {module: fold(steps) for module, steps in links.items()}


def _check_soft_prompts(expert: Weighted) -> None:
    if expert.adapter.soft_prompts and expert.weight != 1.0:
        raise IncompatibleError(
            f"{expert.adapter.ref} has a soft prompt, which has no weight but 1",
            hint="name it without a weight, or with 0 to leave it out",
        )
