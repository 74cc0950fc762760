"""The base of a training as a model of transformers, without an adapter.

A base that our own decoder runs is read by our own reader, also from GGUF and other quantised
files, so an adapter is trained on the weights that it is used with. Any other base, and those whose
files have names of their own, are loaded as for ``--engine transformers``.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.arrays import FloatArray
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.memory.host import find_available_bytes
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.torch.compat_base import (
    build_model,
    load_config,
    load_model,
    open_compat_base,
)
from expertctl.errors import BudgetError, IncompatibleError
from expertctl.package.base_model import parse_foreign_config
from expertctl.package.config_document import CONFIG_FILE, read_config_document
from expertctl.package.gguf_codec import GGUF_TABLE
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.settings import format_size
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBase:
    """A base in memory, without an adapter."""

    stored: StoredBase
    model: Any
    """The model of transformers."""
    tokenizer: Tokenizer
    context: int
    """Context length in tokens, answer included."""
    dtype: str


def choose_device(wanted: str | None) -> str:
    """Return ``cuda`` where there is such a device, unless another one is wanted."""
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def use_exact_order(device: str) -> Iterator[None]:
    """Let a CUDA device add numbers in one order where torch can; a processor does so anyway."""
    before = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns_only)


def choose_training_dtype(device: str) -> str:
    """Return the dtype of the base: bf16 where the device multiplies such matrices natively."""
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "float32"
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bf16" if found.get("amx_bf16") or found.get("avx512_bf16") else "float32"


def open_training_base(
    bases: BaseStore, stored: StoredBase, *, dtype: str, device: str
) -> TrainingBase:
    """Load a base, whose files must be those that were registered.

    Raises:
        BaseMismatchError: when they are not.
        BudgetError: when there is not enough memory.
        IncompatibleError: when the base cannot be trained here.
        InvalidPackageError: when a file is malformed.
    """
    config = None if stored.foreign else read_model_config(stored.path)
    if config is not None and config.stored_places.are_usual and config.experts is None:
        bases.check(stored)
        itemsize = _DTYPES[dtype].itemsize
        _require_memory(stored.name, config.count_weight_bytes(itemsize=itemsize), device)
        model = _load_native(stored, config, dtype)
        tokenizer, context = Tokenizer.open(stored.path), config.max_positions
    elif (stored.path / GGUF_TABLE).is_file():
        assert config is not None, "no other base is read from GGUF"
        raise IncompatibleError(
            f"{stored.name} cannot be trained: GGUF files of {config.architecture} with other "
            "names or routed experts are not given to transformers",
            hint="use the model's folder with safetensors",
        )
    else:
        opened = open_compat_base(bases, stored, dtype=dtype, rehash=False)
        _require_memory(stored.name, opened.weight_bytes, device)
        model, tokenizer, context = load_model(opened), opened.tokenizer, opened.context
    return TrainingBase(stored, model.to(device), tokenizer, context, dtype)


def _require_memory(name: str, weight_bytes: int, device: str) -> None:
    """Require room for the weights, and as much as half of them for what is computed."""
    is_cuda = device == "cuda"
    free = torch.cuda.mem_get_info()[0] if is_cuda else find_available_bytes()
    needed = weight_bytes * 3 // 2
    if needed > free:
        raise BudgetError(
            f"training on {name} needs about {format_size(needed)} of memory, and "
            f"this process may use {format_size(free)}",
            hint="end other programs, or choose a smaller base",
        )


def _load_native(stored: StoredBase, config: ModelConfig, dtype: str) -> Any:
    """Load the weights as our own decoder reads them."""
    what = str(stored.path / CONFIG_FILE)
    document = {
        name: value
        for name, value in read_config_document(stored.path).items()
        if name not in {"quantization_config", "compression_config"}
    }
    parsed = parse_foreign_config(document, what=what)
    weights = load_plain_weights(stored.path, config, dtype=dtype).tensors
    tensors = {name: _share_with_torch(numbers) for name, numbers in weights.items()}
    return build_model(load_config(parsed, what), tensors, dtype=_DTYPES[dtype], name=stored.name)


def _share_with_torch(numbers: FloatArray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ours are read-only: nothing writes to a base
        shared = torch.from_numpy(numbers)
    return shared.view(torch.bfloat16) if shared.dtype == torch.uint16 else shared
