"""The operations of routed layers in a program: choosing experts, then computing them.

The program stops between the two, so that missing experts can be read. Outputs are added in the
order in which a token chose its experts, so the result does not depend on where they are.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from expertctl.engine.cpu.packed_base import PackedBase, PackedLayer, PackedRouting
from expertctl.engine.cpu.workspace import Workspace
from expertctl.engine.kernels.layer_operations import (
    gated_add_arguments,
    gated_add_kernel,
    rms_norm_arguments,
    rms_norm_kernel,
    swiglu_arguments,
    swiglu_kernel,
)
from expertctl.engine.kernels.lora import gemm_arguments, gemm_items, gemm_kernel
from expertctl.engine.kernels.moe_layer import (
    CompactMatrix,
    combine_arguments,
    combine_kernel,
    drop_experts_arguments,
    drop_experts_kernel,
    gather_rows_arguments,
    gather_rows_kernel,
    moe_gemm_arguments,
    moe_gemm_compact_arguments,
    moe_gemm_compact_kernel,
    moe_gemm_items,
    moe_gemm_kernel,
    permute_arguments,
    permute_kernel,
    topk_routing_arguments,
    topk_routing_kernel,
)
from expertctl.engine.kernels.moe_lora import (
    DOWN,
    GATE,
    moe_input_scale_arguments,
    moe_input_scale_kernel,
    moe_lora_arguments,
    moe_lora_kernel,
)
from expertctl.engine.kernels.packed_format import FLOAT_SCHEMES, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.quantisation import (
    PreparedActivations,
    activation_arguments,
    activation_kernel,
    wrap_float_activations,
)
from expertctl.engine.moe.routed_experts import RoutedExperts

Numbers = np.ndarray[Any, Any]
_EXPERTS_PART = "experts"
"""The part name of operations that a base without adapters does not have."""


class RoutedOperations:
    """Adds the operations of one routed layer after the other to a program."""

    def __init__(
        self,
        builder: ProgramBuilder,
        workspace: Workspace,
        tokens: Numbers,
        base: PackedBase,
        experts: RoutedExperts,
        *,
        adapters: Collection[Scheme] = (),
        scales: bool = False,
    ) -> None:
        """Compute with the experts at the addresses of ``experts``; ``tokens`` is int64 [1].

        Support plans that adapt the experts, in the schemes of ``adapters``, and with ``scales``
        input scales.
        """
        assert workspace.routed is not None
        assert base.config.experts is not None
        self._builder, self._decoder, self._tokens = builder, workspace, tokens
        self.workspace, self._config, self._experts = workspace.routed, base.config.experts, experts
        self._choices = workspace.routed.choices
        self._hidden, self._scheme = base.config.hidden_size, base.scheme
        self._adapters, self._scales = adapters, scales
        self._scale = np.array([self._config.scale], np.float32)
        self._eps = np.array([base.config.norm_eps], np.float32)
        self._positions, self._inputs, self._outputs = np.zeros((3, 1), np.int64)
        builder.keep_alive(experts, self._scale, self._eps, self._tokens)

    @property
    def is_whole(self) -> bool:
        """Whether no expert ever has to be read between choosing and computing."""
        return self._experts.is_whole

    def set_tokens(self, tokens: int) -> None:
        """Set the number of tokens of the next run."""
        shape, positions = self._experts.shape, tokens * self._config.used
        active = min(positions, self._config.count)
        self._positions[0] = positions
        self._inputs[0] = moe_gemm_items(shape.gate_up_matrix, active=active)
        self._outputs[0] = moe_gemm_items(shape.down_matrix, active=active)

    def add_shared_expert(self) -> None:
        """Add the output of the shared expert, times its gate."""
        workspace, tokens = self.workspace, self._tokens
        arguments = gated_add_arguments(
            gates=workspace.shares,
            rows=workspace.scratch,
            out=self._decoder.hidden,
            width=self._hidden,
        )
        self._builder.add(gated_add_kernel(), arguments, tokens)

    def add_router(self, number: int, routing: PackedRouting) -> int:
        """Write the choices in a layer of the base; return its index among routed layers."""
        place, choices = self._config.layers.index(number), self._choices
        rows = self._decoder.normed
        self._add_routing(routing, rows, choices.selected[place], choices.weights[place])
        return place

    def add_prediction(self, layer_index: int, layer: PackedLayer) -> None:
        """Write the predicted choices of the next routed layer.

        Its router is applied to the input of the layer before it: little is added to that in
        between.
        """
        assert isinstance(layer.mlp, PackedRouting)
        assert layer.mlp_norm is not None, "blocks of routed experts are like Llama's"
        rows, out = self._decoder.hidden, self.workspace.scratch
        arguments = rms_norm_arguments(rows=rows, weight=layer.mlp_norm, out=out, eps=self._eps)
        self._builder.add(rms_norm_kernel(), arguments, self._tokens)
        likely = self._choices.likely[layer_index]
        self._add_routing(layer.mlp, out, likely, self.workspace.likely_weights)

    def _add_routing(
        self, routing: PackedRouting, rows: Numbers, selected: Numbers, weights: Numbers
    ) -> None:
        self._add_product(routing.router, rows, self.workspace.logits)
        arguments = topk_routing_arguments(
            logits=self.workspace.logits,
            bias=routing.selection_bias,
            scale=self._scale,
            normalised=self._config.normalised,
            experts=self._config.count,
            selected=selected,
            weights=weights,
        )
        self._builder.add(topk_routing_kernel(self._config.scoring), arguments, self._tokens)
        self._builder.keep_alive(routing)

    @property
    def can_split(self) -> bool:
        """Whether resident experts can be computed before the others.

        Not if experts may be skipped, because the weights are known only when all have arrived, nor
        if plans adapt experts, because deltas are added to all positions.
        """
        return not (self._experts.skips or self._adapters or self._scales)

    def add_experts(self, layer_index: int) -> None:
        """Add the output of the experts of a routed layer, which read the normed rows."""
        choices, add = self._choices, self._builder.add
        selected, weights = choices.selected[layer_index], choices.weights[layer_index]
        if self._experts.skips:
            arguments = drop_experts_arguments(
                hits=self._experts.hits(layer_index),
                selected=selected,
                weights=weights,
                dropped=choices.skipped[layer_index],
            )
            add(drop_experts_kernel(), arguments, self._tokens)
        arguments = permute_arguments(
            selected=selected, tokens=self._tokens, order=self.workspace.order
        )
        add(permute_kernel(), arguments, 1)
        self._add_products(layer_index)
        self._add_merge(layer_index)

    def add_present_experts(self, layer_index: int) -> None:
        """Compute the chosen experts that are in memory now."""
        self._add_subset(layer_index, behind=False)

    def add_loaded_experts(self, layer_index: int) -> None:
        """Compute those that have arrived since."""
        self._add_subset(layer_index, behind=True)

    def add_remaining_experts(self, layer_index: int) -> None:
        """Compute the last of them, and add the outputs of all."""
        self._add_subset(layer_index, behind=True)
        self._add_merge(layer_index)

    def _add_subset(self, layer_index: int, *, behind: bool) -> None:
        arguments = permute_arguments(
            selected=self._choices.selected[layer_index],
            tokens=self._tokens,
            order=self.workspace.order,
            block_addresses=self._experts.places(layer_index),
            append=behind,
        )
        self._builder.add(permute_kernel(), arguments, 1)
        self._add_products(layer_index)

    def _add_merge(self, layer_index: int) -> None:
        workspace = self.workspace
        arguments = combine_arguments(
            order=workspace.order,
            weights=self._choices.weights[layer_index],
            rows=workspace.down,
            out=self._decoder.hidden,
            width=self._hidden,
        )
        self._builder.add(combine_kernel(), arguments, self._tokens)

    def _add_products(self, layer_index: int) -> None:
        """``down (silu(gate x) * up x)`` of each position of an order.

        Intermediate values of earlier positions are computed again; their ``down`` is done already,
        so that does no harm.
        """
        workspace, width = self.workspace, self._experts.shape.intermediate
        arguments = gather_rows_arguments(
            order=workspace.order,
            top_k=self._config.used,
            rows=self._prepare_normed(),
            gathered=workspace.rows,
        )
        self._builder.add(gather_rows_kernel(), arguments, self._positions)
        self._add_routed_product(
            layer_index, workspace.rows, workspace.gates, self._inputs, down=False
        )
        self._add_deltas(
            layer_index, self._decoder.normed[:, : self._hidden], workspace.gates, down=False
        )
        gate, up = workspace.gates[:, :width], workspace.gates[:, width : 2 * width]
        arguments = swiglu_arguments(gate=gate, up=up, out=gate, width=width)
        self._builder.add(swiglu_kernel(), arguments, self._positions)
        middle = self._prepare_middle(
            self._add_scale(layer_index, gate, up) if self._scales else gate
        )
        self._add_routed_product(layer_index, middle, workspace.down, self._outputs, down=True)
        self._add_deltas(layer_index, gate, workspace.down, down=True)

    def _prepare_middle(self, rows: Numbers) -> PreparedActivations:
        """Return the intermediate rows in the form of the experts' scheme."""
        if self._scheme in FLOAT_SCHEMES:
            return wrap_float_activations(rows)
        prepared = self.workspace.middle
        arguments = activation_arguments(rows=rows, columns=rows.shape[1], prepared=prepared)
        self._builder.add(activation_kernel(self._scheme), arguments, self._positions)
        return prepared

    def _add_scale(self, layer_index: int, rows: Numbers, out: Numbers) -> Numbers:
        """``u * x`` of each position, in other memory than x, because A reads x unscaled."""
        arguments = moe_input_scale_arguments(
            batch=self._decoder.get_routed_batch_table(None).words,
            order=self.workspace.order,
            top_k=self._config.used,
            layer=layer_index,
            module=DOWN,
            rows=rows,
            out=out,
        )
        self._builder.add(moe_input_scale_kernel(), arguments, self._positions, part=_EXPERTS_PART)
        return out

    def _add_deltas(self, layer_index: int, rows: Numbers, out: Numbers, *, down: bool) -> None:
        """Add the deltas of plans to down, or to gate and up, which read the rows of tokens."""
        for scheme in self._adapters:
            arguments = moe_lora_arguments(
                scheme=scheme,
                batch=self._decoder.get_routed_batch_table(scheme).words,
                order=self.workspace.order,
                top_k=self._config.used,
                layer=layer_index,
                first=DOWN if down else GATE,
                modules=1 if down else DOWN - GATE,
                width=self._hidden if down else self._experts.shape.intermediate,
                rows=rows,
                by_token=not down,
                out=out,
            )
            kernel = moe_lora_kernel(scheme)
            self._builder.add(kernel, arguments, self._positions, part=_EXPERTS_PART)

    def _add_routed_product(
        self,
        layer_index: int,
        rows: PreparedActivations,
        out: Numbers,
        items: Numbers,
        *,
        down: bool,
    ) -> None:
        shape, places = self._experts.shape, self._experts.places(layer_index)
        order, absent = self.workspace.order, self.workspace.absent
        if shape.compact_bytes:
            part = CompactMatrix.create(shape, down=down)
            arguments = moe_gemm_compact_arguments(
                compact=part, block_addresses=places, order=order, rows=rows, out=out, items=items,
                absent=absent,
            )  # fmt: skip
            self._builder.add(moe_gemm_compact_kernel(), arguments, items)
            return
        arguments = moe_gemm_arguments(
            part=shape.down_matrix if down else shape.gate_up_matrix, block_addresses=places,
            order=order, rows=rows, out=out, items=items, absent=absent,
        )  # fmt: skip
        self._builder.add(moe_gemm_kernel(self._scheme), arguments, items)

    def _prepare_normed(self) -> PreparedActivations:
        """Return the normed rows in the form of the experts' scheme."""
        normed = self._decoder.normed
        prepared = self._decoder.get_prepared_rows(self._scheme, self._hidden)
        if prepared is None:
            return wrap_float_activations(normed)
        arguments = activation_arguments(rows=normed, columns=self._hidden, prepared=prepared)
        self._builder.add(activation_kernel(self._scheme), arguments, self._tokens)
        return prepared

    def _add_product(self, matrix: PackedMatrix, rows: Numbers, out: Numbers) -> None:
        """Add a product with a float32 matrix."""
        arguments = gemm_arguments(
            matrix=matrix, rows=wrap_float_activations(rows), out=out, tokens=self._tokens
        )
        self._builder.add(gemm_kernel(Scheme.FLOAT32), arguments, gemm_items(matrix))
        self._builder.keep_alive(matrix)
