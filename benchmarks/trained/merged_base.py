"""The two bases that formats are compared on: the trained base with an expert merged, and noise.

Channels of the original are shuffled already (`start_base`). Gaussian noise of a twentieth of each
block's step is added to that. A third of a step, which would hide the grid of the original by
itself, costs 84 % of perplexity, because it is as much as rounding to four bits.

A base is also written as a GGUF file in float32, from which llama.cpp makes its own formats.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gguf import write_gguf_tensors
from benchmarks.small_llama import list_metadata, list_vocabulary, reorder
from benchmarks.trained.start_base import START_FOLDER, load_model, load_tokenizer, save_plain
from benchmarks.trained.tasks import JSON, SQL, Task
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config

BLOCK, STEPS = 32, 15
"""Weights of a block of Q4_1, and the steps between its least and its greatest."""
NOISE = 1 / 20
"""Standard deviation of the noise, in steps."""
SPLITTING = "smollm"


@dataclass(frozen=True, slots=True)
class MergedBase:
    """A base by name, the task of the expert that is merged into it, and the seed of its noise."""

    name: str
    merged: Task
    seed: int

    def directory(self, folder: Path) -> Path:
        """Return the folder of its files, below the folder of all."""
        return folder / f"base-{self.name}"


MERGED_BASES = (MergedBase("a", JSON, 1), MergedBase("b", SQL, 2))


def write_merged_base(folder: Path, base: MergedBase) -> Path:
    """Write a base from the trained files below a folder, unless it exists; return its folder."""
    directory = base.directory(folder)
    if (directory / "tokenizer.json").exists():
        return directory
    model = merge_expert(folder, base.merged)
    add_noise(model, base.seed)
    save_plain(model, directory)
    load_tokenizer(folder / START_FOLDER).save_pretrained(directory)
    return directory


def merge_expert(folder: Path, task: Task) -> Any:
    """Return the original with an expert merged, in float32."""
    import peft

    start = load_model(folder / START_FOLDER)
    adapted: Any = peft.PeftModel.from_pretrained(start, folder / "experts" / task.name)
    return adapted.merge_and_unload()


def add_noise(model: Any, seed: int) -> None:
    """Add noise to all linear layers and the embedding, which is the head too."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    layers = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    with torch.no_grad():
        for weight in (*layers, model.model.embed_tokens.weight):
            blocks = weight.view(-1, BLOCK)
            step = (blocks.amax(1) - blocks.amin(1)) / STEPS
            blocks.add_(torch.randn(blocks.shape, generator=drawn) * step[:, None] * NOISE)


def write_float_gguf(directory: Path) -> Path:
    """Write a base as a GGUF file in float32 beside its folder, unless it exists."""
    path = directory.with_suffix(".f32.gguf")
    if path.exists():
        return path
    config = read_model_config(directory)
    document = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    facts = list_metadata(config) | list_vocabulary(
        document, size=config.vocab_size, splitting=SPLITTING, begin=1, end=2
    )
    partial = path.with_suffix(".partial")
    tensors = {name: reorder(name, one, config) for name, one in read_floats(directory, config)}
    write_gguf_tensors(partial, facts, tensors, Scheme.FLOAT32)
    partial.replace(path)
    return path


def read_floats(directory: Path, config: ModelConfig) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the tensors of a float32 base, without a head that is the embedding."""
    stored = read_base_tensors(directory, config)
    for name, shape in config.tensor_shapes().items():
        tensor = stored[name]
        assert tensor.info.dtype == "F32", f"{name} is {tensor.info.dtype}"
        yield name, np.memmap(tensor.path, "<f4", "r", tensor.offset, shape)
