"""GGUF files of the bases of `tests.factories`, written with the package of llama.cpp's authors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from expertctl.engine.base_files import iter_row_portions
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.factories import BYTE_TOKENS, CHAT_TEMPLATE, SPECIAL_TOKENS, byte_alphabet

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
Array = np.ndarray[Any, Any]


def write_gguf(
    path: Path,
    base: Path,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    **changed: Any,
) -> Path:
    """Write a base of `tests.factories.write_base` as llama.cpp's converter does; return the path.

    Matrices are of a ``kind``, or of those of ``kinds`` by the end of their module's name; vectors
    are float32. ``changed`` are keys with ``__`` for a dot, and
    their values; None leaves a key out.
    """
    config = read_model_config(base)
    writer = gguf.GGUFWriter(path, config.architecture)
    for key, value in {
        **describe_sizes(config, config.architecture),
        **describe_vocabulary(),
    }.items():
        add_value(writer, key, changed.pop(key.replace(".", "__"), value))
    for key, value in changed.items():
        add_value(writer, key.replace("__", "."), value)
    for name, numbers in read_numbers(base).items():
        stored = _order_rows(config, name, numbers)
        module = name.removesuffix(".weight").rpartition(".")[2]
        chosen = Kind[(kinds or {}).get(module, kind)] if stored.ndim == 2 else Kind.F32
        data = stored if chosen is Kind.F32 else gguf.quants.quantize(stored, chosen)
        raw = None if chosen in (Kind.F32, Kind.F16) else chosen
        writer.add_tensor(_translate(name), data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_numbers(base: Path) -> dict[str, Array]:
    """Return every tensor of a folder of a base as float32, by canonical name."""
    stored = read_base_tensors(base, read_model_config(base))
    numbers = {}
    for name, tensor in stored.items():
        parts = [part.copy() for part in iter_row_portions(tensor)]
        whole = np.concatenate(parts)
        if tensor.codec is None and tensor.info.dtype == "BF16":
            whole = (whole.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        numbers[name] = whole.astype(np.float32)
    return numbers


def describe_sizes(config: ModelConfig, arch: str) -> dict[str, Any]:
    """Return the keys of a header that every architecture has."""
    norm = "layer_norm" if config.block.norm.startswith("layer") else "layer_norm_rms"
    is_partial = config.rope.dims != config.head_dim
    return {
        "general.name": "a base",
        f"{arch}.block_count": config.layers,
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.{norm}_epsilon": config.norm_eps,
        f"{arch}.rope.freq_base": config.rope.theta,
        f"{arch}.rope.dimension_count": config.rope.dims if is_partial else None,
    }


def describe_vocabulary() -> dict[str, Any]:
    """Return the keys of the tokenizer of `tests.factories`."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_alphabet(), *SPECIAL_TOKENS],
        "tokenizer.ggml.token_type": [1] * BYTE_TOKENS + [3] * len(SPECIAL_TOKENS),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": BYTE_TOKENS + 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Write a key; None and empty lists are left out."""
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list() if value:
            writer.add_array(key, value)


def _order_rows(config: ModelConfig, name: str, numbers: Array) -> Array:
    """Store the rows of a head in pairs, as the files of llama have them."""
    if config.architecture != "llama" or not any(part in name for part in (".q_proj", ".k_proj")):
        return np.ascontiguousarray(numbers)
    halves = numbers.reshape(-1, 2, config.head_dim // 2, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))


def _translate(name: str) -> str:
    module, _, end = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{end}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.{end}"
