"""The processor, and what of it the kernels can do without."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.engine.kernels.compiled.compiler import get_host_cpu

pytestmark = pytest.mark.all

PRODUCTS = """
import numpy as np
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.lora import gemm_arguments, gemm_items, gemm_kernel
from expertctl.engine.kernels.packed_matrix import pack_matrix, unpack_matrix
from expertctl.engine.kernels.quantisation import (
    activation_arguments,
    activation_kernel,
    allocate_activations,
)
from expertctl.engine.kernels.packed_format import Scheme

cpu = get_host_cpu()
assert cpu.has_float16 and not (cpu.has_512_bit_registers or cpu.bf16_dot or cpu.byte_dot), cpu
rng = np.random.default_rng(0)
for scheme in (Scheme.BFLOAT16, Scheme.INT8, Scheme.INT5, Scheme.INT4):
    matrix = pack_matrix(rng.standard_normal((70, 300)).astype(np.float32), scheme)
    given, out = aligned_zeros((3, 300), np.float32), aligned_zeros((3, 80), np.float32)
    given[...] = rng.standard_normal((3, 300))
    rows, count = allocate_activations(scheme, 3, 300), np.array([3], np.int64)
    arguments = activation_arguments(rows=given, columns=300, prepared=rows)
    activation_kernel(scheme)(0, 3, arguments.ctypes.data)
    arguments = gemm_arguments(matrix=matrix, rows=rows, out=out, tokens=count)
    gemm_kernel(scheme)(0, gemm_items(matrix), arguments.ctypes.data)
    wanted = given.astype(float) @ unpack_matrix(matrix).T
    assert abs(out[:, :70] - wanted).max() < 0.05 * wanted.std()
print(cpu.name)
"""


COMPACT = """
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from tests.engine.kernels import test_routed_compact as compact

cpu = get_host_cpu()
assert not (cpu.has_512_bit_registers or cpu.bf16_dot), cpu
compact.test_what_is_packed_holds_every_number("heavy", 80, 32)
for tokens in (1, 3, 17):
    compact.test_products_have_the_bits_of_experts_that_are_not_compact(160, 272, tokens, False)
print(cpu.name)
"""


PLANS = """
from expertctl.engine.kernels.compiled.compiler import get_host_cpu
from expertctl.engine.kernels.packed_format import Scheme
from tests.engine.kernels import test_low_rank as plans

cpu = get_host_cpu()
assert not (cpu.has_512_bit_registers or cpu.bf16_dot or cpu.byte_dot), cpu
for scheme in (Scheme.FLOAT16, Scheme.INT8):
    some = plans.batch(scheme)
    plans.reduce(some)
    plans.assert_reduced(some)
    plans.assert_expanded(some, plans.expand(some))
print(cpu.name, cpu.has_float16)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the flags are read where Linux lists them")
def test_the_processor_can_do_what_linux_says_it_can() -> None:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
    cpu = get_host_cpu()
    assert cpu.bf16_dot == ({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= flags)
    assert cpu.byte_dot == ({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"} <= flags)
    assert cpu.short_dot == ("avx2" in flags)


def test_a_plain_processor_has_no_instruction_for_products() -> None:
    plain = get_host_cpu().without_dot_instructions()
    assert not plain.bf16_dot
    assert not plain.byte_dot
    assert not plain.short_dot
    assert (plain.name, plain.has_512_bit_registers) == (
        get_host_cpu().name,
        get_host_cpu().has_512_bit_registers,
    )


X86 = pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="of x86")
ROOT = Path(__file__).parents[3]


def said_where(name: str, features: str, *words: str) -> str:
    """What a process prints that compiles for a processor with these features."""
    told = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **told, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@X86
def test_products_are_compiled_for_the_processor_that_numba_was_told() -> None:
    assert said_where("haswell", "+avx,+avx2,+fma,+f16c", "-c", PRODUCTS) == "haswell\n"


@X86
@pytest.mark.all
def test_compact_experts_make_the_same_products_where_registers_are_narrow() -> None:
    assert said_where("haswell", "+avx,+avx2,+fma,+f16c", "-c", COMPACT) == "haswell\n"


@X86
@pytest.mark.all
def test_rows_with_plans_of_their_own_are_the_formula_without_any_instruction_of_ours() -> None:
    assert said_where("x86-64", "+sse2", "-c", PLANS) == "x86-64 False\n"


@X86
@pytest.mark.all
@pytest.mark.parametrize(
    ("name", "features"), [("haswell", "+avx,+avx2,+fma,+f16c"), ("x86-64", "+sse2")]
)
def test_a_batch_of_plans_is_decoded_on_lesser_processors(name: str, features: str) -> None:
    schemes = ["float16", "bfloat16", "int8"]
    said = said_where(name, features, "-m", "tests.engine.plain_program", *schemes)
    assert [line.split()[0] for line in said.splitlines()] == schemes
