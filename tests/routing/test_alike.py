"""Experts whose texts have nothing in common are not one answer, however few texts they have."""

from tests.routing.routed import SORT, Router, of, refs, sorting


def test_an_unrelated_expert_of_few_texts_has_no_part_in_the_share_of_another(
    router: Router,
) -> None:
    poems = sorting(
        "acme/aaa",
        description="Poetry in the style of Keats.",
        examples=("What is the capital of Peru?",),
        priority=1.0,
    )
    figures = sorting(description="Ascending order of figures.", examples=SORT[:1])
    result = router(figures, poems, prompt=SORT[0])
    assert refs(result) == ["acme/sort@1.0.0"]
    share = of(result, "acme/aaa").share
    assert share is not None
    assert share < 0.1
