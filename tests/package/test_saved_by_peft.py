"""Adapters that PEFT itself made and saved, of every kind, become packages without a word."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertctl.package.adapter import Dora, Ia3, Lora, SoftPrompt
from expertctl.package.base_model import BaseFacts
from expertctl.package.build import build_package, plan_build
from expertctl.package.draft import ManifestOverrides
from expertctl.package.read import PackageContents, read_package

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
LAYERS = 2
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path, base_dir: Path) -> Save:
    """Attach an adapter to the base and save it; ``change`` may do more with the model."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    def save(config: Any, *, dtype: str = "float32", half: str | None = None) -> Path:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=getattr(torch, dtype))
        model = get_peft_model(base, config, autocast_adapter_dtype=dtype == "float32")
        if half is not None:
            model = model.to(getattr(torch, half))
        model.save_pretrained(str(tmp_path / "saved"))
        (tmp_path / "saved" / "README.md").unlink()
        return tmp_path / "saved"

    return save


def packed(directory: Path, facts: BaseFacts) -> PackageContents:
    plan = plan_build(directory, ManifestOverrides(), base=facts)
    untrained = [warning for warning in plan.warnings if "every lora_B is zero" in warning]
    assert list(plan.warnings) == untrained
    return read_package(build_package(plan, directory.parent / "x.expert").path)


def entry_of(contents: PackageContents) -> dict[str, Any]:
    (entry,) = json.loads(contents.small["expert.json"])["adapters"]
    return dict(entry)


@pytest.mark.parametrize("dora", [False, True])
def test_lora_and_dora(dora: bool, save: Save, facts: BaseFacts) -> None:
    from peft import LoraConfig

    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_dora=dora,
        use_rslora=True,
        rank_pattern={"down_proj": 2},
        target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    contents = packed(save(config), facts)
    kind = "dora" if dora else "lora"
    assert contents.manifest.kind == kind
    assert contents.manifest.description == f"{'DoRA' if dora else 'LoRA'} adapter saved"
    assert entry_of(contents) == {
        "kind": kind,
        "path": "adapter_model.safetensors",
        "config": "adapter_config.json",
        "rank": 4,
        "dtype": "float32",
        "tensors": (6 if dora else 4) * LAYERS,
    }
    (spec,) = contents.adapters
    assert {(type(p), p.rank, p.scale) for p in spec.parts if isinstance(p, Lora | Dora)} == {
        (Dora if dora else Lora, 4, 3.0),
        (Dora if dora else Lora, 2, 6 / 2**0.5),
    }


@pytest.mark.parametrize(
    ("dtype", "half", "expected"),
    [
        ("float32", "float16", "float16"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float16"),
    ],
)
def test_a_dora_in_half_precision(
    dtype: str, half: str | None, expected: str, save: Save, facts: BaseFacts
) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM")
    (spec,) = packed(save(config, dtype=dtype, half=half), facts).adapters
    assert spec.dtype == expected


@pytest.mark.parametrize(
    ("targets", "feedforward"),
    [
        (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
        (r".*\.(k_proj|v_proj|down_proj)", r".*\.down_proj"),
    ],
)
def test_ia3(targets: Any, feedforward: Any, save: Save, facts: BaseFacts) -> None:
    from peft import IA3Config

    config = IA3Config(
        target_modules=targets, feedforward_modules=feedforward, task_type="CAUSAL_LM"
    )
    contents = packed(save(config), facts)
    assert contents.manifest.description == "IA³ adapter saved"
    assert entry_of(contents).keys() == {"kind", "path", "config", "dtype", "tensors"}
    (spec,) = contents.adapters
    assert (spec.kind, spec.tensors) == ("ia3", 3 * LAYERS)
    sides = {(p.module.split(".")[-1], p.on_input, p.size) for p in spec.parts if type(p) is Ia3}
    assert sides == {("k_proj", False, 16), ("v_proj", False, 16), ("down_proj", True, 48)}


def test_ia3_on_the_modules_that_peft_chooses_itself(save: Save, facts: BaseFacts) -> None:
    from peft import IA3Config

    config = IA3Config(
        target_modules="all-linear", feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )
    (spec,) = packed(save(config), facts).adapters
    assert len(spec.parts) == 7 * LAYERS


def soft_prompts() -> dict[str, Any]:
    from peft import PromptEncoderConfig, PromptTuningConfig

    common: dict[str, Any] = {"num_virtual_tokens": 5, "task_type": "CAUSAL_LM"}
    return {
        "random": lambda base: PromptTuningConfig(**common),
        "vocabulary": lambda base: PromptTuningConfig(prompt_tuning_init="SAMPLE_VOCAB", **common),
        "text": lambda base: PromptTuningConfig(
            prompt_tuning_init="TEXT",
            prompt_tuning_init_text="Write SQL:",
            tokenizer_name_or_path=str(base),
            **common,
        ),
        "mlp": lambda base: PromptEncoderConfig(encoder_hidden_size=16, **common),
        "lstm": lambda base: PromptEncoderConfig(
            encoder_hidden_size=16, encoder_reparameterization_type="LSTM", **common
        ),
    }


@pytest.mark.parametrize("way", ["random", "vocabulary", "text", "mlp", "lstm"])
def test_prompt_tuning_and_p_tuning(way: str, save: Save, base_dir: Path, facts: BaseFacts) -> None:
    contents = packed(save(soft_prompts()[way](base_dir)), facts)
    assert contents.manifest.virtual_tokens == 5
    assert contents.manifest.description == "soft prompt adapter saved"
    assert entry_of(contents) == {
        "kind": "soft_prompt",
        "path": "adapter_model.safetensors",
        "config": "adapter_config.json",
        "tokens": 5,
        "dtype": "float32",
        "tensors": 1,
    }
    (spec,) = contents.adapters
    assert spec.parts == (SoftPrompt("prompt_embeddings", 5, 32),)


def test_our_own_files_are_those_that_peft_loads(tmp_path: Path, base_dir: Path) -> None:
    """The factories of the other tests write what PEFT takes, tensor by tensor."""
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.factories import write_dora, write_ia3, write_lora, write_soft_prompt

    for write in (write_lora, write_dora, write_ia3, write_soft_prompt):
        files = write(tmp_path / write.__name__, base_dir)
        base = AutoModelForCausalLM.from_pretrained(base_dir)
        model = PeftModel.from_pretrained(base, str(files))
        loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
        written = load_file(files / "adapter_model.safetensors")
        assert loaded.keys() == written.keys()
        assert all(torch.equal(loaded[name], written[name]) for name in written)
