"""What a collector gets of requests: a tree of spans with real times and no word of any text."""

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
    url_attributes,
)

from tests.server.harness import BASE, StreamingClient
from tests.server.tracing.collector import read_attributes
from tests.server.tracing.conftest import MakeTraced, TracedServer

CHAT, INFER, MESSAGES = "/v1/chat/completions", "/v1/infer", "/v1/messages"
WORDS = {
    "prompt": "Zanzibar quinoa",
    "system": "Obey Xenophon",
    "stop": "Halt-Yucatan",
    "query": "peculiar-query",
    "tool": "weigh_walrus",
}
TURNS = [
    {"role": "system", "content": WORDS["system"]},
    {"role": "user", "content": WORDS["prompt"]},
]
ASKED: dict[str, Any] = {"messages": TURNS, "max_tokens": 6, "temperature": 0.5, "seed": 7}
LONG = 4
"""So many characters of an answer are in nothing else that is sent."""
STAGES = ("queue", "route", "load", "prefill", "decode", "post")
TRACE, PARENT = "12345678901234567890123456789012", "1234567890123456"


@dataclass(frozen=True)
class Tree:
    """Spans by who they are below."""

    spans: list[Span]

    def below(self, parent: Span) -> list[Span]:
        own = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(own, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))

    def of(self, answer: httpx2.Response) -> Span:
        """The span of the request that was answered with that."""
        name = answer.headers["x-request-id"]
        (span,) = [s for s in self.spans if read_attributes(s).get("expertctl.request.id") == name]
        return span

    def job(self, answer: httpx2.Response) -> Span:
        (job,) = [span for span in self.below(self.of(answer)) if span.name != "reception"]
        return job


@dataclass(frozen=True)
class TracedRequests:
    """Requests, what they were answered, and the spans that came of them."""

    tree: Tree
    chat: httpx2.Response
    infer: httpx2.Response
    completions: httpx2.Response
    missing: httpx2.Response
    began: int
    ended: int
    bytes: bytes


@pytest.fixture(scope="module")
def asked(traced: TracedServer) -> TracedRequests:
    """Ask one server for all that there is; then its traces are sent."""
    began = time.time_ns()
    secret = traced.served.service.keys.create("alice-laptop", now=time.time()).secret
    client = traced.served.client(secret)
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    stop = [WORDS["stop"]]
    model = {"model": "acme/sql:0.5+acme/json", "stop": stop}
    query = f"?q={WORDS['query']}"
    chat = client.post(f"{CHAT}{query}", json={**ASKED, **model}, headers=parent)
    drawn = {"prompt": WORDS["prompt"], "max_tokens": 24, "stop": stop, "seed": 7}
    infer = client.post(INFER, json=drawn)
    prompts = [WORDS["prompt"], WORDS["system"]]
    body = {"model": BASE, "prompt": prompts, "max_tokens": 4, "n": 2}
    completions = client.post("/v1/completions", json=body)
    tool = {"name": WORDS["tool"], "input_schema": {"type": "object"}}
    said = {"messages": TURNS[1:], "system": WORDS["system"], "max_tokens": 4, "tools": [tool]}
    streamed = client.post(MESSAGES, json={**said, "model": "auto", "stream": True})
    missing = client.post(CHAT, json={**ASKED, "model": "acme/nothing"})
    nowhere = client.request("BREW", f"/{'nowhere' * 100}")
    ended = time.time_ns()
    traced.close()
    statuses = [a.status_code for a in (chat, infer, completions, streamed, missing, nowhere)]
    assert statuses == [200, 200, 200, 200, 404, 404]
    said_back = [chat.json()["choices"][0]["message"]["content"], infer.json()["text"]]
    sent = b"".join(traced.collector.bodies)
    long = [text for text in said_back if len(text) >= LONG]
    assert long, "a letter may be there by chance"
    for text in [*WORDS.values(), secret, *long]:
        assert text.encode() not in sent
    tree = Tree(traced.collector.spans)
    return TracedRequests(tree, chat, infer, completions, missing, began, ended, sent)


def test_each_request_has_one_span_by_the_conventions_of_http(asked: TracedRequests) -> None:
    servers = [span for span in asked.tree.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert len(servers) == 6
    span = asked.tree.of(asked.chat)
    told = read_attributes(span)
    assert span.name == f"POST {CHAT}"
    assert told[http_attributes.HTTP_REQUEST_METHOD] == "POST"
    assert told[http_attributes.HTTP_ROUTE] == told[url_attributes.URL_PATH] == CHAT
    assert told[http_attributes.HTTP_RESPONSE_STATUS_CODE] == 200
    assert told[url_attributes.URL_SCHEME] == "http"
    assert told[server_attributes.SERVER_ADDRESS] == "127.0.0.1"
    assert told[server_attributes.SERVER_PORT] == 8000
    assert url_attributes.URL_QUERY not in told
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_the_caller_is_its_parent_and_each_other_begins_a_trace(asked: TracedRequests) -> None:
    span, other = asked.tree.of(asked.chat), asked.tree.of(asked.infer)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert other.parent_span_id == b""
    below = [s for s in asked.tree.spans if s.trace_id == span.trace_id]
    assert len(below) >= 9
    traces = {s.trace_id for s in asked.tree.spans if s.kind == Span.SPAN_KIND_SERVER}
    assert len(traces) == 6


def test_a_job_is_told_by_the_conventions_of_generative_ai(asked: TracedRequests) -> None:
    job, usage = asked.tree.job(asked.chat), asked.chat.json()["usage"]
    told = read_attributes(job)
    assert job.name == "chat acme/sql:0.5+acme/json"
    assert told[gen_ai.GEN_AI_OPERATION_NAME] == "chat"
    assert told[gen_ai.GEN_AI_PROVIDER_NAME] == "expertctl"
    assert told[gen_ai.GEN_AI_REQUEST_MODEL] == "acme/sql:0.5+acme/json"
    assert told[gen_ai.GEN_AI_RESPONSE_MODEL] == BASE
    assert told[gen_ai.GEN_AI_REQUEST_MAX_TOKENS] == 6
    assert told[gen_ai.GEN_AI_REQUEST_TEMPERATURE] == 0.5
    assert told[gen_ai.GEN_AI_REQUEST_SEED] == 7
    assert told[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] == usage["prompt_tokens"]
    assert told[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] == usage["completion_tokens"]
    reason = asked.chat.json()["choices"][0]["finish_reason"]
    assert told[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] == [reason]
    assert told["expertctl.experts"] == ["acme/sql@1.0.0", "acme/json@1.0.0"]
    assert gen_ai.GEN_AI_REQUEST_STOP_SEQUENCES not in told


def test_the_stages_of_a_job_stand_below_it_in_order_and_within(asked: TracedRequests) -> None:
    for answer in (asked.chat, asked.infer):
        request, job = asked.tree.of(answer), asked.tree.job(answer)
        stages = asked.tree.below(job)
        once = [name for name in STAGES if name not in {"queue", "load"}]
        firsts = [next(span for span in stages if span.name == name) for name in once]
        assert {span.name for span in stages} == set(STAGES)
        for earlier, later in pairwise(firsts):
            assert earlier.start_time_unix_nano <= later.start_time_unix_nano
        for earlier, later in pairwise(stages):
            assert earlier.end_time_unix_nano <= later.start_time_unix_nano
        for outer, inner in [(request, job), *((job, stage) for stage in stages)]:
            assert outer.start_time_unix_nano <= inner.start_time_unix_nano
            assert inner.start_time_unix_nano <= inner.end_time_unix_nano
            assert inner.end_time_unix_nano <= outer.end_time_unix_nano
        assert asked.began <= request.start_time_unix_nano
        assert request.end_time_unix_nano <= asked.ended


def test_the_stages_take_what_the_answer_says_that_they_took(asked: TracedRequests) -> None:
    stages = asked.tree.below(asked.tree.job(asked.infer))
    took = asked.infer.json()["timings_ms"]

    def ms(name: str) -> float:
        return sum(
            (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
            for span in stages
            if span.name == name
        )

    for name in ("route", "post"):
        assert ms(name) == pytest.approx(took[name], abs=0.01)
    for name in ("queue", "load"):  # the shortest laps have no span
        assert took[name] - 2 <= ms(name) <= took[name] + 0.01
    assert ms("prefill") >= took["prefill"] - 0.01
    assert ms("decode") >= took["decode"] - 0.01
    first = next(span for span in stages if span.name == "decode").start_time_unix_nano
    queued = min(span.start_time_unix_nano for span in stages)
    assert (first - queued) / 1e6 >= took["ttft"] - 1
    assert took["ttft"] >= sum(took[name] for name in ("queue", "load", "prefill")) - 0.01


def test_reading_the_request_is_told_once_however_many_jobs_it_is(asked: TracedRequests) -> None:
    request = asked.tree.of(asked.completions)
    reception, *jobs = asked.tree.below(request)
    assert reception.name == "reception"
    assert reception.start_time_unix_nano == request.start_time_unix_nano
    assert [job.name for job in jobs] == [f"text_completion {BASE}"] * len(jobs)
    counts = [read_attributes(job).get(gen_ai.GEN_AI_REQUEST_CHOICE_COUNT, 1) for job in jobs]
    reasons = [read_attributes(job)[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] for job in jobs]
    assert sum(counts) == sum(map(len, reasons)) == len(asked.completions.json()["choices"]) == 4


def test_a_failure_is_named_by_our_code(asked: TracedRequests) -> None:
    request, job = asked.tree.of(asked.missing), asked.tree.job(asked.missing)
    assert read_attributes(job)[error_attributes.ERROR_TYPE] == "not_found"
    assert job.status.code == Status.STATUS_CODE_ERROR
    assert read_attributes(request)[error_attributes.ERROR_TYPE] == "not_found"
    assert request.status.code == Status.STATUS_CODE_UNSET  # 4xx is none of the server's failures
    assert job.status.message == request.status.message == ""


def test_what_no_route_answers_has_a_name_of_few(asked: TracedRequests) -> None:
    (span,) = [span for span in asked.tree.spans if span.name == "HTTP"]
    told = read_attributes(span)
    assert told[http_attributes.HTTP_REQUEST_METHOD] == "_OTHER"
    assert told[http_attributes.HTTP_RESPONSE_STATUS_CODE] == 404
    assert http_attributes.HTTP_ROUTE not in told
    assert len(told[url_attributes.URL_PATH]) == 256


def test_an_api_key_is_known_by_its_name(asked: TracedRequests) -> None:
    assert read_attributes(asked.tree.of(asked.chat))["expertctl.api_key.name"] == "alice-laptop"


def test_what_nobody_expected_is_a_failure_of_the_server(
    make_traced: MakeTraced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> float:
        raise RuntimeError("secret detail")

    made = make_traced()
    monkeypatch.setattr(made.served.service.engine, "estimate_wait", broken)
    assert made.served.client().post("/v1/jobs", json={"prompt": "x"}).status_code == 500
    made.close()
    (span,) = made.collector.spans
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert read_attributes(span)[error_attributes.ERROR_TYPE] == "error"
    assert b"secret detail" not in b"".join(made.collector.bodies)


async def left_early(made: TracedServer) -> None:
    body = {"model": BASE, "messages": TURNS, "max_tokens": 2000, "stream": True}
    async with StreamingClient(made.served.app, CHAT, body) as listener:
        await listener.read_head()
        await listener.read_chunk()


def test_a_job_that_is_left_ends_as_cancelled(make_traced: MakeTraced) -> None:
    made = make_traced()
    asyncio.run(left_early(made))
    made.served.engine.close(seconds=0)
    made.close()
    (job,) = [span for span in made.collector.spans if span.name == f"chat {BASE}"]
    assert read_attributes(job)[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] == ["cancelled"]
    assert job.status.code == Status.STATUS_CODE_UNSET


GOOD = [
    (f"00-{TRACE}-{PARENT}-01", ""),
    (f" \t00-{TRACE}-{PARENT}-01\t ", "white space is no part of a header"),
    (f"cc-{TRACE}-{PARENT}-01", "a later version"),
    (f"cc-{TRACE}-{PARENT}-01-what-the-future-will-be-like", "which may be longer"),
]
BAD = [
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{TRACE}-{PARENT}-01-what",
    f"cc-{TRACE}-{PARENT}-01.what",
    f".0-{TRACE}-{PARENT}-01",
    f"0.-{TRACE}-{PARENT}-01",
    f"000-{TRACE}-{PARENT}-01",
    f"0-{TRACE}-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01",
    f"00-.{TRACE[1:]}-{PARENT}-01",
    f"00-{TRACE}3-{PARENT}-01",
    f"00-{TRACE[1:]}-{PARENT}-01",
    f"00-{'A' * 32}-{PARENT}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE}-.{PARENT[1:]}-01",
    f"00-{TRACE}-{PARENT}7-01",
    f"00-{TRACE}-{PARENT[1:]}-01",
    f"00-{TRACE}-{PARENT}-.0",
    f"00-{TRACE}-{PARENT}-001",
    f"00-{TRACE}-{PARENT}-1",
    f"00-{TRACE}-{PARENT}",
    f"cc-{TRACE}-{PARENT}-01-{'x' * 1000}",
    "-" * 30_000,
    "Zanzibar",
    "",
]


def test_a_parent_is_taken_over_if_it_is_one_and_else_ignored(make_traced: MakeTraced) -> None:
    """The cases are those of the test suite of the W3C's recommendation (Trace Context)."""
    made = make_traced()
    client = made.served.client()
    asked = [client.get("/healthz", headers={"traceparent": value}) for value, _ in GOOD]
    wrong = [client.get("/healthz", headers={"traceparent": value}) for value in BAD]
    twice = [("traceparent", f"00-{TRACE}-{parent}-01") for parent in (PARENT, PARENT[::-1])]
    wrong.append(client.get("/healthz", headers=twice))
    assert {answer.status_code for answer in (*asked, *wrong)} == {200}
    made.close()
    tree = Tree(made.collector.spans)
    assert {tree.of(answer).parent_span_id.hex() for answer in asked} == {PARENT}
    assert {tree.of(answer).parent_span_id for answer in wrong} == {b""}
    assert TRACE not in {tree.of(answer).trace_id.hex() for answer in wrong}


def test_a_state_of_others_is_not_taken_over(make_traced: MakeTraced) -> None:
    made = make_traced()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "zanzibar=1"}
    made.served.client().get("/healthz", headers=headers)
    made.close()
    assert [span.trace_state for span in made.collector.spans] == [""]
