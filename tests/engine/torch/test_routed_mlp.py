"""Bases of routed experts in torch: tokens of transformers, in every layout, adapters included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from expertctl.engine.adapters.steps import EMPTY_DELTAS
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.routed_mlp import RoutedMlp, build_routed_mlp
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import (
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    run_decoder,
)
from tests.engine.reference_models import ROUTED_CLASSES

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28]
ARCHS = sorted(ROUTED_CLASSES)


def greedy(decoder: Decoder, prompt: list[int], tokens: int, *, chunk: int = 512) -> list[int]:
    """Tokens of the highest scores, one after the other."""
    cache = KVCache(decoder.config, len(prompt) + tokens)
    found = [int(decoder.prefill(prompt, cache, chunk=chunk).logits.argmax())]
    while len(found) < tokens:
        found.append(int(decoder.decode(found[-1], cache).logits.argmax()))
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_are_those_of_transformers(oracle: MakeReferenceModel, arch: str) -> None:
    model = oracle(arch)
    inputs = torch.tensor([IDS[:7]])
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        mask = torch.ones_like(inputs)
        out = model.model.generate(inputs, attention_mask=mask, eos_token_id=None, **options)
    for chunk in (512, 3):
        assert greedy(model.load_decoder(), IDS[:7], 24, chunk=chunk) == out[0, 7:].tolist()


@pytest.mark.parametrize("arch", ARCHS)
def test_stacks_that_transformers_saves_are_read_as_matrices_apart(
    oracle: MakeReferenceModel, arch: str, tmp_path: Path
) -> None:
    model = oracle(arch)
    stacked = ReferenceModel(tmp_path / "stacked", model.model)
    model.model.save_pretrained(stacked.directory, save_original_format=False)
    names = load_file(stacked.directory / "model.safetensors").keys()
    assert any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    ours, theirs = (
        load_base_weights(one.directory, read_model_config(one.directory)).tensors
        for one in (stacked, model)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert_same_logits(
        run_decoder(stacked.load_decoder(), IDS, prefill=9), model.compute_logits(IDS)[8:]
    )


def mlp_of(model: ReferenceModel, layer: int, dtype: torch.dtype = torch.float32) -> RoutedMlp:
    config = read_model_config(model.directory)
    assert config.experts is not None
    tensors = load_base_weights(model.directory, config, dtype=dtype).tensors
    return build_routed_mlp(tensors, config.experts, layer=f"model.layers.{layer}")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_layer_equals_that_of_transformers(
    oracle: MakeReferenceModel, arch: str, tokens: int
) -> None:
    model = oracle(arch)
    x = torch.randn(tokens, 32)
    with torch.inference_mode():
        theirs = model.model.model.layers[2].mlp(x[None])[0]
        assert float((mlp_of(model, 2)(x, EMPTY_DELTAS) - theirs).abs().max()) <= 1e-5


@pytest.mark.parametrize("arch", ARCHS)
def test_a_token_gets_the_same_whoever_is_read_with_it(
    oracle: MakeReferenceModel, arch: str
) -> None:
    mlp, x = mlp_of(oracle(arch), 1), torch.randn(9, 32)
    with torch.inference_mode():
        together = mlp(x, EMPTY_DELTAS)
        alone = torch.cat([mlp(x[n : n + 1], EMPTY_DELTAS) for n in range(9)])
    assert float((together - alone).abs().max()) <= 1e-5


def test_experts_are_chosen_in_float32_however_the_router_is_held(
    oracle: MakeReferenceModel,
) -> None:
    model = oracle("qwen3_moe", num_experts=6, num_experts_per_tok=3)
    model.model.bfloat16().float()  # rounded, so that nothing is lost where it is held so
    model.model.save_pretrained(model.directory)
    x = torch.randn(50, 32)
    exact, held = (mlp_of(model, 1, dtype).route(x) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(exact.selected, held.selected)
    assert torch.equal(exact.weights, held.weights)


@pytest.mark.parametrize("arch", ARCHS)
def test_bfloat16_weights_come_close(oracle: MakeReferenceModel, arch: str) -> None:
    model = oracle(arch, num_hidden_layers=2)
    model.model.bfloat16().float()
    model.model.save_pretrained(model.directory)
    ours = run_decoder(model.load_decoder(torch.bfloat16), IDS, prefill=9)
    theirs: Any = model.compute_logits(IDS)[8:]
    assert ours.dtype == torch.float32
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03
