"""Today's model families in the torch decoders against transformers: prompts, and static steps.

Here the step that a CUDA device captures is called as it is, on a processor.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine.adapters.compile import (
    CompileSpec,
    TorchPlacement,
    WeightedAdapter,
    fold_plan,
)
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import assert_same_logits, stack_logits
from tests.engine.family_models import (
    SHAPES,
    build_family_model,
    is_recurrent,
    save_family_adapter,
)
from tests.engine.package_fixtures import load_adapters
from tests.engine.torch.stacked_models import compute_scores, load_stacked_decoder

pytestmark = pytest.mark.all
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]
OTHER = [9, 1, 30, 30, 4]
NOTHING: TorchDeltas = {}
ROUTED = [shape for shape in SHAPES if shape[0] == "gpt_oss"]
RUN_HERE = [shape for shape in SHAPES if "num_experts" not in shape[1]]
DENSE = [shape for shape in RUN_HERE if shape not in ROUTED]
DEVICE_LIMIT = 1e-4
"""How far scores may be from those of a processor; products of CUDA are summed in other orders."""


def compute_theirs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def run_prompts(decoder: Decoder, *, prefill: int, chunk: int) -> torch.Tensor:
    cache = KVCache(decoder.config, 30)
    rows = [decoder.prefill(IDS[:prefill], cache, chunk=chunk).logits]
    rows += [decoder.decode(token, cache).logits for token in IDS[prefill:]]
    return stack_logits(rows)


@pytest.mark.parametrize(("arch", "config"), RUN_HERE, ids=str)
def test_prompts_and_steps_equal_transformers(
    arch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = build_family_model(tmp_path, arch, **config)
    parsed = read_model_config(tmp_path)
    weights = load_base_weights(tmp_path, parsed)
    theirs = compute_theirs(model, IDS)
    prompts = Decoder(parsed, weights)
    for prefill, chunk in ((16, 512), (12, 5), (3, 2)):
        found = run_prompts(prompts, prefill=prefill, chunk=chunk)
        assert_same_logits(found, theirs[prefill - 1 :], relative=is_recurrent(arch))
    if parsed.experts is not None:
        return  # its steps need a stack, see below
    steps = CudaGraphDecoder(parsed, weights, rows=3, captures=False, min_capacity=4)
    arena = StaticKVCache(parsed, rows=3, capacity=30, dtype=torch.float32, device=weights.device)
    texts = {0: IDS, 2: OTHER}
    places = {number: arena.get_row(number) for number in texts}
    answers = {n: [steps.prefill(ids[:3], places[n]).logits] for n, ids in texts.items()}
    for place in range(3, len(IDS)):
        there = [n for n, ids in texts.items() if place < len(ids)]
        rows = [GraphStepRow(texts[n][place], places[n], NOTHING) for n in there]
        for number, logits in zip(there, steps.step(rows), strict=True):
            answers[number].append(logits)
    relative = is_recurrent(arch)
    assert_same_logits(stack_logits(answers[0]), theirs[2:], relative=relative)
    other = compute_theirs(model, OTHER)[2:]
    assert_same_logits(stack_logits(answers[2]), other, relative=relative)


@pytest.mark.parametrize("slots", [None, 2], ids=["resident", "two slots"])
@pytest.mark.parametrize(("arch", "config"), ROUTED, ids=str)
def test_steps_of_stacked_experts_equal_transformers(
    arch: str, config: dict[str, Any], slots: int | None, tmp_path: Path
) -> None:
    model = build_family_model(tmp_path, arch, **config)
    parsed = read_model_config(tmp_path)
    with load_stacked_decoder(tmp_path, slots=slots) as (steps, experts):
        arena = StaticKVCache(parsed, rows=2, capacity=30, dtype=torch.float32, device=steps.device)
        texts = {0: IDS, 1: OTHER}
        places = {number: arena.get_row(number) for number in texts}
        found = {n: [steps.prefill(ids[:3], places[n]).logits] for n, ids in texts.items()}
        for place in range(3, len(IDS)):
            there = [n for n, ids in texts.items() if place < len(ids)]
            rows = [GraphStepRow(texts[n][place], places[n], NOTHING) for n in there]
            for number, logits in zip(there, steps.step(rows), strict=True):
                found[number].append(logits)
        experts.check_integrity()
    for number, ids in texts.items():
        assert_same_logits(stack_logits(found[number]), compute_theirs(model, ids)[2:])


@pytest.mark.parametrize(("arch", "config"), ROUTED, ids=str)
def test_an_adapter_of_stacked_experts_is_that_of_peft(
    arch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = build_family_model(tmp_path / "base", arch, **config)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = save_family_adapter(model, "lora", tmp_path / "lora", parameters=stacks)
    parsed = read_model_config(tmp_path / "base")
    spec = CompileSpec(
        parsed.linear_shapes(),
        parsed.hidden_size,
        TorchPlacement("cpu"),
        places=parsed.stored_places,
    )
    adapter = spec.adapt(load_adapters(tmp_path / "lora"))
    deltas = fold_plan([WeightedAdapter(adapter)], spec).compile().torch_deltas
    with load_stacked_decoder(tmp_path / "base", slots=2) as (steps, _):
        found = compute_scores(steps, IDS, prefill=9, deltas=deltas)
    assert_same_logits(found, compute_theirs(adapted, IDS)[8:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("arch", "config"), DENSE, ids=str)
def test_prompts_and_captured_steps_equal_transformers_on_a_device(
    arch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model, device = build_family_model(tmp_path, arch, **config), torch.device("cuda")
    parsed = read_model_config(tmp_path)
    weights = load_base_weights(tmp_path, parsed, device=device)
    steps = CudaGraphDecoder(parsed, weights)
    arena = StaticKVCache(parsed, rows=1, capacity=30, dtype=torch.float32, device=device)
    row = arena.get_row(0)
    found = [steps.prefill(IDS[:7], row).logits]
    found += [steps.decode(token, row).logits for token in IDS[7:]]
    theirs = compute_theirs(model, IDS)[6:]
    assert float((stack_logits(found) - theirs).abs().max()) <= DEVICE_LIMIT
    steps.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("arch", "config"), ROUTED, ids=str)
def test_captured_steps_of_stacked_experts_equal_transformers_on_a_device(
    arch: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = build_family_model(tmp_path, arch, **config)
    for slots in (None, 2):
        with load_stacked_decoder(tmp_path, slots=slots, device=torch.device("cuda")) as (steps, _):
            found = compute_scores(steps, IDS, prefill=7)
        theirs = compute_theirs(model, IDS)[6:]
        assert float((found.cpu() - theirs).abs().max()) <= DEVICE_LIMIT


@pytest.mark.parametrize("arch", ["phi3", "gpt_neox", "gpt2", "gemma2", "qwen3_5_text"])
def test_an_adapter_of_fused_projections_is_that_of_peft_in_both(arch: str, tmp_path: Path) -> None:
    shape = next(config for name, config in SHAPES if name == arch)
    model = build_family_model(tmp_path / "base", arch, **shape)
    theirs = compute_theirs(save_family_adapter(model, "lora", tmp_path / "lora"), IDS)
    config = read_model_config(tmp_path / "base")
    weights = load_base_weights(tmp_path / "base", config)
    spec = CompileSpec(
        config.linear_shapes(),
        config.hidden_size,
        TorchPlacement("cpu"),
        places=config.stored_places,
    )
    adapter = spec.adapt(load_adapters(tmp_path / "lora"))
    deltas = fold_plan([WeightedAdapter(adapter)], spec).compile().torch_deltas
    steps = CudaGraphDecoder(config, weights, captures=False)
    arena = StaticKVCache(config, rows=1, capacity=30, dtype=torch.float32, device=weights.device)
    row = arena.get_row(0)
    found = [steps.prefill(IDS[:9], row, deltas).logits]
    found += [steps.decode(token, row, deltas).logits for token in IDS[9:]]
    assert_same_logits(stack_logits(found), theirs[8:], relative=is_recurrent(arch))
