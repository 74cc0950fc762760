"""``eval`` on a base of routed experts, of which not all fit into the memory."""

import json
from pathlib import Path

import pytest

from expertctl.schema.validation import find_problems
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_lora
from tests.server.harness import ROUTED_EXPERTS, write_routed_base

__all__ = ["expertctl"]

pytestmark = pytest.mark.all
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SMALL = ("--memory-budget", "64MiB")
PROMPTS = ("1 + 8", "2 + 7", "3 + 6")


@pytest.fixture
def data(tmp_path: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prompts with the answers of the base; a LoRA is beside it as a package."""
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    monkeypatch.chdir(tmp_path)
    base = write_routed_base(tmp_path / "routed")
    lora = write_lora(tmp_path / "lora", base, targets=ATTENTION)
    draft = {"name": "acme/sums", "license": "MIT", "decoding": {"max_tokens": 4}}
    (lora / "expert.json").write_text(json.dumps(draft))
    expertctl("base", "add", base)
    expertctl("build", lora, "-o", "sums.expert", "--base", "routed")
    rows = []
    for prompt in PROMPTS:
        words = ("--greedy", "--max-tokens", "4", "--no-experts", "--json")
        answer = expertctl("run", prompt, *words).document["text"]
        rows.append({"prompt": prompt, "answer": answer})
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_in_less_memory_the_same_answers_are_right(data: Path, expertctl: CommandRunner) -> None:
    words = ("eval", "./sums.expert", "--data", data, "--json")
    whole, small = expertctl(*words).document, expertctl(*words, *SMALL).document
    for document in (whole, small):
        assert find_problems(document, "eval") == []
        assert document["base"] == 1.0
    assert whole["expert"] == small["expert"]
    assert whole["moe"]["slots"] == ROUTED_EXPERTS
    moe = small["moe"]
    assert (moe["miss"], moe["skipped_mass"]) == ("exact", 0)
    assert 0 < moe["slots"] < ROUTED_EXPERTS
    assert 0 < moe["misses"] < moe["requests"]


def test_skipping_is_said_beside_the_figures(data: Path, expertctl: CommandRunner) -> None:
    words = ("eval", "./sums.expert", "--data", data, *SMALL)
    skip = ("--moe-miss", "skip", "--moe-skip-cap")
    document = expertctl(*words, *skip, "1", "--json").document
    assert document["moe"]["miss"] == "skip"
    assert 0 < document["moe"]["skipped_mass"] < 1
    capped = expertctl(*words, *skip, "0")
    assert " of router weight skipped" in capped.out
    assert ", 0.0 % of router weight skipped" in capped.out
    assert "routed experts: " not in expertctl("eval", "./sums.expert", "--data", data).out


def test_what_makes_no_sense_is_refused(data: Path, expertctl: CommandRunner) -> None:
    words = ("eval", "./sums.expert", "--data", data)
    err = expertctl(*words, "--moe-miss", "skip", "--moe-skip-cap", "2", exit_code=2).err
    assert "--moe-skip-cap 2.0 is not a share" in err
    err = expertctl(*words, "--moe-miss", "skip", "--deterministic", exit_code=2).err
    assert "--deterministic excludes --moe-miss skip" in err
    skip = ("--moe-miss", "skip", "--moe-skip-cap", "0.5")
    err = expertctl("eval", "--routing", data, *skip, exit_code=2).err
    assert "--moe-miss, --moe-skip-cap: --routing measures which expert is chosen" in err


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "./sums.expert", "--data", "data.jsonl"),
        ("run", "2+2"),
        ("route", "2+2"),
        ("chat",),
        ("serve",),
        ("bench", "moe", "--moe-miss", "exact"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("cap", ["0.25", "2.0"])
def test_a_cap_of_nothing_is_refused(
    cap: str, words: tuple[str, ...], expertctl: CommandRunner
) -> None:
    """Whoever gives one wants experts to be left out, and none is; no file is looked for."""
    told = f"--moe-skip-cap {cap}: no routed expert is skipped with --moe-miss exact"
    assert told in expertctl(*words, "--moe-skip-cap", cap, exit_code=2).err
