"""What is in a plan though it is not among the experts that a search finds."""

from expertctl.routing.index import FOUND
from tests.routing.routed import Router, of, refs, sorting


def test_what_an_expert_requires_comes_along_however_far_it_is_from_the_prompt(
    router: Router,
) -> None:
    crowd = [
        sorting(f"acme/e{n}", description=f"Thing {n} to sort.", examples=()) for n in range(FOUND)
    ]
    far = sorting("acme/far", description="Zebra quux.", examples=())
    result = router(sorting(composition={"requires": ("acme/far",)}), far, *crowd)
    assert refs(result) == ["acme/far@1.0.0", "acme/sort@1.0.0"]
    candidate = of(result, "acme/far")
    assert (candidate.chosen, candidate.reason) == (True, "required by acme/sort@1.0.0")
    assert (candidate.share, candidate.score) == (None, 0.0)
    assert result.plan.experts[0].score == 0.0
