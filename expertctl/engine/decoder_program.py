"""The programs of a decoder: one that reads a stretch of a prompt, one that reads a token.

Both are the same operations; they differ in how many tokens there is room for and in who attends
together. What a plan changes in a layer is added to its products (decision 10):
``y = d * (W (u * x)) + B (A x) + e * b``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from expertctl.engine.kernels.angles import angles_arguments, angles_kernel
from expertctl.engine.kernels.attend import (
    TOKENS_AN_ITEM,
    attend_arguments,
    attend_prompt_kernel,
    attend_step_kernel,
)
from expertctl.engine.kernels.elementwise import (
    add_arguments,
    add_kernel,
    affine_arguments,
    affine_kernel,
    gate_arguments,
    gate_kernel,
    norm_arguments,
    norm_kernel,
)
from expertctl.engine.kernels.embed import embed_arguments, embed_kernel
from expertctl.engine.kernels.heads import HeadsShape, heads_arguments, heads_kernel
from expertctl.engine.kernels.lanes import LANES
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.multiply import (
    multiply_arguments,
    multiply_items,
    multiply_kernel,
)
from expertctl.engine.kernels.packed import PackedMatrix
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.rows import (
    PreparedRows,
    prepare_arguments,
    prepare_kernel,
    room_for_rows,
    rows_as_they_are,
)
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_base import ATTENTION_INPUTS, MLP_INPUTS, PackedBase, PackedLayer
from expertctl.engine.packed_delta import NO_DELTA, PackedDelta, PackedDeltas
from expertctl.engine.rope import inverse_frequencies

Numbers = np.ndarray[Any, Any]
_HEADS_PORTION = 8
_MULTIPLY_PORTION, _PORTIONS = 4, 8
_FLOATING = frozenset({Scheme.FLOAT32, Scheme.FLOAT16})


@dataclass(frozen=True, slots=True, eq=False)
class DecoderProgram:
    """What reads tokens, with its inputs and results; run `embed`, then `layers`, then `score`.

    ``tokens``, ``positions`` and ``tables`` (addresses of lists of pages) are int64 [room]. Rows of
    ``hidden`` may be written instead of being embedded. A step scores every row, a prompt the row
    that is put into ``scored``.
    """

    embed: Program
    layers: Program
    score: Program
    tokens: Numbers
    positions: Numbers
    tables: Numbers
    hidden: Numbers
    """float32 [room, hidden size]."""
    scored: Numbers
    """float32 [1 or room, hidden size]."""
    logits: Numbers
    """float32 [1 or room, at least the vocabulary]."""
    _counts: "Counts"

    def set_count(self, tokens: int) -> None:
        """Say how many tokens the next run reads."""
        self._counts.set(tokens)


class Counts:
    """How many items the operations of a run have that depend on how many tokens it reads."""

    def __init__(self, shape: HeadsShape, *, together: bool) -> None:
        """Begin with one token."""
        self._shape, self._together = shape, together
        self.tokens, self.heads, self.attending = (np.zeros(1, np.int64) for _ in range(3))
        self.set(1)

    def set(self, tokens: int) -> None:
        """Read so many."""
        shape = self._shape
        self.tokens[0] = tokens
        self.heads[0] = tokens * (shape.queries + 2 * shape.keys)
        stretches = -(-tokens // TOKENS_AN_ITEM)
        self.attending[0] = stretches * shape.queries if self._together else tokens * shape.keys


def prompt_program(base: PackedBase, deltas: PackedDeltas, room: int) -> DecoderProgram:
    """Return the program that reads up to ``room`` consecutive tokens of one text."""
    return _Decoder(base, deltas, room, together=True).program()


def step_program(base: PackedBase, deltas: PackedDeltas, room: int) -> DecoderProgram:
    """Return the program that reads one token each of up to ``room`` texts."""
    return _Decoder(base, deltas, room, together=False).program()


class _Decoder:
    """Builds one program: the operations in order, and the memory between them."""

    def __init__(
        self,
        base: PackedBase,
        deltas: PackedDeltas,
        room: int,
        *,
        together: bool,
    ) -> None:
        config = base.config
        self._base, self._deltas, self._room, self._together = base, deltas, room, together
        self._shape = HeadsShape(config.heads, config.kv_heads, config.head_dim)
        self._counts = Counts(self._shape, together=together)
        self._tokens, self._positions, self._tables = (aligned(room, np.int64) for _ in range(3))
        self._rotations = aligned((room, 2, config.head_dim), np.float32)
        self._hidden = self._rows(config.hidden_size)
        self._normed = self._rows(config.hidden_size)
        self._heads = self._rows((config.heads + 2 * config.kv_heads) * config.head_dim)
        self._attended = self._rows(config.heads * config.head_dim)
        self._gates = self._rows(2 * config.intermediate_size)
        self._eps = np.array([config.norm_eps], np.float32)
        self._scale = np.array([config.head_dim**-0.5], np.float32)
        self._between: dict[tuple[str, int], Numbers] = {}
        self._prepared: dict[tuple[Scheme, int], PreparedRows] = {}
        self._builder = ProgramBuilder()
        self._count = self._counts.tokens

    def program(self) -> DecoderProgram:
        """Return the program."""
        base, hidden = self._base, self._hidden
        arguments = embed_arguments(base.embedding, self._tokens, hidden)
        self._builder.add(embed_kernel(base.scheme), arguments, self._count)
        embed = self._built()
        self._angles()
        for number, layer in enumerate(base.layers):
            self._layer(number, layer)
        layers = self._built()
        rows = 1 if self._together else self._room
        scored = aligned((1, hidden.shape[1]), np.float32) if self._together else hidden
        logits = aligned((rows, _filled(base.config.vocab_size)), np.float32)
        self._count = np.ones(1, np.int64) if self._together else self._count
        self._norm(scored, base.norm, self._normed)
        self._linear(base.head, {"lm_head": base.config.vocab_size}, self._normed, logits, None)
        return DecoderProgram(
            embed=embed,
            layers=layers,
            score=self._built(),
            tokens=self._tokens,
            positions=self._positions,
            tables=self._tables,
            hidden=hidden,
            scored=scored,
            logits=logits,
            _counts=self._counts,
        )

    def _angles(self) -> None:
        rope = self._base.config.rope
        frequencies = np.ascontiguousarray(inverse_frequencies(rope).numpy())
        factor = np.array([rope.attention], np.float32)
        arguments = angles_arguments(self._positions, frequencies, factor, self._rotations)
        self._builder.add(angles_kernel(), arguments, self._count)
        self._builder.keep(frequencies, factor)

    def _layer(self, number: int, layer: PackedLayer) -> None:
        config, hidden, at = self._base.config, self._hidden, f"model.layers.{number}"
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        inputs = _named(at, ATTENTION_INPUTS, (queries, keys, keys))
        self._norm(hidden, layer.input_norm, self._normed)
        self._linear(layer.inputs, inputs, self._normed, self._heads, layer.input_bias)
        self._attention(number, layer)
        outputs = _named(at, ("self_attn.o_proj",), (config.hidden_size,))
        self._linear(layer.output, outputs, self._attended, hidden, layer.output_bias, adds=True)
        self._norm(hidden, layer.mlp_norm, self._normed)
        wide = config.intermediate_size
        gate_up = _named(at, MLP_INPUTS, (wide, wide))
        self._linear(layer.gate_up, gate_up, self._normed, self._gates, layer.gate_up_bias)
        gate, up = self._gates[:, :wide], self._gates[:, wide:]
        self._builder.add(gate_kernel(), gate_arguments(gate, up, gate, wide), self._count)
        down = _named(at, ("mlp.down_proj",), (config.hidden_size,))
        self._linear(layer.down, down, gate, hidden, layer.down_bias, adds=True)

    def _attention(self, number: int, layer: PackedLayer) -> None:
        shape, where = self._shape, (self._positions, self._tables)
        first = 2 * number * shape.page_bytes
        offsets = (first, first + shape.page_bytes)
        norms = (layer.query_norm, layer.key_norm)
        arguments = heads_arguments(
            self._heads, shape, norms, self._eps, self._rotations, where, offsets
        )
        self._builder.add(heads_kernel(), arguments, self._counts.heads, portion=_HEADS_PORTION)
        arguments = attend_arguments(
            self._heads,
            shape,
            where,
            offsets,
            self._attended,
            layer.window,
            self._scale,
            self._counts.tokens,
        )
        kernel = attend_prompt_kernel() if self._together else attend_step_kernel()
        self._builder.add(kernel, arguments, self._counts.attending)

    def _linear(
        self,
        matrix: PackedMatrix,
        modules: Mapping[str, int],
        source: Numbers,
        out: Numbers,
        bias: Numbers | None,
        *,
        adds: bool = False,
    ) -> None:
        """Add a product of one or several modules whose rows lie behind each other."""
        deltas = {name: self._deltas[name] for name in modules if name in self._deltas}
        if not any(delta.has_vectors for delta in deltas.values()):
            self._multiply(matrix, source, out, adds=adds)
            if bias is not None:
                self._affine(out, None, bias, out)
        first = 0
        for name, rows in modules.items():
            delta, part = deltas.get(name), out[:, first : first + _filled(rows)]
            if any(delta.has_vectors for delta in deltas.values()):
                own_bias = None if bias is None else bias[first : first + rows]
                own = matrix.part(first, rows)
                self._scaled(own, delta or NO_DELTA, source, part, own_bias, adds=adds)
            if delta is not None and delta.a is not None and delta.b is not None:
                inner = self._between_rows("rank", _filled(delta.a.rows))
                self._multiply(delta.a, source, inner)
                self._multiply(delta.b, inner, part, adds=True)
            first += rows

    def _scaled(
        self,
        matrix: PackedMatrix,
        delta: PackedDelta,
        source: Numbers,
        out: Numbers,
        bias: Numbers | None,
        *,
        adds: bool,
    ) -> None:
        """Add ``d * (W (u * x)) + e * b``."""
        if delta.input_scale is not None:
            scaled = self._between_rows("input", matrix.columns)
            self._affine(source, delta.input_scale, None, scaled)
            source = scaled
        target = self._between_rows("output", _filled(matrix.rows)) if adds else out
        self._multiply(matrix, source, target)
        if bias is not None and delta.bias_scale is not None:
            bias = bias * delta.bias_scale
        self._affine(target, delta.output_scale, bias, target, width=matrix.rows)
        if adds:
            self._builder.add(add_kernel(), add_arguments(target, out, matrix.rows), self._count)

    def _multiply(
        self, matrix: PackedMatrix, source: Numbers, out: Numbers, *, adds: bool = False
    ) -> None:
        rows, builder = self._prepare(matrix, source), self._builder
        arguments = multiply_arguments(matrix, rows, out, self._count, adds=adds)
        items = multiply_items(matrix)
        portion = min(_MULTIPLY_PORTION, items // _PORTIONS)
        builder.add(multiply_kernel(matrix.scheme), arguments, items, portion=portion)
        builder.keep(matrix, rows, source, out)

    def _prepare(self, matrix: PackedMatrix, source: Numbers) -> PreparedRows:
        if matrix.scheme in _FLOATING:
            return rows_as_they_are(source)
        key = (matrix.scheme, matrix.columns)
        if key not in self._prepared:
            self._prepared[key] = room_for_rows(*key[:1], self._room, matrix.columns)
        rows = self._prepared[key]
        arguments = prepare_arguments(source, matrix.columns, rows)
        self._builder.add(prepare_kernel(matrix.scheme), arguments, self._count)
        return rows

    def _norm(self, rows: Numbers, weight: Numbers, out: Numbers) -> None:
        self._builder.add(norm_kernel(), norm_arguments(rows, weight, out, self._eps), self._count)

    def _affine(
        self,
        rows: Numbers,
        scale: Numbers | None,
        shift: Numbers | None,
        out: Numbers,
        *,
        width: int | None = None,
    ) -> None:
        vector = scale if scale is not None else shift
        if vector is None:
            return
        arguments = affine_arguments(rows, scale, shift, out, width or len(vector))
        self._builder.add(affine_kernel(), arguments, self._count)
        self._builder.keep(scale, shift, rows, out)

    def _between_rows(self, use: str, width: int) -> Numbers:
        if (use, width) not in self._between:
            self._between[use, width] = self._rows(width)
        return self._between[use, width]

    def _rows(self, width: int) -> Numbers:
        return aligned((self._room, _filled(width)), np.float32)

    def _built(self) -> Program:
        self._builder.keep(self, self._deltas)
        built, self._builder = self._builder.build(), ProgramBuilder()
        return built


def _filled(rows: int) -> int:
    """Return a number of rows filled to whole blocks."""
    return -(-rows // LANES) * LANES


def _named(at: str, modules: Sequence[str], rows: Sequence[int]) -> dict[str, int]:
    return {f"{at}.{module}": count for module, count in zip(modules, rows, strict=True)}
