"""Bases of routed experts as transformers runs them, which keeps a layer's experts in one stack."""

import re
from typing import Any

import torch
import transformers
from torch import Tensor

CLASSES = {
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
}
VALUES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3},
    "dots1": {
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
}
"""Small numbers of experts; sizes are not those of dense layers."""

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<name>gate|up|down)_proj")


def weight_of(model: Any, module: str) -> Tensor:
    """Return the weights [out, in] of a linear layer by our name for it, as a view."""
    match = _EXPERT.fullmatch(module)
    if match is None:
        name = module.replace(".shared_expert.", ".shared_experts.")
        known = dict(model.named_modules())
        found: Tensor = known[module if module in known else name].weight
        return found
    experts, number = model.get_submodule(match["experts"]), int(match["number"])
    if match["name"] == "down":
        down: Tensor = experts.down_proj[number]
        return down
    gate, up = experts.gate_up_proj[number].chunk(2)
    return gate if match["name"] == "gate" else up


def randomise_choice(model: Any, generator: torch.Generator) -> None:
    """Give the biases of routers values: they are buffers, and begin as zeros."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
