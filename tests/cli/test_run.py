"""``route`` and ``run`` from the outside: the whole way, equal to transformers and PEFT."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.cli import app
from expertctl.errors import format_install_command
from expertctl.schema.validation import find_problems, find_schema
from expertctl.settings import CONFIG_KEYS
from tests.cli.command_runner import ReplacedStdin, stdin
from tests.factories import decode_bytes, write_base, write_lora

__all__ = ["stdin"]

PROMPT = "Sort these numbers in ascending order: 41, 7, 23"
QUIET = ("--greedy", "--max-tokens", "12")


@dataclass(frozen=True)
class RunOutcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


Expertctl = Callable[..., RunOutcome]


@pytest.fixture
def expertctl(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Expertctl:
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")

    def call(*words: str | Path, stdin: bytes | None = None) -> RunOutcome:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = app.run([str(word) for word in words])
        out, err = capfd.readouterr()
        return RunOutcome(code, out, err)

    return call


@dataclass(frozen=True)
class RunWorkspace:
    """A person's folder: a base, a LoRA, and the signed package of it."""

    base: Path
    lora: Path
    package: Path
    folder: Path


def make_workspace(folder: Path) -> RunWorkspace:
    """Nothing but commands: base add, keys new, build, sign, install."""
    base = write_base(folder / "my-base", tie=False, seed=2)
    lora = write_lora(folder / "my-lora", base, rank=4, alpha=6, scale=0.4, dtype="bfloat16")
    package = folder / "my.expert"
    for words in (
        ["base", "add", base],
        ["keys", "new", "me", "--namespace", "acme"],
        ["build", lora, "-o", package, "--name", "acme/sorting", "--version", "1.2.0",
         "--description", "Sorts numbers in ascending order", "--license", "MIT",
         "--base", "my-base"],
        ["sign", package, "--key", "me"],
        ["install", package],
    ):  # fmt: skip
        assert app.run([str(word) for word in words]) == 0, words
    return RunWorkspace(base, lora, package, folder)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> RunWorkspace:
    """A workspace and its home, which tests copy; they only read its base."""
    folder = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPERT_HOME", str(folder / "expert-home"))
        patch.setenv("EXPERT_ENCODER", "lexical")
        return make_workspace(folder)


@pytest.fixture
def workspace(
    made_once: RunWorkspace, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RunWorkspace:
    """A home of the test's own, with a base of all tests."""
    monkeypatch.setenv("EXPERT_ENCODER", "lexical")
    shutil.copytree(made_once.folder / "expert-home", home, symlinks=True)
    return replace(made_once, folder=tmp_path)


@pytest.fixture
def own_base(home: Path, tmp_path: Path, expertctl: Expertctl) -> RunWorkspace:
    """A home whose base a test may change."""
    made = make_workspace(tmp_path)
    expertctl("list")  # what the commands printed is read
    return made


def oracle(workspace: RunWorkspace, prompt: str, *, tokens: int) -> tuple[list[int], str]:
    """Greedy generation by transformers and PEFT on the same files."""
    import peft
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(workspace.base)
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace.base, dtype=torch.float32)
    adapted: Any = peft.PeftModel.from_pretrained(model, str(workspace.lora))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    output = adapted.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False)
    new = output[0, ids.shape[1] :].tolist()
    ends = set(model.generation_config.eos_token_id)
    kept = new[: next((i for i, token in enumerate(new) if token in ends), len(new))]
    return kept, decode_bytes(kept)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("prompt", [PROMPT, "Grüße \U0001f600", "x"])
def test_the_whole_way_gives_the_tokens_of_transformers_and_peft(
    prompt: str, workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    outcome = expertctl("run", prompt, "--expert", "acme/sorting", "--json", *QUIET)
    assert outcome.code == 0, outcome.err
    tokens, text = oracle(workspace, prompt, tokens=12)
    assert outcome.document["tokens"]["ids"] == tokens
    assert outcome.document["text"] == text
    alone = expertctl("run", prompt, "--no-experts", "--json", *QUIET).document
    assert alone["tokens"]["ids"] != tokens


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_piped_text_is_read_behind_the_prompt_and_words_need_no_quotes(
    workspace: RunWorkspace, expertctl: Expertctl, stdin: ReplacedStdin
) -> None:
    joined = f"{PROMPT}\n\n41, 17"
    tokens, text = oracle(workspace, joined, tokens=12)
    for words in ([PROMPT], PROMPT.split(" ")):
        stdin.pipe(b"41, 17\n")
        outcome = expertctl("run", *words, "--expert", "acme/sorting", "--json", *QUIET)
        assert (outcome.code, outcome.document["tokens"]["ids"]) == (0, tokens)
        assert outcome.document["text"] == text
    stdin.pipe(joined.encode())
    outcome = expertctl("run", "--expert", "acme/sorting", "--json", *QUIET)
    assert outcome.document["tokens"]["ids"] == tokens


def test_route_takes_a_piped_prompt_and_plans_as_run_does(
    workspace: RunWorkspace, expertctl: Expertctl, stdin: ReplacedStdin
) -> None:
    wanted = expertctl("route", PROMPT, "--json").document["plan"]["experts"]
    assert wanted
    for words in ([], ["-"]):
        stdin.pipe(PROMPT.encode())
        assert expertctl("route", *words, "--json").document["plan"]["experts"] == wanted
    stdin.pipe(b"41, 17\n")
    assert expertctl("route", *PROMPT.split(" "), "--json").document["plan"]["experts"] == wanted


def test_the_footer_names_the_base_that_answered(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    for words in ([], ["--no-experts"], ["--base", workspace.base], ["--stats"]):
        err = expertctl("run", PROMPT, *QUIET, *words).err
        assert "12 written (length), on my-base, " in err


def test_the_setting_chooses_the_base_and_a_folder_may_be_named(
    workspace: RunWorkspace, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_base(workspace.folder / "other", layers=1, hidden=32, heads=2, kv_heads=1)

    def base(*words: str | Path) -> str:
        return str(expertctl("run", "Hello", "--json", *QUIET, *words).document["plan"]["base"])

    assert base("--base", other) == "other"
    assert base() == "other"
    expertctl("config", "set", "base", "my-base")
    assert base() == "my-base"
    monkeypatch.setenv("EXPERT_BASE", str(other))
    assert base() == "other"
    assert base("--base", "my-base") == "my-base"
    assert base("--expert", "acme/sorting") == "my-base"


def test_the_document_is_that_of_the_contract(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    outcome = expertctl("run", PROMPT, "--json", "--seed", "7", "--max-tokens", "5")
    document = outcome.document
    assert find_problems(document, "run") == []
    assert document["seed"] == document["plan"]["seed"] == 7
    assert [expert["ref"] for expert in document["plan"]["experts"]] == ["acme/sorting@1.2.0"]
    assert document["cache"] == {"experts_hit": 0, "experts_loaded": 1, "kv_reused_tokens": 0}
    assert document["tokens"]["generated"] == len(document["tokens"]["ids"]) <= 5
    timings = document["timings_ms"]
    assert timings["ttft"] <= timings["total"]
    assert find_problems({"plan": document["plan"]}, "route") == []


def test_both_schemas_describe_the_same_plan() -> None:
    run, route = (json.loads(find_schema(name).read_text()) for name in ("run", "route"))
    assert run["properties"]["plan"] == route["properties"]["plan"]


def test_text_goes_to_stdout_and_the_rest_to_stderr(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    document = expertctl("run", PROMPT, "--json", *QUIET).document
    outcome = expertctl("run", PROMPT, *QUIET)
    assert outcome.out == document["text"].rstrip("\n") + "\n"
    assert "acme/sorting@1.2.0: best of 1, score" in outcome.err
    assert "tokens read, 12 written (length)" in outcome.err
    assert expertctl("run", PROMPT, "--no-stream", *QUIET).out == outcome.out


def test_quiet_leaves_the_text_and_verbose_adds_stages(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    text = expertctl("run", PROMPT, *QUIET).out
    quiet = expertctl("run", PROMPT, "-q", *QUIET)
    assert (quiet.out, quiet.err) == (text, "")
    assert "plan sha256:" in expertctl("-q", "run", PROMPT, "--stats", *QUIET).err
    verbose = expertctl("run", PROMPT, "-v", *QUIET)
    assert verbose.out == text
    assert re.search(r"^stages: .*decode [\d.]+ ms, ", verbose.err, re.MULTILINE)
    assert re.search(r"^cache: experts_hit \d+, ", verbose.err, re.MULTILINE)


def test_stats_show_every_figure(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    err = expertctl("run", PROMPT, "--stats", "--memory-budget", "64MiB", *QUIET).err
    assert "stop none" in err
    held = "computed in float32, experts published, by numpy"
    for word in ("plan sha256:", "base my-base", held, "prefill", "67.1 MB", "experts_hit"):
        assert word in err


def test_a_trace_tells_each_layer_below_the_figures(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    said = expertctl("run", PROMPT, "--trace", *QUIET)
    assert said.out == expertctl("run", PROMPT, *QUIET).out
    for word in ("A TOKEN, ms", "PROMPT, ms", "layer 0 ", "layer 1 ", "a token allocates "):
        assert word in said.err
    document = expertctl("run", PROMPT, "--trace", "--json", *QUIET).document
    assert set(document["trace"]) == {"prefill_ms", "token_ms", "timed_tokens", "allocations"}
    assert document["bytes_read"]["ssd"] > 0
    assert document["prefill_tokens_per_s"] > 0
    assert "trace" not in expertctl("run", PROMPT, "--json", *QUIET).document


def test_without_an_expert_for_it_the_base_answers_alone_and_says_so(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    outcome = expertctl("run", "Guten Morgen", *QUIET)
    assert outcome.code == 0
    assert outcome.err.count("the base answers alone: ") == 1
    document = expertctl("run", "Guten Morgen", "--json", *QUIET).document
    assert document["plan"]["experts"] == []
    assert any("answers alone" in warning for warning in document["warnings"])


def test_one_seed_gives_one_text(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    words = ("run", PROMPT, "--json", "--temperature", "1.5", "--max-tokens", "20", "--seed")
    texts = [expertctl(*words, seed).document["tokens"]["ids"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.all
def test_a_new_home_gets_the_starter_pack_first(expertctl: Expertctl) -> None:
    prompt = "Sort these numbers: 41, 17, 23"
    outcome = expertctl("run", prompt, "--json", "--max-tokens", "20")
    assert outcome.code == 0, outcome.err
    assert "installed the starter pack: a base and 9 experts; " in outcome.err
    assert outcome.document["plan"]["experts"][0]["ref"].startswith("starter/sorting@")
    again = expertctl("route", prompt)
    assert again.code == 0
    assert "starter pack" not in again.err
    assert len(expertctl("list", "--json").document["experts"]) >= 4


@pytest.mark.all
def test_an_interrupted_first_run_is_made_good_by_the_next(
    expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("expertctl.install.installer.install_files", interrupt)
        assert expertctl("route", PROMPT).code == 130
    assert [b["name"] for b in expertctl("base", "list", "--json").document["bases"]] == [
        "starter/base"
    ]
    for told in (1, 0):
        assert expertctl("route", PROMPT).err.count("installed the starter pack") == told


@pytest.mark.all
def test_a_home_that_moved_answers_as_before(
    tmp_path: Path, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "Sort these numbers: 41, 17, 23"
    before = expertctl("run", prompt, "--json", *QUIET)
    assert before.code == 0, before.err
    home, moved = Path(os.environ["EXPERT_HOME"]), tmp_path / "moved"
    shutil.copytree(home, moved)
    shutil.rmtree(home)
    monkeypatch.setenv("EXPERT_HOME", str(moved))
    after = expertctl("run", prompt, "--json", *QUIET)
    assert after.code == 0, after.err
    assert after.document["tokens"] == before.document["tokens"]
    (base,) = expertctl("base", "list", "--json").document["bases"]
    assert base["state"] == "ok"
    assert Path(base["path"]).is_relative_to(moved)
    diagnosis = expertctl("doctor")
    assert diagnosis.code == 0, diagnosis.out
    assert not home.exists()


def test_a_home_with_a_base_of_its_own_gets_no_starter_pack(
    tmp_path: Path, expertctl: Expertctl
) -> None:
    assert expertctl("base", "add", write_base(tmp_path / "mine")).code == 0
    outcome = expertctl("run", PROMPT, "--json", *QUIET)
    assert outcome.document["plan"]["base"] == "mine"
    assert "the base answers alone: no expert is installed" in outcome.document["warnings"]
    assert expertctl("list", "--json").document["experts"] == []


def test_several_experts_are_shown_with_their_weights(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    words = ["--expert", "acme/sorting:0.5", "--expert", workspace.folder / "other.expert"]
    other = write_lora(workspace.folder / "other-lora", workspace.base, seed=7, scale=0.4)
    built = expertctl("build", other, "-o", words[3], "--base", "my-base", "--sign", "me",
                      "--name", "acme/other", "--description", "x", "--license", "MIT")  # fmt: skip
    assert built.code == 0, built.err
    outcome = expertctl("run", PROMPT, *words, *QUIET)
    assert "acme/sorting@1.2.0 x 0.5: named by the user" in outcome.err
    assert "acme/other@0.1.0: named by the user" in outcome.err
    document = expertctl("run", PROMPT, *words, "--json", *QUIET).document
    assert [e["weight"] for e in document["plan"]["experts"]] == [0.5, 1.0]
    assert document["cache"]["experts_loaded"] == 2
    alone = expertctl("run", PROMPT, *words[:2], "--json", *QUIET).document
    assert document["tokens"]["ids"] != alone["tokens"]["ids"]
    too_many = expertctl("run", PROMPT, *words, "--max-experts", "1")
    assert too_many.code == 2


def test_a_saved_plan_gives_the_same_text_again(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    first = expertctl("run", PROMPT, "--json", "--temperature", "1.2", "--max-tokens", "20")
    saved = workspace.folder / "plan.json"
    saved.write_text(first.out)
    again = expertctl("run", PROMPT, "--plan", saved, "--json")
    assert again.code == 0, again.err
    for key in ("text", "tokens", "seed"):
        assert again.document[key] == first.document[key]
    assert again.document["plan"]["identity"] == first.document["plan"]["identity"]
    saved.write_text(expertctl("route", PROMPT, "--no-experts", "--json").out)
    alone = expertctl("run", PROMPT, "--plan", saved, "--json", *QUIET).document
    assert (alone["plan"]["experts"], alone["warnings"]) == ([], [])
    for words, code, said in (
        (("--dtype", "bf16"), 4, "the plan was made with --dtype float32"),
        (("--expert", "acme/sorting"), 2, "already determines which experts answer"),
    ):
        refused = expertctl("run", PROMPT, "--plan", saved, *words)
        assert (refused.code, refused.out) == (code, "")
        assert said in refused.err


def test_an_excluded_expert_does_not_answer(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    document = expertctl("run", PROMPT, "--exclude", "acme/sorting", "--json", *QUIET).document
    assert document["plan"]["experts"] == []


def test_stop_strings_end_the_text_before_them(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    text = expertctl("run", PROMPT, "--json", *QUIET).document["text"]
    stop = text[2:4]
    document = expertctl("run", PROMPT, "--json", "--stop", stop, *QUIET).document
    assert document["text"] == text[: text.index(stop)]
    assert document["finish_reason"] == "stop"


def test_a_prompt_that_is_too_long_is_cut_when_asked(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    document = expertctl("run", "y" * 2000, "--truncate", "--json", *QUIET).document
    assert document["tokens"]["prompt"] < 512
    assert any("the prompt was cut" in warning for warning in document["warnings"])


def test_an_expert_for_another_base_is_refused_unless_allowed(
    workspace: RunWorkspace, tmp_path: Path, expertctl: Expertctl
) -> None:
    twin = write_base(tmp_path / "twin", tie=False, seed=8)
    assert expertctl("base", "add", twin).code == 0
    words = ("run", PROMPT, "--expert", "acme/sorting", "--base", "twin", *QUIET)
    refused = expertctl(*words)
    assert (refused.code, refused.out) == (4, "")
    assert "acme/sorting@1.2.0 was made for my-base" in refused.err
    allowed = expertctl(*words, "--allow-base-mismatch", "--json")
    assert allowed.code == 0
    assert any("mismatch" in warning for warning in allowed.document["warnings"])
    wider = write_base(tmp_path / "wider", tie=False, intermediate=64)
    assert expertctl("base", "add", wider).code == 0
    outcome = expertctl("run", PROMPT, "--expert", "acme/sorting", "--base", "wider",
                        "--allow-base-mismatch")  # fmt: skip
    assert outcome.code == 4
    assert "does not fit the base" in outcome.err


def test_weights_changed_in_the_store_are_refused(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    blobs = Path(os.environ["EXPERT_HOME"]) / "store" / "blobs" / "sha256"
    weights = max(blobs.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)
    outcome = expertctl("run", PROMPT, "--json")
    assert outcome.code == 5
    assert outcome.document["error"]["code"] == "digest"
    assert "acme/sorting@1.2.0" in outcome.err
    assert "expertctl doctor" in outcome.document["error"]["hint"]


def test_bf16_weights_are_said_to_be_rounded(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    document = expertctl("run", PROMPT, "--dtype", "bf16", "--json", *QUIET).document
    full = expertctl("run", PROMPT, "--json", *QUIET).document
    assert any("rounded to bfloat16" in warning for warning in document["warnings"])
    assert document["memory"]["base"] < full["memory"]["base"]
    assert document["plan"]["identity"] != full["plan"]["identity"]


def test_a_local_file_is_used_as_it_is_and_unsigned_with_a_warning(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    unsigned = workspace.folder / "unsigned.expert"
    built = expertctl("build", workspace.lora, "-o", unsigned, "--base", "my-base",
                      "--description", "x", "--license", "MIT")  # fmt: skip
    assert built.code == 0, built.err
    assert expertctl("remove", "acme/sorting").code == 0
    outcome = expertctl("run", PROMPT, "--expert", unsigned, "--json", *QUIET)
    assert outcome.code == 0, outcome.err
    assert any("unsigned" in warning for warning in outcome.document["warnings"])
    assert "unsigned" in outcome.err
    assert expertctl("list", "--json").document["experts"] == []
    weighted = expertctl("run", PROMPT, "--expert", f"{unsigned}:0", "--json", *QUIET).document
    alone = expertctl("run", PROMPT, "--no-experts", "--json", *QUIET).document
    assert weighted["tokens"]["ids"] == alone["tokens"]["ids"] != outcome.document["tokens"]["ids"]


def test_what_a_revoked_key_signed_is_refused(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    assert expertctl("keys", "revoke", "me").code == 0
    for expert in ("acme/sorting", workspace.package):
        outcome = expertctl("run", PROMPT, "--expert", expert)
        assert (outcome.code, outcome.out) == (5, "")
        assert "revoked" in outcome.err


def test_a_base_changed_on_disk_is_refused(own_base: RunWorkspace, expertctl: Expertctl) -> None:
    weights = own_base.base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    stamp = weights.stat()
    weights.write_bytes(data)
    assert expertctl("run", PROMPT).code == 4
    os.utime(weights, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    outcome = expertctl("run", PROMPT, "--verify-base", "--json")
    assert outcome.code == 4
    assert outcome.document["error"]["code"] == "base_mismatch"


def test_a_base_that_is_gone_is_refused(own_base: RunWorkspace, expertctl: Expertctl) -> None:
    own_base.base.rename(own_base.folder / "elsewhere")
    for command in ("route", "run"):
        outcome = expertctl(command, PROMPT)
        assert (outcome.code, outcome.out) == (4, "")
        assert "the base my-base is not what was added: " in outcome.err
        assert "hint: restore the files; or `expertctl base remove my-base" in outcome.err


def test_a_damaged_record_is_said_so(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    store = Path(os.environ["EXPERT_HOME"]) / "store"
    (store / "refs" / "local" / "acme" / "sorting" / "1.2.0").write_bytes(b"{x")
    told = "the record of acme/sorting@1.2.0 is damaged; see `expertctl doctor`"
    for words in (["route", PROMPT], ["run", PROMPT, *QUIET]):
        outcome = expertctl(*words, "--json")
        assert (outcome.code, told in outcome.err) == (0, True)
        assert told in outcome.document["warnings"]
        assert told in expertctl(*words).err


def test_a_budget_that_is_too_small_is_refused_with_the_numbers(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    outcome = expertctl("run", PROMPT, "--memory-budget", "100kB")
    assert (outcome.code, outcome.out) == (7, "")
    assert "needed, but only" in outcome.err
    assert "--memory-budget" in outcome.err


@pytest.mark.parametrize(
    ("words", "stdin", "code", "said"),
    [
        ([""], None, 2, "the prompt is empty"),
        (["  \n"], None, 2, "the prompt is empty"),
        (["x" * 500_001], None, 2, "500001 characters"),
        (["-"], b"", 2, "the prompt is empty"),
        (["-"], b"abc\xff", 8, "not UTF-8 at byte 3"),
        (["-"], b"x" * 3_000_000, 2, "more than 2000000 bytes"),
        (["-"], b"x" * 600_000, 2, "600000 characters"),
        ([], b"", 2, "the prompt is empty"),
        (["-", "--body", "-"], b"x", 2, "cannot both come from stdin"),
        (["p", "--body", "-"], b"\xff", 8, "not UTF-8 at byte 0"),
        (["p", "--body", "nowhere.txt"], None, 3, "nowhere.txt"),
        (["p", "--body", "."], None, 3, ". cannot be read"),
        (["p", "--template", "{prompt}{prompt}"], None, 2, "{prompt} 2 times"),
        (["p", "--temperature", "2.5"], None, 2, "temperature"),
        (["p", "--max-tokens", "0"], None, 2, "max_tokens"),
        (["p", "--max-experts", "11"], None, 2, "max_experts"),
        (["p", "--expert", "acme/nothing"], None, 3, "acme/nothing is not installed"),
        (["p", "--expert", "nowhere.expert"], None, 3, "nowhere.expert"),
        (["p", "--expert", "Not A Name"], None, 2, "not a package name"),
        (["p", "--expert", "acme/sorting:heavy"], None, 2, "heavy"),
        (["p", "--expert", "acme/sorting", "--no-experts"], None, 2, "forced and forbidden"),
        (["p", "--plan", "nowhere.json"], None, 3, "nowhere.json: no such file"),
        (["p", "--plan", __file__], None, 8, "test_run.py"),
        (["p", "--plan", "."], None, 8, "not a regular file"),
        (["p", "--expert", "."], None, 8, "not a regular file"),
        (["p", "--expert", __file__], None, 8, "test_run.py"),
        (["p", "--expert", f"{__file__}:0.5"], None, 8, "test_run.py"),
        (["p", "--expert", "./nowhere"], None, 3, "nowhere: no such file"),
        (["p", "--expert", "sha256:abc"], None, 2, "64 hex digits"),
        (["p", "--exclude", "sha256:abc"], None, 2, "64 hex digits"),
        (["p", "--base", "nobody"], None, 3, "no base is called"),
        (["p", "--device", "tpu"], None, 2, "tpu"),
        (["p", "--seed", "-1"], None, 2, "outside 0 to 9007199254740991"),
        (["p", "--top-p", "0"], None, 2, "top_p 0.0 must be above 0, up to 1"),
        (["p", "--dtype", "int3"], None, 2, "int3"),
        (["p", "--dtype", "int4"], None, 4, "head_dim is 8"),
        (["p", "--deterministic"], None, 4, "head_dim is 8"),
        (["p", "--dtype", "int8", "--engine", "transformers"], None, 2, "does not support --dtype"),
        (["p", "--memory-budget", "much"], None, 2, "not a size"),
        (["y" * 2000], None, 2, "the context of the base is 512"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_a_clear_error(
    words: list[str], stdin: bytes | None, code: int, said: str,
    workspace: RunWorkspace, expertctl: Expertctl,
) -> None:  # fmt: skip
    outcome = expertctl("run", *words, stdin=stdin)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("error: ")
    assert said in outcome.err
    assert "Traceback" not in outcome.err


def test_prompt_and_body_are_read_from_stdin_and_files(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    body = workspace.folder / "body.txt"
    body.write_text("and more")
    whole = expertctl("run", f"{PROMPT}\n\nand more", "--no-experts", "--json", *QUIET).document
    for words, piped in (
        (["-", "--body", str(body)], PROMPT.encode()),
        ([PROMPT, "--body", "-"], b"and more\n"),
        ([PROMPT, "--body", str(body), "--template", "{prompt}\n\n{body}"], None),
    ):
        document = expertctl("run", *words, "--no-experts", "--json", *QUIET, stdin=piped).document
        assert document["tokens"] == whole["tokens"]


def test_route_explains_every_candidate_and_is_the_plan_of_run(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    document = expertctl("route", PROMPT, "--json", "--seed", "3").document
    assert find_problems(document, "route") == []
    assert document["plan"] == expertctl("run", PROMPT, "--json", "--seed", "3").document["plan"]
    text = expertctl("route", PROMPT).out
    assert "acme/sorting@1.2.0" in text
    assert "best of 1" in text
    alone = expertctl("route", "Guten Morgen").out
    assert "the base answers alone" in alone
    assert "  below 0.50; closest: its " in alone


def test_route_says_that_it_makes_vectors_for_another_encoder(
    workspace: RunWorkspace, expertctl: Expertctl, home: Path
) -> None:
    told = "computing the routing vectors of 1 expert with lexical"
    for journal in home.rglob("vectors.journal"):
        journal.unlink()
    assert expertctl("route", PROMPT, "--json").err == ""
    for journal in home.rglob("vectors.journal"):
        journal.unlink()
    assert told in expertctl("route", PROMPT).err
    assert told not in expertctl("route", PROMPT).err


def test_route_runs_without_torch(workspace: RunWorkspace) -> None:
    program = (
        "import sys\n"
        "from expertctl.cli.app import run\n"
        f"code = run(['route', {PROMPT!r}])\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stderr.splitlines()[-1] == "0 False"


def run_without(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a prompt in a process that cannot import a module."""
    program = (
        "import sys\n"
        f"sys.modules[{module!r}] = None\n"
        "from expertctl.cli.app import run\n"
        f"sys.exit(run(['run', {PROMPT!r}, *{arguments!r}]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip


@pytest.mark.all
@pytest.mark.parametrize(("module", "option"), [("torch", "auto"), ("numba", "cpu")])
def test_without_torch_or_numba_the_processor_answers(
    module: str, option: str, workspace: RunWorkspace
) -> None:
    result = run_without(module, "--trace", "--device", option)
    assert result.returncode == 0, result.stderr
    assert "on my-base" in result.stderr


@pytest.mark.all
@pytest.mark.parametrize(
    ("module", "arguments", "said", "extra"),
    [
        ("jinja2", (), "running a model needs jinja2", "engine"),
        ("torch", ("--device", "cuda"), "a CUDA device needs torch", "cuda"),
        ("torch", ("--engine", "transformers"), "--engine transformers needs torch", "compat"),
        ("transformers", ("--engine", "transformers"), "--engine transformers needs", "compat"),
        ("numba", ("--dtype", "int8"), "the kernels of the processor need numba", "engine"),
    ],
)
def test_without_a_library_the_way_out_is_named(
    module: str, arguments: tuple[str, ...], said: str, extra: str, workspace: RunWorkspace
) -> None:
    result = run_without(module, *arguments)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.startswith(f"error: {said}")
    assert f"hint: {format_install_command(*extra.split(','))}" in result.stderr


@pytest.mark.parametrize("option", ["--plan", "--expert"])
def test_a_pipe_that_nobody_writes_is_not_waited_for(
    option: str, workspace: RunWorkspace, tmp_path: Path, expertctl: Expertctl
) -> None:
    os.mkfifo(tmp_path / "pipe")
    outcome = expertctl("run", PROMPT, option, tmp_path / "pipe")
    assert outcome.code == 8
    assert "not a regular file" in outcome.err


HELD = [
    ("dtype", "int8", ["--dtype", "int8"], ["--dtype", "float32"]),
    ("adapter_dtype", "fp16", ["--adapter-dtype", "fp16"], ["--adapter-dtype", "published"]),
    ("deterministic", "true", ["--deterministic"], ["--no-deterministic"]),
]


@pytest.mark.parametrize(("key", "value", "same", "usual"), HELD)
def test_how_numbers_are_held_is_said_by_option_environment_file_in_that_order(
    key: str,
    value: str,
    same: list[str],
    usual: list[str],
    workspace: RunWorkspace,
    expertctl: Expertctl,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def identity(*words: str) -> object:
        outcome = expertctl("route", PROMPT, "--json", *words)
        assert outcome.code == 0, outcome.err
        return outcome.document["plan"]["identity"]

    plain, wished = identity(), identity(*same)
    assert plain == identity(*usual) != wished
    assert expertctl("config", "set", key, value).code == 0
    assert identity() == wished
    assert identity(*usual) == plain
    monkeypatch.setenv(CONFIG_KEYS[key], "0" if key == "deterministic" else usual[-1])
    assert identity() == plain
    assert identity(*same) == wished


@pytest.mark.parametrize("command", ["run", "route", "chat"])
def test_a_setting_that_names_no_dtype_is_told_where_it_counts(
    command: str, workspace: RunWorkspace, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_DTYPE", "fp8")
    words = [] if command == "chat" else [PROMPT]
    outcome = expertctl(command, *words)
    assert outcome.code == 2
    assert "dtype 'fp8' is not supported" in outcome.err
    assert "EXPERT_DTYPE=float32" in outcome.err
    assert expertctl("list").code == 0
    if words:
        assert expertctl("route", PROMPT, "--dtype", "float32").code == 0


def test_a_setting_that_the_slow_engine_does_not_know_can_be_overruled(
    workspace: RunWorkspace, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_DTYPE", "int8")
    outcome = expertctl("run", PROMPT, "--engine", "transformers")
    assert outcome.code == 2
    assert "leave out --engine transformers, or give --dtype float32" in outcome.err
