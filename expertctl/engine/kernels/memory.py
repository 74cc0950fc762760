"""Reading memory by its address, in compiled code; and memory that begins where a vector does."""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic, register_jitable

from expertctl.engine.kernels.cpu import host_cpu
from expertctl.engine.kernels.halves import emit_narrowed, emit_widened
from expertctl.engine.kernels.lanes import VECTOR_BYTES

_INT = ir.IntType(64)


def aligned(shape: int | tuple[int, ...], dtype: Any) -> "np.ndarray[Any, Any]":
    """Return zeros whose first byte is at a multiple of 64."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + count].view(dtype).reshape(shape)


@intrinsic(prefer_literal=True)
def words(_context: Any, address: Any, count: Any) -> Any:
    """Return the ``count`` int64 that begin at an address, as a tuple."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("the number of words is a constant")
    number = count.literal_value

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _INT.as_pointer())
        found = [builder.load(builder.gep(pointer, [ir.Constant(_INT, k)])) for k in range(number)]
        return cgutils.pack_array(builder, found)

    return types.UniTuple(types.int64, number)(types.int64, count), emit


def _array_at(dtype: Any) -> Any:
    """Return what gives compiled code the array of a dtype that begins at an address."""
    kind = types.CPointer(dtype)

    @intrinsic
    def pointer(_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(kind))

        return kind(address), emit

    @register_jitable
    def array_at(address: int, length: int) -> Any:  # pragma: no cover - compiled
        return numba.carray(pointer(address), (length,))

    return array_at


floats_at = _array_at(types.float32)
ints_at = _array_at(types.int32)
halves_at = _array_at(types.uint16)
words_at = _array_at(types.uint32)
octets_at = _array_at(types.uint8)
bytes_at = _array_at(types.int8)
longs_at = _array_at(types.int64)


@intrinsic(prefer_literal=True)
def stack_floats(_context: Any, count: Any) -> Any:
    """Return the address of so many float32 on the stack of the calling kernel."""
    if not isinstance(count, types.IntegerLiteral):
        raise RequireLiteralValue("the room on the stack is a constant")
    kind = ir.ArrayType(ir.FloatType(), count.literal_value)

    def emit(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        with builder.goto_entry_block():
            room = builder.alloca(kind)
            room.align = VECTOR_BYTES
        return builder.ptrtoint(room, _INT)

    return types.int64(count), emit


@intrinsic
def copy_bytes(_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy so many bytes from one address to another; they may not overlap."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        places = [builder.inttoptr(value, ir.IntType(8).as_pointer()) for value in values[:2]]
        cgutils.raw_memcpy(builder, *places, values[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def float16_bits(_context: Any, number: Any) -> Any:
    """Return the bits of a float32 rounded to float16; what is too large becomes infinite."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_narrowed(builder, values[0], native=host_cpu().half)

    return types.uint16(types.float32), emit


@intrinsic
def float16_value(_context: Any, bits: Any) -> Any:
    """Return the float32 that the bits of a float16 stand for."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return emit_widened(builder, values[0], native=host_cpu().half)

    return types.float32(types.uint16), emit
