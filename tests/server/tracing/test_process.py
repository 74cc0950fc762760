"""Traces of a server that is a process of its own, from its start to its end."""

from pathlib import Path

import pytest

from tests.server.harness import BASE, ServedPackages
from tests.server.server_process import START_SECONDS, run_server, start_server
from tests.server.tracing.collector import TraceCollector, read_attributes

pytestmark = pytest.mark.all
ASKED = {
    "model": BASE,
    "messages": [{"role": "user", "content": "Zanzibar: 3, 1, 2"}],
    "max_tokens": 4,
}
CHAT = "/v1/chat/completions"


@pytest.fixture
def home(stock: ServedPackages, tmp_path: Path) -> Path:
    root = tmp_path / "home"
    stock.make_home(root)
    return root


def test_the_last_traces_are_sent_when_it_is_told_to_end(
    home: Path, collector: TraceCollector
) -> None:
    with run_server(home, "--traces", collector.url) as server:
        assert server.send_request("POST", CHAT, ASKED)[0] == 200
        assert server.stop() == 0
    names = [span.name for span in collector.spans]
    assert names.count(f"POST {CHAT}") == names.count(f"chat {BASE}") == 1
    service = {read_attributes(one.resource)["service.name"] for one in collector.resources}
    assert service == {"expertctl"}
    assert b"Zanzibar" not in b"".join(collector.bodies)
    assert "Traceback" not in server.log.read_text()


def test_the_environment_switches_them_on(
    home: Path, collector: TraceCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    with run_server(home) as server:
        assert server.send_request("GET", "/healthz")[0] == 200
        assert server.stop() == 0
    assert "GET /healthz" in [span.name for span in collector.spans]


def test_it_ends_soon_behind_a_collector_that_hangs(home: Path, collector: TraceCollector) -> None:
    collector.may_respond.clear()
    with run_server(home, "--traces", collector.url) as server:
        assert server.send_request("POST", CHAT, ASKED)[0] == 200
        assert server.stop() == 0
    assert "the last traces are lost" in server.log.read_text()


def test_what_the_environment_cannot_mean_ends_the_command(
    home: Path, collector: TraceCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with start_server(home, "--traces", collector.url) as server:
        assert server.process.wait(START_SECONDS) == 2
    assert "traces cannot be sent" in server.log.read_text()
