"""Bases that decoders are held against transformers on, and their kinds of rotation."""

from typing import Any

Shape = tuple[str, dict[str, Any]]

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

EVERYWHERE: list[Shape] = [
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
KERNELS: list[Shape] = [
    *EVERYWHERE,
    ("mistral", {"sliding_window": 18}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
]
_TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ROUTED: list[Shape] = [
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
TORCH: list[Shape] = [
    *EVERYWHERE,
    *ROUTED,
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
