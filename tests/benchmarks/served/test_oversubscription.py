"""What `benchmarks.served.oversubscription` demands of plans that fit and of those that do not."""

from dataclasses import replace

import pytest

from benchmarks.served.oversubscription import (
    PlanLoad,
    check_plan_loads,
    compute_budget,
    make_oversubscription_row,
)
from benchmarks.served.server import ServerMetrics

FEW = PlanLoad(plans=8, first=0.5, reads=0, loads=0, evictions=0, requests=32)
MANY = PlanLoad(plans=16, first=0.6, reads=20, loads=20, evictions=40, requests=32)
METRICS = """\
# TYPE expertctl_memory_bytes gauge
expertctl_memory_bytes{owner="base"} 1000.0
expertctl_memory_bytes{owner="experts"} 600.0
expertctl_memory_bytes{owner="buffers"} 100.0
expertctl_memory_bytes{owner="kv"} 300.0
# TYPE expertctl_expert_loads counter
expertctl_expert_loads_total{tier="ram"} 16.0
expertctl_expert_loads_total{tier="device"} 16.0
# TYPE expertctl_expert_loaded_bytes counter
expertctl_expert_loaded_bytes_total{tier="ram"} 400.0
expertctl_expert_loaded_bytes_total{tier="device"} 320.0
"""


def test_figures_are_read_by_name_and_labels() -> None:
    figures = ServerMetrics.read(METRICS)
    assert figures.get("memory_bytes", owner="base") == 1000.0
    assert figures.get("expert_loads_total", tier="ram") == 16.0
    assert figures.get("expert_evictions_total", tier="ram") == 0.0


def test_a_budget_has_room_for_plans_and_for_as_much_that_is_kept() -> None:
    budget = compute_budget(8, ServerMetrics.read(METRICS))
    assert budget == 1000 + 100 + 2 * 20 + 2 * 9 * 20
    assert budget < 1000 + 100 + 2 * 16 * 20, "twice as many do not fit beside what is kept"


def test_plans_that_were_to_fit_are_not_loaded_and_the_others_are() -> None:
    check_plan_loads(FEW, MANY)
    with pytest.raises(SystemExit, match="were to fit, and did not: 8 plans"):
        check_plan_loads(replace(FEW, reads=1), MANY)
    with pytest.raises(SystemExit, match="were to fit, and did not"):
        check_plan_loads(replace(FEW, loads=1), MANY)
    for field in ("reads", "loads", "evictions"):
        with pytest.raises(SystemExit, match="were not to fit, and did: 16 plans"):
            check_plan_loads(FEW, replace(MANY, **{field: 0}))


def test_the_row_says_what_was_loaded_in_both() -> None:
    row = make_oversubscription_row([(FEW, MANY)], target="<= 3")
    assert row.ratio == pytest.approx(1.2)
    assert row.note is not None
    assert "8 plans, 32 requests: 0 experts read, 0 plans compiled" in row.note
    assert "16 plans, 32 requests: 20 experts read" in row.note
