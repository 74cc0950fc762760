"""``/v1/infer``: the answers of ``run``, what is told of them, and what is refused."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.request import GenerationJob, JobFailed, TokenSink
from expertctl.engine_config import EngineConfig
from expertctl.errors import ExpertError, UsageError
from expertctl.http.operation import Arrival, parse_body
from expertctl.routing.planner import Planner
from expertctl.routing.request import RouteRequest, parse_forced
from expertctl.schema.validation import find_problems
from expertctl.server.native.infer import InferCall, InferRequest, stream_infer
from expertctl.server.responses import Caller
from expertctl.server.settings import ServeSettings
from expertctl.server.validator import parse_validators
from expertctl.settings import Home, Settings
from expertctl.user_request import LIMITS, SamplingOverrides, UserMessage
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, PROMPT, STARTED, ServerHarness, StreamingClient

GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
STAGES = ["reception", "reasoning", "preparation", "inference", "post_processing"]


def ask(served: ServerHarness, **body: Any) -> dict[str, Any]:
    answer = served.client().post("/v1/infer", json=body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def refusal(served: ServerHarness, body: Any) -> tuple[int, dict[str, str]]:
    answer = served.client().post("/v1/infer", json=body)
    return answer.status_code, answer.json()["error"]


def run(served: ServerHarness, message: UserMessage, *experts: str, **wishes: Any) -> RunResult:
    """What `expertctl run` answers."""
    planner = Planner.open(Settings(Home(served.user_home.root), encoder="lexical"))
    wished = SamplingOverrides(max_tokens=12, **wishes)
    request = RunRequest(
        message=message,
        route=RouteRequest(prompt=message.prompt, sampling=wished, seed=5),
        experts=tuple(parse_forced(expert) for expert in experts),
        base=BASE,
    )
    stream = LocalEngine(planner, budget=64 << 20).run(request)
    while True:
        try:
            next(stream)
        except StopIteration as end:
            result: RunResult = end.value
            return result


@pytest.mark.parametrize(
    "experts", [[], ["acme/sql"], ["acme/sql:0.5", "acme/dates@1.0.0"]], ids=str
)
def test_the_answer_is_that_of_run(served: ServerHarness, experts: list[str]) -> None:
    expected = run(served, UserMessage(prompt=PROMPT), *experts, greedy=True)
    found = ask(served, **GREEDY, force_experts=experts, seed=5)
    assert found["text"] == expected.generated.text
    assert found["tokens"]["ids"] == list(expected.generated.tokens)
    assert found["plan"] == expected.planned.result.plan.to_json()
    assert found["experts_used"] == [e.ref for e in expected.planned.result.plan.experts]


def test_a_drawn_answer_with_template_and_body_is_that_of_run(served: ServerHarness) -> None:
    template, body = "{body}\nNow: {prompt}", "3, 1, 2"
    message = UserMessage(prompt="Sort these", body=body, template=template)
    expected = run(served, message, "acme/json", temperature=0.9, top_k=20)
    found = ask(
        served,
        prompt="Sort these",
        body=body,
        template=template,
        force_experts=["acme/json"],
        temperature=0.9,
        top_k=20,
        max_tokens=12,
        seed=5,
    )
    assert found["text"] == expected.generated.text
    assert found["seed"] == 5


def test_the_document_is_as_its_schema_says(served: ServerHarness) -> None:
    found = ask(served, **GREEDY, force_experts=["acme/sql"])
    assert find_problems(found, "infer") == []
    assert found["tokens_generated"] == found["tokens"]["generated"] == 12
    assert list(found["stages"]) == STAGES
    assert sum(found["stages"].values()) <= found["latency_ms"]
    assert found["latency_ms"] >= found["timings_ms"]["total"]
    assert re.fullmatch(r"[0-9a-f]{32}", found["job_id"])


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Read events as plainly as can be."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_stream_tells_the_same_answer_piece_by_piece(served: ServerHarness) -> None:
    whole = ask(served, **GREEDY, force_experts=["acme/sql"])
    answer = served.client().post(
        "/v1/infer", json={**GREEDY, "force_experts": ["acme/sql"], "stream": True}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    (first, started), *pieces, (last, finished) = events(answer.text)
    assert (first, last) == ("started", "finished")
    assert {name for name, _ in pieces} == {"piece"}
    assert "".join(data["text"] for _, data in pieces) == finished["text"] == whole["text"]
    assert find_problems(finished, "infer") == []
    assert started["job_id"] == finished["job_id"]
    assert started["plan"] == finished["plan"]
    assert started["tokens"]["prompt"] == finished["tokens"]["prompt"]


def test_a_stream_that_is_refused_is_an_ordinary_error(served: ServerHarness) -> None:
    body = {**GREEDY, "force_experts": ["acme/none"], "stream": True}
    status, error = refusal(served, body)
    assert (status, error["code"]) == (404, "not_found")


class Breaking:
    """An engine whose answer breaks off."""

    def submit(self, job: GenerationJob, sink: TokenSink) -> None:
        sink(STARTED)
        sink(OutputDelta(0, "1, "))
        sink(JobFailed(ExpertError("broken", hint="ask again")))

    def cancel(self, job_id: str) -> None:
        """It is at its end."""


def test_a_stream_that_breaks_off_says_so_in_its_last_event() -> None:
    body = InferRequest(prompt=PROMPT, stream=True)
    job = GenerationJob(id="0" * 32, request=body.to_run_request(Caller()))
    call = InferCall(job=job, arrival=Arrival(), reception_ms=0.1)

    async def read() -> str:
        lines = [line async for line in stream_infer(Breaking(), call, {"path": "/v1/infer"})]
        return b"".join(lines).decode()

    assert events(asyncio.run(read()))[1:] == [
        ("piece", {"text": "1, "}),
        ("failed", {"error": {"code": "error", "message": "broken", "hint": "ask again"}}),
    ]


def test_who_leaves_frees_the_row(served: ServerHarness) -> None:
    async def leave() -> None:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 100_000, "stream": True}
        async with StreamingClient(served.app, "/v1/infer", body) as listener:
            await listener.read_head()
            await listener.read_chunk()
            listener.disconnect()
            await listener.wait_until_done()

    before = served.engine.take_snapshot().totals.cancelled
    asyncio.run(asyncio.wait_for(leave(), 60))
    ask(served, **GREEDY)
    snapshot = served.engine.take_snapshot()
    assert (snapshot.running, snapshot.totals.cancelled) == (0, before + 1)


def test_a_context_that_is_asked_for_holds_prompt_and_answer(served: ServerHarness) -> None:
    whole = ask(served, **GREEDY)
    size = whole["tokens"]["prompt"] + 4
    cut = ask(served, **GREEDY, context_size=size)
    assert cut["tokens"]["ids"] == whole["tokens"]["ids"][:4]
    assert cut["finish_reason"] == "length"
    status, error = refusal(served, {**GREEDY, "context_size": 3})
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_stop_string_ends_the_answer_and_is_named(served: ServerHarness) -> None:
    whole, stop = ask(served, **GREEDY), stop_in(served)
    cut = ask(served, **GREEDY, stop=[stop])
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["stopped_by"]) == ("stop", stop)


def stop_in(served: ServerHarness) -> str:
    """A letter at which the greedy answer stops, which its limit of tokens would cut."""
    whole = ask(served, **GREEDY)
    return next(c for c in whole["text"][2:] if c.isprintable() and c != "\ufffd")


@pytest.mark.parametrize("kind", ["json", "json_object", "sql", "python"])
def test_a_form_that_the_answer_has_not_is_told(served: ServerHarness, kind: str) -> None:
    wanted = {"type": kind}
    found = ask(served, **GREEDY, stop=[stop_in(served)], response_format=wanted)
    assert found["validation_passed"] is False
    assert any("the answer is not" in warning for warning in found["warnings"])
    cut = ask(served, **GREEDY, response_format=wanted)
    assert (cut["finish_reason"], cut["validation_passed"]) == ("length", None)


def test_validators_of_the_operator_are_asked_by_name(make_served: MakeServed) -> None:
    commands = parse_validators(
        [f"any={sys.executable} -c pass", f"none={sys.executable} -c 'exit(\"no such thing\")'"]
    )
    served = make_served(
        ServeSettings(validators=commands, engine=EngineConfig(memory_budget=64 << 20))
    )
    stop = [stop_in(served)]
    passed = ask(served, **GREEDY, response_format={"type": "custom", "name": "any"})
    failed = ask(served, **GREEDY, stop=stop, response_format={"type": "custom", "name": "none"})
    assert (passed["validation_passed"], failed["validation_passed"]) == (True, False)
    assert "the validator none rejected the answer: no such thing" in failed["warnings"]
    status, error = refusal(
        served, {**GREEDY, "response_format": {"type": "custom", "name": "/bin/true"}}
    )
    assert status == 400
    assert error["message"].startswith("response_format.name: ")


HOSTILE: list[dict[str, Any]] = [
    {},
    {"prompt": None},
    {"prompt": ""},
    {"prompt": " \n"},
    {"prompt": 5},
    {"prompt": "x" * 500_001},
    {"prompt": "x", "temperature": -0.1},
    {"prompt": "x", "temperature": 2.1},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "max_tokens": 200_001},
    {"prompt": "x", "max_tokens": True},
    {"prompt": "x", "max_experts": 0},
    {"prompt": "x", "max_experts": 11},
    {"prompt": "x", "repetition_penalty": 0.9},
    {"prompt": "x", "repetition_penalty": 2.1},
    {"prompt": "x", "priority": -1},
    {"prompt": "x", "priority": 10},
    {"prompt": "x", "top_p": 0},
    {"prompt": "x", "top_k": -1},
    {"prompt": "x", "min_p": 1.1},
    {"prompt": "x", "seed": -1},
    {"prompt": "x", "seed": 2**53},
    {"prompt": "x", "stop": [""]},
    {"prompt": "x", "stop": ["a"] * 17},
    {"prompt": "x", "timeout_ms": 0},
    {"prompt": "x", "context_size": 0},
    {"prompt": "x", "metadata": {"a": {"b": 1}}},
    {"prompt": "x", "metadata": {str(n): "x" for n in range(17)}},
    {"prompt": "x", "cache_key": "k" * 513},
    {"prompt": "x", "body": "y", "template": "{prompt}"},
    {"prompt": "x", "template": "{prompt}{prompt}"},
    {"prompt": "x", "force_experts": ["acme/sql"] * 11},
    {"prompt": "x", "force_experts": ["acme/sql:11"]},
    {"prompt": "x", "force_experts": ["acme/sql", "acme/json"], "max_experts": 1},
    {"prompt": "x", "exclude_experts": ["acme"]},
    {"prompt": "x", "response_format": {"type": "xml"}},
    {"prompt": "x", "response_format": {"type": "json_schema"}},
    {"prompt": "x", "response_format": {"type": "json_schema", "schema": {"type": 5}}},
    {
        "prompt": "x",
        "response_format": {"type": "json_schema", "schema": {"$ref": "file:///etc/passwd"}},
    },
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: str(body)[:60])
def test_a_bad_request_is_refused_and_says_where(
    served: ServerHarness, body: dict[str, Any]
) -> None:
    status, error = refusal(served, body)
    assert (status, error["code"]) == (400, "usage")
    assert set(error) == {"code", "message", "hint"}


@pytest.mark.parametrize("field", ["force_experts", "exclude_experts"])
@pytest.mark.parametrize(
    "name",
    [
        "./acme.expert",
        "/etc/passwd",
        "acme/sql.expert",
        "../acme/sql",
        "file:///tmp/acme.expert",
        "https://registry.example/acme/sql",
        "C:\\acme.expert",
        "acme/sql\0",
        "sha256:../../etc/passwd",
        "",
    ],
)
def test_experts_cannot_be_named_by_path_or_address(
    served: ServerHarness, field: str, name: str, tmp_path: Path
) -> None:
    status, error = refusal(served, {"prompt": "x", field: [name]})
    assert status == 400
    assert field in error["message"]


@pytest.mark.parametrize("name", ["acme/none", "registry.example/acme/sql", f"sha256:{'0' * 64}"])
def test_only_installed_experts_are_found(served: ServerHarness, name: str) -> None:
    status, error = refusal(served, {**GREEDY, "force_experts": [name]})
    assert (status, error["code"]) == (404, "not_found")


def test_an_expert_is_named_by_its_digest_too(served: ServerHarness) -> None:
    experts = served.client().get("/v1/experts").json()["experts"]
    [sql] = [one for one in experts if one["name"] == "acme/sql"]
    found = ask(served, **GREEDY, force_experts=[f"{sql['content_digest']}:0.5"])
    assert found["experts_used"] == [sql["ref"]]


def limits(name: str) -> Iterator[tuple[float, bool]]:
    low, high = LIMITS[name]
    yield from ((low, True), (high, True), (low - 1, False), (high + 1, False))


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        (name, value, fits)
        for name in ("temperature", "max_tokens", "max_experts", "repetition_penalty", "priority")
        for value, fits in limits(name)
    ],
)
def test_the_limits_are_inclusive(name: str, value: float, fits: bool) -> None:
    body = json.dumps({"prompt": "x", name: int(value) if value == int(value) else value})
    if fits:
        assert parse_body(body.encode(), InferRequest).to_run_request(Caller())
    else:
        with pytest.raises(UsageError, match=name):
            parse_body(body.encode(), InferRequest)


KEYS = st.sampled_from([None, "a", "b"])


@given(KEYS, KEYS, KEYS, KEYS, KEYS)
def test_the_first_key_that_is_given_counts_and_none_leaves_its_caller(
    cache: str | None,
    session: str | None,
    cache_in_metadata: str | None,
    session_in_metadata: str | None,
    user: str | None,
) -> None:
    pairs = {"cache_key": cache_in_metadata, "session_id": session_in_metadata}
    body = InferRequest(
        prompt="x",
        cache_key=cache,
        session_id=session,
        metadata={name: key for name, key in pairs.items() if key},
        user_id=user,
    )
    order = [cache, session, cache_in_metadata, session_in_metadata, user, "default"]
    first = next(key for key in order if key)
    assert body.to_run_request(Caller(id="key1")).cache_key == f"key1/{first}"
    assert body.to_run_request(Caller(id="key2")).cache_key == f"key2/{first}"


def test_kept_texts_of_one_api_key_are_not_reached_with_another(make_served: MakeServed) -> None:
    served = make_served(None)
    first, second = (served.service.keys.create(name, now=0.0).secret for name in ("ada", "bob"))
    body = {**GREEDY, "cache_key": "chat-1"}

    def reused(secret: str) -> int:
        answer = served.client(secret).post("/v1/infer", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["cache"]["kv_reused_tokens"])

    assert reused(first) == 0
    assert reused(first) > 0
    assert reused(second) == 0
    assert reused(second) > 0
