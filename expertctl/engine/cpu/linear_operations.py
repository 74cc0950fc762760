"""Operations of fused linear layers, with the adapters of each row.

``y = d * (W (u * x)) + B (A x) + e * b`` (decision 10), where each row uses its own plan. The
low-rank products of all plans are two operations. If some row has u, d or e, the product of the
base is computed module by module, with inputs and outputs scaled row by row; a row without scales
gets the same bits either way.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.workspace import ItemCounts, Workspace, round_up_rows
from expertctl.engine.kernels.layer_operations import affine_arguments, affine_kernel
from expertctl.engine.kernels.lora import (
    fused_lora_arguments,
    fused_lora_kernel,
    gemm_arguments,
    gemm_items,
    gemm_kernel,
    lora_expand_arguments,
    lora_expand_kernel,
    lora_shrink_arguments,
    lora_shrink_kernel,
    shrink_blocks,
)
from expertctl.engine.kernels.moe_lora import (
    input_scale_arguments,
    input_scale_kernel,
    output_scale_arguments,
    output_scale_kernel,
)
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import MatrixStack, PackedMatrix
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.quantisation import (
    PreparedActivations,
    activation_arguments,
    activation_kernel,
    wrap_float_activations,
)

_EXPERTS = "experts"
"""The part name of operations that only adapters need."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedLinearLayers:
    """Linear layers with one input: matrices with the rows of all of them, and one bias.

    ``projection`` is their index among the fused projections of the base, ``first`` that of their
    first module among all modules; ``rows`` is the number of rows of each.
    """

    projection: int
    first: int
    parts: tuple[PackedMatrix, ...]
    rows: Sequence[int]
    bias: AnyArray | None = None

    @property
    def columns(self) -> int:
        """Columns of every part."""
        return self.parts[0].columns

    @property
    def scheme(self) -> Scheme:
        """The scheme whose activations all parts take."""
        return self.parts[0].scheme


class LinearProgramBuilder:
    """Adds the operations of fused projections to a program."""

    def __init__(
        self,
        builder: ProgramBuilder,
        room: Workspace,
        counts: ItemCounts,
        adapters: Collection[Scheme],
        *,
        scales: bool,
        single_sequence: bool,
        fused: bool,
    ) -> None:
        """Support plans in these schemes and, with ``scales``, their u, d and e.

        Without ``fused``, adapters run as separate operations.
        """
        self._builder, self._room, self._counts = builder, room, counts
        self._adapters, self._scales, self._together = adapters, scales, single_sequence
        self._fused = fused

    def add(
        self, layers: FusedLinearLayers, source: AnyArray, out: AnyArray, *, adds: bool = False
    ) -> None:
        """Write the outputs of layers for ``source`` to ``out``, or add them, with a row per token.

        With ``adds`` there must be only one layer, because each output would need its own input.
        """
        rows = self._prepare_activations(layers.scheme, layers.columns, source)
        if self._is_adapted(layers):
            self._add_fused_lora(layers, source, rows, out, adds=adds)
        else:
            for scheme in self._adapters:
                self._add_shrink(layers, scheme, source, rows)
            self._add_gemm(layers, rows, out, adds=adds)
        if self._scales:
            first = 0
            for number, count in enumerate(layers.rows):
                part = out[:, first : first + round_up_rows(count)]
                self._add_scaled_module(layers, number, first, source, part, adds=adds)
                first += count
        if self._scales or not self._is_adapted(layers):
            for scheme in self._adapters:
                self._add_expand(layers, scheme, out)

    def _is_adapted(self, layers: FusedLinearLayers) -> bool:
        """Whether base and adapter are one operation for rows without scales: there is no bias."""
        is_simple = layers.bias is None and len(layers.parts) == 1
        return self._fused and len(self._adapters) == 1 and is_simple

    def _add_fused_lora(
        self,
        layers: FusedLinearLayers,
        source: AnyArray,
        rows: PreparedActivations,
        out: AnyArray,
        *,
        adds: bool,
    ) -> None:
        """Add ``W x + B (A x)`` of all modules at once; only ``A x`` where some row has scales."""
        [scheme], counts, place = self._adapters, self._counts, layers.projection
        reducing = self._shrink_arguments(layers, scheme, source, rows)
        if self._scales:
            apart = counts.reduce_apart[scheme][place : place + 1]
            self._builder.add(lora_shrink_kernel(scheme), reducing, apart, part=_EXPERTS)
        [matrix] = layers.parts
        product = gemm_arguments(matrix=matrix, rows=rows, out=out, tokens=counts.tokens, adds=adds)
        expansion = self._expand_arguments(layers, scheme, out)
        items = gemm_items(matrix)
        arguments = fused_lora_arguments(
            reduce=reducing,
            multiply=product,
            multiply_items=items,
            expand=expansion,
            reduce_items=counts.reduce[scheme][place : place + 1],
            done=counts.done[place : place + 1],
        )
        counts.set_fused_items(layers.first, items)
        kernel = fused_lora_kernel(matrix.scheme, scheme)
        self._builder.add(kernel, arguments, counts.adapted[place : place + 1])
        self._builder.keep_alive(matrix, reducing, product, expansion)

    def _add_gemm(
        self, layers: FusedLinearLayers, rows: PreparedActivations, out: AnyArray, *, adds: bool
    ) -> None:
        """Add ``W x + b`` of all modules at once, for projections where no row has scales."""
        counts, site = self._counts, layers.projection
        ends = [*accumulate(layers.rows, initial=0)]
        first = 0
        for matrix in layers.parts:
            items, module = gemm_items(matrix), layers.first + ends.index(first)
            counted = counts.set_fused_items(module, items) if self._scales else items
            self._add_multiply(matrix, rows, out[:, first:], counted, adds=adds)
            first += matrix.rows
        if layers.bias is not None:
            arguments = affine_arguments(
                rows=out, scale=None, shift=layers.bias, out=out, width=len(layers.bias)
            )
            plain = counts.plain[site : site + 1] if self._scales else counts.tokens
            self._builder.add(affine_kernel(), arguments, plain)
            self._builder.keep_alive(layers.bias)

    def _add_scaled_module(
        self,
        layers: FusedLinearLayers,
        number: int,
        first: int,
        source: AnyArray,
        out: AnyArray,
        *,
        adds: bool,
    ) -> None:
        """Add ``d * (W (u * x)) + e * b`` of one module."""
        builder = self._builder
        matrix = MatrixStack(layers.parts).row_slice(first, layers.rows[number])
        batch, module = self._room.get_batch_table(None).words, layers.first + number
        tokens = self._counts.scaled[layers.projection : layers.projection + 1]
        scaled = self._room.scaled[:, : matrix.columns]
        arguments = input_scale_arguments(batch=batch, module=module, rows=source, out=scaled)
        builder.add(input_scale_kernel(), arguments, tokens, part=_EXPERTS)
        rows = self._prepare_activations(matrix.scheme, matrix.columns, scaled, tokens=tokens)
        target = self._room.settled if adds else out
        counted = self._counts.set_module_items(module, gemm_items(matrix))
        self._add_multiply(matrix, rows, target, counted, adds=False)
        bias = None if layers.bias is None else layers.bias[first : first + matrix.rows]
        arguments = output_scale_arguments(
            batch=batch,
            module=module,
            rows=target,
            bias=bias,
            out=out,
            width=matrix.rows,
            adds=adds,
        )
        builder.add(output_scale_kernel(), arguments, tokens, part=_EXPERTS)

    def _add_multiply(
        self,
        matrix: PackedMatrix,
        rows: PreparedActivations,
        out: AnyArray,
        items: AnyArray | int,
        *,
        adds: bool,
    ) -> None:
        arguments = gemm_arguments(
            matrix=matrix, rows=rows, out=out, tokens=self._counts.tokens, adds=adds
        )
        self._builder.add(gemm_kernel(matrix.scheme), arguments, items)
        self._builder.keep_alive(matrix)

    def _add_shrink(
        self,
        layers: FusedLinearLayers,
        scheme: Scheme,
        source: AnyArray,
        prepared: PreparedActivations,
    ) -> None:
        arguments = self._shrink_arguments(layers, scheme, source, prepared)
        items = self._counts.reduce[scheme][layers.projection : layers.projection + 1]
        self._builder.add(lora_shrink_kernel(scheme), arguments, items, part=_EXPERTS)

    def _shrink_arguments(
        self,
        layers: FusedLinearLayers,
        scheme: Scheme,
        source: AnyArray,
        prepared: PreparedActivations,
    ) -> AnyArray:
        columns, layout = layers.columns, scheme.layout
        if scheme.activations is not layers.scheme.activations:
            prepared = self._prepare_activations(scheme, columns, source)
        return lora_shrink_arguments(
            batch=self._room.get_batch_table(scheme).words,
            first_module=layers.first,
            modules=len(layers.rows),
            blocks=shrink_blocks(scheme, single_sequence=self._together),
            rows=prepared,
            vectors=layout.count_vectors(columns),
            groups=layout.count_groups(columns),
        )

    def _add_expand(self, layers: FusedLinearLayers, scheme: Scheme, out: AnyArray) -> None:
        """Add ``B (A x)``, unless it was fused with the product of the base."""
        adapted = self._is_adapted(layers)
        counts = self._counts.expand_apart if adapted else self._counts.expand
        items = counts[scheme][layers.projection : layers.projection + 1]
        arguments = self._expand_arguments(layers, scheme, out)
        self._builder.add(lora_expand_kernel(scheme), arguments, items, part=_EXPERTS)

    def _expand_arguments(
        self, layers: FusedLinearLayers, scheme: Scheme, out: AnyArray
    ) -> AnyArray:
        blocks = [-(-rows // LANES) for rows in layers.rows]
        firsts = np.cumsum([0, *layers.rows[:-1]]) * out.itemsize + out.ctypes.data
        outs = np.array(list(zip(firsts, blocks, strict=True)), np.int64)
        self._builder.keep_alive(outs)
        return lora_expand_arguments(
            batch=self._room.get_batch_table(scheme).words,
            first_module=layers.first,
            outs=outs,
            out_stride=out.strides[0],
        )

    def _prepare_activations(
        self, scheme: Scheme, columns: int, source: AnyArray, *, tokens: AnyArray | None = None
    ) -> PreparedActivations:
        """Return rows in the form that a scheme takes."""
        rows = self._room.get_prepared_rows(scheme, columns)
        if rows is None:
            return wrap_float_activations(source)
        arguments = activation_arguments(rows=source, columns=columns, prepared=rows)
        counted = self._counts.tokens if tokens is None else tokens
        self._builder.add(activation_kernel(scheme), arguments, counted)
        return rows
