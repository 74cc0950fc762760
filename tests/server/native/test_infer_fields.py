"""Fields and forms that `/v1/infer` and `/v1/jobs` treat as the published APIs do here."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from expertctl.engine_config import EngineConfig
from expertctl.schema.validation import find_problems
from expertctl.server.settings import ServeSettings
from tests.server.conftest import MakeServed
from tests.server.harness import ServerHarness, run_app
from tests.server.openai.scripted_base import FENCED, HELLO, make_scripted_packages

ASKED: dict[str, Any] = {"prompt": "Give a fenced value.", "temperature": 0, "max_tokens": 20}
FOREIGN = {"keep_alive": "5m", "store": True}
OBJECT = FENCED[1]
SCHEMA = {
    "type": "object",
    "properties": {"fenced": {"type": "boolean"}},
    "required": ["fenced"],
}
FORMS: list[dict[str, Any]] = [
    {"type": "json"},
    {"type": "json_object"},
    {"type": "json_schema", "schema": SCHEMA},
]
TOLD = ["a Markdown fence around the JSON was removed", "text after the JSON was left out"]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHarness]:
    folder = tmp_path_factory.mktemp("fields")
    with run_app(make_scripted_packages(folder / "stock").make_home(folder / "home")) as served:
        yield served


def events_in(text: str) -> list[tuple[str, Any]]:
    events = [part.split("\n") for part in text.split("\n\n") if part.startswith("event: ")]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in events
    ]


def ended_job(served: ServerHarness, body: dict[str, Any]) -> dict[str, Any]:
    client = served.client()
    begun = client.post("/v1/jobs", json=body)
    assert begun.status_code == 202, begun.text
    end = time.monotonic() + 60
    while True:
        job: dict[str, Any] = client.get(begun.headers["location"]).json()
        if job["ended_at"]:
            return job
        assert time.monotonic() < end


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_infer_does_not_know_are_ignored_and_named(
    scripted: ServerHarness, stream: bool
) -> None:
    answer = scripted.client().post("/v1/infer", json={**ASKED, **FOREIGN, "stream": stream})
    assert (answer.status_code, answer.headers["x-expertctl-ignored"]) == (200, "keep_alive, store")
    document = events_in(answer.text)[-1][1] if stream else answer.json()
    assert document["text"] == "".join(FENCED)
    assert any("were ignored: keep_alive, store" in one for one in document["warnings"])
    assert find_problems(document, "infer") == []
    plain = scripted.client().post("/v1/infer", json=ASKED)
    assert "x-expertctl-ignored" not in plain.headers
    assert "were ignored" not in plain.text


def test_fields_that_a_job_does_not_know_are_ignored_and_named(scripted: ServerHarness) -> None:
    begun = scripted.client().post("/v1/jobs", json={**ASKED, **FOREIGN})
    assert (begun.status_code, begun.headers["x-expertctl-ignored"]) == (202, "keep_alive, store")
    job = ended_job(scripted, {**ASKED, **FOREIGN})
    assert any("were ignored: keep_alive, store" in one for one in job["result"]["warnings"])


@pytest.mark.parametrize("path", ["/v1/infer", "/v1/jobs"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "acme/sql"),
        ("experts", ["acme/sql"]),
        ("system", "Be brief."),
        ("messages", [{"role": "user", "content": "Hi"}]),
        ("guided_json", {"type": "object"}),
        ("images", ["aGk="]),
    ],
)
def test_a_field_without_which_infer_would_answer_something_else_is_refused(
    scripted: ServerHarness, path: str, field: str, value: Any
) -> None:
    answer = scripted.client().post(path, json={**ASKED, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("path", ["/v1/infer", "/v1/jobs"])
def test_infer_with_strict_fields_refuses_what_it_does_not_know(
    make_served: MakeServed, path: str
) -> None:
    batch = EngineConfig(memory_budget=64 << 20)
    client = make_served(ServeSettings(strict_fields=True, engine=batch)).client()
    answer = client.post(path, json={**ASKED, **FOREIGN})
    assert answer.status_code == 400
    assert "keep_alive" in answer.text


@pytest.mark.parametrize("field", ["temperature", "force_experts", "max_tokens"])
def test_the_limits_of_infer_hold_beside_ignored_fields(
    scripted: ServerHarness, field: str
) -> None:
    wrong = {"temperature": 99, "force_experts": ["acme/sql"] * 99, "max_tokens": 0}
    answer = scripted.client().post("/v1/infer", json={**ASKED, **FOREIGN, field: wrong[field]})
    assert answer.status_code == 400
    assert field in answer.text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form["type"]))
def test_infer_gives_out_json_without_the_fence_around_it(
    scripted: ServerHarness, form: dict[str, Any]
) -> None:
    answer = scripted.client().post("/v1/infer", json={**ASKED, "response_format": form}).json()
    assert json.loads(answer["text"]) == {"fenced": True}
    assert answer["validation_passed"] is True
    assert answer["warnings"][-2:] == TOLD
    assert find_problems(answer, "infer") == []


def test_a_stream_of_infer_gives_out_the_same_json(scripted: ServerHarness) -> None:
    body = {**ASKED, "response_format": FORMS[0], "stream": True}
    events = events_in(scripted.client().post("/v1/infer", json=body).text)
    assert "".join(data["text"] for name, data in events if name == "piece") == OBJECT
    assert [name for name, _ in events][-1] == "finished"
    assert events[-1][1]["text"] == OBJECT
    assert events[-1][1]["warnings"][-2:] == TOLD


def test_a_job_keeps_the_same_json(scripted: ServerHarness) -> None:
    job = ended_job(scripted, {**ASKED, "response_format": FORMS[0]})
    assert job["text"] == job["result"]["text"] == OBJECT


@pytest.mark.parametrize("form", [None, {"type": "text"}, {"type": "python"}])
def test_infer_leaves_a_fence_where_no_json_was_asked_for(
    scripted: ServerHarness, form: dict[str, Any] | None
) -> None:
    answer = scripted.client().post("/v1/infer", json={**ASKED, "response_format": form}).json()
    assert answer["text"] == "".join(FENCED)
    assert not set(TOLD) & set(answer["warnings"])


def test_infer_leaves_words_that_are_no_json_and_says_that_they_are_none(
    scripted: ServerHarness,
) -> None:
    body = {"prompt": "Hi", "temperature": 0, "max_tokens": 20, "response_format": FORMS[1]}
    answer = scripted.client().post("/v1/infer", json=body).json()
    assert (answer["text"], answer["validation_passed"]) == ("".join(HELLO), False)
