"""What was counted, read as Prometheus and as gateways read it."""

import json
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.server.settings import ServeSettings
from tests.server.conftest import MakeServed
from tests.server.harness import BASE, EXPERTS, ServedPackages, ServerHarness

ASKED: dict[str, Any] = {"prompt": "Sort: 3, 1, 2", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def scraped(served: ServerHarness) -> dict[str, Metric]:
    """What is counted after two answers, one of an expert."""
    client = served.client()
    for model in (BASE, "acme/sql"):
        body = {"model": model, "messages": [{"role": "user", "content": "Sort: 3, 1"}]}
        answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return families(answer.text)


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    (found,) = [
        s.value
        for s in family.samples
        if s.name == family.name + suffix and labels.items() <= s.labels.items()
    ]
    return float(found)


def test_answers_and_their_times_are_counted(scraped: dict[str, Metric]) -> None:
    for name in (
        "expertctl_time_to_first_token_seconds",
        "expertctl_inter_token_seconds",
        "expertctl_prefill_tokens_per_second",
        "expertctl_decode_tokens_per_second",
    ):
        assert scraped[name].type == "histogram"
        assert value(scraped[name], "_count") >= 2
    stages = {s.labels["stage"] for s in scraped["expertctl_stage_seconds"].samples}
    assert {"route", "load", "prefill", "decode"} <= stages


def test_what_the_engine_does_is_there(scraped: dict[str, Metric]) -> None:
    assert value(scraped["expertctl_jobs"], "_total", outcome="finished") >= 2
    assert value(scraped["expertctl_tokens"], "_total", kind="generated") >= 2
    assert value(scraped["expertctl_memory_bytes"], owner="base") > 0
    assert value(scraped["expertctl_expert_loads"], "_total", tier="ram") >= 1
    asked = scraped["expertctl_expert_requests"]
    assert value(asked, "_total", expert="acme/sql@1.0.0") >= 1
    assert {sample.labels["expert"] for sample in asked.samples} == {"acme/sql@1.0.0"}
    assert value(scraped["expertctl_batch_rows"]) == 16
    assert value(scraped["expertctl_queue_jobs"]) == 0
    assert 0 < value(scraped["expertctl_kv_limit_bytes"]) <= 64 << 20


def test_keys_and_values_are_told_in_blocks_of_16_tokens(
    stock: ServedPackages, scraped: dict[str, Metric]
) -> None:
    told_of = json.loads((stock.base_dir / "config.json").read_text())
    head = told_of["hidden_size"] // told_of["num_attention_heads"]
    floats = 2 * told_of["num_hidden_layers"] * told_of["num_key_value_heads"] * head
    block = 16 * floats * 4
    limit, blocks = value(scraped["expertctl_kv_limit_bytes"]), scraped["expertctl_kv_blocks"]
    held = value(scraped["expertctl_memory_bytes"], owner="kv")
    told = {sample.labels["state"]: sample.value for sample in blocks.samples}
    assert told == {"used": 0, "kept": held // block, "free": (limit - held) // block}
    assert value(scraped["expertctl_kv_kept_bytes"]) == held
    budget = value(scraped["expertctl_memory_limit_bytes"])
    assert value(scraped["expertctl_kv_kept_limit_bytes"]) == budget // 4


def test_gateways_find_what_they_schedule_by(scraped: dict[str, Metric]) -> None:
    """Names, labels and types of the model server protocol of the gateway API extension."""
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        family = scraped[f"vllm:{name}"]
        assert family.type == "gauge"
        assert 0 <= value(family, model_name=BASE) <= 1
    adapters = scraped["vllm:lora_requests_info"]
    (sample,) = adapters.samples
    assert adapters.type == "gauge"
    assert sample.labels == {
        "max_lora": "16",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }
    assert sample.value > 1_700_000_000


def test_gateways_see_which_experts_run_and_which_wait(make_served: MakeServed) -> None:
    client = make_served(
        ServeSettings(engine=EngineConfig(memory_budget=64 << 20, batching=BatchingConfig(rows=1)))
    ).client()
    ask = {"prompt": "Sort: 3, 1", "temperature": 0, "max_tokens": 100_000}
    names = [EXPERTS[0], *(EXPERTS[1],) * 8]
    jobs = [client.post("/v1/jobs", json={**ask, "force_experts": [n]}).json() for n in names]
    while not client.get(f"/v1/jobs/{jobs[0]['job_id']}").json()["text"]:
        pass
    scraped = families(client.get("/metrics").text)
    for job in jobs:
        client.delete(f"/v1/jobs/{job['job_id']}")
    (sample,) = scraped["vllm:lora_requests_info"].samples
    assert sample.labels["running_lora_adapters"] == EXPERTS[0]
    assert sample.labels["waiting_lora_adapters"] == EXPERTS[1]
    assert value(scraped["vllm:num_requests_running"], model_name=BASE) == 1
    assert value(scraped["vllm:num_requests_waiting"], model_name=BASE) == 8
    assert value(scraped["expertctl_kv_blocks"], state="used") >= 1


def test_no_client_makes_new_time_series(served: ServerHarness) -> None:
    client = served.client()
    for number in range(20):
        client.request(f"METHOD{number}", f"/nowhere-{number}")
    text = client.get("/metrics").text
    assert "METHOD" not in text
    assert "nowhere" not in text


def test_the_first_tokens_are_known_to_the_status_page(
    served: ServerHarness, scraped: dict[str, Metric]
) -> None:
    count, seconds = served.service.metrics.read_first_token_totals()
    assert count == value(scraped["expertctl_time_to_first_token_seconds"], "_count")
    assert seconds > 0
