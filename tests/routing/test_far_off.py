"""What is in a plan though it is not among the experts that a search finds."""

from expertctl.routing.index import MAX_HITS
from tests.routing.experts import Router, find_candidate, list_refs, make_sort_expert


def test_what_an_expert_requires_comes_along_however_far_it_is_from_the_prompt(
    router: Router,
) -> None:
    crowd = [
        make_sort_expert(f"acme/e{n}", description=f"Thing {n} to sort.", examples=())
        for n in range(MAX_HITS)
    ]
    far = make_sort_expert("acme/far", description="Zebra quux.", examples=())
    result = router(make_sort_expert(composition={"requires": ("acme/far",)}), far, *crowd)
    assert list_refs(result) == ["acme/far@1.0.0", "acme/sort@1.0.0"]
    candidate = find_candidate(result, "acme/far")
    assert (candidate.chosen, candidate.reason) == (True, "required by acme/sort@1.0.0")
    assert (candidate.probability, candidate.score) == (None, 0.0)
    assert result.plan.experts[0].score == 0.0
