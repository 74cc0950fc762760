"""``--device`` from the outside, on a machine without a CUDA device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.command_runner import CommandRunner, expertctl

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

PROMPT = "Sort these numbers: 41, 17, 23, 15"


@pytest.fixture(autouse=True)
def none_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")


@pytest.mark.parametrize("command", ["run", "route"])
def test_a_device_that_is_not_there_is_refused_with_a_way_out(
    command: str, expertctl: CommandRunner, home: Path
) -> None:
    said = expertctl(command, PROMPT, "--device", "cuda", exit_code=3)
    assert "CUDA" in said.err
    assert "--device cpu" in said.err
    assert not (home / "bases").exists()


def test_the_setting_counts_and_the_option_wins(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_DEVICE", "cuda")
    expertctl("run", PROMPT, exit_code=3)
    for device in ("cpu", "auto"):
        document = expertctl("run", PROMPT, "--greedy", "--device", device, "--json").document
        assert document["numerics"]["backend"] == "numpy"
        assert document["text"].strip() == "15, 17, 23, 41"


@pytest.mark.parametrize("command", ["run", "chat", "bench"])
def test_a_device_that_nobody_knows_is_refused(
    command: str, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_DEVICE", "tpu")
    words = [PROMPT] if command == "run" else []
    assert "'tpu' is not supported" in expertctl(command, *words, exit_code=2).err


def test_what_the_processor_alone_does_says_so(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_DEVICE", "cuda")
    said = expertctl("bench", "--shape", "qwen3-0.6b", exit_code=2)
    assert "bench runs on the CPU only" in said.err
    assert "EXPERT_DEVICE=cpu" in said.err


def test_what_a_device_cannot_do_is_said_before_it_is_looked_for(
    expertctl: CommandRunner,
) -> None:
    said = expertctl("route", PROMPT, "--device", "auto", "--dtype", "int8", "--json")
    assert said.document["plan"]["identity"].startswith("sha256:")


def test_what_settings_ask_of_a_device_in_vain_can_be_taken_back(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can leave out an option that was never given."""
    for name, value in (("DTYPE", "int8"), ("ADAPTER_DTYPE", "fp16"), ("DETERMINISTIC", "1")):
        monkeypatch.setenv(f"EXPERT_{name}", value)
    monkeypatch.setattr("expertctl.engine.torch.devices.require_cuda", lambda: None)
    said = expertctl("route", PROMPT, "--device", "cuda", exit_code=2)
    refused = "--dtype int8, --adapter-dtype fp16, --deterministic"
    way_out = "--dtype float32 --adapter-dtype published --no-deterministic"
    assert f"--device cuda does not support {refused}\n" in said.err
    assert f"hint: give {way_out}, or compute with --device cpu" in said.err
    expertctl("route", PROMPT, "--device", "cuda", *way_out.split())


def test_config_keeps_a_device_that_is_known(expertctl: CommandRunner) -> None:
    for device in ("cpu", "cuda", "auto"):
        expertctl("config", "set", "device", device)
        assert expertctl("config", "get", "device").out == f"{device}\n"


def test_a_run_on_a_processor_imports_nothing_for_devices() -> None:
    code = (
        "import sys\n"
        "from expertctl.cli import app\n"
        f"code = app.run(['run', {PROMPT!r}, '--greedy', '--max-tokens', '2'])\n"
        "here = 'expertctl.engine.'\n"
        "own = ('model.cuda', 'model.lora_slots')\n"
        "print(code, [n for n in sys.modules if n.removeprefix(here).startswith(own)])\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[-1] == "0 []"
