"""The plain formulas, against the published cases and sums written out by hand."""

import json
from pathlib import Path

import pytest
import torch

from expertctl.engine.adapters.fuse import ChainStep
from expertctl.engine.adapters.steps import AdapterStep, DoraTensors
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.reference import apply_chain, merge_lora_weight
from tests.engine.random_experts import make_dora, make_ia3, make_lora

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "runtime.json").read_text())
INFINITE = [
    make_lora(torch.full((1, 2), float("inf")), torch.ones(3, 1), 1.0),
    make_dora(torch.full((1, 2), float("inf")), torch.ones(3, 1), torch.ones(3), 1.0),
    make_ia3(torch.full((2,), float("inf")), on_input=True),
    make_ia3(torch.full((3,), float("inf")), on_input=False),
]


def test_without_steps_the_layer_is_the_base() -> None:
    assert VECTORS["lora"][2] == {"tensors": "none", "W": "unchanged"}
    weight, bias, x = torch.randn(3, 2), torch.randn(3), torch.randn(4, 2)
    expected = x @ weight.T + bias
    assert torch.allclose(apply_chain(x, weight, bias, []), expected, atol=1e-6)


@pytest.mark.parametrize("bad", INFINITE, ids=["lora", "dora", "ia3 input", "ia3 output"])
def test_weight_zero_leaves_a_step_out_even_when_it_is_infinite(bad: AdapterStep) -> None:
    weight, x = torch.randn(3, 2), torch.randn(4, 2)
    assert torch.equal(apply_chain(x, weight, None, [ChainStep(bad, 0.0)]), x @ weight.T)


def test_dora_is_a_layer_whose_rows_have_the_lengths_of_the_magnitude() -> None:
    weight, bias, x = torch.randn(3, 5), torch.randn(3), torch.randn(4, 5)
    lora = make_lora(torch.randn(2, 5), torch.randn(3, 2), 0.7)
    magnitude = torch.tensor([0.5, 1.0, 2.0])
    merged = merge_lora_weight(weight, lora)
    directed = merged / merged.norm(dim=1, keepdim=True) * magnitude[:, None]
    dora = DoraTensors(lora.a, lora.b, to_array(magnitude), lora.scale)
    expected = x @ directed.T + bias
    torch.testing.assert_close(apply_chain(x, weight, bias, [ChainStep(dora)]), expected)


def test_dora_at_half_weight_is_half_way_from_the_layer_to_it() -> None:
    weight, bias, x = torch.randn(3, 5), torch.randn(3), torch.randn(4, 5)
    dora = make_dora(torch.randn(2, 5), torch.randn(3, 2), torch.rand(3), 0.7)
    base, whole = (apply_chain(x, weight, bias, links) for links in ([], [ChainStep(dora)]))
    half = apply_chain(x, weight, bias, [ChainStep(dora, 0.5)])
    torch.testing.assert_close(half, (base + whole) / 2)


def test_ia3_on_the_output_multiplies_the_bias_and_dora_does_not() -> None:
    weight, bias, x = torch.zeros(2, 2), torch.tensor([1.0, 2.0]), torch.zeros(1, 2)
    ia3 = make_ia3(torch.tensor([3.0, 5.0]), on_input=False)
    dora = make_dora(torch.ones(1, 2), torch.ones(2, 1), torch.tensor([7.0, 9.0]), 1.0)
    assert apply_chain(x, weight, bias, [ChainStep(ia3)]).tolist() == [[3, 10]]
    assert apply_chain(x, weight, bias, [ChainStep(dora)]).tolist() == [[1, 2]]
