"""A kernel that an earlier process compiled is loaded without numba and LLVM."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.all

PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.kernels.lora import fused_lora_kernel, lora_expand_kernel, lora_shrink_kernel
from expertctl.engine.kernels.lora import gemm_kernel
from expertctl.engine.kernels.moe_layer import moe_gemm_kernel
from expertctl.engine.kernels.moe_layer import topk_routing_kernel
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import pack_matrix, unpack_matrix
from expertctl.engine.kernels.thread_pool import ThreadPool, load_pool_functions
from expertctl.settings import Home

told = []
use_kernel_cache(Home(Path(sys.argv[1])), notify=told.append)
kernels = [
    gemm_kernel(Scheme.FLOAT32),
    lora_shrink_kernel(Scheme.FLOAT32),
    lora_expand_kernel(Scheme.FLOAT32),
    fused_lora_kernel(Scheme.FLOAT32, Scheme.FLOAT32),
    topk_routing_kernel("softmax"),
    moe_gemm_kernel(Scheme.FLOAT32),
]
load_pool_functions()
numbers = np.arange(17 * 5, dtype=np.float32).reshape(17, 5)
assert np.array_equal(unpack_matrix(pack_matrix(numbers, Scheme.FLOAT32)), numbers)
print(json.dumps([len(told), [name for name in ("numba", "llvmlite") if name in sys.modules]]))
"""
LIBRARIES = ["numba", "llvmlite"]
ON_LINUX_X86 = sys.platform == "linux" and platform.machine() == "x86_64"


def test_kernels_made_of_other_functions_are_loaded_by_the_next_process(tmp_path: Path) -> None:
    assert run_process(tmp_path) == [1, LIBRARIES]
    needed = [] if ON_LINUX_X86 else LIBRARIES[1:]
    assert run_process(tmp_path) == [0, needed]


def run_process(home: Path) -> list[object]:
    """How often a process said that it compiles, and which libraries it imported."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", PROGRAM, str(home / "home")]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    found: list[object] = json.loads(output)
    return found
