"""Gated MLPs and layers of routed experts in plain arrays, with the changes of a plan.

The experts of a token and their weights are chosen as `torch.routed_mlp.route` does: by the scores
of a float32 product, whatever the dtype of the router. Of equal scores the lower expert id wins.
Every chosen expert reads all of its tokens at once; outputs are added in the order of expert
numbers, that of the shared expert last.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from expertctl.engine.adapters.steps import Deltas
from expertctl.engine.arrays import AnyArray, FloatArray
from expertctl.engine.cpu.plain_functional import (
    GATES,
    StackedLinear,
    clamped_gate,
    multiply,
    plan_scratch_bytes,
    sigmoid,
    silu_gate,
    stack_linear,
)
from expertctl.engine.cpu.plain_weights import StoredMatrix, WeightTensors
from expertctl.package.architectures import (
    CHOICE_BIAS,
    ROUTER_MODULE,
    SHARED_EXPERT_MODULE,
    SHARED_GATE_MODULE,
    ExpertsConfig,
)
from expertctl.package.block_config import ClampedGate

_FLOAT_BYTES = 4
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


def build_routing_rule(config: ExpertsConfig) -> RoutingRule:
    """Return the routing rule of a base."""
    return RoutingRule(
        used=config.used, scoring=config.scoring, normalised=config.normalised, scale=config.scale
    )


def select_experts(
    logits: AnyArray, rule: RoutingRule, bias: AnyArray | None = None
) -> tuple[AnyArray, AnyArray]:
    """Choose the experts of each token by its logits, float32 [tokens, experts].

    A bias [experts] is added to the scores for the choice, not to the weights. Without a bias the
    logits are compared: both scorings keep their order, and rounding cannot add ties.

    Returns:
        Ids, int64 [tokens, used], the highest score first, and weights, float32 [tokens, used].
    """
    scores = _softmax(logits) if rule.scoring == "softmax" else sigmoid(logits)
    order = logits if bias is None else scores + bias
    selected = np.argsort(-order, axis=-1, kind="stable")[:, : rule.used]
    weights = np.take_along_axis(scores, selected, axis=-1)
    if rule.normalised:
        weights /= np.maximum(weights.sum(axis=-1, keepdims=True), np.float32(SMALLEST_SUM))
    weights *= np.float32(rule.scale)
    return selected, weights


def _softmax(logits: AnyArray) -> AnyArray:
    found: AnyArray = np.exp(logits - logits.max(axis=-1, keepdims=True))
    found /= found.sum(axis=-1, keepdims=True)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp:
    """A gated MLP, of a dense layer or of one routed expert: ``down(silu(gate(x)) * up(x))``.

    With a ``clamped`` gate it computes that in place of ``silu(gate) * up``.
    """

    inputs: StackedLinear  # gate and up
    down: StackedLinear
    clamped: ClampedGate | None = None

    def __call__(self, x: AnyArray, deltas: Deltas) -> AnyArray:
        """Apply it with the changes of a plan: [tokens, hidden] -> [tokens, hidden]."""
        both = self.inputs(x, deltas)
        gate, up = np.split(both, self.inputs.ends[:1], axis=1)
        if self.clamped is None:
            return self.down(silu_gate(gate, up), deltas)
        limit, alpha = self.clamped.limit, self.clamped.alpha
        return self.down(clamped_gate(gate, up, limit=limit, alpha=alpha), deltas)


def stack_gated_mlp(
    weights: WeightTensors, module: str, clamped: ClampedGate | None = None
) -> GatedMlp:
    """Return the MLP whose three matrices are below a module name."""
    inputs = stack_linear(weights, (f"{module}.gate_proj", f"{module}.up_proj"))
    return GatedMlp(inputs, stack_linear(weights, (f"{module}.down_proj",)), clamped)


def gated_mlp_bytes(hidden: int, inner: int, tokens: int, *, width: int) -> int:
    """Return the maximum bytes that a gated MLP needs, its result included."""
    most = plan_scratch_bytes(max(hidden, inner), max(hidden, inner), tokens, width=width)
    return most + _FLOAT_BYTES * tokens * (hidden + 3 * inner)


@dataclass(frozen=True, slots=True, eq=False)
class ActivatedMlp:
    """An MLP of a dense layer with any activation, gated or not."""

    inputs: StackedLinear  # gate and up, or only up
    down: StackedLinear
    activation: str

    def __call__(self, x: AnyArray, deltas: Deltas) -> AnyArray:
        """Apply it with the changes of a plan: [tokens, hidden] -> [tokens, hidden]."""
        made = self.inputs(x, deltas)
        inner = self.inputs.ends[0]
        up = made[:, inner:] if len(self.inputs.ends) > 1 else None
        return self.down(GATES[self.activation](made[:, :inner], up), deltas)


def build_dense_mlp(
    weights: WeightTensors, module: str, *, activation: str, gated: bool
) -> GatedMlp | ActivatedMlp:
    """Return the MLP of a dense layer, by the name of its module."""
    if gated and activation == "silu":
        return stack_gated_mlp(weights, module)
    inputs = [f"{module}.gate_proj"] * gated + [f"{module}.up_proj"]
    down = stack_linear(weights, (f"{module}.down_proj",))
    return ActivatedMlp(stack_linear(weights, inputs), down, activation)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMixture:
    """The router of a layer, its experts, and its shared expert with a gate, if it has them."""

    rule: RoutingRule
    router: FloatArray | StoredMatrix  # [experts, hidden]
    router_bias: AnyArray | None  # [experts]
    choice_bias: AnyArray | None  # [experts]
    experts: tuple[GatedMlp, ...]
    shared: GatedMlp | None
    shared_gate: StackedLinear | None

    def __call__(self, x: AnyArray, deltas: Deltas) -> AnyArray:
        """Apply it, with the deltas of a plan: [tokens, hidden] -> [tokens, hidden]."""
        logits = np.empty((len(x), len(self.router)), np.float32)
        multiply(x, self.router, logits)
        if self.router_bias is not None:
            logits += self.router_bias
        selected, weights = select_experts(logits, self.rule, self.choice_bias)
        out = np.zeros_like(x)
        for number in sorted(set(selected.ravel().tolist())):
            tokens, places = np.nonzero(selected == number)
            rows = self.experts[number](x[tokens], deltas)  # [its tokens, hidden]
            rows *= weights[tokens, places, None]
            out[tokens] += rows  # a token chooses an expert once
        if self.shared is not None:
            out += self._apply_shared(self.shared, x, deltas)
        return out

    def _apply_shared(self, shared: GatedMlp, x: AnyArray, deltas: Deltas) -> AnyArray:
        found = shared(x, deltas)
        if self.shared_gate is not None:
            found *= sigmoid(self.shared_gate(x, deltas))  # [tokens, hidden] * [tokens, 1]
        return found


def build_expert_mixture(
    weights: WeightTensors, config: ExpertsConfig, *, layer: str, gate: ClampedGate | None = None
) -> ExpertMixture:
    """Return the routed experts of a layer, by the prefix of its tensors' names."""
    tensors, router = weights.tensors, f"{layer}.{ROUTER_MODULE}"
    shared = (
        stack_gated_mlp(weights, f"{layer}.{SHARED_EXPERT_MODULE}") if config.shared_size else None
    )
    gated = shared is not None and config.shared_gate
    return ExpertMixture(
        rule=build_routing_rule(config),
        router=tensors[f"{router}.weight"],
        router_bias=tensors.get(f"{router}.bias"),
        choice_bias=tensors.get(f"{router}.{CHOICE_BIAS}"),
        experts=tuple(
            stack_gated_mlp(weights, f"{layer}.mlp.experts.{number}", gate)
            for number in range(config.count)
        ),
        shared=shared,
        shared_gate=stack_linear(weights, (f"{layer}.{SHARED_GATE_MODULE}",)) if gated else None,
    )


def expert_mixture_bytes(config: ExpertsConfig, hidden: int, tokens: int, *, width: int) -> int:
    """Return the maximum bytes that a layer of experts needs, its result included.

    All tokens may choose the same expert, which then has as many rows as the pass.
    """
    inner = max(config.intermediate_size, config.shared_size)
    mlp = gated_mlp_bytes(hidden, inner, tokens, width=width)
    # logits, scores, their order; ids and comparisons of 8 bytes; chosen rows and the sum
    choice = tokens * (5 * config.count + 8 * config.used + 3 * hidden)
    return mlp + _FLOAT_BYTES * choice
