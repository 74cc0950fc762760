"""A kernel that an earlier process compiled is loaded, whatever functions it is made of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.all

PROGRAM = """
import json, sys
from pathlib import Path
from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.kernels.lora import fused_lora_kernel, lora_expand_kernel, lora_shrink_kernel
from expertctl.engine.kernels.lora import gemm_kernel
from expertctl.engine.kernels.moe_gemm import moe_gemm_kernel
from expertctl.engine.kernels.moe_routing import topk_routing_kernel
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.settings import Home

use_kernel_cache(Home(Path(sys.argv[1])))
kernels = [
    gemm_kernel(Scheme.FLOAT32),
    lora_shrink_kernel(Scheme.FLOAT32),
    lora_expand_kernel(Scheme.FLOAT32),
    fused_lora_kernel(Scheme.FLOAT32, Scheme.FLOAT32),
    topk_routing_kernel("softmax"),
    moe_gemm_kernel(Scheme.FLOAT32),
]
print(json.dumps({kernel.name: kernel._code.cache_hits for kernel in kernels}))
"""


def test_kernels_made_of_other_functions_are_loaded_by_the_next_process(tmp_path: Path) -> None:
    compiling, loading = (hits_of_a_process(tmp_path) for _ in range(2))
    assert set(compiling.values()) == {0}
    assert set(loading.values()) == {1}
    assert len(loading) == 6


def hits_of_a_process(home: Path) -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", PROGRAM, str(home / "home")]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    found: dict[str, int] = json.loads(output)
    return found
