"""A base with random weights in the shape of SmolLM2-135M, whose tokens of text are bytes."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.served_home import give_text_to_all_tokens
from expertctl.install.starter import STARTER
from expertctl.package.model_config import parse_config
from expertctl.schema.strict_json import JsonObject

CONFIG: JsonObject = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
SPREAD, SEED = 0.02, 0


def write_small_base(directory: Path) -> Path:
    """Write it, with the byte-level tokenizer of the starter base."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(STARTER / "base" / name, directory / name)
    config = parse_config(CONFIG)
    give_text_to_all_tokens(directory / "tokenizer.json", vocabulary=config.vocab_size)
    drawn = torch.Generator().manual_seed(SEED)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else torch.randn(shape, generator=drawn).mul(SPREAD).bfloat16()
        for name, shape in config.tensor_shapes().items()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
