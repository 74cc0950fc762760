"""The workspace of decoder programs: preallocated buffers, program variants and item counts.

One workspace serves prompts and steps, because one call runs at a time. Its size in bytes is known
in advance; `RoutedWorkspace` is the part for routed experts. `ItemCounts` holds the item counts of
a run, which depend on its tokens and plans.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.layer_operations import AttentionShape, prefill_attention_items
from expertctl.engine.kernels.lora import AdapterBatchTable, batch_table_bytes
from expertctl.engine.kernels.moe_layer import allocate_permutation
from expertctl.engine.kernels.packed_format import (
    FLOAT_SCHEMES,
    LANES,
    FusedProjection,
    PackedDeltas,
    Scheme,
)
from expertctl.engine.kernels.quantisation import (
    PreparedActivations,
    allocate_activations,
    padded_columns,
    wrap_float_activations,
)
from expertctl.engine.moe.routed_experts import RoutingChoices
from expertctl.package.attention_config import RopeConfig
from expertctl.package.block_config import RopeKind
from expertctl.package.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ProgramVariant:
    """The features that a program supports.

    ``single_sequence``: rows are consecutive tokens of one sequence, else one token of each of
    several. ``numbers``: the scheme of KV pages. ``adapters``: the schemes of plans; ``scales``:
    whether some plans scale. With ``fused``, adapters are fused with the products of the base where
    possible; the bits are the same.
    """

    single_sequence: bool
    numbers: Scheme
    adapters: frozenset[Scheme]
    scales: bool
    fused: bool = True
    routed: frozenset[Scheme] = frozenset()
    """The schemes of plans that change routed experts."""
    scales_routed: bool = False
    """Whether one of these plans scales the input of routed experts."""


def choose_variant(
    *, single_sequence: bool, numbers: Scheme, plans: Sequence[PackedDeltas], fused: bool = True
) -> ProgramVariant:
    """Return the variant for a batch with these plans."""
    adapters = frozenset(plan.scheme for plan in plans if plan.width)
    scales = any(plan.has_scales for plan in plans)
    routed = frozenset(plan.scheme for plan in plans if plan.first_routed_record is not None)
    scales_routed = any(plan.has_routed_scales for plan in plans)
    fused = fused or not adapters
    return ProgramVariant(single_sequence, numbers, adapters, scales, fused, routed, scales_routed)


@dataclass(frozen=True, slots=True, eq=False)
class RowRange:
    """Consecutive rows of a batch that share a plan."""

    plan: PackedDeltas
    first: int
    rows: int


class ItemCounts:
    """Numbers that operations read at each run: int64 [1], or one per fused projection or module.

    Where some plan scales a projection, the product of the base is computed per module: `whole` and
    `plain` are 0 there; `apart`, `scaled` and `expand_apart` are 0 elsewhere.
    """

    def __init__(
        self,
        shape: AttentionShape,
        adapters: Collection[Scheme],
        sites: Sequence[FusedProjection],
        *,
        single_sequence: bool,
    ) -> None:
        """Start with no tokens; ``single_sequence``: all tokens belong to one sequence."""
        self._shape, self._together = shape, single_sequence
        self.tokens, self.heads, self.attending = (np.zeros(1, np.int64) for _ in range(3))
        places = np.repeat(np.arange(len(sites)), [len(site.modules) for site in sites])
        self._places, self._has = places, np.zeros(len(sites), np.int64)
        self.plain, self.scaled = np.zeros((2, len(sites)), np.int64)
        self._firsts = np.array([site.first for site in sites], np.int64)
        self.whole, self._whole, self.apart, self._apart = np.zeros((4, len(places)), np.int64)
        self.reduce, self.expand, self.reduce_apart, self.expand_apart = (
            {scheme: np.zeros(len(sites), np.int64) for scheme in adapters} for _ in range(4)
        )
        self.adapted, self.done = np.zeros((2, len(sites)), np.int64)
        """Items of each fused operation, and how many of them are done while it runs."""

    def set_fused_items(self, module: int, items: int) -> AnyArray:
        """Set the items of a product of modules from one on; return the count that a run reads."""
        self._whole[module] = items
        return self.whole[module : module + 1]

    def set_module_items(self, module: int, items: int) -> AnyArray:
        """Set the items of a module's product; return the count that a run reads."""
        self._apart[module] = items
        return self.apart[module : module + 1]

    def set(self, tokens: int, ranges: Sequence[RowRange]) -> None:
        """Set the counts for this many tokens, some of them with plans."""
        shape = self._shape
        self.tokens[0] = tokens
        self.heads[0] = tokens * (shape.query_heads + 2 * shape.kv_heads)
        prompt, step = prefill_attention_items(tokens, shape), tokens * shape.kv_heads
        self.attending[0] = prompt if self._together else step
        for numbers in (*self.reduce.values(), *self.expand.values(), self._has):
            numbers[...] = 0
        for stretch in ranges:
            self._add_plan(stretch.plan)
        has = self._has > 0
        np.multiply(tokens, ~has, out=self.plain)
        np.multiply(tokens, has, out=self.scaled)
        np.multiply(self._whole, ~has[self._places], out=self.whole)
        np.multiply(self._apart, has[self._places], out=self.apart)
        self.adapted[...] = self.whole[self._firsts]
        for scheme, items in self.reduce.items():
            np.multiply(items, has, out=self.reduce_apart[scheme])
            np.multiply(self.expand[scheme], has, out=self.expand_apart[scheme])
            self.adapted += items
            self.adapted -= self.reduce_apart[scheme]

    def _add_plan(self, plan: PackedDeltas) -> None:
        work = plan.item_counts
        self._has += work.scales
        if plan.width:
            shrink = work.shrink_prefill if self._together else work.shrink_decode
            self.reduce[plan.scheme] += shrink
            self.expand[plan.scheme] += work.expand


def group_rows_by_plan(plans: Sequence[PackedDeltas | None]) -> list[RowRange]:
    """Return the ranges of rows that have a plan; rows of one plan must be adjacent."""
    found, first = list[RowRange](), 0
    for _, group in groupby(plans, key=id):
        plan, *others = group
        if plan is not None:
            found.append(RowRange(plan, first, 1 + len(others)))
        first += 1 + len(others)
    return found


_FLOAT32_BYTES, _LONG_BYTES = 4, 8


class Workspace:
    """Buffers for ``tokens`` processed at a time and ``rows`` scored at a time."""

    def __init__(self, config: ModelConfig, scheme: Scheme, *, tokens: int, rows: int) -> None:
        """Allocate for a base in a scheme; what plans need is added on demand."""
        self.size, self._config, self._scheme = (tokens, rows), config, scheme
        self.tokens, self.positions, self.tables = (
            aligned_zeros(tokens, np.int64) for _ in range(3)
        )
        widths = _compute_buffer_widths(config)
        self.rotations: dict[RopeKind, AnyArray] = {
            kind: aligned_zeros((tokens, 2, rope.dims), np.float32)
            for kind, rope in list_ropes(config).items()
        }
        self.hidden = aligned_zeros((tokens, widths["hidden"]), np.float32)
        self.normed = aligned_zeros((tokens, widths["normed"]), np.float32)
        self.heads = aligned_zeros((tokens, widths["heads"]), np.float32)
        self.attended = aligned_zeros((tokens, widths["attended"]), np.float32)
        self.gates = aligned_zeros((tokens, widths["gates"]), np.float32)
        self.scaled = aligned_zeros((tokens, widths["scaled"]), np.float32)
        self.settled = aligned_zeros((tokens, widths["settled"]), np.float32)
        self.logits = aligned_zeros((rows, round_up_rows(config.vocab_size)), np.float32)
        routed = config.experts is not None
        self.routed = RoutedWorkspace(config, scheme, tokens=tokens) if routed else None
        self._prepared: dict[tuple[Scheme, int], PreparedActivations] = {}
        self._batches: dict[Scheme | None, AdapterBatchTable] = {}
        self._routed_batches: dict[Scheme | None, AdapterBatchTable] = {}
        for columns in _list_operand_columns(config):
            self.get_prepared_rows(scheme, columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including those added for plans so far."""
        tokens, rows = self.size
        mine = self._scheme.activations
        prepared = [key for key in self._prepared if key[0] is not mine]
        of_plans = sum(_estimate_prepared_rows(*key) * tokens for key in prepared)
        batches = (*self._batches.values(), *self._routed_batches.values())
        tables = sum(batch.nbytes for batch in batches)
        config, scheme = self._config, self._scheme
        own = estimate_base_workspace_bytes(config, scheme, tokens=tokens, rows=rows)
        return own + of_plans + tables

    def reset_errors(self) -> None:
        """Clear the errors of the previous pass."""
        if self.routed is not None:
            self.routed.absent[0] = 0

    def keep_row(self, row: int, *, of: int) -> None:
        """Continue with one of ``of`` rows, as the first; keys and values of all have been written.

        The other rows select no expert in the last layer, if that is a routed one.
        """
        kept = [self.hidden, self.heads, self.positions, self.tables]
        if self._config.block.places == "parallel":  # its MLP reads what attention has read
            kept.append(self.normed)
        for each in kept:
            each[0] = each[row]
        if self.routed is not None and self._config.is_routed(self._config.layers - 1):
            self.routed.choices.mask_last_layer(1, of)

    def get_prepared_rows(self, scheme: Scheme, columns: int) -> PreparedActivations | None:
        """Return activation buffers for a scheme; None if it takes rows unchanged."""
        if scheme in FLOAT_SCHEMES:
            return None
        key = (scheme.activations, columns)
        if key not in self._prepared:
            self._prepared[key] = allocate_activations(scheme, self.size[0], columns)
        return self._prepared[key]

    def get_batch_table(self, scheme: Scheme | None) -> AdapterBatchTable:
        """Return the table of plans in one scheme; None: of all plans, for their scales."""
        if scheme not in self._batches:
            self._batches[scheme] = AdapterBatchTable(scheme or Scheme.FLOAT32, rows=self.size[0])
        return self._batches[scheme]

    def get_routed_batch_table(self, scheme: Scheme | None) -> AdapterBatchTable:
        """Return the table of plans that change routed experts; its width between A and B is 0."""
        if scheme not in self._routed_batches:
            self._routed_batches[scheme] = AdapterBatchTable(Scheme.FLOAT32, rows=self.size[0])
        return self._routed_batches[scheme]


class RoutedWorkspace:
    """Buffers of routed layers for passes of up to ``tokens`` tokens, each with all its experts.

    A *position* is one expert of one token; those of one expert are adjacent.
    """

    def __init__(self, config: ModelConfig, scheme: Scheme, *, tokens: int) -> None:
        """Allocate it for a base in a scheme."""
        routed = config.experts
        assert routed is not None, "a base with routed experts"
        positions = tokens * routed.used
        self.logits = aligned_zeros((tokens, round_up_rows(routed.count)), np.float32)
        self.choices = RoutingChoices(routed, tokens=tokens)
        self.likely_weights = aligned_zeros((tokens, routed.used), np.float32)
        self.absent = aligned_zeros(1, np.int64)
        """1 + the id of an expert that was chosen but not in memory: a bug of ours."""
        self.order = allocate_permutation(routed.count, positions)
        self.rows = _allocate_rows(scheme, positions, config.hidden_size)
        self.gates = aligned_zeros(
            (positions, round_up_rows(2 * routed.intermediate_size)), np.float32
        )
        self.middle = _allocate_rows(scheme, positions, routed.intermediate_size, here=self.gates)
        self.down = aligned_zeros((positions, round_up_rows(config.hidden_size)), np.float32)
        self.scratch = aligned_zeros((tokens, round_up_rows(config.hidden_size)), np.float32)
        """A row for each token, for results other than those of its experts."""
        self.shares = aligned_zeros((tokens, LANES), np.float32)


def estimate_routed_workspace_bytes(config: ModelConfig, scheme: Scheme, *, tokens: int) -> int:
    """Return the bytes of a `RoutedWorkspace`; 0 without routed experts."""
    routed = config.experts
    if routed is None:
        return 0
    hidden, middle = config.hidden_size, routed.intermediate_size
    floats = round_up_rows(2 * middle) + round_up_rows(hidden)
    position = _FLOAT32_BYTES * floats + 2 * _LONG_BYTES
    position += sum(_estimate_prepared_rows(scheme, columns) for columns in (hidden, middle))
    if scheme in FLOAT_SCHEMES:
        position += _FLOAT32_BYTES * round_up_rows(hidden)
    chosen = (_LONG_BYTES + _FLOAT32_BYTES) * routed.used + _FLOAT32_BYTES
    token = _FLOAT32_BYTES * (round_up_rows(routed.count) + round_up_rows(hidden) + LANES)
    token += len(routed.layers) * (chosen + _LONG_BYTES * routed.used)
    token += routed.used * (position + _FLOAT32_BYTES)
    return tokens * token + _LONG_BYTES * (3 * routed.count + 3)


def _allocate_rows(
    scheme: Scheme, positions: int, columns: int, *, here: AnyArray | None = None
) -> PreparedActivations:
    """Allocate rows in the form of a scheme; floats may stay in ``here``."""
    if scheme not in FLOAT_SCHEMES:
        return allocate_activations(scheme, positions, columns)
    if here is None:
        here = aligned_zeros((positions, round_up_rows(columns)), np.float32)
    return wrap_float_activations(here)


def estimate_base_workspace_bytes(
    config: ModelConfig, scheme: Scheme, *, tokens: int, rows: int
) -> int:
    """Return the bytes of a workspace without plans."""
    widths = sum(_compute_buffer_widths(config).values())
    widths += sum(2 * rope.dims for rope in list_ropes(config).values())
    prepared = sum(_estimate_prepared_rows(scheme, n) for n in _list_operand_columns(config))
    each = 3 * _LONG_BYTES + _FLOAT32_BYTES * widths + prepared
    routed = estimate_routed_workspace_bytes(config, scheme, tokens=tokens)
    return tokens * each + routed + rows * _FLOAT32_BYTES * round_up_rows(config.vocab_size)


def estimate_plan_bytes(
    config: ModelConfig, scheme: Scheme, adapters: Scheme, *, tokens: int, width: int
) -> int:
    """Return the bytes that the A and B of plans of one scheme and maximum width add."""
    prepared = 0
    if adapters.activations is not scheme.activations:
        prepared = sum(_estimate_prepared_rows(adapters, n) for n in _list_operand_columns(config))
    return prepared * tokens + batch_table_bytes(adapters, rows=tokens, width=width)


def estimate_factor_bytes(config: ModelConfig, *, tokens: int, schemes: int) -> int:
    """Return the bytes that scales, and plans that change routed experts, add to a workspace.

    The latter have ``schemes`` schemes.
    """
    routed = 0 if config.experts is None else schemes + 1
    return (1 + routed) * batch_table_bytes(Scheme.FLOAT32, rows=tokens, width=0)


def list_ropes(config: ModelConfig) -> dict[RopeKind, RopeConfig]:
    """Return by which frequencies layers may rotate: one kind, or two."""
    local = config.block.local_rope
    return {"global": config.rope} if local is None else {"global": config.rope, "local": local}


def round_up_rows(rows: int) -> int:
    """Round a number of rows up to whole blocks."""
    return -(-rows // LANES) * LANES


def _compute_buffer_widths(config: ModelConfig) -> dict[str, int]:
    """Return the float32 per token of each buffer."""
    return {
        "hidden": round_up_rows(config.hidden_size),
        "normed": round_up_rows(config.hidden_size),
        "heads": round_up_rows((config.heads + 2 * config.kv_heads) * config.head_dim),
        "attended": round_up_rows(config.heads * config.head_dim),
        "gates": round_up_rows(2 * max(_list_mlp_widths(config), default=0)),
        "scaled": max(_list_operand_columns(config)),
        "settled": round_up_rows(config.hidden_size),
    }


def _list_operand_columns(config: ModelConfig) -> frozenset[int]:
    """Return the possible widths of GEMM inputs."""
    attended = config.heads * config.head_dim
    return frozenset({config.hidden_size, attended, *_list_mlp_widths(config)})


def _list_mlp_widths(config: ModelConfig) -> set[int]:
    """Return the widths of the MLPs that every token passes, if there are any."""
    routed = config.experts
    if routed is None:
        return {config.intermediate_size}
    dense = {config.intermediate_size} if len(routed.layers) < config.layers else set()
    return dense | ({routed.shared_size} if routed.shared_size else set())


def _estimate_prepared_rows(scheme: Scheme, columns: int) -> int:
    if scheme in FLOAT_SCHEMES:
        return 0
    layout, width = scheme.layout, padded_columns(scheme, columns)
    return width * layout.row_bytes + 8 * layout.count_groups(columns)
