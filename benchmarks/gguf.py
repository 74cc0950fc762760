"""A GGUF file with random weights, so that llama.cpp runs a base of any shape without a download.

Only the required parts are written: version 3, little-endian, architecture ``qwen3``, no vocabulary
except its size. Matrices, including the embedding, have one data type; norms are float32. The
format is described in ggml's ``docs/gguf.md``, the blocks in ``ggml-common.h``.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from expertctl.engine.cpu.base_loader import WEIGHT_STD, draw_random_floats
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.model_config import ModelConfig

ALIGNMENT = 32

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
GGUFValue = str | int | float | list[str] | list[int]

_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_RANDOM_BYTES = 1 << 22
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
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


@dataclass(frozen=True, slots=True)
class _GgmlType:
    """A type of ggml: ``block_bytes`` for each ``block`` of elements in a row."""

    name: str
    code: int
    block: int
    block_bytes: int

    def nbytes(self, numbers: int) -> int:
        return numbers // self.block * self.block_bytes


_FLOATS = _GgmlType("f32", 0, 1, 4)
_STORAGE = {
    Scheme.FLOAT32: _FLOATS,
    Scheme.BFLOAT16: _GgmlType("bf16", 30, 1, 2),
    Scheme.INT8: _GgmlType("q8_0", 8, 32, 34),
    Scheme.INT4: _GgmlType("q4_0", 2, 32, 18),
    Scheme.Q8_0: _GgmlType("q8_0", 8, 32, 34),
    Scheme.Q4_0: _GgmlType("q4_0", 2, 32, 18),
    Scheme.Q4_K: _GgmlType("q4_k", 12, 256, 144),
    Scheme.Q6_K: _GgmlType("q6_k", 14, 256, 210),
}


def width_name(scheme: Scheme) -> str:
    """Return llama.cpp's name for the data type of a scheme."""
    return _STORAGE[scheme].name


def write_gguf(path: Path, config: ModelConfig, scheme: Scheme, *, seed: int = 0) -> Path:
    """Write a base with random weights and tied embeddings."""
    assert config.architecture == "qwen3", config.architecture
    assert config.tied, "the head is the embedding"
    drawn = _make_random_blocks(scheme, np.random.default_rng(seed))
    tensors = [(_to_gguf_name(name), shape) for name, shape in config.tensor_shapes().items()]
    with path.open("wb") as file:
        file.write(_make_header(_list_metadata(config), tensors, scheme))
        for _, shape in tensors:
            _pad(file)
            _write_numbers(file, shape, scheme, drawn)
    return path


def write_gguf_tensors(
    path: Path,
    facts: dict[str, GGUFValue],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    scheme: Scheme = Scheme.BFLOAT16,
) -> None:
    """Write tensors with the names of a Hugging Face base: matrices of a scheme, float32 vectors.

    Matrices are uint16 in bfloat16, and float32 in float32.
    """
    shapes = [(_to_gguf_name(name), one.shape) for name, one in tensors.items()]
    with path.open("wb") as file:
        file.write(_make_header(facts, shapes, scheme))
        for one in tensors.values():
            _pad(file)
            file.write(one.tobytes())


def _list_metadata(config: ModelConfig) -> dict[str, GGUFValue]:
    return {
        "general.architecture": "qwen3",
        "general.alignment": ALIGNMENT,
        "qwen3.block_count": config.layers,
        "qwen3.context_length": config.max_positions,
        "qwen3.embedding_length": config.hidden_size,
        "qwen3.feed_forward_length": config.intermediate_size,
        "qwen3.attention.head_count": config.heads,
        "qwen3.attention.head_count_kv": config.kv_heads,
        "qwen3.attention.key_length": config.head_dim,
        "qwen3.attention.value_length": config.head_dim,
        "qwen3.attention.layer_norm_rms_epsilon": config.norm_eps,
        "qwen3.rope.freq_base": config.rope.theta,
        "qwen3.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "no_vocab",
    }


def _make_header(
    facts: dict[str, GGUFValue], tensors: Sequence[tuple[str, tuple[int, ...]]], scheme: Scheme
) -> bytes:
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(facts))]
    parts += [_encode_text(key) + _encode_typed(value) for key, value in facts.items()]
    parts += _iterate_tensor_entries(tensors, scheme)
    return b"".join(parts)


def _iterate_tensor_entries(
    tensors: Sequence[tuple[str, tuple[int, ...]]], scheme: Scheme
) -> Iterator[bytes]:
    """Yield name, dimensions from the innermost, type and offset of every tensor."""
    offset = 0
    for name, shape in tensors:
        storage = _choose_storage(shape, scheme)
        assert shape[-1] % storage.block == 0, f"{name}: rows of {shape[-1]} are not whole blocks"
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        yield _encode_text(name) + sizes + struct.pack("<IQ", storage.code, offset)
        offset += -(-storage.nbytes(int(np.prod(shape))) // ALIGNMENT) * ALIGNMENT


def _choose_storage(shape: tuple[int, ...], scheme: Scheme) -> _GgmlType:
    return _STORAGE[scheme] if len(shape) > 1 else _FLOATS


def _encode_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode_typed(value: GGUFValue) -> bytes:
    if isinstance(value, list):
        kind = _INT32 if value and isinstance(value[0], int) else _STRING
        items = [_encode_text(v) if isinstance(v, str) else struct.pack("<i", v) for v in value]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(items)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _encode_text(value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    return struct.pack("<If", _FLOAT32, value)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _write_numbers(file: BinaryIO, shape: tuple[int, ...], scheme: Scheme, drawn: Bytes) -> None:
    if len(shape) == 1:
        file.write(np.ones(shape, np.float32).tobytes())
        return
    left = _STORAGE[scheme].nbytes(int(np.prod(shape)))
    while left:
        left -= file.write(drawn[: min(left, len(drawn))].data)


def _make_random_blocks(scheme: Scheme, rng: np.random.Generator) -> Bytes:
    """Return some blocks, which every matrix repeats; reading them costs as much as any others."""
    storage = _STORAGE[scheme]
    blocks = _RANDOM_BYTES // storage.block_bytes
    if storage.block == 1:
        return draw_random_floats(scheme, blocks, rng)
    drawn = rng.integers(0, 256, (blocks, storage.block_bytes), np.uint8)
    step = WEIGHT_STD * 12**0.5 / (1 << scheme.layout.bits)
    if scheme is Scheme.Q4_K:  # scales of six bits; their minima are around the middle of 16 steps
        mean = 32
        shared = np.array([step / mean, 7.5 * step / mean], "<f2")
        drawn[:, :4] = shared.view(np.uint8)
    elif scheme is Scheme.Q6_K:  # scales of any int8, whose root mean square is about 74
        drawn[:, -2:] = np.full(1, step / 74, "<f2").view(np.uint8)
    else:
        drawn[:, :2] = np.full(1, step, "<f2").view(np.uint8)
    return drawn.reshape(-1)


def _to_gguf_name(name: str) -> str:
    module, kind = name.rsplit(".", 1)
    if module in _OTHER_NAMES:
        return f"{_OTHER_NAMES[module]}.{kind}"
    number, own = module.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{_LAYER_NAMES[own]}.{kind}"
