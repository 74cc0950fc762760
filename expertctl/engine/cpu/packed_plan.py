"""Packing adapter plans: layers are fused in float32, group by group, and stored for kernels.

All matrices and vectors are allocated from one block whose size is known in advance; those that are
read together are adjacent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from expertctl.engine.adapters.fuse import FoldedChain
from expertctl.engine.adapters.plan_tensors import (
    FloatArena,
    FloatDelta,
    compile_layer_group,
    count_elements,
    group_alike_layers,
    group_scratch_bytes,
)
from expertctl.engine.arrays import STORED_DTYPES, VECTOR_BYTES, AnyArray, aligned_zeros
from expertctl.engine.kernels.lora import (
    A_BLOCKS_WORD,
    B_VECTORS_WORD,
    EXPAND_BLOCKS,
    RECORD_WORDS,
    SCALE_WORDS,
    ModuleAdapter,
    lora_column_step,
    shrink_blocks,
)
from expertctl.engine.kernels.packed_format import (
    LANES,
    SCALES_BYTES,
    AdapterItemCounts,
    FusedProjection,
    PackedDeltas,
    PlanPacking,
    Scheme,
    find_fused_projections,
    is_routed_module,
    list_routed_modules,
    rows_per_portion,
)
from expertctl.engine.kernels.packed_matrix import (
    BlockAllocator,
    PackedMatrix,
    allocate_matrix,
    pack_rows,
)
from expertctl.engine.memory.host import allocate
from expertctl.errors import IncompatibleError

_FLOAT_BYTES = 4
_PACKING_BYTES = 16
"""Bytes per number packed at once: original, padded, rounded, and as steps."""
_PART_BYTES = 2 << 10
"""Bytes of the Python objects per layer; routed experts have thousands."""
_LARGEST_HALF = 65504.0
_PUBLISHED = {
    frozenset({STORED_DTYPES["BF16"]}): Scheme.BFLOAT16,
    frozenset({STORED_DTYPES["F16"]}): Scheme.FLOAT16,
}


@dataclass(frozen=True)
class PackedPlanCompiler:
    """Folded layers to be packed; ``shapes`` are those of the base's layers."""

    layers: Mapping[str, FoldedChain]
    shapes: Mapping[str, tuple[int, int]]
    packing: PlanPacking

    @cached_property
    def scheme(self) -> Scheme:
        """The storage scheme of its matrices."""
        return _choose_scheme(self.packing, self.layers.values())

    @cached_property
    def projections(self) -> tuple[FusedProjection, ...]:
        """The fused projections of the base."""
        return find_fused_projections(self.shapes.keys())

    @cached_property
    def routed_layers(self) -> tuple[str, ...]:
        """The modules of all routed experts of the base, if the plan changes any."""
        changes = any(map(is_routed_module, self.layers))
        return list_routed_modules(self.shapes.keys()) if changes else ()

    @property
    def width(self) -> int:
        """The maximum number of columns between the A and the B of a projection."""
        return max((self._projection_width(site) for site in self.projections), default=0)

    @property
    def shares_adapter_memory(self) -> bool:
        """Always False: published tensors are never used in place."""
        return False

    @property
    def nbytes(self) -> int:
        """The bytes that `compile` will allocate and keep."""
        table = 8 * RECORD_WORDS * (_count_modules(self.projections) + len(self.routed_layers))
        return sum(self._layer_sizes(name).total for name in self.layers) + table

    def scratch_bytes(self, workers: int) -> int:
        """Return the maximum additional bytes that this many workers need."""
        each = [self._group_scratch_bytes(group) for group in group_alike_layers(self.layers)]
        routed = sum(map(is_routed_module, self.layers))
        return sum(sorted(each, reverse=True)[:workers]) + routed * _PART_BYTES

    def compile(self, workers: int) -> PackedDeltas:
        """Fuse and pack each group into its place.

        Raises:
            IncompatibleError: for numbers beyond the range of float16, or for input scales of gate
                or up of a routed expert.
        """
        _check_routed_layers(self.layers)
        memory = _PlanMemory(sum(self._layer_sizes(name).total for name in self.layers))
        parts = dict(self._place_layers(memory))

        def pack_group(names: Sequence[str]) -> None:
            self._pack_group([(self.layers[name], parts[name], name) for name in names])

        with ExitStack() as stack:
            each = stack.enter_context(ThreadPoolExecutor(workers)).map if workers > 1 else map
            list(each(pack_group, group_alike_layers(self.layers)))
        return self._make_deltas(parts, memory)

    def _place_layers(self, memory: "_PlanMemory") -> Iterator[tuple[str, ModuleAdapter]]:
        """Allocate every layer; those of one projection are consecutive, A first."""
        alone = [(name,) for name in self.routed_layers]
        for modules in (*(site.modules for site in self.projections), *alone):
            there = [(name, self._layer_sizes(name)) for name in modules if name in self.layers]
            all_a = [memory.allocate_matrix(self.scheme, *sizes.a) for _, sizes in there]
            column = 0
            for (name, sizes), a in zip(there, all_a, strict=True):
                b = memory.allocate_matrix(self.scheme, *sizes.b)
                vectors = [memory.allocate_vector(size) for size in sizes.vectors]
                adapter = ModuleAdapter(
                    a=a,
                    b=b,
                    column=column,
                    input_scale=vectors[0],
                    output_scale=vectors[1],
                    bias_scale=vectors[2],
                )
                yield name, adapter
                column += _round_up(sizes.rank, lora_column_step(self.scheme))

    def _layer_sizes(self, name: str) -> "_LayerSizes":
        folded, (out, into) = self.layers[name], self.shapes[name]
        vectors = (
            into if folded.inputs else 0,
            out if folded.outputs else 0,
            out if folded.bias_factors else 0,
        )
        return _LayerSizes(self.scheme, folded.rank, out, into, vectors)

    def _group_scratch_bytes(self, group: Sequence[str]) -> int:
        folded = [self.layers[name] for name in group]
        numbers = sum(map(count_elements, folded))
        widest = max(max(max(self.shapes[name]), folded[0].rank) for name in group)
        packing = _PACKING_BYTES * rows_per_portion(widest) * widest
        return _FLOAT_BYTES * numbers + group_scratch_bytes(folded) + packing

    def _pack_group(self, layers: Sequence[tuple[FoldedChain, ModuleAdapter, str]]) -> None:
        folded = [each for each, _, _ in layers]
        numbers = sum(map(count_elements, folded))
        deltas = compile_layer_group(folded, FloatArena(np.empty(numbers, np.float32)))
        for delta, (_, part, name) in zip(deltas, layers, strict=True):
            _write_module(part, delta, what=name)

    def _make_deltas(
        self, parts: Mapping[str, ModuleAdapter], memory: "_PlanMemory"
    ) -> PackedDeltas:
        names = [*(name for site in self.projections for name in site.modules), *self.routed_layers]
        table = aligned_zeros((len(names), RECORD_WORDS), np.int64)
        first = _count_modules(self.projections)
        for number, name in enumerate(names):
            if name in parts:
                table[number] = parts[name].to_record()
        return PackedDeltas(
            scheme=self.scheme,
            modules=frozenset(self.layers),
            table=table,
            item_counts=_count_items(table[:first], self.projections, self.scheme, self.shapes),
            width=self.width,
            nbytes=self.nbytes,
            first_routed_record=first if self.routed_layers else None,
            routed_bytes=sum(
                self._layer_sizes(name).total for name in self.layers if is_routed_module(name)
            ),
            has_routed_scales=bool(table[first:, SCALE_WORDS.start].any()),
            _kept=(memory,),
        )

    def _projection_width(self, site: FusedProjection) -> int:
        ranks = [self.layers[name].rank for name in site.modules if name in self.layers]
        return sum(_round_up(rank, lora_column_step(self.scheme)) for rank in ranks)


@dataclass(frozen=True, slots=True)
class _LayerSizes:
    """The sizes of one layer; a rank or length of 0 means that the part is absent."""

    scheme: Scheme
    rank: int
    out_features: int
    in_features: int
    vectors: tuple[int, int, int]

    @property
    def a(self) -> tuple[int, int]:
        return self.rank, self.in_features

    @property
    def b(self) -> tuple[int, int]:
        return (self.out_features, self.rank) if self.rank else (0, 0)

    @property
    def total(self) -> int:
        matrices = sum(_packed_matrix_bytes(self.scheme, *shape) for shape in (self.a, self.b))
        return matrices + sum(_round_up(_FLOAT_BYTES * size, VECTOR_BYTES) for size in self.vectors)


class _PlanMemory:
    """One block of memory that matrices and vectors are allocated from."""

    def __init__(self, size: int) -> None:
        self._allocator = BlockAllocator(allocate(size))

    def allocate_matrix(self, scheme: Scheme, rows: int, columns: int) -> PackedMatrix | None:
        allocate = self._allocator.allocate
        return allocate_matrix(scheme, rows, columns, allocate=allocate) if rows else None

    def allocate_vector(self, size: int) -> AnyArray | None:
        return self._allocator.allocate(size, np.float32) if size else None


def _check_routed_layers(layers: Mapping[str, FoldedChain]) -> None:
    """Refuse input scales that would need separate inputs for gate and up."""
    for name, folded in layers.items():
        if folded.inputs and is_routed_module(name) and not name.endswith(".down_proj"):
            raise IncompatibleError(
                f"{name}: the plan scales its input, but gate and up of a routed expert share one",
                hint="leave out the expert that scales it; outputs may be scaled",
            )


def _choose_scheme(packing: PlanPacking, layers: Iterable[FoldedChain]) -> Scheme:
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


def _write_module(part: ModuleAdapter, delta: FloatDelta, *, what: str) -> None:
    for matrix, block in ((part.a, delta.a), (part.b, delta.b)):
        if matrix is not None and block is not None:
            _check_range(matrix.scheme, block, what=what)
            if not pack_rows(matrix, block):
                raise IncompatibleError(
                    f"{what}: the plan's values include NaN or infinity, which int8 cannot store",
                    hint="leave out the expert that has them",
                )
    for vector, scale in (
        (part.input_scale, delta.input_scale),
        (part.output_scale, delta.output_scale),
        (part.bias_scale, delta.bias_scale),
    ):
        if vector is not None and scale is not None:
            vector[...] = scale


def _check_range(scheme: Scheme, block: AnyArray, *, what: str) -> None:
    if scheme is not Scheme.FLOAT16:
        return
    largest = float(max(block.max(), -block.min()))
    if _LARGEST_HALF < largest < float("inf"):
        raise IncompatibleError(
            f"{what}: the plan's values reach {largest:.3g}, float16 ends at {_LARGEST_HALF:.0f}",
            hint="use the experts with smaller weights, or try --adapter-dtype int8",
        )


def _count_items(
    table: AnyArray,
    sites: Sequence[FusedProjection],
    scheme: Scheme,
    shapes: Mapping[str, tuple[int, int]],
) -> AdapterItemCounts:
    firsts = [site.first for site in sites]
    outs = [shapes.get(name, (0, 0))[0] for site in sites for name in site.modules]
    out_items = -(-np.array(outs, np.int64) // (LANES * EXPAND_BLOCKS))

    def by_site(items: AnyArray) -> AnyArray:
        summed = np.zeros(len(sites), np.int64)
        np.add.reduceat(items, firsts, out=summed)
        return summed

    def shrink(*, single_sequence: bool) -> AnyArray:
        blocks = shrink_blocks(scheme, single_sequence=single_sequence)
        return by_site(-(-table[:, A_BLOCKS_WORD] // blocks))

    return AdapterItemCounts(
        shrink_decode=shrink(single_sequence=False),
        shrink_prefill=shrink(single_sequence=True),
        expand=by_site(np.where(table[:, B_VECTORS_WORD] > 0, out_items, 0)),
        scales=by_site((table[:, SCALE_WORDS] != 0).sum(axis=1)),
    )


def _count_modules(sites: Sequence[FusedProjection]) -> int:
    return sum(len(site.modules) for site in sites)


def _packed_matrix_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Return the bytes of a matrix; its data and its scales are aligned to vectors."""
    layout, blocks = scheme.layout, _round_up(rows, LANES) // LANES
    data = blocks * layout.count_vectors(columns) * layout.vector_bytes
    scales = blocks * layout.count_groups(columns) * SCALES_BYTES
    return _round_up(data, VECTOR_BYTES) + _round_up(scales, VECTOR_BYTES)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
