"""GGUF files of the models of `tests.engine.family_models`, converted as llama.cpp's script does.

Names come from the tables of the ``gguf`` package, so they are not those that are tested.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from expertctl.package.attention_config import AlphaScaling, LongropeScaling
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.gguf_files import Array, add_value, describe_sizes

GGUF_NAMES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi": "phi2",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "falcon": "falcon",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "cohere": "command-r",
    "hunyuan_v1_dense": "hunyuan-dense",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "dots1": "dots1",
}
_FLOAT32_MATRICES = ("position_embd.", "_norm.", "_inp.")


def write_family_gguf(
    path: Path, model: Any, base: Path, *, kind: str = "F32", **changed: Any
) -> Path:
    """Convert a model of transformers that was saved in the folder ``base``; return the path.

    The file has no vocabulary, which llama.cpp reads, too.
    Matrices are of a ``kind``, vectors float32. ``changed`` are keys with ``__`` for a dot, and
    their values; None leaves a key out.
    """
    config = read_model_config(base)
    name = GGUF_NAMES[config.architecture]
    writer = gguf.GGUFWriter(path, name)
    keys = {**describe_sizes(config, name), **_describe_family(config, name)}
    vocabulary = {f"{name}.vocab_size": config.vocab_size, "tokenizer.ggml.model": "none"}
    for key, value in {**keys, **vocabulary}.items():
        add_value(writer, key, changed.pop(key.replace(".", "__"), value))
    for key, value in changed.items():
        add_value(writer, key.replace("__", "."), value)
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config.layers)
    for theirs, numbers in _iter_converted(config, model):
        stored = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert stored is not None, theirs
        _add_tensor(writer, stored, numbers, kind)
    for stored, numbers in _iter_factors(config):
        _add_tensor(writer, stored, numbers, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: gguf.GGUFWriter, name: str, numbers: Array, kind: str) -> None:
    is_kept = numbers.ndim < 2 or any(part in name for part in _FLOAT32_MATRICES)
    chosen = Kind.F32 if is_kept else Kind[kind]
    data = numbers if chosen is Kind.F32 else gguf.quants.quantize(numbers, chosen)
    writer.add_tensor(name, data, raw_dtype=None if chosen in (Kind.F32, Kind.F16) else chosen)


def _describe_family(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return what the converter writes for one family."""
    block, scaling = config.block, config.rope.scaling
    keys: dict[str, Any] = {
        "attn_logit_softcapping": block.attention_cap,
        "final_logit_softcapping": block.logit_cap,
        **_describe_windows(config),
        **_describe_experts(config),
    }
    match config.architecture:
        case "granite":
            keys |= {
                "attention.scale": block.attention_scale,
                "embedding_scale": block.embedding_scale,
                "residual_scale": block.residual_scale,
                "logit_scale": 1 / block.logit_scale,
            }
        case "cohere":
            keys |= {"logit_scale": block.logit_scale, "rope.scaling.type": "none"}
        case "gpt_neox":
            keys["use_parallel_residual"] = block.places == "parallel_apart"
        case _:
            pass
    if isinstance(scaling, LongropeScaling):
        keys["rope.scaling.original_context_length"] = scaling.original
        keys["rope.scaling.attn_factor"] = scaling.attention
        keys["context_length"] = round(scaling.original * scaling.factor)
    if isinstance(scaling, AlphaScaling):
        power = config.head_dim / (config.head_dim - 2)
        keys["rope.freq_base"] = config.rope.theta * scaling.alpha**power
    return {f"{name}.{key}": value for key, value in keys.items()}


def _describe_experts(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    keys: dict[str, Any] = {
        "expert_count": experts.count,
        "expert_used_count": experts.used,
        "expert_feed_forward_length": experts.intermediate_size,
    }
    if config.architecture == "qwen2_moe":
        keys["expert_shared_feed_forward_length"] = experts.shared_size
    if config.architecture == "dots1":
        keys |= {
            "expert_shared_count": experts.shared_size // experts.intermediate_size,
            "leading_dense_block_count": experts.layers[0],
            "expert_weights_scale": experts.scale,
            "expert_weights_norm": experts.normalised,
            "expert_gating_func": 2,
        }
    return keys


def _describe_windows(config: ModelConfig) -> dict[str, Any]:
    sizes = [window for window in config.windows if window]
    if not sizes:
        return {}
    keys: dict[str, Any] = {"attention.sliding_window": sizes[0]}
    if config.architecture in ("olmo3", "exaone4"):
        keys["attention.sliding_window_pattern"] = [window is not None for window in config.windows]
    if config.block.local_rope is not None:
        keys["rope.freq_base_swa"] = config.block.local_rope.theta
    return keys


def _iter_factors(config: ModelConfig) -> Iterator[tuple[str, Array]]:
    scaling = config.rope.scaling
    if isinstance(scaling, LongropeScaling):
        yield "rope_factors_long.weight", np.array(scaling.long, np.float32)
        yield "rope_factors_short.weight", np.array(scaling.short, np.float32)


def _iter_converted(config: ModelConfig, model: Any) -> Iterator[tuple[str, Array]]:
    """Yield the tensors by the names of transformers, as they are stored in GGUF."""
    stacks: dict[str, list[Array]] = {}
    for name, tensor in model.state_dict().items():
        numbers = tensor.float().numpy()
        if config.tied and name in ("lm_head.weight", "embed_out.weight"):
            continue
        head = re.fullmatch(r"(.+layernorm)\.norms\.\d+(\.weight)", name)
        if head is not None:
            stacks.setdefault(head[1] + head[2], []).append(numbers)
            continue
        if name.endswith(".mlp.experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(numbers, 2, axis=1), strict=True):
                yield f"{name.replace('gate_up', part)}.weight", np.ascontiguousarray(half)
            continue
        name += ".weight" if name.endswith(".mlp.experts.down_proj") else ""
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        yield name, np.ascontiguousarray(_convert(config, name, numbers))
    for name, rows in stacks.items():
        yield name, np.stack(rows)


def _convert(config: ModelConfig, name: str, numbers: Array) -> Array:
    match config.architecture:
        case "gemma" | "gemma2" | "gemma3_text" if name.endswith("norm.weight"):
            return numbers + np.float32(1)
        case "granite" | "smollm3" | "mixtral" if ".q_proj." in name or ".k_proj." in name:
            halves = numbers.reshape(-1, 2, config.head_dim // 2, *numbers.shape[1:])
            return halves.swapaxes(1, 2).reshape(numbers.shape)
        case "gpt2" if numbers.ndim == 2 and ".h." in name:
            return numbers.T
        case "gpt_neox" | "falcon" if "query_key_value" in name:
            return _ungroup(config, numbers)
    return numbers


def _ungroup(config: ModelConfig, numbers: Array) -> Array:
    """Return all queries, then all keys, then all values of a matrix stored by groups."""
    queries = config.heads // config.kv_heads
    shape = (config.kv_heads, queries + 2, config.head_dim, *numbers.shape[1:])
    groups = numbers.reshape(shape)
    parts = (groups[:, :queries], groups[:, queries : queries + 1], groups[:, queries + 1 :])
    return np.concatenate([part.reshape(-1, *numbers.shape[1:]) for part in parts])
