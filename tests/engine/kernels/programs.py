"""Programs whose result shows what was done, how often, and whether in order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types

from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.memory import longs_at, words
from expertctl.engine.kernels.program import Program, ProgramBuilder

Numbers = np.ndarray[Any, Any]

_who = types.ExternalFunction("pthread_self", types.int64())


@dataclass(frozen=True)
class Mix:
    """``to[i] += from[any place] * factor + i``: an item too many or too early shows."""

    source: int
    to: int
    factor: int
    items: int
    portion: int

    def plainly(self, memory: Numbers) -> None:
        """Do what the kernel does, in numpy."""
        item = np.arange(self.items)
        found = memory[self.source][(item * 5 + self.factor) % memory.shape[1]]
        memory[self.to][: self.items] += found * self.factor + item


@cache
def mix_kernel() -> Kernel:
    """Return the kernel of `Mix`."""
    return compile_kernel("mix", _mix)


def _mix(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    source, to, length, factor = words(arguments, 4)
    found, out = longs_at(source, length), longs_at(to, length)
    for item in range(first, last):
        out[item] += found[(item * 5 + factor) % length] * factor + item


@cache
def who_kernel() -> Kernel:
    """Return the kernel that writes, for each item, the thread that did it."""
    return compile_kernel("who", _who_did)


def _who_did(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    (out,) = words(arguments, 1)
    for item in range(first, last):
        longs_at(out, last)[item] = _who()


@cache
def claim_kernel() -> Kernel:
    """Return the kernel that writes, for each item, how many were claimed together with it."""
    return compile_kernel("claim", _claimed)


def _claimed(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    (out,) = words(arguments, 1)
    for item in range(first, last):
        longs_at(out, last)[item] = last - first


@cache
def count_kernel() -> Kernel:
    """Return the kernel that adds one to each item."""
    return compile_kernel("count", _count)


def _count(first: int, last: int, arguments: int) -> None:  # pragma: no cover (compiled)
    (out,) = words(arguments, 1)
    for item in range(first, last):
        longs_at(out, last)[item] += 1


def mixing(mixes: Sequence[Mix], memory: Numbers) -> Program:
    """Return the program that does some mixes on memory int64 [arrays, length]."""
    builder = ProgramBuilder()
    for mix in mixes:
        source, to = memory[mix.source], memory[mix.to]
        addresses = [source.ctypes.data, to.ctypes.data, len(source), mix.factor]
        arguments = np.array(addresses, np.int64)
        builder.add(mix_kernel(), arguments, mix.items, portion=mix.portion)
    builder.keep(memory)
    return builder.build()


def on_one_array(kernel: Kernel, out: Numbers, *, operations: int = 1, portion: int = 1) -> Program:
    """Return the program that does each item of an int64 array, again and again."""
    builder = ProgramBuilder()
    for _ in range(operations):
        builder.add(kernel, np.array([out.ctypes.data], np.int64), len(out), portion=portion)
    builder.keep(out)
    return builder.build()
