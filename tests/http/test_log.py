"""A log line is one line, of plain text, without secrets."""

import json
import logging
import sys

import pytest

from expertctl.http.log import MAX_TEXT, JsonFormatter, build_log_config, configure_log, redact

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
