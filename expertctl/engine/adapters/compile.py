"""Compiling a plan: an ordered chain of weighted experts, in the closed form of decision 10.

For each linear layer, ``y = d * (W (u * x)) + B (A x) + e * b``. A and B are the stacked blocks of
the experts: rank concatenation is exact where adding A to A and B to B is not. Every factor is
multiplied into its own block once per plan, in float32: into arrays, which may be packed for CPU
kernels or become torch tensors. Soft prompts are concatenated in plan order.

An adapter must fit the base completely; one that changes nothing is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from expertctl.engine.adapters.fuse import ChainStep, FoldedChain, fold_chain
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.plan_tensors import DeltaCompiler
from expertctl.engine.adapters.steps import (
    EMPTY_DELTAS,
    AdapterStep,
    Deltas,
    DoraTensors,
    Ia3Tensors,
    count_outputs,
    take_columns,
    take_outputs,
)
from expertctl.engine.arrays import AnyArray, FloatArray, widen
from expertctl.engine.kernels.packed_format import PackedDeltas, PlanPacking
from expertctl.engine.memory.host import count_usable_cores
from expertctl.errors import IncompatibleError
from expertctl.package.adapter import truncate_problems
from expertctl.package.base_tensors import explain_absent_module, find_base_name
from expertctl.package.stored_layout import StoredPlaces

if TYPE_CHECKING:
    from expertctl.engine.cpu.packed_plan import PackedPlanCompiler
    from expertctl.engine.torch.functional import TorchDeltas
    from expertctl.engine.torch.plan import TorchPlanCompiler


LayerShapes = Mapping[str, tuple[int, int]]
"""``(out, in)`` of every linear layer of a base."""


def rename_modules(
    adapter: LoadedAdapter, shapes: LayerShapes, places: StoredPlaces | None = None
) -> LoadedAdapter:
    """Return an adapter with its modules renamed as in the base.

    With the ``places`` of a base whose files have other names than ours, a module of the files that
    is several of ours becomes those, each with its part of every step.

    Raises:
        IncompatibleError: for such a module with another number of outputs.
    """
    if places is None and all(module in shapes for module in adapter.modules):
        return adapter
    modules: dict[str, tuple[AdapterStep, ...]] = {}
    for module, steps in adapter.modules.items():
        parts = None if places is None else places.split_module(module)
        if parts is None:
            name = find_base_name(module, shapes)
            name = "lm_head" if places is not None and name == places.names.head else name
            modules[name] = (*modules.get(name, ()), *steps)
            continue
        prefix, inner = parts
        if places is not None and places.names.experts_as_columns:
            steps = tuple(map(take_columns, steps))
        for part in inner:
            name = f"{prefix}.{part.module}"
            taken = steps
            if len(inner) > 1:
                _check_outputs(adapter, module, steps, sum(each.rows for each in inner))
                blocks = tuple(part.iter_row_blocks())
                taken = tuple(take_outputs(step, blocks) for step in steps)
            modules[name] = (*modules.get(name, ()), *taken)
    return replace(adapter, modules=modules)


def _check_outputs(
    adapter: LoadedAdapter, module: str, steps: Sequence[AdapterStep], expected: int
) -> None:
    for step in steps:
        found = count_outputs(step)
        if found not in (None, expected):
            raise IncompatibleError(
                f"{adapter.ref} does not fit the base: {module}: made for {found} outputs, the "
                f"base has {expected}"
            )


def check_adapter_fits(adapter: LoadedAdapter, shapes: LayerShapes, *, width: int) -> None:
    """Check that every tensor of an adapter fits a base of the given hidden size.

    Raises:
        IncompatibleError: listing everything that does not fit, or if it changes nothing.
    """
    problems = list(_find_misfits(adapter, shapes, width))
    if not adapter.modules and not adapter.soft_prompts:
        problems.append("it changes no module at all")
    if problems:
        lines = "; ".join(truncate_problems(problems))
        raise IncompatibleError(f"{adapter.ref} does not fit the base: {lines}")


def _find_misfits(adapter: LoadedAdapter, shapes: LayerShapes, width: int) -> Iterator[str]:
    for module, steps in adapter.modules.items():
        if module not in shapes:
            yield f"{module}: {explain_absent_module(module, shapes)}"
            continue
        yield from filter(None, (_describe_misfit(module, step, shapes[module]) for step in steps))
    for module in adapter.past_end_modules:
        if find_base_name(module, shapes) in shapes:
            yield f"{module}: the base has it, but the stacks of the adapter end before it"
    for prompt in adapter.soft_prompts:
        if prompt.shape[1] != width:
            yield f"a soft prompt is {prompt.shape[1]} wide, tokens of the base are {width}"


def _describe_misfit(module: str, step: AdapterStep, expected: tuple[int, int]) -> str:
    if isinstance(step, Ia3Tensors):
        side, size = ("inputs", expected[1]) if step.on_input else ("outputs", expected[0])
        found = len(step.vector)
        return "" if found == size else f"{module}: made for {found} {side}, the base has {size}"
    made = (step.b.shape[0], step.a.shape[1])
    if made == expected:
        return ""
    return f"{module}: made for {made[0]} x {made[1]}, the base has {expected[0]} x {expected[1]}"


DoraScales = Mapping[str, tuple[AnyArray, ...]]
"""The DoRA magnitude scales of one expert on one base: per module, a ``c`` [out] for each step."""


@dataclass(frozen=True, slots=True)
class TorchPlacement:
    """The torch device of a plan: ``cpu`` or ``cuda``."""

    device: str


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """What a plan is compiled for: the base's layers, its hidden size, and who uses the plan.

    ``routed_bytes`` is the size of a routed expert that must be read completely to see one of its
    matrices, because it may not be in memory.
    """

    shapes: Mapping[str, tuple[int, int]]
    width: int
    target: PlanPacking | TorchPlacement | None = None
    """CPU kernels, torch on a device, or None: numpy."""
    routed_bytes: int = 0
    places: StoredPlaces | None = None
    """The names and the layout of the base's files, if they are not ours."""

    def adapt(self, adapter: LoadedAdapter) -> LoadedAdapter:
        """Return an adapter with its modules as in the base; raises as `rename_modules`."""
        return rename_modules(adapter, self.shapes, self.places)


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    """One expert of a chain, its weight in the plan, and its DoRA scales if it has any."""

    adapter: LoadedAdapter
    weight: float = 1.0
    dora_scales: DoraScales = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """What a plan changes in each linear layer and prepends to the first token.

    ``soft_prompt`` is float32 [virtual tokens, hidden]; ``nbytes`` is the total allocation. A plan
    for CPU kernels is ``packed``, one for torch has ``torch_deltas``; they have no ``deltas``.
    """

    deltas: Deltas
    soft_prompt: AnyArray | None
    nbytes: int
    packed: PackedDeltas | None = None
    torch_deltas: "TorchDeltas" = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Number of columns between A and B, which determines buffer sizes."""
        if self.packed is not None:
            return self.packed.width
        widths = [delta.width for delta in self.deltas.values()]
        widths += [delta.width for delta in self.torch_deltas.values()]
        return max(widths, default=0)


BASE_ONLY = CompiledPlan(EMPTY_DELTAS, None, 0)
_FLOAT_BYTES = 4

_MIN_PARALLEL_BYTES = 128 << 20
"""Below this size, threads that write small blocks lose more time than they gain."""


@dataclass(frozen=True, slots=True)
class FoldedPlan:
    """A folded chain that fits the base; its cost is known before it is compiled."""

    compiler: "DeltaCompiler | PackedPlanCompiler | TorchPlanCompiler"
    soft_prompts: tuple[FloatArray, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that `compile` will allocate."""
        virtual = sum(prompt.size for prompt in self.soft_prompts)
        return self.compiler.nbytes + _FLOAT_BYTES * virtual

    @property
    def width(self) -> int:
        """Number of columns between A and B, which determines buffer sizes."""
        return self.compiler.width

    @property
    def scratch_bytes(self) -> int:
        """The maximum additional bytes that `compile` needs."""
        return self.compiler.scratch_bytes(_choose_workers(self.nbytes))

    @property
    def shares_adapter_memory(self) -> bool:
        """Whether the compiled plan will refer to memory of its experts."""
        return self.compiler.shares_adapter_memory

    def compile(self) -> CompiledPlan:
        """Multiply every block by its factors and store it in its place.

        Raises:
            IncompatibleError: for values beyond the range of the storage dtype.
        """
        size, workers = self.nbytes, _choose_workers(self.nbytes)
        prompts = [widen(prompt) for prompt in self.soft_prompts]
        joined = np.concatenate(prompts) if prompts else None
        if isinstance(self.compiler, DeltaCompiler):
            return CompiledPlan(self.compiler.compile(workers), joined, size)
        made = self.compiler.compile(workers)
        if isinstance(made, PackedDeltas):
            return CompiledPlan(EMPTY_DELTAS, joined, size, packed=made)
        return CompiledPlan(EMPTY_DELTAS, joined, size, torch_deltas=made)


def fold_plan(experts: Sequence[WeightedAdapter], spec: CompileSpec) -> FoldedPlan:
    """Fold an ordered chain of weighted experts; weight 0 equals leaving the expert out.

    Raises:
        IncompatibleError: if a tensor of any expert does not fit the base, or a soft prompt has
            a weight.
    """
    for expert in experts:
        check_adapter_fits(expert.adapter, spec.shapes, width=spec.width)
    there = [expert for expert in experts if expert.weight != 0.0]
    for expert in there:
        _check_soft_prompts(expert)
    prompts = [prompt for expert in there for prompt in expert.adapter.soft_prompts]
    return FoldedPlan(_choose_compiler(_fold_layers(there), spec), tuple(prompts))


def _choose_compiler(
    layers: Mapping[str, FoldedChain], spec: CompileSpec
) -> "DeltaCompiler | PackedPlanCompiler | TorchPlanCompiler":
    """Return the compiler of a plan; kernels and torch are imported when needed."""
    match spec.target:
        case None:
            return DeltaCompiler(layers)
        case PlanPacking() as packing:
            from expertctl.engine.cpu.packed_plan import PackedPlanCompiler

            return PackedPlanCompiler(layers, spec.shapes, packing)
        case TorchPlacement(device):
            from expertctl.engine.torch.plan import TorchPlanCompiler

            return TorchPlanCompiler(layers, device)


def _choose_workers(size: int) -> int:
    return count_usable_cores() if size >= _MIN_PARALLEL_BYTES else 1


def _fold_layers(experts: Sequence[WeightedAdapter]) -> dict[str, FoldedChain]:
    chains: dict[str, list[ChainStep]] = {}
    for expert in experts:
        for module, steps in expert.adapter.modules.items():
            scales = iter(expert.dora_scales.get(module, ()))
            for step in steps:
                scale = next(scales) if isinstance(step, DoraTensors) else None
                chains.setdefault(module, []).append(ChainStep(step, expert.weight, scale))
    return {module: fold_chain(steps) for module, steps in chains.items()}


def _check_soft_prompts(expert: WeightedAdapter) -> None:
    if expert.adapter.soft_prompts and expert.weight != 1.0:
        raise IncompatibleError(
            f"{expert.adapter.ref} has a soft prompt, which has no weight but 1",
            hint="name it without a weight, or with 0 to leave it out",
        )
