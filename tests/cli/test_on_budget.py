"""``run --on-budget`` and ``run --plan`` as a person meets them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.engine.memory.process_registry import MemoryAdmission
from expertctl.schema.validation import find_problems
from expertctl.store.refs import StorePaths
from tests.cli.test_run import (
    PROMPT,
    QUIET,
    Expertctl,
    RunWorkspace,
    expertctl,
    made_once,
    workspace,
)

__all__ = ["expertctl", "made_once", "workspace"]

pytestmark = pytest.mark.all


def running() -> Path:
    return StorePaths(Path(os.environ["EXPERT_HOME"]) / "store").running


@pytest.fixture
def least(workspace: RunWorkspace, expertctl: Expertctl) -> int:
    """A budget in which nothing has to be evicted."""
    memory = expertctl("run", PROMPT, "--expert", "acme/sorting", "--json", *QUIET).document[
        "memory"
    ]
    return int(memory["peak"])


def test_an_expert_that_does_not_fit_is_dropped_and_named(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    alone = expertctl("run", PROMPT, "--no-experts", "--json", *QUIET).document
    budget = alone["memory"]["peak"]
    words = ("run", PROMPT, "--expert", "acme/sorting", *QUIET, "--memory-budget", budget)
    assert expertctl(*words).code == 7
    outcome = expertctl(*words, "--on-budget", "fewer", "--json")
    assert outcome.code == 0, outcome.err
    assert find_problems(outcome.document, "run") == []
    assert outcome.document["plan"]["experts"] == []
    [dropped] = outcome.document["dropped"]
    assert dropped["ref"] == "acme/sorting@1.2.0"
    assert " needed, but only " in dropped["reason"]
    assert "warning: acme/sorting@1.2.0 was left out: " in outcome.err
    assert outcome.document["tokens"]["ids"] == alone["tokens"]["ids"]


def test_fewer_and_a_saved_plan_exclude_each_other(
    workspace: RunWorkspace, expertctl: Expertctl, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(expertctl("route", PROMPT, "--json").out)
    outcome = expertctl("run", PROMPT, "--plan", plan, "--on-budget", "fewer")
    assert (outcome.code, outcome.out) == (2, "")
    assert "always runs with all its experts" in outcome.err


def test_a_saved_plan_is_read_from_stdin(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    words = ("run", PROMPT, "--json", "--temperature", "1.4", "--max-tokens", "9")
    first = expertctl(*words)
    again = expertctl("run", PROMPT, "--json", "--plan", "-", stdin=first.out.encode())
    assert again.document["tokens"] == first.document["tokens"]
    for key in ("identity", "seed", "params"):
        assert again.document["plan"][key] == first.document["plan"][key]
    for twice in (["-"], [PROMPT, "--body", "-"]):
        outcome = expertctl("run", *twice, "--plan", "-", stdin=first.out.encode())
        assert outcome.code == 2
        assert "stdin" in outcome.err


def test_a_queued_run_ends_with_130_when_it_is_interrupted(
    workspace: RunWorkspace, least: int
) -> None:
    words = ["run", PROMPT, "--expert", "acme/sorting", "--on-budget", "queue", "--json", *QUIET]
    program = f"import sys; from expertctl.cli.app import run; sys.exit(run({words!r}))"
    with MemoryAdmission(running()).acquire(least):
        environment = {**os.environ, "EXPERT_MEMORY_BUDGET": str(least * 3 // 2)}
        with subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as queued:  # fmt: skip
            assert queued.stderr is not None
            told = queued.stderr.readline()
            queued.send_signal(signal.SIGINT)
            out, err = queued.communicate(timeout=60)
    assert told.startswith("waiting for memory: ")
    assert (queued.returncode, out, "Traceback" in err) == (130, "", False)
    assert [path for path in running().iterdir() if path.is_dir()] == []


def test_a_queued_run_goes_on_when_there_is_room(
    workspace: RunWorkspace, expertctl: Expertctl, least: int
) -> None:
    words = ("run", PROMPT, "--expert", "acme/sorting", *QUIET, "--json", "--memory-budget", least)
    outcome = expertctl(*words, "--on-budget", "queue")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert "queue" not in document["timings_ms"]
    without_experts = least - document["memory"]["experts"]
    assert expertctl(*words[:-1], without_experts, "--on-budget", "queue").code == 7
