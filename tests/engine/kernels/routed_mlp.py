"""A whole routed MLP: as a program of the kernels, and as the plain formula in numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.elementwise import gate_arguments, gate_kernel
from expertctl.engine.kernels.expert_block import ExpertPart
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.merging import merge_arguments, merge_kernel
from expertctl.engine.kernels.multiply import multiply_arguments, multiply_items, multiply_kernel
from expertctl.engine.kernels.packed import pack, unpack
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.routed import (
    routed_arguments,
    routed_items,
    routed_kernel,
    routed_merge_arguments,
    routed_merge_items,
    routed_merge_kernel,
)
from expertctl.engine.kernels.routing import (
    Scoring,
    route_arguments,
    route_kernel,
    skip_arguments,
    skip_kernel,
)
from expertctl.engine.kernels.rows import (
    PreparedRows,
    prepare_arguments,
    prepare_kernel,
    rows_as_they_are,
)
from expertctl.engine.kernels.scheme import FLOATING, Scheme
from expertctl.engine.kernels.sorting import (
    gather_arguments,
    gather_kernel,
    room_for_order,
    sort_arguments,
    sort_kernel,
)
from tests.engine.kernels.routed_experts import Experts, room_for_gathered

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rule:
    """How tokens choose; ``hits`` float32 [experts]: leave out those that are not at hand."""

    used: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    scale: float = 1.0
    hits: Array | None = None


def plain_routed_mlp(experts: Experts, router: Array, rule: Rule, tokens: Array) -> Array:
    """What experts add to each token, in float64."""
    found = np.zeros(tokens.shape)
    for token, row in enumerate(tokens.astype(np.float64)):
        selected, weights = _chosen(router.astype(np.float64) @ row, rule)
        for expert, weight in zip(selected, weights, strict=True):
            gate, up = np.split(unpack(experts.gate_up(expert)).astype(np.float64) @ row, 2)
            inner = gate / (1 + np.exp(-gate)) * up
            found[token] += weight * (unpack(experts.down(expert)).astype(np.float64) @ inner)
    return found


def _chosen(logits: Array, rule: Rule) -> tuple[Array, Array]:
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


class RoutedMlp:
    """A program that adds what experts make of ``rows`` to ``out``, for so many tokens at most."""

    def __init__(
        self, experts: Experts, router: Array, rule: Rule, *, tokens: int, fused: bool = False
    ) -> None:
        shape, positions = experts.shape, tokens * rule.used
        self._experts, self._rule = experts, rule
        self._builder, self._scheme = ProgramBuilder(), shape.scheme
        self.tokens, self.positions = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.absent = np.zeros(1, np.int64)
        self.rows = aligned((tokens, shape.hidden), np.float32)
        self.out = aligned((tokens, experts.shape.down_part.blocks * LANES), np.float32)
        self.selected = aligned((tokens, rule.used), np.int64)
        self.weights = aligned((tokens, rule.used), np.float32)
        self.skipped = aligned(tokens, np.float32)
        self.order = room_for_order(len(experts.blocks), positions)
        self._most = min(len(experts.blocks), positions)
        self._route(router)
        self._experts_of_rows(fused=fused)
        self.program: Program = self._builder.build()

    def run(self, crew: Crew, tokens: Array, *, workers: int | None = None) -> Array:
        """What experts add to some tokens."""
        self.tokens[0], self.positions[0] = len(tokens), len(tokens) * self._rule.used
        self.rows[: len(tokens)], self.out[...] = tokens, 0
        crew.run(self.program, workers=workers)
        return self.out[: len(tokens), : self._experts.shape.hidden].copy()

    def _route(self, router: Array) -> None:
        matrix, rule = pack(router, Scheme.FLOAT32), self._rule
        logits = aligned((len(self.rows), matrix.blocks * LANES), np.float32)
        product = multiply_arguments(
            matrix=matrix, rows=rows_as_they_are(self.rows), out=logits, tokens=self.tokens
        )
        self._builder.add(multiply_kernel(Scheme.FLOAT32), product, multiply_items(matrix))
        scale = np.array([rule.scale], np.float32)
        choice = route_arguments(
            logits=logits,
            bias=None,
            scale=scale,
            normalised=rule.normalised,
            experts=len(router),
            selected=self.selected,
            weights=self.weights,
        )
        self._builder.add(route_kernel(rule.scoring), choice, self.tokens)
        if rule.hits is not None:
            skipping = skip_arguments(
                hits=rule.hits, selected=self.selected, weights=self.weights, skipped=self.skipped
            )
            self._builder.add(skip_kernel(), skipping, self.tokens)
        self._builder.keep(matrix, logits, scale)

    def _experts_of_rows(self, *, fused: bool) -> None:
        shape, builder, scheme = self._experts.shape, self._builder, self._scheme
        sorting = sort_arguments(selected=self.selected, tokens=self.tokens, order=self.order)
        builder.add(sort_kernel(), sorting, 1)
        rows = rows_as_they_are(self.rows)
        if scheme not in FLOATING:
            rows = self._prepare(self.rows, self.tokens)
        positions = len(self.order.sources)
        gathered = room_for_gathered(scheme, positions, rows.data.shape[1])
        gathering = gather_arguments(
            order=self.order, used=self._rule.used, rows=rows, gathered=gathered
        )
        builder.add(gather_kernel(), gathering, self.positions)
        gates = self._product(shape.gate_up_part, gathered)
        wide = shape.intermediate
        gating = gate_arguments(
            gate=gates[:, :wide], up=gates[:, wide : 2 * wide], out=gates[:, :wide], width=wide
        )
        builder.add(gate_kernel(), gating, self.positions)
        inner = rows_as_they_are(gates[:, :wide])
        if scheme not in FLOATING:
            inner = self._prepare(gates[:, :wide], self.positions)
        builder.keep(rows, gathered, inner)
        if fused:
            self._merge_at_once(inner)
        else:
            self._merge(self._product(shape.down_part, inner))

    def _prepare(self, rows: Array, count: Array) -> PreparedRows:
        room = room_for_gathered(self._scheme, *rows.shape)
        arguments = prepare_arguments(rows=rows, columns=rows.shape[1], prepared=room)
        self._builder.add(prepare_kernel(self._scheme), arguments, count)
        return room

    def _product(self, part: ExpertPart, rows: PreparedRows) -> Array:
        out = aligned((len(rows.data), part.blocks * LANES), np.float32)
        items = np.array([routed_items(part, active=self._most)], np.int64)
        arguments = routed_arguments(
            part=part,
            places=self._experts.places,
            order=self.order,
            rows=rows,
            out=out,
            items=items,
            absent=self.absent,
        )
        self._builder.add(routed_kernel(self._scheme), arguments, items)
        self._builder.keep(out)
        return out

    def _merge(self, rows: Array) -> None:
        arguments = merge_arguments(
            order=self.order,
            weights=self.weights,
            rows=rows,
            out=self.out,
            width=self._experts.shape.hidden,
        )
        self._builder.add(merge_kernel(), arguments, self.tokens)

    def _merge_at_once(self, rows: PreparedRows) -> None:
        part = self._experts.shape.down_part
        arguments = routed_merge_arguments(
            part=part,
            places=self._experts.places,
            order=self.order,
            rows=rows,
            weights=self.weights,
            out=self.out,
            absent=self.absent,
        )
        self._builder.add(routed_merge_kernel(self._scheme), arguments, routed_merge_items(part))
