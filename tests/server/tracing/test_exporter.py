"""Sending traces: what the environment says holds, and no collector holds up an answer."""

import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import UsageError
from expertctl.server.tracing import Tracing
from tests.server.harness import BASE, ServedPackages
from tests.server.tracing.collector import read_attributes
from tests.server.tracing.conftest import MakeTraced

ASKED: dict[str, Any] = {
    "model": BASE,
    "messages": [{"role": "user", "content": "Sort: 3, 1, 2"}],
    "max_tokens": 4,
}
CHAT = "/v1/chat/completions"


@pytest.fixture
def closed_port() -> str:
    """The address of nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"


def test_the_service_has_a_name_and_the_environment_may_give_another(
    make_traced: MakeTraced, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for name in ("", "experts-of-alice"):
        monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        made = make_traced()
        made.served.client().get("/healthz")
        made.close()
        names.append(read_attributes(made.collector.resources[-1].resource)["service.name"])
        assert set(made.collector.paths) == {"/v1/traces"}
    assert names == ["expertctl", "experts-of-alice"]


@pytest.mark.parametrize(
    ("sampler", "flags", "kept"),
    [("always_off", "01", 0), ("always_on", "00", 1), ("parentbased_always_on", "00", 0)],
)
def test_the_sampler_of_the_environment_decides(
    make_traced: MakeTraced,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    flags: str,
    kept: int,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    made = make_traced()
    parent = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-{flags}"}
    assert made.served.client().post(CHAT, json=ASKED, headers=parent).status_code == 200
    made.close()
    assert [span.name for span in made.collector.spans].count(f"POST {CHAT}") == kept
    assert [span.name for span in made.collector.spans].count(f"chat {BASE}") == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_BSP_SCHEDULE_DELAY", "-1")],
)
def test_what_the_environment_cannot_mean_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    tracing = Tracing("http://127.0.0.1:1/v1/traces", server="http://127.0.0.1:8000")
    with pytest.raises(UsageError, match="traces cannot be sent") as caught:
        tracing.open()
    assert "OTEL_" in caught.value.hint


def test_a_collector_that_is_not_there_costs_one_line_of_the_log(
    make_traced: MakeTraced,
    closed_port: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    made = make_traced(closed_port)
    client = made.served.client()
    assert [client.post(CHAT, json=ASKED).status_code for _ in range(20)] == [200] * 20
    made.close()
    told = [r for r in caplog.records if r.name.startswith("opentelemetry.exporter")]
    assert [record.levelno for record in told] == [logging.ERROR]


def test_a_collector_that_refuses_costs_one_line_of_the_log(
    make_traced: MakeTraced, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    made = make_traced()
    made.collector.status = 400
    client = made.served.client()
    assert [client.get("/healthz").status_code for _ in range(20)] == [200] * 20
    made.close()
    assert len(made.collector.bodies) == 20
    told = [r for r in caplog.records if r.name.startswith("opentelemetry.exporter")]
    assert ["400" in record.getMessage() for record in told] == [True]


def test_behind_a_collector_that_hangs_the_queue_is_bounded_and_answers_come(
    make_traced: MakeTraced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "32")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    made = make_traced()
    made.collector.may_respond.clear()
    client = made.served.client()
    ids = [client.get("/healthz").headers["x-request-id"] for _ in range(8)]
    assert made.collector.asked.wait(120)
    ids += [client.get("/healthz").headers["x-request-id"] for _ in range(192)]
    assert client.post(CHAT, json=ASKED).status_code == 200
    made.collector.may_respond.set()
    made.close()
    came = [read_attributes(span).get("expertctl.request.id") for span in made.collector.spans]
    assert len(came) == 8 + 32
    assert ids[-1] in came
    assert ids[100] not in came


def test_the_end_waits_for_a_collector_that_hangs_no_longer_than_it_says(
    make_traced: MakeTraced, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_traced()
    made.collector.may_respond.clear()
    made.served.client().get("/healthz")
    made.tracing.close(seconds=0.2)  # or never, as nobody lets the collector answer
    assert "the last traces are lost" in caplog.text


def test_what_is_closed_makes_no_spans_and_answers(make_traced: MakeTraced) -> None:
    made = make_traced()
    made.close()
    made.close()
    assert made.served.client().post(CHAT, json=ASKED).status_code == 200
    assert made.collector.bodies == []


PROGRAM = """
import sys
from expertctl.server.app import EngineWorker
from expertctl.server.settings import ServeSettings
from expertctl.settings import load_settings

address = sys.argv[1] if len(sys.argv) > 1 else None
opening = EngineWorker(ServeSettings(traces=address), load_settings())
opening.build_app(None)
print(sorted(name for name in sys.modules if name.startswith("opentelemetry"))[:1])
"""


@pytest.mark.all
@pytest.mark.parametrize(
    ("words", "imported"), [([], "[]"), (["http://127.0.0.1:1/v1/traces"], "['opentelemetry']")]
)
def test_nothing_of_opentelemetry_is_imported_by_default(
    stock: ServedPackages, tmp_path: Path, words: list[str], imported: str
) -> None:
    user_home = stock.make_home(tmp_path / "home")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env={"EXPERT_HOME": str(user_home.root), "EXPERT_ENCODER": "lexical", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == imported
