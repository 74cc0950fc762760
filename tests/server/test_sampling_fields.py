"""The limits of what a client may say of how tokens are drawn."""

import pytest

from expertctl.routing.presets import LIMITS
from expertctl.server.sampling_fields import top_p_of, within


def test_nothing_of_the_probability_is_the_likeliest_token_alone() -> None:
    least = top_p_of(0.0)
    assert least is not None
    assert 0 < least < 1e-6
    assert (top_p_of(0.5), top_p_of(None)) == (0.5, None)


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_the_limits_of_a_field_are_those_of_the_runtime(name: str) -> None:
    limits = within(name)
    assert (limits.ge, limits.le) == tuple(LIMITS[name])
