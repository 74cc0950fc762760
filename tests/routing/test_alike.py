"""Experts whose texts have nothing in common are not one answer, however few texts they have."""

from tests.routing.experts import SORT, Router, find_candidate, list_refs, make_sort_expert


def test_an_unrelated_expert_of_few_texts_has_no_part_in_the_share_of_another(
    router: Router,
) -> None:
    poems = make_sort_expert(
        "acme/aaa",
        description="Poetry in the style of Keats.",
        examples=("What is the capital of Peru?",),
        priority=1.0,
    )
    figures = make_sort_expert(description="Ascending order of figures.", examples=SORT[:1])
    result = router(figures, poems, prompt=SORT[0])
    assert list_refs(result) == ["acme/sort@1.0.0"]
    share = find_candidate(result, "acme/aaa").probability
    assert share is not None
    assert share < 0.1
