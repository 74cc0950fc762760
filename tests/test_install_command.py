"""The command that hints give for a missing extra installs it."""

import json
import shlex
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import format_install_command

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Recorded:
    """Stands for an installation with what pip recorded of its source."""

    def __init__(self, record: str | None) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._record


@pytest.mark.parametrize(
    ("record", "arguments"),
    [
        (
            {"url": "file:///home/a%20b/expertctl", "dir_info": {"editable": True}},
            ["-e", "/home/a b/expertctl[plot,otel]"],
        ),
        (
            {"url": "file:///tmp/expertctl-1.0-py3-none-any.whl", "archive_info": {}},
            ["expertctl[plot,otel] @ file:///tmp/expertctl-1.0-py3-none-any.whl"],
        ),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            [f"expertctl[plot,otel] @ git+https://host/a.git@{COMMIT}"],
        ),
        (None, ["expertctl[plot,otel]"]),
    ],
)
def test_it_installs_from_where_this_one_came(
    record: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if record is None else json.dumps(record)
    monkeypatch.setattr(metadata, "distribution", lambda _: Recorded(text))
    words = shlex.split(format_install_command("plot", "otel"))
    assert words == [sys.executable, "-m", "pip", "install", *arguments]


def test_a_record_that_cannot_be_read_and_an_environment_without_pip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _: Recorded("damaged"))
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    words = shlex.split(format_install_command("plot"))
    assert words == ["uv", "pip", "install", "--python", sys.executable, "expertctl[plot]"]


@pytest.mark.all
def test_it_works_in_this_environment(tmp_path: Path) -> None:
    words = shlex.split(format_install_command("plot"))
    asked = [*words, "--dry-run", "--no-deps", "--quiet"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
