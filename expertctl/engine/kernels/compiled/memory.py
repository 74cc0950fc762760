"""Memory access by address, and atomics, in compiled code.

Atomics act on int64 at multiples of eight bytes. A thread that reads a number sees everything that
the storing thread had written before.
"""

from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.compiled.llvm_math import emit_float_to_half, emit_half_to_float
from expertctl.engine.kernels.compiled.simd import INT, require_literal


@intrinsic(prefer_literal=True)
def load_int64s(_context: Any, address: Any, count: Any) -> Any:
    """Return ``count`` int64 starting at an address, as a tuple."""
    number = require_literal(count, "the number of words")

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], INT.as_pointer())
        found = [builder.load(builder.gep(pointer, [ir.Constant(INT, k)])) for k in range(number)]
        return cgutils.pack_array(builder, found)

    return types.UniTuple(types.int64, number)(types.int64, count), emit


def _make_array_view(dtype: Any) -> Any:
    """Return the compiled-code function that views memory at an address as an array."""
    kind = types.CPointer(dtype)

    @intrinsic
    def pointer(_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(kind))

        return kind(address), emit

    @register_jitable
    def array_at(address: int, length: int) -> Any:
        return numba.carray(pointer(address), (length,))

    return array_at


float32_view = _make_array_view(types.float32)
int32_view = _make_array_view(types.int32)
uint16_view = _make_array_view(types.uint16)
uint32_view = _make_array_view(types.uint32)
uint8_view = _make_array_view(types.uint8)
int8_view = _make_array_view(types.int8)
int64_view = _make_array_view(types.int64)


@intrinsic(prefer_literal=True)
def allocate_stack_floats(_context: Any, count: Any) -> Any:
    """Return the address of ``count`` float32 on the stack of the calling kernel."""
    kind = ir.ArrayType(ir.FloatType(), require_literal(count, "the size on the stack"))

    def emit(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        with builder.goto_entry_block():
            room = builder.alloca(kind)
            room.align = VECTOR_BYTES
        return builder.ptrtoint(room, INT)

    return types.int64(count), emit


@intrinsic
def copy_bytes(_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy ``count`` bytes from one address to another; they must not overlap."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        places = [builder.inttoptr(value, ir.IntType(8).as_pointer()) for value in values[:2]]
        cgutils.raw_memcpy(builder, *places, values[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def float32_to_half_bits(_context: Any, number: Any) -> Any:
    """Return the float16 bits of a float32; overflow becomes infinity."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_float_to_half(builder, values[0], native=get_host_cpu().has_float16)

    return types.uint16(types.float32), emit


@intrinsic
def half_bits_to_float32(_context: Any, bits: Any) -> Any:
    """Return the float32 value of float16 bits."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_half_to_float(builder, values[0], native=get_host_cpu().has_float16)

    return types.float32(types.uint16), emit


def _int_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT.as_pointer())


@intrinsic
def atomic_load(_context: Any, address: Any) -> Any:
    """Return the number at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(_int_pointer(builder, values[0]), "acquire", 8)

    return types.int64(address), emit


@intrinsic
def atomic_store(_context: Any, address: Any, number: Any) -> Any:
    """Set the number at an address."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], _int_pointer(builder, values[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(address, types.int64), emit


@intrinsic
def atomic_fetch_add(_context: Any, address: Any, number: Any) -> Any:
    """Add to the number at an address; return the previous value."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _int_pointer(builder, values[0]), values[1], "acq_rel")

    return types.int64(address, types.int64), emit


@intrinsic
def atomic_compare_exchange(_context: Any, address: Any, old: Any, new: Any) -> Any:
    """Set the number at an address if it equals ``old``; return whether it did."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        place = _int_pointer(builder, values[0])
        pair = builder.cmpxchg(place, values[1], values[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(address, types.int64, types.int64), emit


@intrinsic
def pause_cpu(_context: Any) -> Any:
    """Tell the processor that this thread spins, so its core can do other work or rest."""

    def emit(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        machine = binding.get_default_triple().partition("-")[0]
        if machine == "x86_64":
            builder.call(_external_function(builder, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            builder.call(_external_function(builder, "llvm.aarch64.hint", ir.IntType(32)), [_YIELD])
        return context.get_dummy_value()

    return types.void(), emit


_YIELD = ir.Constant(ir.IntType(32), 1)


def _external_function(builder: Any, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), arguments)
    return cgutils.get_or_insert_function(builder.module, kind, name)


@intrinsic
def call_kernel(_context: Any, function: Any, first: Any, last: Any, arguments: Any) -> Any:
    """Call the kernel at an address."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(INT, [INT] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(function, first, last, arguments), emit


yield_thread = types.ExternalFunction("sched_yield", types.int32())
"""Let the operating system run another thread on this processor."""
