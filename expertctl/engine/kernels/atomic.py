"""Numbers that several threads change at once, and how a thread waits, in compiled code.

Addresses are of int64 at multiples of eight. A thread that reads a number sees all that the thread
that stored it had written before.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INT = ir.IntType(64)
_BYTES = 8


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _INT.as_pointer())


@intrinsic
def read_now(_context: Any, address: Any) -> Any:
    """Return the number at an address."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(_place(builder, values[0]), "acquire", _BYTES)

    return types.int64(address), emit


@intrinsic
def write_now(_context: Any, address: Any, number: Any) -> Any:
    """Set the number at an address."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.store_atomic(values[1], _place(builder, values[0]), "release", _BYTES)
        return context.get_dummy_value()

    return types.void(address, types.int64), emit


@intrinsic
def add_now(_context: Any, address: Any, number: Any) -> Any:
    """Add to the number at an address; return what it was."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _place(builder, values[0]), values[1], "acq_rel")

    return types.int64(address, types.int64), emit


@intrinsic
def replace_now(_context: Any, address: Any, old: Any, new: Any) -> Any:
    """Set the number at an address if it is ``old``; return whether it was."""

    def emit(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        place = _place(builder, values[0])
        pair = builder.cmpxchg(place, values[1], values[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(address, types.int64, types.int64), emit


@intrinsic
def breathe(_context: Any) -> Any:
    """Tell the processor that this thread only waits, so its core can serve another or rest."""

    def emit(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        machine = binding.get_default_triple().partition("-")[0]
        if machine == "x86_64":
            builder.call(_function(builder, "llvm.x86.sse2.pause"), [])
        elif machine in ("aarch64", "arm64"):
            builder.call(_function(builder, "llvm.aarch64.hint", ir.IntType(32)), [_YIELD])
        return context.get_dummy_value()

    return types.void(), emit


_YIELD = ir.Constant(ir.IntType(32), 1)


def _function(builder: Any, name: str, *arguments: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), arguments)
    return cgutils.get_or_insert_function(builder.module, kind, name)


@intrinsic
def call_at(_context: Any, function: Any, first: Any, last: Any, arguments: Any) -> Any:
    """Call the kernel that is at an address."""

    def emit(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(function, first, last, arguments), emit


give_way = types.ExternalFunction("sched_yield", types.int32())
"""Let the system run another thread on this processor."""
