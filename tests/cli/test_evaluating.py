"""``eval`` and ``build --eval`` from the outside; their oracle is in tests/engine."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from expertctl.cli.evaluation import find_answer_warnings
from expertctl.digest import Digest
from expertctl.engine.evaluation_result import AccuracyScore, EvaluationResult, ScoredAnswer
from expertctl.errors import format_install_command
from expertctl.package.evaluation import EvaluationData, EvaluationSample
from expertctl.routing.plan import PlannedExpert
from expertctl.schema.manifest import parse_manifest
from expertctl.schema.validation import find_problems
from tests.cli.command_runner import CommandRunner, expertctl
from tests.factories import write_base, write_lora

__all__ = ["expertctl"]

pytestmark = pytest.mark.all

PROMPTS = ("1 + 8", "2 + 7", "3 + 6", "4 + 5")
WRONG = "This is wrong."
EPOCH = "1700000000"


@dataclass(frozen=True)
class EvaluationWorkspace:
    """A folder with a base, a LoRA, its signed and installed package, and what they answer."""

    folder: Path
    lora: Path
    package: Path
    base_answers: Sequence[str]
    expert_answers: Sequence[str]

    def data(self, answers: Sequence[str], name: str = "sums.jsonl") -> Path:
        path = self.folder / name
        rows = [{"prompt": p, "answer": a} for p, a in zip(PROMPTS, answers, strict=True)]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    @property
    def half(self) -> Path:
        """The base is right once, the expert on three prompts."""
        return self.data([*self.expert_answers[:3], self.base_answers[3]])


@pytest.fixture(scope="module")
def answered() -> dict[str, Sequence[str]]:
    """What the first workshop was answered: the files of every other are the same."""
    return {}


@pytest.fixture
def workspace(
    tmp_path: Path,
    expertctl: CommandRunner,
    answered: dict[str, Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> EvaluationWorkspace:
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    base = write_base(tmp_path / "my-base", tie=False, seed=2)
    lora = write_lora(tmp_path / "my-lora", base, scale=0.4)
    draft = {"name": "acme/sums", "license": "MIT", "decoding": {"max_tokens": 5}}
    (lora / "expert.json").write_text(json.dumps(draft))
    package = tmp_path / "sums.expert"
    expertctl("base", "add", base)
    expertctl("keys", "new", "me", "--namespace", "acme")
    expertctl("build", lora, "-o", package, "--base", "my-base", "--sign", "me")
    expertctl("install", package)

    def ask(prompt: str, *words: str) -> str:
        said = expertctl("run", prompt, "--greedy", "--max-tokens", "5", "--json", *words)
        return str(said.document["text"])

    if not answered:
        answered["base"] = [ask(prompt, "--no-experts") for prompt in PROMPTS]
        answered["expert"] = [ask(prompt, "--expert", "acme/sums") for prompt in PROMPTS]
    return EvaluationWorkspace(tmp_path, lora, package, answered["base"], answered["expert"])


def test_the_document_holds_every_figure(
    workspace: EvaluationWorkspace, expertctl: CommandRunner
) -> None:
    data = workspace.half
    document = expertctl("eval", "acme/sums", "--data", data, "--json").document
    assert find_problems(document, "eval") == []
    figures = {key: document[key] for key in ("n", "base", "expert", "passed", "min_gain")}
    assert figures == {"n": 4, "base": 0.25, "expert": 0.75, "passed": True, "min_gain": None}
    assert document["ref"] == "acme/sums@0.1.0"
    assert document["dataset_sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()
    assert (document["max_tokens"], document["base_model"]) == (5, "my-base")
    base, expert = document["scores"]
    assert (base["name"], base["experts"], base["right"]) == ("base", [], 1)
    assert expert["experts"][0]["content_digest"].startswith("sha256:")
    assert (round(expert["low"], 4), round(expert["high"], 4)) == (0.3006, 0.9544)
    (gain,) = document["gains"]
    assert (gain["gain"], gain["gained"], gain["lost"], gain["p"]) == (0.5, 3, 1, 0.625)
    assert document["wrong"] == [
        {
            "line": 4,
            "id": None,
            "prompt": PROMPTS[3],
            "wanted": workspace.base_answers[3],
            "got": workspace.expert_answers[3],
        }
    ]


def test_a_person_sees_the_figures_and_the_wrong_answers(
    workspace: EvaluationWorkspace, expertctl: CommandRunner
) -> None:
    said = expertctl("eval", workspace.package, "--data", workspace.half)
    for part in (
        "n = 4, exact_match, base my-base in float32, at most 5 tokens",
        "right          95 % interval",
        "base             1 of 4 (25 %)  5 to 70 %",
        "acme/sums@0.1.0  3 of 4 (75 %)  30 to 95 %",
        "acme/sums@0.1.0 over base: gain +0.500, 95 % interval ",
        "wrong answers of acme/sums@0.1.0, 1 of 1:\n  line 4\n",
    ):
        assert part in said.out
    assert "answers were cut at 5 tokens" in said.err
    assert "wrong answers" not in expertctl(
        "eval", "acme/sums", "--data", workspace.half, "--show", "0"
    ).out  # fmt: skip


@pytest.mark.parametrize(("demanded", "code"), [("0.5", 0), ("0.51", 1), ("-1", 0), ("1", 1)])
def test_a_gain_can_be_demanded(
    demanded: str, code: int, workspace: EvaluationWorkspace, expertctl: CommandRunner
) -> None:
    words = ("eval", "acme/sums", "--data", workspace.half, "--min-gain", demanded)
    said = expertctl(*words, exit_code=code)
    assert ("error: " in said.err) == bool(code)
    if code:
        assert "a gain of +0.500 over base, at least " in said.err
        assert "(3 of 4 right against 1 of 4)" in said.err
    assert expertctl(*words, "--json", exit_code=code).document["passed"] is not bool(code)


def test_a_chain_is_judged_against_its_best_part(
    workspace: EvaluationWorkspace, expertctl: CommandRunner
) -> None:
    other = write_lora(workspace.folder / "other", workspace.folder / "my-base", seed=9, scale=0.4)
    package = workspace.folder / "other.expert"
    named = ("--name", "acme/other", "--base", "my-base", "--license", "MIT")
    expertctl("build", other, "-o", package, *named)
    data = workspace.data(workspace.expert_answers)
    words = ("eval", "acme/sums", "--data", data, "--compose", f"{package}:0.5", "--json")
    document = expertctl(*words, "--min-gain", "-0.1", exit_code=1).document
    assert find_problems(document, "eval") == []
    chain = "acme/sums@0.1.0 + acme/other@0.1.0:0.5"
    names = ["base", "acme/sums@0.1.0", "acme/other@0.1.0", chain]
    assert [score["name"] for score in document["scores"]] == names
    assert document["gains"][1]["name"] == chain
    assert document["gains"][1]["over"] == "acme/sums@0.1.0"
    assert document["gains"][1]["gain"] == -1.0
    assert document["wrong"][0]["line"] == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["acme/nobody"], 3, "acme/nobody is not installed"),
        (["./nowhere.expert"], 3, "nowhere.expert: no such file"),
        (["acme/sums:0.5"], 2, "at weight 1"),
        (["acme/sums", "--compose", "acme/nobody"], 3, "acme/nobody is not installed"),
        (["acme/sums", "--compose", "acme/sums"], 2, "error: acme/sums@0.1.0 is named twice"),
        (["acme/sums", "--metric", "bleu"], 2, "bleu"),
        (["acme/sums", "--min-gain", "nan"], 2, "min-gain"),
        (["acme/sums", "--min-gain", "2"], 2, "min-gain"),
        (["acme/sums", "--max-tokens", "0"], 2, "max-tokens"),
        (["acme/sums", "--show", "-1"], 2, "show"),
        (["acme/sums", "--base", "nobody"], 3, "no base is called"),
        (["acme/sums", "--memory-budget", "10kB"], 7, "budget"),
        (["acme/sums", "--metric", "json"], 8, "line 1: answer: not strict JSON"),
        (["acme/sums", "--plot", "x.jpg"], 2, "unsupported plot format"),
        (["acme/sums", "--plot", "nowhere/x.svg"], 3, "nowhere: no such directory"),
        (["acme/sums", "--data", "nowhere.jsonl"], 3, "nowhere.jsonl: no such file"),
        (["acme/sums", "--data", "."], 8, "not a regular file"),
        (["acme/sums", "--data", __file__], 8, "problems"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_input_is_a_clear_error(
    words: list[str],
    code: int,
    said: str,
    workspace: EvaluationWorkspace,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = workspace.half
    monkeypatch.chdir(workspace.folder)
    outcome = expertctl("eval", "--data", data, *words, exit_code=code)
    assert outcome.out == ""
    assert said in outcome.err
    assert outcome.err.startswith("error: ")


def test_a_picture_is_drawn(workspace: EvaluationWorkspace, expertctl: CommandRunner) -> None:
    data = workspace.half
    for name, start in (("scores.PNG", b"\x89PNG\r\n"), ("scores.svg", b"<?xml")):
        path = workspace.folder / name
        expertctl("eval", "acme/sums", "--data", data, "--plot", path)
        assert path.read_bytes().startswith(start)


def test_without_matplotlib_the_extra_is_named_before_anything_is_answered(
    workspace: EvaluationWorkspace, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    picture = workspace.folder / "scores.svg"
    said = expertctl("eval", "x/y", "--data", "nowhere", "--plot", picture, exit_code=3)
    assert said.err.startswith("error: plotting needs matplotlib")
    assert f"hint: {format_install_command('plot')}" in said.err


@pytest.mark.parametrize("words", [["eval", "acme/sums", "--data"], ["build", "my-lora", "--eval"]])
def test_without_jinja_the_way_out_is_named(
    words: list[str], workspace: EvaluationWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys\n"
        "sys.modules['jinja2'] = None\n"
        "from expertctl.cli.app import run\n"
        f"sys.exit(run({[*words, str(workspace.half)]!r}))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(workspace.folder)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (3, "")
    assert "error: running a model needs jinja2" in result.stderr


Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(workspace: EvaluationWorkspace, expertctl: CommandRunner) -> Build:
    """Build with an evaluation; return the document, and what the package says of itself."""

    def call(name: str, *words: object) -> dict[str, Any]:
        path = workspace.folder / name
        options = ("-o", path, "--base", "my-base", *words)
        document = expertctl("build", workspace.lora, *options, "--json").document
        inspected = expertctl("inspect", path, "--json").document
        assert inspected["content_digest"] == document["content_digest"]
        return {**document, **inspected}

    return call


def test_a_build_holds_what_was_measured_and_verifies(
    workspace: EvaluationWorkspace, expertctl: CommandRunner, build: Build
) -> None:
    before = datetime.now(UTC).date().isoformat()
    data, sources = workspace.half, set(workspace.folder.iterdir())
    document = build("measured.expert", "--eval", data, "--sign", "me")
    (entry,) = document["manifest"]["evaluation"]
    assert before <= entry.pop("date") <= datetime.now(UTC).date().isoformat()
    assert entry == {
        "task": "sums",
        "dataset_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "n": 4,
        "metric": "exact_match",
        "base": 0.25,
        "expert": 0.75,
    }
    expertctl("verify", workspace.folder / "measured.expert")
    plain = build("plain.expert")
    changed = {f["path"] for f in document["files"] if f not in plain["files"]}
    assert changed == {"expert.json"}
    made = {path.name for path in set(workspace.folder.iterdir()) - sources}
    assert made == {"measured.expert", "plain.expert"}
    assert "evaluation" not in (workspace.lora / "expert.json").read_text()


def test_a_build_of_one_source_date_is_the_same_every_day(
    workspace: EvaluationWorkspace, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    words = ("--eval", workspace.half, "--sign", "me")
    first, second = (build(f"{name}.expert", *words) for name in ("one", "two"))
    for digest in ("content_digest", "package_digest"):
        assert first[digest] == second[digest]
    assert first["manifest"]["evaluation"][0]["date"] == "2023-11-14"
    files = [workspace.folder / f"{name}.expert" for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_entry_of_the_same_data_and_metric_is_replaced(
    workspace: EvaluationWorkspace, expertctl: CommandRunner, build: Build
) -> None:
    first = build("one.expert", "--eval", workspace.half, "--task", "adding")
    expertctl("unpack", workspace.folder / "one.expert", workspace.folder / "again")
    files = workspace.folder / "again" / "expert.json"
    assert parse_manifest(files.read_bytes()).evaluation[0].task == "adding"
    (workspace.lora / "expert.json").write_bytes(files.read_bytes())
    other = workspace.data([WRONG] * 4, "other.jsonl")
    contains = build("two.expert", "--eval", workspace.half, "--metric", "contains")
    assert len(contains["manifest"]["evaluation"]) == 2
    again = build("three.expert", "--eval", workspace.half)["manifest"]["evaluation"]
    assert [entry["task"] for entry in again] == ["sums"]
    more = build("four.expert", "--eval", other)["manifest"]["evaluation"]
    assert [entry["expert"] for entry in more] == [0.75, 0.0]
    assert first["manifest"]["evaluation"][0] == more[0]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--task", "x"], 2, "--task"),
        (["--eval", "nowhere.jsonl"], 3, "nowhere.jsonl: no such file"),
        (["--eval", "sums.jsonl", "--task", "x\ny"], 8, "evaluation/0/task"),
        (["--eval", "sums.jsonl", "-o", "nowhere/x.expert"], 3, "nowhere: no such directory"),
        (["--eval", "sums.jsonl", "-o", "my-base"], 2, "my-base is a directory"),
        (["--eval", "sums.jsonl", "--base", "elsewhere"], 4, "was made for"),
    ],
)
def test_a_build_that_cannot_be_measured_leaves_nothing(
    words: list[str],
    code: int,
    said: str,
    workspace: EvaluationWorkspace,
    expertctl: CommandRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert workspace.half.exists()
    write_base(workspace.folder / "elsewhere", layers=2, seed=7)
    monkeypatch.chdir(workspace.folder)
    before = sorted(workspace.folder.iterdir())
    outcome = expertctl("build", "my-lora", *words, exit_code=code)
    assert said in outcome.err
    assert "measured" not in outcome.err
    assert sorted(workspace.folder.iterdir()) == before


def test_a_moment_that_is_none_is_refused(
    workspace: EvaluationWorkspace, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    words = ("--base", "my-base", "--eval", workspace.half)
    said = expertctl("build", workspace.lora, *words, exit_code=2)
    assert "SOURCE_DATE_EPOCH is 'yesterday'" in said.err


def test_a_base_is_evaluated_as_it_is_held(
    workspace: EvaluationWorkspace, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is `run`; the sizes of this base are none for int8."""
    words = ("--expert", "acme/sums", "--greedy", "--max-tokens", "5", "--json", "--dtype", "bf16")
    texts = [expertctl("run", prompt, *words).document["text"] for prompt in PROMPTS]
    assert all(text.strip() for text in texts)
    data = workspace.data(texts)
    document = expertctl("eval", "acme/sums", "--data", data, "--json", *words[-2:]).document
    assert find_problems(document, "eval") == []
    assert (document["dtype"], document["expert"]) == ("bf16", 1)
    monkeypatch.setenv("EXPERT_DTYPE", "int8")
    assert "head_dim is 8" in expertctl("eval", "acme/sums", "--data", data, exit_code=4).err
    refused = expertctl("eval", "--routing", data, *words[-2:], exit_code=2)
    assert "--dtype: --routing measures which expert is chosen" in refused.err


def test_a_file_measured_at_once_answers_as_run_does(
    tmp_path: Path, expertctl: CommandRunner
) -> None:
    """The oracle is `run`, one prompt after the other, on a base that kernels can run."""
    base = write_base(tmp_path / "wide", tie=False, seed=2, hidden=48, intermediate=80, head_dim=16)
    lora = write_lora(tmp_path / "lora", base, seed=6, scale=0.9)
    file, data = tmp_path / "wide.expert", tmp_path / "sums.jsonl"
    expertctl("base", "add", base)
    named = ("--name", "acme/wide", "--base", "wide", "--license", "MIT")
    expertctl("build", lora, "-o", file, *named)
    prompts = [f"{number} + {'1' * (number * 7 % 40)}" for number in range(8)]
    kept = ("--deterministic", "--max-tokens", "5", "--json")
    words = ("--greedy", "--expert", file, *kept)
    texts = [expertctl("run", prompt, *words).document["text"] for prompt in prompts]
    assert len(set(texts)) > 1
    data.write_text("\n".join(json.dumps({"prompt": p, "answer": WRONG}) for p in prompts))
    said = expertctl("eval", file, "--data", data, "--show", "8", *kept)
    assert find_problems(said.document, "eval") == []
    assert [answer["got"] for answer in said.document["wrong"]] == texts
    assert "loading wide, " in said.err, "the batch engine tells of the base"


def test_empty_answers_of_an_expert_are_counted(tmp_path: Path) -> None:
    samples = tuple(EvaluationSample(line=line, prompt="p", answer="a") for line in (1, 2, 3))
    texts = ("a", " \n", "")
    answers = tuple(
        ScoredAnswer(sample, text, text == "a", False)
        for sample, text in zip(samples, texts, strict=True)
    )
    digest = Digest.compute(b"")
    expert = PlannedExpert("acme/sums@1.0.0", digest, digest, "lora", 0.0, 1.0, "")
    data = EvaluationData(tmp_path, digest, "exact_match", samples, ())
    found = EvaluationResult(
        data=data, base_name="b", dtype="float32", max_tokens=5,
        base=AccuracyScore((), answers), expert=AccuracyScore((expert,), answers),
    )  # fmt: skip
    assert list(find_answer_warnings(found)) == ["acme/sums@1.0.0: 2 of 3 answers are empty"]
