"""How often experts answered: each apart, as long as they are not too many."""

from expertctl.engine.serving.request import OTHER_EXPERTS, ExpertJobCounts


def test_an_expert_counts_once_for_each_job() -> None:
    counts = ExpertJobCounts()
    counts.count(["acme/sql@1.0.0", "acme/go@1.0.0", "acme/sql@1.0.0"])
    counts.count(["acme/sql@1.0.0"])
    counts.count([])
    assert dict(counts) == {"acme/sql@1.0.0": 2, "acme/go@1.0.0": 1}
    assert (counts.get("acme/sql@1.0.0"), counts.get("acme/new@1.0.0")) == (2, 0)


def test_more_experts_than_there_is_room_for_share_one_number() -> None:
    counts = ExpertJobCounts()
    for number in range(3_000):
        counts.count([f"acme/e{number}@1.0.0"])
    counts.count(["acme/e0@1.0.0"])
    assert len(dict(counts)) == 1_001
    assert counts.get("acme/e0@1.0.0") == 2
    assert counts.get(OTHER_EXPERTS) == 2_000


def test_a_copy_does_not_go_on_counting() -> None:
    counts = ExpertJobCounts()
    counts.count(["acme/sql@1.0.0"])
    copy = counts.copy()
    counts.count(["acme/sql@1.0.0", "acme/go@1.0.0"])
    assert dict(copy) == {"acme/sql@1.0.0": 1}
