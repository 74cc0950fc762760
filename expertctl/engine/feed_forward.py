"""A gated feed-forward network: that of a dense layer, or one expert of a layer that has many."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.linear import Deltas, Linear, linear_of


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """``down(silu(gate(x)) * up(x))``."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Tensor, deltas: Deltas) -> Tensor:
        """Apply it, with what a plan changes: [tokens, hidden] -> [tokens, hidden]."""
        gated = F.silu(self.gate(x, deltas)) * self.up(x, deltas)  # [tokens, intermediate]
        return self.down(gated, deltas)


def feed_forward_of(tensors: Mapping[str, Tensor], module: str) -> FeedForward:
    """Return the network whose three matrices lie below a module name."""
    gate, up, down = (
        linear_of(tensors, f"{module}.{name}") for name in ("gate_proj", "up_proj", "down_proj")
    )
    return FeedForward(gate, up, down)
