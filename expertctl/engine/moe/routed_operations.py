"""The operations of routed layers: choosing experts, then computing them.

Between the two lies a border, where experts may be brought. Their outputs are added in the order
in which a token chose them, so where they lie changes no bit.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from expertctl.engine.decoder_room import DecoderRoom
from expertctl.engine.kernels.elementwise import (
    gate_arguments,
    gate_kernel,
    norm_arguments,
    norm_kernel,
    share_arguments,
    share_kernel,
)
from expertctl.engine.kernels.merging import merge_arguments, merge_kernel
from expertctl.engine.kernels.multiply import multiply_arguments, multiply_items, multiply_kernel
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.routed import routed_arguments, routed_items, routed_kernel
from expertctl.engine.kernels.routed_compact import (
    CompactPart,
    routed_compact_arguments,
    routed_compact_kernel,
)
from expertctl.engine.kernels.routed_deltas import (
    DOWN,
    GATE,
    routed_delta_arguments,
    routed_delta_kernel,
    routed_scale_arguments,
    routed_scale_kernel,
)
from expertctl.engine.kernels.routing import (
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
    sort_arguments,
    sort_kernel,
)
from expertctl.engine.moe.routed_experts import RoutedExperts
from expertctl.engine.packed_base import PackedBase
from expertctl.engine.packed_layer import PackedLayer, PackedRouting

Numbers = np.ndarray[Any, Any]
_EXPERTS = "experts"
"""The part name of operations that a base alone would not have."""


class RoutedOperations:
    """Adds the operations of one routed layer after the other to a program."""

    def __init__(
        self,
        builder: ProgramBuilder,
        room: DecoderRoom,
        tokens: Numbers,
        base: PackedBase,
        experts: RoutedExperts,
        *,
        adapters: Collection[Scheme] = (),
        scales: bool = False,
    ) -> None:
        """Compute with experts that are where ``experts`` says; ``tokens`` is int64 [1].

        Allow for plans that change the experts, in the schemes of ``adapters``, and with ``scales``
        for factors on what they read.
        """
        assert room.routed is not None
        assert base.config.experts is not None
        self._builder, self._decoder, self._tokens = builder, room, tokens
        self.room, self._config, self._experts = room.routed, base.config.experts, experts
        self._hidden, self._scheme = base.config.hidden_size, base.scheme
        self._adapters, self._scales = adapters, scales
        self._scale = np.array([self._config.scale], np.float32)
        self._eps = np.array([base.config.norm_eps], np.float32)
        self._positions, self._inputs, self._outputs = np.zeros((3, 1), np.int64)
        builder.keep(experts, self._scale, self._eps, self._tokens)

    @property
    def is_whole(self) -> bool:
        """Whether no expert ever has to be brought between choosing and computing."""
        return self._experts.is_whole

    def set(self, tokens: int) -> None:
        """Say how many tokens the next run reads."""
        shape, positions = self._experts.shape, tokens * self._config.used
        active = min(positions, self._config.count)
        self._positions[0] = positions
        self._inputs[0] = routed_items(shape.gate_up_part, active=active)
        self._outputs[0] = routed_items(shape.down_part, active=active)

    def share(self) -> None:
        """Add the output of the shared expert, as far as its gate opens."""
        room, tokens = self.room, self._tokens
        arguments = share_arguments(
            shares=room.shares, rows=room.beside, out=self._decoder.hidden, width=self._hidden
        )
        self._builder.add(share_kernel(), arguments, tokens)

    def choose(self, number: int, routing: PackedRouting) -> int:
        """Write what is asked for in a layer of the base; return its place among routed layers."""
        place, room = self._config.layers.index(number), self.room
        rows = self._decoder.normed
        self._route(routing, rows, room.selected[place], room.weights[place])
        return place

    def foresee(self, place: int, layer: PackedLayer) -> None:
        """Write which experts the next routed layer is likely to be asked for.

        Its router judges by what the layer before it reads: little is added to that in between.
        """
        assert isinstance(layer.mlp, PackedRouting)
        rows, out = self._decoder.hidden, self.room.beside
        arguments = norm_arguments(rows=rows, weight=layer.mlp_norm, out=out, eps=self._eps)
        self._builder.add(norm_kernel(), arguments, self._tokens)
        self._route(layer.mlp, out, self.room.likely[place], self.room.likely_weights)

    def _route(
        self, routing: PackedRouting, rows: Numbers, selected: Numbers, weights: Numbers
    ) -> None:
        self._product(routing.router, rows, self.room.logits)
        arguments = route_arguments(
            logits=self.room.logits,
            bias=routing.choice_bias,
            scale=self._scale,
            normalised=self._config.normalised,
            experts=self._config.count,
            selected=selected,
            weights=weights,
        )
        self._builder.add(route_kernel(self._config.scoring), arguments, self._tokens)
        self._builder.keep(routing)

    @property
    def may_part(self) -> bool:
        """Whether experts that are there can be computed before the others.

        Which experts take over a skipped one's weight is known only when all have come; and what
        plans add is added to all positions.
        """
        return not (self._experts.skips or self._adapters or self._scales)

    def compute(self, place: int) -> None:
        """Add what the experts of a routed layer make of the normed rows."""
        room, add = self.room, self._builder.add
        selected, weights = room.selected[place], room.weights[place]
        if self._experts.skips:
            arguments = skip_arguments(
                hits=self._experts.hits(place),
                selected=selected,
                weights=weights,
                skipped=room.skipped[place],
            )
            add(skip_kernel(), arguments, self._tokens)
        arguments = sort_arguments(selected=selected, tokens=self._tokens, order=room.order)
        add(sort_kernel(), arguments, 1)
        self._products(place)
        self._merge(place)

    def compute_those_there(self, place: int) -> None:
        """Compute those of the chosen experts that are in memory now."""
        self._compute_some(place, behind=False)

    def compute_more(self, place: int) -> None:
        """Compute those that have come since."""
        self._compute_some(place, behind=True)

    def compute_the_rest(self, place: int) -> None:
        """Compute the last of them, and add the outputs of all."""
        self._compute_some(place, behind=True)
        self._merge(place)

    def _compute_some(self, place: int, *, behind: bool) -> None:
        arguments = sort_arguments(
            selected=self.room.selected[place],
            tokens=self._tokens,
            order=self.room.order,
            places=self._experts.places(place),
            behind=behind,
        )
        self._builder.add(sort_kernel(), arguments, 1)
        self._products(place)

    def _merge(self, place: int) -> None:
        room = self.room
        arguments = merge_arguments(
            order=room.order,
            weights=room.weights[place],
            rows=room.down,
            out=self._decoder.hidden,
            width=self._hidden,
        )
        self._builder.add(merge_kernel(), arguments, self._tokens)

    def _products(self, place: int) -> None:
        """``down (silu(gate x) * up x)`` of each position of an order.

        Intermediate values of earlier positions are computed anew; their ``down`` is done already,
        so that does no harm.
        """
        room, wide = self.room, self._experts.shape.intermediate
        arguments = gather_arguments(
            order=room.order, used=self._config.used, rows=self._normed(), gathered=room.rows
        )
        self._builder.add(gather_kernel(), arguments, self._positions)
        self._routed(place, room.rows, room.gates, self._inputs, down=False)
        self._change(place, self._decoder.normed[:, : self._hidden], room.gates, down=False)
        gate, up = room.gates[:, :wide], room.gates[:, wide : 2 * wide]
        arguments = gate_arguments(gate=gate, up=up, out=gate, width=wide)
        self._builder.add(gate_kernel(), arguments, self._positions)
        middle = self._middle(self._scaled(place, gate, up) if self._scales else gate)
        self._routed(place, middle, room.down, self._outputs, down=True)
        self._change(place, gate, room.down, down=True)

    def _middle(self, rows: Numbers) -> PreparedRows:
        """Return the intermediate rows as the experts' scheme wants them."""
        if self._scheme in FLOATING:
            return rows_as_they_are(rows)
        prepared = self.room.middle
        arguments = prepare_arguments(rows=rows, columns=rows.shape[1], prepared=prepared)
        self._builder.add(prepare_kernel(self._scheme), arguments, self._positions)
        return prepared

    def _scaled(self, place: int, rows: Numbers, out: Numbers) -> Numbers:
        """``u * x`` of each position, beside x, because A takes x as it is."""
        arguments = routed_scale_arguments(
            batch=self._decoder.routed_batch(None).words,
            order=self.room.order,
            used=self._config.used,
            layer=place,
            module=DOWN,
            rows=rows,
            out=out,
        )
        self._builder.add(routed_scale_kernel(), arguments, self._positions, part=_EXPERTS)
        return out

    def _change(self, place: int, rows: Numbers, out: Numbers, *, down: bool) -> None:
        """Add what plans change in down, or in gate and up, which read the rows of tokens."""
        for scheme in self._adapters:
            arguments = routed_delta_arguments(
                scheme=scheme,
                batch=self._decoder.routed_batch(scheme).words,
                order=self.room.order,
                used=self._config.used,
                layer=place,
                first=DOWN if down else GATE,
                modules=1 if down else DOWN - GATE,
                width=self._hidden if down else self._experts.shape.intermediate,
                rows=rows,
                of_tokens=not down,
                out=out,
            )
            kernel = routed_delta_kernel(scheme)
            self._builder.add(kernel, arguments, self._positions, part=_EXPERTS)

    def _routed(
        self,
        place: int,
        rows: PreparedRows,
        out: Numbers,
        items: Numbers,
        *,
        down: bool,
    ) -> None:
        shape, places = self._experts.shape, self._experts.places(place)
        order, absent = self.room.order, self.room.absent
        if shape.compact:
            part = CompactPart.of(shape, down=down)
            arguments = routed_compact_arguments(
                compact=part, places=places, order=order, rows=rows, out=out, items=items,
                absent=absent,
            )  # fmt: skip
            self._builder.add(routed_compact_kernel(), arguments, items)
            return
        arguments = routed_arguments(
            part=shape.down_part if down else shape.gate_up_part, places=places, order=order,
            rows=rows, out=out, items=items, absent=absent,
        )  # fmt: skip
        self._builder.add(routed_kernel(self._scheme), arguments, items)

    def _normed(self) -> PreparedRows:
        """Return the normed rows as the experts' scheme wants them."""
        normed = self._decoder.normed
        prepared = self._decoder.prepared(self._scheme, self._hidden)
        if prepared is None:
            return rows_as_they_are(normed)
        arguments = prepare_arguments(rows=normed, columns=self._hidden, prepared=prepared)
        self._builder.add(prepare_kernel(self._scheme), arguments, self._tokens)
        return prepared

    def _product(self, matrix: PackedMatrix, rows: Numbers, out: Numbers) -> None:
        """A product with a float32 matrix."""
        arguments = multiply_arguments(
            matrix=matrix, rows=rows_as_they_are(rows), out=out, tokens=self._tokens
        )
        self._builder.add(multiply_kernel(Scheme.FLOAT32), arguments, multiply_items(matrix))
        self._builder.keep(matrix)
