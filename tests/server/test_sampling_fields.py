"""What a published API draws tokens by, where its client says something and where it does not."""

import pytest

from expertctl.routing.presets import LIMITS, SamplingWishes
from expertctl.server.sampling_fields import as_published, top_p_of, within


def test_what_a_client_says_stays_and_silence_changes_no_probability() -> None:
    wishes = as_published(SamplingWishes(temperature=0.5, stop=("END",)))
    assert (wishes.temperature, wishes.stop, wishes.max_tokens) == (0.5, ("END",), None)
    assert (wishes.top_p, wishes.top_k, wishes.min_p) == (1.0, 0, 0.0)
    assert (wishes.repetition_penalty, wishes.presence_penalty) == (1.0, 0.0)


def test_nothing_of_the_probability_is_the_likeliest_token_alone() -> None:
    least = top_p_of(0.0)
    assert least is not None
    assert 0 < least < 1e-6
    assert (top_p_of(0.5), top_p_of(None)) == (0.5, None)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_limits_of_a_field_are_those_of_the_runtime(name: str) -> None:
    limits = within(name)
    assert (limits.ge, limits.le) == tuple(LIMITS[name])
