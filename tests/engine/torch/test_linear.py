"""One linear layer with a plan: the closed form against the chain, applied expert by expert."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.torch.functional import TorchDelta, apply_linear

VECTORS = json.loads(
    Path(__file__).parents[2].joinpath("vectors", "runtime.json").read_text(encoding="utf-8")
)
CASES = VECTORS["plan_closed_form"]


def t(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, delta: TorchDelta) -> Tensor:
    """``y = d * (W (u * x)) + B (A x) + e * b``, one token and one part at a time, in float64."""
    rows = []
    for token in x.double():
        u = 1 if delta.input_scale is None else delta.input_scale.double()
        y = weight.double() @ (u * token)
        if delta.output_scale is not None:
            y = delta.output_scale.double() * y
        if delta.a is not None and delta.b is not None:
            y = y + delta.b.double() @ (delta.a.double() @ token)
        if bias is not None:
            e = 1 if delta.bias_scale is None else delta.bias_scale.double()
            y = y + e * bias.double()
        rows.append(y)
    return torch.stack(rows)


def test_no_delta_is_the_layer_itself() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    assert torch.equal(
        apply_linear(x, weight, bias, None), torch.nn.functional.linear(x, weight, bias)
    )
    assert torch.equal(
        apply_linear(x, weight, None, LinearDelta()), torch.nn.functional.linear(x, weight)
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=5, max_size=5), st.integers(1, 4))
def test_every_mix_of_parts_follows_the_formula(seed: int, parts: list[bool], rank: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    low_rank, u, d, e, biased = parts
    x, weight, bias = noise(3, 6), noise(4, 6), noise(4) if biased else None
    delta = LinearDelta(
        a=noise(rank, 6) if low_rank else None,
        b=noise(4, rank) if low_rank else None,
        input_scale=noise(6) if u else None,
        output_scale=noise(4) if d else None,
        bias_scale=noise(4) if e else None,
    )
    torch.testing.assert_close(
        apply_linear(x, weight, bias, delta).double(),
        plain(x, weight, bias, delta),
        atol=1e-5,
        rtol=1e-5,
    )


def test_the_published_order_cases_fit_into_the_form() -> None:
    case = CASES["order_matters_case"]
    lora, scale = case["lora"], t(case["ia3"])
    x, weight = t([case["x"]]), t(case["W"])
    a, b = t(lora["A"]), t(lora["B"]) * lora["scale"]
    ia3_last = LinearDelta(a=a, b=scale[:, None] * b, output_scale=scale)
    assert apply_linear(x, weight, None, ia3_last).tolist() == [case["lora_then_ia3"]]
    ia3_first = LinearDelta(a=a, b=b, output_scale=scale)
    assert apply_linear(x, weight, None, ia3_first).tolist() == [case["ia3_then_lora"]]


def test_the_published_half_weight_case_fits_into_the_form() -> None:
    case = CASES["ia3_half_case"]
    scale = 1 + case["w"] * (t(case["ia3"]) - 1)
    got = apply_linear(t([case["x"]]), t(case["W"]), None, LinearDelta(output_scale=scale))
    assert got.tolist() == [case["y"]]


def test_an_input_scale_reaches_only_what_stands_before_it() -> None:
    case = CASES["lora_ia3in_lora_case"]
    u = t(case["ia3_input"])
    first, second = case["lora1"], case["lora2"]
    delta = LinearDelta(
        a=torch.cat((t(first["A"]) * u, t(second["A"]))),
        b=torch.cat((t(first["B"]), t(second["B"])), dim=1),
        input_scale=u,
    )
    assert apply_linear(t([case["x"]]), t(case["W"]), None, delta).tolist() == [case["y"]]


@pytest.mark.parametrize("case", VECTORS["lora"][:2], ids=lambda case: f"alpha {case['alpha']}")
def test_the_published_lora_cases_fit_into_the_form(case: dict[str, Any]) -> None:
    rank = case["rank"]
    delta = LinearDelta(a=torch.ones(rank, 2), b=torch.ones(1, rank) * case["alpha"] / rank)
    got = apply_linear(torch.eye(2), torch.zeros(1, 2), None, delta)
    assert got.flatten().tolist() == [case["delta_each"]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_a_narrow_dtype_are_widened_exactly(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 6), torch.randn(4, 6)
    a, b = torch.randn(2, 6).to(dtype), torch.randn(4, 2).to(dtype)
    narrow = apply_linear(x, weight, None, LinearDelta(a=a, b=b))
    wide = apply_linear(x, weight, None, LinearDelta(a=a.float(), b=b.float()))
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, wide)


def test_a_base_of_a_narrow_dtype_answers_in_the_dtype_of_the_activations() -> None:
    x, weight, bias = torch.randn(3, 64), torch.randn(8, 64).bfloat16(), torch.randn(8)
    delta = LinearDelta(output_scale=torch.rand(8), bias_scale=torch.rand(8))
    got = apply_linear(x, weight, bias, delta)
    wanted = apply_linear(x.bfloat16().float(), weight.float(), bias, delta)
    assert got.dtype == torch.float32
    assert float((got - wanted).norm() / wanted.norm()) < 0.01
