"""The time that commands take to start, against a typer program and ``import torch``.

Also the time to load compiled kernels, against ``import numba``; and the cost of a process that
generates one token on a base of 135 million parameters, against llama.cpp.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import engines
from benchmarks.harness import Row, Run, compare, compare_times, judge, main, make_absent_row
from benchmarks.small_llama import BASE_NAME, GGUF_NAME

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

from expertctl.engine.kernels.jit import load_kernels, use_kernel_cache
from expertctl.engine.kernels import layer_operations, lora, packed_matrix, quantisation
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import load_pool_functions
from expertctl.settings import Home

use_kernel_cache(Home(Path(os.environ["EXPERT_HOME"])))
weights, numbers = Scheme.BFLOAT16, Scheme.FLOAT16
load_kernels(
    [
        packed_matrix.embedding_kernel(weights),
        quantisation.activation_kernel(weights),
        lora.gemm_kernel(weights),
        layer_operations.rms_norm_kernel(),
        layer_operations.rope_table_kernel(),
        layer_operations.rope_kv_write_kernel(numbers),
        layer_operations.prefill_attention_kernel(numbers),
        layer_operations.decode_attention_kernel(numbers),
        layer_operations.swiglu_kernel(),
    ]
)
load_pool_functions()
"""
PROMPT = "Sort these numbers: 41, 17, 23, 15"
LLAMA_PROGRAM = """
import sys

import llama_cpp

path, prompt = sys.argv[1:]
model = llama_cpp.Llama(path, n_ctx=512, verbose=False)
tokens = model.tokenize(prompt.encode(), add_bos=False)
print(len(tokens), next(model.generate(tokens, temp=0.0)))
"""
WRITE_PROGRAM = """
import sys
from pathlib import Path

from benchmarks.small_llama import write_small_llama

write_small_llama(Path(sys.argv[1]))
"""
MEMORY_RATIO, MEMORY_BYTES = 1.15, 120_000_000
"""The memory limit of a process: a multiple of its weights, plus a number of bytes."""


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
            *_measure_small_llama(Path(folder), home, rounds),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _ProcessCost:
    """The cost of a process: seconds, processor seconds, and its peak resident set in bytes."""

    wall: float
    processor: float
    peak: int
    output: str


def _measure_small_llama(folder: Path, home: dict[str, str], rounds: int) -> Sequence[Row]:
    """Measure processes that generate one greedy token with the same weights, in turns."""
    case, rival = "one token of a 135M Llama, new process", "llama-cpp-python"
    if not engines.has_llama():
        return [make_absent_row(case, rival=rival, install=engines.LLAMA_INSTALL)]
    environment = _make_environment(home)
    # in a process of its own: the peak of a process includes that of its parent before `exec`
    _read_output([sys.executable, "-c", WRITE_PROGRAM, str(folder)], home)
    base, gguf = folder / BASE_NAME, folder / GGUF_NAME
    _read_output([*EXPERTCTL, "base", "add", str(base), "--name", BASE_NAME], home)
    options = ["--base", BASE_NAME, "--no-experts", "--greedy", "-n", "1", "--json"]
    commands = {
        "ours": [*EXPERTCTL, "run", *options, PROMPT],
        "theirs": [sys.executable, "-c", LLAMA_PROGRAM, str(gguf), PROMPT],
    }
    costs: dict[str, list[_ProcessCost]] = {name: [] for name in commands}
    for number in range(-1, rounds):  # the first round compiles kernels and fills the page cache
        for name in sorted(commands, reverse=bool(number % 2)):
            cost = _run_process(commands[name], environment)
            if number >= 0:
                costs[name].append(cost)
    mine, other = costs["ours"], costs["theirs"]
    written = json.loads(mine[0].output)["tokens"]
    same = [int(word) for word in other[0].output.split()] == [written["prompt"], *written["ids"]]
    times = {
        "wall": ([cost.wall for cost in mine], [cost.wall for cost in other]),
        "processor": ([cost.processor for cost in mine], [cost.processor for cost in other]),
    }
    rows = [
        compare_times(f"{case}: {what} time", *both, steps=1, rival=rival, target="<= 1.2")
        for what, both in times.items()
    ]
    note = "the same token" if same else f"other tokens: {written}, {other[0].output}"
    return [*(replace(row, note=note) for row in rows), _compare_memory(case, mine, other, base)]


def _compare_memory(
    case: str, mine: Sequence[_ProcessCost], other: Sequence[_ProcessCost], base: Path
) -> Row:
    """Compare our peak with the limit that the size of the weights sets."""
    weights = (base / "model.safetensors").stat().st_size
    bound = MEMORY_RATIO * weights + MEMORY_BYTES
    peak = statistics.median(cost.peak for cost in mine)
    theirs = statistics.median(cost.peak for cost in other)
    row = Row(
        case=f"{case}: peak memory",
        ours=round(peak / 1e6, 1),
        rival=f"{MEMORY_RATIO} x weights + {MEMORY_BYTES // 10**6} MB",
        theirs=round(bound / 1e6, 1),
        unit="MB",
        better="lower",
        ratio=round(peak / bound, 3),
        spread=None,
        note=f"llama.cpp: {theirs / 1e6:.1f} MB, with the mapped file",
    )
    return judge(row, "<= 1")


def _run_process(command: list[str], environment: dict[str, str]) -> _ProcessCost:
    """Run a process; `os.wait4` reports the resources of this process alone."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, f"{command} failed"
        output.seek(0)
        text = output.read().decode()
    return _ProcessCost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, text)


EXPERTCTL = [str(Path(sys.executable).with_name("expertctl"))]


def _measure_overhead(home: dict[str, str]) -> float:
    """Return the seconds of a run, excluding prefill and decode."""
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


def _make_environment(home: dict[str, str]) -> dict[str, str]:
    """Return the environment of a user: modules are compiled once, not in every process."""
    kept = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **home}


def _read_output(command: list[str], home: dict[str, str]) -> bytes:
    environment = _make_environment(home)
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main("startup", measure, rounds=15)
