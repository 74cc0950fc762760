"""A base in transformers, with an adapter of PEFT to train; its loss; the adapter's files.

A base that our own decoder runs is read by our own reader, also from GGUF and other quantised
files, so the adapter is trained on the weights that it is used with. Any other base, and those
whose files have names of their own, are loaded as for ``--engine transformers``.

Everything is in evaluation mode: without dropout nothing depends on random numbers once the adapter
has its first values.
"""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.arrays import FloatArray
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.engine.torch.compat_base import (
    build_model,
    load_config,
    load_model,
    offline_transformers,
    open_compat_base,
)
from expertctl.errors import IncompatibleError
from expertctl.files import write_atomic
from expertctl.package.base_model import parse_foreign_config
from expertctl.package.config_document import CONFIG_FILE, read_config_document
from expertctl.package.directory import CONFIG_PATH, WEIGHTS_PATH
from expertctl.package.model_config import ModelConfig, read_model_config
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.disk import disk_errors
from expertctl.train.batches import EncodedExample
from expertctl.train.options import TrainingOptions

_NOT_ADAPTED = frozenset({"lm_head", "embed_out", "gate", "router", "shared_expert_gate"})
"""Linear layers without an adapter: the output, and those that choose routed experts."""
_FEED_FORWARD = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2")
"""Names of the last layer of an MLP, whose input IA³ scales."""
_IA3_NAMES = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", *_FEED_FORWARD)
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
        IncompatibleError: when the base cannot be trained here.
        InvalidPackageError: when a file is malformed.
    """
    config = None if stored.foreign else read_model_config(stored.path)
    if config is not None and config.stored_places.are_usual and config.experts is None:
        bases.check(stored)
        model = _load_native(stored, config, dtype)
        tokenizer, context = Tokenizer.open(stored.path), config.max_positions
    else:
        opened = open_compat_base(bases, stored, dtype=dtype, rehash=False)
        model, tokenizer, context = load_model(opened), opened.tokenizer, opened.context
    return TrainingBase(stored, model.to(device), tokenizer, context, dtype)


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
    tensors = {name: _copy_to_torch(numbers) for name, numbers in weights.items()}
    return build_model(load_config(parsed, what), tensors, dtype=_DTYPES[dtype], name=stored.name)


def _copy_to_torch(numbers: FloatArray) -> Tensor:
    copied = torch.from_numpy(numbers.copy())  # ours are read-only
    return copied.view(torch.bfloat16) if copied.dtype == torch.uint16 else copied


def add_adapter(base: TrainingBase, options: TrainingOptions) -> Any:
    """Return the base with a new adapter of PEFT, whose values follow from the seed.

    Raises:
        IncompatibleError: when PEFT cannot adapt the base.
    """
    with offline_transformers():
        from peft import get_peft_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            try:
                config = _make_peft_config(base.model, options)
                return get_peft_model(base.model, config).eval()
            except (ValueError, TypeError, KeyError, RuntimeError) as error:
                raise IncompatibleError(
                    f"PEFT cannot adapt {base.stored.name}: {str(error)[:500]}",
                    hint="choose another --kind; or train with PEFT, and use `expertctl build`",
                ) from error


def _make_peft_config(model: Any, options: TrainingOptions) -> Any:
    from peft import IA3Config, LoraConfig, PromptTuningConfig

    task = "CAUSAL_LM"
    match options.kind:
        case "lora" | "dora":
            return LoraConfig(
                task_type=task,
                r=options.rank,
                lora_alpha=2 * options.rank,
                lora_dropout=0.0,
                use_dora=options.kind == "dora",
                target_modules=find_linear_names(model),
            )
        case "ia3":
            names = [name for name in find_linear_names(model) if name in _IA3_NAMES]
            last = [name for name in names if name in _FEED_FORWARD]
            return IA3Config(task_type=task, target_modules=names, feedforward_modules=last)
        case "prompt":
            return PromptTuningConfig(task_type=task, num_virtual_tokens=options.virtual_tokens)


def find_linear_names(model: Any) -> list[str]:
    """Return the last parts of the names of the linear layers in the blocks, sorted."""
    from transformers.pytorch_utils import Conv1D

    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    }
    return sorted(found - _NOT_ADAPTED)


def list_trained(model: Any) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def compute_loss(model: Any, part: Sequence[EncodedExample], *, device: str) -> Tensor:
    """Return the negative log-likelihood of the learnt tokens of some examples, summed."""
    length = max(len(example.ids) for example in part)
    begin = min(example.first_learnt for example in part)
    ids = torch.zeros((len(part), length), dtype=torch.long)
    learnt = torch.zeros((len(part), length), dtype=torch.bool)
    for row, example in enumerate(part):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        for first, last in example.spans:
            learnt[row, first:last] = True
    ids, learnt = ids.to(device), learnt.to(device)
    kept = length - begin + 1  # the logits that predict the first learnt token, and all later ones
    options = {"logits_to_keep": kept} if _keeps_logits(model) else {}
    logits = model(input_ids=ids, use_cache=False, **options).logits[:, -kept:-1]
    chosen = learnt[:, begin:]
    return torch.nn.functional.cross_entropy(
        logits[chosen].float(), ids[:, begin:][chosen], reduction="sum"
    )


def _keeps_logits(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.get_base_model().forward).parameters


def write_adapter(model: Any, base: TrainingBase, directory: Path) -> None:
    """Write the adapter as PEFT does, in float32, with equal bytes for equal weights.

    Raises:
        DiskFullError: when there is no space.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: state[name].detach().float().cpu().contiguous() for name in sorted(state)}
    config = model.peft_config["default"].to_dict()
    config |= {"base_model_name_or_path": base.stored.name, "inference_mode": True}
    document = {key: _sort_names(value) for key, value in sorted(config.items())}
    with disk_errors(directory):
        write_atomic(directory / WEIGHTS_PATH, save(tensors, metadata={"format": "pt"}))
        text = json.dumps(document, indent=2) + "\n"
        write_atomic(directory / CONFIG_PATH, text.encode())


def _sort_names(value: Any) -> Any:
    """PEFT keeps names in sets, whose order differs from process to process."""
    return sorted(value) if isinstance(value, set) else value
