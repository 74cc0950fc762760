"""LLVM vector operations on sixteen lanes, from which kernels are built.

numba compiles scalar loops; keeping a tile of accumulators in registers must be expressed in LLVM's
own terms. `SimdBuilder` does so for vectors of sixteen, which LLVM splits where registers are
narrower. It exists only while an intrinsic is compiled.

`emit_tiles` and `emit_even_tiles` loop over tiles of a count; the size of a tile is a constant of
the emitted code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.compiled.llvm_math import (
    emit_exponential,
    emit_float_to_half,
    emit_half_to_float,
)
from expertctl.engine.kernels.packed_format import LANES

INT = ir.IntType(64)
_I8, _I16, _I32, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_I32, LANES)
_HALVES, _BYTES = ir.VectorType(_I16, LANES), ir.VectorType(_I8, VECTOR_BYTES)
_BITS, _LONGS = ir.VectorType(ir.IntType(1), VECTOR_BYTES), ir.VectorType(INT, LANES)
_FEW_BYTES = ir.VectorType(_I8, LANES)
_SHORTS = ir.VectorType(_I16, 2 * LANES)
_HALF_SHORTS, _HALF_INTS = ir.VectorType(_I16, LANES), ir.VectorType(_I32, LANES // 2)


class _Bfloat16Type(ir.Type):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16Type)

    def __hash__(self) -> int:
        return hash(_Bfloat16Type)


_BFLOATS = ir.VectorType(_Bfloat16Type(), 2 * LANES)
Choice = TypeVar("Choice")
Value: TypeAlias = Any
"""A value of LLVM's intermediate representation, known at run time of the kernel."""


def require_literal(value: Any, name: str) -> int:
    """Return the value of a literal type; if it is none, numba types the call again with one."""
    if not isinstance(value, types.IntegerLiteral):
        raise RequireLiteralValue(f"{name} is a constant")
    return int(value.literal_value)


class SimdBuilder:
    """Emits vector code at the position of a builder; addresses and indices are int64 values."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        """Emit with this builder."""
        self._b = builder

    def int_constant(self, number: int) -> Value:
        """Return an int64 constant."""
        return ir.Constant(INT, number)

    def offset(self, address: Value, index: Value, stride: Value | int) -> Value:
        """Return ``address + index * stride``, in bytes."""
        step = self.int_constant(stride) if isinstance(stride, int) else stride
        return self._b.add(address, self._b.mul(index, step))

    def load_floats(self, address: Value) -> Value:
        """Load sixteen float32."""
        return self._load(address, _FLOATS)

    def load_ints(self, address: Value) -> Value:
        """Load sixteen int32, or sixty-four bytes."""
        return self._load(address, _INTS)

    def load_halves(self, address: Value) -> Value:
        """Load sixteen float16, widened to float32."""
        bits = self._load(address, _HALVES)
        return emit_half_to_float(self._b, bits, native=get_host_cpu().has_float16)

    def load_shorts(self, address: Value) -> Value:
        """Load sixteen uint16, widened to int32."""
        return self._b.zext(self._load(address, _HALVES), _INTS)

    def load_bits(self, address: Value, value: int) -> Value:
        """Load sixty-four bits; return as many bytes, which are ``value`` where a bit is set."""
        bits = self._b.bitcast(self._load(address, INT), _BITS)
        each, none = (ir.Constant(_BYTES, [n] * VECTOR_BYTES) for n in (value, 0))
        return self._b.bitcast(self._b.select(bits, each, none), _INTS)

    def store_floats(self, floats: Value, address: Value) -> None:
        """Store sixteen float32."""
        self._b.store(floats, self._b.inttoptr(address, _FLOATS.as_pointer()), align=4)

    def store_first_float(self, floats: Value, address: Value) -> None:
        """Store the first of sixteen float32."""
        self._b.store(self.extract_first(floats), self._b.inttoptr(address, _FLOAT.as_pointer()))

    def load_int64(self, address: Value) -> Value:
        """Load one int64."""
        return self._load(address, INT)

    def prefetch(self, address: Value, *, cache: int = 1) -> None:
        """Prefetch an address into the first- or second-level cache; it may be invalid."""
        pointer = self._b.inttoptr(address, _I8.as_pointer())
        hints = (ir.Constant(_I32, number) for number in (0, 4 - cache, 1))
        self._call("llvm.prefetch.p0", ir.VoidType(), pointer, *hints)

    def store_halves(self, floats: Value, address: Value) -> None:
        """Store sixteen float32 as float16; overflow becomes infinity."""
        halves = emit_float_to_half(self._b, floats, native=get_host_cpu().has_float16)
        self._b.store(halves, self._b.inttoptr(address, _HALVES.as_pointer()), align=2)

    def store_bytes(self, ints: Value, address: Value) -> None:
        """Store sixteen int32 as bytes."""
        few = self._b.trunc(ints, _FEW_BYTES)
        self._b.store(few, self._b.inttoptr(address, _FEW_BYTES.as_pointer()), align=1)

    def store_ints(self, ints: Value, address: Value) -> None:
        """Store sixteen int32."""
        self._b.store(ints, self._b.inttoptr(address, _INTS.as_pointer()), align=4)

    def store_shorts(self, ints: Value, address: Value) -> None:
        """Store sixteen int32 as int16."""
        shorts = self._b.trunc(ints, _HALVES)
        self._b.store(shorts, self._b.inttoptr(address, _HALVES.as_pointer()), align=2)

    def store_nibbles(self, ints: Value, address: Value) -> None:
        """Store the lowest four bits of sixteen int32, which may have no others."""
        moves = ir.Constant(_LONGS, [4 * lane for lane in range(LANES)])
        apart = self._b.shl(self._b.zext(ints, _LONGS), moves)
        joined = self._call("llvm.vector.reduce.or.v16i64", INT, apart)
        self._b.store(joined, self._b.inttoptr(address, INT.as_pointer()), align=1)

    def broadcast_float(self, address: Value) -> Value:
        """Load one float32 into every lane."""
        return self._splat(self._load(address, _FLOAT), _FLOATS)

    def broadcast_int(self, address: Value) -> Value:
        """Load one int32, or four bytes, into every lane."""
        return self._splat(self._load(address, _I32), _INTS)

    def zero_floats(self) -> Value:
        """Return sixteen float32 zeros."""
        return ir.Constant(_FLOATS, [0.0] * LANES)

    def zero_ints(self) -> Value:
        """Return sixteen int32 zeros."""
        return ir.Constant(_INTS, [0] * LANES)

    def int_lanes(self, number: int) -> Value:
        """Return a constant int32 in every lane."""
        return ir.Constant(_INTS, [number] * LANES)

    def scale_ints(self, ints: Value, factor: int) -> Value:
        """Multiply sixteen int32 by a constant."""
        return self._b.mul(ints, ir.Constant(_INTS, [factor] * LANES))

    def mask_ints(self, ints: Value, mask: int) -> Value:
        """Keep the bits of a 32-bit mask."""
        signed = mask - (1 << 32) if mask >> 31 else mask
        return self._b.and_(ints, ir.Constant(_INTS, [signed] * LANES))

    def or_ints(self, a: Value, b: Value) -> Value:
        """Return the inclusive or of int32."""
        return self._b.or_(a, b)

    def xor_ints(self, a: Value, b: Value) -> Value:
        """Return the exclusive or of int32."""
        return self._b.xor(a, b)

    def shift_right(self, ints: Value, bits: int, *, signed: bool = False) -> Value:
        """Shift right, arithmetically if ``signed``."""
        by = ir.Constant(_INTS, [bits] * LANES)
        return self._b.ashr(ints, by) if signed else self._b.lshr(ints, by)

    def shift_left(self, ints: Value, bits: int) -> Value:
        """Shift left."""
        return self._b.shl(ints, ir.Constant(_INTS, [bits] * LANES))

    def bitcast_to_floats(self, ints: Value) -> Value:
        """Reinterpret the bits of int32 as float32."""
        return self._b.bitcast(ints, _FLOATS)

    def convert_to_floats(self, ints: Value) -> Value:
        """Convert sixteen int32 to float32."""
        return self._b.sitofp(ints, _FLOATS)

    def bitcast_to_ints(self, floats: Value) -> Value:
        """Reinterpret the bits of float32 as int32."""
        return self._b.bitcast(floats, _INTS)

    def round_floats(self, floats: Value) -> Value:
        """Return the nearest whole float32, ties to even."""
        return self._call("llvm.rint.v16f32", _FLOATS, floats)

    def clamp_floats(self, floats: Value, low: Value, high: Value) -> Value:
        """Clamp float32 to two others; NaN becomes ``low``."""
        above = self.select_lanes(self.less_than(low, floats), floats, low)
        return self.select_lanes(self.less_than(above, high), above, high)

    def truncate_to_ints(self, floats: Value) -> Value:
        """Convert whole float32 to int32."""
        return self._b.fptosi(floats, _INTS)

    def clamp_ints(self, ints: Value, low: int, high: int) -> Value:
        """Clamp int32 to two constants."""
        least, most = (ir.Constant(_INTS, [end] * LANES) for end in (low, high))
        small = self._b.icmp_signed("<", ints, most)
        return self.max_int(self._b.select(small, ints, most), least)

    def reduce_max_ints(self, ints: Value) -> Value:
        """Return the largest of sixteen int32."""
        return self._call("llvm.vector.reduce.smax.v16i32", _I32, ints)

    def reduce_add_ints(self, ints: Value) -> Value:
        """Return the sum of sixteen int32."""
        return self._call("llvm.vector.reduce.add.v16i32", _I32, ints)

    def add_floats(self, a: Value, b: Value) -> Value:
        """Add float32."""
        return self._b.fadd(a, b)

    def multiply_floats(self, a: Value, b: Value) -> Value:
        """Multiply float32."""
        return self._b.fmul(a, b)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return ``a * b + c``, rounded once."""
        return self._call("llvm.fma.v16f32", _FLOATS, a, b, c)

    def subtract_floats(self, a: Value, b: Value) -> Value:
        """Subtract float32."""
        return self._b.fsub(a, b)

    def divide_floats(self, a: Value, b: Value) -> Value:
        """Divide float32."""
        return self._b.fdiv(a, b)

    def exp_floats(self, a: Value) -> Value:
        """Return e^a of sixteen float32; see `exponential`."""
        return emit_exponential(self._b, a)

    def float_constant(self, number: float) -> Value:
        """Return a constant float32 in every lane."""
        return ir.Constant(_FLOATS, [float(number)] * LANES)

    def splat_float(self, number: Value) -> Value:
        """Return one float32 in every lane."""
        return self._splat(number, _FLOATS)

    def extract_first(self, floats: Value) -> Value:
        """Return the first of sixteen float32."""
        return self._b.extract_element(floats, ir.Constant(_I32, 0))

    def less_than(self, a: Value, b: Value) -> Value:
        """Return a mask of the lanes where a float32 is less; false for NaN."""
        return self._b.fcmp_ordered("<", a, b)

    def less_than_ints(self, a: Value, b: Value) -> Value:
        """Return a mask of the lanes where a signed int32 is less."""
        return self._b.icmp_signed("<", a, b)

    def both(self, a: Value, b: Value) -> Value:
        """Return a mask of the lanes that two masks have in common."""
        return self._b.and_(a, b)

    def invert(self, mask: Value) -> Value:
        """Return the mask of all other lanes."""
        return self._b.not_(mask)

    def any_lane(self, mask: Value) -> Value:
        """Return int64 1 if a lane of the mask is set, else 0."""
        bits = self._b.bitcast(mask, _I16)
        return self._b.zext(self._b.icmp_signed("!=", bits, ir.Constant(_I16, 0)), INT)

    def min_floats(self, a: Value, b: Value) -> Value:
        """Return the smaller of each two float32; ``b`` if ``a`` is NaN."""
        return self.select_lanes(self.less_than(a, b), a, b)

    def max_floats(self, a: Value, b: Value) -> Value:
        """Return the larger of each two float32; ``b`` if ``a`` is NaN."""
        return self.select_lanes(self.less_than(b, a), a, b)

    def range_mask(self, low: Value, high: Value, begin: int) -> Value:
        """Return a mask of the lanes whose index, counted from ``begin``, is in [low, high]."""
        numbers = ir.Constant(_INTS, list(range(begin, begin + LANES)))
        low, high = (self._splat(self._b.trunc(end, _I32), _INTS) for end in (low, high))
        above = self._b.icmp_signed(">=", numbers, low)
        return self._b.and_(above, self._b.icmp_signed("<=", numbers, high))

    def select_lanes(self, mask: Value, yes: Value, no: Value) -> Value:
        """Return the lanes of ``yes`` where the mask is set, else of ``no``."""
        return self._b.select(mask, yes, no)

    def reduce_max_floats(self, floats: Value) -> Value:
        """Return the largest of sixteen float32."""
        return self._call("llvm.vector.reduce.fmax.v16f32", _FLOAT, floats)

    def sum_lanes(self, floats: Value) -> Value:
        """Return the sum of sixteen float32, added in a tree, in every lane."""
        for distance in (8, 4, 2, 1):
            order = ir.Constant(_INTS, [lane ^ distance for lane in range(LANES)])
            floats = self._b.fadd(floats, self._b.shuffle_vector(floats, floats, order))
        return floats

    def bf16_dot(self, floats: Value, a: Value, b: Value) -> Value:
        """Add two products of bfloat16 pairs to each lane."""
        pairs = (self._b.bitcast(a, _BFLOATS), self._b.bitcast(b, _BFLOATS))
        return self._call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, floats, *pairs)

    def byte_dot(self, ints: Value, unsigned: Value, signed: Value) -> Value:
        """Add four products of unsigned and signed bytes to each lane."""
        fours = (self._b.bitcast(unsigned, _BYTES), self._b.bitcast(signed, _BYTES))
        return self._call("llvm.x86.avx512.vpdpbusd.512", _INTS, ints, *fours)

    def shift_right_shorts(self, ints: Value, bits: int, *, signed: bool = False) -> Value:
        """Shift the int16 in int32 right, arithmetically if ``signed``."""
        by, shorts = ir.Constant(_SHORTS, [bits] * 2 * LANES), self._b.bitcast(ints, _SHORTS)
        moved = self._b.ashr(shorts, by) if signed else self._b.lshr(shorts, by)
        return self._b.bitcast(moved, _INTS)

    def shift_left_shorts(self, ints: Value, bits: int) -> Value:
        """Shift the int16 in int32 left."""
        by, shorts = ir.Constant(_SHORTS, [bits] * 2 * LANES), self._b.bitcast(ints, _SHORTS)
        return self._b.bitcast(self._b.shl(shorts, by), _INTS)

    def short_dot(self, ints: Value, a: Value, b: Value) -> Value:
        """Add two products of int16 to each lane."""
        pairs = (self._b.bitcast(each, _SHORTS) for each in (a, b))
        halves = zip(*(self._split_halves(each) for each in pairs), strict=True)
        name = "llvm.x86.avx2.pmadd.wd"
        sums = self._join_halves([self._call(name, _HALF_INTS, *h) for h in halves])
        return self.add_int(ints, sums)

    def small_byte_dot(self, ints: Value, unsigned: Value, signed: Value) -> Value:
        """Add four products of unsigned and signed bytes to each lane; two must fit int16."""
        fours = (self._b.bitcast(each, _BYTES) for each in (unsigned, signed))
        halves = zip(*(self._split_halves(each) for each in fours), strict=True)
        ones = ir.Constant(_HALF_SHORTS, [1] * LANES)
        found = []
        for pair in halves:
            shorts = self._call("llvm.x86.avx2.pmadd.ub.sw", _HALF_SHORTS, *pair)
            found.append(self._call("llvm.x86.avx2.pmadd.wd", _HALF_INTS, shorts, ones))
        return self.add_int(ints, self._join_halves(found))

    def select_int(self, flag: Value, yes: Value, no: Value) -> Value:
        """Return ``yes`` if an int64 is not 0, else ``no``."""
        return self._b.select(self._b.icmp_signed("!=", flag, self.int_constant(0)), yes, no)

    def min_int(self, a: Value, b: Value) -> Value:
        """Return the smaller of two int64."""
        return self._b.select(self._b.icmp_signed("<", a, b), a, b)

    def max_int(self, a: Value, b: Value) -> Value:
        """Return the larger of two int64, or of each two int32."""
        return self._b.select(self._b.icmp_signed(">", a, b), a, b)

    def is_range_within(self, begin: Value, end: Value, low: Value, high: Value) -> Value:
        """Return a flag: whether all int64 in [begin, end) are in [low, high]."""
        above = self._b.icmp_signed(">=", begin, low)
        above_high = self.add_int(high, self.int_constant(1))
        return self._b.and_(above, self._b.icmp_signed("<=", end, above_high))

    def add_int(self, a: Value, b: Value) -> Value:
        """Add int64, or sixteen int32."""
        return self._b.add(a, b)

    def subtract_int(self, a: Value, b: Value) -> Value:
        """Subtract int64."""
        return self._b.sub(a, b)

    def multiply_int(self, a: Value, b: Value) -> Value:
        """Multiply int64."""
        return self._b.mul(a, b)

    def divide_int(self, a: Value, b: Value) -> Value:
        """Divide int64, rounding down; neither may be negative."""
        return self._b.udiv(a, b)

    def ceil_divide_int(self, count: Value, size: Value) -> Value:
        """Divide int64, rounding up."""
        less = self.subtract_int(size, self.int_constant(1))
        return self.divide_int(self.add_int(count, less), size)

    def allocate_vectors(self, vectors: int) -> Value:
        """Return the address of vectors on the stack of the kernel."""
        with self._b.goto_entry_block():
            place = self._b.alloca(ir.ArrayType(_FLOAT, vectors * LANES))
            place.align = VECTOR_BYTES
            return self._b.ptrtoint(place, INT)

    def create_variable(self, value: Value) -> Value:
        """Return a variable that holds a value; LLVM turns it into a register."""
        return cgutils.alloca_once_value(self._b, value)

    def load_variable(self, variable: Value) -> Value:
        """Return the value of a variable."""
        return self._b.load(variable)

    def store_variable(self, value: Value, variable: Value) -> None:
        """Set the value of a variable."""
        self._b.store(value, variable)

    @contextmanager
    def loop(self, times: Value) -> Iterator[Value]:
        """Emit a loop; its body gets the index, starting at 0."""
        with cgutils.for_range(self._b, times) as loop:
            yield loop.index

    @contextmanager
    def loop_floats(self, address: Value, vectors: int) -> Iterator[Value]:
        """Emit a loop over vectors of float32; its body gets the vector."""
        with self.loop(self.int_constant(vectors)) as index:
            yield self.load_floats(self.offset(address, index, VECTOR_BYTES))

    def emit_branches(self, flag: Value, yes: Choice, no: Choice) -> Iterator[Choice]:
        """Emit the caller's body twice: with ``yes`` if the flag is set, with ``no`` otherwise."""
        with self._b.if_else(flag) as (then, otherwise):
            with then:
                yield yes
            with otherwise:
                yield no

    def _split_halves(self, vector: Value) -> list[Value]:
        count = vector.type.count // 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        parts = ([first + lane for lane in range(count)] for first in (0, count))
        kind = ir.VectorType(_I32, count)
        masks = [ir.Constant(kind, part) for part in parts]
        return [self._b.shuffle_vector(vector, undefined, mask) for mask in masks]

    def _join_halves(self, halves: list[Value]) -> Value:
        return self._b.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))

    def _load(self, address: Value, kind: ir.Type) -> Value:
        return self._b.load(self._b.inttoptr(address, kind.as_pointer()), align=1)

    def _splat(self, value: Value, kind: ir.VectorType) -> Value:
        undefined = ir.Constant(kind, ir.Undefined)
        first = self._b.insert_element(undefined, value, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
        return self._b.shuffle_vector(first, undefined, zeros)

    def _call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self._b.module, kind, name)
        return self._b.call(function, arguments)


def emit_tiles(
    lanes: SimdBuilder, count: Value, sizes: tuple[int, ...]
) -> Iterator[tuple[Value, int]]:
    """Emit the caller's body for each size in turn, as often as it fits into the rest of the count.

    Yields the first index and the size of each tile; the last size must be 1.
    """
    done = lanes.int_constant(0)
    for size in sizes:
        times = lanes.divide_int(lanes.subtract_int(count, done), lanes.int_constant(size))
        with lanes.loop(times) as turn:
            yield lanes.add_int(done, lanes.multiply_int(turn, lanes.int_constant(size))), size
        done = lanes.add_int(done, lanes.multiply_int(times, lanes.int_constant(size)))


def emit_even_tiles(
    lanes: SimdBuilder, count: Value, *, parts: Value, largest: int
) -> Iterator[tuple[Value, Value, int]]:
    """Emit the caller's body for ``parts`` tiles in turn, none larger than ``largest``.

    Tiles that are one larger than the others come first. Yields the number, the first index and the
    size of each tile.
    """
    size = lanes.divide_int(count, lanes.max_int(parts, lanes.int_constant(1)))
    longer = lanes.subtract_int(count, lanes.multiply_int(parts, size))
    done = turns = lanes.int_constant(0)
    for here in range(largest, 0, -1):
        above = lanes.subtract_int(lanes.int_constant(here), size)
        times = lanes.select_int(above, lanes.int_constant(0), lanes.subtract_int(parts, longer))
        times = lanes.select_int(lanes.subtract_int(above, lanes.int_constant(1)), times, longer)
        with lanes.loop(times) as turn:
            first = lanes.add_int(done, lanes.multiply_int(turn, lanes.int_constant(here)))
            yield lanes.add_int(turns, turn), first, here
        done = lanes.add_int(done, lanes.multiply_int(times, lanes.int_constant(here)))
        turns = lanes.add_int(turns, times)
