"""Runs commands in this process and reads what they print."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from expertctl.cli import app


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


class Commands:
    """The commands of `expertctl`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> Said:
        self._capsys.readouterr()
        actual = app.run([str(word) for word in words])
        out, err = self._capsys.readouterr()
        assert actual == code, err
        assert "Traceback" not in err
        return Said(actual, out, err)


@pytest.fixture
def expertctl(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)
