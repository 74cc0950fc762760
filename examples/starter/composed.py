"""A task and a style at once with transformers and peft, which activate no two kinds together.

peft attaches the task. The style is applied by hand: the factors of an IA³ around its modules,
after what the task adds to them; a soft prompt as embeddings before those of the prompt.
"""

from dataclasses import dataclass
from pathlib import Path

from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from examples.starter.train import FEED_FORWARD, load_base

FACTORS = ".ia3_l"
EMBEDDINGS = "prompt_embeddings"


@dataclass(frozen=True, slots=True)
class Composed:
    """A model with its experts, and what stands before the prompt, [tokens, width]."""

    model: PeftModel
    virtual: Tensor | None = None


def compose(base: Path, task: Path, style: Path) -> Composed:
    """The base with a LoRA or DoRA, and then an IA³ or a soft prompt."""
    model = PeftModel.from_pretrained(load_base(base), task)
    tensors = load_file(style / "adapter_model.safetensors")
    if EMBEDDINGS in tensors:
        return Composed(model, tensors[EMBEDDINGS].float())
    for name, factors in tensors.items():
        path = name.removesuffix(FACTORS)
        on_input = path.rpartition(".")[2] in FEED_FORWARD
        _scale(model.get_submodule(path), factors.float().flatten(), on_input=on_input)
    return Composed(model)


def _scale(module: nn.Module, factors: Tensor, *, on_input: bool) -> None:
    if on_input:
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0] * factors, *inputs[1:]))
    else:
        module.register_forward_hook(lambda _, __, output: output * factors)
