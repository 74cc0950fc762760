"""Numbers of a snapshot, by subject."""

from expertctl.engine.serving.batch import Counts
from expertctl.engine.serving.snapshot import Snapshot, Totals
from expertctl.engine.tiers import Traffic
from expertctl.server.status_page.figures import FirstTokens, figures

SQL, DATES = "acme/sql@1.0.0", "acme/dates@1.0.0"


def snapshot(**changes: object) -> Snapshot:
    facts: dict[str, object] = {
        "waiting": 3,
        "preparing": 2,
        "running": 4,
        "rows": 16,
        "totals": Totals(finished=5, failed=1, cancelled=2, refused=7, reused_tokens=40),
        "counts": Counts(steps=10, step_rows=25, prompt_tokens=300),
        "held": {"base": 1000, "experts": 200, "kv": 90, "buffers": 10},
        "limit": 2000,
        "peak": 1500,
        "kv_limit": 790,
        "kv_in_use": 60,
        "kv_kept_limit": 500,
        "kv_block": 10,
        "traffic": {"ram": Traffic(hits=1, loads=2, evictions=3, waits=4, nbytes=5)},
        "running_plans": ((SQL,), (SQL, DATES), (), (DATES, DATES, SQL)),
        "waiting_plans": ((DATES,),),
    }
    return Snapshot(**{**facts, **changes})  # type: ignore[arg-type]  # facts by name


NONE = FirstTokens(count=0, seconds=0.0)


def test_jobs_are_told_by_where_they_are_and_how_they_ended() -> None:
    assert figures(snapshot(), NONE)["jobs"] == {
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
    told = figures(snapshot(), FirstTokens(count=2, seconds=0.5))
    assert told["tokens"] == {"prompt": 300, "reused": 40, "answer": 25}
    assert told["steps"] == {"count": 10, "rows": 25}
    assert told["ttft"] == {"count": 2, "seconds": 0.5}


def test_keys_and_values_that_no_text_uses_are_kept_ones() -> None:
    told = figures(snapshot(), NONE)["kv"]
    assert told == {"limit": 790, "in_use": 60, "kept": 30, "kept_limit": 500}
    told = figures(snapshot(kv_in_use=95), NONE)["kv"]
    assert told == {"limit": 790, "in_use": 95, "kept": 0, "kept_limit": 500}


def test_an_expert_counts_once_for_each_text_and_the_busiest_is_first() -> None:
    assert figures(snapshot(), NONE)["experts"] == [
        {"ref": SQL, "running": 3, "prepared": 0, "requests": 0},
        {"ref": DATES, "running": 2, "prepared": 1, "requests": 0},
    ]


def test_an_expert_is_told_with_the_jobs_that_it_had_a_part_in() -> None:
    totals = Totals()
    totals.experts.count([DATES])
    told = figures(snapshot(totals=totals), NONE)["experts"]
    assert isinstance(told, list)
    assert [one["requests"] for one in told] == [0, 1]  # type: ignore[index]  # objects


def test_tiers_have_their_traffic() -> None:
    [(name, told)] = figures(snapshot(), NONE)["tiers"].items()  # type: ignore[union-attr]  # an object
    assert name == "ram"
    assert told == {"hits": 1, "loads": 2, "evictions": 3, "waits": 4, "nbytes": 5}
