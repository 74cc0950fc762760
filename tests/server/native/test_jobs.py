"""``/v1/jobs``: begun, looked at and called off by the key that made them, and by no other."""

import time
from typing import Any

import pytest
from starlette.testclient import TestClient

from expertctl.engine.serving import request
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.schema.validation import find_problems
from expertctl.server.settings import ServeSettings
from tests.server.conftest import MakeServed
from tests.server.harness import PROMPT, ServerHarness

GREEDY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "force_experts": ["acme/sql"]}
ENDLESS = {**GREEDY, "max_tokens": 100_000}
"""Goes on until the context is full."""


def submit(client: TestClient, body: dict[str, Any]) -> str:
    answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert find_problems(job, "job") == []
    assert answer.headers["location"] == f"/v1/jobs/{job['job_id']}"
    assert job["status"] == "queued"
    return str(job["job_id"])


def look(client: TestClient, job_id: str) -> dict[str, Any]:
    answer = client.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()
    assert find_problems(job, "job") == []
    assert job["job_id"] == job_id
    return job


def until(client: TestClient, job_id: str, key: str) -> dict[str, Any]:
    """Look at a job until it has something."""
    end = time.monotonic() + 300
    while not (job := look(client, job_id))[key]:
        assert time.monotonic() < end
    return job


def test_a_job_ends_with_the_answer_that_infer_gives(served: ServerHarness) -> None:
    client = served.client()
    expected = client.post("/v1/infer", json=GREEDY).json()
    job = until(client, submit(client, GREEDY), "ended_at")
    assert (job["status"], job["error"]) == ("finished", None)
    assert job["text"] == job["result"]["text"] == expected["text"]
    assert find_problems(job["result"], "infer") == []
    assert job["submitted_at"] == job["result"]["submitted_at"]
    assert job["submitted_at"] <= job["started_at"] <= job["ended_at"]


def test_a_job_that_is_called_off_keeps_its_text_and_may_be_called_off_again(
    served: ServerHarness,
) -> None:
    client = served.client()
    job_id = submit(client, ENDLESS)
    running = until(client, job_id, "text")
    first, second = (client.delete(f"/v1/jobs/{job_id}") for _ in range(2))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["status"] == second.json()["status"] == "cancelled"
    over = until(client, job_id, "ended_at")
    assert over["status"] == "cancelled"
    assert over["result"]["finish_reason"] == "cancelled"
    assert over["text"].startswith(running["text"])
    assert client.delete(f"/v1/jobs/{job_id}").json() == over


def test_calling_off_what_is_over_changes_nothing(served: ServerHarness) -> None:
    client = served.client()
    job = until(client, submit(client, GREEDY), "ended_at")
    assert client.delete(f"/v1/jobs/{job['job_id']}").json() == job


def test_a_deadline_gives_the_text_that_is_there(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client()
    job_id = submit(client, {**ENDLESS, "timeout_ms": 1_000_000})
    until(client, job_id, "text")
    later = time.monotonic() + 2000
    monkeypatch.setattr(request, "now", lambda: later)
    job = until(client, job_id, "ended_at")
    assert (job["status"], job["result"]["finish_reason"]) == ("finished", "timeout")
    assert job["text"] == job["result"]["text"] != ""


def test_a_job_that_fails_says_why(served: ServerHarness) -> None:
    client = served.client()
    job = until(client, submit(client, {**GREEDY, "force_experts": ["acme/none"]}), "ended_at")
    assert (job["status"], job["result"]) == ("failed", None)
    assert job["error"]["code"] == "not_found"


def test_a_job_has_no_stream(served: ServerHarness) -> None:
    answer = served.client().post("/v1/jobs", json={**GREEDY, "stream": True})
    assert answer.status_code == 400
    assert "stream" in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_job_of_another_key_is_one_that_does_not_exist(
    make_served: MakeServed, method: str
) -> None:
    served = make_served(None)
    ada, bob = (
        served.client(served.service.keys.create(name, now=0.0).secret) for name in ("ada", "bob")
    )
    job_id = submit(ada, GREEDY)
    unknown = "f" * 32
    foreign, missing = (bob.request(method, f"/v1/jobs/{each}") for each in (job_id, unknown))
    assert foreign.status_code == missing.status_code == 404
    assert foreign.text.replace(job_id, unknown) == missing.text
    assert until(ada, job_id, "ended_at")["status"] == "finished"
    assert served.client().request(method, f"/v1/jobs/{job_id}").status_code == 401


def test_a_full_queue_takes_no_job_and_says_when_to_come_again(make_served: MakeServed) -> None:
    settings = ServeSettings(
        engine=EngineConfig(memory_budget=64 << 20, batching=BatchingConfig(rows=1, queue=1))
    )
    served = make_served(settings)
    client = served.client()
    answers = [client.post("/v1/jobs", json=ENDLESS) for _ in range(8)]
    refused = answers[-1]
    assert (answers[0].status_code, refused.status_code) == (202, 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "rate_limit"
    for answer in answers:
        if answer.status_code == 202:
            client.delete(answer.headers["location"])


def test_ids_are_random_and_long(served: ServerHarness) -> None:
    client = served.client()
    ids = {submit(client, GREEDY) for _ in range(20)}
    assert len(ids) == 20
    assert all(len(job_id) == 32 for job_id in ids)
    for job_id in ids:
        until(client, job_id, "ended_at")
