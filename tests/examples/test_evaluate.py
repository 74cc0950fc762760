"""What the figures of the starter pack count, and where they stand in the table."""

from types import SimpleNamespace
from typing import Any

from examples.starter.evaluate import Figures, Together, _share_planned, as_table

FIGURES = Figures(
    ref="acme/one@1.0.0",
    kind="lora",
    n=200,
    base=0.015,
    forced=0.985,
    routed=0.97,
    routed_here=0.99,
    distinct=180,
    nearest_copy=0.1234,
    train_overlap=0,
)
PAIR = Together(
    plan=("acme/one@1.0.0", "acme/two@1.0.0"),
    n=100,
    together=0.93,
    alone=(0.5, 0.25),
    routed=0.875,
    routed_here=1.0,
)


def planned(*refs: str) -> Any:
    """A run, as far as its plan goes."""
    plan = SimpleNamespace(experts=[SimpleNamespace(ref=ref) for ref in refs])
    return SimpleNamespace(planned=SimpleNamespace(result=SimpleNamespace(plan=plan)))


def test_a_run_counts_as_routed_here_with_these_experts_in_this_order_and_no_others() -> None:
    runs = [planned("a", "b"), planned("b", "a"), planned("a"), planned("a", "b", "c"), planned()]
    assert _share_planned(runs, ("a", "b")) == 0.2
    assert _share_planned(runs, ["a"]) == 0.2
    assert _share_planned(runs[:1], ("a", "b")) == 1.0


def test_each_figure_stands_below_its_name() -> None:
    experts, pairs = as_table([FIGURES], [PAIR]).split("\n\n")
    head, row = (line.split() for line in experts.splitlines())
    assert dict(zip(head, row, strict=True)) == {
        "expert": "acme/one@1.0.0",
        "kind": "lora",
        "n": "200",
        "base": "0.015",
        "forced": "0.985",
        "routed": "0.970",
        "distinct": "180",
        "copy": "0.123",
        "overlap": "0",
    }
    assert pairs.splitlines()[1].split() == [
        *("acme/one@1.0.0", "+", "acme/two@1.0.0", "100", "0.930", "0.500", "0.250", "0.875"),
    ]
