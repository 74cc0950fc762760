"""The choice of experts against published vectors, transformers' routers and plain formulas."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Dots1Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from expertctl.engine.cpu.plain_routed_mlp import RoutingRule
from expertctl.engine.torch.routed_mlp import RouterOutput, route

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "moe_worklist.json").read_text(encoding="utf-8")
)
BIASED = VECTORS["biased_sigmoid"]
HIDDEN, EXPERTS, USED = 32, 16, 4

numbers = st.floats(-20, 20, width=32)
rows = st.integers(1, 12).flatmap(
    lambda experts: st.lists(
        st.lists(numbers, min_size=experts, max_size=experts), min_size=1, max_size=5
    )
)


def expert_weights(routed: RouterOutput) -> list[dict[int, float]]:
    """Weights by expert, for each token."""
    lists = zip(routed.selected.tolist(), routed.weights.tolist(), strict=True)
    return [dict(zip(ids, weights, strict=True)) for ids, weights in lists]


@pytest.mark.parametrize("case", VECTORS["from_logits"], ids=lambda case: str(case["logits"]))
def test_softmax_weights_equal_the_vectors(case: dict[str, Any]) -> None:
    rule = RoutingRule(used=case["k"], normalised=True, scale=case["scale"])
    routed = route(torch.tensor(case["logits"], dtype=torch.float32), rule)
    found = expert_weights(routed)
    for entry in (*case["hot"], *case["cold"]):
        token = entry.get("src", 0) // case["k"]
        assert found[token].pop(entry["expert"]) == pytest.approx(
            entry["weight"], abs=case["tolerance"]
        )
    assert found == [{}] * len(found)


def test_a_bias_takes_part_in_the_choice_and_not_in_the_weights() -> None:
    logits = torch.tensor(BIASED["logits"], dtype=torch.float32)
    rule = RoutingRule(used=BIASED["k"], scoring="sigmoid")
    routed = route(logits, rule, torch.tensor(BIASED["bias"]))
    assert routed.selected.tolist() == [BIASED["chosen"]]
    assert routed.weights.tolist()[0] == pytest.approx(BIASED["weights"], abs=BIASED["tolerance"])


def test_a_bias_of_softmax_takes_part_in_the_choice_alone_too() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = torch.softmax(logits, -1)[0].tolist()
    routed = route(logits, RoutingRule(used=2), torch.tensor([0.0, 0.0, 0.6, 0.0]))
    assert routed.selected.tolist() == [[2, 0]]  # 0.0871 + 0.6 before 0.6439
    assert routed.weights.tolist()[0] == pytest.approx([plain[2], plain[0]], abs=1e-7)


@given(rows, st.integers(1, 12))
def test_softmax_of_the_chosen_logits_equals_the_normalised_choice_of_softmax(
    logits: list[list[float]], used: int
) -> None:
    used = min(used, len(logits[0]))
    routed = route(torch.tensor(logits), RoutingRule(used=used, normalised=True))
    exact = np.array(logits, dtype=np.float64)
    first = np.argsort(-exact, axis=1, kind="stable")[:, :used]
    powers = np.exp(np.take_along_axis(exact, first, axis=1) - exact.max(1, keepdims=True))
    assert routed.selected.tolist() == first.tolist()
    np.testing.assert_allclose(
        routed.weights, powers / powers.sum(1, keepdims=True), rtol=1e-5, atol=1e-6
    )


@given(
    st.lists(st.lists(st.integers(-2, 2), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
)
def test_of_equal_values_the_lower_id_is_chosen(
    logits: list[list[int]], used: int, scoring: Any, biased: bool
) -> None:
    rule = RoutingRule(used=used, scoring=scoring)
    bias = torch.zeros(9) if biased else None
    routed = route(torch.tensor(logits, dtype=torch.float32), rule, bias)
    want = [sorted(range(9), key=lambda e: (-row[e], e))[:used] for row in logits]
    assert routed.selected.tolist() == want


def test_saturated_scores_keep_the_order_of_their_logits() -> None:
    logits = torch.tensor([[30.0, 31.0, 29.0, 32.0]])
    routed = route(logits, RoutingRule(used=3, scoring="sigmoid"))
    assert routed.selected.tolist() == [[3, 1, 0]]
    assert routed.weights.tolist() == [[1.0, 1.0, 1.0]]


def test_a_sum_that_is_nearly_nothing_is_not_divided_by() -> None:
    rule = RoutingRule(used=2, scoring="sigmoid", normalised=True)
    weights = route(torch.tensor([[-12.0, -13.0, -40.0]]), rule).weights[0].double()
    want = torch.sigmoid(torch.tensor([-12.0, -13.0], dtype=torch.float64)) / 6.103515625e-5
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0)


def test_routing_leaves_its_inputs_as_they_were() -> None:
    logits, bias = torch.randn(3, 8), torch.randn(8)
    kept = logits.clone(), bias.clone()
    for scoring in ("softmax", "sigmoid"):
        route(logits, RoutingRule(used=2, scoring=scoring, normalised=True, scale=2.0), bias)
    assert torch.equal(logits, kept[0])
    assert torch.equal(bias, kept[1])


def test_logits_that_are_no_numbers_still_name_experts_that_exist() -> None:
    logits = torch.tensor([[float("nan")] * 6, [float("inf"), -float("inf"), 0, 0, 0, 0]])
    for scoring in ("softmax", "sigmoid"):
        selected = route(logits, RoutingRule(used=3, scoring=scoring)).selected
        assert all(sorted(set(row)) == sorted(row) for row in selected.tolist())
        assert 0 <= int(selected.min()) <= int(selected.max()) < 6


def test_half_precision_logits_get_float32_weights() -> None:
    routed = route(torch.randn(2, 8).bfloat16(), RoutingRule(used=2))
    assert (routed.selected.dtype, routed.weights.dtype) == (torch.int64, torch.float32)


def router_and_rule(kind: str) -> tuple[torch.nn.Module, RoutingRule]:
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": USED}
    match kind:
        case "mixtral":
            mixtral = MixtralConfig(num_local_experts=EXPERTS, **sizes)
            return MixtralTopKRouter(mixtral), RoutingRule(used=USED, normalised=True)
        case "qwen2":
            qwen2 = Qwen2MoeConfig(num_experts=EXPERTS, **sizes)
            return Qwen2MoeTopKRouter(qwen2), RoutingRule(used=USED)
        case "qwen3":
            qwen3 = Qwen3MoeConfig(num_experts=EXPERTS, norm_topk_prob=True, **sizes)
            return Qwen3MoeTopKRouter(qwen3), RoutingRule(used=USED, normalised=True)
        case "olmoe":
            olmoe = OlmoeConfig(num_experts=EXPERTS, **sizes)
            return OlmoeTopKRouter(olmoe), RoutingRule(used=USED)
    dots = Dots1Config(
        n_routed_experts=EXPERTS,
        n_group=1,
        topk_group=1,
        norm_topk_prob="normalised" in kind,
        routed_scaling_factor=2.5,
        **sizes,
    )
    rule = RoutingRule(used=USED, scoring="sigmoid", normalised="normalised" in kind, scale=2.5)
    return Dots1TopkRouter(dots), rule


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen2", "qwen3", "olmoe", "dots1", "dots1 normalised"]
)
def test_weights_equal_those_of_transformers(kind: str) -> None:
    torch.manual_seed(7)
    router, rule = router_and_rule(kind)
    weight: torch.Tensor = router.weight  # type: ignore[assignment]  # typed Tensor | Module
    torch.nn.init.normal_(weight, std=0.3)
    bias: torch.Tensor | None = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_(std=0.3)
    hidden = torch.randn(200, HIDDEN)
    with torch.inference_mode():
        logits, weights, selected = router(hidden)
        routed = route(torch.nn.functional.linear(hidden, weight), rule, bias)
    assert logits.shape == (200, EXPERTS)
    wanted = expert_weights(RouterOutput(selected, weights))
    for got, want in zip(expert_weights(routed), wanted, strict=True):
        assert got == pytest.approx(want, abs=1e-6)
