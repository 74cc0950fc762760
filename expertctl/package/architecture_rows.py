"""The architectures that our decoder runs: one row each, by ``model_type``.

Those with the blocks of Llama or with a gated DeltaNet are here, all others in
`expertctl.package.other_family_rows`.
"""

from dataclasses import replace

from expertctl.package.architectures import Architecture, ExpertsRules
from expertctl.package.delta_net_config import DELTA_NET_NAMES
from expertctl.package.other_family_rows import OTHER_FAMILIES
from expertctl.package.stored_layout import StoredNames

_COUNT_NAMES = ("num_experts", "num_local_experts")

_LIKE_LLAMA = {
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        max_positions=2048,
        qkv_bias="configured",
        mlp_bias="configured",
    ),
    "mistral": Architecture(
        class_name="MistralForCausalLM", max_positions=131072, kv_heads=8, window="every_layer"
    ),
    "qwen2": Architecture(
        class_name="Qwen2ForCausalLM",
        max_positions=32768,
        qkv_bias="always",
        output_bias="never",
        kv_heads=32,
        window="late_layers",
    ),
    "qwen3": Architecture(
        class_name="Qwen3ForCausalLM",
        max_positions=32768,
        qkv_bias="configured",
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
        experts=ExpertsRules(count_names=_COUNT_NAMES, count=8, used=2, normalised=True),
    ),
    "qwen2_moe": Architecture(
        class_name="Qwen2MoeForCausalLM",
        max_positions=32768,
        qkv_bias="configured_apart",
        output_bias="never",
        kv_heads=16,
        window="even_layers",
        experts=ExpertsRules(
            count_names=_COUNT_NAMES[:1],
            count=60,
            used=4,
            size=1408,
            layers="by_step",
            shared="gated",
        ),
    ),
    "qwen3_moe": Architecture(
        class_name="Qwen3MoeForCausalLM",
        max_positions=32768,
        qkv_bias="configured",
        norms="head",
        kv_heads=4,
        window="every_layer_if_used",
        experts=ExpertsRules(
            count_names=_COUNT_NAMES, count=128, used=8, size=768, layers="by_step"
        ),
    ),
    "olmoe": Architecture(
        class_name="OlmoeForCausalLM",
        max_positions=4096,
        norm_eps=1e-5,
        qkv_bias="configured",
        norms="projection",
        experts=ExpertsRules(count_names=_COUNT_NAMES, count=64, used=8),
        refused=("clip_qkv",),
    ),
    "dots1": Architecture(
        class_name="Dots1ForCausalLM",
        max_positions=2048,
        qkv_bias="configured",
        norms="head",
        kv_heads=32,
        window="late_layers_always",
        experts=ExpertsRules(
            count_names=("n_routed_experts", "num_local_experts"),
            size=1408,
            layers="after_first",
            scoring="sigmoid",
            shared="several",
        ),
    ),
}

_DELTA_NET = Architecture(
    class_name="Qwen3_5ForCausalLM",
    max_positions=32768,
    qkv_bias="configured",
    kv_heads=4,
    head_dim=256,
    norm="rms_plus_one",
    norms="head",
    head_norm="rms_plus_one",
    partial_rotary=0.25,
    delta_net=True,
    stored=StoredNames(
        layer=DELTA_NET_NAMES,
        other_parts=("model.visual.", "mtp."),
    ),
)
_DELTA_EXPERTS = ExpertsRules(
    count_names=("num_experts", "num_local_experts"),
    count=256,
    used=8,
    size=512,
    normalised=True,
    shared="gated",
    shared_size=512,
)
_WITH_DELTA_NET = {
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": replace(
        _DELTA_NET,
        class_name="Qwen3_5MoeForCausalLM",
        kv_heads=2,
        intermediate=1,
        experts=_DELTA_EXPERTS,
    ),
    "qwen3_next": replace(
        _DELTA_NET,
        class_name="Qwen3NextForCausalLM",
        kv_heads=2,
        experts=replace(
            _DELTA_EXPERTS,
            count=512,
            used=10,
            layers="by_step",
            normalised=None,
            normalised_default=True,
        ),
        stored=StoredNames(layer=DELTA_NET_NAMES, other_parts=("mtp.",), grouped_delta=True),
    ),
}

ARCHITECTURES = {**_LIKE_LLAMA, **_WITH_DELTA_NET, **OTHER_FAMILIES}

ELSE_FOREIGN = frozenset({*_WITH_DELTA_NET, *OTHER_FAMILIES})
"""Architectures whose bases transformers runs where our decoder does not support an option."""
