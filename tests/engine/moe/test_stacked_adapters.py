"""LoRA that PEFT put on the stacks of routed experts does here what it does there."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertctl.engine.adapters.compile import WeightedAdapter, check_adapter_fits, rename_modules
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import LoraTensors
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.torch.reference import merge_lora_weight
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.schema.strict_json import load_object
from tests.engine.conftest import (
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    stack_logits,
)
from tests.engine.cpu.test_decoder import assert_exact
from tests.engine.cpu.test_decoder import scores as scores_of
from tests.engine.moe.test_packed_experts import fitting, whole
from tests.engine.package_fixtures import CONFIG, WEIGHTS, load_adapters
from tests.engine.random_experts import make_packed_plan, make_torch_plan
from tests.engine.reference_models import get_weight

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.all]
ARCHS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
CASES: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": [GATE_UP, DOWN]},
    "gate and up": {"target_parameters": [GATE_UP]},
    "down, with modules": {"target_parameters": [DOWN], "target_modules": ["q_proj", "o_proj"]},
    "of one layer": {"target_parameters": [f"model.layers.1.{GATE_UP}", DOWN]},
    "ranks": {
        "target_parameters": [GATE_UP, DOWN, "v_proj.weight"],
        "rank_pattern": {"experts.gate_up_proj": 3, "v_proj.weight": 5, "v_proj": 7},
        "alpha_pattern": {"layers.1.mlp.experts.down_proj": 9},
        "use_rslora": True,
    },
}


@dataclass(frozen=True)
class Saved:
    """An adapter that PEFT saved; its model has it from then on, and these scores."""

    directory: Path
    scores: Tensor
    peft: Any


def saved(model: ReferenceModel, directory: Path, **config: Any) -> Saved:
    """Let PEFT put an adapter on a model, with halves that are not 0, and save it."""
    wanted = {"target_modules": [], **config}
    made = peft.LoraConfig(r=2, lora_alpha=5, task_type="CAUSAL_LM", **wanted)
    adapted = peft.get_peft_model(model.model, made).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(str(directory))
    with torch.inference_mode():
        logits = adapted(torch.tensor([IDS]), use_cache=False).logits[0]
    return Saved(directory, logits, adapted)


def named(config: ModelConfig, directory: Path) -> LoadedAdapter:
    adapter = rename_modules(load_adapters(directory), config.linear_shapes())
    check_adapter_fits(adapter, config.linear_shapes(), width=config.hidden_size)
    return adapter


def by_torch(model: ReferenceModel, adapter: LoadedAdapter) -> Tensor:
    decoder = model.load_decoder()
    deltas = make_torch_plan(decoder.config, [WeightedAdapter(adapter)]).torch_deltas
    cache = KVCache(decoder.config, 20)
    rows = [decoder.prefill(IDS[:7], cache, deltas).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[7:]]
    return stack_logits(rows)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("arch", ARCHS)
def test_scores_are_those_of_peft(
    arch: str, case: str, oracle: MakeReferenceModel, crew: ThreadPool, tmp_path: Path
) -> None:
    model = oracle(arch, **fitting(arch, {}))
    plain = model.compute_logits(IDS)
    found = saved(model, tmp_path / "saved", **CASES[case])
    assert float((found.scores - plain).abs().max()) > 0.01
    adapter = named(read_model_config(model.directory), found.directory)
    assert_exact(by_torch(model, adapter), model, IDS)
    decoder = whole(model, crew)
    plan = make_packed_plan(decoder.config, [WeightedAdapter(adapter)])
    assert_exact(scores_of(decoder, IDS, prefill=7, deltas=plan), model, IDS)


@pytest.mark.parametrize("arch", ["mixtral", "olmoe"])
def test_modules_that_peft_turns_into_stacks_are_read_too(
    arch: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    """It writes a rank of its own for gate and up, by a regular expression."""
    model = oracle(arch)
    names = ("w1", "w2", "w3") if arch == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = saved(model, tmp_path / "saved", target_modules=["q_proj", *names])
    written = load_object((found.directory / CONFIG).read_bytes(), what="c", max_bytes=1 << 20)
    assert written["rank_pattern"] == {r".*\.gate_up_proj": 4}
    adapter = named(read_model_config(model.directory), found.directory)
    assert_same_logits(by_torch(model, adapter), found.scores[6:])


@pytest.mark.parametrize("arch", ARCHS)
def test_every_expert_has_what_peft_adds_to_its_weights(
    arch: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle(arch, num_hidden_layers=2)
    config = read_model_config(model.directory)
    routed = {name for name in config.linear_shapes() if ".experts." in name}
    before = {name: get_weight(model.model, name).clone() for name in routed}
    found = saved(model, tmp_path / "saved", **CASES["both"])
    adapter = named(config, found.directory)
    assert adapter.modules.keys() == routed
    merged = found.peft.merge_and_unload()
    for name, weight in before.items():
        [step] = adapter.modules[name]
        assert isinstance(step, LoraTensors)
        theirs = get_weight(merged, name)
        assert not torch.equal(weight, theirs)
        torch.testing.assert_close(merge_lora_weight(weight, step), theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0"])
def test_halves_that_older_versions_turned_are_read(
    version: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    """They summed ``o r e, e r i -> e i o`` onto [experts, out, in]: i is the output there."""
    model = oracle("qwen3_moe")
    found = saved(model, tmp_path / "saved", **CASES["both"])
    rewrite(found.directory, experts=6, version=version)
    adapter = named(read_model_config(model.directory), found.directory)
    assert_same_logits(by_torch(model, adapter), found.scores[6:])


def rewrite(directory: Path, *, experts: int, version: str) -> None:
    """Lay the halves of stacks as PEFT did before 0.19.1."""
    tensors = load_file(directory / WEIGHTS)
    turned = dict(tensors)
    for name in tensors:
        if ".lora_A." in name:
            other = name.replace(".lora_A.", ".lora_B.")
            a = tensors[name].unflatten(0, (experts, -1))  # [experts, rank, in]
            b = tensors[other].unflatten(1, (-1, experts))  # [out, rank, experts]
            turned[name] = b.permute(2, 1, 0).flatten(0, 1).contiguous()
            turned[other] = a.permute(2, 1, 0).flatten(1).contiguous()
    save_file(turned, directory / WEIGHTS)
    text = (directory / CONFIG).read_text()
    assert peft.__version__ in text
    (directory / CONFIG).write_text(text.replace(peft.__version__, version))


@pytest.mark.parametrize("experts", [5, 8])
def test_a_base_with_other_experts_is_refused_by_name(
    experts: int, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("qwen3_moe")
    found = saved(model, tmp_path / "saved", **CASES["both"])
    other = replace_experts(read_model_config(model.directory), experts)
    why = "the base has no such linear layer" if experts < 6 else "stacks of the adapter end before"
    with pytest.raises(IncompatibleError, match=why):
        named(other, found.directory)


def replace_experts(config: ModelConfig, count: int) -> ModelConfig:
    assert config.experts is not None
    return replace(config, experts=replace(config.experts, count=count))
