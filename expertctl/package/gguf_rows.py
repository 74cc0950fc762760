"""The architectures of GGUF files: one row for each value of ``general.architecture`` that is read.

A row says which of our architectures it is, what llama.cpp's converter changes in its tensors, and
which settings its keys are. `read_family_settings` returns what ``config.json`` says besides sizes
and rotary positions, with the names that `ARCHITECTURES` has for all architectures alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from expertctl.errors import IncompatibleError
from expertctl.package.architecture_rows import ARCHITECTURES
from expertctl.package.architectures import Architecture, ConfigFields
from expertctl.package.gguf_file import GgufHeader
from expertctl.schema.strict_json import JsonObject, JsonValue

OWN_FILES_HINT = "use the model's own folder with config.json and safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One row: how files of an architecture differ from the others."""

    model_type: str
    """Its row in `ARCHITECTURES`."""
    windowed_type: str = ""
    """Its row there if the file states a sliding window; empty: the same."""
    paired: bool = False
    """Whether the rows of queries and keys are stored in pairs."""
    shifted: bool = False
    """Whether the weights of norms are stored with one added."""
    fused_up: bool = False
    """Whether ``ffn_up`` has the rows of the gate before its own."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Numbers that are read if they are there: keys of ours to keys of the file."""

    def find_type(self, fields: ConfigFields, name: str) -> str:
        """Return the ``model_type`` of a file."""
        has_window = bool(fields.get(f"{name}.{_WINDOW}"))
        return self.windowed_type if has_window and self.windowed_type else self.model_type


_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}

GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(model_type="llama", paired=True),
    "qwen2": GgufArchitecture(model_type="qwen2"),
    "qwen3": GgufArchitecture(model_type="qwen3"),
    "gemma": GgufArchitecture(model_type="gemma", shifted=True),
    "gemma2": GgufArchitecture(
        model_type="gemma2",
        shifted=True,
        numbers={**_FINAL_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    "gemma3": GgufArchitecture(model_type="gemma3_text", shifted=True, numbers=_FINAL_CAP),
    "phi2": GgufArchitecture(model_type="phi"),
    "phi3": GgufArchitecture(model_type="phi3", fused_up=True),
    "gpt2": GgufArchitecture(model_type="gpt2"),
    "gptneox": GgufArchitecture(model_type="gpt_neox"),
    "falcon": GgufArchitecture(model_type="falcon"),
    "starcoder2": GgufArchitecture(model_type="starcoder2"),
    "stablelm": GgufArchitecture(model_type="stablelm"),
    "olmo2": GgufArchitecture(model_type="olmo2", windowed_type="olmo3"),
    "granite": GgufArchitecture(
        model_type="granite",
        paired=True,
        numbers={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "smollm3": GgufArchitecture(model_type="smollm3", paired=True),
    "exaone4": GgufArchitecture(model_type="exaone4"),
    "glm4": GgufArchitecture(model_type="glm4", fused_up=True),
    "command-r": GgufArchitecture(model_type="cohere", numbers={"logit_scale": "logit_scale"}),
    "hunyuan-dense": GgufArchitecture(model_type="hunyuan_v1_dense"),
}

_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_CHANGING = (
    _WINDOW,
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.yarn_log_multiplier",
    "nextn_predict_layers",
)
"""Keys of any architecture that change what is computed."""
_SIZED_WINDOWS = ("every_layer", "every_layer_or_none", "pattern", "pattern_if_sized")
_MAX_NUMBER = 1e6
_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""The layers of the largest models, whose queries are scaled by hidden size and heads."""


def reject_settings(
    header: GgufHeader, fields: ConfigFields, name: str, row: GgufArchitecture
) -> None:
    """Refuse settings that change what is computed and that are not read.

    Raises:
        IncompatibleError: naming the first one.
    """
    if fields.get(f"{name}.expert_count"):
        raise IncompatibleError(
            f"{header.path}: a GGUF file with routed experts is not supported", hint=OWN_FILES_HINT
        )
    known = set(row.numbers.values())
    if ARCHITECTURES[row.find_type(fields, name)].window in _SIZED_WINDOWS:
        known.add(_WINDOW)
    keys = [key for key in _CHANGING if key not in known and fields.get(f"{name}.{key}")]
    sections = header.metadata.get(f"{name}.rope.dimension_sections")
    if isinstance(sections, tuple) and any(sections):
        keys.append("rope.dimension_sections")
    if keys:
        raise IncompatibleError(
            f"{header.path}: {name}.{keys[0]} is not supported in GGUF", hint=OWN_FILES_HINT
        )


def read_family_settings(
    header: GgufHeader, fields: ConfigFields, name: str, config: JsonObject
) -> JsonObject:
    """Return the settings of a family; problems are recorded in ``fields``.

    ``config`` has the sizes of the model.
    """
    row = GGUF_ARCHITECTURES[name]
    rules = ARCHITECTURES[row.find_type(fields, name)]
    found: JsonObject = {}
    for key, stored in row.numbers.items():
        if fields.get(f"{name}.{stored}") is not None:
            number = fields.read_number(f"{name}.{stored}", minimum=0.0, maximum=_MAX_NUMBER)
            found[key] = number or None
    return {**found, **_read_windows(header, fields, name, rules, config)} | _find_others(
        header, fields, name, config, found
    )


def _find_others(
    header: GgufHeader, fields: ConfigFields, name: str, config: JsonObject, found: JsonObject
) -> JsonObject:
    """Return what follows from other values, or from which tensors there are."""
    hidden, heads, dim = (
        cast(int, config[key]) for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    match name:
        case "gemma2" | "gemma3":
            is_large = config["num_hidden_layers"] == _LARGE_GEMMAS[name]
            scale: JsonObject = {"query_pre_attn_scalar": hidden / heads if is_large else dim}
            local = _read_local_theta(fields, name, 10_000.0) if name == "gemma3" else {}
            return {**scale, **local}
        case "olmo2" if fields.get(f"{name}.{_WINDOW}"):
            return _read_local_theta(fields, name, cast(float, config["rope_theta"]))
        case "granite":
            return (
                {}
                if found.get("attention_multiplier")
                else {"attention_multiplier": 1 / math.sqrt(dim)}
            )
        case "gptneox":
            key = f"{name}.use_parallel_residual"
            return {"use_parallel_residual": fields.read_boolean(key, default=True)}
        case "stablelm":
            return {
                "use_parallel_residual": "blk.0.ffn_norm.weight" not in header.tensors,
                "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
            }
        case "command-r":
            return {"use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors}
        case "falcon":
            return _find_falcon_settings(header, config)
        case _:
            return {}


def _read_local_theta(fields: ConfigFields, name: str, default: float) -> JsonObject:
    """Return the base frequency of the layers with a window."""
    key = f"{name}.rope.freq_base_swa"
    theta = fields.read_number(key, minimum=2.0, maximum=1e12, default=default)
    return {"rope_local_base_freq": theta}


def _find_falcon_settings(header: GgufHeader, config: JsonObject) -> JsonObject:
    """Tell the new decoders, with several heads of keys or two norms, from the older ones."""
    has_two = "blk.0.attn_norm_2.weight" in header.tensors
    kv_heads = config["num_key_value_heads"]
    if has_two or kv_heads not in (1, config["num_attention_heads"]):
        return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2 if has_two else 1}
    return {"multi_query": kv_heads == 1, "parallel_attn": True}


def _read_windows(
    header: GgufHeader, fields: ConfigFields, name: str, rules: Architecture, config: JsonObject
) -> JsonObject:
    """Return the sliding window and, if the file says so, which layers have it."""
    if rules.window not in _SIZED_WINDOWS:
        return {}
    window = fields.read_integer(f"{name}.{_WINDOW}", minimum=0, maximum=1 << 24, default=0)
    if not window or rules.window in ("every_layer", "every_layer_or_none"):
        return {"sliding_window": window or None}
    kinds = _list_layer_types(header, fields, name, cast(int, config["num_hidden_layers"]))
    return {"sliding_window": window, **({"layer_types": kinds} if kinds else {})}


def _list_layer_types(
    header: GgufHeader, fields: ConfigFields, name: str, layers: int
) -> list[JsonValue]:
    """Return the kind of every layer; none if the file leaves it to the architecture.

    The pattern is a list of booleans, or a number: every layer of that number has no window.
    """
    key = f"{name}.{_PATTERN}"
    stored = header.metadata.get(key)
    if stored is None:
        return []
    if isinstance(stored, tuple):
        narrow = [bool(value) for value in stored]
        if len(stored) != layers or not all(isinstance(value, bool) for value in stored):
            fields.add_problem(key, f"must be {layers} booleans, or a number")
    else:
        step = fields.read_integer(key, minimum=1, maximum=1 << 20)
        narrow = [(layer + 1) % step != 0 for layer in range(layers)]
    return ["sliding_attention" if here else "full_attention" for here in narrow]
