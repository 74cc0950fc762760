"""The programs of a decoder: one that reads a stretch of a prompt, one that reads tokens.

Both are the same operations in one room; they differ in who attends together. Which plans the rows
have is not part of a program but of each run, so plans may take turns and meet in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.batch_counts import BatchCounts, Stretch
from expertctl.engine.decoder_room import DecoderRoom
from expertctl.engine.kernels.angles import angles_arguments, angles_kernel
from expertctl.engine.kernels.attend import (
    attend_arguments,
    attend_prompt_kernel,
    attend_step_kernel,
)
from expertctl.engine.kernels.batch import BatchTable
from expertctl.engine.kernels.elementwise import (
    gate_arguments,
    gate_kernel,
    norm_arguments,
    norm_kernel,
)
from expertctl.engine.kernels.embed import embed_arguments, embed_kernel
from expertctl.engine.kernels.heads import HeadsShape, heads_arguments, heads_kernel
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.linear_operations import Layers, LinearOperations
from expertctl.engine.packed_base import PackedBase, PackedLayer
from expertctl.engine.packed_delta import PackedDeltas, sites
from expertctl.engine.rope import inverse_frequencies

Numbers = np.ndarray[Any, Any]


_LAYER_BYTES, _SCHEME_BYTES, _SCALES_BYTES = 10 << 10, 6 << 10, 10 << 10


@dataclass(frozen=True, slots=True)
class Variant:
    """What a program allows for.

    ``together``: consecutive tokens of one text, else one token each of several. ``numbers``: what
    pages hold. Plans in some schemes, and with ``scales`` such as have factors. What they add is
    ``fused`` with the products of the base where that can be; the bits are the same.
    """

    together: bool
    numbers: Scheme
    adapters: frozenset[Scheme]
    scales: bool
    fused: bool = True


def variant(
    *, together: bool, numbers: Scheme, plans: Sequence[PackedDeltas], fused: bool = True
) -> Variant:
    """Return what a batch with these plans needs."""
    adapters = frozenset(plan.scheme for plan in plans if plan.width)
    scales = any(plan.has_scales for plan in plans)
    return Variant(together, numbers, adapters, scales, fused or not adapters)


def program_bytes(layers: int, *, schemes: int, scales: bool) -> int:
    """Return what a program takes at most: tables, arguments, counts and names of its operations.

    ``schemes`` is in how many schemes plans are that it allows for.
    """
    each = _LAYER_BYTES + _SCHEME_BYTES * schemes + _SCALES_BYTES * scales
    return (layers + 1) * each


@dataclass(frozen=True, slots=True, eq=False)
class DecoderProgram:
    """What reads tokens in a room; run `embed`, then `layers`, then `score`.

    Rows of the room's ``hidden`` may be written instead of being embedded. `score` scores the rows
    that `set` said, from the first.
    """

    embed: Program
    layers: Program
    score: Program
    _counts: BatchCounts
    _tables: dict[Scheme | None, BatchTable]

    def set(self, tokens: int, stretches: Sequence[Stretch]) -> None:
        """Say how many tokens the next run reads, and which of them have plans."""
        self._counts.set(tokens, stretches)
        for scheme, table in self._tables.items():
            mine = [s for s in stretches if scheme in (None, s.plan.scheme)]
            width = max((s.plan.width for s in mine), default=0) if scheme else 0
            table.set([(s.plan.address, s.first, s.rows) for s in mine], width=width)


def decoder_program(base: PackedBase, room: DecoderRoom, variant: Variant) -> DecoderProgram:
    """Return the program of a variant."""
    return _Decoder(base, room, variant).program()


class _Decoder:
    """Builds one program."""

    def __init__(self, base: PackedBase, room: DecoderRoom, variant: Variant) -> None:
        config = base.config
        self._base, self._room, self._variant = base, room, variant
        self._shape = HeadsShape(config.heads, config.kv_heads, config.head_dim, variant.numbers)
        self._sites = sites(config.layers)
        self._counts = BatchCounts(
            self._shape, variant.adapters, self._sites, together=variant.together
        )
        self._builder = ProgramBuilder()
        self._linear = LinearOperations(
            self._builder,
            room,
            self._counts,
            sorted(variant.adapters, key=lambda scheme: scheme.value),
            scales=variant.scales,
            together=variant.together,
            fused=variant.fused,
        )
        self._eps = np.array([config.norm_eps], np.float32)
        self._scale = np.array([config.head_dim**-0.5], np.float32)

    def program(self) -> DecoderProgram:
        base, room = self._base, self._room
        self._builder.begin("embedding")
        arguments = embed_arguments(matrix=base.embedding, tokens=room.tokens, out=room.hidden)
        self._builder.add(embed_kernel(base.scheme), arguments, self._counts.tokens)
        embed = self._built()
        self._angles()
        for number, layer in enumerate(base.layers):
            self._layer(number, layer)
        layers = self._built()
        self._builder.begin("head")
        self._norm(base.norm)
        head = self._layers(len(self._sites) - 1, base.head, (base.config.vocab_size,), None)
        self._linear.add(head, room.normed, room.logits)
        used = [*self._variant.adapters, *([None] if self._variant.scales else [])]
        tables = {scheme: room.batch(scheme) for scheme in used}
        return DecoderProgram(embed, layers, self._built(), self._counts, tables)

    def _angles(self) -> None:
        rope, room = self._base.config.rope, self._room
        frequencies = np.ascontiguousarray(inverse_frequencies(rope).numpy())
        factor = np.array([rope.attention], np.float32)
        arguments = angles_arguments(
            positions=room.positions, frequencies=frequencies, factor=factor, out=room.rotations
        )
        self._builder.add(angles_kernel(), arguments, self._counts.tokens)
        self._builder.keep(frequencies, factor)

    def _layer(self, number: int, layer: PackedLayer) -> None:
        config, room, add = self._base.config, self._room, self._linear.add
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        wide, site = config.intermediate_size, 4 * number
        self._builder.begin(f"layers.{number}.attention")
        self._norm(layer.input_norm)
        inputs = self._layers(site, layer.inputs, (queries, keys, keys), layer.input_bias)
        add(inputs, room.normed, room.heads)
        self._attention(number, layer)
        output = self._layers(site + 1, layer.output, (config.hidden_size,), layer.output_bias)
        add(output, room.attended, room.hidden, adds=True)
        self._builder.begin(f"layers.{number}.mlp")
        self._norm(layer.mlp_norm)
        gate_up = self._layers(site + 2, layer.gate_up, (wide, wide), layer.gate_up_bias)
        add(gate_up, room.normed, room.gates)
        gate, up = room.gates[:, :wide], room.gates[:, wide:]
        arguments = gate_arguments(gate=gate, up=up, out=gate, width=wide)
        self._builder.add(gate_kernel(), arguments, self._counts.tokens)
        down = self._layers(site + 3, layer.down, (config.hidden_size,), layer.down_bias)
        add(down, gate, room.hidden, adds=True)

    def _attention(self, number: int, layer: PackedLayer) -> None:
        shape, room, numbers = self._shape, self._room, self._variant.numbers
        first = 2 * number * shape.page_bytes
        offsets = (first, first + shape.page_bytes)
        norms = (layer.query_norm, layer.key_norm)
        tokens = self._counts.tokens
        arguments = heads_arguments(
            rows=room.heads,
            shape=shape,
            norms=norms,
            eps=self._eps,
            rotations=room.rotations,
            positions=room.positions,
            tables=room.tables,
            offsets=offsets,
            count=tokens,
        )
        self._builder.add(heads_kernel(numbers), arguments, self._counts.heads)
        arguments = attend_arguments(
            rows=room.heads,
            shape=shape,
            positions=room.positions,
            tables=room.tables,
            offsets=offsets,
            out=room.attended,
            window=layer.window,
            scale=self._scale,
            count=tokens,
        )
        attend = attend_prompt_kernel if self._variant.together else attend_step_kernel
        self._builder.add(attend(numbers), arguments, self._counts.attending)

    def _layers(
        self, site: int, matrix: PackedMatrix, rows: Sequence[int], bias: Numbers | None
    ) -> Layers:
        return Layers(site, self._sites[site].first, matrix, rows, bias)

    def _norm(self, weight: Numbers) -> None:
        rows, out = self._room.hidden, self._room.normed
        arguments = norm_arguments(rows=rows, weight=weight, out=out, eps=self._eps)
        self._builder.add(norm_kernel(), arguments, self._counts.tokens)

    def _built(self) -> Program:
        self._builder.keep(self._base, self._room, self._counts, self._eps, self._scale)
        return self._builder.build()
