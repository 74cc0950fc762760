"""Tiny random models of every family, saved by transformers itself: the oracle of the decoder."""

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.factories import VOCAB

FamilyShape = tuple[str, dict[str, Any]]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_HEADS = {"head_dim": 12}
_ALONE = {"num_key_value_heads": 4}
_TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_GRANITE4 = {
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 3,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "mamba_n_heads": 4,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}

CLASSES = {
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "granite": "Granite",
    "granitemoehybrid": "GraniteMoeHybrid",
    "smollm3": "SmolLM3",
    "qwen2": "Qwen2",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "glm4": "Glm4",
    "cohere": "Cohere",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "exaone4": "Exaone4",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "phi": "Phi",
    "gpt_neox": "GPTNeoX",
    "gpt2": "GPT2",
    "falcon": "Falcon",
    "olmo3": "Olmo3",
    "gemma4_text": "Gemma4Text",
    "gpt_oss": "GptOss",
    "qwen3_5_text": "Qwen3_5Text",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_moe_text": "Qwen3_5MoeText",
}
DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_DELTA_EXPERTS = {
    **DELTA_NET,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
SHAPES: list[FamilyShape] = [
    ("gemma", _HEADS),
    ("gemma", {**_ALONE, "head_dim": 8, "hidden_act": "gelu", "attention_bias": True}),
    ("gemma2", {**_HEADS, "sliding_window": 5}),
    (
        "gemma2",
        {
            **_ALONE,
            "head_dim": 8,
            "sliding_window": 4,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "layer_types": _TWO_KINDS,
        },
    ),
    ("gemma2", {**_HEADS, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {**_HEADS, "sliding_window": 5, "layer_types": _TWO_KINDS}),
    (
        "gemma3_text",
        {
            **_ALONE,
            "head_dim": 8,
            "sliding_window": 3,
            "final_logit_softcapping": 4.0,
            "layer_types": _TWO_KINDS,
            "rope_parameters": {
                **_LOCAL,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            },
        },
    ),
    (
        "gemma4_text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": _TWO_KINDS[:2] * 2,
            "use_double_wide_mlp": True,
            "sliding_window": 5,
        },
    ),
    (
        "gemma4_text",
        {
            **_ALONE,
            "head_dim": 12,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "layer_types": _TWO_KINDS,
            "sliding_window": 3,
            "final_logit_softcapping": 4.0,
        },
    ),
    ("phi3", {}),
    ("phi3", {**_ALONE, "sliding_window": 5, "tie_word_embeddings": True}),
    ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 32}),
    (
        "phi3",
        {
            "rope_parameters": {
                **_LONGROPE,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.3, 1.6],
                "long_factor": [1.0, 2.0, 3.0],
            },
            "original_max_position_embeddings": 32,
        },
    ),
    ("olmo2", {}),
    ("olmo2", {**_ALONE, "attention_bias": True}),
    ("olmo3", {"sliding_window": 5}),
    (
        "olmo3",
        {
            **_ALONE,
            "sliding_window": 3,
            "layer_types": _TWO_KINDS,
            "rope_parameters": {**_LOCAL, "full_attention": {**_YARN, "rope_theta": 500.0}},
        },
    ),
    ("granite", {}),
    (
        "granite",
        {
            **_ALONE,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "mlp_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    ("granitemoehybrid", {**_GRANITE4, "position_embedding_type": "rope"}),
    ("granitemoehybrid", {**_GRANITE4, **_ALONE, "residual_multiplier": 0.5}),
    ("smollm3", {"no_rope_layer_interval": 2}),
    (
        "smollm3",
        {
            **_ALONE,
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 4,
            "attention_bias": True,
        },
    ),
    ("qwen2", {**_ALONE, "tie_word_embeddings": False}),
    ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ("ministral", {"head_dim": 8, "sliding_window": 5, "layer_types": _TWO_KINDS}),
    (
        "ministral",
        {
            **_ALONE,
            "sliding_window": 3,
            "head_dim": 12,
            "layer_types": [*_TWO_KINDS[1:], "full_attention"],
        },
    ),
    ("ministral3", {**_HEADS, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.0}}),
    (
        "ministral3",
        {
            **_ALONE,
            "head_dim": 8,
            "rope_parameters": {
                **_YARN,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    ("glm4", {"head_dim": 8}),
    ("glm4", {**_ALONE, "head_dim": 12, "partial_rotary_factor": 1.0, "attention_bias": False}),
    ("cohere", {"logit_scale": 0.8}),
    ("cohere", {**_ALONE, "use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5}),
    ("cohere", {"use_qk_norm": True, "logit_scale": 0.7}),
    ("stablelm", {}),
    (
        "stablelm",
        {
            **_ALONE,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    ("stablelm", {"qk_layernorm": True, "partial_rotary_factor": 1.0}),
    ("starcoder2", {"sliding_window": 5}),
    ("starcoder2", {**_ALONE, "use_bias": False, "hidden_act": "relu"}),
    ("exaone4", {"sliding_window": 5, "sliding_window_pattern": 3}),
    (
        "exaone4",
        {**_ALONE, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    ("exaone4", {"sliding_window": 4, "layer_types": _TWO_KINDS, "sliding_window_pattern": "LG"}),
    ("hunyuan_v1_dense", {**_HEADS}),
    (
        "hunyuan_v1_dense",
        {
            **_ALONE,
            "head_dim": 8,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 1e4,
            },
        },
    ),
    ("phi", {}),
    ("phi", {**_ALONE, "qk_layernorm": True, "partial_rotary_factor": 1.0}),
    ("gpt_neox", {"num_attention_heads": 4}),
    (
        "gpt_neox",
        {"num_attention_heads": 2, "use_parallel_residual": False, "attention_bias": False},
    ),
    ("gpt2", {}),
    ("gpt2", {"n_inner": 40, "n_head": 2, "tie_word_embeddings": False}),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 6, "sliding_window": 5}),
    (
        "gpt_oss",
        {
            **_ALONE,
            **_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [*_TWO_KINDS[1:], "full_attention"],
            "sliding_window": 3,
            "swiglu_limit": 0.4,
            "swiglu_alpha": 2.5,
            "attention_bias": False,
            "rope_parameters": {**_YARN, "rope_theta": 500.0, "truncate": False},
        },
    ),
    ("falcon", {}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    ("qwen3_5_text", DELTA_NET),
    (
        "qwen3_5_text",
        {
            **DELTA_NET,
            **_ALONE,
            "num_hidden_layers": 4,
            "layer_types": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 3,
        },
    ),
    ("qwen3_next", _DELTA_EXPERTS),
    ("qwen3_next", {**_DELTA_EXPERTS, **_ALONE, "mlp_only_layers": [1], "norm_topk_prob": False}),
    ("qwen3_5_moe_text", _DELTA_EXPERTS),
]
"""Two or more a family, one with grouped queries where it has them."""


def is_recurrent(arch: str) -> bool:
    """Tell whether a family has layers whose state is normed, which makes rounding larger."""
    return arch.startswith(("qwen3_5", "qwen3_next"))


def build_family_model(directory: Path, arch: str, *, seed: int = 0, **config: Any) -> Any:
    """Save a random model of a family and return it as transformers runs it."""
    name = CLASSES[arch]
    config_class = getattr(transformers, f"{name}Config")
    name = name.removesuffix("Text")
    head = "LMHeadModel" if arch == "gpt2" else "ForCausalLM"
    sizes = {"vocab_size": VOCAB, **_GPT2} if arch == "gpt2" else _SIZES
    values = {**sizes, **config}
    if arch in ("gpt_neox", "falcon"):
        del values["num_key_value_heads"]
    chosen = config_class(**values, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}{head}")(chosen).eval()
    generator = torch.Generator().manual_seed(seed)
    noise_size = 0.1 if arch.startswith("gemma") else 0.15  # its embeddings are scaled up
    noise_size = 0.06 if arch == "gemma4_text" else noise_size  # and its scores are not scaled down
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * noise_size
            if "conv1d" in parameter_name:
                noise *= 8  # or queries times keys are nearly 0, and a norm makes rounding larger
            elif "linear_attn.out_proj" in parameter_name:
                noise *= 0.3
            is_scale = parameter.ndim < 2 and parameter_name.endswith("weight")
            parameter.copy_(1 + noise if is_scale else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(1, generator=generator) * 0.1)
    model.save_pretrained(directory)
    return model


def save_with_images(model: Any, directory: Path) -> Any:
    """Save a Qwen3.5 with the same text part and a part for images, and return it; add a draft."""
    text = model.config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "mtp.fc.weight": torch.zeros(2, 2)}, path, metadata={"format": "pt"})
    return whole


_FEED_FORWARD_ENDS = ("down_proj", "output_linear", "fc2", "mlp.c_proj", "dense_4h_to_h")
_LAYER = re.compile(r".*\.(?:layers|h)\.\d+\.(?P<rest>.+)")


def save_family_adapter(
    model: Any,
    kind: str,
    folder: Path,
    *,
    seed: int = 1,
    head: bool = False,
    parameters: list[str] | None = None,
) -> Any:
    """Return the model with an adapter on every projection that PEFT made, and save the adapter.

    A LoRA may change ``parameters`` as well: stacks of routed experts.
    """
    names = [name for name, module in model.named_modules() if _is_projection(module)]
    matches = [_LAYER.fullmatch(name) for name in names]
    targets = sorted({match["rest"] for match in matches if match is not None})
    targets += ["lm_head"] * head
    targets += [name for name in ("per_layer_model_projection",) if f"model.{name}" in names]
    if kind == "ia3":
        ends = [name for name in targets if name.endswith(_FEED_FORWARD_ENDS)]
        config: Any = peft.IA3Config(target_modules=targets, feedforward_modules=ends)
    else:
        config = peft.LoraConfig(
            r=3, lora_alpha=4, target_modules=targets, use_dora=kind == "dora", bias="none"
        )
        config.target_parameters = parameters
    config.task_type = "CAUSAL_LM"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.2
                grow = any(word in name for word in ("ia3", "magnitude"))
                parameter.copy_(parameter * (1 + noise) if grow else noise)
        adapted.save_pretrained(folder, save_embedding_layers=False)
    return adapted


def _is_projection(module: Any) -> bool:
    return type(module).__name__ in ("Linear", "FalconLinear", "Conv1D")
