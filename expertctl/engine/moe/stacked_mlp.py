"""A layer whose routed experts are in the rows of a stack: prompts by experts, steps by tokens.

A prompt is computed expert after expert, each reading all of its tokens at once: those that are
there while the others come, then these. A step computes all that its tokens chose in two products.
Either way each token's experts are added in the order in which it chose them, so where an expert
was, and when it came, leaves no trace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.linear import Deltas
from expertctl.engine.moe.expert_rows import expert_module
from expertctl.engine.moe.expert_stack import DUMMY, StackShape
from expertctl.engine.moe.routed_mlp import Router, SharedExpert, router_of, shared_of
from expertctl.engine.moe.stacked_experts import StackedExperts
from expertctl.engine.moe.worklist import Lane, build_worklist, one_lane
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import ModelConfig

Numbers = np.ndarray[Any, Any]
_CHOICE_NUMBERS = 8
"""Float32 numbers of a token and expert while it is chosen: scores, their order, ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Foresight:
    """What the next routed layer is likely to be asked for: its router judges what this one reads.

    Little is added to that in between. It is normed for this layer, and rescaled for the next.
    """

    scale: Tensor  # the norm of the next layer divided by that of this one, [hidden]
    route: Router
    is_last: bool
    """Whether the next layer is the last of the base, which a prompt asks for one token alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return experts of tokens, [tokens, hidden] -> int64 [tokens, used]."""
        return self.route(x * self.scale).selected


@dataclass(frozen=True, slots=True, eq=False)
class StackedMlp:
    """The router of a layer, the owner of its experts, and its shared expert if it has one."""

    layer: int
    """Its number in the base."""
    place: int
    """Its place among routed layers."""
    route: Router
    experts: StackedExperts
    shared: SharedExpert | None
    foresee: Foresight | None

    def __call__(self, x: Tensor, deltas: Deltas) -> Tensor:
        """Apply it expert after expert, with what a plan changes: [tokens, hidden].

        Raises:
            InvalidPackageError: when a file of the base cannot be read.
        """
        routed = self.route(x)
        selected, weights = routed.selected.cpu().numpy(), routed.weights.cpu().numpy()
        likely = self._likely(x)
        waits = self.experts.ask(self.place, selected, weights, likely)
        rows = self.experts.rows(self.place)
        lanes = build_worklist(
            selected, weights, one_lane(rows - 1, len(self.experts.stack)), "expert_major"
        )
        out = x.new_zeros(selected.size, x.shape[1])
        [there] = lanes.hot
        self._compute(x, there, out, deltas)
        if waits:
            self.experts.wait(self.place, len(selected))
            self._compute(x, lanes.cold, out, deltas)
        found = torch.from_numpy(self.experts.rows(self.place)[selected]).to(x.device)
        weighed = self.experts.weights(routed, found)
        merged = merge(out.view(*selected.shape, -1), weighed)
        return merged if self.shared is None else merged + self.shared(x, deltas)

    def _likely(self, x: Tensor) -> Numbers | None:
        """Return what the next layer is likely to be asked for by all of these tokens."""
        if self.foresee is None or self.experts.is_whole or (self.foresee.is_last and len(x) > 1):
            return None
        found: Numbers = self.foresee(x).cpu().numpy()
        return found

    def _compute(self, x: Tensor, lane: Lane, out: Tensor, deltas: Deltas) -> None:
        """Write what the experts of a lane make of their tokens; missing ones write nothing."""
        count = lane.count
        sources = torch.from_numpy(lane.sources[:count]).to(x.device)
        tokens = torch.from_numpy(lane.tokens[:count]).to(x.device)
        for begin, end in pairwise(_bounds(lane.experts[:count])):
            number = int(lane.experts[begin])
            row = int(self.experts.rows(self.place)[number])
            if row != DUMMY:
                expert = self.experts.stack.expert(row, expert_module(self.layer, number))
                made = expert(x.index_select(0, tokens[begin:end]), deltas)
                out.index_copy_(0, sources[begin:end], made)
        self.experts.computed(self.place)


def merge(rows: Tensor, weights: Tensor) -> Tensor:
    """Add the weighted rows of each token: [tokens, used, hidden] -> [tokens, hidden]."""
    return torch.bmm(weights[:, None], rows)[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class StackedLayers:
    """The routed layers of a base whose experts are in a stack."""

    experts: StackedExperts
    mlps: Mapping[int, StackedMlp]
    """By their numbers in the base."""


def stacked_layers(
    config: ModelConfig, tensors: Mapping[str, Tensor], experts: StackedExperts
) -> StackedLayers:
    """Return the routed layers of a base, whose other tensors are given."""
    routed = config.experts
    assert routed is not None, "a base with routed experts"
    routers = [router_of(tensors, routed, layer=_prefix(number)) for number in routed.layers]
    norms = [tensors[f"{_prefix(n)}.post_attention_layernorm.weight"] for n in routed.layers]
    scales = [_divided(after, norm) for norm, after in pairwise(norms)]
    nexts = zip(scales, routers[1:], routed.layers[1:], strict=True)
    foresights = [Foresight(scale, to, n == config.layers - 1) for scale, to, n in nexts]
    mlps = {
        number: StackedMlp(
            layer=number,
            place=place,
            route=routers[place],
            experts=experts,
            shared=shared_of(tensors, routed, layer=_prefix(number)),
            foresee=foresee,
        )
        for place, (number, foresee) in enumerate(
            zip(routed.layers, [*foresights, None], strict=True)
        )
    }
    return StackedLayers(experts, mlps)


def stacked_numbers(config: ExpertsConfig, *, hidden: int) -> int:
    """Return how many float32 numbers a token of a prompt needs in a layer of experts, at most."""
    inner = max(config.intermediate_size, config.shared_size)
    rows = config.used * (2 * hidden + 4)  # of the grid and one expert's, and the worklist
    return rows + 6 * hidden + 4 * inner + _CHOICE_NUMBERS * (config.count + config.used)


def step_bytes(config: ExpertsConfig, shape: StackShape) -> int:
    """Return the bytes a token of a step needs in a layer, with copies of the experts it chose."""
    numbers = config.used * (4 * config.intermediate_size + 2 * shape.hidden + _CHOICE_NUMBERS)
    numbers += 4 * config.shared_size + _CHOICE_NUMBERS * config.count
    return config.used * shape.nbytes + 4 * numbers


def _bounds(experts: Numbers) -> Sequence[int]:
    """Return where each run of one expert begins, and where the last ends."""
    if not len(experts):
        return (0,)
    changes = (np.flatnonzero(np.diff(experts)) + 1).tolist()
    return (0, *changes, len(experts))


def _divided(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole == 0, 0.0, part / whole)


def _prefix(number: int) -> str:
    return f"model.layers.{number}"
