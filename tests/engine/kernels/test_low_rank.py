"""The low-rank products of a batch of plans are the plain formula, each row with its own plan."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.lora import (
    EXPAND_BLOCKS,
    AdapterBatchTable,
    fused_lora_arguments,
    fused_lora_kernel,
    gemm_arguments,
    gemm_items,
    gemm_kernel,
    lora_expand_arguments,
    lora_expand_kernel,
    lora_shrink_arguments,
    lora_shrink_kernel,
    shrink_blocks,
)
from expertctl.engine.kernels.packed_format import FLOAT_SCHEMES, GROUP_SIZE, LANES, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix, pack_matrix, unpack_matrix
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.quantisation import PreparedActivations, wrap_float_activations
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.reference_gemm import (
    FIRST_COLUMN,
    Array,
    GuardedBuffer,
    LoraPart,
    PlannedRows,
    dequantise_rows,
    make_batch_table,
    make_guarded_buffer,
    make_jobs,
    make_random_numbers,
    make_random_plan,
    quantise_rows,
    surround_with_nan,
)

ADAPTERS = (Scheme.FLOAT32, Scheme.FLOAT16, Scheme.BFLOAT16, Scheme.INT8)
DOTS = (Scheme.BFLOAT16, Scheme.INT8)
"""Schemes whose instruction not every processor has."""
EVERY = pytest.mark.parametrize(
    ("scheme", "plain"),
    [*((scheme, False) for scheme in ADAPTERS), *((scheme, True) for scheme in DOTS)],
)
OUTS = (48, 16, 160)
RANKS = ((1, 33, 16), (0, 17, 0), (32, 0, 5), (31, 2, 15))
COUNTS = ((1, 3), (0, 7), (2, 1), (1, 2))
COLUMNS = 140
FOREIGN = np.float32(77)


@dataclass(frozen=True)
class LowRankBatch:
    """Rows, some of which have plans, before one site; ``memory`` is between A and B."""

    scheme: Scheme
    jobs: Sequence[PlannedRows]
    rows: Array
    outs: Sequence[int]
    table: AdapterBatchTable

    def reducing(self, ready: PreparedActivations, *, together: bool = True) -> Array:
        """The arguments of A; ``ready`` has to stay."""
        layout, columns = self.scheme.layout, self.rows.shape[1]
        return lora_shrink_arguments(
            batch=self.table.words,
            first_module=FIRST_COLUMN,
            modules=len(self.outs),
            blocks=shrink_blocks(self.scheme, single_sequence=together),
            rows=ready,
            vectors=layout.count_vectors(columns),
            groups=layout.count_groups(columns),
        )

    def expanding(self, out: Array, places: Array) -> Array:
        """The arguments of B; ``places`` have to stay."""
        return lora_expand_arguments(
            batch=self.table.words,
            first_module=FIRST_COLUMN,
            outs=places,
            out_stride=out.strides[0],
        )

    def places(self, out: Array) -> Array:
        """Where the output of each module is, and its blocks."""
        firsts = np.cumsum([0, *self.outs[:-1]]) * out.itemsize + out.ctypes.data
        return np.array([(at, rows // LANES) for at, rows in zip(firsts, self.outs, strict=True)])

    def reduce_items(self, *, together: bool = True) -> int:
        height = shrink_blocks(self.scheme, single_sequence=together)
        return sum(-(-part.a.blocks // height) for _, _, part in self.parts())

    def expand_items(self) -> int:
        return sum(-(-part.b.blocks // EXPAND_BLOCKS) for _, _, part in self.parts())

    def parts(self) -> Iterator[tuple[PlannedRows, slice, LoraPart]]:
        """Each part of a plan, with its rows and the columns of its output."""
        for job in self.jobs:
            begin = 0
            for part, rows in zip(job.plan.parts, self.outs, strict=True):
                if part is not None:
                    yield job, slice(begin, begin + rows), part
                begin += rows

    def inner(self) -> Array:
        """The rows between A and B, with those beyond the batch."""
        return self._memory(1, 2, np.float32)

    def prepared_inner(self) -> PreparedActivations:
        """What is left of them for B, in a scheme that does not take float32."""
        data = self._memory(3, 4, np.uint16 if self.scheme is Scheme.BFLOAT16 else np.int8)
        return PreparedActivations(
            data, self._memory(5, 7, np.float32), self._memory(6, 7, np.int32)
        )

    def _memory(self, address: int, stride: int, dtype: Any) -> Array:
        place, wide = int(self.table.words[address]), int(self.table.words[stride])
        size = (len(self.rows) + 1) * wide
        raw = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(place))
        return raw.view(dtype).reshape(len(self.rows) + 1, -1)


def batch(
    scheme: Scheme,
    *,
    ranks: Sequence[Sequence[int]] = RANKS,
    counts: Sequence[tuple[int, int]] = COUNTS,
    outs: Sequence[int] = OUTS,
    columns: int = COLUMNS,
) -> LowRankBatch:
    plans = [make_random_plan(scheme, r, outs, columns, seed=n) for n, r in enumerate(ranks)]
    jobs, count = make_jobs(plans, counts)
    rows = surround_with_nan(make_random_numbers(8, count, columns))
    return LowRankBatch(scheme, jobs, rows, outs, make_batch_table(scheme, jobs, count))


def reach_of(rows: Array, weights: Array) -> Array:
    """How far float32 sums may be from those in float64."""
    return (rows.shape[1] + 4) * 2.0**-23 * (np.abs(rows) @ np.abs(weights).T) + 1e-30


def ready_for(scheme: Scheme, rows: Array) -> PreparedActivations:
    """Rows as a scheme takes them; those of float32 stay where they are."""
    return wrap_float_activations(rows) if scheme in FLOAT_SCHEMES else quantise_rows(rows, scheme)


def reduce(some: LowRankBatch, *, plain: bool = False, together: bool = True) -> None:
    some.inner()[...] = FOREIGN
    ready = ready_for(some.scheme, some.rows)
    arguments = some.reducing(ready, together=together)
    items = some.reduce_items(together=together)
    lora_shrink_kernel(some.scheme, portable=plain)(0, items, arguments.ctypes.data)


def assert_reduced(some: LowRankBatch) -> None:
    """Rows between A and B are ``rows A^T``, and nothing else was written."""
    rows = dequantise_rows(ready_for(some.scheme, some.rows), some.rows)
    inner, foreign = some.inner(), np.ones_like(some.inner(), bool)
    for job, _, part in some.parts():
        filled = slice(part.column, part.column + part.a.blocks * LANES)
        mine, weights = rows[job.row_range], unpack_matrix(part.a).astype(np.float64)
        found = inner[job.row_range, filled]
        expected, reach = mine @ weights.T, reach_of(mine, weights)
        assert (np.abs(found[:, : part.a.rows] - expected) <= reach).all()
        assert not found[:, part.a.rows :].any()
        foreign[job.row_range, filled] = False
    assert (inner[foreign] == FOREIGN).all(), "written out of bounds"


def assert_left_for_b(some: LowRankBatch) -> None:
    """What B takes is what the rows between are when they are prepared."""
    inner, left = some.inner(), some.prepared_inner()
    for job, _, part in some.parts():
        filled = slice(part.column, part.column + part.a.blocks * LANES)
        wanted = quantise_rows(inner[job.row_range, filled], some.scheme)
        np.testing.assert_array_equal(
            left.data[job.row_range, filled], wanted.data[:, : part.a.blocks * LANES]
        )
        groups = wanted.scales.shape[1]
        own = slice(part.column // GROUP_SIZE, part.column // GROUP_SIZE + groups)
        np.testing.assert_array_equal(left.scales[job.row_range, own], wanted.scales)
        np.testing.assert_array_equal(left.sums[job.row_range, own], wanted.sums)


@EVERY
@pytest.mark.parametrize("together", [True, False])
def test_rows_meet_the_a_of_their_own_plan(scheme: Scheme, plain: bool, together: bool) -> None:
    some = batch(scheme)
    reduce(some, plain=plain, together=together)
    assert_reduced(some)
    if scheme not in FLOAT_SCHEMES:
        assert_left_for_b(some)


def between(some: LowRankBatch) -> Array:
    """What B meets, [rows, width], with NaN where there is nothing to be read."""
    if some.scheme in FLOAT_SCHEMES:
        return some.inner().astype(np.float64)
    return dequantise_rows(some.prepared_inner(), some.inner())


def expand(some: LowRankBatch, *, plain: bool = False) -> GuardedBuffer:
    """Add to rows that have numbers of their own."""
    out = make_guarded_buffer(len(some.rows), sum(some.outs))
    out.inside[...] = make_random_numbers(9, *out.inside.shape)
    places = some.places(out.inside)
    arguments = some.expanding(out.inside, places)
    kernel = lora_expand_kernel(some.scheme, portable=plain)
    kernel(0, some.expand_items(), arguments.ctypes.data)
    return out


def assert_expanded(some: LowRankBatch, out: GuardedBuffer) -> None:
    """``inner B^T`` was added to rows with a plan, and nothing else was written."""
    out.check_integrity()
    expected = make_random_numbers(9, *out.inside.shape).astype(np.float64)
    reach, rows = np.zeros_like(expected), between(some)
    for job, place, part in some.parts():
        mine = rows[job.row_range, part.column : part.column + part.a.rows]
        weights = unpack_matrix(part.b).astype(np.float64)
        expected[job.row_range, place] += mine @ weights.T
        reach[job.row_range, place] = reach_of(mine, weights) + 2.0**-22 * np.abs(
            expected[job.row_range, place]
        )
    assert (np.abs(out.inside - expected) <= reach).all()


@EVERY
def test_what_b_makes_of_them_is_added_to_their_own_outputs(scheme: Scheme, plain: bool) -> None:
    some = batch(scheme)
    reduce(some, plain=plain)
    assert_expanded(some, expand(some, plain=plain))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), scheme=st.sampled_from(ADAPTERS))
def test_any_plans_in_any_batch_are_the_formula(data: st.DataObject, scheme: Scheme) -> None:
    modules = data.draw(st.integers(1, 3))
    ranks = st.lists(st.integers(0, 33), min_size=modules, max_size=modules)
    outs = st.lists(st.integers(1, 12), min_size=modules, max_size=modules)
    chosen = data.draw(st.lists(ranks, max_size=5))
    gaps = st.tuples(st.integers(0, 2), st.integers(1, 8))
    some = batch(
        scheme,
        ranks=chosen,
        counts=data.draw(st.lists(gaps, min_size=len(chosen), max_size=len(chosen))),
        outs=[LANES * blocks for blocks in data.draw(outs)],
        columns=data.draw(st.integers(1, 300)),
    )
    reduce(some, together=data.draw(st.booleans()))
    assert_reduced(some)
    assert_expanded(some, expand(some))


@EVERY
def test_a_row_has_the_same_bits_alone_and_among_other_plans(scheme: Scheme, plain: bool) -> None:
    some = batch(scheme)
    reduce(some, plain=plain)
    whole = expand(some, plain=plain).inside
    for job in some.jobs:
        for row in range(job.first, job.first + job.rows):
            lonely = PlannedRows(job.plan, row, 1)
            table = make_batch_table(scheme, [lonely], len(some.rows))
            alone = LowRankBatch(scheme, [lonely], some.rows, some.outs, table)
            reduce(alone, plain=plain, together=False)
            found = expand(alone, plain=plain).inside
            np.testing.assert_array_equal(found[row], whole[row], strict=True)


@pytest.mark.parametrize("scheme", ADAPTERS)
def test_items_may_be_done_one_by_one_and_backwards(scheme: Scheme) -> None:
    some = batch(scheme)
    reduce(some)
    whole, inner = expand(some).inside, some.inner().copy()
    some.inner()[...] = FOREIGN
    ready = ready_for(scheme, some.rows)
    arguments = some.reducing(ready)
    for item in reversed(range(some.reduce_items())):
        lora_shrink_kernel(scheme)(item, item + 1, arguments.ctypes.data)
    np.testing.assert_array_equal(some.inner(), inner, strict=True)
    out = make_random_numbers(9, *whole.shape)
    places = some.places(out)
    arguments = some.expanding(out, places)
    for item in reversed(range(some.expand_items())):
        lora_expand_kernel(scheme)(item, item + 1, arguments.ctypes.data)
    np.testing.assert_array_equal(out, whole, strict=True)


@pytest.mark.parametrize("scheme", ADAPTERS)
def test_a_row_that_is_no_number_harms_no_other(scheme: Scheme) -> None:
    some = batch(scheme)
    reduce(some)
    good = expand(some).inside
    bad = some.jobs[1].first + 2
    some.rows[bad, 100] = np.nan
    reduce(some)
    found = expand(some).inside
    others = np.arange(len(found)) != bad
    np.testing.assert_array_equal(found[others], good[others], strict=True)
    assert np.isnan(found[bad, 48:64]).all(), "the one module that its plan changes"


MEETINGS = (
    (Scheme.FLOAT32, Scheme.FLOAT16, False),
    (Scheme.BFLOAT16, Scheme.BFLOAT16, False),
    (Scheme.INT8, Scheme.BFLOAT16, True),
    (Scheme.INT4, Scheme.INT8, False),
)
ADAPTED = pytest.mark.parametrize(("base", "scheme", "plain"), MEETINGS)


class Adapted:
    """The product of a base and all that plans add to it, as one operation and as three."""

    def __init__(self, base: Scheme, scheme: Scheme, *, plain: bool = False) -> None:
        self.some, self.plain = batch(scheme), plain
        self.matrix: PackedMatrix = pack_matrix(make_random_numbers(3, sum(OUTS), COLUMNS), base)
        self.out = make_guarded_buffer(len(self.some.rows), sum(OUTS))
        self.done = np.zeros(1, np.int64)
        self.counts = np.array([len(self.some.rows), self.some.reduce_items()], np.int64)
        self._base_rows = ready_for(base, self.some.rows)
        self._rows = ready_for(scheme, self.some.rows)
        self._places = self.some.places(self.out.inside)
        self._reduce = self.some.reducing(self._rows)
        self._multiply = gemm_arguments(
            matrix=self.matrix,
            rows=self._base_rows,
            out=self.out.inside,
            tokens=self.counts[:1],
        )
        self._expand = self.some.expanding(self.out.inside, self._places)
        self.arguments = fused_lora_arguments(
            reduce=self._reduce,
            multiply=self._multiply,
            multiply_items=gemm_items(self.matrix),
            expand=self._expand,
            reduce_items=self.counts[1:],
            done=self.done,
        )
        self.kernel = fused_lora_kernel(base, scheme, portable=plain)
        self.first = self.some.reduce_items()
        self.items = self.first + gemm_items(self.matrix)

    def forget(self) -> None:
        """Leave nothing of the run before."""
        self.some.inner()[...] = np.nan
        self.out.inside[...] = np.nan

    def apart(self) -> Array:
        """What the three kernels give, one after the other."""
        scheme, base = self.some.scheme, self.matrix.scheme
        operations = (
            (lora_shrink_kernel(scheme, portable=self.plain), self.first, self._reduce),
            (gemm_kernel(base, portable=self.plain), self.items - self.first, self._multiply),
            (
                lora_expand_kernel(scheme, portable=self.plain),
                self.some.expand_items(),
                self._expand,
            ),
        )
        self.forget()
        for kernel, items, arguments in operations:
            kernel(0, items, arguments.ctypes.data)
        return self.out.inside.copy()

    def do(self, first: int, last: int) -> None:
        self.kernel(first, last, self.arguments.ctypes.data)

    def program(self) -> Program:
        builder = ProgramBuilder()
        builder.add(self.kernel, self.arguments, self.items)
        builder.keep_alive(self)
        return builder.build()


@ADAPTED
def test_one_operation_has_the_bits_of_the_three(base: Scheme, scheme: Scheme, plain: bool) -> None:
    adapted = Adapted(base, scheme, plain=plain)
    wanted = adapted.apart()
    assert not np.isnan(wanted).any()
    for height in (1, 3, adapted.first + 1, adapted.items):
        adapted.forget()
        for first in range(0, adapted.items, height):
            adapted.do(first, min(first + height, adapted.items))
        np.testing.assert_array_equal(adapted.out.inside, wanted, strict=True)
        adapted.out.check_integrity()
        assert adapted.done[0] == 0, "the next run begins as the first did"


@pytest.mark.parametrize(("base", "scheme"), [(Scheme.INT4, Scheme.INT8)])
def test_who_is_at_a_block_of_the_base_waits_for_a_in_every_run(
    base: Scheme, scheme: Scheme
) -> None:
    adapted = Adapted(base, scheme)
    wanted = adapted.apart()
    for _ in range(20):
        adapted.forget()
        early = threading.Thread(target=adapted.do, args=(adapted.first, adapted.items))
        early.start()
        for item in range(adapted.first):
            adapted.do(item, item + 1)
        early.join()
        np.testing.assert_array_equal(adapted.out.inside, wanted, strict=True)
        assert adapted.done[0] == 0


@ADAPTED
def test_threads_change_no_bit(base: Scheme, scheme: Scheme, plain: bool) -> None:
    adapted = Adapted(base, scheme, plain=plain)
    wanted, program = adapted.apart(), adapted.program()
    for workers in (1, 2, 3):
        crew = ThreadPool(workers)
        for _ in range(50):
            adapted.forget()
            crew.run(program)
            np.testing.assert_array_equal(adapted.out.inside, wanted, strict=True)
        crew.close()
        adapted.out.check_integrity()


def test_a_batch_without_plans_is_the_product_of_the_base() -> None:
    adapted = Adapted(Scheme.FLOAT32, Scheme.FLOAT16)
    adapted.some.table.set_entries([], width=0)
    adapted.counts[1] = 0
    adapted.out.inside[...] = np.nan
    adapted.do(0, adapted.items - adapted.first)
    rows, weights = (
        adapted.some.rows.astype(np.float64),
        unpack_matrix(adapted.matrix).astype(np.float64),
    )
    assert (np.abs(adapted.out.inside - rows @ weights.T) <= reach_of(rows, weights)).all()
    assert adapted.done[0] == 0
