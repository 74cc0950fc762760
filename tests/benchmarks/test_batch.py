"""What the rows of batch and compose say, from times that are given."""

from benchmarks import batch, compose
from benchmarks.batch import MANY_EXPERTS, ONE_EXPERT, ONE_TEXT
from benchmarks.expert_engines import TOKENS

SECONDS = {
    "one": [1.0, 1.0, 1.0],
    "base": [1.2, 1.2, 1.2],
    "same": [2.0, 2.5, 2.0],
    "many": [1.5, 2.0, 1.5],
    "PEFT": [6.0, 6.0, 6.0],
}


def test_sixteen_experts_are_compared_with_none_by_all_their_tokens() -> None:
    row, *_ = batch._make_rows(SECONDS)
    assert row.case == "16 sequences, 16 experts, threads: 2"
    assert row.ours == round(16 * TOKENS / 1.5, 2)
    assert row.theirs == round(16 * TOKENS / 1.2, 2)
    assert (row.ratio, row.spread, row.target, row.ok) == (0.8, (0.7, 0.8), ">= 0.7", True)


def test_peft_has_the_same_tokens_and_is_absent_where_it_is_not_installed() -> None:
    _, row, _ = batch._make_rows(SECONDS)
    assert (row.rival, row.ratio, row.ok) == ("PEFT, adapter_names", 4.0, True)
    _, row, _ = batch._make_rows({name: found for name, found in SECONDS.items() if name != "PEFT"})
    assert (row.rival, row.ratio, row.ok) == ("PEFT, adapter_names", None, False)


def test_sixteen_texts_of_one_expert_are_sixteen_times_the_tokens_of_one_text() -> None:
    *_, row = batch._make_rows(SECONDS)
    assert row.case == "16 sequences, one expert, threads: 2"
    assert (row.theirs, row.ratio, row.target) == (float(TOKENS), 8.0, ">= 6")


def test_texts_stand_by_their_plans() -> None:
    assert (ONE_TEXT.expert_indices, ONE_EXPERT.expert_indices) == ([0], [0] * 16)
    assert sorted(MANY_EXPERTS.expert_indices) == list(range(16))
    assert batch.BASE_ONLY.expert_indices == [-1] * 16


def test_more_experts_may_cost_more_and_never_less_than_their_bytes() -> None:
    bytes_alone = {1: 1.02, 2: 1.03, 5: 1.09, 10: 1.17}
    bounds = {count: float(target.split()[1]) for count, target in compose.TARGETS.items()}
    assert bounds.keys() == bytes_alone.keys()
    assert all(bounds[count] > share for count, share in bytes_alone.items())


def test_an_absent_peft_is_no_success() -> None:
    there = compose._compare_with_peft("a case", [1.0, 1.0], [4.0, 4.0])
    gone = compose._compare_with_peft("a case", [1.0, 1.0], None)
    assert (there.ours, there.ratio, there.ok) == (float(compose.STEPS), 4.0, True)
    assert (gone.ratio, gone.ok, gone.target) == (None, False, ">= 3")
