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
from expertctl.server.statuses import retry_after, status_of

TRIED_AGAIN = {408, 409, 429}
"""Below 500, what the official clients of OpenAI and Anthropic send once more by themselves."""


def kinds(root: type[ExpertError]) -> list[type[ExpertError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in kinds(child))]


OURS = [kind for kind in kinds(ExpertError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[ExpertError]) -> None:
    error = kind("x", ["y"]) if kind is errors.InvalidPackageError else kind("x")  # type: ignore[call-arg]
    status = status_of(error)
    assert 400 <= status < 600
    again = RateLimitError | SlowBodyError | TimedOutError
    assert (status in TRIED_AGAIN) == isinstance(error, again)


def test_who_may_come_again_is_told_when() -> None:
    assert retry_after(RateLimitError("x", retry_after=9)) == 9
    assert retry_after(StoreError("x")) == 5
    assert retry_after(UsageError("x")) is None
