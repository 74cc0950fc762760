"""What PEFT 0.21 writes for each kind of adapter: its configuration, and its tensors by shape."""

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
    for module, outputs, inputs in _linear(base, targets):
        if chosen and int(module.split(".")[2]) not in chosen:
            continue
        rank, stem = _rank(module, config), f"base_model.model.{module}"
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
        for module, outputs, inputs in _linear(base, targets)
    }


def _linear(
    base: Mapping[str, tuple[int, ...]], targets: tuple[str, ...]
) -> Iterator[tuple[str, int, int]]:
    for name, shape in base.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module.endswith(tuple(f".{target}" for target in targets)):
            yield module, shape[0], shape[1]


def _rank(module: str, config: Mapping[str, Any]) -> int:
    for key, rank in config["rank_pattern"].items():
        if module == key or module.endswith(f".{key}"):
            return int(rank)
    return int(config["r"])
