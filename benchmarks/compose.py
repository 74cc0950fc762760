"""The cost of decoding with experts, against the base alone and PEFT, and of compiling them.

Different bf16 rank-16 LoRAs on all seven projections of a bf16 base in the shape of Qwen3-0.6B,
random weights. In addition, ten experts of three kinds on a float32 base, for torch: the cost of
compiling them, and of decoding with a mixed chain, compared with ten LoRAs. There the vocabulary is
small, since no expert changes it, and IA³ scales every projection, which is more than PEFT's
default. All experts and magnitude scales are in memory beforehand.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.engine_process import EngineProcess
from benchmarks.expert_engines import PEFT_INSTALL, DecodeTogether, has_peft, open_ours, open_peft
from benchmarks.expert_engines import TOKENS as STEPS
from benchmarks.harness import (
    Row,
    Run,
    Seconds,
    compare,
    compare_rates,
    compare_times,
    main,
    make_absent_row,
    take_turns,
    time_action,
)
from benchmarks.inputs import HIDDEN, RANK, list_module_shapes, make_base_config
from expertctl.engine.adapters.compile import (
    CompiledPlan,
    CompileSpec,
    TorchPlacement,
    WeightedAdapter,
    fold_plan,
)
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import AdapterStep, DoraTensors, Ia3Tensors, LoraTensors
from expertctl.engine.arrays import AnyArray
from expertctl.engine.memory.host import allocate
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import BaseWeights

TARGETS = {1: "<= 1.05", 2: "<= 1.08", 5: "<= 1.15", 10: "<= 1.25"}
"""Numbers of experts, with the highest ratio of a token's time to that of the base alone."""
AGAINST_PEFT, WORKERS = ">= 3", 2
VOCAB = 1024
PROMPT, TOKENS = 16, 4
"""Tokens of context, and the number of decode steps in one measurement."""
WEIGHT = 0.8
CPU = torch.device("cpu")
PLAN_FORM = CompileSpec(list_module_shapes(), HIDDEN, TorchPlacement("cpu"))
MakeStep = Callable[[str], AdapterStep]


def measure(rounds: int) -> Sequence[Row]:
    """Decode with increasing numbers of experts, then compile and decode ten of three kinds."""
    return [*_measure_experts(rounds), *_measure_kinds(rounds)]


def _measure_experts(rounds: int) -> Iterator[Row]:
    """Compare the time with that of the base alone, and tokens per second with PEFT."""
    tasks = {count: DecodeTogether(count) for count in (0, *TARGETS)}
    with ExitStack() as stack:
        mine = stack.enter_context(EngineProcess(open_ours(max(TARGETS), together=tuple(TARGETS))))
        runs = {f"ours {n}": mine.bind(task, WORKERS) for n, task in tasks.items()}
        if has_peft():
            rival = stack.enter_context(EngineProcess(open_peft(max(TARGETS))))
            runs |= {f"PEFT {n}": rival.bind(task, WORKERS) for n, task in tasks.items()}
        seconds = take_turns(runs, rounds=rounds)
    for count, target in TARGETS.items():
        case, found = f"decode, {count} LoRAs, threads: {WORKERS}", seconds[f"ours {count}"]
        yield compare_times(
            case, found, seconds["ours 0"], steps=STEPS, rival="base alone", target=target
        )
        yield _compare_with_peft(case, found, seconds.get(f"PEFT {count}"))


def _compare_with_peft(
    case: str, found: Sequence[Seconds], theirs: Sequence[Seconds] | None
) -> Row:
    if theirs is None:
        return make_absent_row(case, rival="PEFT", install=PEFT_INSTALL, target=AGAINST_PEFT)
    return compare_rates(
        case,
        found,
        theirs,
        work=(STEPS, STEPS),
        rival="PEFT, the same active",
        unit="tok/s",
        target=AGAINST_PEFT,
    )


def _measure_kinds(rounds: int) -> Sequence[Row]:
    """Compile both plans, then decode with them in turns."""
    torch.manual_seed(0)
    loras = [_make_expert(_make_lora) for _ in range(10)]
    mixed = [_make_expert(make) for make in (*(_make_lora, _make_ia3, _make_dora) * 3, _make_lora)]
    with torch.inference_mode():
        return [
            _measure_compile("ten LoRAs", loras, rounds),
            _measure_compile("LoRA, IA³ and DoRA, ten together", mixed, rounds),
            _measure_decode(mixed, loras, rounds),
        ]


def _measure_compile(case: str, chain: Sequence[WeightedAdapter], rounds: int) -> Row:
    source = torch.zeros(fold_plan(chain, PLAN_FORM).nbytes, dtype=torch.uint8)

    def copy() -> None:
        torch.frombuffer(allocate(len(source)), dtype=torch.uint8).copy_(source)

    return compare(
        f"compile {case}, {len(source) / 1e6:.0f} MB",
        time_action(lambda: fold_plan(chain, PLAN_FORM).compile()),
        time_action(copy),
        rival="a copy of the plan's bytes into new memory",
        rounds=rounds,
        target="<= 3",
    )


def _measure_decode(
    mixed: Sequence[WeightedAdapter], loras: Sequence[WeightedAdapter], rounds: int
) -> Row:
    decoder = _make_decoder()
    return compare(
        f"decode {TOKENS} tokens, LoRA, IA³ and DoRA, ten together",
        _make_decode_run(decoder, fold_plan(mixed, PLAN_FORM).compile()),
        _make_decode_run(decoder, fold_plan(loras, PLAN_FORM).compile()),
        rival="ten LoRAs",
        rounds=rounds,
        target="<= 1.05",
    )


def _make_decode_run(decoder: Decoder, plan: CompiledPlan) -> Run:
    cache = KVCache(decoder.config, PROMPT + TOKENS)
    decoder.prefill(range(PROMPT), cache, plan.torch_deltas)

    def decode() -> None:
        for token in range(TOKENS):
            decoder.decode(token, cache, plan.torch_deltas)

    def run() -> float:
        cache.rewind(PROMPT)
        return time_action(decode)()

    return run


def _make_decoder() -> Decoder:
    config = make_base_config(VOCAB)
    tensors = {name: _random_tensor(*shape) for name, shape in config.tensor_shapes().items()}
    return Decoder(config, BaseWeights(tensors, torch.float32, CPU))


def _make_expert(make: MakeStep) -> WeightedAdapter:
    """One expert of one kind on every layer; scales are close to one, as after training."""
    modules = {module: (make(module),) for module in PLAN_FORM.shapes}
    adapter = LoadedAdapter(f"bench/{make.__name__}@1.0.0", modules, (), 0, 0)
    return WeightedAdapter(adapter, WEIGHT, dict(_make_dora_scales(adapter)))


def _make_dora_scales(adapter: LoadedAdapter) -> Iterator[tuple[str, tuple[AnyArray, ...]]]:
    for module, [step] in adapter.modules.items():
        if isinstance(step, DoraTensors):
            yield module, (to_array(1 + _random_tensor(len(step.b))),)


def _make_lora(module: str) -> LoraTensors:
    out, into = PLAN_FORM.shapes[module]
    a, b = _random_tensor(RANK, into), _random_tensor(out, RANK)
    return LoraTensors(to_array(a.bfloat16()), to_array(b.bfloat16()), 2.0)


def _make_dora(module: str) -> DoraTensors:
    lora = _make_lora(module)
    magnitude = 1 + _random_tensor(len(lora.b)).bfloat16()
    return DoraTensors(lora.a, lora.b, to_array(magnitude), lora.scale)


def _make_ia3(module: str) -> Ia3Tensors:
    out, into = PLAN_FORM.shapes[module]
    on_input = module.endswith("down_proj")
    vector = 1 + _random_tensor(into if on_input else out)
    return Ia3Tensors(to_array(vector.bfloat16()), on_input)


def _random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.02


if __name__ == "__main__":
    main("compose", measure, rounds=9)
