"""Trying again: how often, after how long, and what is said in the end."""

from collections.abc import Callable

import pytest

from expertctl.errors import RateLimitError, RegistryError, UnreachableError
from expertctl.registry.errors import RetrySchedule
from tests.registry.hostile_registry import RecordedPauses


def failing(*errors: Exception) -> Callable[[], str]:
    rest = iter(errors)

    def operation() -> str:
        error = next(rest, None)
        if error is not None:
            raise error
        return "done"

    return operation


def test_pauses_grow_up_to_the_longest_and_vary_by_half() -> None:
    pauses = RecordedPauses()
    chances = iter([0.0, 1.0, 0.5, 1.0, 1.0, 1.0])
    retries = RetrySchedule(attempts=7, sleep=pauses, jitter=lambda: next(chances))
    assert retries.run(failing(*[UnreachableError("x")] * 6)) == "done"
    assert pauses.seconds == [0.25, 1.0, 1.5, 4.0, 8.0, 15.0]


def test_the_last_error_is_told_with_the_number_of_attempts() -> None:
    retries = RetrySchedule(attempts=2, sleep=RecordedPauses())
    errors = [UnreachableError("first"), UnreachableError("last", hint="h"), UnreachableError("x")]
    with pytest.raises(UnreachableError) as caught:
        retries.run(failing(*errors))
    assert (caught.value.message, str(caught.value)) == ("last (tried 2 times)",) * 2
    assert caught.value.hint == "h"


def test_one_attempt_is_not_counted_aloud() -> None:
    with pytest.raises(UnreachableError, match=r"^x$"):
        RetrySchedule(attempts=1).run(failing(UnreachableError("x")))


def test_other_errors_are_final() -> None:
    pauses = RecordedPauses()
    with pytest.raises(RegistryError, match="final"):
        RetrySchedule(sleep=pauses).run(failing(RegistryError("final")))
    assert pauses.seconds == []


def test_what_may_have_arrived_is_repeated_only_where_that_is_harmless() -> None:
    pauses = RecordedPauses()
    retries = RetrySchedule(sleep=pauses, jitter=lambda: 1.0)
    arrived, never = UnreachableError("x", sent=True), UnreachableError("y", sent=False)
    assert retries.run(failing(never), repeatable=False) == "done"
    with pytest.raises(UnreachableError, match="x"):
        retries.run(failing(arrived), repeatable=False)
    assert pauses.seconds == [0.5]


def test_a_pause_that_is_asked_for_is_kept_if_it_is_not_too_long() -> None:
    pauses = RecordedPauses()
    retries = RetrySchedule(sleep=pauses)
    assert retries.run(failing(RateLimitError("x", retry_after=60))) == "done"
    with pytest.raises(RateLimitError, match="asks to wait 61 seconds"):
        retries.run(failing(RateLimitError("x", retry_after=61)))
    assert pauses.seconds == [60]


def test_the_first_failure_alone_is_told_while_it_is_tried_again() -> None:
    told: list[str] = []
    retries = RetrySchedule(tell=told.append, sleep=RecordedPauses())
    assert retries.run(failing(UnreachableError("a"), UnreachableError("b"))) == "done"
    assert told == ["a; trying again"]
