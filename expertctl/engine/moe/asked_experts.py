"""Which experts are asked for where all routed experts of a base are on a device.

No expert is ever missing, so a step never stops to tell the host what was chosen. It adds up the
choices on the device, and they are fetched when an answer is over; for prompts the host knows them
anyway. A run in less memory begins with these counts, as in `whole_experts`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.moe.counters import Counters, requested_by_layer
from expertctl.engine.moe.exchanges import Scores
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.report import Activity, Residence, RoutedReport
from expertctl.package.experts_config import ExpertsConfig

Numbers = np.ndarray[Any, Any]
_LONG_BYTES = 8


class AskedExperts:
    """All experts are there and stay. One thread adds up and fetches; any thread reads counters."""

    slots: tuple[LayerSlots, ...] = ()
    scores: Sequence[Scores] = ()
    exchange_rate = 0.0

    def __init__(self, config: ExpertsConfig, device: torch.device) -> None:
        """Begin with nothing counted."""
        self._config, layers = config, len(config.layers)
        self.counters = Counters(config.layers, experts=config.count)
        """What layers were asked for until the last `fetch`."""
        with torch.inference_mode(False):  # steps run in inference mode; `fetch` may not
            self._chosen = torch.zeros(layers * config.count, dtype=torch.long, device=device)
            self._different = torch.zeros(layers, dtype=torch.long, device=device)
            self._firsts = torch.arange(layers, device=device)[:, None] * config.count
            self._one = torch.ones(1, dtype=torch.long, device=device)
        self._steps = self._requests = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(each.nbytes for each in (self._chosen, self._different, self._firsts, self._one))

    def add_step(self, selected: Tensor) -> None:
        """Add what a step chose, on the device and without waiting, int64 [layers, tokens, used].

        A token asks for each expert once.
        """
        layers, tokens, used = selected.shape
        places = (selected.reshape(layers, -1) + self._firsts).flatten()
        ones = self._one.expand(len(places))
        self._chosen.scatter_add_(0, places, ones)
        self._steps += 1
        if tokens == 1:
            self._requests += used
            return
        seen = torch.zeros_like(self._chosen).scatter_(0, places, ones)
        self._different += seen.view(layers, -1).sum(-1)

    def count_pass(self, selected: Numbers) -> None:
        """Count the choices of a pass, known to the host, int64 [layers, tokens, used]."""
        chosen = requested_by_layer(selected, self._config.count)
        self.counters.count_hits(chosen, calls=1, requests=np.count_nonzero(chosen, axis=-1))

    def fetch(self) -> None:
        """Count what steps chose since the last call; this waits for the device, once."""
        if not self._steps:
            return
        chosen = self._chosen.cpu().numpy().reshape(-1, self._config.count)
        different = self._different.cpu().numpy() + self._requests
        self.counters.count_hits(chosen, calls=self._steps, requests=different)
        self._chosen.zero_()
        self._different.zero_()
        self._steps = self._requests = 0

    def report(self) -> RoutedReport:
        """Return what was asked for until the last `fetch`."""
        layers, experts = len(self._config.layers), self._config.count
        residence = Residence(
            layers=layers, experts=experts, slots=experts, blocks=layers * experts
        )
        return RoutedReport(residence, Activity(requests=self.counters.in_all().summary.requests))

    def take_notes(self) -> tuple[str, ...]:
        """Return nothing: no expert is still to come."""
        return ()

    def guide(self, scores: Sequence[Scores], *, rate: float) -> None:
        """Do nothing: no expert has to make room for another."""


def asked_bytes(config: ExpertsConfig) -> int:
    """Return the bytes of counting on the device: counts of experts, and numbers of layers."""
    layers = len(config.layers)
    return _LONG_BYTES * (layers * config.count + 2 * layers + 1)
