"""Numbers of a snapshot, by subject."""

from expertctl.engine.memory.adapter_cache import TierTraffic
from expertctl.engine.running_batch import StepCounters
from expertctl.engine.serving.request import EngineSnapshot, JobTotals
from expertctl.server.pages import FirstTokenTotals, build_figures

SQL, DATES = "acme/sql@1.0.0", "acme/dates@1.0.0"


def snapshot(**changes: object) -> EngineSnapshot:
    facts: dict[str, object] = {
        "waiting": 3,
        "preparing": 2,
        "running": 4,
        "rows": 16,
        "totals": JobTotals(finished=5, failed=1, cancelled=2, refused=7, reused_tokens=40),
        "counts": StepCounters(steps=10, step_rows=25, prompt_tokens=300),
        "held": {"base": 1000, "experts": 200, "kv": 90, "buffers": 10},
        "limit": 2000,
        "peak": 1500,
        "kv_limit": 790,
        "kv_in_use": 60,
        "kv_kept_limit": 500,
        "kv_block": 10,
        "traffic": {"ram": TierTraffic(hits=1, loads=2, evictions=3, waits=4, nbytes=5)},
        "running_plans": ((SQL,), (SQL, DATES), (), (DATES, DATES, SQL)),
        "waiting_plans": ((DATES,),),
    }
    return EngineSnapshot(**{**facts, **changes})  # type: ignore[arg-type]  # facts by name


NONE = FirstTokenTotals(count=0, seconds=0.0)


def test_jobs_are_told_by_where_they_are_and_how_they_ended() -> None:
    assert build_figures(snapshot(), NONE)["jobs"] == {
        "waiting": 3,
        "preparing": 2,
        "running": 4,
        "rows": 16,
        "finished": 5,
        "failed": 1,
        "cancelled": 2,
        "refused": 7,
    }


def test_tokens_are_those_that_were_computed_and_those_that_were_not() -> None:
    told = build_figures(snapshot(), FirstTokenTotals(count=2, seconds=0.5))
    assert told["tokens"] == {"prompt": 300, "reused": 40, "answer": 25}
    assert told["steps"] == {"count": 10, "rows": 25}
    assert told["ttft"] == {"count": 2, "seconds": 0.5}


def test_keys_and_values_that_no_text_uses_are_kept_ones() -> None:
    told = build_figures(snapshot(), NONE)["kv"]
    assert told == {"limit": 790, "in_use": 60, "kept": 30, "kept_limit": 500}
    told = build_figures(snapshot(kv_in_use=95), NONE)["kv"]
    assert told == {"limit": 790, "in_use": 95, "kept": 0, "kept_limit": 500}


def test_an_expert_counts_once_for_each_text_and_the_busiest_is_first() -> None:
    assert build_figures(snapshot(), NONE)["experts"] == [
        {"ref": SQL, "running": 3, "prepared": 0, "requests": 0},
        {"ref": DATES, "running": 2, "prepared": 1, "requests": 0},
    ]


def test_an_expert_is_told_with_the_jobs_that_it_had_a_part_in() -> None:
    totals = JobTotals()
    totals.experts.count([DATES])
    told = build_figures(snapshot(totals=totals), NONE)["experts"]
    assert isinstance(told, list)
    assert [one["requests"] for one in told] == [0, 1]  # type: ignore[index]  # objects


def test_tiers_have_their_traffic() -> None:
    [(name, told)] = build_figures(snapshot(), NONE)["tiers"].items()  # type: ignore[union-attr]  # an object
    assert name == "ram"
    assert told == {"hits": 1, "loads": 2, "evictions": 3, "waits": 4, "nbytes": 5}
