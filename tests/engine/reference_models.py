"""Bases that decoders are held against transformers on, and their kinds of rotation.

Bases of routed experts as transformers runs them, which keeps a layer's experts in one stack.

Models of transformers with adapters written into their weights, expert by expert.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.tensor_shapes import to_canonical_name

ModelShape = tuple[str, dict[str, Any]]

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
_BETAS = {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 8.0, "beta_slow": 2.0}

COMMON_SHAPES: list[ModelShape] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    ("llama", {"rope_parameters": _LINEAR}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {**_YARN, "rope_theta": 1e6}}),
    ("qwen3", {}),
]
"""What both decoders run."""
KERNEL_SHAPES: list[ModelShape] = [
    *COMMON_SHAPES,
    ("mistral", {"sliding_window": 18}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
]
_TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ROUTED_SHAPES: list[ModelShape] = [
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 4, "head_dim": 12, "tie_word_embeddings": True}),
    ("qwen2_moe", {}),
    ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen2_moe", {"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 3}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True, "num_experts_per_tok": 6}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "head_dim": 10}),
    ("olmoe", {}),
    ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4, "attention_bias": True}),
    ("dots1", {}),
    ("dots1", {"norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": 1}),
    ("dots1", {"sliding_window": 3, "layer_types": _TWO_KINDS, "num_experts_per_tok": 1}),
]
"""Bases of routed experts."""
TORCH_SHAPES: list[ModelShape] = [
    *COMMON_SHAPES,
    *ROUTED_SHAPES,
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 16}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 16, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3", {"head_dim": 12, "num_attention_heads": 6, "num_key_value_heads": 3}),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    ("qwen3", {"rope_parameters": {**_YARN, "rope_theta": 1e4, "truncate": False}}),
    ("qwen3", {"rope_parameters": {**_YARN, "rope_theta": 1e4, **_BETAS}}),
]
"""Such as kernels do not take, too: heads of any size."""


ROUTED_CLASSES = {
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
}
ROUTED_CONFIGS: dict[str, dict[str, Any]] = {
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


def get_weight(model: Any, module: str) -> Tensor:
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


def randomise_router_bias(model: Any, generator: torch.Generator) -> None:
    """Give the biases of routers values: they are buffers, and begin as zeros."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_MODULES = (
    *ATTENTION,
    "gate_proj",
    "up_proj",
    "down_proj",
    "w1",
    "w2",
    "w3",
    "shared_expert_gate",
)
"""All that an adapter may change, by any architecture's name."""

_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+?)\.(?P<part>lora_[ABm]|ia3_l)\w*(\.weight)?"
)


def merge_adapter(model: Any, directory: Path) -> int:
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
            weight = get_weight(model, to_canonical_name(f"{module}.").removesuffix("."))
            weight.copy_(_apply_update(weight.double(), parts, scale))
            bias = biases.get(f"{module}.bias")
            if bias is not None and "ia3_l" in parts and parts["ia3_l"].shape[1] == 1:
                bias.mul_(parts["ia3_l"][:, 0])
    return len(changes)


def _apply_update(weight: Tensor, parts: dict[str, Tensor], scale: float) -> Tensor:
    """``W + s B A``; DoRA gives its rows their magnitudes, IA³ scales rows or columns of W."""
    if "ia3_l" in parts:
        return weight * parts["ia3_l"]
    weight = weight + scale * parts["lora_B"] @ parts["lora_A"]
    if "lora_m" not in parts:
        return weight
    return weight * (parts["lora_m"] / weight.norm(dim=1))[:, None]
