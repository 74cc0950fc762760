"""Upper bounds of a machine: peak arithmetic, and memory read bandwidth.

`PeakArithmetic` runs the inner operation of a tile on registers alone, the bound for products that
never wait for operands. Every number is one, so the sums count the products.

`MemoryReadBenchmark` reads every byte of some matrices once and does nothing else. It must be as
fast as reading can be, because other speeds are reported as fractions of it: all matrices are one
operation, whose workers claim long ranges and synchronise once.
"""

from collections.abc import Iterable
from functools import cache, reduce
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from expertctl.engine.arrays import VECTOR_BYTES, AnyArray, aligned_zeros
from expertctl.engine.kernels.compiled.compiler import KernelFunction, get_host_cpu
from expertctl.engine.kernels.compiled.memory import int64_view, load_int64s
from expertctl.engine.kernels.compiled.simd import SimdBuilder, Value, require_literal
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix
from expertctl.engine.kernels.program import Program, ProgramBuilder
from expertctl.engine.kernels.thread_pool import ThreadPool

LOOP_COUNT = 4096
"""Additions to each sum of an item; float32 holds the result exactly."""

_ITEMS_PER_WORKER = 64
_FMA, _BF16, _BYTES = range(3)
_PRODUCTS = {_FMA: 1, _BF16: 2, _BYTES: 4}
"""Products that one lane adds at once."""
_ONES: dict[int, AnyArray] = {
    _FMA: np.ones(LANES, np.float32),
    _BF16: np.full(2 * LANES, 0x3F80, np.uint16),
    _BYTES: np.ones(4 * LANES, np.uint8),
}


class PeakArithmetic:
    """A program that only computes, with the instruction used for matrices of one scheme."""

    def __init__(self, scheme: Scheme, *, workers: int) -> None:
        """Build the program; each worker gets some milliseconds of work."""
        way = _fastest_instruction(scheme)
        items = _ITEMS_PER_WORKER * workers
        self.operations = 2 * _PRODUCTS[way] * LANES * _independent_sums() * LOOP_COUNT * items
        """Floating-point operations per run; a multiplication and its addition count as two."""
        self._sums = aligned_zeros((items, LANES), np.float32)
        ones = aligned_zeros(VECTOR_BYTES, np.uint8)
        ones[...] = _ONES[way].view(np.uint8)
        arguments = np.array([ones.ctypes.data, self._sums.ctypes.data, LOOP_COUNT], np.int64)
        builder = ProgramBuilder()
        builder.add(_peak_kernel(way), arguments, items)
        builder.keep_alive(ones, self._sums)
        self.program: Program = builder.build()

    @property
    def products_added(self) -> int:
        """The number of products that the last run added, from its sums."""
        return int(self._sums.astype(np.float64).sum())


def _fastest_instruction(scheme: Scheme) -> int:
    """Return the fastest way to multiply numbers of a scheme on this processor."""
    cpu = get_host_cpu()
    if scheme is Scheme.BFLOAT16 and cpu.bf16_dot:
        return _BF16
    return _BYTES if scheme.layout.is_grouped and cpu.byte_dot else _FMA


def _independent_sums() -> int:
    """Return how many sums fit into registers; several hide the latency of an addition."""
    return 20 if get_host_cpu().has_512_bit_registers else 6


@cache
def _peak_kernel(way: int) -> Kernel:
    return load_kernel(f"peak {way}", __name__, "make_peak", way=way)


def make_peak(way: int) -> KernelFunction:
    """Return the function that multiplies numbers in registers."""

    def peak(first: int, last: int, arguments: int) -> None:
        ones, sums, turns = load_int64s(arguments, 3)
        for item in range(first, last):
            _emit_products(way, ones, turns, sums + item * VECTOR_BYTES)

    return peak


@intrinsic(prefer_literal=True)
def _emit_products(_context: Any, way: Any, ones: Any, loops: Any, out: Any) -> Any:
    """Add products of ones to all sums ``loops`` times; write the total of the sums."""
    number = require_literal(way, "the instruction")

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        _, source, times, place = values
        lanes = SimdBuilder(builder)
        one = lanes.load_floats(source) if number == _FMA else lanes.load_ints(source)
        zero = lanes.zero_ints() if number == _BYTES else lanes.zero_floats()
        totals = [lanes.create_variable(zero) for _ in range(_independent_sums())]
        with lanes.loop(times):
            for total in totals:
                added = _add_product(lanes, number, lanes.load_variable(total), one)
                lanes.store_variable(added, total)
        found = [lanes.load_variable(total) for total in totals]
        floats = [lanes.convert_to_floats(each) for each in found] if number == _BYTES else found
        lanes.store_floats(reduce(lanes.add_floats, floats), place)
        return context.get_dummy_value()

    return types.void(way, types.int64, types.int64, types.int64), emit


def _add_product(lanes: SimdBuilder, way: int, total: Value, one: Value) -> Value:
    if way == _FMA:
        return lanes.fma(one, one, total)
    return lanes.bf16_dot(total, one, one) if way == _BF16 else lanes.byte_dot(total, one, one)


ITEM_BYTES = 64 << 10

_VECTORS_PER_STEP = 8
"""Vectors that are read independently of each other."""


class MemoryReadBenchmark:
    """Reads the data and scales of matrices in whole items; a partial last item is not read."""

    def __init__(self, matrices: Iterable[PackedMatrix]) -> None:
        """Build the program that reads them."""
        parts = tuple(matrices)
        arrays = (array for matrix in parts for array in (matrix.data, matrix.scales))
        places = np.concatenate([_item_addresses(array) for array in arrays])
        self._found = aligned_zeros((len(places), VECTOR_BYTES // 8), np.int64)
        arguments = np.array([places.ctypes.data, self._found.ctypes.data], np.int64)
        builder = ProgramBuilder()
        builder.add(load_kernel("read", __name__, "read_items"), arguments, len(places))
        builder.keep_alive(parts, places, self._found)
        self._program = builder.build()

    @property
    def nbytes(self) -> int:
        """Bytes read per run."""
        return len(self._found) * ITEM_BYTES

    def run(self, pool: ThreadPool) -> int:
        """Read everything once; return the exclusive or of all 64-bit words."""
        pool.run(self._program)
        return int(np.bitwise_xor.reduce(self._found, axis=None))


def _item_addresses(array: AnyArray) -> AnyArray:
    offsets = np.arange(array.nbytes // ITEM_BYTES, dtype=np.int64) * ITEM_BYTES
    return array.ctypes.data + offsets


def read_items(first: int, last: int, arguments: int) -> None:
    """Read items and write the exclusive or of their words."""
    places, out = load_int64s(arguments, 2)
    for item in range(first, last):
        emit_item_read(int64_view(places, last)[item], out + item * VECTOR_BYTES)


@intrinsic
def emit_item_read(_context: Any, place: Any, out: Any) -> Any:
    """Write the exclusive or of the vectors of an item."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        lanes, (place, out) = SimdBuilder(builder), values
        found = [lanes.create_variable(lanes.zero_ints()) for _ in range(_VECTORS_PER_STEP)]
        step = _VECTORS_PER_STEP * VECTOR_BYTES
        with lanes.loop(lanes.int_constant(ITEM_BYTES // step)) as turn:
            begin = lanes.offset(place, turn, step)
            for number, bits in enumerate(found):
                offset = lanes.int_constant(number * VECTOR_BYTES)
                vector = lanes.load_ints(lanes.add_int(begin, offset))
                lanes.store_variable(lanes.xor_ints(lanes.load_variable(bits), vector), bits)
        every = lanes.zero_ints()
        for bits in found:
            every = lanes.xor_ints(every, lanes.load_variable(bits))
        lanes.store_floats(lanes.bitcast_to_floats(every), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit
