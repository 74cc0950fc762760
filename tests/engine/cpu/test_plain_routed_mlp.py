"""The choice of experts and their mixture in numpy against torch and transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.plain_routed_mlp import (
    ExpertMixture,
    RoutingRule,
    build_expert_mixture,
    select_experts,
)
from expertctl.engine.cpu.plain_weights import load_plain_weights
from expertctl.engine.torch import routed_mlp
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import MakeReferenceModel, ReferenceModel
from tests.engine.reference_models import ROUTED_CLASSES

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "moe_worklist.json").read_text(encoding="utf-8")
)
ARCHS = sorted(ROUTED_CLASSES)


def select_in_torch(
    logits: AnyArray, rule: RoutingRule, bias: AnyArray | None = None
) -> tuple[AnyArray, AnyArray]:
    """Choose experts by the plain formula in torch."""
    found = routed_mlp.route(
        torch.from_numpy(logits), rule, None if bias is None else torch.from_numpy(bias)
    )
    return found.selected.numpy(), found.weights.numpy()


@pytest.mark.parametrize("case", VECTORS["from_logits"], ids=lambda case: str(case["logits"]))
def test_softmax_weights_equal_the_vectors(case: dict[str, Any]) -> None:
    rule = RoutingRule(used=case["k"], normalised=True, scale=case["scale"])
    selected, weights = select_experts(np.array(case["logits"], np.float32), rule)
    found = [dict(zip(*pair, strict=True)) for pair in zip(selected.tolist(), weights, strict=True)]
    for entry in (*case["hot"], *case["cold"]):
        token = entry.get("src", 0) // case["k"]
        weight = found[token].pop(entry["expert"])
        assert weight == pytest.approx(entry["weight"], abs=case["tolerance"])
    assert found == [{}] * len(found)


@given(
    seed=st.integers(0, 999),
    experts=st.integers(1, 12),
    used=st.integers(1, 12),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    normalised=st.booleans(),
    biased=st.booleans(),
    distinct=st.sampled_from([2, 3, 1000]),
)
def test_experts_and_weights_are_those_of_torch_with_ties_to_the_lower_id(
    seed: int,
    experts: int,
    used: int,
    scoring: Any,
    normalised: bool,
    biased: bool,
    distinct: int,
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.integers(0, distinct, (4, experts)).astype(np.float32) / 4
    bias = generator.integers(0, 3, experts).astype(np.float32) if biased else None
    rule = RoutingRule(used=min(used, experts), scoring=scoring, normalised=normalised, scale=1.5)
    before = logits.copy()
    selected, weights = select_experts(logits, rule, bias)
    wanted = select_in_torch(logits, rule, bias)
    assert (selected.dtype, weights.dtype) == (np.int64, np.float32)
    if bias is None:  # with a bias, scores that are equal may differ in their last bit
        assert np.array_equal(selected, wanted[0])
        np.testing.assert_allclose(weights, wanted[1], rtol=1e-5, atol=1e-7)
    order = np.take_along_axis(logits + (0 if bias is None else 4 * bias), selected, axis=1)
    assert order.shape == (4, rule.used)
    assert all(len(set(row)) == rule.used for row in selected.tolist())
    assert np.array_equal(logits, before)


def test_logits_that_are_no_numbers_still_name_experts_that_exist() -> None:
    logits = np.array([[np.nan] * 6, [np.inf, -np.inf, 0, 0, 0, 0]], np.float32)
    for scoring in ("softmax", "sigmoid"):
        with np.errstate(invalid="ignore", over="ignore"):
            selected, _ = select_experts(logits, RoutingRule(used=3, scoring=scoring))
        assert all(sorted(set(row)) == sorted(row) for row in selected.tolist())
        assert 0 <= selected.min() <= selected.max() < 6


def mixture(model: ReferenceModel, layer: int, dtype: str = "float32") -> ExpertMixture:
    config = read_model_config(model.directory)
    assert config.experts is not None
    weights = load_plain_weights(model.directory, config, dtype=dtype)
    return build_expert_mixture(weights, config.experts, layer=f"model.layers.{layer}")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_layer_equals_that_of_transformers(
    oracle: MakeReferenceModel, arch: str, tokens: int
) -> None:
    model = oracle(arch)
    x = torch.randn(tokens, 32)
    with torch.inference_mode():
        theirs = model.model.model.layers[2].mlp(x[None])[0].numpy()
    found = mixture(model, 2)(x.numpy(), {})
    assert float(np.abs(found - theirs).max()) <= 1e-5


def test_experts_are_chosen_in_float32_however_the_router_is_held(
    oracle: MakeReferenceModel,
) -> None:
    model = oracle("qwen3_moe", num_experts=6, num_experts_per_tok=3)
    model.model.bfloat16().float()  # rounded, so that nothing is lost where it is held so
    model.model.save_pretrained(model.directory)
    x = torch.randn(50, 32).numpy()
    exact, narrow = (mixture(model, 1, dtype)(x, {}) for dtype in ("float32", "bf16"))
    np.testing.assert_allclose(narrow, exact, atol=1e-6)
