"""The operations of linear layers that share an input, with what plans change in them.

``y = d * (W (u * x)) + B (A x) + e * b`` (decision 10), each row with what its own plan has. The
low-rank products of all plans are two operations. Where some row has u, d or e, the product of the
base is computed module by module, with inputs and outputs scaled row by row; a row that has none
gets the same bits either way.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.batch_counts import BatchCounts
from expertctl.engine.decoder_room import DecoderRoom, filled
from expertctl.engine.kernels.elementwise import affine_arguments, affine_kernel
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.low_rank import (
    adapted_arguments,
    adapted_kernel,
    expand_arguments,
    expand_kernel,
    reduce_arguments,
    reduce_blocks,
    reduce_kernel,
)
from expertctl.engine.kernels.multiply import (
    multiply_arguments,
    multiply_items,
    multiply_kernel,
)
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.per_row import (
    scale_arguments,
    scale_kernel,
    settle_arguments,
    settle_kernel,
)
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.rows import (
    PreparedRows,
    prepare_arguments,
    prepare_kernel,
    rows_as_they_are,
)
from expertctl.engine.kernels.scheme import Scheme

Numbers = np.ndarray[Any, Any]
_EXPERTS = "experts"
"""The part name of operations that a base alone would not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Layers:
    """Linear layers with one input: one matrix of the rows of all in turn, and one bias of them.

    ``site`` is their place among the sites of the base, ``first`` that of the first of them among
    all modules of the base; ``rows`` are how many rows each has.
    """

    site: int
    first: int
    matrix: PackedMatrix
    rows: Sequence[int]
    bias: Numbers | None = None


class LinearOperations:
    """Adds the operations of one site after the other to a program."""

    def __init__(
        self,
        builder: ProgramBuilder,
        room: DecoderRoom,
        counts: BatchCounts,
        adapters: Collection[Scheme],
        *,
        scales: bool,
        together: bool,
        fused: bool,
    ) -> None:
        """Allow for plans in these schemes, and with ``scales`` for their u, d and e.

        Where it is not ``fused``, what plans add is in operations of its own.
        """
        self._builder, self._room, self._counts = builder, room, counts
        self._adapters, self._scales, self._together = adapters, scales, together
        self._fused = fused

    def add(self, layers: Layers, source: Numbers, out: Numbers, *, adds: bool = False) -> None:
        """Write to ``out``, or add to it, what layers make of ``source``; both have a row a token.

        A second output would need a second input: where it adds, there is one layer.
        """
        rows = self._prepare(layers.matrix.scheme, layers.matrix.columns, source)
        if self._is_adapted(layers):
            self._adapted(layers, source, rows, out, adds=adds)
        else:
            for scheme in self._adapters:
                self._reduce(layers, scheme, source, rows)
            self._whole(layers, rows, out, adds=adds)
        if self._scales:
            first = 0
            for number, count in enumerate(layers.rows):
                part = out[:, first : first + filled(count)]
                self._apart(layers, number, first, source, part, adds=adds)
                first += count
        if self._scales or not self._is_adapted(layers):
            for scheme in self._adapters:
                self._expand(layers, scheme, out)

    def _is_adapted(self, layers: Layers) -> bool:
        """Whether one operation does it all, where no row has factors: no bias comes in between."""
        return self._fused and len(self._adapters) == 1 and layers.bias is None

    def _adapted(
        self, layers: Layers, source: Numbers, rows: PreparedRows, out: Numbers, *, adds: bool
    ) -> None:
        """``W x + B (A x)`` of all modules at once; only ``A x`` where some row has factors."""
        [scheme], counts, place = self._adapters, self._counts, layers.site
        reducing = self._reducing(layers, scheme, source, rows)
        if self._scales:
            apart = counts.reduce_apart[scheme][place : place + 1]
            self._builder.add(reduce_kernel(scheme), reducing, apart, part=_EXPERTS)
        product = multiply_arguments(
            matrix=layers.matrix, rows=rows, out=out, tokens=counts.tokens, adds=adds
        )
        expansion = self._expansion(layers, scheme, out)
        items = multiply_items(layers.matrix)
        arguments = adapted_arguments(
            reduce=reducing,
            multiply=product,
            multiply_items=items,
            expand=expansion,
            reduce_items=counts.reduce[scheme][place : place + 1],
            done=counts.done[place : place + 1],
        )
        counts.of_whole(place, items)
        kernel = adapted_kernel(layers.matrix.scheme, scheme)
        self._builder.add(kernel, arguments, counts.adapted[place : place + 1])
        self._builder.keep(layers.matrix, reducing, product, expansion)

    def _whole(self, layers: Layers, rows: PreparedRows, out: Numbers, *, adds: bool) -> None:
        """``W x + b`` of all modules at once, where no row has anything else."""
        counts, site = self._counts, layers.site
        items = multiply_items(layers.matrix)
        counted = counts.of_whole(site, items) if self._scales else items
        self._multiply(layers.matrix, rows, out, counted, adds=adds)
        if layers.bias is not None:
            arguments = affine_arguments(
                rows=out, scale=None, shift=layers.bias, out=out, width=len(layers.bias)
            )
            plain = counts.plain[site : site + 1] if self._scales else counts.tokens
            self._builder.add(affine_kernel(), arguments, plain)
            self._builder.keep(layers.bias)

    def _apart(
        self,
        layers: Layers,
        number: int,
        first: int,
        source: Numbers,
        out: Numbers,
        *,
        adds: bool,
    ) -> None:
        """``d * (W (u * x)) + e * b`` of one module."""
        builder, matrix = self._builder, layers.matrix.part(first, layers.rows[number])
        batch, module = self._room.batch(None).words, layers.first + number
        tokens = self._counts.scaled[layers.site : layers.site + 1]
        scaled = self._room.scaled[:, : matrix.columns]
        arguments = scale_arguments(batch=batch, module=module, rows=source, out=scaled)
        builder.add(scale_kernel(), arguments, tokens, part=_EXPERTS)
        rows = self._prepare(matrix.scheme, matrix.columns, scaled, tokens=tokens)
        target = self._room.settled if adds else out
        counted = self._counts.of_apart(module, multiply_items(matrix))
        self._multiply(matrix, rows, target, counted, adds=False)
        bias = None if layers.bias is None else layers.bias[first : first + matrix.rows]
        arguments = settle_arguments(
            batch=batch,
            module=module,
            rows=target,
            bias=bias,
            out=out,
            width=matrix.rows,
            adds=adds,
        )
        builder.add(settle_kernel(), arguments, tokens, part=_EXPERTS)

    def _multiply(
        self,
        matrix: PackedMatrix,
        rows: PreparedRows,
        out: Numbers,
        items: Numbers | int,
        *,
        adds: bool,
    ) -> None:
        arguments = multiply_arguments(
            matrix=matrix, rows=rows, out=out, tokens=self._counts.tokens, adds=adds
        )
        self._builder.add(multiply_kernel(matrix.scheme), arguments, items)
        self._builder.keep(matrix)

    def _reduce(
        self, layers: Layers, scheme: Scheme, source: Numbers, prepared: PreparedRows
    ) -> None:
        arguments = self._reducing(layers, scheme, source, prepared)
        items = self._counts.reduce[scheme][layers.site : layers.site + 1]
        self._builder.add(reduce_kernel(scheme), arguments, items, part=_EXPERTS)

    def _reducing(
        self, layers: Layers, scheme: Scheme, source: Numbers, prepared: PreparedRows
    ) -> Numbers:
        columns, layout = layers.matrix.columns, scheme.layout
        if scheme is not layers.matrix.scheme:
            prepared = self._prepare(scheme, columns, source)
        return reduce_arguments(
            batch=self._room.batch(scheme).words,
            first_module=layers.first,
            modules=len(layers.rows),
            blocks=reduce_blocks(scheme, together=self._together),
            rows=prepared,
            vectors=layout.vectors(columns),
            groups=layout.groups(columns),
        )

    def _expand(self, layers: Layers, scheme: Scheme, out: Numbers) -> None:
        """Add what experts do, where it was not done with the product of the base."""
        adapted = self._is_adapted(layers)
        counts = self._counts.expand_apart if adapted else self._counts.expand
        items = counts[scheme][layers.site : layers.site + 1]
        arguments = self._expansion(layers, scheme, out)
        self._builder.add(expand_kernel(scheme), arguments, items, part=_EXPERTS)

    def _expansion(self, layers: Layers, scheme: Scheme, out: Numbers) -> Numbers:
        blocks = [-(-rows // LANES) for rows in layers.rows]
        firsts = np.cumsum([0, *layers.rows[:-1]]) * out.itemsize + out.ctypes.data
        outs = np.array(list(zip(firsts, blocks, strict=True)), np.int64)
        self._builder.keep(outs)
        return expand_arguments(
            batch=self._room.batch(scheme).words,
            first_module=layers.first,
            outs=outs,
            out_stride=out.strides[0],
        )

    def _prepare(
        self, scheme: Scheme, columns: int, source: Numbers, *, tokens: Numbers | None = None
    ) -> PreparedRows:
        """Return rows in the form that a scheme takes."""
        rows = self._room.prepared(scheme, columns)
        if rows is None:
            return rows_as_they_are(source)
        arguments = prepare_arguments(rows=source, columns=columns, prepared=rows)
        counted = self._counts.tokens if tokens is None else tokens
        self._builder.add(prepare_kernel(scheme), arguments, counted)
        return rows
