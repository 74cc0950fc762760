"""What PEFT 0.21 writes for each kind of adapter: its configuration, and its tensors by shape.

Tensors of bases of routed experts, named as their publishers name them; torch-free.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ALL_PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
IA3_TARGETS = ("k_proj", "v_proj", "down_proj")
IA3_FEEDFORWARD = ("down_proj",)

Shapes = dict[str, tuple[int, ...]]


def lora_config(
    base_dir: Path, *, rank: int, alpha: float, targets: tuple[str, ...], **config: Any
) -> dict[str, Any]:
    """Return adapter_config.json as PEFT 0.21 writes it."""
    values: dict[str, Any] = {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": base_dir.name,
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "kasa_config": None,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": alpha,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "lora_ga_config": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "monteclora_config": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(targets),
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        "velora_config": None,
    }
    return {**values, **config}


def ia3_config(
    base_dir: Path, *, targets: tuple[str, ...], feedforward: tuple[str, ...], **config: Any
) -> dict[str, Any]:
    """Return adapter_config.json of an IA³ adapter."""
    values: dict[str, Any] = {
        "auto_mapping": None,
        "base_model_name_or_path": base_dir.name,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "feedforward_modules": list(feedforward),
        "inference_mode": True,
        "init_ia3_weights": True,
        "modules_to_save": None,
        "peft_type": "IA3",
        "peft_version": "0.21.2",
        "revision": None,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
    }
    return {**values, **config}


def prompt_config(
    base_dir: Path, base: Mapping[str, Any], *, kind: str, tokens: int, **config: Any
) -> dict[str, Any]:
    """Return adapter_config.json of a soft prompt, from prompt tuning or P-tuning."""
    encoder = {
        "encoder_dropout": 0.0,
        "encoder_hidden_size": base["hidden_size"],
        "encoder_num_layers": 2,
        "encoder_reparameterization_type": "MLP",
    }
    initialisation = {
        "prompt_tuning_init": "RANDOM",
        "prompt_tuning_init_text": None,
        "tokenizer_kwargs": None,
        "tokenizer_name_or_path": None,
    }
    values: dict[str, Any] = {
        "auto_mapping": None,
        "base_model_name_or_path": base_dir.name,
        "inference_mode": True,
        "modules_to_save": None,
        "num_attention_heads": base["num_attention_heads"],
        "num_layers": base["num_hidden_layers"],
        "num_transformer_submodules": 1,
        "num_virtual_tokens": tokens,
        "peft_type": kind,
        "peft_version": "0.21.2",
        "revision": None,
        "task_type": "CAUSAL_LM",
        "token_dim": base["hidden_size"],
    }
    return {**values, **(encoder if kind == "P_TUNING" else initialisation), **config}


def lora_shapes(
    base: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], *, targets: tuple[str, ...]
) -> Shapes:
    """Return the shape of every tensor of a LoRA or a DoRA; patterns are literal suffixes."""
    layers = config["layers_to_transform"]
    chosen = {layers} if isinstance(layers, int) else set(layers or ())
    shapes: Shapes = {}
    for module, outputs, inputs in _linear_shapes(base, targets):
        if chosen and int(module.split(".")[2]) not in chosen:
            continue
        rank, stem = _get_rank(module, config), f"base_model.model.{module}"
        shapes[f"{stem}.lora_A.weight"] = (rank, inputs)
        shapes[f"{stem}.lora_B.weight"] = (outputs, rank)
        if config["use_dora"]:
            shapes[f"{stem}.lora_magnitude_vector"] = (outputs,)
    return shapes


def ia3_shapes(
    base: Mapping[str, tuple[int, ...]],
    *,
    targets: tuple[str, ...],
    feedforward: tuple[str, ...],
) -> Shapes:
    """Return the shape of every tensor of an IA³ adapter."""
    return {
        f"base_model.model.{module}.ia3_l": (
            (1, inputs) if module.endswith(feedforward) else (outputs, 1)
        )
        for module, outputs, inputs in _linear_shapes(base, targets)
    }


def _linear_shapes(
    base: Mapping[str, tuple[int, ...]], targets: tuple[str, ...]
) -> Iterator[tuple[str, int, int]]:
    for name, shape in base.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module.endswith(tuple(f".{target}" for target in targets)):
            yield module, shape[0], shape[1]


def _get_rank(module: str, config: Mapping[str, Any]) -> int:
    for key, rank in config["rank_pattern"].items():
        if module == key or module.endswith(f".{key}"):
            return int(rank)
    return int(config["r"])


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
_CANONICAL_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".shared_experts.": ".shared_expert.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


def mlp_shapes(config: Mapping[str, Any], layer: int, *, stacked: bool = False) -> Shapes:
    """Return the tensors of what follows attention in a layer, from the layer's prefix on."""
    if not has_routed_experts(config, layer):
        return _gated_mlp_shapes("mlp", config["hidden_size"], config["intermediate_size"])
    kind, hidden = config["model_type"], config["hidden_size"]
    count = _expert_count(config)
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    top = "mlp" if stacked or kind != "mixtral" else "block_sparse_moe"
    shapes: Shapes = {f"{top}.gate.weight": (count, hidden)}
    if stacked:
        shapes["mlp.experts.gate_up_proj"] = (count, 2 * inner, hidden)
        shapes["mlp.experts.down_proj"] = (count, hidden, inner)
    for number in range(0 if stacked else count):
        names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        shapes |= _gated_mlp_shapes(f"{top}.experts.{number}", hidden, inner, names)
    return shapes | _dense_shapes(config, inner)


def to_canonical_name(name: str) -> str:
    """Return what expertctl calls a tensor that its publisher calls otherwise."""
    for theirs, ours in _CANONICAL_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def has_routed_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Tell whether a layer has routed experts."""
    if config["model_type"] not in CLASSES:
        return False
    step = config.get("decoder_sparse_step", 1)
    first = config.get("first_k_dense_replace", 0)
    dense = config.get("mlp_only_layers", [])
    return layer >= first and layer not in dense and (layer + 1) % step == 0


def _expert_count(config: Mapping[str, Any]) -> int:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next(int(config[name]) for name in names if name in config)


def _dense_shapes(config: Mapping[str, Any], inner: int) -> Shapes:
    hidden = config["hidden_size"]
    match config["model_type"]:
        case "qwen2_moe":
            shared = _gated_mlp_shapes(
                "mlp.shared_expert", hidden, config["shared_expert_intermediate_size"]
            )
            return {**shared, "mlp.shared_expert_gate.weight": (1, hidden)}
        case "dots1":
            shared = _gated_mlp_shapes(
                "mlp.shared_experts", hidden, inner * config["n_shared_experts"]
            )
            return {**shared, "mlp.gate.e_score_correction_bias": (_expert_count(config),)}
        case _:
            return {}


def _gated_mlp_shapes(
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
