"""``expertctl serve --traces``, and what it says where traces cannot be sent."""

import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.errors import format_install_command
from tests.cli.command_runner import CommandRunner

WITHOUT = (
    "import sys\nsys.modules['opentelemetry'] = None\nfrom expertctl.cli.app import main\nmain()\n"
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandRunner:
    return CommandRunner(capsys)


def test_what_is_no_collector_is_refused_before_anything_is_loaded(run: CommandRunner) -> None:
    said = run("serve", "--traces", "127.0.0.1:4318", exit_code=2)
    assert "--traces: not the URL" in said.err
    assert "http://127.0.0.1:4318" in said.err


@pytest.mark.parametrize("variable", ["", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_traces_without_the_extra_are_an_error_that_names_it(tmp_path: Path, variable: str) -> None:
    collector = "http://127.0.0.1:4318"
    words = [] if variable else ["--traces", collector]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT, "serve", *words],
        env={
            "EXPERT_HOME": str(tmp_path),
            "PATH": "",
            **({variable: collector} if variable else {}),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "traces need opentelemetry" in result.stderr
    assert format_install_command("otel") in result.stderr
