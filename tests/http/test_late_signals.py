"""A signal that comes as signals begin to be ignored is no error; all others are reported."""

import sys
from types import SimpleNamespace

import pytest

from expertctl.http.server import _report_unraisable


@pytest.mark.parametrize(
    ("error", "is_reported"),
    [
        (OSError("Signal 2 ignored due to race condition"), False),
        (OSError("the disk is full"), True),
        (ValueError("Signal 2 ignored due to race condition"), True),
    ],
)
def test_only_a_signal_that_is_ignored_meanwhile_is_not_reported(
    error: Exception, is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[object]()
    monkeypatch.setattr(sys, "__unraisablehook__", seen.append)
    report = SimpleNamespace(exc_value=error)
    _report_unraisable(report)  # type: ignore[arg-type]  # Python's own cannot be made
    assert seen == ([report] if is_reported else [])
