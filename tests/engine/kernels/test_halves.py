"""float16 without its instruction: every number has the bits that it has with it, and in numpy."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.compiled.llvm_math import emit_float_to_half, emit_half_to_float
from expertctl.engine.kernels.packed_format import LANES

Numbers = np.ndarray[Any, Any]
INT, SHORTS = ir.IntType(64), ir.VectorType(ir.IntType(16), LANES)
FLOATS = ir.VectorType(ir.FloatType(), LANES)
HALVES = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
ROOT = Path(__file__).parents[3]
PROGRAM = """
import numpy as np
import numba
from expertctl.engine.kernels.layer_operations import (
    prefill_attention_kernel,
    decode_attention_kernel,
)
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.layer_operations import rope_kv_write_kernel
from expertctl.engine.kernels.compiled.memory import float32_to_half_bits, half_bits_to_float32
from expertctl.engine.kernels.packed_format import Scheme

cpu, half = get_host_cpu(), Scheme.FLOAT16
assert not (cpu.has_512_bit_registers or cpu.has_float16 or cpu.bf16_dot or cpu.byte_dot), cpu

@numba.njit
def back(halves, out):
    for place in range(len(halves)):
        out[place] = float32_to_half_bits(half_bits_to_float32(halves[place]))

halves = np.arange(0x7C01, dtype=np.uint32).astype(np.uint16)
out = np.zeros_like(halves)
back(halves, out)
assert np.array_equal(out, halves)
kernels = (rope_kv_write_kernel, prefill_attention_kernel, decode_attention_kernel)
assert all(kernel(half).address for kernel in kernels)
print(cpu.name)
"""


def converting(emit: Callable[..., Any], given: ir.Type, wanted: ir.Type, native: bool) -> Any:
    """Compile what converts vectors from one address to another."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def convert(_context: Any, source: Any, target: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            pointers = zip(values, (given, wanted), strict=True)
            here, there = (builder.inttoptr(v, kind.as_pointer()) for v, kind in pointers)
            made = emit(builder, builder.load(here, align=2), native=native)
            builder.store(made, there, align=2)
            return ir.Constant(INT, 0)

        return types.int64(source, target), generate

    @numba.njit  # type: ignore[untyped-decorator]  # numba has no types
    def run(source: int, target: int, vectors: int, size: int, out_size: int) -> None:
        for vector in range(vectors):
            convert(source + vector * size, target + vector * out_size)

    return run


def widened(halves: Numbers, *, native: bool = False) -> Numbers:
    out = np.empty(len(halves), np.float32)
    run = converting(emit_half_to_float, SHORTS, FLOATS, native)
    run(halves.ctypes.data, out.ctypes.data, len(halves) // LANES, 2 * LANES, 4 * LANES)
    return out


def narrowed(floats: Numbers, *, native: bool = False) -> Numbers:
    out = np.empty(len(floats), np.uint16)
    run = converting(emit_float_to_half, FLOATS, SHORTS, native)
    run(floats.ctypes.data, out.ctypes.data, len(floats) // LANES, 4 * LANES, 2 * LANES)
    return out


def hard_floats() -> Numbers:
    """Every half, what lies between two and beside that, subnormal floats, and any bits."""
    exact = HALVES.view(np.float16).astype(np.float32)
    exact = exact[np.abs(exact) < 65504]
    ties = (exact + np.nextafter(exact.astype(np.float16), np.float16(np.inf))) / np.float32(2)
    ends = np.array([65504, 65519.996, 65520, 65536, np.inf, np.nan, 0, 1e-45, 2**-25], np.float32)
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32)
    near = [np.nextafter(ties, np.float32(end)) for end in (-np.inf, np.inf)]
    found = np.concatenate([exact, ties, *near, ends, -ends, drawn.view(np.float32)])
    return np.resize(found, -(-len(found) // LANES) * LANES)


def test_every_half_becomes_the_float_that_it_is() -> None:
    wanted = HALVES.view(np.float16).astype(np.float32)
    found = widened(HALVES)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(found.view(np.uint32)[numbers], wanted.view(np.uint32)[numbers])
    assert np.isnan(found[~numbers]).all()


def test_floats_become_the_half_that_numpy_makes_of_them() -> None:
    floats = hard_floats()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wanted = floats.astype(np.float16)
    found, numbers = narrowed(floats), ~np.isnan(wanted)
    assert np.array_equal(found[numbers], wanted.view(np.uint16)[numbers])
    assert np.isnan(found.view(np.float16)[~numbers]).all()


@pytest.mark.skipif(not get_host_cpu().has_float16, reason="no instruction to compare with")
def test_integers_do_what_the_instruction_does_with_what_is_no_number_too() -> None:
    floats = hard_floats()
    assert np.array_equal(narrowed(floats), narrowed(floats, native=True))
    found, wanted = widened(HALVES), widened(HALVES, native=True)
    assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.all
@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="a processor of x86")
def test_pages_of_float16_are_for_processors_without_its_instruction_too() -> None:
    told = {"NUMBA_CPU_NAME": "x86-64-v2", "NUMBA_CPU_FEATURES": "+sse4.2,+popcnt"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | told, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "x86-64-v2\n"), done.stderr
