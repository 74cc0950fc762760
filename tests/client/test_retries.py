"""What is sent again, after how long, and what is not: both clients in the same way."""

import asyncio

import httpx2
import pytest

from expertctl.client import Retries
from expertctl.errors import (
    ExpertError,
    NotFoundError,
    RateLimitError,
    UnauthenticatedError,
    UnreachableError,
)
from tests.client.transports import (
    ScriptedAnswer,
    ScriptedTransport,
    make_error_response,
    make_experts_response,
)

REFUSED = httpx2.ConnectError("refused")
CUT = httpx2.ReadError("cut")
PROMPT = "Sort: 3, 1, 2"


def ask(wire: ScriptedTransport, *, is_async: bool) -> object:
    """A question that may be asked twice."""
    if not is_async:
        return wire.make_client().experts()

    async def inside() -> object:
        async with wire.make_async_client() as client:
            return await client.experts()

    return asyncio.run(inside())


def infer(wire: ScriptedTransport, *, is_async: bool) -> object:
    """A prompt, which would be answered twice."""
    if not is_async:
        return wire.make_client().infer(PROMPT)

    async def inside() -> object:
        async with wire.make_async_client() as client:
            return await client.infer(PROMPT)

    return asyncio.run(inside())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("answers", "pauses"),
    [
        ([make_error_response(429, "rate_limit", **{"Retry-After": "7"})], [7.0]),
        (
            [make_error_response(503, "unreachable"), make_error_response(503, "unreachable")],
            [0.5, 1.0],
        ),
        ([REFUSED, REFUSED], [0.5, 1.0]),
        ([httpx2.ConnectTimeout("slow")], [0.5]),
        ([CUT], [0.5]),
        ([httpx2.ReadTimeout("slow")], [0.5]),
        ([make_error_response(502, "error")], [0.5]),
    ],
    ids=["busy", "not there", "refused", "unheard", "cut", "silent", "proxy"],
)
def test_what_may_pass_is_asked_again(
    answers: list[ScriptedAnswer], pauses: list[float], is_async: bool
) -> None:
    copies = [_copy(answer) for answer in answers]
    wire = ScriptedTransport(*copies, make_experts_response())
    assert ask(wire, is_async=is_async) == ()
    assert wire.pauses == pauses


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("answer", "times"),
    [
        (CUT, 1),
        (httpx2.ReadTimeout("slow"), 1),
        (make_error_response(502, "error"), 1),
        (make_error_response(503, "unreachable"), 3),
        (REFUSED, 3),
    ],
    ids=["cut", "silent", "proxy", "not there", "refused"],
)
def test_a_prompt_is_sent_again_only_where_nobody_can_have_begun_to_answer_it(
    answer: ScriptedAnswer, times: int, is_async: bool
) -> None:
    wire = ScriptedTransport(*(_copy(answer) for _ in range(3)))
    with pytest.raises(UnreachableError):
        infer(wire, is_async=is_async)
    assert len(wire.asked) == times


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (make_error_response(401, "unauthenticated"), UnauthenticatedError),
        (make_error_response(404, "not_found"), NotFoundError),
        (make_error_response(500, "error"), ExpertError),
        (make_error_response(429, "rate_limit", **{"Retry-After": "61"}), RateLimitError),
    ],
    ids=["who", "what", "bug", "much later"],
)
def test_what_will_not_pass_is_told_at_once(
    answer: httpx2.Response, kind: type[ExpertError]
) -> None:
    wire = ScriptedTransport(_copy(answer))
    with pytest.raises(kind):
        ask(wire, is_async=False)
    assert wire.pauses == []


def test_pauses_grow_to_a_limit_and_are_up_to_half_as_long_by_chance() -> None:
    error = UnreachableError("no", sent=False)
    longest = Retries(attempts=9, chance=lambda: 1.0)
    shortest = Retries(attempts=9, chance=lambda: 0.0)
    pauses = [longest.pause_after(n, error, repeatable=False) for n in range(1, 9)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    assert shortest.pause_after(2, error, repeatable=False) == 0.5
    assert longest.pause_after(9, error, repeatable=False) is None


def test_one_attempt_is_enough_if_that_is_wanted() -> None:
    wire = ScriptedTransport(REFUSED)
    with pytest.raises(UnreachableError) as refused:
        wire.make_client(retries=Retries(attempts=1)).experts()
    assert not refused.value.sent
    assert "http://127.0.0.1:8000 cannot be reached" in refused.value.message
    assert "expertctl serve" in refused.value.hint


def _copy(answer: ScriptedAnswer) -> ScriptedAnswer:
    """An answer can be read once."""
    if isinstance(answer, Exception):
        return answer
    return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)
