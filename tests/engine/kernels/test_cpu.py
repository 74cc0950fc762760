"""The processor, and what of it the kernels can do without."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.engine.kernels.cpu import host_cpu

PRODUCTS = """
import numpy as np
from expertctl.engine.kernels.cpu import host_cpu
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.multiply import multiply_arguments, multiply_items, multiply_kernel
from expertctl.engine.kernels.packed import pack, unpack
from expertctl.engine.kernels.rows import prepare_arguments, prepare_kernel, room_for_rows
from expertctl.engine.kernels.scheme import Scheme

cpu = host_cpu()
assert cpu.half and not (cpu.wide or cpu.bf16_dot or cpu.byte_dot), cpu
rng = np.random.default_rng(0)
for scheme in (Scheme.BFLOAT16, Scheme.INT8):
    matrix = pack(rng.standard_normal((70, 300)).astype(np.float32), scheme)
    given, out = aligned((3, 300), np.float32), aligned((3, 80), np.float32)
    given[...] = rng.standard_normal((3, 300))
    rows, count = room_for_rows(scheme, 3, 300), np.array([3], np.int64)
    arguments = prepare_arguments(rows=given, columns=300, prepared=rows)
    prepare_kernel(scheme)(0, 3, arguments.ctypes.data)
    arguments = multiply_arguments(matrix=matrix, rows=rows, out=out, tokens=count)
    multiply_kernel(scheme)(0, multiply_items(matrix), arguments.ctypes.data)
    wanted = given.astype(float) @ unpack(matrix).T
    assert abs(out[:, :70] - wanted).max() < 0.05 * wanted.std()
print(cpu.name)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the flags are read where Linux lists them")
def test_the_processor_can_do_what_linux_says_it_can() -> None:
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
    cpu = host_cpu()
    assert cpu.bf16_dot == ({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= flags)
    assert cpu.byte_dot == ({"avx512f", "avx512bw", "avx512vl", "avx512_vnni"} <= flags)


def test_a_plain_processor_has_neither_instruction() -> None:
    plain = host_cpu().plain()
    assert not plain.bf16_dot
    assert not plain.byte_dot
    assert (plain.name, plain.wide) == (host_cpu().name, host_cpu().wide)


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="a processor of x86")
def test_products_are_compiled_for_the_processor_that_numba_was_told() -> None:
    told = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        cwd=Path(__file__).parents[3],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "haswell\n"), done.stderr
