"""Operations of a block that depend on its `BlockConfig`: norms, rotations, attention, activations.

The operations of a block like Llama's are the fewest: a norm, a rotation with the write of keys and
values, attention, and SwiGLU; matrices add to the hidden states themselves. Everything else is
added only to the programs of bases that need it.
"""

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.packed_base import PackedBase, PackedLayer
from expertctl.engine.cpu.rope import compute_inverse_frequencies
from expertctl.engine.cpu.workspace import ItemCounts, ProgramVariant, Workspace, list_ropes
from expertctl.engine.kernels.jit import Kernel
from expertctl.engine.kernels.layer_operations import (
    AttentionShape,
    attention_arguments,
    cap_arguments,
    cap_kernel,
    decode_attention_kernel,
    gate_kernel,
    layer_norm_arguments,
    layer_norm_kernel,
    prefill_attention_kernel,
    query_growth_arguments,
    query_growth_kernel,
    rms_norm_arguments,
    rms_norm_kernel,
    rope_kv_write_arguments,
    rope_kv_write_kernel,
    rope_table_arguments,
    rope_table_kernel,
    scaled_add_arguments,
    scaled_add_kernel,
    swiglu_arguments,
    turned_kv_write_arguments,
    turned_kv_write_kernel,
)
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import embedding_arguments, embedding_kernel
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.package.architectures import NormKind
from expertctl.package.block_config import RopeKind
from expertctl.package.model_config import ModelConfig

_LAYER_NORMS: tuple[NormKind, ...] = ("layer", "layer_with_bias")


def list_block_kernels(config: ModelConfig, numbers: Scheme) -> list[Kernel]:
    """Return the kernels of all blocks of a base; ``numbers`` is the scheme of keys and values."""
    block, capped = config.block, config.block.attention_cap is not None
    kernels = [
        prefill_attention_kernel(numbers, capped=capped),
        decode_attention_kernel(numbers, capped=capped),
        _choose_kv_write(config, numbers),
        gate_kernel(block.activation, gated=block.gated),
    ]
    norms = {block.norm, block.head_norm} if config.qk_norm else {block.norm}
    if norms & set(_LAYER_NORMS):
        kernels.append(layer_norm_kernel())
    if norms - set(_LAYER_NORMS):
        kernels.append(rms_norm_kernel())
    if _list_rope_kinds(config):
        kernels.append(rope_table_kernel())
    if _adds_apart(config) or block.embedding_scale != 1.0 or block.logit_scale != 1.0:
        kernels.append(scaled_add_kernel())
    if block.logit_cap is not None:
        kernels.append(cap_kernel())
    if block.query_growth:
        kernels.append(query_growth_kernel())
    return kernels


def _list_rope_kinds(config: ModelConfig) -> list[RopeKind]:
    """Return the kinds of rotation of the layers, each once, without those that do not rotate."""
    kinds = {config.block.get_rope_kind(layer) for layer in range(config.layers)}
    return [kind for kind in list_ropes(config) if kind in kinds]


def _turns_otherwise(config: ModelConfig) -> bool:
    """Tell whether some layer does not rotate all of a head as Llama does."""
    block = config.block
    kinds = {block.get_rope_kind(layer) for layer in range(config.layers)}
    is_whole = config.rope.dims == config.head_dim
    return not is_whole or block.interleaved or block.norms_after_rope or "none" in kinds


def _choose_kv_write(config: ModelConfig, numbers: Scheme) -> Kernel:
    if _turns_otherwise(config):
        return turned_kv_write_kernel(numbers)
    return rope_kv_write_kernel(numbers)


def _adds_apart(config: ModelConfig) -> bool:
    """Tell whether something is added to hidden states by an operation of its own."""
    block = config.block
    normed = block.places in ("after", "around")
    return normed or block.residual_scale != 1.0 or block.learned_positions


class BlockOperations:
    """Adds these operations to a program."""

    def __init__(
        self,
        builder: ProgramBuilder,
        base: PackedBase,
        workspace: Workspace,
        counts: ItemCounts,
        shape: AttentionShape,
        variant: ProgramVariant,
    ) -> None:
        """Add them for rows of a workspace."""
        config = base.config
        self._builder, self._base, self._room, self._counts = builder, base, workspace, counts
        self._config, self._block, self._variant = config, config.block, variant
        self._shape = shape
        scale, cap = self._block.attention_scale, self._block.attention_cap
        factors = [config.head_dim**-0.5 if scale is None else scale]
        self._factors = np.array(factors if cap is None else [*factors, cap], np.float32)
        self._eps = np.array([config.norm_eps], np.float32)

    def add_embedding(self) -> None:
        """Write the embeddings of tokens to the hidden states."""
        base, room = self._base, self._room
        arguments = embedding_arguments(matrix=base.embedding, tokens=room.tokens, out=room.hidden)
        self._builder.add(embedding_kernel(base.embedding.scheme), arguments, self._counts.tokens)
        if self._block.embedding_scale != 1.0:
            self._scale_rows(room.hidden, self._config.hidden_size, self._block.embedding_scale)

    def add_positions(self) -> None:
        """Compute the rotations of the tokens, or add the embeddings of their positions."""
        room, ropes = self._room, list_ropes(self._config)
        for kind in _list_rope_kinds(self._config):
            frequencies = compute_inverse_frequencies(ropes[kind])
            factor = np.array([ropes[kind].attention], np.float32)
            arguments = rope_table_arguments(
                positions=room.positions,
                frequencies=frequencies,
                factor=factor,
                out=room.rotations[kind],
            )
            self._builder.add(rope_table_kernel(), arguments, self._counts.tokens)
            self._builder.keep_alive(frequencies, factor)
        matrix = self._base.positions
        if matrix is not None:
            arguments = embedding_arguments(matrix=matrix, tokens=room.positions, out=room.settled)
            self._builder.add(embedding_kernel(matrix.scheme), arguments, self._counts.tokens)
            self._add_rows(1.0)

    def add_norm(self, weight: AnyArray | None, bias: AnyArray | None = None) -> AnyArray:
        """Normalise the hidden states; return the result, or them if there is no weight."""
        if weight is None:
            return self._room.hidden
        self._normalise(self._room.hidden, self._room.normed, weight, bias)
        return self._room.normed

    def add_to_hidden(self, norm: AnyArray | None) -> None:
        """Add the rows of ``settled``, normed and scaled, to the hidden states."""
        if norm is not None:
            self._normalise(self._room.settled, self._room.settled, norm, None)
        self._add_rows(self._block.residual_scale)

    def adds_directly(self, norm: AnyArray | None) -> bool:
        """Return whether a matrix may add to the hidden states itself, without `add_to_hidden`."""
        return norm is None and self._block.residual_scale == 1.0

    @property
    def is_parallel(self) -> bool:
        """Whether the MLP reads the hidden states before attention is added to them."""
        return self._block.places in ("parallel", "parallel_apart")

    def add_activation(self, gates: AnyArray, width: int) -> AnyArray:
        """Apply the activation of an MLP to ``width`` columns; return them.

        The next as many columns are what it is multiplied by, if it is.
        """
        gate = gates[:, :width]
        up = gates[:, width:] if self._block.gated else gate
        arguments = swiglu_arguments(gate=gate, up=up, out=gate, width=width)
        kernel = gate_kernel(self._block.activation, gated=self._block.gated)
        self._builder.add(kernel, arguments, self._counts.tokens)
        return gate

    def add_kv_write(self, number: int, layer: PackedLayer) -> None:
        """Norm and rotate queries and keys, and write keys and values of a layer to its pages."""
        room, block, config = self._room, self._block, self._config
        kind = block.get_rope_kind(number)
        rotations = room.rotations["global" if kind == "none" else kind]
        arguments = rope_kv_write_arguments(
            rows=room.heads,
            shape=self._shape,
            norms=self._add_head_norms(layer),
            eps=self._eps,
            rotations=rotations,
            positions=room.positions,
            tables=room.tables,
            offsets=self._find_pages(number),
            count=self._counts.tokens,
        )
        if _turns_otherwise(config):
            arguments = turned_kv_write_arguments(
                arguments=arguments,
                turned=0 if kind == "none" else rotations.shape[2],
                interleaved=block.interleaved,
                norms_last=block.norms_after_rope,
            )
        if block.query_growth:
            self._add_query_growth()
        kernel = _choose_kv_write(config, self._variant.numbers)
        self._builder.add(kernel, arguments, self._counts.heads)

    def add_attention(self, number: int, layer: PackedLayer) -> None:
        """Attend to the pages of a layer."""
        room = self._room
        arguments = attention_arguments(
            rows=room.heads,
            shape=self._shape,
            positions=room.positions,
            tables=room.tables,
            offsets=self._find_pages(number),
            out=room.attended,
            window=layer.window,
            scale=self._factors,
            count=self._counts.tokens,
        )
        is_prefill = self._variant.single_sequence
        attend = prefill_attention_kernel if is_prefill else decode_attention_kernel
        kernel = attend(self._variant.numbers, capped=len(self._factors) > 1)
        self._builder.add(kernel, arguments, self._counts.attending)

    def add_logit_scale(self) -> None:
        """Scale and cap the logits."""
        logits, block = self._room.logits, self._block
        if block.logit_scale != 1.0:
            self._scale_rows(logits, logits.shape[1], block.logit_scale)
        if block.logit_cap is not None:
            cap = np.array([block.logit_cap], np.float32)
            self._builder.add(
                cap_kernel(), cap_arguments(rows=logits, cap=cap), self._counts.tokens
            )
            self._builder.keep_alive(cap)

    def keep_alive(self) -> None:
        """Keep what arguments point to as long as the program that is finished next."""
        self._builder.keep_alive(self._base, self._room, self._counts, self._eps, self._factors)

    def _find_pages(self, number: int) -> tuple[int, int]:
        """Return the offsets of a layer's keys and values in a page."""
        first = 2 * number * self._shape.page_bytes
        return first, first + self._shape.page_bytes

    def _add_head_norms(self, layer: PackedLayer) -> tuple[AnyArray | None, AnyArray | None]:
        """Normalise queries and keys; return the norms that are left to the write of keys."""
        query, key, begin = layer.query_norm, layer.key_norm, 0
        if query is None or key is None:
            return None, None
        is_layer_norm = self._block.head_norm in _LAYER_NORMS
        if not is_layer_norm and len(query) == self._config.head_dim:
            return query, key
        counts = self._config.heads, self._config.kv_heads
        norms = (query, layer.query_norm_bias), (key, layer.key_norm_bias)
        for count, (weight, bias) in zip(counts, norms, strict=True):
            end = begin + count * self._config.head_dim
            rows = self._room.heads[:, begin:end]
            if is_layer_norm:
                self._add_layer_norm(rows, rows, weight, bias, width=self._config.head_dim)
            else:
                self._add_rms_norm(rows, rows, weight)
            begin = end
        return None, None

    def _add_query_growth(self) -> None:
        room, block = self._room, self._block
        growth = np.array([block.query_growth], np.float32)
        arguments = query_growth_arguments(
            rows=room.heads[:, : self._config.heads * self._config.head_dim],
            positions=room.positions,
            growth=growth,
            period=block.query_growth_positions,
        )
        self._builder.add(query_growth_kernel(), arguments, self._counts.tokens)
        self._builder.keep_alive(growth)

    def _normalise(
        self, rows: AnyArray, out: AnyArray, weight: AnyArray, bias: AnyArray | None
    ) -> None:
        if self._block.norm in _LAYER_NORMS:
            width = len(weight)
            self._add_layer_norm(rows[:, :width], out[:, :width], weight, bias, width=width)
        else:
            self._add_rms_norm(rows, out, weight)

    def _add_rms_norm(self, rows: AnyArray, out: AnyArray, weight: AnyArray) -> None:
        arguments = rms_norm_arguments(rows=rows, weight=weight, out=out, eps=self._eps)
        self._builder.add(rms_norm_kernel(), arguments, self._counts.tokens)

    def _add_layer_norm(
        self, rows: AnyArray, out: AnyArray, weight: AnyArray, bias: AnyArray | None, *, width: int
    ) -> None:
        arguments = layer_norm_arguments(
            rows=rows, weight=weight, bias=bias, out=out, eps=self._eps, width=width
        )
        self._builder.add(layer_norm_kernel(), arguments, self._counts.tokens)

    def _add_rows(self, factor: float) -> None:
        """Add the rows of ``settled`` times a factor to the hidden states."""
        room, width = self._room, self._config.hidden_size
        self._add_scaled(room.settled, room.hidden, factor, adds=True, width=width)

    def _scale_rows(self, rows: AnyArray, width: int, factor: float) -> None:
        self._add_scaled(rows, rows, factor, adds=False, width=width)

    def _add_scaled(
        self, rows: AnyArray, out: AnyArray, factor: float, *, adds: bool, width: int
    ) -> None:
        number = np.array([factor], np.float32)
        arguments = scaled_add_arguments(rows=rows, out=out, factor=number, adds=adds, width=width)
        self._builder.add(scaled_add_kernel(), arguments, self._counts.tokens)
        self._builder.keep_alive(number)
