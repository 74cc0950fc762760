"""Which experts of a layer are computed first: the published cases, and that none is lost."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.cpu.plain_routed_mlp import RoutingRule
from expertctl.engine.torch.routed_mlp import RouterOutput, route
from expertctl.engine.torch.stacked_mlp import split_by_residency

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "moe_worklist.json").read_text(encoding="utf-8")
)
SPLIT = VECTORS["worklist"]


def entries(selected: np.ndarray, weights: np.ndarray, sources: np.ndarray) -> list[dict[str, Any]]:
    """Sources as the vectors write them."""
    used = selected.shape[1]
    return [
        {
            "src": at,
            "token": at // used,
            "expert": int(selected.ravel()[at]),
            "weight": float(weights.ravel()[at]),
        }
        for at in sources.tolist()
    ]


def assert_entries(
    found: list[dict[str, Any]], want: list[dict[str, Any]], tolerance: float = 1e-7
) -> None:
    """Compare what the vectors say of each entry; their slots are in the order of rows."""
    assert len(found) == len(want)
    for got, wanted in zip(found, want, strict=True):
        wanted = {name: value for name, value in wanted.items() if name != "slot"}
        assert {name: got[name] for name in wanted} == pytest.approx(wanted, abs=tolerance)


def test_sources_are_ordered_by_row_and_by_expert_as_the_vectors_say() -> None:
    selected, weights = np.array(SPLIT["selected"]), np.array(SPLIT["weights"])
    resident, missing = split_by_residency(selected, np.array(SPLIT["hot_map"]) + 1)
    assert_entries(entries(selected, weights, resident), SPLIT["expert_major"]["hot"])
    assert_entries(entries(selected, weights, missing), SPLIT["expert_major"]["cold"])


def routed_entries(
    routed: RouterOutput, rows: np.ndarray
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    selected, weights = routed.selected.numpy(), routed.weights.numpy()
    resident, missing = split_by_residency(selected, rows)
    return entries(selected, weights, resident), entries(selected, weights, missing)


@pytest.mark.parametrize("case", VECTORS["from_logits"], ids=lambda case: str(case["logits"]))
def test_what_was_routed_by_logits_is_split_like_the_vectors(case: dict[str, Any]) -> None:
    rule = RoutingRule(used=case["k"], normalised=True, scale=case["scale"])
    routed = route(torch.tensor(case["logits"], dtype=torch.float32), rule)
    hot_map = case.get(
        "hot_map", {expert: at for at, expert in enumerate(case.get("hot_experts", []))}
    )
    rows = np.zeros(len(case["logits"][0]), np.int64)
    for expert, slot in hot_map.items():
        rows[int(expert)] = slot + 1
    resident, missing = routed_entries(routed, rows)
    assert_entries(resident, case["hot"], case["tolerance"])
    assert_entries(missing, case["cold"], case["tolerance"])


def test_biased_sigmoid_chooses_the_biased_expert_first() -> None:
    case = VECTORS["biased_sigmoid"]
    rule = RoutingRule(used=case["k"], scoring="sigmoid")
    logits = torch.tensor(case["logits"], dtype=torch.float32)
    routed = route(logits, rule, torch.tensor(case["bias"]))
    resident, missing = routed_entries(routed, np.array([0, 0, 1, 0]))
    assert_entries(resident, [{"expert": 2, "src": 0, "weight": 0.5}], case["tolerance"])
    assert_entries(missing, [{"expert": 0, "src": 1, "weight": 0.8807971}], case["tolerance"])


@given(st.integers(1, 9), st.integers(0, 6), st.data())
def test_each_source_is_in_one_part_once(experts: int, tokens: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(1, experts))
    choices = [data.draw(st.permutations(range(experts)))[:used] for _ in range(tokens)]
    selected = np.array(choices, np.int64).reshape(tokens, used)
    rows = np.array(data.draw(st.permutations(range(experts)))) * data.draw(st.integers(0, 1))
    resident, missing = split_by_residency(selected, rows)
    assert sorted([*resident, *missing]) == list(range(tokens * used))
    flat = selected.ravel()
    assert resident.tolist() == sorted(np.flatnonzero(rows[flat]), key=lambda at: rows[flat[at]])
    assert missing.tolist() == sorted(np.flatnonzero(rows[flat] == 0), key=lambda at: flat[at])
