"""Tensors of bases of routed experts, named as their publishers name them; torch-free."""

from collections.abc import Mapping
from typing import Any

CLASSES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}
"""What a base is written with where a test does not say."""
_OUR_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".shared_experts.": ".shared_expert.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
Shapes = dict[str, tuple[int, ...]]


def mlp_shapes(config: Mapping[str, Any], layer: int, *, stacked: bool = False) -> Shapes:
    """Return the tensors of what follows attention in a layer, from the layer's prefix on."""
    if not is_routed(config, layer):
        return _gated("mlp", config["hidden_size"], config["intermediate_size"])
    kind, hidden = config["model_type"], config["hidden_size"]
    count = _count(config)
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    top = "mlp" if stacked or kind != "mixtral" else "block_sparse_moe"
    shapes: Shapes = {f"{top}.gate.weight": (count, hidden)}
    if stacked:
        shapes["mlp.experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes["mlp.experts.down_proj"] = (count, hidden, inner)
    for number in range(0 if stacked else count):
        names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        shapes |= _gated(f"{top}.experts.{number}", hidden, inner, names)
    return shapes | _beside(config, inner)


def our_name(name: str) -> str:
    """Return what expertctl calls a tensor that its publisher calls otherwise."""
    for theirs, ours in _OUR_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def is_routed(config: Mapping[str, Any], layer: int) -> bool:
    """Tell whether a layer has routed experts."""
    if config["model_type"] not in CLASSES:
        return False
    step = config.get("decoder_sparse_step", 1)
    first = config.get("first_k_dense_replace", 0)
    dense = config.get("mlp_only_layers", [])
    return layer >= first and layer not in dense and (layer + 1) % step == 0


def _count(config: Mapping[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next(int(config[name]) for name in names if name in config)


def _beside(config: Mapping[str, Any], inner: int) -> Shapes:
    hidden = config["hidden_size"]
    match config["model_type"]:
        case "qwen2_moe":
            shared = _gated("mlp.shared_expert", hidden, config["shared_expert_intermediate_size"])
            return {**shared, "mlp.shared_expert_gate.weight": (1, hidden)}
        case "dots1":
            shared = _gated("mlp.shared_experts", hidden, inner * config["n_shared_experts"])
            return {**shared, "mlp.gate.e_score_correction_bias": (_count(config),)}
        case _:
            return {}


def _gated(
    prefix: str,
    hidden: int,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Shapes:
    gate, up, down = names
    return {
        f"{prefix}.{gate}.weight": (inner, hidden),
        f"{prefix}.{up}.weight": (inner, hidden),
        f"{prefix}.{down}.weight": (hidden, inner),
    }
