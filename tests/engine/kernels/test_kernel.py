"""A kernel that an earlier process compiled is loaded, whatever functions it is made of."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from pathlib import Path
from expertctl.engine.kernels.compiled import compiled_cache
from expertctl.engine.kernels.low_rank import adapted_kernel, expand_kernel, reduce_kernel
from expertctl.engine.kernels.multiply import multiply_kernel
from expertctl.engine.kernels.routed import routed_kernel, routed_merge_kernel
from expertctl.engine.kernels.routing import route_kernel
from expertctl.engine.kernels.scheme import Scheme
from expertctl.settings import Home

compiled_cache(Home(Path(sys.argv[1])))
kernels = [
    multiply_kernel(Scheme.FLOAT32),
    reduce_kernel(Scheme.FLOAT32),
    expand_kernel(Scheme.FLOAT32),
    adapted_kernel(Scheme.FLOAT32, Scheme.FLOAT32),
    route_kernel("softmax"),
    routed_kernel(Scheme.FLOAT32),
    routed_merge_kernel(Scheme.FLOAT32),
]
print(json.dumps({kernel.name: kernel._code.cache_hits for kernel in kernels}))
"""


def test_kernels_made_of_other_functions_are_loaded_by_the_next_process(tmp_path: Path) -> None:
    compiling, loading = (hits_of_a_process(tmp_path) for _ in range(2))
    assert set(compiling.values()) == {0}
    assert set(loading.values()) == {1}
    assert len(loading) == 7


def hits_of_a_process(home: Path) -> dict[str, int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", PROGRAM, str(home / "home")]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout
    found: dict[str, int] = json.loads(output)
    return found
