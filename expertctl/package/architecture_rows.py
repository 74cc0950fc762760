"""The architectures that our decoder runs: one row each, by ``model_type``.

Those with the blocks of Llama are here, all others in `expertctl.package.other_family_rows`.
"""

from expertctl.package.architectures import Architecture, ConfigFields, ExpertsRules
from expertctl.package.other_family_rows import OTHER_FAMILIES
from expertctl.schema.strict_json import JsonObject

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

TEXT_PARTS = {
    "qwen3_5": ("qwen3_5_text", ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    ),
}
"""Models that also read images, by ``model_type``: their decoder's architecture, their classes."""

ARCHITECTURES = {**_LIKE_LLAMA, **OTHER_FAMILIES}

ELSE_FOREIGN = frozenset(OTHER_FAMILIES)
"""Architectures whose bases transformers runs where our decoder does not support an option."""


def select_text_part(document: JsonObject, what: str) -> JsonObject:
    """Return the configuration of the decoder of a model that also reads images, or the same one.

    Raises:
        InvalidPackageError: when it has none.
    """
    if document.get("model_type") in {name for name, _ in TEXT_PARTS.values()}:
        return _drop_image_rope(document)
    kind, classes = document.get("model_type"), document.get("architectures")
    text, usual = TEXT_PARTS.get(str(kind), (None, ()))
    if text is None or not (classes is None or classes in [[name] for name in usual]):
        return document
    inner = ConfigFields(document).read_nested("text_config")
    inner.raise_problems(what)
    tied = document.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    kept = {n: v for n, v in inner.values.items() if n != "architectures"}
    return _drop_image_rope({**kept, "model_type": text, "tie_word_embeddings": tied})


def _drop_image_rope(document: JsonObject) -> JsonObject:
    """Return a configuration without what places images: tokens of a text have one position."""
    found = document.get("rope_parameters")
    if not isinstance(found, dict):
        return document
    kept = {n: v for n, v in found.items() if n not in ("mrope_section", "mrope_interleaved")}
    return {**document, "rope_parameters": kept}
