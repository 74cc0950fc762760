"""The architectures of GGUF files: one row for each value of ``general.architecture`` that is read.

A row says which of our architectures it is, what llama.cpp's converter changes in its tensors, and
which settings its keys are. `read_family_settings` returns what ``config.json`` says besides sizes
and rotary positions, with the names that `ARCHITECTURES` has for all architectures alike;
`split_tensor` says which of our tensors a stored one holds: one, or several projections or experts.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.architecture_rows import ARCHITECTURES
from expertctl.package.architectures import (
    CHOICE_BIAS,
    ROUTER_MODULE,
    Architecture,
    ConfigFields,
    ExpertsRules,
    Scoring,
)
from expertctl.package.gguf_file import GgufHeader, GgufTensor
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject, JsonValue

OWN_FILES_HINT = "use the model's own folder with config.json and safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One row: how files of an architecture differ from the others."""

    model_type: str
    """Its row in `ARCHITECTURES`."""
    windowed_type: str = ""
    """Its row there if the file states a sliding window; empty: the same."""
    routed_type: str = ""
    """Its row there if the file has routed experts; empty: the same."""
    paired: bool = False
    """Whether the rows of queries and keys are stored in pairs."""
    shifted: bool = False
    """Whether the weights of norms are stored with one added."""
    fused_up: bool = False
    """Whether ``ffn_up`` has the rows of the gate before its own."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Numbers that are read if they are there: keys of ours to keys of the file."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Whole numbers that a file with routed experts must have besides."""
    normalised: bool = False
    """Whether weights of experts are divided by their sum, if the file does not say."""

    def find_type(self, fields: ConfigFields, name: str) -> str:
        """Return the ``model_type`` of a file."""
        if self.routed_type and fields.get(f"{name}.{_EXPERTS}"):
            return self.routed_type
        has_window = bool(fields.get(f"{name}.{_WINDOW}"))
        return self.windowed_type if has_window and self.windowed_type else self.model_type


_EXPERTS, _SHARED = "expert_count", "expert_shared_"
_EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}

GGUF_ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(model_type="llama", routed_type="mixtral", paired=True),
    "qwen2": GgufArchitecture(model_type="qwen2"),
    "qwen3": GgufArchitecture(model_type="qwen3"),
    "qwen2moe": GgufArchitecture(
        model_type="qwen2_moe",
        sizes={**_EXPERT_SIZE, "shared_expert_intermediate_size": f"{_SHARED}feed_forward_length"},
    ),
    "qwen3moe": GgufArchitecture(model_type="qwen3_moe", sizes=_EXPERT_SIZE, normalised=True),
    "olmoe": GgufArchitecture(model_type="olmoe"),
    "dots1": GgufArchitecture(
        model_type="dots1",
        sizes={
            **_EXPERT_SIZE,
            "n_shared_experts": f"{_SHARED}count",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        numbers={"routed_scaling_factor": "expert_weights_scale"},
    ),
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


def find_gguf_name(architecture: str) -> str | None:
    """Return the ``general.architecture`` of files of one of our architectures."""
    for name, row in GGUF_ARCHITECTURES.items():
        if architecture in (row.model_type, row.windowed_type, row.routed_type):
            return name
    return _SAME_FILES.get(architecture)


_SAME_FILES = {"mistral": "llama", "ministral": "llama"}
"""Architectures of ours whose files are those of another one."""
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
    "expert_weights_scale",
)
"""Keys of any architecture that change what is computed."""
_COUNTS = ("expert_group_count", "interleave_moe_layer_step")
"""Keys that change it if they are more than one."""
_SIZED_WINDOWS = ("every_layer", "every_layer_or_none", "pattern", "pattern_if_sized")
_MAX_NUMBER = 1e6
_GATES: Mapping[Scoring, int] = {"softmax": 1, "sigmoid": 2}
_LARGE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""The layers of the largest models, whose queries are scaled by hidden size and heads."""


def reject_settings(
    header: GgufHeader, fields: ConfigFields, name: str, row: GgufArchitecture
) -> None:
    """Refuse settings that change what is computed and that are not read.

    Raises:
        IncompatibleError: naming the first one.
    """
    rules = ARCHITECTURES[row.find_type(fields, name)]
    if fields.get(f"{name}.{_EXPERTS}") and rules.experts is None:
        raise IncompatibleError(
            f"{header.path}: {name}.{_EXPERTS} is set, routed experts of {name} are not supported",
            hint=OWN_FILES_HINT,
        )
    known = set(row.numbers.values())
    if rules.window in _SIZED_WINDOWS:
        known.add(_WINDOW)
    keys = [key for key in _CHANGING if key not in known and fields.get(f"{name}.{key}")]
    sections = header.metadata.get(f"{name}.rope.dimension_sections")
    if isinstance(sections, tuple) and any(sections):
        keys.append("rope.dimension_sections")
    keys += [key for key in _COUNTS if fields.get(f"{name}.{key}") not in (None, 0, 1)]
    keys += [
        key.removeprefix(f"{name}.")
        for key, value in header.metadata.items()
        if key.startswith(f"{name}.") and isinstance(value, tuple) and _differs_by_layer(key, value)
    ]
    if keys:
        raise IncompatibleError(
            f"{header.path}: {name}.{keys[0]} is not supported in GGUF", hint=OWN_FILES_HINT
        )


def _differs_by_layer(key: str, values: tuple[object, ...]) -> bool:
    """Tell whether an array has several values, and is not known to have them."""
    return len(set(values)) > 1 and not key.endswith((_PATTERN, "rope.dimension_sections"))


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
    if rules.experts is not None:
        found |= _read_experts(fields, name, row, rules.experts)
    return {**found, **_read_windows(header, fields, name, rules, config)} | _find_others(
        header, fields, name, config, found
    )


def _read_experts(
    fields: ConfigFields, name: str, row: GgufArchitecture, rules: ExpertsRules
) -> JsonObject:
    """Return the settings of routed experts."""
    limits = {"minimum": 0, "maximum": 1 << 20}
    sizes = {rules.count_names[0]: _EXPERTS, "num_experts_per_tok": "expert_used_count"}
    found: JsonObject = {
        key: fields.read_integer(f"{name}.{stored}", **limits)
        for key, stored in {**sizes, **row.sizes}.items()
    }
    kind = fields.read_integer(f"{name}.expert_gating_func", **limits, default=0)
    if kind not in (0, _GATES[rules.scoring]):
        fields.add_problem(f"{name}.expert_gating_func", f"is {kind}, not {_GATES[rules.scoring]}")
    is_normalised = fields.read_boolean(f"{name}.expert_weights_norm", default=row.normalised)
    return {**found, "norm_topk_prob": is_normalised}


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
        case "qwen2moe":
            return {"qkv_bias": "blk.0.attn_q.bias" in header.tensors}
        case "dots1":
            return {"sliding_window": None}
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


_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_MODULES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "attention_output_layernorm",
    "post_ffw_norm": "mlp_output_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": ROUTER_MODULE,
    "exp_probs_b": f"{ROUTER_MODULE}.{CHOICE_BIAS}",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Modules of a layer: names in the file to ours."""
_EXPERT_STACKS: Mapping[str, str] = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""What the stacked matrices of all experts of a layer are."""
_TWO_NORMS = {"attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"}
"""The names in a layer with two parallel norms, of which the second one is for attention."""
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.([a-z0-9_]+)")

_Shape = tuple[int, ...]


def split_tensor(
    header: GgufHeader,
    tensor: GgufTensor,
    row: GgufArchitecture,
    sizes: ModelConfig,
    shapes: Mapping[str, _Shape],
) -> Iterator[tuple[str, _Shape, int]]:
    """Yield the canonical names of what a tensor holds, their shapes, and their first numbers.

    ``shapes`` are those of all tensors that the model needs.

    Raises:
        InvalidPackageError: when its name is unknown, or its shape does not fit.
    """
    names = _list_names(header, tensor, row, sizes)
    if len(names) == 1:
        is_gate = names[0].endswith("mlp.shared_expert_gate.weight")  # a vector is its one row
        yield names[0], (1, *tensor.shape[-1:]) if is_gate else tensor.shape, 0
        return
    parts = [(name, shapes.get(name, ())) for name in names]
    fits = all(shape and (len(shape) == 1 or shape[-1] == tensor.shape[-1]) for _, shape in parts)
    if not fits or sum(math.prod(shape) for _, shape in parts) != math.prod(tensor.shape):
        wanted = " and ".join(f"{name} as {list(shape)}" for name, shape in parts[:3])
        problem = f"{tensor.name} is {list(tensor.shape)}, it cannot hold {wanted}"
        raise InvalidPackageError(str(header.path), [problem])
    first = 0
    for name, shape in parts:
        yield name, shape, first
        first += math.prod(shape)


def _list_names(
    header: GgufHeader, tensor: GgufTensor, row: GgufArchitecture, sizes: ModelConfig
) -> tuple[str, ...]:
    """Return the canonical names of the tensors that a stored one holds, one after another."""
    module, _, end = tensor.name.rpartition(".")
    match = _LAYER.fullmatch(module)
    found: tuple[str, ...] = ()
    if module in _NAMES:
        found = (_NAMES[module],)
    elif match is not None:
        is_matrix = len(tensor.shape) > 1
        parts = _find_parts(header, match[2], row, sizes, is_matrix=is_matrix)
        found = tuple(f"model.layers.{match[1]}.{part}" for part in parts)
    if not found or end not in ("weight", "bias"):
        raise InvalidPackageError(str(header.path), [f"unexpected tensor {tensor.name}"])
    if len(tensor.shape) > 2 and len(found) == 1:
        problem = f"{tensor.name} has {len(tensor.shape)} dimensions"
        raise InvalidPackageError(str(header.path), [problem])
    return tuple(
        name if name.endswith(CHOICE_BIAS) and end == "bias" else f"{name}.{end}" for name in found
    )


def _find_parts(
    header: GgufHeader, part: str, row: GgufArchitecture, sizes: ModelConfig, *, is_matrix: bool
) -> tuple[str, ...]:
    """Return the names within a layer; none if a module is unknown."""
    if part in _EXPERT_STACKS:
        count = 0 if sizes.experts is None else sizes.experts.count
        return tuple(f"mlp.experts.{n}.{_EXPERT_STACKS[part]}" for n in range(count))
    if part in ("attn_q_norm", "attn_k_norm") and sizes.block.own_head_norms and is_matrix:
        count = sizes.heads if part == "attn_q_norm" else sizes.kv_heads
        return tuple(f"{LAYER_MODULES[part]}.norms.{head}" for head in range(count))
    if part == "attn_qkv":
        return _QKV
    if part == "ffn_up" and row.fused_up:
        return _GATE_UP
    names = _TWO_NORMS if "blk.0.attn_norm_2.weight" in header.tensors else {}
    name = names.get(part) or LAYER_MODULES.get(part)
    return (name,) if name else ()
