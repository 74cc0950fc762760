"""A plan as the closed form of decision 10: per linear layer, whatever the chain of experts.

``y = d * (W (u * x)) + B (A x) + e * b``. For a chain of LoRAs u, d and e are neutral, and A and B
are the experts' blocks one below (beside) the other: rank concatenation is exact where adding A to
A and B to B is not. Every factor is folded into its own block of B, in float32, once per plan.

Blocks are kept in the dtype of the activations: widening a bfloat16 or float16 adapter once is
exact, narrowing a folded one would not be. Where one expert alone changes a layer, has that dtype
and needs no factor, its published tensors are used as they lie in memory, with no copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.linear import LinearDelta
from expertctl.engine.lora import LoraTensors
from expertctl.engine.memory import allocate
from expertctl.engine.threads import threads
from expertctl.errors import IncompatibleError
from expertctl.package.adapter import shortened

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Weighted:
    """One expert of a chain and its weight in the plan."""

    adapter: LoadedAdapter
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """What a plan changes in each linear layer; ``nbytes`` were allocated for it."""

    deltas: Mapping[str, LinearDelta]
    nbytes: int


BASE_ALONE = CompiledPlan({}, 0)


@dataclass(frozen=True, slots=True)
class _Block:
    """One expert's part in one layer, with all that multiplies it."""

    lora: LoraTensors
    factor: float


def check_fit(adapter: LoadedAdapter, shapes: Shapes) -> None:
    """Demand that every tensor of an adapter has its place in the base.

    Raises:
        IncompatibleError: with every module that does not fit, or when there is none at all.
    """
    problems = [] if adapter.modules else ["it changes no module at all"]
    for module, lora in adapter.modules.items():
        wanted, found = shapes.get(module), (lora.b.shape[0], lora.a.shape[1])
        if wanted is None:
            problems.append(f"{module}: the base has no such linear layer")
        elif wanted != found:
            made = f"{found[0]} x {found[1]}"
            problems.append(f"{module}: made for {made}, the base has {wanted[0]} x {wanted[1]}")
    if problems:
        raise IncompatibleError(f"{adapter.ref} does not fit the base: {_lines(problems)}")


def compiled_bytes(chain: Sequence[Weighted], *, dtype: torch.dtype, device: torch.device) -> int:
    """Return what `compile_plan` will allocate."""
    elements = 0
    for blocks in _blocks(chain).values():
        share_a, share_b = _shared(blocks, dtype, device)
        elements += sum(
            (0 if share_a else block.lora.a.numel()) + (0 if share_b else block.lora.b.numel())
            for block in blocks
        )
    return elements * dtype.itemsize


def uses_in_place(chain: Sequence[Weighted], *, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether a compiled plan will refer to memory of its experts."""
    return any(_shared(blocks, dtype, device)[0] for blocks in _blocks(chain).values())


def compile_plan(
    chain: Sequence[Weighted], shapes: Shapes, *, dtype: torch.dtype, device: torch.device
) -> CompiledPlan:
    """Compile an ordered chain of weighted experts; weight 0 equals leaving the expert out.

    Raises:
        IncompatibleError: when a tensor of any expert has no place in the base.
    """
    for link in chain:
        check_fit(link.adapter, shapes)
    size = compiled_bytes(chain, dtype=dtype, device=device)
    arena = _Arena(size // dtype.itemsize, dtype, device)
    with threads(1):  # hundreds of small copies: waking others up would take longer than each
        deltas = {module: _delta(blocks, arena) for module, blocks in _blocks(chain).items()}
    return CompiledPlan(deltas, size)


class _Arena:
    """One allocation that all tensors of a compiled plan are cut from."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._data = _empty(elements, dtype, device)
        self._taken = 0

    def take(self, rows: int, columns: int) -> Tensor:
        begin, self._taken = self._taken, self._taken + rows * columns
        return self._data.as_strided((rows, columns), (columns, 1), begin)


def _empty(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or elements == 0:
        return torch.empty(elements, dtype=dtype, device=device)
    block = allocate(elements * dtype.itemsize)
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype)


def _blocks(chain: Iterable[Weighted]) -> dict[str, list[_Block]]:
    """Every layer's blocks, in plan order."""
    blocks: dict[str, list[_Block]] = {}
    for link in chain:
        if link.weight == 0.0:
            continue
        for module, lora in link.adapter.modules.items():
            blocks.setdefault(module, []).append(_Block(lora, link.weight * lora.scale))
    return blocks


def _shared(
    blocks: Sequence[_Block], dtype: torch.dtype, device: torch.device
) -> tuple[bool, bool]:
    """Whether A, and whether B, can be the published tensor itself."""
    lora = blocks[0].lora
    alone = len(blocks) == 1 and lora.a.dtype == dtype and lora.a.device == device
    return alone, alone and blocks[0].factor == 1.0


def _delta(blocks: Sequence[_Block], arena: _Arena) -> LinearDelta:
    share_a, share_b = _shared(blocks, arena.dtype, arena.device)
    first = blocks[0].lora
    return LinearDelta(
        a=first.a if share_a else _stacked_a(blocks, arena),
        b=first.b if share_b else _stacked_b(blocks, arena),
    )


def _stacked_a(blocks: Sequence[_Block], arena: _Arena) -> Tensor:
    """Return A, [sum of ranks, in]."""
    rank = sum(block.lora.rank for block in blocks)
    a = arena.take(rank, blocks[0].lora.a.shape[1])
    row = 0
    for block in blocks:
        a[row : row + block.lora.rank].copy_(block.lora.a)
        row += block.lora.rank
    return a


def _stacked_b(blocks: Sequence[_Block], arena: _Arena) -> Tensor:
    """Return B, [out, sum of ranks], each block times its factor."""
    rank = sum(block.lora.rank for block in blocks)
    b = arena.take(blocks[0].lora.b.shape[0], rank)
    column = 0
    for block in blocks:
        part = b[:, column : column + block.lora.rank]
        part.copy_(block.lora.b).mul_(block.factor)  # widened before it is multiplied
        column += block.lora.rank
    return b


def _lines(problems: Sequence[str]) -> str:
    return "; ".join(shortened(list(problems)))
