"""Adapters on bases of routed experts equal transformers with the adapter in its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from expertctl.engine.adapters.compile import (
    WeightedAdapter,
    check_adapter_fits,
    rename_modules,
)
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import DoraTensors, compute_dora_scales
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.errors import IncompatibleError
from expertctl.package.adapter_files import read_adapter
from expertctl.package.compatibility import check_tensors
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import (
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    stack_logits,
)
from tests.engine.cpu.test_decoder import assert_exact
from tests.engine.package_fixtures import load_adapters
from tests.engine.random_experts import make_torch_plan
from tests.engine.reference_models import ALL_MODULES, ATTENTION, ROUTED_CLASSES, merge_adapter
from tests.factories import write_dora, write_ia3, write_lora

ARCHS = sorted(ROUTED_CLASSES)
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
WRITERS: dict[str, Callable[..., Path]] = {"lora": write_lora, "dora": write_dora}
DOWN = ("down_proj", "w2")


def fitted(decoder: Decoder, directory: Path) -> LoadedAdapter:
    return rename_modules(load_adapters(directory), decoder.config.linear_shapes())


def weighted(decoder: Decoder, adapter: LoadedAdapter) -> WeightedAdapter:
    """An adapter with what its DoRA needs on this base."""
    found = {
        module: tuple(
            compute_dora_scales(to_array(decoder.matrix(module)), step, what=module)
            for step in steps
            if isinstance(step, DoraTensors)
        )
        for module, steps in adapter.modules.items()
    }
    return WeightedAdapter(adapter, 1.0, found)


def scores(decoder: Decoder, *directories: Path) -> torch.Tensor:
    """Scores from the last prompt token on, of the base with a chain of adapters."""
    chain = [weighted(decoder, fitted(decoder, directory)) for directory in directories]
    deltas = make_torch_plan(decoder.config, chain).torch_deltas
    cache = KVCache(decoder.config, len(IDS) + 3)
    rows = [decoder.prefill(IDS[:7], cache, deltas, chunk=5).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[7:]]
    return stack_logits(rows)


def assert_equals_merged(model: ReferenceModel, decoder: Decoder, directory: Path) -> None:
    plain = model.compute_logits(IDS)
    changed = merge_adapter(model.model, directory)
    assert changed == len(load_adapters(directory).modules) > 0
    theirs = model.compute_logits(IDS)
    assert float((theirs - plain).abs().max()) > 0.01, "the expert must change something"
    assert_exact(scores(decoder, directory), model, IDS)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("arch", ARCHS)
def test_an_adapter_on_every_layer_equals_the_merged_model(
    kind: str, arch: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle(arch)
    decoder = model.load_decoder()
    directory = WRITERS[kind](tmp_path / kind, model.directory, targets=ALL_MODULES)
    assert fitted(decoder, directory).modules.keys() == decoder.modules - {"lm_head"}
    assert_equals_merged(model, decoder, directory)


@pytest.mark.parametrize("arch", ARCHS)
def test_factors_of_ia3_equal_the_merged_model(
    arch: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle(arch)
    directory = write_ia3(
        tmp_path / "ia3",
        model.directory,
        targets=("k_proj", "v_proj", *DOWN),
        feedforward=DOWN,
        scale=0.1,
    )
    assert_equals_merged(model, model.load_decoder(), directory)


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("mixtral", "layers.1.block_sparse_moe.experts.1.w1"),
        ("mixtral", "experts.0.w2"),
        ("olmoe", "layers.2.mlp.experts.6.gate_proj"),
        ("qwen2_moe", "layers.0.mlp.experts.5.up_proj"),
        ("qwen2_moe", "shared_expert.down_proj"),
        ("qwen2_moe", "shared_expert_gate"),
        ("qwen3_moe", "experts.4.down_proj"),
        ("dots1", "layers.1.mlp.shared_experts.up_proj"),
        ("dots1", "layers.0.mlp.up_proj"),
    ],
)
def test_an_adapter_on_single_modules_equals_the_merged_model(
    arch: str, target: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle(arch)
    directory = write_lora(tmp_path / "x", model.directory, targets=(target,), scale=1.0)
    assert_equals_merged(model, model.load_decoder(), directory)


def test_a_chain_equals_the_model_with_all_of_it(
    oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("mixtral")
    one = write_lora(tmp_path / "one", model.directory, targets=ATTENTION)
    two = write_lora(tmp_path / "two", model.directory, targets=("w1", "w2"), seed=1)
    for directory in (one, two):
        merge_adapter(model.model, directory)
    for order in ((one, two), (two, one)):
        assert_exact(scores(model.load_decoder(), *order), model, IDS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arch", "targets"),
    [
        ("mixtral", ("q_proj", "w1", "w2", "w3")),
        ("olmoe", ("v_proj", "gate_proj", "up_proj", "down_proj")),
        ("qwen3_moe", ("o_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_what_peft_loads_onto_stacks_is_loaded_onto_experts(
    arch: str, targets: tuple[str, ...], oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle(arch)
    directory = write_lora(tmp_path / "x", model.directory, targets=targets)
    ours, plain = scores(model.load_decoder(), directory), model.compute_logits(IDS)[6:]
    adapted: Any = peft.PeftModel.from_pretrained(model.model, str(directory)).eval()
    with torch.inference_mode():
        theirs = adapted(torch.tensor([IDS]), use_cache=False).logits[0, 6:]
    assert float((theirs - plain).abs().max()) > 0.01
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("arch", ARCHS)
def test_an_adapter_on_a_router_is_refused_by_name(
    arch: str, oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle(arch, num_hidden_layers=2)
    directory = write_lora(tmp_path / "x", model.directory, targets=("q_proj", "gate"))
    shapes = read_model_config(model.directory).linear_shapes()
    problem = "it chooses the experts of its layer, and no adapter may change that"
    routers = r"model\.layers\.[01]\.\S*gate( and 1 more)?: "
    with pytest.raises(IncompatibleError, match=routers + problem):
        check_adapter_fits(rename_modules(load_adapters(directory), shapes), shapes, width=32)
    spec = read_adapter(
        directory, weights="adapter_model.safetensors", config="adapter_config.json"
    ).spec
    assert [p for p in check_tensors(spec, shapes) if not p.endswith(problem)] == []


def test_an_expert_that_the_base_does_not_have_is_refused(
    oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("olmoe")
    directory = write_lora(tmp_path / "x", model.directory, targets=("down_proj",))
    fewer = {n: s for n, s in model.load_decoder().config.linear_shapes().items() if ".6." not in n}
    with pytest.raises(IncompatibleError, match=r"experts\.6\.down_proj and 2 more: the base"):
        check_adapter_fits(rename_modules(load_adapters(directory), fewer), fewer, width=32)


def test_names_that_are_those_of_the_base_are_left_as_they_are(
    oracle: MakeReferenceModel, tmp_path: Path
) -> None:
    model = oracle("olmoe", num_hidden_layers=1)
    adapter = load_adapters(write_lora(tmp_path / "x", model.directory))
    assert rename_modules(adapter, model.load_decoder().config.linear_shapes()) is adapter
