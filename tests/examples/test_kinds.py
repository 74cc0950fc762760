"""A new adapter of any kind says what the base says, and two of them are applied in order."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from examples.starter.composed import compose
from examples.starter.kinds import Dora, Ia3, Kind, Lora, SoftPrompt
from examples.starter.train import attach, load_base, save
from examples.starter.vocab import encode_prompt
from expertctl.install.installer import STARTER

BASE = STARTER / "base"
PROMPT = "Sort these numbers: 41, 17, 23"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def logits(model: nn.Module, prompt: str = PROMPT, *, system: str | None = None) -> Tensor:
    """What comes after the prompt."""
    with torch.inference_mode():
        out: Tensor = model.eval()(torch.tensor([encode_prompt(prompt, system=system)])).logits
    return out[0, -1]


def disturbed(kind: Kind, folder: Path) -> Path:
    """A saved adapter whose weights are not those that it started with."""
    torch.manual_seed(5)
    model = attach(load_base(BASE), kind)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight) * 0.05)
    save(model, folder)
    return folder


@pytest.mark.parametrize("kind", [Lora(rank=8), Lora(rank=4, rslora=True), Dora(rank=8), Ia3()])
def test_a_new_adapter_changes_nothing(kind: Kind) -> None:
    expected = logits(load_base(BASE))
    torch.testing.assert_close(logits(attach(load_base(BASE), kind)), expected)


def test_a_new_soft_prompt_says_what_its_system_turn_says() -> None:
    expected = logits(load_base(BASE), system="@asc")
    model = attach(load_base(BASE), SoftPrompt(start="@asc"))
    torch.testing.assert_close(logits(model), expected)


def test_a_soft_prompt_stands_before_the_prompt_of_a_task(tmp_path: Path) -> None:
    task = disturbed(Lora(rank=8), tmp_path / "task")
    style = tmp_path / "style"
    save(attach(load_base(BASE), SoftPrompt(start="@exc")), style)
    expected = logits(PeftModel.from_pretrained(load_base(BASE), task), system="@exc")
    composed = compose(BASE, task, style)
    assert composed.virtual is not None
    ids = torch.tensor([encode_prompt(PROMPT)])
    embedded = composed.model.get_input_embeddings()(ids)
    with torch.inference_mode():
        said = composed.model(inputs_embeds=torch.cat([composed.virtual[None], embedded], 1)).logits
    torch.testing.assert_close(said[0, -1], expected, atol=1e-3, rtol=1e-3)  # float16 was saved


def test_factors_apply_to_what_the_task_made_of_a_module(tmp_path: Path) -> None:
    task, style = disturbed(Lora(rank=8), tmp_path / "a"), disturbed(Ia3(), tmp_path / "b")
    merged = PeftModel.from_pretrained(load_base(BASE), task).merge_and_unload()
    expected = logits(PeftModel.from_pretrained(merged, style))
    composed = compose(BASE, task, style)
    assert composed.virtual is None
    torch.testing.assert_close(logits(composed.model), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", [Lora(rank=8), Dora(rank=8), Ia3(), SoftPrompt(start="@exc")])
def test_saved_files_are_the_same_each_time(kind: Kind, tmp_path: Path) -> None:
    one, two = (disturbed(kind, tmp_path / name) for name in ("one", "two"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
