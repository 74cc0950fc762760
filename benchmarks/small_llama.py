"""A Llama of 135 million random weights in bfloat16, as a folder and as a GGUF file for llama.cpp.

The dimensions are those of SmolLM2-135M. Both forms have the same weights and the same vocabulary,
which is trained on the sources of the standard library, so both programs process the same tokens.
The GGUF format is described in ggml's ``docs/gguf.md``; its Llama rotates neighbouring elements of
a head, so the rows of queries and keys are reordered as ``convert_hf_to_gguf.py`` does.
"""

import json
import struct
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.gguf import GGUFValue, write_gguf_tensors
from expertctl.engine.cpu.base_loader import draw_random_floats
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.model_config import ModelConfig, parse_model_config
from expertctl.schema.strict_json import JsonValue

VOCABULARY, END = 49152, "<|endoftext|>"
BASE_NAME, GGUF_NAME = "small-llama", "small-llama.gguf"
CONFIG: dict[str, JsonValue] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
_CONTROL, _NORMAL = 3, 1
_BF16 = np.dtype(np.uint16)


def write_small_llama(folder: Path) -> None:
    """Write both forms below a folder: the folder of the base, and the GGUF file."""
    config = parse_model_config(CONFIG)
    weights = dict(_draw_weights(config))
    base = folder / BASE_NAME
    base.mkdir(parents=True)
    tokenizer = _train_tokenizer(base / "tokenizer.json")
    (base / "config.json").write_text(json.dumps(CONFIG))
    _write_safetensors(base / "model.safetensors", weights)
    path = folder / GGUF_NAME
    facts = {**list_metadata(config), **list_vocabulary(json.loads(tokenizer.to_str()))}
    write_gguf_tensors(path, facts, {n: reorder(n, one, config) for n, one in weights.items()})


def _write_safetensors(path: Path, weights: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write bfloat16 tensors, for which numpy has no dtype, with the header written here."""
    entries, offset = dict[str, object](), 0
    for name, bits in weights.items():
        place = [offset, offset := offset + bits.nbytes]
        entries[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": place}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for bits in weights.values():
            file.write(bits.tobytes())


def _draw_weights(config: ModelConfig) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the raw bytes of every tensor; norms are ones."""
    rng = np.random.default_rng(0)
    for name, shape in config.tensor_shapes().items():
        if len(shape) == 1:
            yield name, np.full(shape, 0x3F80, _BF16)
        else:
            drawn = draw_random_floats(Scheme.BFLOAT16, int(np.prod(shape)), rng)
            yield name, drawn.view(_BF16).reshape(shape)


def reorder(name: str, one: np.ndarray[Any, Any], config: ModelConfig) -> np.ndarray[Any, Any]:
    """Return a tensor as llama.cpp expects it: norms in float32, rotated rows interleaved."""
    if one.ndim == 1:
        return (one.astype(np.uint32) << 16).view(np.float32) if one.dtype == _BF16 else one
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return one
    halves = one.reshape(heads, 2, config.head_dim // 2, one.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(one.shape)


def _train_tokenizer(path: Path) -> Tokenizer:
    """Train byte-level BPE with the whole vocabulary, and write it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer.train([str(source) for source in sources], trainer)
    tokenizer.save(str(path))
    return tokenizer


def list_vocabulary(
    document: Mapping[str, Any],
    *,
    size: int = VOCABULARY,
    splitting: str = "gpt-2",
    begin: int = 0,
    end: int = 0,
) -> dict[str, GGUFValue]:
    """Return the vocabulary of a ``tokenizer.json``, byte-level BPE, for GGUF.

    ``splitting`` is llama.cpp's name of how text is split into words, ``begin`` and ``end`` are the
    ids of the tokens at the beginning and end of a text.
    """
    model, added = document["model"], document["added_tokens"]
    known = {number: token for token, number in model["vocab"].items()}
    known |= {each["id"]: each["content"] for each in added}
    special = {each["id"] for each in added if each["special"]}
    tokens = [known.get(number, f"<|unused_{number}|>") for number in range(size)]
    kinds = [_CONTROL if n not in known or n in special else _NORMAL for n in range(size)]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": splitting,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": begin,
        "tokenizer.ggml.eos_token_id": end,
    }


def list_metadata(config: ModelConfig) -> dict[str, GGUFValue]:
    """Return the sizes of a Llama for GGUF."""
    return {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": config.layers,
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rope.theta,
        "llama.vocab_size": config.vocab_size,
    }
