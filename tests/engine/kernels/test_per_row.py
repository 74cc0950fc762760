"""Each row of a batch is scaled by the factors of its own plan, and one without any is copied."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.lora import RECORD_WORDS, AdapterBatchTable, ModuleAdapter
from expertctl.engine.kernels.moe_lora import (
    input_scale_arguments,
    input_scale_kernel,
    output_scale_arguments,
    output_scale_kernel,
)
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.reference_gemm import (
    Array,
    GuardedBuffer,
    make_guarded_buffer,
    make_random_numbers,
    surround_with_nan,
)

MODULE = 3
MIXED = ["ude", None, "u", "u", "", None, None, "de", "d", "d", "e", "ue", None]
"""Which factors the plan of each row has, None without a plan; equal neighbours share one."""
WIDTHS = (1, 15, 16, 17, 48, 130)


@dataclass(frozen=True)
class ScaledBatch:
    """``factors`` are u, d and e of each row, float32 [3, rows, width], 1 where it has none."""

    table: AdapterBatchTable
    factors: Array
    _tables: Sequence[Array]


def batch_of(kinds: Sequence[str | None], width: int) -> ScaledBatch:
    table = AdapterBatchTable(Scheme.FLOAT32, rows=max(len(kinds), 1))
    factors = np.ones((3, len(kinds), width), np.float32)
    kept: list[Array] = []
    entries: list[tuple[int, int, int]] = []
    for row, kind in enumerate(kinds):
        if kind is None:
            continue
        if row and kind == kinds[row - 1]:
            address, first, rows = entries.pop()
            entries.append((address, first, rows + 1))
            factors[:, row] = factors[:, row - 1]
            continue
        own = make_random_numbers(row, 3, width)
        for place, name in enumerate("ude"):
            if name in kind:
                factors[place, row] = own[place]
        given = [own[place] if name in kind else None for place, name in enumerate("ude")]
        kept += [own, table_of(*given)]
        entries.append((kept[-1].ctypes.data, row, 1))
    table.set_entries(entries, width=1)
    return ScaledBatch(table, factors, kept)


def table_of(u: Array | None, d: Array | None, e: Array | None) -> Array:
    """The table of a plan, where the records of other layers lead nowhere."""
    table = np.full((MODULE + 2, RECORD_WORDS), -1, np.int64)
    table[MODULE] = ModuleAdapter(input_scale=u, output_scale=d, bias_scale=e).to_record()
    return table


def room(rows: int, width: int) -> tuple[GuardedBuffer, Array]:
    """A buffer, and what of its rows is to be written."""
    out = make_guarded_buffer(rows, -(-width // 16) * 16)
    return out, out.inside[:, :width]


def scaled(batch: ScaledBatch, rows: Array) -> Array:
    around, out = room(*rows.shape)
    before = around.inside[:, rows.shape[1] :].copy()
    arguments = input_scale_arguments(batch=batch.table.words, module=MODULE, rows=rows, out=out)
    input_scale_kernel()(0, len(rows), arguments.ctypes.data)
    around.check_integrity()
    np.testing.assert_array_equal(around.inside[:, rows.shape[1] :], before)
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_inputs_are_scaled_by_the_factors_of_their_own_plan(width: int) -> None:
    batch, rows = (
        batch_of(MIXED, width),
        surround_with_nan(make_random_numbers(90, len(MIXED), width)),
    )
    np.testing.assert_array_equal(scaled(batch, rows), rows * batch.factors[0], strict=True)


def settled(
    batch: ScaledBatch,
    rows: Array,
    *,
    bias: Array | None,
    onto: Array | None,
    in_place: bool = False,
) -> Array:
    around, out = room(*rows.shape)
    before = around.inside[:, rows.shape[1] :].copy()
    if onto is not None:
        out[...] = onto
    if in_place:
        out[...] = rows
    arguments = output_scale_arguments(
        batch=batch.table.words,
        module=MODULE,
        rows=out if in_place else rows,
        bias=bias,
        out=out,
        width=rows.shape[1],
        adds=onto is not None,
    )
    output_scale_kernel()(0, len(rows), arguments.ctypes.data)
    around.check_integrity()
    np.testing.assert_array_equal(around.inside[:, rows.shape[1] :], before)
    return out


def assert_settles(batch: ScaledBatch, *, has_bias: bool, adds: bool) -> None:
    """``d * x + e * b``, in float64, written to rows or added to them."""
    _, count, width = batch.factors.shape
    rows = surround_with_nan(make_random_numbers(91, count, width))
    onto = make_random_numbers(92, count, width) if adds else None
    bias = make_random_numbers(93, width) if has_bias else None
    _, d, e = batch.factors.astype(np.float64)
    terms = [d * rows, *([] if onto is None else [onto]), *([] if bias is None else [e * bias])]
    found = settled(batch, rows, bias=bias, onto=onto)
    reach = 2.0**-22 * np.abs(terms).sum(axis=0)
    assert (np.abs(found - np.sum(terms, axis=0)) <= reach).all()
    if not adds:
        in_place = settled(batch, rows, bias=bias, onto=None, in_place=True)
        np.testing.assert_array_equal(in_place, found, strict=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_outputs_and_biases_are_scaled_by_those_of_their_own_plan(
    width: int, has_bias: bool, adds: bool
) -> None:
    assert_settles(batch_of(MIXED, width), has_bias=has_bias, adds=adds)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([None, "", "u", "d", "e", "ud", "de", "ude"]), max_size=20),
    width=st.integers(1, 70),
    has_bias=st.booleans(),
    adds=st.booleans(),
)
def test_any_plans_in_any_batch_are_the_formula(
    kinds: list[str | None], width: int, has_bias: bool, adds: bool
) -> None:
    batch = batch_of(kinds, width)
    rows = surround_with_nan(make_random_numbers(94, len(kinds), width))
    np.testing.assert_array_equal(scaled(batch, rows), rows * batch.factors[0], strict=True)
    assert_settles(batch, has_bias=has_bias, adds=adds)


def test_a_row_without_factors_keeps_its_bits() -> None:
    """What a copy keeps and a product with 1 need not: the bits of NaN, and minus zero."""
    rows = make_random_numbers(95, 3, 20)
    rows[:, :4] = np.array([0xFFC12345, 0x7FC00001, 0x80000000, 0x00000001], np.uint32).view(
        np.float32
    )
    batch = batch_of([None, "", "e"], 20)
    for found in (scaled(batch, rows), settled(batch, rows, bias=None, onto=None)):
        np.testing.assert_array_equal(
            np.ascontiguousarray(found).view(np.uint32), rows.view(np.uint32), strict=True
        )


def test_threads_change_no_bit() -> None:
    width = 48
    batch, rows = (
        batch_of(MIXED, width),
        surround_with_nan(make_random_numbers(96, len(MIXED), width)),
    )
    bias = make_random_numbers(97, width)
    wanted = settled(batch, scaled(batch, rows), bias=bias, onto=None)
    between, out = make_guarded_buffer(*rows.shape), make_guarded_buffer(*rows.shape)
    words, builder = batch.table.words, ProgramBuilder()
    first = input_scale_arguments(batch=words, module=MODULE, rows=rows, out=between.inside)
    builder.add(input_scale_kernel(), first, len(rows))
    second = output_scale_arguments(
        batch=words,
        module=MODULE,
        rows=between.inside,
        bias=bias,
        out=out.inside,
        width=width,
        adds=False,
    )
    builder.add(output_scale_kernel(), second, len(rows))
    program = builder.build()
    for workers in (1, 2, 3):
        crew = ThreadPool(workers)
        for _ in range(50):
            out.inside[...] = np.nan
            crew.run(program)
            np.testing.assert_array_equal(out.inside, wanted, strict=True)
        crew.close()
        between.check_integrity()
        out.check_integrity()
