"""A log line is one line, of plain text, without secrets."""

import json
import logging
import re
import sys

import pytest

from expertctl.http.log import (
    MAX_TEXT,
    JsonFormatter,
    TextFormatter,
    build_log_config,
    configure_log,
    redact,
)

SECRET = "xpk_" + "Ab1-_" * 8 + "xyz"


def line_of(message: str, **fields: object) -> str:
    record = logging.LogRecord("registry_server", logging.INFO, "file", 1, message, None, None)
    record.fields = fields
    return JsonFormatter().format(record)


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[31mred\x1b[0m",
        "a\r\nb",
        "a\x00b",
        "\x7f",
        "\x9b31m",
        "\u202egnp.exe",
        "\u2028",
        "\ud800",
        '"}\n{"level": "forged"',
    ],
)
def test_nothing_that_a_client_sends_controls_a_terminal_or_forges_a_line(text: str) -> None:
    """Attack 95 in log lines."""
    line = line_of(text, path=text)
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["path"] == text


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"/v2/{SECRET}/manifests/x",
        f"Authorization: Bearer {SECRET}",
        "Authorization: Bearer eyJhbGciOi.abc.def",
        "Authorization: Basic dXNlcjpwYXNz",
    ],
)
def test_no_secret_reaches_the_log(text: str) -> None:
    line = line_of(text, path=text)
    for secret in (SECRET, SECRET[4:], "eyJhbGciOi", "dXNlcjpwYXNz"):
        assert secret not in line
    assert "***" in line


def test_a_traceback_is_one_line_without_secrets_too() -> None:
    try:
        raise ValueError(f"token {SECRET}")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "broke", None, sys.exc_info())
    line = JsonFormatter().format(record)
    assert SECRET not in line
    assert "ValueError: token xpk_***" in json.loads(line)["traceback"]


def test_long_text_is_cut() -> None:
    assert len(redact("a" * 100_000)) == MAX_TEXT + 1


def test_fields_keep_their_kinds() -> None:
    line = json.loads(line_of("request", status=200, ms=1.5, user=None))
    assert (line["status"], line["ms"], line["user"], line["level"]) == (200, 1.5, None, "info")
    assert line["time"].endswith("+00:00")


def test_the_log_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    config = build_log_config("registry_server")
    configure_log(config)
    logging.getLogger("registry_server.requests").info("hello")
    out, err = capsys.readouterr()
    assert (out, json.loads(err)["message"]) == ("", "hello")
    assert set(config["loggers"]) == {"registry_server", "_granian"}


def text_of(message: str, **fields: object) -> str:
    record = logging.LogRecord("x", logging.INFO, "f", 1, message, None, None)
    record.fields = fields
    return TextFormatter().format(record)


def test_people_read_what_was_asked_and_how_long_it_took() -> None:
    fields = {"id": "a1", "method": "POST", "path": "/v1/infer", "route": "/v1/infer"}
    line = text_of("request", **fields, status=200, received=10, sent=20, ms=81.234, caller=None)
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/infer 200 ms=81.23", line)
    line = text_of(
        "job", job="7f", experts_used=["a/b", "c/d"], total_latency_ms=1234.5, error=None
    )
    assert line[9:] == "job experts_used=a/b,c/d total_latency_ms=1234"
    line = text_of("loading", base="tiny", empty=[], no=None, more={"a": 1})
    assert line[9:] == 'loading base=tiny more={"a": 1}'


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31mred", "\u202ebidi", "\x7f"])
def test_no_client_can_begin_a_line_or_colour_a_terminal(text: str) -> None:
    line = text_of("request", method=text, path=text, status=1, ms=1.0, user=text)
    assert line.isprintable()
    assert line.isascii()
    assert SECRET not in text_of(f"token {SECRET}", token=SECRET)


@pytest.mark.parametrize(("wanted", "is_text"), [("text", True), ("json", False), (None, False)])
def test_the_format_of_the_log_is_chosen(
    wanted: str | None,
    is_text: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("EXPERT_LOG_FORMAT", raising=False)
    if wanted is not None:
        monkeypatch.setenv("EXPERT_LOG_FORMAT", wanted)
    configure_log(build_log_config("registry_server"))
    logging.getLogger("registry_server.requests").warning("careful")
    line = capsys.readouterr().err
    assert line[9:] == "warning: careful\n" if is_text else json.loads(line)["level"] == "warning"
    monkeypatch.delenv("EXPERT_LOG_FORMAT", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert build_log_config("x")["formatters"]["line"]["()"] is TextFormatter
