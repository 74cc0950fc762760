"""Routed experts in memory, what the kernels do with them one by one, and the plain formula.

A whole routed MLP: as a program of the kernels, and as the plain formula in numpy.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.layer_operations import swiglu_arguments, swiglu_kernel
from expertctl.engine.kernels.lora import gemm_arguments, gemm_items, gemm_kernel
from expertctl.engine.kernels.moe_layer import (
    MoePermutation,
    Scoring,
    allocate_permutation,
    combine_arguments,
    combine_kernel,
    drop_experts_arguments,
    drop_experts_kernel,
    gather_rows_arguments,
    gather_rows_kernel,
    moe_gemm_arguments,
    moe_gemm_items,
    moe_gemm_kernel,
    permute_arguments,
    permute_kernel,
    topk_routing_arguments,
    topk_routing_kernel,
)
from expertctl.engine.kernels.packed_format import FLOAT_SCHEMES, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import (
    ExpertMatrix,
    ExpertShape,
    PackedMatrix,
    pack_matrix,
    pack_rows,
    unpack_matrix,
)
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.quantisation import (
    PreparedActivations,
    activation_arguments,
    activation_kernel,
    allocate_activations,
    wrap_float_activations,
)
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.reference_gemm import make_random_numbers

Array = np.ndarray[Any, Any]
FOREIGN_VALUE = np.float32(77)
"""What stood in memory before, and stays where nothing is written."""


@dataclass(frozen=True)
class ExpertBlocks:
    """Experts that lie apart, each in a block of its own."""

    shape: ExpertShape
    blocks: Sequence[Array]
    places: Array

    def gate_up(self, expert: int) -> PackedMatrix:
        return self.shape.view_gate_up(self.blocks[expert])

    def down(self, expert: int) -> PackedMatrix:
        return self.shape.view_down(self.blocks[expert])


def make_random_experts(
    scheme: Scheme, count: int, *, hidden: int, intermediate: int, seed: int = 0
) -> ExpertBlocks:
    """Experts whose outputs are about as large as their inputs, in no order of addresses."""
    shape = ExpertShape(scheme, hidden, intermediate)
    blocks = [aligned_zeros(shape.nbytes, np.uint8) for _ in range(count)]
    np.random.default_rng(seed).shuffle(blocks)
    for number, block in enumerate(blocks):
        for matrix in (shape.view_gate_up(block), shape.view_down(block)):
            numbers = make_random_numbers(seed + 2 * number, matrix.rows, matrix.columns)
            pack_rows(matrix, numbers / np.float32(np.sqrt(matrix.columns)))
    return ExpertBlocks(shape, blocks, np.array([block.ctypes.data for block in blocks], np.int64))


def make_random_choices(seed: int, tokens: int, used: int, experts: int) -> Array:
    """Different experts for each token, int64 [tokens, used]."""
    random = np.random.default_rng(seed)
    found = [random.permutation(experts)[:used] for _ in range(tokens)]
    return np.array(found, np.int64).reshape(tokens, used)


def sort_choices(selected: Array, experts: int, *, tokens: int | None = None) -> MoePermutation:
    """What the kernel makes of choices, in memory that held something else."""
    order = allocate_permutation(experts, selected.size)
    for each in (order.counts, order.offsets, order.active, order.sources, order.inverse):
        each[...] = int(FOREIGN_VALUE)
    count = np.array([len(selected) if tokens is None else tokens], np.int64)
    arguments = permute_arguments(selected=selected, tokens=count, order=order)
    permute_kernel()(0, 1, arguments.ctypes.data)
    return order


def sort_choices_in_parts(
    selected: Array, experts: int, parts: Sequence[Array | None]
) -> Iterator[MoePermutation]:
    """Those who have a place now, then those behind them who have one; None: all who are left."""
    order = allocate_permutation(experts, selected.size)
    count = np.array([len(selected)], np.int64)
    for number, places in enumerate(parts):
        arguments = permute_arguments(
            selected=selected, tokens=count, order=order, block_addresses=places, append=number > 0
        )
        permute_kernel()(0, 1, arguments.ctypes.data)
        yield order


def allocate_gathered(scheme: Scheme, positions: int, columns: int) -> PreparedActivations:
    """Room for rows in the order of experts."""
    if scheme in FLOAT_SCHEMES:
        return wrap_float_activations(aligned_zeros((positions, columns), np.float32))
    return allocate_activations(scheme, positions, columns)


def gather_rows(
    order: MoePermutation, rows: PreparedActivations, *, scheme: Scheme, used: int
) -> PreparedActivations:
    """Rows of tokens in the order of experts."""
    positions = len(order.sources)
    out = allocate_gathered(scheme, positions, rows.data.shape[1])
    arguments = gather_rows_arguments(order=order, top_k=used, rows=rows, gathered=out)
    gather_rows_kernel()(0, positions, arguments.ctypes.data)
    return out


@dataclass(frozen=True)
class RoutedProduct:
    """What a routed product wrote, and whom it missed."""

    rows: Array
    absent: int


def run_routed_gemm(
    part: ExpertMatrix,
    places: Array,
    order: MoePermutation,
    rows: PreparedActivations,
    *,
    plain: bool = False,
    active: int | None = None,
    cuts: Sequence[int] = (),
) -> RoutedProduct:
    """Products of rows with the matrices of their experts, [positions, filled rows of the part].

    Items are cut into ranges there, which are done from the last to the first.
    """
    out = aligned_zeros((len(order.sources), part.blocks * LANES), np.float32)
    out[...] = FOREIGN_VALUE
    most = order.expert_count if active is None else active
    items, absent = np.array([moe_gemm_items(part, active=most)], np.int64), np.zeros(1, np.int64)
    arguments = moe_gemm_arguments(
        part=part,
        block_addresses=places,
        order=order,
        rows=rows,
        out=out,
        items=items,
        absent=absent,
    )
    ends = [0, *cuts, int(items[0])]
    for first, last in reversed(list(itertools.pairwise(ends))):
        moe_gemm_kernel(part.scheme, portable=plain)(first, last, arguments.ctypes.data)
    return RoutedProduct(out, int(absent[0]))


@dataclass(frozen=True)
class RouterRule:
    """How tokens choose; ``hits`` float32 [experts]: leave out those that are not at hand."""

    used: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    scale: float = 1.0
    hits: Array | None = None


def compute_routed_mlp(
    experts: ExpertBlocks, router: Array, rule: RouterRule, tokens: Array
) -> Array:
    """What experts add to each token, in float64."""
    found = np.zeros(tokens.shape)
    for token, row in enumerate(tokens.astype(np.float64)):
        selected, weights = _choose_experts(router.astype(np.float64) @ row, rule)
        for expert, weight in zip(selected, weights, strict=True):
            gate, up = np.split(unpack_matrix(experts.gate_up(expert)).astype(np.float64) @ row, 2)
            inner = gate / (1 + np.exp(-gate)) * up
            found[token] += weight * (
                unpack_matrix(experts.down(expert)).astype(np.float64) @ inner
            )
    return found


def _choose_experts(logits: Array, rule: RouterRule) -> tuple[Array, Array]:
    """The experts of one token that are at hand, and their weights."""
    parts = np.exp(logits - logits.max())
    scores = parts / parts.sum() if rule.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    selected = np.argsort(-logits, kind="stable")[: rule.used]
    weights = scores[selected]
    if rule.normalised:
        weights = weights / weights.sum()
    weights = weights * rule.scale
    if rule.hits is None:
        return selected, weights
    stay = rule.hits[selected] > 0
    return selected[stay], weights[stay] / weights[stay].sum() * weights.sum()


class RoutedMlpProgram:
    """A program that adds what experts make of ``rows`` to ``out``, for so many tokens at most."""

    def __init__(
        self,
        experts: ExpertBlocks,
        router: Array,
        rule: RouterRule,
        *,
        tokens: int,
    ) -> None:
        shape, positions = experts.shape, tokens * rule.used
        self._experts, self._rule = experts, rule
        self._builder, self._scheme = ProgramBuilder(), shape.scheme
        self.tokens, self.positions = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.absent = np.zeros(1, np.int64)
        self.rows = aligned_zeros((tokens, shape.hidden), np.float32)
        self.out = aligned_zeros((tokens, experts.shape.down_matrix.blocks * LANES), np.float32)
        self.selected = aligned_zeros((tokens, rule.used), np.int64)
        self.weights = aligned_zeros((tokens, rule.used), np.float32)
        self.skipped = aligned_zeros(tokens, np.float32)
        self.order = allocate_permutation(len(experts.blocks), positions)
        self._most = min(len(experts.blocks), positions)
        self._route(router)
        self._experts_of_rows()
        self.program: Program = self._builder.build()

    def run(self, crew: ThreadPool, tokens: Array, *, workers: int | None = None) -> Array:
        """What experts add to some tokens."""
        self.tokens[0], self.positions[0] = len(tokens), len(tokens) * self._rule.used
        self.rows[: len(tokens)], self.out[...] = tokens, 0
        crew.run(self.program, workers=workers)
        return self.out[: len(tokens), : self._experts.shape.hidden].copy()

    def _route(self, router: Array) -> None:
        matrix, rule = pack_matrix(router, Scheme.FLOAT32), self._rule
        logits = aligned_zeros((len(self.rows), matrix.blocks * LANES), np.float32)
        product = gemm_arguments(
            matrix=matrix, rows=wrap_float_activations(self.rows), out=logits, tokens=self.tokens
        )
        self._builder.add(gemm_kernel(Scheme.FLOAT32), product, gemm_items(matrix))
        scale = np.array([rule.scale], np.float32)
        choice = topk_routing_arguments(
            logits=logits,
            bias=None,
            scale=scale,
            normalised=rule.normalised,
            experts=len(router),
            selected=self.selected,
            weights=self.weights,
        )
        self._builder.add(topk_routing_kernel(rule.scoring), choice, self.tokens)
        if rule.hits is not None:
            skipping = drop_experts_arguments(
                hits=rule.hits, selected=self.selected, weights=self.weights, dropped=self.skipped
            )
            self._builder.add(drop_experts_kernel(), skipping, self.tokens)
        self._builder.keep_alive(matrix, logits, scale)

    def _experts_of_rows(self) -> None:
        shape, builder, scheme = self._experts.shape, self._builder, self._scheme
        sorting = permute_arguments(selected=self.selected, tokens=self.tokens, order=self.order)
        builder.add(permute_kernel(), sorting, 1)
        rows = wrap_float_activations(self.rows)
        if scheme not in FLOAT_SCHEMES:
            rows = self._prepare(self.rows, self.tokens)
        positions = len(self.order.sources)
        gathered = allocate_gathered(scheme, positions, rows.data.shape[1])
        gathering = gather_rows_arguments(
            order=self.order, top_k=self._rule.used, rows=rows, gathered=gathered
        )
        builder.add(gather_rows_kernel(), gathering, self.positions)
        gates = self._product(shape.gate_up_matrix, gathered)
        wide = shape.intermediate
        gating = swiglu_arguments(
            gate=gates[:, :wide], up=gates[:, wide : 2 * wide], out=gates[:, :wide], width=wide
        )
        builder.add(swiglu_kernel(), gating, self.positions)
        inner = wrap_float_activations(gates[:, :wide])
        if scheme not in FLOAT_SCHEMES:
            inner = self._prepare(gates[:, :wide], self.positions)
        builder.keep_alive(rows, gathered, inner)
        self._merge(self._product(shape.down_matrix, inner))

    def _prepare(self, rows: Array, count: Array) -> PreparedActivations:
        room = allocate_gathered(self._scheme, *rows.shape)
        arguments = activation_arguments(rows=rows, columns=rows.shape[1], prepared=room)
        self._builder.add(activation_kernel(self._scheme), arguments, count)
        return room

    def _product(self, part: ExpertMatrix, rows: PreparedActivations) -> Array:
        out = aligned_zeros((len(rows.data), part.blocks * LANES), np.float32)
        items = np.array([moe_gemm_items(part, active=self._most)], np.int64)
        arguments = moe_gemm_arguments(
            part=part,
            block_addresses=self._experts.places,
            order=self.order,
            rows=rows,
            out=out,
            items=items,
            absent=self.absent,
        )
        self._builder.add(moe_gemm_kernel(self._scheme), arguments, items)
        self._builder.keep_alive(out)
        return out

    def _merge(self, rows: Array) -> None:
        arguments = combine_arguments(
            order=self.order,
            weights=self.weights,
            rows=rows,
            out=self.out,
            width=self._experts.shape.hidden,
        )
        self._builder.add(combine_kernel(), arguments, self.tokens)
