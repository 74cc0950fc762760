"""Checkpoints: the state of a training in one file, replaced atomically.

A checkpoint has the trained weights, the moments of AdamW, the best weights so far, and a record
with the settings that decide the result. It is a safetensors file, so nothing in it is executed. A
training that continues from one gives the same adapter as one that was never interrupted.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from expertctl.errors import ConflictError, InvalidPackageError
from expertctl.files import write_atomic
from expertctl.schema.strict_json import load_object
from expertctl.schema.validation import convert_document
from expertctl.store.disk import disk_errors
from expertctl.train.options import Settings

_RECORD, _MAX_RECORD_BYTES = "expertctl", 1 << 20
_HINT = "`--restart` trains from the beginning"


@dataclass(slots=True)
class TrainingRecord:
    """The progress of a training."""

    settings: Settings
    """What decides the result: data, base, options and dtype."""
    steps: int
    """The number of steps that were planned."""
    step: int = 0
    """How many steps are done."""
    tokens: int = 0
    """How many tokens of examples were read for them."""
    seconds: float = 0.0
    """How long they took, held-out losses included."""
    first_loss: float = 0.0
    """Held-out loss before the first step, in nats per token."""
    best_loss: float = 0.0
    best_step: int = 0
    worse: int = 0
    """How many evaluations in a row had no lower loss."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Held-out losses: (steps done, nats per token)."""
    ended: str = ""
    """Why training ended: ``steps``, ``early`` or ``time``; empty while it goes on."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """What a file has: a record and tensors by kind and name of the parameter."""

    record: TrainingRecord
    tensors: Mapping[str, Tensor]

    def select(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors of one kind by the name of their parameter."""
        prefix = f"{kind}/"
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}


def save_checkpoint(
    path: Path,
    record: TrainingRecord,
    *,
    weights: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    optimiser: torch.optim.Optimizer,
) -> None:
    """Replace a checkpoint.

    Raises:
        DiskFullError: when there is no space; the previous one stays.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        state = optimiser.state.get(weight, {})
        tensors[f"weight/{name}"] = weight.detach().cpu().contiguous()
        tensors[f"best/{name}"] = best[name].detach().cpu().contiguous()
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            if moment in state:
                tensors[f"{moment}/{name}"] = state[moment].detach().cpu().contiguous().clone()
    data = save(tensors, metadata={_RECORD: json.dumps(asdict(record))})
    with disk_errors(path):
        write_atomic(path, data, mode=0o600)


def load_checkpoint(path: Path, settings: Settings) -> Checkpoint | None:
    """Return the checkpoint of a training with these settings; None if there is no file.

    Raises:
        ConflictError: when it belongs to a training with other settings.
        InvalidPackageError: when it is malformed.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {}).get(_RECORD, "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        document = load_object(text.encode(), what=_RECORD, max_bytes=_MAX_RECORD_BYTES)
        record = convert_document(document, TrainingRecord)
    except (SafetensorError, OSError, msgspec.ValidationError, InvalidPackageError) as error:
        problem = f"not a readable checkpoint: {str(error)[:300]}"
        raise InvalidPackageError(str(path), [problem], hint=_HINT) from error
    _require_same(path, record.settings, settings)
    return Checkpoint(record, tensors)


def _require_same(path: Path, known: Settings, wanted: Settings) -> None:
    differing = sorted(n for n in {*known, *wanted} if known.get(n) != wanted.get(n))
    if differing:
        names = ", ".join(name.replace("_", " ") for name in differing)
        raise ConflictError(
            f"{path.parent} has a training with another {names}",
            hint=f"{_HINT}, and -o FILE writes another package beside it",
        )


def restore_optimiser(
    optimiser: torch.optim.Optimizer, weights: Mapping[str, Tensor], found: Checkpoint
) -> None:
    """Put the weights and the moments of a checkpoint in their places.

    Raises:
        InvalidPackageError: when they are not those of this model.
    """
    saved = found.select("weight")
    shapes = {name: weight.shape for name, weight in weights.items()}
    if {name: weight.shape for name, weight in saved.items()} != shapes:
        problem = "its weights are not those of this adapter"
        raise InvalidPackageError("the checkpoint", [problem], hint=_HINT)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(saved[name])
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        for name, tensor in found.select(moment).items():
            place = weights[name]
            device = "cpu" if moment == "step" else place.device
            optimiser.state[place][moment] = tensor.to(device)
