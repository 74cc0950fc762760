"""The plain formula, against the published vectors and a sum written out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine.adapters.fuse import ChainStep
from expertctl.engine.torch.reference import apply_chain, compute_lora_delta, merge_lora_weight
from tests.engine.random_experts import make_lora

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "runtime.json").read_text())
ARITHMETIC = [case for case in VECTORS["lora"] if "rank" in case]


@pytest.mark.parametrize("case", ARITHMETIC, ids=lambda c: f"alpha {c['alpha']}")
def test_a_lora_adds_what_the_published_vectors_say(case: dict[str, Any]) -> None:
    """W zeros 1x2, A ones 2x2, B ones 1x2: each unit of input adds ``delta_each``."""
    rank = case["rank"]
    lora = make_lora(torch.ones(rank, 2), torch.ones(1, rank), case["alpha"] / rank)
    weight = torch.zeros(1, 2)
    assert merge_lora_weight(weight, lora).tolist() == [[case["delta_each"]] * 2]
    assert apply_chain(torch.eye(2), weight, None, [ChainStep(lora)]).tolist() == [
        [case["delta_each"]],
        [case["delta_each"]],
    ]
    assert compute_lora_delta(torch.tensor([[1.0, -1.0]]), lora).tolist() == [[0.0]]


def test_weights_multiply_and_experts_add_up() -> None:
    one = make_lora(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [0.0]]), 2.0)
    two = make_lora(torch.tensor([[1.0, -1.0]]), torch.tensor([[0.0], [1.0]]), 0.5)
    x = torch.tensor([[1.0, 2.0]])
    y = apply_chain(x, torch.eye(2), None, [ChainStep(one, 0.5), ChainStep(two, 2.0)])
    assert y.tolist() == [[1 + 0.5 * 2 * 3, 2 + 2 * 0.5 * -1]]


def test_half_precision_adapters_are_widened_to_the_activations() -> None:
    a, b = torch.randn(2, 3).bfloat16(), torch.randn(4, 2).bfloat16()
    x = torch.randn(5, 3)
    delta = compute_lora_delta(x, make_lora(a, b, 0.3))
    assert delta.dtype == torch.float32
    assert torch.equal(delta, compute_lora_delta(x, make_lora(a.float(), b.float(), 0.3)))
