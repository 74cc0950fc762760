"""The configuration fields that a decoder reads, in one normal form.

Two ``config.json`` files that mean the same decoder give the same document, however old they are:
``rope_theta`` and ``rope_scaling`` of transformers 4 become ``rope_parameters``, defaults are
filled in per model type as transformers does, and sliding windows name the layers that have one.
"""

from collections.abc import Mapping
from typing import Any

from expertctl.errors import InvalidPackageError
from expertctl.schema.strict_json import JsonObject, JsonValue

DECODER_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "sliding_layers",
    "rope_parameters",
)
"""Every field that a decoder may read from a configuration, in its normal form."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "max_window_layers",
    "max_position_embeddings",
)
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "attention_bias": True,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
"""What transformers takes for an absent field, where that depends on the model type."""

_COMMON: Mapping[str, Any] = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_ROPE_THETA = 10000.0
_MAX_COUNT = 2**31 - 1
_MAX_LAYERS = 10_000


def decoder_config(config: JsonObject, *, what: str = "config.json") -> dict[str, Any]:
    """Return the values of `DECODER_FIELDS`.

    Raises:
        InvalidPackageError: when a field is missing or not of its kind.
    """
    problems = [f"{n}: not a positive integer" for n in _REQUIRED if not _is_count(config.get(n))]
    problems += [
        f"{name}: neither null nor a whole number"
        for name in _OPTIONAL
        if config.get(name) is not None and not _is_count(config[name], minimum=0)
    ]
    kind = config.get("model_type")
    if not isinstance(kind, str):
        problems.append("model_type: missing")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MAX_LAYERS:
        problems.append(f"num_hidden_layers: more than {_MAX_LAYERS}")
    if problems:
        raise InvalidPackageError(what, problems)
    return _normalised({**_COMMON, **_DEFAULTS.get(str(kind), {}), **config})


def _is_count(value: JsonValue, *, minimum: int = 1) -> bool:
    return isinstance(value, int) and type(value) is int and minimum <= value <= _MAX_COUNT


def _normalised(values: dict[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
    values["tie_word_embeddings"] = bool(values["tie_word_embeddings"])
    if values["model_type"] == "qwen2":
        values["attention_bias"] = True
    values["sliding_layers"] = _sliding_layers(values)
    values["sliding_window"] = values.get("sliding_window") if values["sliding_layers"] else None
    values["rope_parameters"] = _rope(values)
    return {name: values[name] for name in DECODER_FIELDS}


def _sliding_layers(values: Mapping[str, Any]) -> list[int]:
    window, layers = values.get("sliding_window"), range(values["num_hidden_layers"])
    match values["model_type"]:
        case "mistral":
            return list(layers) if window else []
        case "qwen2" | "qwen3":
            if not (values.get("use_sliding_window") and window):
                return []
            return [i for i in layers if _is_sliding(values, i)]
        case _:
            return []


def _is_sliding(values: Mapping[str, Any], layer: int) -> bool:
    types = values.get("layer_types")
    if isinstance(types, list):
        return layer < len(types) and types[layer] == "sliding_attention"
    return layer >= int(values.get("max_window_layers", 28))


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the rotary embedding as transformers 5 writes them."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rope = {**given} if isinstance(given, dict) else {}
    old_name = rope.pop("type", None)
    rope.setdefault("rope_type", old_name or "default")
    rope.setdefault("rope_theta", values.get("rope_theta") or _ROPE_THETA)
    return dict(sorted(rope.items()))
