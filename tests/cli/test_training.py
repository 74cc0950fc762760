"""``expertctl train`` from the outside, on a tiny base."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertctl.errors import format_install_command
from expertctl.package.evaluation import read_evaluation_data
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base
from tests.train.fixtures import write_examples, write_rows

__all__ = ["expertctl"]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
QUICK = ("--steps", "6", "--batch-size", "4", "--rank", "2", "--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a base and examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    write_base(tmp_path / "tiny", arch="llama", layers=1)
    write_examples(tmp_path / "letters.jsonl")
    return tmp_path


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever trains fails: what is refused is refused before."""
    monkeypatch.setitem(sys.modules, "expertctl.train.session", None)


class TestTrainedPackage:
    @pytest.mark.all
    def test_a_signed_package_with_its_measurement_is_written(
        self, folder: Path, expertctl: CommandRunner
    ) -> None:
        expertctl("keys", "new", "me", "--namespace", "acme")
        words = ("--name", "acme/letters", "--sign", "me", "--license", "MIT")
        done = expertctl("train", "letters.jsonl", "--base", "tiny", *QUICK, *words)
        assert "6 steps" in done.err
        assert "held-out loss" in done.err
        package = folder / "letters-0.1.0.expert"
        assert str(package.name) in done.out
        expertctl("verify", package)
        manifest = expertctl("inspect", package, "--json").document["manifest"]
        test = read_evaluation_data(folder / "letters-0.1.0.training/test.jsonl", metric="contains")
        [entry] = manifest["evaluation"]
        assert (entry["task"], entry["n"]) == ("letters", len(test.samples))
        assert entry["dataset_sha256"] == test.digest.hex
        assert manifest["license"] == "MIT"
        assert manifest["decoding"]["temperature"] == 0.0
        assert len(manifest["routing"]["examples"]) > 20
        patterns = [limit["pattern"] for limit in manifest["limitations"]]
        assert patterns[0] == "prompts unlike the training examples"
        if entry["expert"] < 1:
            assert "prompts like the test examples" in patterns

    @pytest.mark.all
    def test_the_measurement_is_that_of_eval_and_the_expert_runs(
        self, folder: Path, expertctl: CommandRunner
    ) -> None:
        words = ("--learning-rate", "0.02", "--kind", "dora")
        document = expertctl(
            "train", "letters.jsonl", "--base", "tiny", *QUICK, *words, "--json"
        ).document
        test = folder / "letters-0.1.0.training/test.jsonl"
        found = expertctl("eval", document["path"], "--data", test, "--json").document
        assert document["evaluation"][0]["expert"] == round(found["expert"], 4)
        assert document["evaluation"][0]["base"] == round(found["base"], 4)
        assert document["training"]["settings"]["kind"] == "dora"
        assert [each["step"] for each in document["training"]["held_out_losses"]] == [0, 6]
        answer = expertctl("run", "--expert", document["path"], "a0", "--json").document
        assert answer["tokens"]["generated"] > 0

    @pytest.mark.all
    def test_the_same_seed_gives_the_same_package(
        self, folder: Path, expertctl: CommandRunner
    ) -> None:
        words = ("train", "letters.jsonl", "--base", "tiny", *QUICK, "--json", "-o")
        first = expertctl(*words, "first.expert").document
        again = expertctl(*words, "again.expert").document
        other = expertctl(*words, "other.expert", "--seed", 1).document
        assert first["package_digest"] == again["package_digest"] != other["package_digest"]
        assert not any("near-copy" in line for line in again["warnings"])

    @pytest.mark.all
    def test_without_an_evaluation_the_package_says_so(
        self, folder: Path, expertctl: CommandRunner
    ) -> None:
        done = expertctl("train", "letters.jsonl", "--base", "tiny", *QUICK, "--no-eval")
        assert "warning" not in done.err
        manifest = expertctl("inspect", "letters-0.1.0.expert", "--json").document["manifest"]
        assert manifest["evaluation"] == []
        assert manifest["limitations"][-1]["description"] == (
            "The answers were not measured, only the held-out loss."
        )

    @pytest.mark.all
    def test_conversations_are_learnt_and_not_measured(
        self, folder: Path, expertctl: CommandRunner
    ) -> None:
        rows = [
            {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": f"Say {n}"},
                    {"role": "assistant", "content": str(n)},
                ]
            }
            for n in range(60)
        ]
        write_rows(folder / "talks.jsonl", rows)
        done = expertctl("train", "talks.jsonl", "--base", "tiny", *QUICK)
        assert "no test example is one prompt and one answer" in done.err
        manifest = expertctl("inspect", "talks-0.1.0.expert", "--json").document["manifest"]
        assert all(text.startswith("Say ") for text in manifest["routing"]["examples"])


class TestRefusedCommand:
    @pytest.mark.parametrize(
        ("words", "exit_code", "said"),
        [
            ((), 2, "--base is missing"),
            (("--base", "tiny", "--kind", "ia3", "--rank", "4"), 2, "ia3 has no rank"),
            (("--base", "tiny", "--virtual-tokens", "4"), 2, "lora has no virtual tokens"),
            (("--base", "tiny", "--steps", "4", "--minutes", "1"), 2, "exclude each other"),
            (("--base", "tiny", "--kind", "full"), 2, "'full'"),
            (("--base", "tiny", "--rank", "0"), 2, "--rank"),
            (("--base", "none"), 3, "none"),
            (("--base", "tiny", "--sign", "nobody"), 3, "nobody"),
            (("--base", "tiny", "--name", "Acme"), 2, "Acme"),
            (("--base", "tiny", "--version", "1"), 2, "1"),
            (("--base", "tiny", "-o", "tiny"), 2, "is a directory"),
            (("--base", "tiny", "-o", "no/where.expert"), 3, "no such directory"),
        ],
    )
    def test_what_cannot_work_is_refused_at_once(
        self,
        words: tuple[str, ...],
        exit_code: int,
        said: str,
        folder: Path,
        unrun: None,
        expertctl: CommandRunner,
    ) -> None:
        done = expertctl("train", "letters.jsonl", *words, exit_code=exit_code)
        assert said in done.err
        assert not list(folder.glob("*.training"))

    def test_bad_lines_are_named(self, folder: Path, unrun: None, expertctl: CommandRunner) -> None:
        write_rows(folder / "bad.jsonl", ['{"prompt": "a"}', "{"])
        words = ("train", "bad.jsonl", "--base", "tiny")
        error = expertctl(*words, "--json", exit_code=8).document["error"]
        assert error["code"] == "invalid_package"
        assert "line 1" in error["message"]
        assert "line 2" in error["message"]

    def test_answers_that_the_metric_cannot_compare_are_refused_before_training(
        self, folder: Path, unrun: None, expertctl: CommandRunner
    ) -> None:
        words = ("train", "letters.jsonl", "--base", "tiny", "--metric", "json")
        done = expertctl(*words, exit_code=8)
        assert "line 1: answer: not strict JSON" in done.err
        assert "leave out `--metric json`" in done.err

    def test_a_missing_library_is_named_with_the_command_that_installs_it(
        self, folder: Path, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = importlib.util.find_spec
        absent = {"peft", "transformers"}
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: None if name in absent else find(name, *rest),
        )
        done = expertctl("train", "letters.jsonl", "--base", "tiny", exit_code=3)
        assert "training needs transformers and peft, which are not installed" in done.err
        assert format_install_command("train") in done.err


@pytest.mark.all
class TestInterruptedTraining:
    def run_until(self, folder: Path, text: str, number: signal.Signals) -> tuple[int, str]:
        """Start training; send a signal when a line has a text; return code and stderr."""
        words = ["train", "letters.jsonl", "--base", "tiny", *QUICK[:-4], "--device", "cpu"]
        words[words.index("6")] = "400"
        program = (
            "import expertctl.cli.progress as p, expertctl.train.trainer as t\n"
            "p.LINE_SECONDS = t.CHECKPOINT_SECONDS = 0.05\n"
            "from expertctl.cli.app import main; main()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, *words],
            cwd=folder,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stderr is not None
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if text in line and "sent" not in lines:
                    process.send_signal(number)
                    lines.append("sent")
        return process.returncode, "".join(lines)

    def finish(self, expertctl: CommandRunner, *words: str) -> Any:
        quick = ("--steps", "400", "--batch-size", "4", "--device", "cpu", "--json")
        return expertctl("train", "letters.jsonl", "--base", "tiny", *quick, *words).document

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
    def test_the_same_command_continues_to_the_same_package(
        self, number: signal.Signals, folder: Path, expertctl: CommandRunner
    ) -> None:
        code, err = self.run_until(folder, "training: ", number)
        assert code == (130 if number == signal.SIGINT else -signal.SIGKILL), err
        if number == signal.SIGINT:
            assert "continues from letters-0.1.0.training with the same command" in err
            assert (folder / "letters-0.1.0.training/checkpoint.safetensors").exists()
        assert not (folder / "letters-0.1.0.expert").exists()
        continued = self.finish(expertctl)
        whole = self.finish(expertctl, "-o", "whole.expert")
        assert continued["package_digest"] == whole["package_digest"]
        losses = "held_out_losses"
        assert json.dumps(continued["training"][losses]) == json.dumps(whole["training"][losses])
