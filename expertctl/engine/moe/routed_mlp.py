"""A layer's routed experts, run one after the other: the plain formula, exact, for any device.

Every expert that some token asks for reads all of its tokens at once; outputs are added in the
order of expert numbers, that of the shared expert last.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from expertctl.engine.feed_forward import FeedForward, feed_forward_of
from expertctl.engine.linear import Deltas, Linear, linear_of
from expertctl.engine.moe.routing import Routed, RoutingRule, route
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import CHOICE_BIAS, ROUTER, SHARED, SHARED_GATE


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """What chooses the experts of a layer."""

    weight: Tensor  # [experts, hidden]
    choice_bias: Tensor | None  # [experts]
    rule: RoutingRule

    def __call__(self, x: Tensor) -> Routed:
        """Choose the experts of tokens; logits are float32, however the router is held."""
        logits = F.linear(x, self.weight.float())  # [tokens, experts]
        return route(logits, self.rule, self.choice_bias)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """The expert that reads every token; its gate, if any, scales what it adds."""

    mlp: FeedForward
    gate: Linear | None

    def __call__(self, x: Tensor, deltas: Deltas) -> Tensor:
        """Apply it, with what a plan changes: [tokens, hidden] -> [tokens, hidden]."""
        out = self.mlp(x, deltas)
        if self.gate is None:
            return out
        return out * self.gate(x, deltas).sigmoid()  # [tokens, hidden] * [tokens, 1]


@dataclass(frozen=True, slots=True, eq=False)
class RoutedMlp:
    """The router of a layer, its experts, and its shared expert if it has one."""

    route: Router
    experts: tuple[FeedForward, ...]
    shared: SharedExpert | None

    def __call__(self, x: Tensor, deltas: Deltas) -> Tensor:
        """Apply it, with what a plan changes: [tokens, hidden] -> [tokens, hidden]."""
        routed = self.route(x)
        out = torch.zeros_like(x)
        for number in sorted(set(routed.selected.flatten().tolist())):
            tokens, places = (routed.selected == number).nonzero(as_tuple=True)
            rows = self.experts[number](x[tokens], deltas)  # [its tokens, hidden]
            out.index_add_(0, tokens, rows * routed.weights[tokens, places, None])
        return out if self.shared is None else out + self.shared(x, deltas)


def routed_mlp_of(tensors: Mapping[str, Tensor], config: ExpertsConfig, *, layer: str) -> RoutedMlp:
    """Return the routed experts of a layer, by the prefix of its tensors' names."""
    experts = (
        feed_forward_of(tensors, f"{layer}.mlp.experts.{number}") for number in range(config.count)
    )
    return RoutedMlp(
        route=router_of(tensors, config, layer=layer),
        experts=tuple(experts),
        shared=shared_of(tensors, config, layer=layer),
    )


def router_of(tensors: Mapping[str, Tensor], config: ExpertsConfig, *, layer: str) -> Router:
    """Return the router of a layer."""
    weight = tensors[f"{layer}.{ROUTER}.weight"]
    choice_bias = tensors.get(f"{layer}.{ROUTER}.{CHOICE_BIAS}")
    return Router(weight, choice_bias, rule_of(config))


def shared_of(
    tensors: Mapping[str, Tensor], config: ExpertsConfig, *, layer: str
) -> SharedExpert | None:
    """Return the shared expert of a layer, if it has one."""
    if not config.shared_size:
        return None
    gate = linear_of(tensors, f"{layer}.{SHARED_GATE}") if config.shared_gate else None
    return SharedExpert(feed_forward_of(tensors, f"{layer}.{SHARED}"), gate)


def rule_of(config: ExpertsConfig) -> RoutingRule:
    """Return how the logits of a base's routers become experts and weights."""
    return RoutingRule(
        used=config.used,
        scoring=config.scoring,
        normalised=config.normalised,
        scale=config.scale,
    )


def routed_numbers(config: ExpertsConfig, *, hidden: int) -> int:
    """Return how many float32 numbers a token of a pass needs in a layer of experts, at most.

    All tokens may ask for the same expert, which then has as many rows as the pass.
    """
    inner = max(config.intermediate_size, config.shared_size)
    choice = 8 * config.count + 8 * config.used  # scores, their order, numbers of eight bytes
    return 5 * hidden + 3 * inner + choice
