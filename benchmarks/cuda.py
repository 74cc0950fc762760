"""Steps and prompts on a CUDA device: against its memory bandwidth, base alone and plans.

The base has the shape of Qwen3-0.6B or Qwen3-4B with random weights in bfloat16. Plans are
different bf16 rank-16 LoRAs on all seven projections. A step generates one token for each row; the
bandwidth is that of a copy within the device, counting bytes read and written. The device of a
workload is CUDA only by default: the same code runs on a processor.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.harness import Row, compare_rates, judge, main, make_absent_row, take_turns
from expertctl.engine.adapters.compile import (
    CompileSpec,
    TorchPlacement,
    WeightedAdapter,
    fold_plan,
)
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import LoraTensors
from expertctl.engine.arrays import FloatArray
from expertctl.engine.bench_subject import load_shape_config
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.devices import CUDA, get_device_name, is_cuda_available
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import ModelConfig

SHAPES = ("qwen3-0.6b", "qwen3-4b")
RANK, EXPERTS, ROWS = 16, 10, 16
_DTYPE = torch.bfloat16
_SPARE_TOKENS = 64
"""KV cache capacity of a sequence beyond its prompt, in tokens."""
RunSeconds = dict[str, list[float]]
"""The seconds of each turn, by the name of the workload."""


@dataclass(frozen=True, slots=True)
class CudaWorkload:
    """A base with random weights, its device, and the amount of work to measure."""

    name: str
    config: ModelConfig
    device: torch.device = CUDA
    steps: int = 32
    """Tokens that each row decodes after its context."""
    context: int = 128
    prompt: int = 512
    copy_bytes: int = 4 << 30
    """Bytes of the copy that measures the bandwidth: many times the size of the caches."""

    @property
    def capacity(self) -> int:
        """KV cache capacity of a row, in tokens."""
        return self.prompt + _SPARE_TOKENS


def measure(rounds: int) -> list[Row]:
    """Measure every shape on the device of this machine, if it has one."""
    if not is_cuda_available():
        row = make_absent_row(
            "decode, CUDA", rival="copy within the device", install="there is no device"
        )
        return [replace(row, ok=None)]  # no target is missed where there is none
    workloads = [CudaWorkload(shape, load_shape_config(shape)) for shape in SHAPES]
    return [row for workload in workloads for row in measure_workload(workload, rounds)]


def measure_workload(workload: CudaWorkload, rounds: int) -> Iterator[Row]:
    """Measure steps and prompts of one base, with and without plans."""
    config, device = workload.config, workload.device
    weights = make_random_weights(config, device)
    decoder = CudaGraphDecoder(config, weights)
    experts = [make_random_expert(config, seed, device=device) for seed in range(ROWS)]
    plans = [compile_plan(config, [expert], device) for expert in experts]
    ten = compile_plan(config, experts[:EXPERTS], device)
    runs: dict[str, Callable[[], float]] = {
        "bandwidth": partial(_copy_memory, workload),
        "base": partial(_decode, workload, decoder, [{}]),
        "one": partial(_decode, workload, decoder, plans[:1]),
        "ten": partial(_decode, workload, decoder, [ten]),
        "rows": partial(_decode, workload, decoder, [{}] * ROWS),
        "plans": partial(_decode, workload, decoder, plans),
        "prompt": partial(_read_prompt, workload, decoder, {}),
        "prompt, one": partial(_read_prompt, workload, decoder, plans[0]),
        "prompt, ten": partial(_read_prompt, workload, decoder, ten),
    }
    seconds = take_turns(runs, rounds=rounds)
    decoder.close()
    yield _compare_with_bandwidth(workload, seconds, nbytes=weights.nbytes)
    yield from _compare_plans(workload, seconds)
    yield from _compare_prompts(workload, seconds)


_CASE_LABELS = {
    "base": "base alone, 1 row",
    "one": "1 expert, 1 row",
    "ten": f"{EXPERTS} experts, 1 row",
    "rows": f"base alone, {ROWS} rows",
    "plans": f"{ROWS} plans, {ROWS} rows",
}


def make_random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype = _DTYPE
) -> BaseWeights:
    """Return random weights of a base on a device, scaled so that activations stay small.

    Matrices have the dtype, norms are float32, as in a base that is loaded from files.
    """
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape, dtype=dtype, device=device) * 0.02
        if len(shape) == 2
        else 1 + 0.02 * torch.randn(shape, device=device)
        for name, shape in config.tensor_shapes().items()
    }
    return BaseWeights(tensors, dtype, device)


def compile_plan(
    config: ModelConfig, experts: Sequence[WeightedAdapter], device: torch.device
) -> TorchDeltas:
    """Return the plan of a chain of experts, on a device."""
    spec = CompileSpec(config.linear_shapes(), config.hidden_size, TorchPlacement(device.type))
    return fold_plan(experts, spec).compile().torch_deltas


def make_random_expert(config: ModelConfig, seed: int, *, device: torch.device) -> WeightedAdapter:
    """Return a LoRA in bfloat16 on all projections, drawn on a device."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> FloatArray:
        numbers = torch.randn(shape, generator=generator, device=device)
        return to_array((numbers * 0.01).to(_DTYPE))

    modules = {
        module: (LoraTensors(draw(RANK, into), draw(out, RANK), 2.0),)
        for module, (out, into) in config.linear_shapes().items()
    }
    return WeightedAdapter(LoadedAdapter(f"bench/lora-{seed}@1.0.0", modules, (), 1, 0))


def _decode(
    workload: CudaWorkload, decoder: CudaGraphDecoder, plans: Sequence[TorchDeltas]
) -> float:
    """Return the seconds of all steps; graphs are captured and plans stacked beforehand."""
    decoder.free_buffers()  # or slots would stay as large as those of the largest plan so far
    arena = _make_kv_cache(workload, len(plans))
    rows = [arena.get_row(number) for number in range(len(plans))]
    for row in rows:
        decoder.prefill(_make_ids(workload, workload.context), row)
    for _ in range(3):
        decoder.step([GraphStepRow(7, row, plan) for row, plan in zip(rows, plans, strict=True)])
    _synchronize(workload)
    started = time.perf_counter()
    for token in _make_ids(workload, workload.steps):
        decoder.step(
            [GraphStepRow(token, row, plan) for row, plan in zip(rows, plans, strict=True)]
        )
    return time.perf_counter() - started


def _read_prompt(workload: CudaWorkload, decoder: CudaGraphDecoder, plan: TorchDeltas) -> float:
    row = _make_kv_cache(workload, 1).get_row(0)
    _synchronize(workload)
    started = time.perf_counter()
    decoder.prefill(_make_ids(workload, workload.prompt), row, plan)
    _synchronize(workload)
    return time.perf_counter() - started


def _make_ids(workload: CudaWorkload, count: int) -> list[int]:
    return [number % workload.config.vocab_size for number in range(count)]


def _make_kv_cache(workload: CudaWorkload, rows: int) -> StaticKVCache:
    return StaticKVCache(
        workload.config,
        rows=rows,
        capacity=workload.capacity,
        dtype=_DTYPE,
        device=workload.device,
    )


def _copy_memory(workload: CudaWorkload) -> float:
    source = torch.empty(workload.copy_bytes, dtype=torch.uint8, device=workload.device)
    target = torch.empty_like(source)
    target.copy_(source)
    _synchronize(workload)
    started = time.perf_counter()
    target.copy_(source)
    _synchronize(workload)
    return time.perf_counter() - started


def _synchronize(workload: CudaWorkload) -> None:
    if workload.device.type == "cuda":
        torch.cuda.synchronize(workload.device)


def _compare_with_bandwidth(workload: CudaWorkload, seconds: RunSeconds, *, nbytes: int) -> Row:
    """Compare the rate at which steps read weights with that of a copy, in bytes per second."""
    rate = 2 * workload.copy_bytes / statistics.median(seconds["bandwidth"])
    rates = sorted(workload.steps * nbytes / taken for taken in seconds["base"])
    ours = statistics.median(rates)
    low, high = rates[len(rates) // 4], rates[-1 - len(rates) // 4]
    tokens = workload.steps / statistics.median(seconds["base"])
    row = Row(
        f"{workload.name} bf16, {_CASE_LABELS['base']}", round(ours / 1e9, 1),
        "copy within the device", round(rate / 1e9, 1), "GB/s", "higher", round(ours / rate, 3),
        (round(low / rate, 3), round(high / rate, 3)),
    )  # fmt: skip
    about = get_device_name() if workload.device.type == "cuda" else str(workload.device)
    return replace(judge(row, ">= 0.7"), note=f"{tokens:.0f} tok/s; {about}")


def _compare_plans(workload: CudaWorkload, seconds: RunSeconds) -> Iterator[Row]:
    """Compare steps with plans with steps of the base alone."""
    cases = (("one", "base", 1, 0.9), ("ten", "base", 1, 1 / 1.3), ("plans", "rows", ROWS, 0.7))
    for ours, theirs, rows, target in cases:
        yield compare_rates(
            f"{workload.name} bf16, {_CASE_LABELS[ours]}", seconds[ours], seconds[theirs],
            work=(workload.steps * rows, workload.steps * rows), rival=_CASE_LABELS[theirs],
            unit="tok/s", target=f">= {target:.2f}",
        )  # fmt: skip


def _compare_prompts(workload: CudaWorkload, seconds: RunSeconds) -> Iterator[Row]:
    """Report the speed of prompts, and compare prompts with plans with those of the base alone."""
    config, length = workload.config, workload.prompt
    case = f"{workload.name} bf16, prompt of {length}"
    prompt = statistics.median(seconds["prompt"])
    flops = 2 * length * sum(out * into for out, into in config.linear_shapes().values())
    yield Row(
        case, round(length / prompt, 1), "none", None, "tok/s", "higher", None, None,
        note=f"{flops / prompt / 1e12:.0f} TFLOP/s in linear layers",
    )  # fmt: skip
    for name, experts in (("prompt, one", "1 expert"), ("prompt, ten", f"{EXPERTS} experts")):
        yield compare_rates(
            f"{case}, {experts}", seconds[name], seconds["prompt"], work=(length, length),
            rival="base alone", unit="tok/s",
        )  # fmt: skip


if __name__ == "__main__":
    main("cuda", measure, rounds=5)
