"""What the engine tells is in the log of the server, with the weight that it has."""

import logging

import pytest

from expertctl.server.app import _log_engine_message


@pytest.mark.parametrize(
    ("told", "level", "message"),
    [
        ("compiling kernels for this machine", "INFO", None),
        ("warning: the disk is full", "WARNING", "the disk is full"),
        ("error: a pass failed\nTraceback:\n  here", "ERROR", "error: a pass failed"),
    ],
)
def test_a_warning_and_a_bug_are_more_than_news(
    told: str, level: str, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="expertctl.server")
    _log_engine_message(told)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (level, message or told)
