"""Programs whose result shows what was done, how often, and whether in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from expertctl.engine.kernels.compiled.memory import int64_view, load_int64s
from expertctl.engine.kernels.jit import Kernel, load_kernel
from expertctl.engine.kernels.program import Program, ProgramBuilder

Numbers = np.ndarray[Any, Any]

_pthread_self = types.ExternalFunction("pthread_self", types.int64())


@dataclass(frozen=True)
class MixOperation:
    """``to[i] += from[any place] * factor + i``: an item too many or too early shows."""

    source: int
    to: int
    factor: int
    items: int
    portion: int

    def compute(self, memory: Numbers) -> None:
        """Do what the kernel does, in numpy."""
        item = np.arange(self.items)
        found = memory[self.source][(item * 5 + self.factor) % memory.shape[1]]
        memory[self.to][: self.items] += found * self.factor + item


@cache
def make_mix_kernel() -> Kernel:
    """Return the kernel of `MixOperation`."""
    return load_kernel("mix", __name__, "_mix")


def _mix(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    source, to, length, factor = load_int64s(arguments, 4)
    found, out = int64_view(source, length), int64_view(to, length)
    for item in range(first, last):
        out[item] += found[(item * 5 + factor) % length] * factor + item


@cache
def make_thread_kernel() -> Kernel:
    """Return the kernel that writes, for each item, the thread that did it."""
    return load_kernel("who", __name__, "_write_thread")


def _write_thread(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    (out,) = load_int64s(arguments, 1)
    for item in range(first, last):
        int64_view(out, last)[item] = _pthread_self()


@cache
def make_claim_kernel() -> Kernel:
    """Return the kernel that writes, for each item, how many were claimed together with it."""
    return load_kernel("claim", __name__, "_write_claim_size")


def _write_claim_size(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    (out,) = load_int64s(arguments, 1)
    for item in range(first, last):
        int64_view(out, last)[item] = last - first


@cache
def make_count_kernel() -> Kernel:
    """Return the kernel that adds one to each item."""
    return load_kernel("count", __name__, "_count")


def _count(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    (out,) = load_int64s(arguments, 1)
    for item in range(first, last):
        int64_view(out, last)[item] += 1


def make_mix_program(mixes: Sequence[MixOperation], memory: Numbers) -> Program:
    """Return the program that does some mixes on memory int64 [arrays, length]."""
    builder = ProgramBuilder()
    for mix in mixes:
        source, to = memory[mix.source], memory[mix.to]
        addresses = [source.ctypes.data, to.ctypes.data, len(source), mix.factor]
        arguments = np.array(addresses, np.int64)
        builder.add(make_mix_kernel(), arguments, mix.items, portion=mix.portion)
    builder.keep_alive(memory)
    return builder.build()


def make_array_program(
    kernel: Kernel, out: Numbers, *, operations: int = 1, portion: int = 1
) -> Program:
    """Return the program that does each item of an int64 array, again and again."""
    builder = ProgramBuilder()
    for _ in range(operations):
        builder.add(kernel, np.array([out.ctypes.data], np.int64), len(out), portion=portion)
    builder.keep_alive(out)
    return builder.build()
