"""Steps and prompts on a CUDA device: against its memory bandwidth, transformers and plans.

The base has the shape of Qwen3-0.6B or Qwen3-4B with random weights in bfloat16. Plans are
different bf16 rank-16 LoRAs on all seven projections. A step writes one token for each row; the
bandwidth is that of a copy within the device, bytes read and written counted.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from expertctl.engine.torch.devices import get_device_name, is_cuda_available
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.weights import BaseWeights
from expertctl.package.model_config import ModelConfig

SHAPES = ("qwen3-0.6b", "qwen3-4b")
RANK, EXPERTS, ROWS = 16, 10, 16
STEPS, CONTEXT, PROMPT = 32, 128, 512
CAPACITY = PROMPT + 64
_DTYPE = torch.bfloat16
_COPY_BYTES = 4 << 30
"""Bytes of the copy that measures the bandwidth: many times the caches."""


def measure(rounds: int) -> list[Row]:
    """Measure every shape on the device of this machine, if it has one."""
    if not is_cuda_available():
        row = make_absent_row(
            "decode, CUDA", rival="copy within the device", install="there is no device"
        )
        return [replace(row, ok=None)]  # no target is missed where there is none
    return [row for shape in SHAPES for row in _measure_shape(shape, rounds)]


def _measure_shape(shape: str, rounds: int) -> Iterator[Row]:
    config, device = load_shape_config(shape), torch.device("cuda")
    weights = make_random_weights(config, device)
    decoder = CudaGraphDecoder(config, weights)
    plans = [_make_plan(config, device, [seed]) for seed in range(ROWS)]
    runs: dict[str, Callable[[], float]] = {
        "bandwidth": partial(_copy_memory, device),
        "base": partial(_decode, decoder, [{}]),
        "one": partial(_decode, decoder, plans[:1]),
        "ten": partial(_decode, decoder, [_make_plan(config, device, range(EXPERTS))]),
        "rows": partial(_decode, decoder, [{}] * ROWS),
        "plans": partial(_decode, decoder, plans),
        "prompt": partial(_read_prompt, decoder),
    }
    seconds = take_turns(runs, rounds=rounds)
    decoder.close()
    rate = 2 * _COPY_BYTES / statistics.median(seconds["bandwidth"])
    yield _compare_with_bandwidth(shape, seconds["base"], rate=rate, nbytes=weights.nbytes)
    cases = (("one", "base", 1, 0.9), ("ten", "base", 1, 1 / 1.3), ("plans", "rows", ROWS, 0.7))
    for ours, theirs, rows, target in cases:
        yield compare_rates(
            f"{shape} bf16, {_CASE_LABELS[ours]}", seconds[ours], seconds[theirs],
            work=(STEPS * rows, STEPS * rows), rival=_CASE_LABELS[theirs], unit="tok/s",
            target=f">= {target:.2f}",
        )  # fmt: skip
    prompt = statistics.median(seconds["prompt"])
    flops = 2 * PROMPT * sum(out * into for out, into in config.linear_shapes().values())
    yield Row(
        f"{shape} bf16, prompt of {PROMPT}", round(PROMPT / prompt, 1), "none", None, "tok/s",
        "higher", None, None, note=f"{flops / prompt / 1e12:.0f} TFLOP/s in linear layers",
    )  # fmt: skip


_CASE_LABELS = {
    "base": "base alone, 1 row",
    "one": "1 expert, 1 row",
    "ten": f"{EXPERTS} experts, 1 row",
    "rows": f"base alone, {ROWS} rows",
    "plans": f"{ROWS} plans, {ROWS} rows",
}


def make_random_weights(config: ModelConfig, device: torch.device) -> BaseWeights:
    """Return random weights of a base on a device; their numbers keep activations small."""
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape, dtype=_DTYPE, device=device) * 0.02 + (len(shape) == 1)
        for name, shape in config.tensor_shapes().items()
    }
    return BaseWeights(tensors, _DTYPE, device)


def _make_plan(config: ModelConfig, device: torch.device, seeds: Sequence[int]) -> TorchDeltas:
    form = CompileSpec(config.linear_shapes(), config.hidden_size, TorchPlacement(device.type))
    experts = [_make_expert(config, device, seed) for seed in seeds]
    return fold_plan(experts, form).compile().torch_deltas


def _make_expert(config: ModelConfig, device: torch.device, seed: int) -> WeightedAdapter:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> FloatArray:
        numbers = torch.randn(shape, generator=generator, device=device)
        return to_array((numbers * 0.01).to(_DTYPE))

    modules = {
        module: (LoraTensors(draw(RANK, into), draw(out, RANK), 2.0),)
        for module, (out, into) in config.linear_shapes().items()
    }
    return WeightedAdapter(LoadedAdapter(f"bench/lora-{seed}@1.0.0", modules, (), 1, 0))


def _decode(decoder: CudaGraphDecoder, plans: Sequence[TorchDeltas]) -> float:
    """Return the seconds of `STEPS` steps; graphs are captured and plans stacked before."""
    decoder.free_buffers()  # or slots would stay as large as those of the largest plan so far
    arena = _make_kv_cache(decoder, len(plans))
    rows = [arena.get_row(number) for number in range(len(plans))]
    for row in rows:
        decoder.prefill(range(CONTEXT), row)
    for _ in range(3):
        decoder.step([GraphStepRow(7, row, plan) for row, plan in zip(rows, plans, strict=True)])
    torch.cuda.synchronize()
    started = time.perf_counter()
    for token in range(STEPS):
        decoder.step(
            [GraphStepRow(token, row, plan) for row, plan in zip(rows, plans, strict=True)]
        )
    return time.perf_counter() - started


def _read_prompt(decoder: CudaGraphDecoder) -> float:
    row = _make_kv_cache(decoder, 1).get_row(0)
    torch.cuda.synchronize()
    started = time.perf_counter()
    decoder.prefill(range(PROMPT), row)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _make_kv_cache(decoder: CudaGraphDecoder, rows: int) -> StaticKVCache:
    return StaticKVCache(
        decoder.config, rows=rows, capacity=CAPACITY, dtype=_DTYPE, device=decoder.device
    )


def _copy_memory(device: torch.device) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _compare_with_bandwidth(
    shape: str, seconds: Sequence[float], *, rate: float, nbytes: int
) -> Row:
    """Compare the bytes of the weights that steps read in a second with those of a copy."""
    rates = sorted(STEPS * nbytes / taken for taken in seconds)
    ours = statistics.median(rates)
    low, high = rates[len(rates) // 4], rates[-1 - len(rates) // 4]
    tokens = STEPS / statistics.median(seconds)
    row = Row(
        f"{shape} bf16, {_CASE_LABELS['base']}", round(ours / 1e9, 1), "copy within the device",
        round(rate / 1e9, 1), "GB/s", "higher", round(ours / rate, 3),
        (round(low / rate, 3), round(high / rate, 3)),
    )  # fmt: skip
    return replace(judge(row, ">= 0.7"), note=f"{tokens:.0f} tok/s; {get_device_name()}")


if __name__ == "__main__":
    main("cuda", measure, rounds=5)
