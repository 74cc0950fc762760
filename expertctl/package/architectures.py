"""The architectures that the decoder runs: a row for each holds all that differs in it.

The decoder knows no architecture by name. Values of a row are what transformers takes for absent
keys of ``config.json``.
"""

from dataclasses import dataclass
from typing import Literal

Bias = Literal["never", "always", "configured", "configured_apart"]
"""``configured_apart``: queries, keys and values have a key of their own, ``qkv_bias``."""
Window = Literal[
    "none",
    "every_layer",
    "every_layer_or_none",
    "every_layer_if_used",
    "late_layers",
    "late_layers_always",
    "even_layers",
]
"""Which layers see only a window of earlier tokens; see `expertctl.package.layer_windows`."""
Norms = Literal["none", "head", "projection"]
"""What queries and keys are normed over: one head, or all heads together."""
Scoring = Literal["softmax", "sigmoid"]
RoutedLayers = Literal["all", "by_step", "after_first"]
Shared = Literal["none", "gated", "several"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRow:
    """How an architecture routes tokens to experts; without a default a key must be there."""

    count_names: tuple[str, ...]
    """The keys that may hold the number of experts; any of them counts."""
    count: int | None = None
    used: int | None = None
    size: int | None = None
    """The default for ``moe_intermediate_size``; None: the intermediate size of the base."""
    layers: RoutedLayers = "all"
    scoring: Scoring = "softmax"
    normalised: bool | None = None
    """None: ``norm_topk_prob`` says it."""
    shared: Shared = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One row: how this architecture differs from the others."""

    class_name: str
    max_positions: int
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    qkv_bias: Bias = "never"
    output_bias: Bias = "never"
    mlp_bias: Bias = "never"
    norms: Norms = "none"
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    window: Window = "none"
    experts: ExpertsRow | None = None
    refused: str | None = None
    """A key whose values, except null, mean something that the decoder does not compute."""


_COUNTS = ("num_experts", "num_local_experts")

ARCHITECTURES = {
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        max_positions=2048,
        qkv_bias="configured",
        output_bias="configured",
        mlp_bias="configured",
    ),
    "mistral": Architecture(
        class_name="MistralForCausalLM", max_positions=131072, kv_heads=8, window="every_layer"
    ),
    "qwen2": Architecture(
        class_name="Qwen2ForCausalLM",
        max_positions=32768,
        qkv_bias="always",
        kv_heads=32,
        window="late_layers",
    ),
    "qwen3": Architecture(
        class_name="Qwen3ForCausalLM",
        max_positions=32768,
        qkv_bias="configured",
        output_bias="configured",
        norms="head",
        kv_heads=32,
        head_dim=128,
        window="late_layers",
    ),
    "mixtral": Architecture(
        class_name="MixtralForCausalLM",
        max_positions=131072,
        norm_eps=1e-5,
        theta=1_000_000.0,
        kv_heads=8,
        window="every_layer_or_none",
        experts=ExpertsRow(count_names=_COUNTS, count=8, used=2, normalised=True),
    ),
    "qwen2_moe": Architecture(
        class_name="Qwen2MoeForCausalLM",
        max_positions=32768,
        qkv_bias="configured_apart",
        kv_heads=16,
        window="even_layers",
        experts=ExpertsRow(
            count_names=_COUNTS[:1], count=60, used=4, size=1408, layers="by_step", shared="gated"
        ),
    ),
    "qwen3_moe": Architecture(
        class_name="Qwen3MoeForCausalLM",
        max_positions=32768,
        qkv_bias="configured",
        output_bias="configured",
        norms="head",
        kv_heads=4,
        window="every_layer_if_used",
        experts=ExpertsRow(count_names=_COUNTS, count=128, used=8, size=768, layers="by_step"),
    ),
    "olmoe": Architecture(
        class_name="OlmoeForCausalLM",
        max_positions=4096,
        norm_eps=1e-5,
        qkv_bias="configured",
        output_bias="configured",
        norms="projection",
        experts=ExpertsRow(count_names=_COUNTS, count=64, used=8),
        refused="clip_qkv",
    ),
    "dots1": Architecture(
        class_name="Dots1ForCausalLM",
        max_positions=2048,
        qkv_bias="configured",
        output_bias="configured",
        norms="head",
        kv_heads=32,
        window="late_layers_always",
        experts=ExpertsRow(
            count_names=("n_routed_experts", "num_local_experts"),
            size=1408,
            layers="after_first",
            scoring="sigmoid",
            shared="several",
        ),
    ),
}
