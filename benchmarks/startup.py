"""How long commands take to start, against a one-command typer program and ``import torch``.

And how long kernels that were compiled before take to load, against ``import numba``.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Row, Run, compare, main

TYPER_PROGRAM = """
import typer

app = typer.Typer()


@app.command()
def hello(name: str = "world") -> None:
    print(f"hello {name}")


app()
"""
KERNELS_PROGRAM = """
import os
from pathlib import Path

from expertctl.engine.kernels.jit import use_kernel_cache
from expertctl.engine.kernels import layer_operations, lora, packed_matrix, quantisation
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import load_pool_functions
from expertctl.settings import Home

use_kernel_cache(Home(Path(os.environ["EXPERT_HOME"])))
weights, numbers = Scheme.BFLOAT16, Scheme.FLOAT16
packed_matrix.embedding_kernel(weights)
quantisation.activation_kernel(weights)
lora.gemm_kernel(weights)
layer_operations.rms_norm_kernel()
layer_operations.rope_table_kernel()
layer_operations.rope_kv_write_kernel(numbers)
layer_operations.prefill_attention_kernel(numbers)
layer_operations.decode_attention_kernel(numbers)
layer_operations.swiglu_kernel()
load_pool_functions()
"""
PROMPT = "Sort these numbers: 41, 17, 23, 15"


def measure(rounds: int) -> Sequence[Row]:
    """Time ``--version``, ``list``, ``run`` and kernels as processes, on a home with the pack."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "hello.py")
        program.write_text(TYPER_PROGRAM)
        home = {"EXPERT_HOME": str(Path(folder, "home"))}
        _read_output([*EXPERTCTL, "run", PROMPT, "--json"], home)  # installs the starter pack
        typer = _make_process_run([sys.executable, str(program)], home)
        torch = _make_process_run([sys.executable, "-c", "import torch"], home)
        numba = _make_process_run([sys.executable, "-c", "import numba"], home)
        kernels = _make_process_run([sys.executable, "-c", KERNELS_PROGRAM], home)
        return [
            compare(
                "expertctl --version", _make_process_run([*EXPERTCTL, "--version"], home), typer,
                rival="one-command typer program", rounds=rounds, target="<= 1.2",
            ),
            compare(
                "expertctl list", _make_process_run([*EXPERTCTL, "list"], home), typer,
                rival="one-command typer program", rounds=rounds, target="<= 1.5",
            ),
            compare(
                "expertctl run, besides generating", lambda: _measure_overhead(home), torch,
                rival="python -c 'import torch'", rounds=rounds, target="<= 0.5",
            ),
            compare(
                "kernels that were compiled before", kernels, numba,
                rival="python -c 'import numba'", rounds=rounds, target="<= 0.8",
            ),
        ]  # fmt: skip


EXPERTCTL = [str(Path(sys.executable).with_name("expertctl"))]


def _measure_overhead(home: dict[str, str]) -> float:
    """Return the seconds of a run besides reading the prompt and writing the answer."""
    start = time.perf_counter()
    document = json.loads(_read_output([*EXPERTCTL, "run", PROMPT, "--json"], home))
    seconds = time.perf_counter() - start
    timings = document["timings_ms"]
    return float(seconds - (timings["prefill"] + timings["decode"]) / 1000)


def _make_process_run(command: list[str], home: dict[str, str]) -> Run:
    def run() -> float:
        start = time.perf_counter()
        _read_output(command, home)
        return time.perf_counter() - start

    return run


def _read_output(command: list[str], home: dict[str, str]) -> bytes:
    environment = {**os.environ, **home}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main("startup", measure, rounds=15)
