"""How the numbers of a packed matrix are stored, and what the rows for its products look like.

Sixteen rows lie together, so that one vector holds some columns of all sixteen and no sum ever
runs across lanes; decode and prompts read the same bytes.

A compiled plan as the kernels read it, and how a plan is to be packed.

What is computed is that of `linear.LinearDelta`: ``y = d * (W (u * x)) + B (A x) + e * b``. All of
a plan's matrices have one scheme and are reached through one table of addresses, so a decoder
copies nothing and a batch may hold rows of several plans.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np

GROUP_SIZE = 128
"""Columns that share a scale, where there are scales."""


class Scheme(Enum):
    """The storage of a matrix."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def layout(self) -> "VectorLayout":
        """What one vector of it holds."""
        return _LAYOUTS[self]


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """What one vector holds: ``columns`` columns of sixteen rows."""

    columns: int
    vector_bytes: int
    row_bytes: int
    """Bytes of one number of the rows for its products: float32, bfloat16 or int8."""
    zero_point: int
    """What stands for 0 where numbers are stored unsigned."""
    tile_tokens: int
    """Tokens in the largest tile, so that its sums stay in registers."""

    @property
    def is_grouped(self) -> bool:
        """Whether numbers are integers with a scale per group of columns."""
        return self.zero_point != 0

    def count_vectors(self, columns: int) -> int:
        """Return how many vectors one block of rows takes."""
        return -(-columns // self.columns)

    def count_groups(self, columns: int) -> int:
        """Return how many scales a row takes."""
        return -(-columns // GROUP_SIZE) if self.is_grouped else 0


_LAYOUTS = {
    Scheme.FLOAT32: VectorLayout(
        columns=1, vector_bytes=64, row_bytes=4, zero_point=0, tile_tokens=6
    ),
    Scheme.FLOAT16: VectorLayout(
        columns=1, vector_bytes=32, row_bytes=4, zero_point=0, tile_tokens=6
    ),
    Scheme.BFLOAT16: VectorLayout(
        columns=2, vector_bytes=64, row_bytes=2, zero_point=0, tile_tokens=6
    ),
    Scheme.INT8: VectorLayout(
        columns=4, vector_bytes=64, row_bytes=1, zero_point=128, tile_tokens=6
    ),
    Scheme.INT4: VectorLayout(columns=8, vector_bytes=64, row_bytes=1, zero_point=8, tile_tokens=4),
}

FLOAT_SCHEMES = frozenset({Scheme.FLOAT32, Scheme.FLOAT16})
"""Schemes whose products take float32 rows as they are."""


AnyArray = np.ndarray[Any, Any]
AdapterDtype = Literal["published", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class PlanPacking:
    """What the base of a plan is held in, and what the plan's matrices are to be stored in.

    ``published``: float32 beside a float32 base, where everything is exact; else as the experts
    were published, float32 where they were published in several types.
    """

    base: Scheme
    adapters: AdapterDtype = "published"


@dataclass(frozen=True, slots=True)
class FusedProjection:
    """Linear layers with one input, by their full names; ``first`` is the place of the first."""

    modules: tuple[str, ...]
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class AdapterItemCounts:
    """How many items of each kind a plan has at each site, int64 [sites]."""

    shrink_decode: AnyArray
    shrink_prefill: AnyArray
    expand: AnyArray
    scales: AnyArray
    """Not 0 where it has factors of the input, the output or the bias."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedDeltas:
    """What a plan changes, packed; made by `make_packed_plan`.

    ``table`` int64 [modules, words] is what kernels read: records of the modules of sites, behind
    them those of routed experts, where it changes any. ``width`` columns lie between the A and the
    B of a site, at most.
    """

    scheme: Scheme
    modules: frozenset[str]
    table: AnyArray
    item_counts: AdapterItemCounts
    width: int
    nbytes: int
    first_routed_record: int | None
    """The place of the first record of a routed expert."""
    routed_bytes: int
    """How much of it is for routed experts."""
    has_routed_scales: bool
    """Whether it has factors of the input of a routed expert."""
    _kept: tuple[object, ...]
    """What the addresses in the table point into."""

    def __len__(self) -> int:
        """Return how many layers it changes."""
        return len(self.modules)

    @property
    def address(self) -> int:
        """Where kernels find its table."""
        return self.table.ctypes.data

    @property
    def routed_address(self) -> int:
        """Where kernels find the records of routed experts, 0 where it changes none."""
        return (
            0
            if self.first_routed_record is None
            else self.table[self.first_routed_record :].ctypes.data
        )

    @property
    def has_scales(self) -> bool:
        """Whether it has factors of inputs, outputs or biases at any site."""
        return bool(self.item_counts.scales.any())


def find_fused_projections(names: Collection[str]) -> tuple[FusedProjection, ...]:
    """Return the sites of a base in the order in which they are computed; the head comes last.

    ``names`` are those of its linear layers. Routed experts have no site: each token has others.
    """
    layers = sorted({int(name.split(".")[2]) for name in names if name.count(".") > _IN_LAYER})
    found = [
        _projection_modules(f"model.layers.{layer}.", *each)
        for layer in layers
        for each in _PROJECTIONS
    ]
    placed, first = list[FusedProjection](), 0
    for modules in (*(each for each in found if each[0] in names), ("lm_head",)):
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
    """Tell whether a linear layer is one of a routed expert."""
    return f".{_EXPERTS}." in name


ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
SHARED_INPUTS = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
SHARED_OUTPUT = "mlp.shared_expert.down_proj"
SHARED_GATE = "mlp.shared_expert_gate"
_EXPERTS = "mlp.experts"
_LAYER, _EXPERT = 2, 5
"""Where the numbers stand in the name of a module of a routed expert."""
_PARTS = ("gate_proj", "up_proj", "down_proj")
_IN_LAYER = 2
"""How many dots the name of a module in a layer has at least."""
_PROJECTIONS = (
    ATTENTION_INPUTS,
    ("self_attn.o_proj",),
    MLP_INPUTS,
    ("mlp.down_proj",),
    SHARED_INPUTS,
    (SHARED_OUTPUT,),
    (SHARED_GATE,),
)


def _projection_modules(at: str, *modules: str) -> tuple[str, ...]:
    return tuple(f"{at}{module}" for module in modules)
