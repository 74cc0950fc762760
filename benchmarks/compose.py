"""What experts cost to decode with, beside the base alone and beside PEFT, and to compile.

Different bf16 rank-16 LoRAs on all seven projections of a bf16 base in the shape of Qwen3-0.6B,
random weights. Below, ten experts of three kinds on a float32 base, for torch: what compiling them
costs, and decoding a mixed chain beside ten LoRAs. There the vocabulary is small, since no expert
touches it, and IA³ scales every projection, which is more than PEFT's own choice. All experts and
gains are in memory before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.engine_process import EngineProcess
from benchmarks.expert_engines import PEFT_INSTALL, Together, has_peft, ours, peft
from benchmarks.expert_engines import TOKENS as STEPS
from benchmarks.harness import (
    Row,
    Run,
    Seconds,
    absent,
    compare,
    compare_rates,
    compare_times,
    main,
    take_turns,
    timed,
)
from benchmarks.inputs import HIDDEN, RANK, base_config, shapes
from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.base_weights import BaseWeights
from expertctl.engine.chain import Step
from expertctl.engine.compose import CompiledPlan, Form, Weighted, compose
from expertctl.engine.decoder import Decoder
from expertctl.engine.dora import DoraTensors
from expertctl.engine.ia3 import Ia3Tensors
from expertctl.engine.kv_cache import KVCache
from expertctl.engine.lora import LoraTensors
from expertctl.engine.memory import allocate

TARGETS = {1: "<= 1.05", 2: "<= 1.08", 5: "<= 1.15", 10: "<= 1.25"}
"""Experts, and how many times as long a token may take as with the base alone."""
AGAINST_PEFT, WORKERS = ">= 3", 2
VOCAB = 1024
PROMPT, TOKENS = 16, 4
"""Tokens that are read before, and steps of decoding that are measured at a time."""
WEIGHT = 0.8
CPU = torch.device("cpu")
FORM = Form(shapes(), HIDDEN, torch.float32, CPU)
Make = Callable[[str], Step]


def measure(rounds: int) -> Sequence[Row]:
    """Decode with more and more experts, then compile and decode ten of three kinds."""
    return [*_experts(rounds), *_kinds(rounds)]


def _experts(rounds: int) -> Iterator[Row]:
    """Compare with the base alone, by time, and with PEFT, by tokens."""
    tasks = {count: Together(count) for count in (0, *TARGETS)}
    with ExitStack() as stack:
        mine = stack.enter_context(EngineProcess(ours(max(TARGETS), together=tuple(TARGETS))))
        runs = {f"ours {n}": mine.runs(task, WORKERS) for n, task in tasks.items()}
        if has_peft():
            rival = stack.enter_context(EngineProcess(peft(max(TARGETS))))
            runs |= {f"PEFT {n}": rival.runs(task, WORKERS) for n, task in tasks.items()}
        seconds = take_turns(runs, rounds=rounds)
    for count, target in TARGETS.items():
        case, found = f"decode, {count} LoRAs, threads: {WORKERS}", seconds[f"ours {count}"]
        yield compare_times(
            case, found, seconds["ours 0"], steps=STEPS, rival="base alone", target=target
        )
        yield _against_peft(case, found, seconds.get(f"PEFT {count}"))


def _against_peft(case: str, found: Sequence[Seconds], theirs: Sequence[Seconds] | None) -> Row:
    if theirs is None:
        return absent(case, rival="PEFT", install=PEFT_INSTALL, target=AGAINST_PEFT)
    return compare_rates(
        case,
        found,
        theirs,
        work=(STEPS, STEPS),
        rival="PEFT, the same active",
        unit="tok/s",
        target=AGAINST_PEFT,
    )


def _kinds(rounds: int) -> Sequence[Row]:
    """Compile both plans, then decode with them in turn."""
    torch.manual_seed(0)
    loras = [_expert(_lora) for _ in range(10)]
    mixed = [_expert(make) for make in (*(_lora, _ia3, _dora) * 3, _lora)]
    with torch.inference_mode():
        return [
            _compiling("ten LoRAs", loras, rounds),
            _compiling("LoRA, IA³ and DoRA, ten together", mixed, rounds),
            _decoding(mixed, loras, rounds),
        ]


def _compiling(case: str, chain: Sequence[Weighted], rounds: int) -> Row:
    source = torch.zeros(compose(chain, FORM).nbytes, dtype=torch.uint8)

    def copy() -> None:
        torch.frombuffer(allocate(len(source)), dtype=torch.uint8).copy_(source)

    return compare(
        f"compile {case}, {len(source) / 1e6:.0f} MB",
        timed(lambda: compose(chain, FORM).compile()),
        timed(copy),
        rival="a copy of the plan's bytes into new memory",
        rounds=rounds,
        target="<= 3",
    )


def _decoding(mixed: Sequence[Weighted], loras: Sequence[Weighted], rounds: int) -> Row:
    decoder = _decoder()
    return compare(
        f"decode {TOKENS} tokens, LoRA, IA³ and DoRA, ten together",
        _steps(decoder, compose(mixed, FORM).compile()),
        _steps(decoder, compose(loras, FORM).compile()),
        rival="ten LoRAs",
        rounds=rounds,
        target="<= 1.05",
    )


def _steps(decoder: Decoder, plan: CompiledPlan) -> Run:
    cache = KVCache(decoder.config, PROMPT + TOKENS)
    decoder.prefill(range(PROMPT), cache, plan.deltas)

    def decode() -> None:
        for token in range(TOKENS):
            decoder.decode(token, cache, plan.deltas)

    def run() -> float:
        cache.rewind(PROMPT)
        return timed(decode)()

    return run


def _decoder() -> Decoder:
    config = base_config(VOCAB)
    tensors = {name: _random(*shape) for name, shape in config.tensor_shapes().items()}
    return Decoder(config, BaseWeights(tensors, torch.float32, CPU))


def _expert(make: Make) -> Weighted:
    """One expert of one kind on every layer; gains that are close to one, as those of training."""
    modules = {module: (make(module),) for module in FORM.shapes}
    adapter = LoadedAdapter(f"bench/{make.__name__}@1.0.0", modules, (), 0, 0)
    return Weighted(adapter, WEIGHT, dict(_gains(adapter)))


def _gains(adapter: LoadedAdapter) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    for module, [step] in adapter.modules.items():
        if isinstance(step, DoraTensors):
            yield module, (1 + _random(len(step.b)),)


def _lora(module: str) -> LoraTensors:
    out, into = FORM.shapes[module]
    return LoraTensors(_random(RANK, into).bfloat16(), _random(out, RANK).bfloat16(), 2.0)


def _dora(module: str) -> DoraTensors:
    lora = _lora(module)
    return DoraTensors(lora.a, lora.b, 1 + _random(len(lora.b)).bfloat16(), lora.scale)


def _ia3(module: str) -> Ia3Tensors:
    out, into = FORM.shapes[module]
    on_input = module.endswith("down_proj")
    return Ia3Tensors((1 + _random(into if on_input else out)).bfloat16(), on_input)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.02


if __name__ == "__main__":
    main("compose", measure, rounds=9)
