"""Code of adapters for routed experts, and of IA3 scales of rows of several adapter plans."""

from typing import Any

from numba.extending import register_jitable

from expertctl.engine.kernels.compiled.compiler import KernelFunction
from expertctl.engine.kernels.compiled.gemm import gemm_panel_function
from expertctl.engine.kernels.compiled.lora import find_row_plan
from expertctl.engine.kernels.compiled.memory import (
    allocate_stack_floats,
    float32_view,
    int8_view,
    int64_view,
    load_int64s,
)
from expertctl.engine.kernels.compiled.quantisation import quantise_row, round_row
from expertctl.engine.kernels.lora import ENTRY_BYTES, HEADER_BYTES, RECORD_BYTES, SCALES_OFFSET
from expertctl.engine.kernels.moe_lora import EXPERT_MODULES
from expertctl.engine.kernels.packed_format import (
    FLOAT_SCHEMES,
    GROUP_SIZE,
    LANES,
    SCALES_BYTES,
    Scheme,
)


def scale_input_rows(first: int, last: int, arguments: int) -> None:
    """Scale rows by what their plans have for the input of a module."""
    batch, module, rows, stride, outs, out_stride, width = load_int64s(arguments, 7)
    for item in range(first, last):
        row = float32_view(rows + item * stride, width)
        out = float32_view(outs + item * out_stride, width)
        plan = find_row_plan(batch, item)
        factors = 0
        if plan != 0:
            factors = load_int64s(plan + module * RECORD_BYTES + SCALES_OFFSET, 3)[0]
        write_scaled_row(row, factors, out, 0, width)


@register_jitable
def write_scaled_row(row: Any, factors: Any, out: Any, adds: Any, width: Any) -> None:
    """Write or add a row, multiplied by its scales if there are any, in compiled code."""
    if factors != 0:
        scale = float32_view(factors, width)
        if adds != 0:
            for k in range(width):
                out[k] += row[k] * scale[k]
        else:
            for k in range(width):
                out[k] = row[k] * scale[k]
    elif adds != 0:
        for k in range(width):
            out[k] += row[k]
    else:
        for k in range(width):
            out[k] = row[k]


def scale_output_rows(first: int, last: int, arguments: int) -> None:
    """Scale rows by what their plans have for the output of a module, and its bias."""
    batch, module, rows, stride, biases, outs, out_stride, width, adds = load_int64s(arguments, 9)
    for item in range(first, last):
        row = float32_view(rows + item * stride, width)
        out = float32_view(outs + item * out_stride, width)
        plan = find_row_plan(batch, item)
        scales, shares = 0, 0
        if plan != 0:
            _, scales, shares = load_int64s(plan + module * RECORD_BYTES + SCALES_OFFSET, 3)
        write_scaled_row(row, scales, out, adds, width)
        if biases != 0:
            write_scaled_row(float32_view(biases, width), shares, out, 1, width)


_EXPERT_BYTES = EXPERT_MODULES * RECORD_BYTES
_ROWS_PER_PASS = 24
"""Maximum rows of one expert and plan on the stack; whole tiles."""
_COLUMNS_PER_PASS, _GROUPS_PER_PASS = 128, 128 // GROUP_SIZE
"""Maximum columns of those rows on the stack, and their groups."""
_SCRATCH_FLOATS = _ROWS_PER_PASS * _COLUMNS_PER_PASS
_ADDRESS_WORDS = 2 * _ROWS_PER_PASS
"""Buffer for their addresses, in float32."""
_SCRATCH_ROW_BYTES = _COLUMNS_PER_PASS * 4
"""Stride between rows on the stack, in bytes."""
_SCRATCH_GROUPS = _ROWS_PER_PASS * _GROUPS_PER_PASS
_GROUPS_STRIDE = _GROUPS_PER_PASS * 4
"""Scales of all rows, and the stride between those of two rows in bytes."""
_BLOCKS_PER_PASS = _COLUMNS_PER_PASS // LANES


def make_moe_lora(scheme: Scheme, *, portable: bool) -> KernelFunction:
    """Return the function of ``out = d * out + B (A x)`` with the plan of each position."""
    add = _make_add_lora(scheme, portable=portable)

    def delta(first: int, last: int, arguments: int) -> None:
        (
            batch, active, actives, begins, sources, used, records,
            modules, rows, stride, of_tokens, columns, vectors, groups, out, out_stride, width,
        ) = load_int64s(arguments, 17)  # fmt: skip
        places = allocate_stack_floats(_ADDRESS_WORDS)
        for number in range(load_int64s(actives, 1)[0]):
            expert = load_int64s(active + number * 8, 1)[0]
            begin, end = load_int64s(begins + expert * 8, 2)
            begin, end = max(begin, first), min(end, last)
            while begin < end:
                above = min(end, begin + _ROWS_PER_PASS)
                plan, count = _find_plan_run(batch, sources, used, begin, above)
                if plan != 0:
                    _find_row_addresses(places, rows, stride, sources, of_tokens, begin, count)
                    for module in range(modules):
                        add(
                            plan + records + expert * _EXPERT_BYTES + module * RECORD_BYTES,
                            places, count, columns, vectors, groups,
                            out + begin * out_stride + module * width * 4, out_stride, width,
                        )  # fmt: skip
                begin += count

    return delta


def scale_positions(first: int, last: int, arguments: int) -> None:
    """Scale positions by what their plans have for the input of their expert's module."""
    (
        batch, active, actives, begins, sources, used, records,
        rows, stride, out, out_stride, width,
    ) = load_int64s(arguments, 12)  # fmt: skip
    for number in range(load_int64s(actives, 1)[0]):
        expert = load_int64s(active + number * 8, 1)[0]
        begin, end = load_int64s(begins + expert * 8, 2)
        for position in range(max(begin, first), min(end, last)):
            plan, _ = _find_plan_run(batch, sources, used, position, position + 1)
            factors = 0
            if plan != 0:
                record = plan + records + expert * _EXPERT_BYTES
                factors = load_int64s(record + SCALES_OFFSET, 1)[0]
            write_scaled_row(
                float32_view(rows + position * stride, width), factors,
                float32_view(out + position * out_stride, width), 0, width,
            )  # fmt: skip


@register_jitable
def _find_plan_run(batch: Any, sources: Any, used: Any, begin: Any, end: Any) -> Any:
    """Return the plan of a position or 0, and how many positions from it on have the same plan.

    The number is a lower bound.
    """
    found = int64_view(sources, end)
    token = found[begin] // used
    for entry in range(load_int64s(batch, 1)[0]):
        plan, low, tokens = load_int64s(batch + HEADER_BYTES + entry * ENTRY_BYTES, 3)
        if low <= token < low + tokens:
            count = 1
            while begin + count < end and found[begin + count] // used < low + tokens:
                count += 1
            return plan, count
    return 0, 1


@register_jitable
def _find_row_addresses(
    places: Any, rows: Any, stride: Any, sources: Any, of_tokens: Any, begin: Any, count: Any
) -> None:
    """Write each position's row address; ``of_tokens``: positions per token's row, or 0."""
    found, sourced = int64_view(places, count), int64_view(sources, begin + count)
    for k in range(count):
        row = sourced[begin + k] // of_tokens if of_tokens > 0 else begin + k
        found[k] = rows + row * stride


def _make_add_lora(scheme: Scheme, *, portable: bool) -> Any:
    """Return the function that updates one module's rows for one expert and plan."""
    spans, take = gemm_panel_function(scheme, portable=portable), _make_prepare_row(scheme)
    layout = scheme.layout
    each, vector_bytes, row_bytes = layout.columns, layout.vector_bytes, layout.row_bytes
    stride = _COLUMNS_PER_PASS * row_bytes

    @register_jitable
    def adding(
        record: Any, places: Any, count: Any, columns: Any, vectors: Any, groups: Any,
        out: Any, out_stride: Any, width: Any,
    ) -> None:  # fmt: skip
        (
            a, a_scales, a_blocks, _, b, b_scales, b_vectors, b_groups, _, factors, _,
        ) = load_int64s(record, 11)  # fmt: skip
        if factors != 0:
            for k in range(count):
                row = float32_view(out + k * out_stride, width)
                write_scaled_row(row, factors, row, 0, width)
        taken = allocate_stack_floats(_SCRATCH_FLOATS)
        inner = allocate_stack_floats(_SCRATCH_FLOATS)
        scales = allocate_stack_floats(_SCRATCH_GROUPS)
        sums = allocate_stack_floats(_SCRATCH_GROUPS)
        for block in range(0, a_blocks, _BLOCKS_PER_PASS):
            blocks = min(_BLOCKS_PER_PASS, a_blocks - block)
            for column in range(0, columns, _COLUMNS_PER_PASS):
                wide = min(_COLUMNS_PER_PASS, columns - column)
                for k in range(count):
                    source = int64_view(places, count)[k] + column * 4
                    take(
                        source, wide, taken + k * stride,
                        scales + k * _GROUPS_STRIDE, sums + k * _GROUPS_STRIDE,
                    )  # fmt: skip
                    _zero_bytes(taken + k * stride + wide * row_bytes, -wide % each * row_bytes)
                spans(
                    a + (block * vectors + column // each) * vector_bytes,
                    vectors * vector_bytes,
                    a_scales + (block * groups + column // GROUP_SIZE) * SCALES_BYTES,
                    groups * SCALES_BYTES,
                    blocks, (wide + each - 1) // each,
                    taken, stride, scales, sums, _GROUPS_STRIDE,
                    inner, _SCRATCH_ROW_BYTES, count, column,
                )  # fmt: skip
            for k in range(count):
                source = inner + k * _SCRATCH_ROW_BYTES
                take(
                    source, blocks * LANES, taken + k * stride,
                    scales + k * _GROUPS_STRIDE, sums + k * _GROUPS_STRIDE,
                )  # fmt: skip
            begin = block * LANES // each
            spans(
                b + begin * vector_bytes, b_vectors * vector_bytes,
                b_scales + block * LANES // GROUP_SIZE * SCALES_BYTES, b_groups * SCALES_BYTES,
                (width + LANES - 1) // LANES, min(_COLUMNS_PER_PASS // each, b_vectors - begin),
                taken, stride, scales, sums, _GROUPS_STRIDE,
                out, out_stride, count, 1,
            )  # fmt: skip

    return adding


@register_jitable
def _zero_bytes(place: Any, count: Any) -> None:
    """Zero ``count`` bytes, because the padding of a vector must not be NaN."""
    for k in range(count):
        int8_view(place, count)[k] = 0


def _make_prepare_row(scheme: Scheme) -> Any:
    """Return the function that converts columns of a row to the form that a scheme takes."""
    if scheme is Scheme.BFLOAT16:
        return round_row
    return _copy_row if scheme in FLOAT_SCHEMES else quantise_row


@register_jitable
def _copy_row(row: Any, columns: Any, out: Any, _scales: Any, _sums: Any) -> None:
    found, copied = float32_view(row, columns), float32_view(out, columns)
    for k in range(columns):
        copied[k] = found[k]
