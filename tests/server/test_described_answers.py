"""Real answers, whole ones, streams and errors, are as the OpenAPI document says, and no more."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from expertctl.errors import StoreError
from expertctl.server.responses import format_error_event
from tests.server.harness import ServerHarness, run_app
from tests.server.openai.scripted_base import make_scripted_packages

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
COUNT, INFER, ROUTE, MODELS = "/v1/messages/count_tokens", "/v1/infer", "/v1/route", "/v1/models"
VERSION = {"anthropic-version": "2023-06-01"}
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
THINK = {"enable_thinking": True}


def chat(said: str = "Hi", **fields: Any) -> Any:
    asked = [{"role": "user", "content": said}]
    return {"model": "tiny", "messages": asked, "temperature": 0, **fields}


def message(said: str = "Hi", **fields: Any) -> Any:
    return chat(said, max_tokens=2000, **fields)


GENERATED = [
    (CHAT, chat()),
    (CHAT, chat(n=2, logprobs=True, top_logprobs=2)),
    (CHAT, chat("both", tools=[TOOL])),
    (CHAT, chat("one", tools=[TOOL], model="acme/sql")),
    (CHAT, chat(chat_template_kwargs=THINK, max_tokens=3)),
    (CHAT, chat("Sort, as JSON", response_format={"type": "json_object"}, model="auto")),
    (COMPLETIONS, {"model": "tiny", "prompt": "[hello]", "temperature": 0}),
    (COMPLETIONS, {"model": "auto", "prompt": ["[hello]", "b"], "n": 2, "max_tokens": 3}),
    (COMPLETIONS, {"model": "tiny", "prompt": "[hello]", "logprobs": 2, "echo": False}),
    (MESSAGES, message()),
    (MESSAGES, message("one", tools=[{"name": "weather", "input_schema": SCHEMA}])),
    (MESSAGES, message(thinking={"type": "adaptive"}, stop_sequences=["day"])),
    (INFER, {"prompt": "Hi", "max_tokens": 4}),
    (INFER, {"prompt": "Hi", "max_tokens": 4, "force_experts": ["acme/sql:0.5"]}),
]
WRONG = [
    (CHAT, {"nothing": 1}),
    (CHAT, chat(model="gpt-9")),
    (COMPLETIONS, {"model": "tiny", "prompt": "a", "best_of": 4}),
    (MESSAGES, {"nothing": 1}),
    (MESSAGES, message(model="gpt-9")),
    (COUNT, {"nothing": 1}),
    (INFER, {"prompt": "a", "force_experts": ["acme/none"]}),
    (ROUTE, {}),
]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    folder = tmp_path_factory.mktemp("described")
    with run_app(make_scripted_packages(folder / "stock").make_home(folder / "home")) as served:
        yield served


@pytest.fixture(scope="module")
def document(scripted: ServerHarness) -> Any:
    return closed(scripted.client().get("/openapi.json").json())


def closed(node: Any) -> Any:
    """The document, but so that no object has a key that it does not name."""
    if isinstance(node, list):
        return [closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    inner = {name: closed(value) for name, value in node.items()}
    if inner.get("type") == "object" and isinstance(inner.get("properties"), dict):
        inner.setdefault("additionalProperties", False)
    return inner


def check(document: Any, described: Any, value: Any) -> None:
    schema = {**described["schema"], "components": document["components"]}
    problems = [
        f"{e.instance_path}: {e.message}" for e in Draft202012Validator(schema).iter_errors(value)
    ]
    assert not problems, value


def contents(document: Any, method: str, path: str, status: int) -> Any:
    return document["paths"][path][method]["responses"][str(status)]["content"]


def check_answer(document: Any, method: str, path: str, answer: Any) -> None:
    described = contents(document, method, path, answer.status_code)
    check(document, described["application/json"], answer.json())


@pytest.mark.parametrize(("path", "body"), GENERATED)
def test_whole_answers_are_described(
    scripted: ServerHarness, document: Any, path: str, body: Any
) -> None:
    answer = scripted.client().post(path, json=body)
    assert answer.status_code == 200
    check_answer(document, "post", path, answer)


@pytest.mark.parametrize(("path", "body"), GENERATED)
def test_events_of_streams_are_described(
    scripted: ServerHarness, document: Any, path: str, body: Any
) -> None:
    options = {"stream_options": {"include_usage": True}} if path in {CHAT, COMPLETIONS} else {}
    answer = scripted.client().post(path, json={**body, "stream": True, **options})
    assert answer.status_code == 200
    described = contents(document, "post", path, 200)["text/event-stream"]
    events = list(data_of(answer.text))
    assert len(events) >= 3
    for event in events:
        check(document, described, event)


def data_of(stream: str) -> Iterator[Any]:
    for line in stream.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, INFER])
def test_the_error_that_ends_a_stream_is_described(document: Any, path: str) -> None:
    scope = {"type": "http", "path": path, "headers": [], "state": {"request_id": "req_1"}}
    [event] = data_of(format_error_event(StoreError("the disk is gone"), scope).decode())
    check(document, contents(document, "post", path, 200)["text/event-stream"], event)


@pytest.mark.parametrize(("path", "body"), WRONG)
def test_errors_are_described(scripted: ServerHarness, document: Any, path: str, body: Any) -> None:
    answer = scripted.client().post(path, json=body)
    assert 400 <= answer.status_code < 500
    check_answer(document, "post", path, answer)


@pytest.mark.parametrize(("path", "body"), [(COUNT, chat()), (ROUTE, {"prompt": "Sort: 3, 1"})])
def test_what_generates_nothing_is_described(
    scripted: ServerHarness, document: Any, path: str, body: Any
) -> None:
    sent = {name: value for name, value in body.items() if name != "temperature"}
    answer = scripted.client().post(path, json=sent)
    assert answer.status_code == 200
    check_answer(document, "post", path, answer)


@pytest.mark.parametrize("headers", [{}, VERSION])
@pytest.mark.parametrize(("name", "status"), [("", 200), ("/acme/sql", 200), ("/gone", 404)])
def test_models_are_described_in_both_shapes(
    scripted: ServerHarness, document: Any, headers: Any, name: str, status: int
) -> None:
    answer = scripted.client().get(f"{MODELS}{name}", headers=headers)
    assert answer.status_code == status
    check_answer(document, "get", f"{MODELS}/{{name}}" if name else MODELS, answer)


def test_jobs_and_experts_are_described(scripted: ServerHarness, document: Any) -> None:
    client = scripted.client()
    submitted = client.post("/v1/jobs", json={"prompt": "Hi", "max_tokens": 2})
    check_answer(document, "post", "/v1/jobs", submitted)
    address = submitted.headers["location"]
    for answer in (client.get(address), client.delete(address)):
        check_answer(document, answer.request.method.lower(), "/v1/jobs/{job_id}", answer)
    check_answer(document, "get", "/v1/experts", client.get("/v1/experts"))
    check_answer(document, "get", "/readyz", client.get("/readyz"))


def test_every_answer_in_json_has_a_type(document: Any) -> None:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            for status, answer in operation["responses"].items():
                for media, content in answer.get("content", {}).items():
                    known = content["schema"].keys() & {"$ref", "anyOf", "type"}
                    bare = content["schema"] in ({}, {"type": "object"})
                    assert known, (path, method, status, media)
                    assert not bare, (path, method, status, media)
