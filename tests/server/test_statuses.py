"""Every error that there is has a status that was chosen for it."""

import pytest

from expertctl import errors
from expertctl.errors import (
    ExpertError,
    RateLimitError,
    SlowBodyError,
    StoreError,
    TimedOutError,
    UsageError,
)
from expertctl.server.responses import get_retry_after, get_status

TRIED_AGAIN = {408, 409, 429}
"""Below 500, what the official clients of OpenAI and Anthropic send once more by themselves."""


def kinds(root: type[ExpertError]) -> list[type[ExpertError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]


OURS = [kind for kind in kinds(ExpertError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[ExpertError]) -> None:
    error = kind("x", ["y"]) if kind is errors.InvalidPackageError else kind("x")  # type: ignore[call-arg]
    status = get_status(error)
    assert 400 <= status < 600
    again = RateLimitError | SlowBodyError | TimedOutError
    assert (status in TRIED_AGAIN) == isinstance(error, again)


def test_who_may_come_again_is_told_when() -> None:
    assert get_retry_after(RateLimitError("x", retry_after=9)) == 9
    assert get_retry_after(StoreError("x")) == 5
    assert get_retry_after(UsageError("x")) is None
