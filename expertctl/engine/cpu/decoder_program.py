"""Building the programs of a decoder: one for prompt chunks, one for decode steps.

Both have the same operations in one workspace; they differ in which rows attend together. The plans
of rows are not part of a program but of each run, so plans may alternate or share a batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.block_operations import BlockOperations, list_block_kernels
from expertctl.engine.cpu.linear_operations import FusedLinearLayers, LinearProgramBuilder
from expertctl.engine.cpu.packed_base import (
    ATTENTION_OUTPUT,
    MLP_OUTPUT,
    PackedBase,
    PackedLayer,
    PackedMlp,
    PackedRouting,
)
from expertctl.engine.cpu.workspace import ItemCounts, ProgramVariant, RowRange, Workspace
from expertctl.engine.kernels.layer_operations import AttentionShape
from expertctl.engine.kernels.lora import AdapterBatchTable, gemm_kernel
from expertctl.engine.kernels.machine_code import FunctionSource
from expertctl.engine.kernels.packed_format import (
    ATTENTION_INPUTS,
    FLOAT_SCHEMES,
    MLP_INPUTS,
    SHARED_GATE,
    SHARED_INPUTS,
    SHARED_OUTPUT,
    Scheme,
    find_fused_projections,
)
from expertctl.engine.kernels.packed_matrix import (
    MatrixStack,
    PackedMatrix,
    embedding_kernel,
    packing_kernel,
)
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.quantisation import activation_kernel
from expertctl.engine.kernels.thread_pool import POOL_SOURCES
from expertctl.engine.moe.routed_experts import RoutedExperts
from expertctl.engine.moe.routed_operations import RoutedOperations
from expertctl.package.model_config import ModelConfig


def list_common_sources(
    config: ModelConfig, scheme: Scheme, numbers: Scheme, *, others: Iterable[Scheme] = ()
) -> dict[str, FunctionSource]:
    """Return the functions that a base needs without adapters, to compile them together.

    ``scheme`` is that of its matrices, ``others`` those of some of them, ``numbers`` that of keys
    and values. A function that is not listed is compiled when a program needs it.
    """
    kernels = [
        *list_block_kernels(config, numbers),
        gemm_kernel(scheme),
        packing_kernel(scheme),
        embedding_kernel(scheme.embedding),
    ]
    if scheme not in FLOAT_SCHEMES:
        kernels.append(activation_kernel(scheme))
    if scheme.embedding is not scheme:
        kernels += [gemm_kernel(scheme.embedding), packing_kernel(scheme.embedding)]
    kernels += [gemm_kernel(other) for other in set(others) - {scheme}]
    return {**{kernel.name: kernel.source for kernel in kernels}, **POOL_SOURCES}


_LAYER_BYTES, _SCHEME_BYTES, _SCALES_BYTES = 10 << 10, 6 << 10, 11 << 10
_OTHER_BLOCK_BYTES = 6 << 10
"""Of the operations that blocks unlike Llama's may have besides."""
_ROUTED_BYTES, _ROUTED_SCHEME_BYTES, _LANES_BYTES = 12 << 10, 3 << 10, 26 << 10


def estimate_program_bytes(
    config: ModelConfig, *, schemes: int, scales: bool, routed: int = 0, lanes: bool = False
) -> int:
    """Return the maximum bytes of a program: tables, arguments, counts and names of operations.

    ``schemes`` is the number of schemes of its plans, ``routed`` that of plans that change routed
    experts. With ``lanes``, experts that are in memory are computed first.
    """
    each = _LAYER_BYTES + _SCHEME_BYTES * schemes + _SCALES_BYTES * scales
    each += _OTHER_BLOCK_BYTES * (not config.has_llama_blocks)
    layers = 0 if config.experts is None else len(config.experts.layers)
    experts = _ROUTED_BYTES + _ROUTED_SCHEME_BYTES * routed + _LANES_BYTES * lanes
    return (config.layers + 1) * each + layers * experts


@dataclass(frozen=True, slots=True, eq=False)
class ProgramStage:
    """A part of all layers, up to the selection of the experts of ``routed_layer`` if not None.

    ``routed_layer`` counts routed layers from 0. The next stage must not run until all selected
    experts are in memory. With ``expert_programs``, they are computed in between.
    """

    program: Program
    routed_layer: int | None = None
    expert_programs: "ExpertPrograms | None" = None
    predicts_next: bool = False
    """Whether the workspace then holds a prediction of the next routed layer's selection."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPrograms:
    """Two ways to compute the experts of a layer: all at once, or those in memory first.

    In the second, ``loaded`` runs first, ``arrived`` each time others have been loaded, and
    ``remaining`` at the end.
    """

    all_experts: Program
    loaded: Program
    arrived: Program
    remaining: Program


@dataclass(frozen=True, slots=True, eq=False)
class DecoderProgram:
    """A program for a workspace; run `embed`, then the stages of `layers`, `last` and `score`.

    Rows of the workspace's ``hidden`` may be written instead of being embedded. `score` scores the
    first rows, as many as were passed to `set`. Of a prompt only these rows run `last`, the end of
    the last layer after keys and values are written: the other rows are no longer needed.
    """

    embed: Program
    layers: tuple["ProgramStage", ...]
    last: tuple["ProgramStage", ...]
    score: Program
    _counts: ItemCounts
    _tables: dict[Scheme | None, AdapterBatchTable]
    _routed_tables: dict[Scheme | None, AdapterBatchTable]
    _routed: RoutedOperations | None

    def set(self, tokens: int, ranges: Sequence[RowRange]) -> None:
        """Set the number of tokens of the next run, and which of them have plans."""
        self._counts.set(tokens, ranges)
        if self._routed is not None:
            self._routed.set_tokens(tokens)
        for scheme, table in self._tables.items():
            mine = [s for s in ranges if scheme in (None, s.plan.scheme)]
            width = max((s.plan.width for s in mine), default=0) if scheme else 0
            table.set_entries([(s.plan.address, s.first, s.rows) for s in mine], width=width)
        for scheme, table in self._routed_tables.items():
            routed = [s for s in ranges if s.plan.first_routed_record is not None]
            mine = [s for s in routed if scheme in (None, s.plan.scheme)]
            table.set_entries([(s.plan.routed_address, s.first, s.rows) for s in mine], width=0)


def split_program_by_layer(program: Program) -> list[Program]:
    """Split a program into one part per layer, in order.

    Operations before the first layer belong to the first part.
    """
    names = [place.split(".") for place in program.places]
    layers = [name[1] if name[0] == "layers" else "0" for name in names]
    begins = [at for at, layer in enumerate(layers) if at == 0 or layer != layers[at - 1]]
    ends = [*begins[1:], len(layers)]
    return [program.slice_operations(begin, end) for begin, end in zip(begins, ends, strict=True)]


def build_decoder_program(
    base: PackedBase,
    workspace: Workspace,
    variant: ProgramVariant,
    experts: RoutedExperts | None = None,
) -> DecoderProgram:
    """Return the program of a variant; ``experts`` holds the experts of routed layers."""
    return _ProgramBuilder(base, workspace, variant, experts).build()


def _list_tables(schemes: Iterable[Scheme], scales: bool) -> list[Scheme | None]:
    """Return the keys of the batch tables: each scheme, and None for the scales of all schemes."""
    return [*schemes, *([None] if scales else [])]


class _ProgramBuilder:
    """Builds one program."""

    def __init__(
        self,
        base: PackedBase,
        workspace: Workspace,
        variant: ProgramVariant,
        experts: RoutedExperts | None,
    ) -> None:
        config = base.config
        self._base, self._room, self._variant = base, workspace, variant
        self._sites = find_fused_projections(config.linear_shapes())
        self._numbers = {site.modules[0]: number for number, site in enumerate(self._sites)}
        self._stages: list[ProgramStage] = []
        self._wide = 0
        """Stages before only scored rows are computed; 0: all rows are scored."""
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, variant.numbers)
        self._counts = ItemCounts(
            shape, variant.adapters, self._sites, single_sequence=variant.single_sequence
        )
        self._builder = ProgramBuilder()
        self._blocks = BlockOperations(self._builder, base, workspace, self._counts, shape, variant)
        self._linear = LinearProgramBuilder(
            self._builder,
            workspace,
            self._counts,
            sorted(variant.adapters, key=lambda scheme: scheme.value),
            scales=variant.scales,
            single_sequence=variant.single_sequence,
            fused=variant.fused,
        )
        self._routed: RoutedOperations | None = None
        if workspace.routed is not None and experts is not None:
            self._routed = RoutedOperations(
                self._builder,
                workspace,
                self._counts.tokens,
                base,
                experts,
                adapters=sorted(variant.routed, key=lambda scheme: scheme.value),
                scales=variant.scales_routed,
            )

    def build(self) -> DecoderProgram:
        base, room = self._base, self._room
        self._builder.set_place("embedding")
        self._blocks.add_embedding()
        embed = self._finish_program()
        self._blocks.add_positions()
        for number, layer in enumerate(base.layers):
            self._add_layer(number, layer)
        end = self._finish_program()
        if len(end.table):  # empty if the last layer ends with its experts
            self._stages.append(ProgramStage(end))
        self._builder.set_place("head")
        normed = self._blocks.add_norm(base.norm, base.norm_bias)
        head = self._select_layers("lm_head", base.head, (base.config.vocab_size,), base.head_bias)
        self._linear.add(head, normed, room.logits)
        self._blocks.add_logit_scale()
        variant = self._variant
        used = _list_tables(variant.adapters, variant.scales)
        tables = {scheme: room.get_batch_table(scheme) for scheme in used}
        used = _list_tables(variant.routed, variant.scales_routed)
        routed = {scheme: room.get_routed_batch_table(scheme) for scheme in used}
        wide = self._wide or len(self._stages)
        layers, last = self._stages[:wide], self._stages[wide:]
        return DecoderProgram(
            embed, tuple(layers), tuple(last), self._finish_program(), self._counts, tables, routed,
            self._routed,
        )  # fmt: skip

    def _add_layer(self, number: int, layer: PackedLayer) -> None:
        config, room, blocks = self._base.config, self._room, self._blocks
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        at = f"model.layers.{number}"
        self._builder.set_place(f"layers.{number}.attention")
        read = blocks.add_norm(layer.input_norm, layer.input_norm_bias)
        first = f"{at}.{ATTENTION_INPUTS[0]}"
        inputs = self._select_layers(first, layer.inputs, (queries, keys, keys), layer.input_bias)
        self._linear.add(inputs, read, room.heads)
        self._add_attention(number, layer)
        if blocks.is_parallel:  # its MLP comes first, so that it reads what attention has read
            self._add_feed_forward(number, layer, read)
            self._builder.set_place(f"layers.{number}.attention")
        hidden, last = (config.hidden_size,), f"{at}.{ATTENTION_OUTPUT[0]}"
        output = self._select_layers(last, layer.output, hidden, layer.output_bias)
        self._add_to_hidden(output, room.attended, layer.output_norm)
        if not blocks.is_parallel:
            self._add_feed_forward(number, layer, room.hidden)

    def _add_feed_forward(self, number: int, layer: PackedLayer, read: AnyArray) -> None:
        """Add the MLP of a layer or its experts; without a norm it reads ``read``."""
        at = f"model.layers.{number}"
        self._builder.set_place(f"layers.{number}.mlp")
        if layer.mlp_norm is not None:
            read = self._blocks.add_norm(layer.mlp_norm, layer.mlp_norm_bias)
        if not isinstance(layer.mlp, PackedMlp):
            self._add_routing(number, layer.mlp)
            return
        names = [name for each in MLP_INPUTS if (name := f"{at}.{each}") in self._numbers]
        gate = self._add_gate(layer.mlp, names[0], read)
        down = self._select_down(layer.mlp, f"{at}.{MLP_OUTPUT[0]}")
        self._add_to_hidden(down, gate, layer.mlp_output_norm)

    def _add_to_hidden(
        self, layers: FusedLinearLayers, source: AnyArray, norm: AnyArray | None
    ) -> None:
        """Add what a layer returns for ``source``, normed and scaled, to the hidden states."""
        if self._blocks.adds_directly(norm):
            self._linear.add(layers, source, self._room.hidden, adds=True)
            return
        self._linear.add(layers, source, self._room.settled)
        self._blocks.add_to_hidden(norm)

    def _add_mlp(self, mlp: PackedMlp, first: str, last: str, out: AnyArray, *, adds: bool) -> None:
        """Add ``down (silu(gate x) * up x)``; ``first`` and ``last`` are names of modules."""
        gate = self._add_gate(mlp, first, self._room.normed)
        self._linear.add(self._select_down(mlp, last), gate, out, adds=adds)

    def _add_gate(self, mlp: PackedMlp, first: str, source: AnyArray) -> AnyArray:
        """Add the part of an MLP before its last matrix; return what that reads."""
        wide, rows = mlp.down.columns, mlp.gate_up.rows
        gates = self._room.gates[:, :rows]
        gate_up = self._select_layers(first, mlp.gate_up, [wide] * (rows // wide), mlp.gate_up_bias)
        self._linear.add(gate_up, source, gates)
        return self._blocks.add_activation(gates, wide)

    def _select_down(self, mlp: PackedMlp, name: str) -> FusedLinearLayers:
        return self._select_layers(name, mlp.down, (mlp.down.rows,), mlp.down_bias)

    def _add_routing(self, number: int, routing: PackedRouting) -> None:
        """Add the shared expert first, because it needs no routed expert to be in memory."""
        assert self._routed is not None
        at = f"model.layers.{number}"
        if routing.shared is not None:
            names = f"{at}.{SHARED_INPUTS[0]}", f"{at}.{SHARED_OUTPUT}"
            is_gated = routing.shared_gate is not None
            out = self._routed.workspace.scratch if is_gated else self._room.hidden
            self._add_mlp(routing.shared, *names, out, adds=not is_gated)
        if routing.shared_gate is not None:
            gate = self._select_layers(f"{at}.{SHARED_GATE}", routing.shared_gate, (1,), None)
            self._linear.add(gate, self._room.normed, self._routed.workspace.shares)
            self._routed.add_shared_expert()
        place = self._routed.add_router(number, routing)
        if not self._routed.is_whole:
            self._end_stage(number, place, foresees=self._add_prediction(number, place))
        if self._routed.is_whole or not self._overlaps_loading:
            self._routed.add_experts(place)

    @property
    def _overlaps_loading(self) -> bool:
        """Whether experts in memory are computed while others are loaded."""
        assert self._routed is not None
        return self._routed.can_split

    def _end_stage(self, number: int, place: int, *, foresees: bool) -> None:
        """End a stage where the experts of a layer have been selected."""
        assert self._routed is not None
        before, name = self._finish_program(), f"layers.{number}.experts"
        if not self._overlaps_loading:
            self._stages.append(ProgramStage(before, place, predicts_next=foresees))
            self._builder.set_place(name)
            return
        ways, routed = [], self._routed
        those = (routed.add_experts, routed.add_present_experts)
        for compute in (*those, routed.add_loaded_experts, routed.add_remaining_experts):
            self._builder.set_place(name)
            compute(place)
            ways.append(self._finish_program())
        self._stages.append(ProgramStage(before, place, ExpertPrograms(*ways), foresees))

    def _add_attention(self, number: int, layer: PackedLayer) -> None:
        self._blocks.add_kv_write(number, layer)
        if self._drops_unscored_rows(number):
            self._stages.append(ProgramStage(self._finish_program()))
            self._wide = len(self._stages)
            self._builder.set_place(f"layers.{number}.attention")
        self._blocks.add_attention(number, layer)

    def _drops_unscored_rows(self, number: int) -> bool:
        """Whether only scored rows are computed from here on: in the last layer of a prompt."""
        return self._variant.single_sequence and number == len(self._base.layers) - 1

    def _add_prediction(self, number: int, place: int) -> bool:
        """Predict the selection of the next routed layer if all rows reach it; return whether."""
        assert self._routed is not None
        for later, layer in enumerate(self._base.layers[number + 1 :], number + 1):
            if isinstance(layer.mlp, PackedRouting):
                if self._drops_unscored_rows(later):
                    return False
                self._routed.add_prediction(place + 1, layer)
                return True
        return False

    def _select_layers(
        self,
        first: str,
        matrix: PackedMatrix | MatrixStack,
        rows: Sequence[int],
        bias: AnyArray | None,
    ) -> FusedLinearLayers:
        """Return the fused layers whose first module is ``first``."""
        site = self._numbers[first]
        parts = matrix.parts if isinstance(matrix, MatrixStack) else (matrix,)
        return FusedLinearLayers(site, self._sites[site].first, parts, rows, bias)

    def _finish_program(self) -> Program:
        self._blocks.keep_alive()
        return self._builder.build()
