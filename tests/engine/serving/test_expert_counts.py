"""How often experts answered: each apart, as long as they are not too many."""

from expertctl.engine.serving.expert_counts import OTHERS, ExpertCounts


def test_an_expert_counts_once_for_each_job() -> None:
    counts = ExpertCounts()
    counts.count(["acme/sql@1.0.0", "acme/go@1.0.0", "acme/sql@1.0.0"])
    counts.count(["acme/sql@1.0.0"])
    counts.count([])
    assert dict(counts) == {"acme/sql@1.0.0": 2, "acme/go@1.0.0": 1}
    assert (counts.of("acme/sql@1.0.0"), counts.of("acme/new@1.0.0")) == (2, 0)


def test_more_experts_than_there_is_room_for_share_one_number() -> None:
    counts = ExpertCounts()
    for number in range(3_000):
        counts.count([f"acme/e{number}@1.0.0"])
    counts.count(["acme/e0@1.0.0"])
    assert len(dict(counts)) == 1_001
    assert counts.of("acme/e0@1.0.0") == 2
    assert counts.of(OTHERS) == 2_000


def test_a_copy_does_not_go_on_counting() -> None:
    counts = ExpertCounts()
    counts.count(["acme/sql@1.0.0"])
    copy = counts.copy()
    counts.count(["acme/sql@1.0.0", "acme/go@1.0.0"])
    assert dict(copy) == {"acme/sql@1.0.0": 1}
