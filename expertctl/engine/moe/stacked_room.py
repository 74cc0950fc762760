"""`StackedRoom`: what the stages of a step leave each other, at addresses that never change.

A stage reads what another one wrote and never what it writes itself, so repeating it changes
nothing. The place of the layer is stored here too, so that the same stage serves all layers. What
was chosen is copied to where the host reads it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.moe.expert_stack import pinned_bytes
from expertctl.engine.moe.routing import Routed
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
_WIDE, _IDS = 4, 3
_LONG_BYTES, _FLOAT_BYTES = 8, 4


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What some rows chose in a layer, as the host knows it; all [rows, used]."""

    selected: Numbers
    weights: Numbers
    likely: Numbers
    """What the next layer will be asked for."""


class StackedRoom:
    """Room for the routed layers of a step over up to so many rows; one layer at a time uses it."""

    def __init__(self, config: ModelConfig, *, rows: int, device: torch.device) -> None:
        """Take the memory, once."""
        routed, wide = config.experts, config.hidden_size
        assert routed is not None, "a base with routed experts"
        pinned, each = device.type == "cuda", (rows, routed.used)
        self._size = rows
        self.hidden, self.normed, self.beside, self.after = torch.zeros(
            _WIDE, rows, wide, device=device
        )
        self.made = torch.zeros(*each, wide, device=device)
        self.weights = torch.zeros(each, device=device)
        self.chosen = torch.zeros(2, *each, dtype=torch.long, device=device)
        self.rows = torch.zeros(each, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self._chosen = torch.zeros(2, *each, dtype=torch.long, pin_memory=pinned)
        self._weights = torch.zeros(each, pin_memory=pinned)

    def __len__(self) -> int:
        """For how many rows there is room."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        wide = (self.hidden, self.normed, self.beside, self.after)
        parts = (*wide, self.made, self.weights, self.chosen, self.rows, self.place)
        return sum(part.nbytes for part in parts)

    def routed(self, rows: int) -> Routed:
        """Return what the first rows chose, on the device."""
        return Routed(self.chosen[0, :rows], self.weights[:rows])

    def receive(self, texts: Tensor) -> Chosen:
        """Wait until the rows of ``texts`` have chosen; return their choices."""
        self._chosen.copy_(self.chosen, non_blocking=True)
        self._weights.copy_(self.weights, non_blocking=True)
        if self.chosen.is_cuda:
            torch.cuda.current_stream(self.chosen.device).synchronize()
        selected, likely = (ids[texts].numpy() for ids in self._chosen)
        return Chosen(selected, self._weights[texts].numpy(), likely)


def stacked_room_bytes(config: ModelConfig, *, rows: int) -> int:
    """Return what a `StackedRoom` takes on the device."""
    assert config.experts is not None
    used, wide = config.experts.used, config.hidden_size
    numbers = _WIDE * wide + used * wide + used
    return rows * (_FLOAT_BYTES * numbers + _LONG_BYTES * _IDS * used) + _LONG_BYTES


def received_bytes(config: ModelConfig, *, rows: int) -> int:
    """Return what a `StackedRoom` takes of the machine's memory, pinned in powers of two."""
    assert config.experts is not None
    chosen = rows * config.experts.used
    return pinned_bytes(2 * _LONG_BYTES * chosen) + pinned_bytes(_FLOAT_BYTES * chosen)
