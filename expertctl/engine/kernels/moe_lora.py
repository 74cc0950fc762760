"""Adapter kernels for routed experts, and IA3 scales of rows of several adapter plans.

A row uses the scales of its own plan; a routed position uses the plan of its token. The records of
routed experts are consecutive in a plan's table: those of a layer's experts in ascending order,
each with its gate, up and down. A batch table for them points to the first record and lists only
the plans that change routed experts.

Positions of an expert are consecutive and their tokens ascend, so rows that share a plan share its
matrices. The tile is that of every GEMM, and rows are always processed in groups of columns, so the
bits of a row do not depend on other rows. Intermediate results between A and B stay on the stack.
"""

from functools import cache

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.lora import RECORD_BYTES
from expertctl.engine.kernels.moe_layer import MoePermutation
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.program import array_address, encode_operands, row_address

_CODE = "expertctl.engine.kernels.compiled.moe_lora"
"""The module with the code, which is imported only to compile it."""


@cache
def input_scale_kernel() -> Kernel:
    """Return the kernel of ``out = u * x``, or of a copy if a plan has no u; items are rows."""
    return load_kernel("scale", _CODE, "scale_input_rows")


def input_scale_arguments(
    *, batch: AnyArray, module: int, rows: AnyArray, out: AnyArray
) -> AnyArray:
    """Return its arguments; ``out`` is float32 [rows, columns], ``rows`` at least as wide."""
    return encode_operands(
        array_address(batch, np.int64), module, *row_address(rows), *row_address(out), out.shape[1]
    )


@cache
def output_scale_kernel() -> Kernel:
    """Return the kernel of ``out = d * x + e * b`` or ``out += d * x``, ``+= e * b``.

    Items are rows. Scales that a plan does not have are 1, and b may be missing.
    """
    return load_kernel("settle", _CODE, "scale_output_rows")


def output_scale_arguments(
    *,
    batch: AnyArray,
    module: int,
    rows: AnyArray,
    bias: AnyArray | None,
    out: AnyArray,
    width: int,
    adds: bool,
) -> AnyArray:
    """Return its arguments; both are float32 [rows, at least width], ``out`` may be ``rows``."""
    return encode_operands(
        array_address(batch, np.int64),
        module,
        *row_address(rows),
        array_address(bias),
        *row_address(out),
        width,
        adds,
    )


EXPERT_MODULES = 3
"""Records per expert."""
GATE, DOWN = 0, 2
"""Index of the gate and down records; up follows gate."""


@cache
def moe_lora_kernel(scheme: Scheme, *, portable: bool = False) -> Kernel:
    """Return the kernel of ``out = d * out + B (A x)``, with the plan of each position.

    Items are positions; there may be more of them than the permutation has. ``portable`` uses
    baseline instructions only.
    """
    name = f"routed delta {scheme.value}{' plainly' * portable}"
    return load_kernel(name, _CODE, "make_moe_lora", scheme=scheme, portable=portable)


def moe_lora_arguments(
    *,
    scheme: Scheme,
    batch: AnyArray,
    order: MoePermutation,
    top_k: int,
    layer: int,
    first: int,
    modules: int,
    width: int,
    rows: AnyArray,
    by_token: bool,
    out: AnyArray,
) -> AnyArray:
    """Return its arguments.

    ``layer`` counts routed layers. The ``modules`` modules from ``first`` on share rows and write
    ``width`` columns each, side by side. ``rows`` are float32, one per token if ``by_token``, else
    one per position; ``out`` is float32 [positions, at least blocks * 16].
    """
    columns = rows.shape[1]
    assert modules == 1 or width % LANES == 0
    assert out.shape[1] >= modules * -(-width // LANES) * LANES
    return encode_operands(
        *_list_position_operands(batch, order, top_k, layer, first),
        modules,
        *row_address(rows),
        top_k if by_token else 0,
        columns,
        scheme.layout.count_vectors(columns),
        scheme.layout.count_groups(columns),
        *row_address(out),
        width,
    )


@cache
def moe_input_scale_kernel() -> Kernel:
    """Return the kernel of ``out = u * x``, or of a copy if a plan has no u.

    Items are positions, as for `moe_lora_kernel`.
    """
    return load_kernel("routed scale", _CODE, "scale_positions")


def moe_input_scale_arguments(
    *,
    batch: AnyArray,
    order: MoePermutation,
    top_k: int,
    layer: int,
    module: int,
    rows: AnyArray,
    out: AnyArray,
) -> AnyArray:
    """Return its arguments; both are float32 [positions, columns]."""
    assert rows.shape == out.shape
    return encode_operands(
        *_list_position_operands(batch, order, top_k, layer, module),
        *row_address(rows),
        *row_address(out),
        out.shape[1],
    )


def _list_position_operands(
    batch: AnyArray, order: MoePermutation, top_k: int, layer: int, module: int
) -> tuple[int, ...]:
    record = EXPERT_MODULES * layer * order.expert_count + module
    return (
        array_address(batch, np.int64),
        array_address(order.active, np.int64),
        array_address(order.active_count, np.int64),
        array_address(order.offsets, np.int64),
        array_address(order.sources, np.int64),
        top_k,
        record * RECORD_BYTES,
    )
