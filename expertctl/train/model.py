"""An adapter of PEFT on a base: its first values, its loss, and its files.

The model stays in evaluation mode: without dropout nothing depends on random numbers once the
adapter has its first values.
"""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.torch.compat_base import offline_transformers
from expertctl.errors import IncompatibleError
from expertctl.files import write_atomic
from expertctl.package.directory import CONFIG_PATH, WEIGHTS_PATH
from expertctl.store.disk import disk_errors
from expertctl.train.base import TrainingBase
from expertctl.train.batches import EncodedExample
from expertctl.train.options import TrainingOptions

_NOT_ADAPTED = frozenset({"lm_head", "embed_out", "gate", "router", "shared_expert_gate"})
"""Linear layers without an adapter: the output, and those that choose routed experts."""
_FEED_FORWARD = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2")
"""Names of the last layer of an MLP, whose input IA³ scales."""
_IA3_NAMES = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", *_FEED_FORWARD)


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
