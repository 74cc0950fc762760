"""Adapters on bases of routed experts equal transformers with the adapter in its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.compose import Weighted, compose
from expertctl.engine.decoder import Decoder
from expertctl.engine.dora import DoraTensors, gains
from expertctl.engine.fit import check_fit, named_for
from expertctl.engine.kv_cache import KVCache
from expertctl.errors import IncompatibleError
from expertctl.package.adapter_files import read_adapter
from expertctl.package.compatibility import check_tensors
from expertctl.package.model_config import read_config
from tests.engine.adapter_files import load
from tests.engine.conftest import MakeOracle, Oracle, assert_same_logits
from tests.engine.moe.adapted_models import ATTENTION, EVERY, merge
from tests.engine.plans import form_of
from tests.engine.routed_models import CLASSES
from tests.engine.test_packed_decoder import assert_exact
from tests.factories import write_dora, write_ia3, write_lora

ARCHS = sorted(CLASSES)
IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
WRITERS: dict[str, Callable[..., Path]] = {"lora": write_lora, "dora": write_dora}
DOWN = ("down_proj", "w2")


def fitted(decoder: Decoder, directory: Path) -> LoadedAdapter:
    return named_for(load(directory), decoder.config.linear_shapes())


def weighted(decoder: Decoder, adapter: LoadedAdapter) -> Weighted:
    """An adapter with what its DoRA needs on this base."""
    found = {
        module: tuple(
            gains(decoder.matrix(module), step, what=module)
            for step in steps
            if isinstance(step, DoraTensors)
        )
        for module, steps in adapter.modules.items()
    }
    return Weighted(adapter, 1.0, found)


def scores(decoder: Decoder, *directories: Path) -> torch.Tensor:
    """Scores from the last prompt token on, of the base with a chain of adapters."""
    chain = [weighted(decoder, fitted(decoder, directory)) for directory in directories]
    deltas = compose(chain, form_of(decoder.config)).compile().deltas
    cache = KVCache(decoder.config, len(IDS) + 3)
    rows = [decoder.prefill(IDS[:7], cache, deltas, chunk=5).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[7:]]
    return torch.stack(rows)


def assert_equals_merged(model: Oracle, decoder: Decoder, directory: Path) -> None:
    plain = model.logits(IDS)
    changed = merge(model.model, directory)
    assert changed == len(load(directory).modules) > 0
    theirs = model.logits(IDS)
    assert float((theirs - plain).abs().max()) > 0.01, "the expert must change something"
    assert_exact(scores(decoder, directory), model, IDS)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("arch", ARCHS)
def test_an_adapter_on_every_layer_equals_the_merged_model(
    kind: str, arch: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle(arch)
    decoder = model.decoder()
    directory = WRITERS[kind](tmp_path / kind, model.directory, targets=EVERY)
    assert fitted(decoder, directory).modules.keys() == decoder.modules - {"lm_head"}
    assert_equals_merged(model, decoder, directory)


@pytest.mark.parametrize("arch", ARCHS)
def test_factors_of_ia3_equal_the_merged_model(
    arch: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle(arch)
    directory = write_ia3(
        tmp_path / "ia3",
        model.directory,
        targets=("k_proj", "v_proj", *DOWN),
        feedforward=DOWN,
        scale=0.1,
    )
    assert_equals_merged(model, model.decoder(), directory)


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
    arch: str, target: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle(arch)
    directory = write_lora(tmp_path / "x", model.directory, targets=(target,), scale=1.0)
    assert_equals_merged(model, model.decoder(), directory)


def test_a_chain_equals_the_model_with_all_of_it(oracle: MakeOracle, tmp_path: Path) -> None:
    model = oracle("mixtral")
    one = write_lora(tmp_path / "one", model.directory, targets=ATTENTION)
    two = write_lora(tmp_path / "two", model.directory, targets=("w1", "w2"), seed=1)
    for directory in (one, two):
        merge(model.model, directory)
    for order in ((one, two), (two, one)):
        assert_exact(scores(model.decoder(), *order), model, IDS)


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
    arch: str, targets: tuple[str, ...], oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle(arch)
    directory = write_lora(tmp_path / "x", model.directory, targets=targets)
    ours, plain = scores(model.decoder(), directory), model.logits(IDS)[6:]
    adapted: Any = peft.PeftModel.from_pretrained(model.model, str(directory)).eval()
    with torch.inference_mode():
        theirs = adapted(torch.tensor([IDS]), use_cache=False).logits[0, 6:]
    assert float((theirs - plain).abs().max()) > 0.01
    assert_same_logits(ours, theirs)


@pytest.mark.parametrize("arch", ARCHS)
def test_an_adapter_on_a_router_is_refused_by_name(
    arch: str, oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle(arch, num_hidden_layers=2)
    directory = write_lora(tmp_path / "x", model.directory, targets=("q_proj", "gate"))
    shapes = read_config(model.directory).linear_shapes()
    problem = "it chooses the experts of its layer, and no adapter may change that"
    routers = r"model\.layers\.[01]\.\S*gate( and 1 more)?: "
    with pytest.raises(IncompatibleError, match=routers + problem):
        check_fit(named_for(load(directory), shapes), shapes, width=32)
    spec = read_adapter(
        directory, weights="adapter_model.safetensors", config="adapter_config.json"
    ).spec
    assert [p for p in check_tensors(spec, shapes) if not p.endswith(problem)] == []


def test_an_expert_that_the_base_does_not_have_is_refused(
    oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle("olmoe")
    directory = write_lora(tmp_path / "x", model.directory, targets=("down_proj",))
    fewer = {n: s for n, s in model.decoder().config.linear_shapes().items() if ".6." not in n}
    with pytest.raises(IncompatibleError, match=r"experts\.6\.down_proj and 2 more: the base"):
        check_fit(named_for(load(directory), fewer), fewer, width=32)


def test_names_that_are_those_of_the_base_are_left_as_they_are(
    oracle: MakeOracle, tmp_path: Path
) -> None:
    model = oracle("olmoe", num_hidden_layers=1)
    adapter = load(write_lora(tmp_path / "x", model.directory))
    assert named_for(adapter, model.decoder().config.linear_shapes()) is adapter
