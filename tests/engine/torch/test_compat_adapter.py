"""Experts on models of transformers: what PEFT computes, from bytes that PEFT never saw."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.torch.compat_base import load_model, open_compat_base
from expertctl.engine.torch.compat_engine import (
    TransformersSession,
    attach_adapter,
    float32_adapter_bytes,
)
from expertctl.errors import DigestError, IncompatibleError, InvalidPackageError
from expertctl.package.adapter import parse_adapter_config
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.compatibility import check_tensors
from expertctl.package.tensor_file import read_table
from expertctl.store.bases import BaseStore
from tests.engine.compat_models import KINDS, MORE_CONFIGS, CompatModel, copy_adapter, write_model
from tests.engine.package_fixtures import CONFIG, WEIGHTS, list_package_files, load_adapters
from tests.engine.random_experts import make_lora

FOREIGN = ("gpt2", "gpt_neox", "opt", "gemma", "bloom")
IDS = list(b"Hello, you there")
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompatModel]:
    folder = tmp_path_factory.mktemp("foreign")
    square = {"opt": {"word_embed_proj_dim": 32}}
    return {arch: write_model(folder, arch, **square.get(arch, {})) for arch in FOREIGN}


@pytest.fixture(scope="session")
def gpt2(models: dict[str, CompatModel]) -> CompatModel:
    return models["gpt2"]


def fresh(model: CompatModel, folder: Path, *, dtype: str = "float32") -> Any:
    bases = BaseStore(folder / "bases")
    base = open_compat_base(bases, bases.add(model.directory), dtype=dtype, rehash=False)
    return load_model(base)


def scores(loaded: Any, prompt: torch.Tensor | None = None) -> torch.Tensor:
    return torch.from_numpy(TransformersSession(loaded, soft_prompt=prompt).prefill(IDS).logits)


def theirs(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([IDS])).logits[0, -1]
    return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", FOREIGN)
def test_an_expert_computes_what_it_computes_in_peft(
    arch: str, kind: str, models: dict[str, CompatModel], tmp_path: Path
) -> None:
    model = models[arch]
    loaded = fresh(model, tmp_path)
    alone = scores(loaded)
    prompt = attach_adapter(loaded, load_adapters(model.get_adapter(kind)), weight=1.0)
    assert (prompt is None) == ("tuning" not in kind)
    expected = theirs(model.load_adapted(kind))
    assert float((scores(loaded, prompt) - expected).abs().max()) <= TOLERANCE
    assert float((alone - expected).abs().max()) > 100 * TOLERANCE


@pytest.mark.all
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
@pytest.mark.parametrize("arch", MORE_CONFIGS)
def test_further_architectures_compute_what_they_compute_in_peft(
    arch: str, kind: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path, arch)
    adapter = model.get_adapter(kind)
    config = parse_adapter_config((adapter / CONFIG).read_bytes(), what="test")
    spec = build_adapter_spec(config, read_table(adapter / WEIGHTS), what="test")
    assert check_tensors(spec, model.read_facts.shapes) == []
    loaded = fresh(model, tmp_path)
    attach_adapter(loaded, load_adapters(adapter), weight=1.0)
    reading = TransformersSession(loaded)
    tokens = [int(reading.prefill(IDS).logits.argmax())]
    while len(tokens) < 8:
        tokens.append(int(reading.decode(tokens[-1]).logits.argmax()))
    assert tokens == model.generate(kind, IDS, 8)
    assert float((scores(loaded) - theirs(model.load_adapted(kind))).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_base_in_bf16_an_expert_stays_what_it_is(
    kind: str, gpt2: CompatModel, tmp_path: Path
) -> None:
    loaded = fresh(gpt2, tmp_path, dtype="bf16")
    prompt = attach_adapter(loaded, load_adapters(gpt2.get_adapter(kind)), weight=1.0)
    placed = [p for name, p in loaded.named_parameters() if "lora_" in name or "ia3_" in name]
    assert {p.dtype for p in placed} <= {torch.float32}
    expected = theirs(gpt2.load_adapted(kind))
    alone = theirs(gpt2.model)
    off = float((scores(loaded, prompt) - expected).abs().max())
    assert off < 0.1 * float((alone - expected).abs().max()) + 0.03


@pytest.mark.parametrize("kind", ["lora", "patterns", "ia3"])
def test_a_weight_is_that_of_the_plain_formula(
    kind: str, gpt2: CompatModel, tmp_path: Path
) -> None:
    adapted = gpt2.load_adapted(kind)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.5)
            elif "ia3_l" in name:
                parameter.copy_(1 + 0.5 * (parameter - 1))
    loaded = fresh(gpt2, tmp_path)
    attach_adapter(loaded, load_adapters(gpt2.get_adapter(kind)), weight=0.5)
    assert float((scores(loaded) - theirs(adapted)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_0_leaves_an_expert_out(kind: str, gpt2: CompatModel, tmp_path: Path) -> None:
    loaded = fresh(gpt2, tmp_path)
    before = scores(loaded)
    assert attach_adapter(loaded, load_adapters(gpt2.get_adapter(kind)), weight=0.0) is None
    assert torch.equal(scores(loaded), before)


@pytest.mark.parametrize(("kind", "words"), [("dora", "DoRA"), ("p_tuning", "soft prompt")])
def test_a_weight_that_peft_cannot_give_is_refused(
    kind: str, words: str, gpt2: CompatModel, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=words):
        attach_adapter(fresh(gpt2, tmp_path), load_adapters(gpt2.get_adapter(kind)), weight=0.5)


def test_adapters_of_a_package_that_peft_cannot_run_together_are_refused(
    gpt2: CompatModel, tmp_path: Path
) -> None:
    both = load_adapters(gpt2.get_adapter("lora"), gpt2.get_adapter("ia3"))
    twice = load_adapters(gpt2.get_adapter("lora"), gpt2.get_adapter("patterns"))
    for adapter in (both, twice):
        with pytest.raises(IncompatibleError, match="several adapters"):
            attach_adapter(fresh(gpt2, tmp_path), adapter, weight=1.0)


def test_a_soft_prompt_beside_a_lora_is_run(gpt2: CompatModel, tmp_path: Path) -> None:
    both = load_adapters(gpt2.get_adapter("lora"), gpt2.get_adapter("prompt_tuning"))
    loaded = fresh(gpt2, tmp_path)
    prompt = attach_adapter(loaded, both, weight=1.0)
    lora = gpt2.load_adapted("lora").base_model.model
    with torch.inference_mode():
        words = lora.get_input_embeddings()(torch.tensor([IDS]))
        joined = torch.cat([torch.from_numpy(both.soft_prompts[0])[None], words], dim=1)
        expected = lora(inputs_embeds=joined).logits[0, -1]
    assert float((scores(loaded, prompt) - expected).abs().max()) <= TOLERANCE


def test_the_cost_is_every_number_in_float32(gpt2: CompatModel, tmp_path: Path) -> None:
    adapter = load_adapters(gpt2.get_adapter("lora"))
    loaded = fresh(gpt2, tmp_path)
    before = sum(parameter.nbytes for parameter in loaded.parameters())
    attach_adapter(loaded, adapter, weight=1.0)
    after = sum(parameter.nbytes for parameter in loaded.parameters())
    assert float32_adapter_bytes(adapter) == after - before > 0


def renamed(adapter: LoadedAdapter, old: str, new: str) -> LoadedAdapter:
    modules = {name.replace(old, new): steps for name, steps in adapter.modules.items()}
    return replace(adapter, modules=modules)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("h.0.attn.c_attn", "h.7.attn.c_attn"),  # nothing of that name
        ("h.0.attn.c_attn", "h.0.attn.nothing"),
        ("transformer.h.0.attn.c_attn", "h.0.attn.c_attn"),  # an end of a name is not the name
        ("h.0.attn.c_attn", "h.0.ln_1"),  # there, but no linear layer
        ("h.0.attn.c_attn", "h.0"),  # a whole block
        ("h.0.attn.c_attn", "h.0.attn.c_proj"),  # linear, of another shape
        ("transformer.h.0.attn.c_attn", "transformer.wte"),  # an embedding
    ],
)
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_a_tensor_that_has_no_place_is_an_error(
    kind: str, old: str, new: str, gpt2: CompatModel, tmp_path: Path
) -> None:
    adapter = renamed(load_adapters(gpt2.get_adapter(kind)), old, new)
    with pytest.raises(IncompatibleError, match="does not fit the base"):
        attach_adapter(fresh(gpt2, tmp_path), adapter, weight=1.0)


def test_an_expert_that_changes_nothing_is_an_error(gpt2: CompatModel, tmp_path: Path) -> None:
    nothing = replace(load_adapters(gpt2.get_adapter("lora")), modules={}, soft_prompts=())
    with pytest.raises(IncompatibleError, match="changes no module"):
        attach_adapter(fresh(gpt2, tmp_path), nothing, weight=1.0)


def test_a_soft_prompt_of_another_width_is_an_error(gpt2: CompatModel, tmp_path: Path) -> None:
    adapter = load_adapters(gpt2.get_adapter("prompt_tuning"))
    wide = replace(adapter, soft_prompts=(np.zeros((5, 33), np.float32),))
    with pytest.raises(IncompatibleError, match="has width 33, the base 32"):
        attach_adapter(fresh(gpt2, tmp_path), wide, weight=1.0)


def test_a_module_name_is_never_a_pattern(gpt2: CompatModel, tmp_path: Path) -> None:
    """A rank of its own makes a name a key of PEFT's patterns, which it runs as expressions."""
    a, b = torch.ones(3, 32), torch.ones(96, 3)
    adapter = load_adapters(gpt2.get_adapter("lora"))
    evil = {"transformer.h.0.attn.c_attn|(.*)": (make_lora(a, b, 1.0),)}
    with pytest.raises(IncompatibleError, match="no such layer"):
        attach_adapter(fresh(gpt2, tmp_path), replace(adapter, modules=evil), weight=1.0)


def test_bytes_that_changed_are_refused_before_they_are_read(
    gpt2: CompatModel, tmp_path: Path
) -> None:
    folder = copy_adapter(gpt2.get_adapter("lora"), tmp_path / "copy")
    files = list_package_files(folder)
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DigestError):
        files.read_file("adapter_model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"auto_mapping": {"parent_library": "os", "base_model_class": "system"}},
        {"megatron_config": {"x": 1}},
        {"target_modules": "(a+)+$"},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_configuration_is_read_by_our_allow_list_and_never_by_peft(
    change: dict[str, Any], gpt2: CompatModel, tmp_path: Path
) -> None:
    folder = copy_adapter(gpt2.get_adapter("lora"), tmp_path / "copy")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    if "target_modules" in change:  # a pattern is not run: the tensors decide
        assert (
            load_adapters(folder).modules.keys()
            == load_adapters(gpt2.get_adapter("lora")).modules.keys()
        )
        return
    with pytest.raises(InvalidPackageError, match=next(iter(change))):
        load_adapters(folder)


def test_a_soft_prompt_that_names_a_tokenizer_loads_none(gpt2: CompatModel, tmp_path: Path) -> None:
    folder = copy_adapter(gpt2.get_adapter("prompt_tuning"), tmp_path / "copy")
    path = folder / "adapter_config.json"
    named = {"tokenizer_name_or_path": "somebody/tokenizer", "prompt_tuning_init": "TEXT"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
    loaded = fresh(gpt2, tmp_path)
    prompt = attach_adapter(loaded, load_adapters(folder), weight=1.0)
    expected = theirs(gpt2.load_adapted("prompt_tuning"))
    assert float((scores(loaded, prompt) - expected).abs().max()) <= TOLERANCE


def test_peft_does_not_warn_of_what_is_meant(gpt2: CompatModel, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = fresh(gpt2, tmp_path)
        attach_adapter(loaded, load_adapters(gpt2.get_adapter("dora")), weight=1.0)
        found = scores(loaded)
    assert float((found - theirs(gpt2.load_adapted("dora"))).abs().max()) <= TOLERANCE
