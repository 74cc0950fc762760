"""A tiny GPT-2 as real files, torch-free: matrices stored as [in, out], a head that is tied."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.factories import VOCAB, write_safetensors, write_tokenizer

WIDTH, LAYERS, POSITIONS = 16, 2, 64


def gpt2_config(**changes: object) -> dict[str, Any]:
    """``config.json`` as transformers writes it, with its names of libraries and places."""
    return {
        "_name_or_path": "openai-community/gpt2",
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 256,
        "dtype": "float32",
        "eos_token_id": 258,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_embd": WIDTH,
        "n_head": 2,
        "n_layer": LAYERS,
        "n_positions": POSITIONS,
        "scale_attn_by_inverse_layer_idx": True,  # only transformers runs it
        "tie_word_embeddings": True,
        "transformers_version": "5.23.0",
        "use_cache": True,
        "vocab_size": VOCAB,
        **changes,
    }


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of such a model with its head."""
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, WIDTH),
        "transformer.wpe.weight": (POSITIONS, WIDTH),
        "transformer.ln_f.weight": (WIDTH,),
        "transformer.ln_f.bias": (WIDTH,),
    }
    matrices = {
        "attn.c_attn": (WIDTH, 3 * WIDTH),
        "attn.c_proj": (WIDTH, WIDTH),
        "mlp.c_fc": (WIDTH, 4 * WIDTH),
        "mlp.c_proj": (4 * WIDTH, WIDTH),
    }
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}"
        for name, shape in matrices.items():
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[1:]}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}.{name}.weight": (WIDTH,), f"{at}.{name}.bias": (WIDTH,)}
    return shapes


def write_gpt2(
    directory: Path, *, bare: bool = False, seed: int = 0, dtype: str = "float32", **config: object
) -> Path:
    """Write the base; ``bare`` leaves the prefix out, as the first published files did."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    arrays = {}
    for name, shape in sorted(gpt2_shapes().items()):
        noise = generator.standard_normal(shape).astype(np.float32) * np.float32(0.2)
        norm = ".ln_" in name and name.endswith("weight")
        arrays[name.removeprefix("transformer.") if bare else name] = 1 + noise if norm else noise
    write_safetensors(directory / "model.safetensors", arrays, dtype=dtype)
    (directory / "config.json").write_text(json.dumps(gpt2_config(**config)), encoding="utf-8")
    write_tokenizer(directory)
    return directory


def edit_config(directory: Path, **changes: object) -> None:
    """Edit ``config.json``; None leaves a key out."""
    path = directory / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({n: v for n, v in values.items() if v is not None}))
