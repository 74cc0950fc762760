"""Who switches traces on, and where they go then, by the specification of the exporters."""

import pytest

from expertctl.errors import UsageError
from expertctl.server.settings import resolve_trace_address

BASE, WHOLE = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
HERE = "http://127.0.0.1:4318"


def test_nobody_asks_by_default() -> None:
    assert resolve_trace_address(None, {}) is None
    assert resolve_trace_address(None, {BASE: "", WHOLE: " "}) is None


@pytest.mark.parametrize(
    ("option", "environment", "address"),
    [
        (None, {BASE: HERE}, f"{HERE}/v1/traces"),
        (None, {BASE: f"{HERE}/"}, f"{HERE}/v1/traces"),
        (None, {BASE: f"{HERE}/tenant"}, f"{HERE}/tenant/v1/traces"),
        (None, {WHOLE: f"{HERE}/mine"}, f"{HERE}/mine"),
        (None, {WHOLE: f"{HERE}/mine", BASE: "http://other:4318"}, f"{HERE}/mine"),
        (HERE, {BASE: "http://other:4318"}, f"{HERE}/v1/traces"),
        (f"{HERE}/v1/traces", {}, f"{HERE}/v1/traces"),
        (HERE, {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, f"{HERE}/v1/traces"),
        (HERE, {"OTEL_TRACES_EXPORTER": "otlp"}, f"{HERE}/v1/traces"),
        ("https://[::1]:4318", {}, "https://[::1]:4318/v1/traces"),
    ],
)
def test_the_address_is_that_of_the_specification(
    option: str | None, environment: dict[str, str], address: str
) -> None:
    assert resolve_trace_address(option, environment) == address


@pytest.mark.parametrize(
    "off",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_SDK_DISABLED": "TRUE"},
        {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_what_is_switched_off_stays_off(off: dict[str, str]) -> None:
    assert resolve_trace_address(None, {BASE: HERE, **off}) is None


@pytest.mark.parametrize(
    "wrong",
    [
        "127.0.0.1:4318",
        "grpc://127.0.0.1:4317",
        "file:///etc/passwd",
        "http://",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://alice:secret@collector:4318",
        f"{HERE}/?key=secret",
        "http://[::1",
    ],
)
@pytest.mark.parametrize("name", ["--traces", BASE, WHOLE])
def test_what_is_no_address_is_refused_by_the_name_of_its_source(name: str, wrong: str) -> None:
    option = wrong if name == "--traces" else None
    with pytest.raises(UsageError, match=name) as caught:
        resolve_trace_address(option, {} if option else {name: wrong})
    assert "secret" not in str(caught.value)


def test_another_protocol_is_refused() -> None:
    with pytest.raises(UsageError, match="http/protobuf"):
        resolve_trace_address(HERE, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    ours = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert resolve_trace_address(HERE, {**ours, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_an_option_and_a_variable_that_contradict_each_other_are_told() -> None:
    with pytest.raises(UsageError, match="--traces: OTEL_SDK_DISABLED disables traces"):
        resolve_trace_address("http://127.0.0.1:4318", {"OTEL_SDK_DISABLED": "true"})
