"""What plans change in routed products has the bits of plain products, each position by itself."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.lora import RECORD_WORDS, AdapterBatchTable, ModuleAdapter
from expertctl.engine.kernels.moe_layer import NO_POSITION, MoePermutation
from expertctl.engine.kernels.moe_lora import (
    DOWN,
    EXPERT_MODULES,
    GATE,
    moe_input_scale_arguments,
    moe_input_scale_kernel,
    moe_lora_arguments,
    moe_lora_kernel,
)
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import pack_matrix
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.reference_gemm import (
    GuardedBuffer,
    make_guarded_buffer,
    make_random_numbers,
    run_gemm,
    surround_with_nan,
)
from tests.engine.kernels.reference_moe import make_random_choices, sort_choices

Array = np.ndarray[Any, Any]

ADAPTERS = (Scheme.FLOAT32, Scheme.FLOAT16, Scheme.BFLOAT16, Scheme.INT8)
EVERY = pytest.mark.parametrize(
    ("scheme", "plain"),
    [
        *((scheme, False) for scheme in ADAPTERS),
        *((scheme, True) for scheme in (Scheme.BFLOAT16, Scheme.INT8)),
    ],
)
PASS = 128
"""Columns that are multiplied at once."""
LAYER = 1
"""The layer that is computed; records of the one before it lead nowhere."""
RANKS = (0, 1, 16, 17, 33, 128, 150)
STRETCHES = ((1, 9), (12, 1), (13, 30))
"""The first token and the tokens of each plan; the others have none."""


@dataclass(frozen=True)
class Module:
    """What a plan has for one linear layer of one expert, as numbers."""

    a: Array
    b: Array
    factors: Array | None

    def changed(self, scheme: Scheme, rows: Array, out: Array, *, plain: bool) -> Array:
        """``d * out + B (A x)``, by plain products with groups of columns."""
        found = out if self.factors is None else out * self.factors
        for low in range(0, len(self.a), PASS):
            inner: Array | None = None
            for begin in range(0, rows.shape[1], PASS):
                part = pack_matrix(self.a[low : low + PASS, begin : begin + PASS].copy(), scheme)
                inner = run_gemm(part, rows[:, begin : begin + PASS], plain=plain, onto=inner)
            assert inner is not None
            part = pack_matrix(self.b[:, low : low + PASS].copy(), scheme)
            found = run_gemm(part, inner, plain=plain, onto=found)
        return found

    def part(self, scheme: Scheme) -> ModuleAdapter:
        if not len(self.a):
            return ModuleAdapter(output_scale=self.factors)
        a, b = pack_matrix(self.a, scheme), pack_matrix(self.b, scheme)
        return ModuleAdapter(a=a, b=b, output_scale=self.factors)


def random_module(seed: int, *, rank: int, columns: int, width: int) -> Module:
    factors = make_random_numbers(seed + 2, width) if seed % 3 else None
    return Module(
        make_random_numbers(seed, rank, columns),
        make_random_numbers(seed + 1, width, rank),
        factors,
    )


@dataclass(frozen=True)
class RoutedBatch:
    """Tokens, who they ask for, and what each plan has for those, [plan][expert][module]."""

    scheme: Scheme
    selected: Array
    rows: Array
    plans: Sequence[Sequence[Sequence[Module]]]
    stretches: Sequence[tuple[int, int]]
    first: int
    width: int
    of_tokens: bool
    _kept: list[object] = field(default_factory=list)

    @property
    def used(self) -> int:
        return self.selected.shape[1]

    @property
    def experts(self) -> int:
        return len(self.plans[0])

    @property
    def modules(self) -> int:
        return len(self.plans[0][0])

    @property
    def order(self) -> MoePermutation:
        return sort_choices(self.selected, self.experts)

    def table(self) -> AdapterBatchTable:
        table = AdapterBatchTable(Scheme.FLOAT32, rows=len(self.selected) + 1)
        entries = []
        for plan, (first, count) in zip(self.plans, self.stretches, strict=True):
            records = np.full(
                ((LAYER + 1) * self.experts * EXPERT_MODULES, RECORD_WORDS), -1, np.int64
            )
            for expert, modules in enumerate(plan):
                at = (LAYER * self.experts + expert) * EXPERT_MODULES + self.first
                for place, module in enumerate(modules):
                    part = module.part(self.scheme)
                    records[at + place] = part.to_record()
                    self._kept.append(part)
            self._kept.append(records)
            entries.append((records.ctypes.data, first, count))
        table.set_entries(entries, width=0)
        return table

    def before(self, order: MoePermutation) -> Array:
        return make_random_numbers(77, len(order.sources), self.modules * self.width)

    def row(self, order: MoePermutation, position: int) -> Array:
        place = order.sources[position] // self.used if self.of_tokens else position
        return self.rows[place][None]

    def run(self, *, plain: bool = False, cuts: Sequence[int] = ()) -> Array:
        """Rows of all positions, [positions, width of all modules]."""
        order, table = self.order, self.table()
        around = self._room(order)
        arguments = self._arguments(order, table, around.inside)
        ends = [0, *cuts, len(order.sources) + 3]
        for first, last in reversed(list(itertools.pairwise(ends))):
            moe_lora_kernel(self.scheme, portable=plain)(first, last, arguments.ctypes.data)
        around.check_integrity()
        return around.inside[:, : self.modules * self.width]

    def run_by(self, crew: ThreadPool) -> Array:
        order, table = self.order, self.table()
        around, builder = self._room(order), ProgramBuilder()
        arguments = self._arguments(order, table, around.inside)
        builder.add(moe_lora_kernel(self.scheme), arguments, len(order.sources))
        crew.run(builder.build())
        around.check_integrity()
        return around.inside[:, : self.modules * self.width]

    def one_by_one(self, *, plain: bool = False) -> Array:
        """The same by plain products, each position by itself."""
        order = self.order
        found = self.before(order)
        for position in range(int(order.offsets[-1])):
            src = int(order.sources[position])
            plan = self._plan_of(src // self.used)
            modules = [] if plan is None else plan[int(self.selected.reshape(-1)[src])]
            for place, module in enumerate(modules):
                part = found[position, place * self.width : (place + 1) * self.width][None]
                row = self.row(order, position)
                part[...] = module.changed(self.scheme, row, part, plain=plain)
        return found

    def _plan_of(self, token: int) -> Sequence[Sequence[Module]] | None:
        for plan, (first, count) in zip(self.plans, self.stretches, strict=True):
            if first <= token < first + count:
                return plan
        return None

    def _room(self, order: MoePermutation) -> GuardedBuffer:
        wide = self.modules * self.width
        around = make_guarded_buffer(len(order.sources), -(-wide // LANES) * LANES)
        around.inside[:, :wide] = self.before(order)
        return around

    def _arguments(self, order: MoePermutation, table: AdapterBatchTable, out: Array) -> Array:
        self._kept.extend((order, table))
        return moe_lora_arguments(
            scheme=self.scheme,
            batch=table.words,
            order=order,
            top_k=self.used,
            layer=LAYER,
            first=self.first,
            modules=self.modules,
            width=self.width,
            rows=self.rows,
            by_token=self.of_tokens,
            out=out,
        )


def batch(
    scheme: Scheme,
    *,
    down: bool = False,
    ranks: Sequence[int] = RANKS,
    stretches: Sequence[tuple[int, int]] = STRETCHES,
    tokens: int = 45,
    used: int = 2,
    experts: int = 4,
    columns: int = 179,
    width: int = 80,
    seed: int = 0,
) -> RoutedBatch:
    seeds, rank = itertools.count(100 * seed, 5), itertools.cycle(ranks)
    plans = [
        [
            [
                random_module(next(seeds), rank=next(rank), columns=columns, width=width)
                for _ in range(1 if down else 2)
            ]
            for _ in range(experts)
        ]
        for _ in stretches
    ]
    rows = make_random_numbers(seed, tokens * used if down else tokens, columns)
    selected = make_random_choices(seed, tokens, used, experts)
    selected[::7, 0] = NO_POSITION
    return RoutedBatch(
        scheme,
        selected,
        surround_with_nan(rows),
        plans,
        stretches,
        first=DOWN if down else GATE,
        width=width,
        of_tokens=not down,
    )


@EVERY
@pytest.mark.parametrize("down", [False, True])
def test_a_position_has_the_bits_of_plain_products(scheme: Scheme, plain: bool, down: bool) -> None:
    some = batch(scheme, down=down)
    expected = some.one_by_one(plain=plain)
    assert (expected != some.before(some.order)).any(axis=1).sum() > 40
    np.testing.assert_array_equal(some.run(plain=plain), expected, strict=True)


@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(ADAPTERS),
    down=st.booleans(),
    ranks=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    counts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=4),
    used=st.integers(1, 3),
    experts=st.integers(3, 6),
    columns=st.integers(1, 300),
    width=st.integers(1, 150),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_any_plans_of_any_shape_have_the_bits_of_plain_products(
    scheme: Scheme,
    down: bool,
    ranks: list[int],
    counts: list[tuple[int, int]],
    used: int,
    experts: int,
    columns: int,
    width: int,
    seed: int,
    data: st.DataObject,
) -> None:
    stretches, tokens = [], 0
    for gap, count in counts:
        stretches.append((tokens + gap, count))
        tokens += gap + count
    some = batch(
        scheme,
        down=down,
        ranks=ranks,
        stretches=stretches,
        tokens=tokens + 1,
        used=used,
        experts=experts,
        columns=columns,
        width=width if down else -(-width // LANES) * LANES,
        seed=seed,
    )
    cuts = data.draw(st.lists(st.integers(0, (tokens + 1) * used), max_size=4).map(sorted))
    np.testing.assert_array_equal(some.run(cuts=cuts), some.one_by_one(), strict=True)


@pytest.mark.parametrize("scheme", ADAPTERS)
def test_threads_change_no_bit(scheme: Scheme) -> None:
    some = batch(scheme)
    expected = some.run()
    for workers in (1, 2, 3):
        crew = ThreadPool(workers)
        for _ in range(20):
            np.testing.assert_array_equal(some.run_by(crew), expected, strict=True)
        crew.close()


def test_inputs_are_scaled_by_the_factors_of_their_own_plan_and_expert() -> None:
    experts, used, tokens, width = 4, 2, 45, 48
    selected = make_random_choices(5, tokens, used, experts)
    selected[3, :] = NO_POSITION
    order, table = sort_choices(selected, experts), AdapterBatchTable(Scheme.FLOAT32, rows=tokens)
    factors = make_random_numbers(6, len(STRETCHES), experts, width)
    rows = surround_with_nan(make_random_numbers(7, tokens * used, width))
    expected, plans = rows.copy(), []
    for number, _ in enumerate(STRETCHES):
        records = np.full(((LAYER + 1) * experts * EXPERT_MODULES, RECORD_WORDS), -1, np.int64)
        for expert in range(experts):
            scale = None if expert == 2 else factors[number, expert]
            place = (LAYER * experts + expert) * EXPERT_MODULES + DOWN
            records[place] = ModuleAdapter(input_scale=scale).to_record()
        plans.append(records)
    entries = [(p.ctypes.data, *s) for p, s in zip(plans, STRETCHES, strict=True)]
    table.set_entries(entries, width=0)
    there = int(order.offsets[-1])
    for position in range(there):
        src = int(order.sources[position])
        expert = int(selected.reshape(-1)[src])
        for number, (first, count) in enumerate(STRETCHES):
            if first <= src // used < first + count and expert != 2:
                expected[position] *= factors[number, expert]
    around = make_guarded_buffer(tokens * used, width)
    arguments = moe_input_scale_arguments(
        batch=table.words,
        order=order,
        top_k=used,
        layer=LAYER,
        module=DOWN,
        rows=rows,
        out=around.inside,
    )
    for first, last in ((20, tokens * used + 2), (0, 20)):
        moe_input_scale_kernel()(first, last, arguments.ctypes.data)
    around.check_integrity()
    np.testing.assert_array_equal(around.inside[:there], expected[:there], strict=True)
