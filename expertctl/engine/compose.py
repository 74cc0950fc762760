"""A plan as the closed form of decision 10: per linear layer, whatever the chain of experts.

``y = d * (W (u * x)) + B (A x) + e * b``. A and B are the experts' blocks one below (beside) the
other: rank concatenation is exact where adding A to A and B to B is not. Every factor is folded
into its own block, in float32, once per plan. Soft prompts stand in plan order too.

Blocks are kept in the dtype of the activations: widening a bfloat16 or float16 adapter once is
exact, narrowing a folded one would not be. Where one expert alone changes a layer, has that dtype
and nothing multiplies it, its published tensors are used as they lie in memory, with no copy.
Several B are written as rows, [rank, out]: one token then takes less than half the time.
"""

from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.chain import Link
from expertctl.engine.dora import DoraTensors
from expertctl.engine.fit import check_fit
from expertctl.engine.fold import Block, Folded, fold
from expertctl.engine.linear import LinearDelta
from expertctl.engine.memory import allocate
from expertctl.engine.products import Products, likeness, products, scratch_bytes
from expertctl.engine.threads import threads, usable_cores
from expertctl.errors import IncompatibleError

Gains = Mapping[str, tuple[Tensor, ...]]
"""What the DoRA steps of one expert have on one base: per module, one ``c`` [out] each."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a plan is compiled for: the base's layers, a token's width, activations, device."""

    shapes: Mapping[str, tuple[int, int]]
    width: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Weighted:
    """One expert of a chain, its weight in the plan, and its gains if it has DoRA."""

    adapter: LoadedAdapter
    weight: float = 1.0
    gains: Gains = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """What a plan changes in each linear layer and puts before the first token.

    ``soft_prompt`` is float32 [virtual tokens, hidden]; ``nbytes`` were allocated for all.
    """

    deltas: Mapping[str, LinearDelta]
    soft_prompt: Tensor | None
    nbytes: int


BASE_ALONE = CompiledPlan({}, None, 0)

_TOGETHER = 16
"""Layers whose factors are multiplied at a time."""
_WORTH_THREADS = 128 << 20
"""Below so many bytes threads that write small blocks wait for each other more than they gain."""


@dataclass(frozen=True, slots=True)
class Composition:
    """A chain that fits, folded layer by layer; what it costs is known before it is compiled."""

    layers: Mapping[str, Folded]
    numbers: Mapping[str, int]
    """How many numbers of the plan each layer takes."""
    groups: tuple[tuple[str, ...], ...]
    """Names of layers that are alike, some at a time."""
    soft_prompts: tuple[Tensor, ...]
    form: Form

    @property
    def nbytes(self) -> int:
        """What `compile` will allocate."""
        numbers = sum(self.numbers.values())
        virtual = sum(prompt.numel() for prompt in self.soft_prompts)
        return numbers * self.form.dtype.itemsize + virtual * torch.float32.itemsize

    @property
    def scratch_bytes(self) -> int:
        """What `compile` needs besides, at most."""
        groups = ([self.layers[name] for name in group] for group in self.groups)
        return sum(sorted(map(scratch_bytes, groups), reverse=True)[: _workers(self.nbytes)])

    @property
    def uses_in_place(self) -> bool:
        """Whether the compiled plan will refer to memory of its experts."""
        return any(any(_shared(folded, self.form)) for folded in self.layers.values())

    def compile(self) -> CompiledPlan:
        """Multiply every block by its factors and put it in its place."""
        size = self.nbytes
        prompts = [prompt.to(torch.float32) for prompt in self.soft_prompts]
        joined = torch.cat(prompts) if prompts else None
        deltas = _deltas(self, workers=_workers(size))
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
    layers = _layers(there)
    numbers = {name: _elements(folded, form) for name, folded in layers.items()}
    return Composition(layers, numbers, _groups(layers), tuple(prompts), form)


def _workers(size: int) -> int:
    """Return how many threads compile a plan of so many bytes."""
    return usable_cores() if size >= _WORTH_THREADS else 1


def _deltas(plan: Composition, *, workers: int) -> dict[str, LinearDelta]:
    """Compile group after group; each copy is small, so torch's own threads stay out of it."""
    sizes = [sum(plan.numbers[name] for name in group) for group in plan.groups]
    arena = _Arena(_empty(sum(sizes), plan.form), plan.form)
    shares = [arena.share(size) for size in sizes]
    folded = [[plan.layers[name] for name in group] for group in plan.groups]
    with threads(1), ExitStack() as stack:
        # a new thread has its caches to fill and its heap to grow, so one alone is not worth it
        each = stack.enter_context(ThreadPoolExecutor(workers)).map if workers > 1 else map
        done = list(each(_group, folded, shares))
    found = dict(zip(chain.from_iterable(plan.groups), chain.from_iterable(done), strict=True))
    return {module: found[module] for module in plan.layers}


def _groups(layers: Mapping[str, Folded]) -> tuple[tuple[str, ...], ...]:
    """Return the names of layers that are alike, some at a time."""
    alike: dict[Hashable, list[str]] = {}
    for name, folded in layers.items():
        alike.setdefault(likeness(folded), []).append(name)
    return tuple(
        tuple(names[i : i + _TOGETHER])
        for names in alike.values()
        for i in range(0, len(names), _TOGETHER)
    )


@torch.inference_mode()
def _group(layers: Sequence[Folded], arena: "_Arena") -> list[LinearDelta]:
    """Compile layers that are alike; few, so that what is multiplied stays in the caches."""
    pairs = zip(layers, products(layers), strict=True)
    return [_delta(folded, factors, arena) for folded, factors in pairs]


class _Arena:
    """Memory that the tensors of a compiled plan are cut from."""

    def __init__(self, data: Tensor, form: Form) -> None:
        self.form = form
        self._data, self._taken = data, 0

    def take(self, *shape: int) -> Tensor:
        begin = self._taken
        self._taken += torch.Size(shape).numel()
        return self._data[begin : self._taken].view(shape)

    def share(self, elements: int) -> "_Arena":
        return _Arena(self.take(elements), self.form)


def _empty(elements: int, form: Form) -> Tensor:
    if form.device.type != "cpu" or elements == 0:
        return torch.empty(elements, dtype=form.dtype, device=form.device)
    block = allocate(elements * form.dtype.itemsize)
    return torch.frombuffer(block, dtype=torch.uint8).view(form.dtype)


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


def _shared(folded: Folded, form: Form) -> tuple[bool, bool]:
    """Whether A, and whether B, can be the published tensor itself."""
    if len(folded.blocks) != 1:
        return False, False
    [block] = folded.blocks
    fits = block.step.a.dtype == form.dtype and block.step.a.device == form.device
    return fits and block.keeps_a, fits and block.keeps_b


def _elements(folded: Folded, form: Form) -> int:
    """Return how many numbers `_delta` takes from its arena."""
    share_a, share_b = _shared(folded, form)
    a = 0 if share_a else sum(block.step.a.numel() for block in folded.blocks)
    b = 0 if share_b else sum(block.step.b.numel() for block in folded.blocks)
    return a + b + folded.scale_elements


def _delta(folded: Folded, factors: Products, arena: _Arena) -> LinearDelta:
    share_a, share_b = _shared(folded, arena.form)
    first = folded.blocks[0].step if folded.blocks else None
    return LinearDelta(
        a=first.a if first and share_a else _stacked_a(folded.blocks, factors, arena),
        b=first.b if first and share_b else _stacked_b(folded.blocks, factors, arena),
        input_scale=_kept(factors.inputs, arena),
        output_scale=_kept(factors.outputs, arena),
        bias_scale=_kept(factors.bias, arena),
    )


def _stacked_a(blocks: Sequence[Block], factors: Products, arena: _Arena) -> Tensor | None:
    """Return A, [sum of ranks, in], each block times the input factors after it."""
    if not blocks:
        return None
    ranks = [block.step.rank for block in blocks]
    a = arena.take(sum(ranks), blocks[0].step.a.shape[1])
    parts = a.split_with_sizes(ranks)
    torch._foreach_copy_(parts, [block.step.a for block in blocks])
    for part, block in zip(parts, blocks, strict=True):
        if (scale := factors.a_scale(block)) is not None:
            part.mul_(scale)
    return a


def _stacked_b(blocks: Sequence[Block], factors: Products, arena: _Arena) -> Tensor | None:
    """Return B, [out, sum of ranks], each block times all that multiplies it."""
    if not blocks:
        return None
    ranks, out = [block.step.rank for block in blocks], len(blocks[0].step.b)
    rows = arena.take(out, *ranks).T if len(blocks) == 1 else arena.take(sum(ranks), out)
    parts = rows.split_with_sizes(ranks)
    for part, block, scale in zip(parts, blocks, factors.b_scales, strict=True):
        _write(part, block.step.b.T, block.factor if scale is None else scale)
    return rows.T


def _write(target: Tensor, source: Tensor, scale: Tensor | float) -> None:
    """Write the product, multiplied in the type of the target; of one type it takes one pass."""
    if source.dtype == target.dtype and source.device == target.device:
        torch.mul(source, scale, out=target)
    else:
        target.copy_(source).mul_(scale)


def _kept(running: Sequence[Tensor], arena: _Arena) -> Tensor | None:
    """Return the product of all factors as part of the plan; None when there is none."""
    return arena.take(len(running[-1])).copy_(running[-1]) if running else None


def _check_soft_prompts(expert: Weighted) -> None:
    if expert.adapter.soft_prompts and expert.weight != 1.0:
        raise IncompatibleError(
            f"{expert.adapter.ref} has a soft prompt, which has no weight but 1",
            hint="name it without a weight, or with 0 to leave it out",
        )
