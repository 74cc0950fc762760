"""What is logged of a job: all that the seed's record has, and no word of prompt or answer."""

import json
import logging
import time
from typing import Any

import pytest

from expertctl.engine.serving import request
from expertctl.http.log import JsonFormatter
from tests.server.harness import BASE, ServerHarness
from tests.server.native.test_jobs import ENDLESS, submit, until

KEYS = {
    *("submitted_at", "router_latency_ms", "expert_load_latency_ms", "inference_latency_ms"),
    *("total_latency_ms", "experts_used", "num_experts", "memory_peak", "input_tokens"),
    *("output_tokens", "tokens_per_second", "success", "error", "validation_passed"),
}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="expertctl.server.jobs")
    return caplog


def records(told: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    lines = [json.loads(JsonFormatter().format(record)) for record in told.records]
    return [line for line in lines if line["message"] == "job"]


def test_an_answer_is_one_line_without_a_word_of_it(
    served: ServerHarness, told: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "Sort: 33331, 2", "force_experts": ["acme/sql"], "max_tokens": 5}
    answer = served.client().post("/v1/infer", json=body).json()
    [line] = records(told)
    assert line.keys() >= KEYS
    assert line["job"] == answer["job_id"]
    assert line["experts_used"] == answer["experts_used"] == ["acme/sql@1.0.0"]
    assert line["output_tokens"] == answer["tokens_generated"]
    assert line["input_tokens"] == answer["tokens"]["prompt"]
    assert line["total_latency_ms"] >= line["inference_latency_ms"] > 0
    assert line["success"] is True
    assert "33331" not in json.dumps(line)
    assert answer["text"] not in json.dumps(line) or not answer["text"].strip()


def test_a_job_that_fails_says_why_by_a_code(
    served: ServerHarness, told: pytest.LogCaptureFixture
) -> None:
    body = {"model": BASE, "prompt": "word " * 9000, "max_tokens": 2}
    assert served.client().post("/v1/completions", json=body).status_code == 400
    [line] = records(told)
    assert line.keys() >= KEYS
    assert (line["success"], line["error"]) == (False, "context_length_exceeded")
    assert (line["experts_used"], line["output_tokens"]) == ([], 0)
    assert line["total_latency_ms"] > 0


def test_an_answer_that_was_cut_by_its_time_is_no_success(
    served: ServerHarness, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = served.client()
    job_id = submit(client, {**ENDLESS, "timeout_ms": 1_000_000})
    until(client, job_id, "text")
    later = time.monotonic() + 2000
    monkeypatch.setattr(request, "now", lambda: later)
    until(client, job_id, "ended_at")
    [line] = records(told)
    assert line["finish_reasons"] == ["timeout"]
    assert (line["success"], line["error"], line["output_tokens"] > 0) == (False, None, True)
