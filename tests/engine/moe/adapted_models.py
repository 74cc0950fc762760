"""Models of transformers with adapters written into their weights, expert by expert."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.routed_models import weight_of
from tests.routed_shapes import our_name

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "shared_expert_gate")
"""All that an adapter may change, by any architecture's name."""

_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.(?P<part>lora_[ABm]|ia3_l)\w*(\.weight)?"
)


def merge(model: Any, directory: Path) -> int:
    """Write an adapter into the weights of a model; return how many matrices it changed."""
    config = json.loads((directory / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"] if "r" in config else 1.0
    changes: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(directory / "adapter_model.safetensors").items():
        match = _TENSOR.fullmatch(name)
        assert match is not None, name
        changes.setdefault(match["module"], {})[match["part"]] = tensor.double()
    biases = dict(model.named_parameters())
    with torch.no_grad():
        for module, parts in changes.items():
            weight = weight_of(model, our_name(f"{module}.").removesuffix("."))
            weight.copy_(_changed(weight.double(), parts, scale))
            bias = biases.get(f"{module}.bias")
            if bias is not None and "ia3_l" in parts and parts["ia3_l"].shape[1] == 1:
                bias.mul_(parts["ia3_l"][:, 0])
    return len(changes)


def _changed(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """``W + s B A``; DoRA gives its rows their magnitudes, IA³ scales rows or columns of W."""
    if "ia3_l" in parts:
        return weight * parts["ia3_l"]
    weight = weight + scale * parts["lora_B"] @ parts["lora_A"]
    if "lora_m" not in parts:
        return weight
    return weight * (parts["lora_m"] / weight.norm(dim=1))[:, None]
