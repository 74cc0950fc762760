"""Packing a plan: its layers are folded in float32, some at a time, and stored for kernels.

All matrices and vectors are cut from one block of memory of a size that is known before; those that
are read together lie together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.delta_tensors import Arena, compile_alike, elements, groups
from expertctl.engine.fold import Folded
from expertctl.engine.kernels.batch import (
    A_BLOCKS,
    B_VECTORS,
    RECORD_WORDS,
    VECTORS,
    ModulePart,
    column_step,
)
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.low_rank import EXPAND_BLOCKS, reduce_blocks
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.packed import PackedMatrix, empty_matrix, pack_into, portion_rows
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.linear import LinearDelta
from expertctl.engine.memory import allocate
from expertctl.engine.packed_delta import (
    PackedDeltas,
    Packing,
    Site,
    Work,
    is_routed,
    routed_modules,
    sites,
)
from expertctl.engine.products import scratch_bytes
from expertctl.engine.threads import threads
from expertctl.errors import IncompatibleError

Numbers = np.ndarray[Any, Any]
_CPU, _FLOAT_BYTES = torch.device("cpu"), 4
_PACKING_BYTES = 16
"""Bytes for each number of what is packed in one go: as it was, filled, rounded, by steps."""
_PART_BYTES = 2 << 10
"""Of the objects that say where a layer lies; routed experts have thousands."""
_LARGEST_HALF = 65504.0
_PUBLISHED = {
    frozenset({torch.bfloat16}): Scheme.BFLOAT16,
    frozenset({torch.float16}): Scheme.FLOAT16,
}


@dataclass(frozen=True)
class PackedPlan:
    """Folded layers that are to be packed; ``shapes`` are those of the base's layers."""

    layers: Mapping[str, Folded]
    shapes: Mapping[str, tuple[int, int]]
    packing: Packing

    @cached_property
    def scheme(self) -> Scheme:
        """What its matrices are stored in."""
        return _scheme(self.packing, self.layers.values())

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites of the base."""
        return sites(self.shapes.keys())

    @cached_property
    def routed(self) -> tuple[str, ...]:
        """The layers of all routed experts of the base, where the plan changes any."""
        changes = any(is_routed(name) for name in self.layers)
        return routed_modules(self.shapes.keys()) if changes else ()

    @property
    def width(self) -> int:
        """How many columns lie between the A and the B of a site, at most."""
        return max((self._width(site) for site in self.sites), default=0)

    @property
    def uses_in_place(self) -> bool:
        """Published tensors are never used as they lie in memory."""
        return False

    @property
    def nbytes(self) -> int:
        """What `compile` will allocate and keep."""
        table = 8 * RECORD_WORDS * (_modules(self.sites) + len(self.routed))
        return sum(self._sizes(name).total for name in self.layers) + table

    def scratch_bytes(self, workers: int) -> int:
        """Return what so many workers need besides, at most."""
        each = [self._group_scratch(group) for group in groups(self.layers)]
        routed = sum(is_routed(name) for name in self.layers)
        return sum(sorted(each, reverse=True)[:workers]) + routed * _PART_BYTES

    def compile(self, workers: int) -> PackedDeltas:
        """Fold and pack group after group, each into its place.

        Raises:
            IncompatibleError: for numbers beyond those of float16, or factors of the input of
                gate or up of a routed expert.
        """
        _check_routed(self.layers)
        memory = _Memory(sum(self._sizes(name).total for name in self.layers))
        parts = dict(self._parts(memory))

        def pack_group(names: Sequence[str]) -> None:
            self._pack([(self.layers[name], parts[name], name) for name in names])

        with threads(1), ExitStack() as stack:
            each = stack.enter_context(ThreadPoolExecutor(workers)).map if workers > 1 else map
            list(each(pack_group, groups(self.layers)))
        return self._deltas(parts, memory)

    def _parts(self, memory: "_Memory") -> Iterator[tuple[str, ModulePart]]:
        """Give every layer its place; those of one site behind each other, A first."""
        alone = [(name,) for name in self.routed]
        for modules in (*(site.modules for site in self.sites), *alone):
            there = [(name, self._sizes(name)) for name in modules if name in self.layers]
            all_a = [memory.matrix(self.scheme, *sizes.a) for _, sizes in there]
            column = 0
            for (name, sizes), a in zip(there, all_a, strict=True):
                b = memory.matrix(self.scheme, *sizes.b)
                vectors = [memory.vector(size) for size in sizes.vectors]
                yield (
                    name,
                    ModulePart(
                        a=a,
                        b=b,
                        column=column,
                        input_scale=vectors[0],
                        output_scale=vectors[1],
                        bias_scale=vectors[2],
                    ),
                )
                column += _filled(sizes.rank, column_step(self.scheme))

    def _sizes(self, name: str) -> "_Sizes":
        folded, (out, into) = self.layers[name], self.shapes[name]
        vectors = (
            into if folded.inputs else 0,
            out if folded.outputs else 0,
            out if folded.on_bias else 0,
        )
        return _Sizes(self.scheme, folded.rank, out, into, vectors)

    def _group_scratch(self, group: Sequence[str]) -> int:
        folded = [self.layers[name] for name in group]
        numbers = sum(elements(each, torch.float32, _CPU) for each in folded)
        widest = max(max(max(self.shapes[name]), folded[0].rank) for name in group)
        packing = _PACKING_BYTES * portion_rows(widest) * widest
        return _FLOAT_BYTES * numbers + scratch_bytes(folded) + packing

    def _pack(self, layers: Sequence[tuple[Folded, ModulePart, str]]) -> None:
        folded = [each for each, _, _ in layers]
        numbers = sum(elements(each, torch.float32, _CPU) for each in folded)
        deltas = compile_alike(folded, Arena(torch.empty(numbers)))
        for delta, (_, part, name) in zip(deltas, layers, strict=True):
            _fill(part, delta, what=name)

    def _deltas(self, parts: Mapping[str, ModulePart], memory: "_Memory") -> PackedDeltas:
        names = [*(name for site in self.sites for name in site.modules), *self.routed]
        table = aligned((len(names), RECORD_WORDS), np.int64)
        first = _modules(self.sites)
        for number, name in enumerate(names):
            if name in parts:
                table[number] = parts[name].record()
        return PackedDeltas(
            scheme=self.scheme,
            modules=frozenset(self.layers),
            table=table,
            work=_work(table[:first], self.sites, self.scheme, self.shapes),
            width=self.width,
            nbytes=self.nbytes,
            routed=first if self.routed else None,
            routed_bytes=sum(self._sizes(name).total for name in self.layers if is_routed(name)),
            scales_routed=bool(table[first:, VECTORS.start].any()),
            _kept=(memory,),
        )

    def _width(self, site: Site) -> int:
        ranks = [self.layers[name].rank for name in site.modules if name in self.layers]
        return sum(_filled(rank, column_step(self.scheme)) for rank in ranks)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What one layer takes; a rank or a length of 0 stands for what is not there."""

    scheme: Scheme
    rank: int
    out: int
    into: int
    vectors: tuple[int, int, int]

    @property
    def a(self) -> tuple[int, int]:
        return self.rank, self.into

    @property
    def b(self) -> tuple[int, int]:
        return (self.out, self.rank) if self.rank else (0, 0)

    @property
    def total(self) -> int:
        matrices = sum(_matrix_bytes(self.scheme, *shape) for shape in (self.a, self.b))
        return matrices + sum(_filled(_FLOAT_BYTES * size, VECTOR_BYTES) for size in self.vectors)


class _Memory:
    """One block of memory that matrices and vectors are cut from."""

    def __init__(self, size: int) -> None:
        self._data = np.frombuffer(allocate(size), np.uint8)
        self._taken = 0

    def matrix(self, scheme: Scheme, rows: int, columns: int) -> PackedMatrix | None:
        return empty_matrix(scheme, rows, columns, take=self._take) if rows else None

    def vector(self, size: int) -> Numbers | None:
        return self._take(size, np.float32) if size else None

    def _take(self, shape: int | tuple[int, ...], dtype: Any) -> Numbers:
        begin, size = self._taken, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._taken += _filled(size, VECTOR_BYTES)
        taken: Numbers = self._data[begin : begin + size].view(dtype)
        return taken.reshape(shape)


def _check_routed(layers: Mapping[str, Folded]) -> None:
    """Refuse factors that would need one input for the product of gate and another for up."""
    for name, folded in layers.items():
        if folded.inputs and is_routed(name) and not name.endswith(".down_proj"):
            raise IncompatibleError(
                f"{name}: the plan has factors of its input, which a routed expert reads once for "
                "its gate and its up",
                hint="leave out the expert that scales it; what they write may be scaled",
            )


def _scheme(packing: Packing, layers: Iterable[Folded]) -> Scheme:
    match packing.adapters:
        case "fp16":
            return Scheme.FLOAT16
        case "int8":
            return Scheme.INT8
        case "published":
            if packing.base is Scheme.FLOAT32:
                return Scheme.FLOAT32
            steps = [block.step for folded in layers for block in folded.blocks]
            published = frozenset(part.dtype for step in steps for part in (step.a, step.b))
            return _PUBLISHED.get(published, Scheme.FLOAT32)


def _fill(part: ModulePart, delta: LinearDelta, *, what: str) -> None:
    for matrix, block in ((part.a, delta.a), (part.b, delta.b)):
        if matrix is not None and block is not None:
            _check_range(matrix.scheme, block, what=what)
            pack_into(matrix, block.float().numpy())
    for vector, scale in (
        (part.input_scale, delta.input_scale),
        (part.output_scale, delta.output_scale),
        (part.bias_scale, delta.bias_scale),
    ):
        if vector is not None and scale is not None:
            vector[...] = scale.float().numpy()


def _check_range(scheme: Scheme, block: Tensor, *, what: str) -> None:
    if scheme is not Scheme.FLOAT16:
        return
    largest = float(block.abs().max())
    if _LARGEST_HALF < largest < float("inf"):
        raise IncompatibleError(
            f"{what}: the plan's numbers reach {largest:.3g}, float16 ends at {_LARGEST_HALF:.0f}",
            hint="give the experts smaller weights, or try --adapter-dtype int8",
        )


def _work(
    table: Numbers, sites: Sequence[Site], scheme: Scheme, shapes: Mapping[str, tuple[int, int]]
) -> Work:
    firsts = [site.first for site in sites]
    outs = [shapes.get(name, (0, 0))[0] for site in sites for name in site.modules]
    out_items = -(-np.array(outs, np.int64) // (LANES * EXPAND_BLOCKS))

    def by_site(items: Numbers) -> Numbers:
        summed = np.zeros(len(sites), np.int64)
        np.add.reduceat(items, firsts, out=summed)
        return summed

    def reduce(*, together: bool) -> Numbers:
        return by_site(-(-table[:, A_BLOCKS] // reduce_blocks(scheme, together=together)))

    return Work(
        reduce_steps=reduce(together=False),
        reduce_prompts=reduce(together=True),
        expand=by_site(np.where(table[:, B_VECTORS] > 0, out_items, 0)),
        scales=by_site((table[:, VECTORS] != 0).sum(axis=1)),
    )


def _modules(sites: Sequence[Site]) -> int:
    return sum(len(site.modules) for site in sites)


def _matrix_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Return the bytes of a matrix; its numbers and its scales begin where a vector may."""
    layout, blocks = scheme.layout, _filled(rows, LANES) // LANES
    data = blocks * layout.vectors(columns) * layout.vector_bytes
    return _filled(data, VECTOR_BYTES) + blocks * layout.groups(columns) * VECTOR_BYTES


def _filled(number: int, step: int) -> int:
    return -(-number // step) * step
