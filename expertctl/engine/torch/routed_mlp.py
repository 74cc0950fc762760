"""Layers of routed experts in torch: the plain formula, exact, for any device.

`route` chooses the experts of each token and their weights, for all backends on torch; the CPU
kernels are tested against it. It does not depend on which experts are in memory. Of equal scores
the lower expert id wins, so the choice is the same on every device.

Every chosen expert reads all of its tokens at once; outputs are added in the order of expert
numbers, that of the shared expert last.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.cpu.plain_routed_mlp import SMALLEST_SUM, RoutingRule, build_routing_rule
from expertctl.engine.torch.functional import (
    FeedForward,
    Linear,
    LinearPlans,
    TorchDeltas,
    make_feed_forward,
    make_linear,
)
from expertctl.package.architectures import (
    CHOICE_BIAS,
    ROUTER_MODULE,
    SHARED_EXPERT_MODULE,
    SHARED_GATE_MODULE,
    ExpertsConfig,
)
from expertctl.package.block_config import ClampedGate


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


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Chooses the experts of a layer."""

    weight: Tensor  # [experts, hidden]
    choice_bias: Tensor | None  # [experts]
    rule: RoutingRule
    bias: Tensor | None = None  # [experts]

    def __call__(self, x: Tensor) -> RouterOutput:
        """Choose the experts of tokens; logits are float32, whatever the dtype of the router."""
        logits = F.linear(x, self.weight.float(), self.bias)  # [tokens, experts]
        return route(logits, self.rule, self.choice_bias)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """The expert that reads every token; its gate, if any, scales its output."""

    mlp: FeedForward
    gate: Linear | None

    def __call__(self, x: Tensor, plans: LinearPlans) -> Tensor:
        """Apply it, with the changes of its plans: [tokens, hidden] -> [tokens, hidden]."""
        out = self.mlp(x, plans)
        if self.gate is None:
            return out
        return out * self.gate(x, plans).sigmoid()  # [tokens, hidden] * [tokens, 1]


@dataclass(frozen=True, slots=True, eq=False)
class RoutedMlp:
    """The router of a layer, its experts, and its shared expert if it has one."""

    route: Router
    experts: tuple[FeedForward, ...]
    shared: SharedExpert | None

    def __call__(self, x: Tensor, deltas: TorchDeltas) -> Tensor:
        """Apply it, with the deltas of a plan: [tokens, hidden] -> [tokens, hidden]."""
        routed = self.route(x)
        out = torch.zeros_like(x)
        for number in sorted(set(routed.selected.flatten().tolist())):
            tokens, places = (routed.selected == number).nonzero(as_tuple=True)
            rows = self.experts[number](x[tokens], deltas)  # [its tokens, hidden]
            out.index_add_(0, tokens, rows * routed.weights[tokens, places, None])
        return out if self.shared is None else out + self.shared(x, deltas)


def build_routed_mlp(
    tensors: Mapping[str, Tensor],
    config: ExpertsConfig,
    *,
    layer: str,
    clamped: ClampedGate | None = None,
) -> RoutedMlp:
    """Return the routed experts of a layer, by the prefix of its tensors' names."""
    experts = (
        make_feed_forward(tensors, f"{layer}.mlp.experts.{number}", clamped=clamped)
        for number in range(config.count)
    )
    return RoutedMlp(
        route=build_router(tensors, config, layer=layer),
        experts=tuple(experts),
        shared=build_shared_expert(tensors, config, layer=layer),
    )


def build_router(tensors: Mapping[str, Tensor], config: ExpertsConfig, *, layer: str) -> Router:
    """Return the router of a layer."""
    router = f"{layer}.{ROUTER_MODULE}"
    weight, bias = tensors[f"{router}.weight"], tensors.get(f"{router}.bias")
    choice_bias = tensors.get(f"{router}.{CHOICE_BIAS}")
    return Router(weight, choice_bias, build_routing_rule(config), bias)


def build_shared_expert(
    tensors: Mapping[str, Tensor], config: ExpertsConfig, *, layer: str
) -> SharedExpert | None:
    """Return the shared expert of a layer, if it has one."""
    if not config.shared_size:
        return None
    gate = make_linear(tensors, f"{layer}.{SHARED_GATE_MODULE}") if config.shared_gate else None
    return SharedExpert(make_feed_forward(tensors, f"{layer}.{SHARED_EXPERT_MODULE}"), gate)


def estimate_routed_floats(config: ExpertsConfig, *, hidden: int) -> int:
    """Return how many float32 values a token of a pass needs in a layer of experts, at most.

    All tokens may choose the same expert, which then has as many rows as the pass.
    """
    inner = max(config.intermediate_size, config.shared_size)
    choice = 8 * config.count + 8 * config.used  # scores, their order, 8-byte ids
    return 5 * hidden + 3 * inner + choice
