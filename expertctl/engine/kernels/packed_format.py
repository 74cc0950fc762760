"""Storage schemes of packed matrices, and the format of packed adapter plans.

Sixteen rows are interleaved, so that one vector holds some columns of all sixteen and no sum ever
runs across lanes; decode and prefill read the same bytes.

A packed plan computes the same as `linear.LinearDelta`: ``y = d * (W (u * x)) + B (A x) + e * b``.
All matrices of a plan have one scheme and are reached through one table of addresses, so a decoder
copies nothing and a batch may hold rows of several plans.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from expertctl.engine.arrays import AnyArray

GROUP_SIZE = 32
"""Columns that share a scale, in integer schemes."""
SCALE_BYTES = 2
"""Bytes of the scale of a group and row, in the integer schemes that we quantise to."""
LANES = 16
"""Rows that are interleaved; the float32 numbers of a vector."""
SCALES_BYTES = LANES * SCALE_BYTES
"""Bytes of the scales of a group and block, in the integer schemes that we quantise to."""
PANEL_BLOCKS = 4
"""Blocks of sixteen rows in a panel."""
KV_PAGE_TOKENS = 16
"""Tokens per KV page."""
_PORTION_NUMBERS = 1 << 17
"""Numbers packed at once, so that intermediate data fits the cache of a core."""


class Scheme(Enum):
    """The storage scheme of a matrix.

    Any numbers can be packed in the first six. The others hold the blocks of GGUF files as they
    are, see `expertctl.engine.kernels.gguf_blocks`.
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT5 = "int5"
    INT4 = "int4"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q4_K = "q4_k"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q5_K = "q5_k"
    Q6_K = "q6_k"

    @property
    def layout(self) -> "VectorLayout":
        """The vector layout of the scheme."""
        return _LAYOUTS[self]

    @property
    def activations(self) -> "Scheme":
        """The scheme whose activations it takes: int8 for all integers."""
        return Scheme.INT8 if self.layout.is_grouped else self

    @property
    def embedding(self) -> "Scheme":
        """The scheme of embedding and head in a base in this scheme.

        Four or five bits there would cost as much accuracy as in all other matrices together.
        """
        return Scheme.INT8 if self.layout.is_grouped else self


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """The contents of one vector: ``columns`` columns of sixteen rows."""

    columns: int
    vector_bytes: int
    row_bytes: int
    """Bytes of one activation for its GEMMs: float32, bfloat16 or int8."""
    bits: int
    """Bits of an integer; 0 for floats."""
    tile_tokens: int
    """Tokens of the largest tile, so that its sums stay in registers."""
    scale_words: int = LANES
    """Words of two bytes with the scales of a group and block, on average."""
    halves: int = 1
    """Parts of a group that have scales of their own."""

    @property
    def is_grouped(self) -> bool:
        """Whether numbers are integers with a scale per group of columns."""
        return self.bits != 0

    def count_vectors(self, columns: int) -> int:
        """Return the vectors per block of rows."""
        return -(-columns // self.columns)

    def count_groups(self, columns: int) -> int:
        """Return the scales per row."""
        return -(-columns // GROUP_SIZE) if self.is_grouped else 0

    @property
    def bit_planes(self) -> int:
        """Bits beyond the four of a nibble; a vector has sixteen bytes for each, at its end."""
        return max(self.bits - 4, 0) if self.columns > 4 else 0  # columns of bytes are whole

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales of a group and block, on average."""
        return self.scale_words * SCALE_BYTES


_LAYOUTS = {  # columns, vector_bytes, row_bytes, bits, tile_tokens
    Scheme.FLOAT32: VectorLayout(1, 64, 4, 0, 6),
    Scheme.FLOAT16: VectorLayout(1, 32, 4, 0, 6),
    Scheme.BFLOAT16: VectorLayout(2, 64, 2, 0, 6),
    Scheme.INT8: VectorLayout(4, 64, 1, 8, 4),
    Scheme.INT5: VectorLayout(8, 80, 1, 5, 4),
    Scheme.INT4: VectorLayout(8, 64, 1, 4, 4),
    Scheme.Q8_0: VectorLayout(4, 64, 1, 8, 4),
    Scheme.Q4_0: VectorLayout(8, 64, 1, 4, 4),
    Scheme.Q4_1: VectorLayout(8, 64, 1, 4, 4, scale_words=2 * LANES),
    Scheme.Q4_K: VectorLayout(8, 64, 1, 4, 4, scale_words=LANES + 2 * LANES // 8),
    Scheme.Q5_0: VectorLayout(8, 80, 1, 5, 4),
    Scheme.Q5_1: VectorLayout(8, 80, 1, 5, 4, scale_words=2 * LANES),
    Scheme.Q5_K: VectorLayout(8, 80, 1, 5, 4, scale_words=LANES + 2 * LANES // 8),
    Scheme.Q6_K: VectorLayout(8, 96, 1, 6, 4, scale_words=LANES + LANES // 8, halves=2),
}

BLOCK_SCHEMES = (
    Scheme.Q8_0,
    Scheme.Q4_0,
    Scheme.Q4_1,
    Scheme.Q5_0,
    Scheme.Q5_1,
    Scheme.Q4_K,
    Scheme.Q5_K,
    Scheme.Q6_K,
)
"""Schemes that hold the blocks of GGUF files."""
PACKED_SCHEMES = tuple(scheme for scheme in Scheme if scheme not in BLOCK_SCHEMES)
"""Schemes in which any numbers can be packed."""

FLOAT_SCHEMES = frozenset({Scheme.FLOAT32, Scheme.FLOAT16})
"""Schemes whose GEMMs take float32 activations unchanged."""


def rows_per_portion(columns: int) -> int:
    """Return how many rows are read and packed at once, in whole blocks."""
    return max(1, _PORTION_NUMBERS // max(1, columns) // LANES) * LANES


AdapterDtype = Literal["published", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class PlanPacking:
    """The scheme of the base of a plan, and the requested storage of the plan's matrices.

    ``published``: float32 with a float32 base, where everything is exact; otherwise the dtype in
    which the experts were published, or float32 if they were published in several.
    """

    base: Scheme
    adapters: AdapterDtype = "published"


@dataclass(frozen=True, slots=True)
class FusedProjection:
    """Linear layers with the same input, by full name; ``first`` is the index of the first."""

    modules: tuple[str, ...]
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterItemCounts:
    """Items of each kind that a plan has per fused projection, int64 [projections]."""

    shrink_decode: AnyArray
    shrink_prefill: AnyArray
    expand: AnyArray
    scales: AnyArray
    """Not 0 if it has input, output or bias scales."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedDeltas:
    """The packed changes of a plan, made by `make_packed_plan`.

    ``table`` int64 [modules, words] is read by kernels: the records of the modules of fused
    projections, followed by those of routed experts if it changes any. ``width`` is the maximum
    number of columns between the A and the B of a projection.
    """

    scheme: Scheme
    modules: frozenset[str]
    table: AnyArray
    item_counts: AdapterItemCounts
    width: int
    nbytes: int
    first_routed_record: int | None
    """Index of the first record of a routed expert."""
    routed_bytes: int
    """The part of `nbytes` that belongs to routed experts."""
    has_routed_scales: bool
    """Whether it scales the input of a routed expert."""
    _kept: tuple[object, ...]
    """The objects that the addresses in the table point into."""

    def __len__(self) -> int:
        """Return the number of layers it changes."""
        return len(self.modules)

    @property
    def address(self) -> int:
        """Address of its table, for kernels."""
        return self.table.ctypes.data

    @property
    def routed_address(self) -> int:
        """Address of the records of routed experts, or 0 if it changes none."""
        first = self.first_routed_record
        return 0 if first is None else self.table[first:].ctypes.data

    @property
    def has_scales(self) -> bool:
        """Whether it scales inputs, outputs or biases of any fused projection."""
        return bool(self.item_counts.scales.any())


def find_fused_projections(names: Collection[str]) -> tuple[FusedProjection, ...]:
    """Return the fused projections of a base in execution order; the head comes last.

    ``names`` are those of its linear layers; an MLP may have no gate. Routed experts have no
    projection: each token has others.
    """
    layers = sorted({int(name.split(".")[2]) for name in names if name.count(".") > _IN_LAYER})
    found = [
        tuple(name for module in each if (name := f"model.layers.{layer}.{module}") in names)
        for layer in layers
        for each in _PROJECTIONS
    ]
    placed, first = list[FusedProjection](), 0
    for modules in (*filter(None, found), ("lm_head",)):
        placed.append(FusedProjection(modules, first))
        first += len(modules)
    return tuple(placed)


def list_routed_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Return the linear layers of routed experts in the order of their records.

    Layer by layer, expert by expert: gate, up, down.
    """
    found = (name.split(".") for name in names if is_routed_module(name))
    order = sorted((int(p[_LAYER]), int(p[_EXPERT]), _PARTS.index(p[-1])) for p in found)
    return tuple(
        f"model.layers.{layer}.{_EXPERTS}.{expert}.{_PARTS[part]}" for layer, expert, part in order
    )


def is_routed_module(name: str) -> bool:
    """Return whether a linear layer belongs to a routed expert."""
    return f".{_EXPERTS}." in name


ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
SHARED_INPUTS = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
SHARED_OUTPUT = "mlp.shared_expert.down_proj"
SHARED_GATE = "mlp.shared_expert_gate"
_EXPERTS = "mlp.experts"
_LAYER, _EXPERT = 2, 5
"""Index of the layer and expert numbers in the name of a routed expert's module."""
_PARTS = ("gate_proj", "up_proj", "down_proj")
_IN_LAYER = 2
"""Minimum number of dots in the name of a module of a layer."""
_PROJECTIONS = (
    ATTENTION_INPUTS,
    ("self_attn.o_proj",),
    MLP_INPUTS,
    ("mlp.down_proj",),
    SHARED_INPUTS,
    (SHARED_OUTPUT,),
    (SHARED_GATE,),
)
