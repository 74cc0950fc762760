"""The limits of what a client may say of how tokens are drawn."""

import pytest

from expertctl.engine.generation import DEFAULT_STOP_RULES, StopRules
from expertctl.http.operation import FieldError
from expertctl.server.openai.generation_request import GenerationFields, build_stop_rules
from expertctl.server.request_body import field_limits, normalise_top_k, normalise_top_p
from expertctl.user_request import LIMITS


def test_nothing_of_the_probability_is_the_likeliest_token_alone() -> None:
    least = normalise_top_p(0.0)
    assert least is not None
    assert 0 < least < 1e-6
    assert (normalise_top_p(0.5), normalise_top_p(None)) == (0.5, None)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_limits_of_a_field_are_those_of_the_runtime(name: str) -> None:
    limits = field_limits(name)
    assert (limits.ge, limits.le) == tuple(LIMITS[name])


@pytest.mark.parametrize(("given", "counts"), [(None, None), (-1, 0), (0, 0), (40, 40)])
def test_a_top_k_of_minus_one_is_off(given: int | None, counts: int | None) -> None:
    assert normalise_top_k(given) == counts


def test_rules_for_the_end_are_usual_unless_they_are_given() -> None:
    none = build_stop_rules(GenerationFields(model="tiny"), max_tokens=None)
    assert none == DEFAULT_STOP_RULES
    fields = GenerationFields(model="tiny", min_tokens=3, ignore_eos=True, stop_token_ids=[7, 7])
    some = build_stop_rules(fields, max_tokens=3)
    assert some == StopRules(3, ignore_end=True, stop_tokens=frozenset({7}))


def test_an_answer_that_may_not_end_before_it_has_to_is_refused() -> None:
    with pytest.raises(FieldError, match="min_tokens 4 is more than max_tokens 3"):
        build_stop_rules(GenerationFields(model="tiny", min_tokens=4), max_tokens=3)
