"""Where routed experts come from is said by an option, the environment or a file, in that order."""

import os
from pathlib import Path

import pytest

from expertctl.engine.cpu import tensor_packing
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

ASKED = ("run", "Sort: 3, 1, 2", "--no-experts", "--greedy", "--max-tokens", "4", "--json")


@pytest.fixture
def base(
    tmp_path: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    """Add a base of 57 MB in bf16; the options that run it in less."""
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    monkeypatch.setattr(tensor_packing, "_MAX_THREADS", 1)
    directory = write_base(
        tmp_path / "base",
        arch="qwen3_moe",
        layers=2,
        hidden=64,
        head_dim=16,
        dtype="bfloat16",
        num_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1152,
    )
    expertctl("base", "add", directory)
    return ("--dtype", "bf16", "--memory-budget", "62MB")


def test_the_option_counts_before_the_environment_before_the_file(
    base: tuple[str, ...], expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cold(*words: str) -> object:
        return expertctl(*ASKED, *base, *words).document["moe"]["cold"]

    assert cold() == "read"
    assert cold("--moe-cold", "map") == "map"
    assert cold("--moe-cold", "direct") == ("direct" if hasattr(os, "O_DIRECT") else "read")
    expertctl("config", "set", "moe_cold", "map")
    assert cold() == "map"
    monkeypatch.setenv("EXPERT_MOE_COLD", "read")
    assert cold() == "read"
    assert cold("--moe-cold", "map") == "map"


def test_a_setting_that_names_nothing_is_told_where_it_counts(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_MOE_COLD", "mapped")
    said = expertctl(*ASKED, exit_code=2)
    assert "moe_cold 'mapped' is not supported" in said.err
    assert "EXPERT_MOE_COLD=auto" in said.err
