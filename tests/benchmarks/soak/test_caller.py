"""What a caller of the soak makes of answers: whole ones, halves, errors, and those it leaves."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.soak.caller import CallRecord, SoakCaller
from benchmarks.soak.requests import Api, Body, InvalidRequest, SoakConversation, SoakRequest

CHOICE = {"index": 0, "message": {"content": "Paris"}, "finish_reason": "stop"}
WHOLE = {"choices": [CHOICE], "usage": {"completion_tokens": 5}}
ERROR = {"error": {"code": "model_not_found", "message": "gone"}}
TURNS = [{"role": "user", "content": "Where?"}]


def data(document: object) -> str:
    return f"data: {json.dumps(document)}\n\n"


CHUNKS = [data({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in ("Pa", "ris")]
DONE = "data: [DONE]\n\n"
MESSAGE = [
    "event: content_block_delta\n" + data({"delta": {"type": "text_delta", "text": "Paris"}}),
    'event: message_stop\ndata: {"type": "message_stop"}\n\n',
]


def record_call(answer: Response, request: SoakRequest | InvalidRequest) -> CallRecord:
    """Ask a server that answers everything with one response."""

    async def endpoint(_: Asked) -> Response:
        return answer

    return asked_of(Starlette(routes=[Route("/{path:path}", endpoint, methods=["POST"])]), request)


def asked_of(app: Starlette, request: SoakRequest | InvalidRequest) -> CallRecord:
    async def ask() -> CallRecord:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return await SoakCaller(client).ask(request)

    return asyncio.run(ask())


def asking(api: Api, **fields: object) -> SoakRequest:
    body: Body = {"model": "auto", "messages": TURNS, **fields}
    return SoakRequest(api=api, body=body)


def stream(*pieces: str) -> StreamingResponse:
    async def written() -> AsyncIterator[str]:
        for piece in pieces:
            yield piece

    return StreamingResponse(written(), media_type="text/event-stream")


@pytest.mark.parametrize(
    ("api", "answer"),
    [("chat", stream(*CHUNKS, DONE)), ("messages", stream(*MESSAGE))],
)
def test_a_whole_stream_has_a_first_token_and_no_fault(api: Api, answer: Response) -> None:
    one = record_call(answer, asking(api, stream=True))
    assert (one.status, one.error, one.problem) == (200, None, None)
    assert one.first is not None
    assert 0 < one.first <= one.seconds


def test_an_answer_is_the_next_turn_of_its_conversation() -> None:
    for answer, streams in ((JSONResponse(WHOLE), False), (stream(*CHUNKS, DONE), True)):
        talk = SoakConversation("somebody", "auto")
        body: Body = {"messages": TURNS, "stream": streams}
        record_call(answer, SoakRequest(api="chat", body=body, conversation=talk))
        assert talk.turns == [*TURNS, {"role": "assistant", "content": "Paris"}]


def test_half_a_stream_is_a_problem() -> None:
    assert "ended after" in str(record_call(stream(*CHUNKS), asking("chat", stream=True)).problem)


def test_an_error_in_a_stream_is_told() -> None:
    one = record_call(stream(CHUNKS[0], data(ERROR)), asking("chat", stream=True))
    assert (one.status, one.error, one.problem) == (200, "model_not_found: gone", None)


@pytest.mark.parametrize("streams", [True, False])
def test_a_refusal_is_told_with_its_status(streams: bool) -> None:
    one = record_call(JSONResponse(ERROR, 404), asking("chat", stream=streams))
    assert (one.status, one.error) == (404, "model_not_found: gone")


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (WHOLE | {"choices": []}, "0 choices of 1"),
        (WHOLE | {"usage": None}, "no usage"),
        (WHOLE | {"choices": [CHOICE | {"finish_reason": None}]}, "ended with"),
    ],
)
def test_an_answer_with_something_missing_is_a_problem(answer: object, word: str) -> None:
    assert word in str(record_call(JSONResponse(answer), asking("chat")).problem)


def test_a_body_that_is_no_json_is_a_problem() -> None:
    assert "no JSON" in str(record_call(Response("oh", 500), asking("chat")).problem)


def test_a_caller_can_hang_up_in_the_middle() -> None:
    request = SoakRequest(api="chat", body={"stream": True}, hangs_up_after=1)
    one = record_call(stream(*CHUNKS, DONE), request)
    assert one.is_left
    assert one.problem is None


def test_a_mistake_is_told_with_the_status_it_got() -> None:
    one = record_call(JSONResponse(ERROR, 415), InvalidRequest(415, "POST", "/v1/infer"))
    assert (one.status, one.kind) == (415, "wrong")


def jobs(*documents: dict[str, object]) -> Starlette:
    """A server of one job, whose documents come one after the other."""
    left = list(documents)

    async def submit(_: Asked) -> Response:
        return JSONResponse({"status": "queued"}, 202, {"Location": "/v1/jobs/1"})

    async def job(_: Asked) -> Response:
        return JSONResponse(left.pop(0))

    one = Route("/v1/jobs/1", job, methods=["GET", "DELETE"])
    return Starlette(routes=[Route("/v1/jobs", submit, methods=["POST"]), one])


FINISHED: dict[str, object] = {
    "status": "finished",
    "result": {"finish_reason": "stop"},
    "error": None,
}


def test_a_job_is_asked_for_until_it_is_over() -> None:
    one = asked_of(jobs({"status": "processing"}, FINISHED), asking("jobs"))
    assert (one.status, one.error, one.problem) == (202, None, None)


def test_a_job_that_failed_is_an_error() -> None:
    one = asked_of(jobs({"status": "failed", **ERROR}), asking("jobs"))
    assert one.error == "model_not_found: gone"


def test_a_job_that_is_deleted_may_be_cancelled_and_no_other_may() -> None:
    cancelled: dict[str, object] = {"status": "cancelled", "error": None}
    leaving = SoakRequest(api="jobs", body={}, leaves_after=0.0)
    assert asked_of(jobs(cancelled), leaving).problem is None
    assert "cancelled" in str(asked_of(jobs(cancelled), asking("jobs")).problem)
