"""Choose the experts of each token and their weights, and order the choices by expert.

Backends on torch choose with `route`; the CPU kernels are tested against it. It does not depend on
which experts are in memory. Of equal scores the lower expert id wins, so the choice is the same on
every device.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.moe.layer_slots import Ids

Scoring = Literal["softmax", "sigmoid"]

SMALLEST_SUM = 2.0**-14
"""Smallest divisor of the weights: the smallest normal float16 number, 6.1035e-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How the logits of a router become experts and weights."""

    used: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    """Whether the weights of a token are divided by their sum."""
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class RouterOutput:
    """The experts of each token, the highest score first."""

    selected: Tensor
    """int64 [tokens, used]."""
    weights: Tensor
    """float32 [tokens, used]."""


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> RouterOutput:
    """Choose the experts of each token by its logits [tokens, experts], which are not changed.

    A bias [experts] is added to the scores for the choice, not to the weights. Without a bias the
    logits are compared: both scorings keep their order, and rounding cannot add ties.
    """
    logits = logits.float()
    scores = logits.softmax(-1) if rule.scoring == "softmax" else logits.sigmoid()
    order = logits if bias is None else scores + bias.float()
    selected = order.sort(dim=-1, descending=True, stable=True).indices[:, : rule.used]
    weights = scores.gather(-1, selected)
    if rule.normalised:
        weights = weights / torch.clamp(weights.sum(-1, keepdim=True), min=SMALLEST_SUM)
    return RouterOutput(selected.contiguous(), weights * rule.scale)


def split_by_residency(selected: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Return the sources whose expert has a row, ordered by row, and the others, by expert.

    A source is ``token * used + choice``, an index into ``selected`` [tokens, used]; those of one
    expert ascend. ``rows`` [experts] is 0 for an expert that is not resident.
    """
    experts = selected.ravel()
    found = rows[experts]
    resident, missing = np.flatnonzero(found), np.flatnonzero(found == 0)
    return (
        resident[found[resident].argsort(kind="stable")],
        missing[experts[missing].argsort(kind="stable")],
    )
