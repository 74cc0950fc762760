"""Which experts a token asks for, and with which weights: the one place where that is decided.

The plain path and the cached path both begin with what `route` returns; nothing here knows which
experts are at hand. Of equal values the lower id goes first, so choices never depend on a device.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scoring = Literal["softmax", "sigmoid"]

SMALLEST_SUM = 2.0**-14
"""Weights are not divided by less; the smallest normal number of float16, 6.1035e-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How the logits of one router become experts and weights."""

    used: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """The experts of each token, first choice first."""

    selected: Tensor
    """int64 [tokens, used]."""
    weights: Tensor
    """float32 [tokens, used]."""


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routed:
    """Choose the experts of tokens by their logits, [tokens, experts]; nothing is changed.

    A bias [experts] takes part in the choice and not in the weights. Without one the logits
    themselves are compared: both ways of scoring keep their order, and rounding adds no ties.
    """
    logits = logits.float()
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    order = logits if bias is None else scores + bias.float()
    selected = order.sort(dim=-1, descending=True, stable=True).indices[:, : rule.used]
    weights = scores.gather(-1, selected)
    if rule.normalised:
        weights = weights / torch.clamp(weights.sum(-1, keepdim=True), min=SMALLEST_SUM)
    return Routed(selected.contiguous(), weights * rule.scale)
