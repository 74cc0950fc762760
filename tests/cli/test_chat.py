"""``chat`` from the outside: scripted by a pipe, and at a terminal."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.schema.validation import find_problems
from tests.cli.command_runner import ReplacedStdin, stdin
from tests.cli.test_run import (
    PROMPT,
    QUIET,
    Expertctl,
    RunWorkspace,
    expertctl,
    made_once,
    workspace,
)
from tests.factories import write_base, write_lora
from tests.gpt2_base import write_gpt2

__all__ = ["expertctl", "made_once", "stdin", "workspace"]

pytestmark = pytest.mark.all

OTHER = "Guten Morgen"


def turns(expertctl: Expertctl, *words: Any, said: str, code: int = 0) -> list[dict[str, Any]]:
    outcome = expertctl("chat", *words, "--json", *QUIET, stdin=said.encode())
    assert outcome.code == code, outcome.err
    assert outcome.out.count("\n") == 1
    found: list[dict[str, Any]] = outcome.document["turns"]
    for turn in found:
        run = {key: value for key, value in turn.items() if key != "prompt"}
        assert "error" in run or find_problems(run, "run") == []
    return found


def test_each_line_is_a_turn_and_answers_alone_go_to_stdout(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    documents = turns(expertctl, said=f"{PROMPT}\n\n{OTHER}\n")
    outcome = expertctl("chat", *QUIET, stdin=f"{PROMPT}\n{OTHER}\n/plan\n/help\n".encode())
    assert (outcome.code, outcome.out) == (
        0,
        "".join(turn["text"].rstrip("\n") + "\n" for turn in documents),
    )
    assert [turn["prompt"] for turn in documents] == [PROMPT, OTHER]
    alone = expertctl("run", PROMPT, "--json", *QUIET).document
    assert documents[0]["text"] == alone["text"]
    assert "> " not in outcome.err


def test_a_first_message_may_be_an_argument_with_piped_text_behind_it(
    workspace: RunWorkspace, expertctl: Expertctl, stdin: ReplacedStdin
) -> None:
    stdin.pipe(b"41, 17\n")
    document = expertctl("chat", *PROMPT.split(" "), "--json", *QUIET).document
    [turn] = document["turns"]
    assert turn["prompt"] == PROMPT
    stdin.pipe(b"41, 17\n")
    assert turn["text"] == expertctl("run", PROMPT, "--json", *QUIET).document["text"]
    stdin.pipe(f"{PROMPT}\n\n41, 17\n".encode())
    [whole] = expertctl("chat", "-", "--json", *QUIET).document["turns"]
    assert (whole["prompt"], whole["text"]) == (f"{PROMPT}\n\n41, 17", turn["text"])


@pytest.mark.parametrize(("words", "data"), [([""], b"41, 17\n"), ([" "], b""), (["-"], b"\n")])
def test_an_empty_first_message_is_refused_and_what_is_piped_is_not_lost(
    words: list[str],
    data: bytes,
    workspace: RunWorkspace,
    expertctl: Expertctl,
    stdin: ReplacedStdin,
) -> None:
    stdin.pipe(data)
    outcome = expertctl("chat", *words, *QUIET)
    assert (outcome.code, outcome.out) == (2, "")
    assert "the first message is empty" in outcome.err


def test_a_first_message_beside_a_stdin_that_is_no_pipe_is_the_only_one(
    workspace: RunWorkspace, expertctl: Expertctl, stdin: ReplacedStdin
) -> None:
    for given in (stdin.closed, lambda: stdin.file(Path("/dev/null"))):
        given()
        [turn] = expertctl("chat", PROMPT, "--json", *QUIET).document["turns"]
        assert turn["prompt"] == PROMPT


def test_a_follow_up_reuses_what_was_read_and_keeps_the_experts(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    first, second = turns(expertctl, said=f"{PROMPT}\n{OTHER}\n")
    assert first["cache"]["kv_reused_tokens"] == 0
    assert second["cache"]["kv_reused_tokens"] >= first["tokens"]["prompt"]
    assert second["tokens"]["prompt"] > second["cache"]["kv_reused_tokens"]
    [expert] = second["plan"]["experts"]
    assert expert["reason"] == "kept from the previous turn"
    told = expertctl("chat", *QUIET, stdin=f"{PROMPT}\n{OTHER}\n".encode()).err
    assert "kept from the previous turn; " in told
    assert f"({second['cache']['kv_reused_tokens']} reused)" in told


def test_experts_are_changed_within_a_chat_and_that_is_said(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = f"{OTHER}\n/experts acme/sorting:0.5\n{OTHER}\n/experts auto\n/reset\n{OTHER}\n"
    found = turns(expertctl, said=script)
    assert [[e["weight"] for e in turn["plan"]["experts"]] for turn in found] == [[], [0.5], []]
    assert [turn["cache"]["kv_reused_tokens"] for turn in found] == [0, 0, 0]
    assert found[0]["tokens"] == found[2]["tokens"]
    told = expertctl("chat", *QUIET, stdin=script.encode()).err
    assert "from now on: acme/sorting@1.2.0 x 0.5" in told
    assert "(all read again: the experts changed)" in told


def test_a_message_that_suits_nobody_is_answered_by_the_base_again(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    said = f"{PROMPT}\nWhy is the sky blue in the morning?\nAnd now?\n"
    plans = [turn["plan"]["experts"] for turn in turns(expertctl, said=said)]
    assert [len(experts) for experts in plans] == [1, 0, 0]
    told = expertctl("chat", *QUIET, stdin=said.encode()).err
    assert "warning: the base answers alone" not in told
    assert told.count(" alone; ") == 2


def test_the_base_answers_alone_until_experts_are_wanted_again(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    said = f"{PROMPT}\n/experts none\n{PROMPT}\nAnd now?\n/experts auto\n{PROMPT}\n"
    plans = [turn["plan"]["experts"] for turn in turns(expertctl, said=said)]
    assert [len(experts) for experts in plans] == [1, 0, 0, 1]
    told = expertctl("chat", *QUIET, stdin=said.encode()).err
    assert "from now on: the base alone" in told


def test_experts_are_listed_with_those_that_answer_marked(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    said = f"/experts\n{PROMPT}\n/experts\n"
    lines = expertctl("chat", *QUIET, stdin=said.encode()).err.splitlines()
    marks = [line.split()[:2] for line in lines if "acme/sorting@1.2.0  lora" in line]
    assert marks == [["acme/sorting@1.2.0", "lora"], ["*", "acme/sorting@1.2.0"]]


def test_experts_are_listed_for_a_base_that_a_chat_can_use(
    workspace: RunWorkspace, expertctl: Expertctl, tmp_path: Path
) -> None:
    assert expertctl("base", "add", write_gpt2(tmp_path / "gpt2")).code == 0
    told = expertctl("chat", *QUIET, stdin=b"/experts\n").err
    assert "acme/sorting@1.2.0  lora" in told
    assert "gpt2" not in told


def test_a_plan_is_shown_and_saved_and_answers_again(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    saved = workspace.folder / "plan.json"
    script = f"/plan\n{PROMPT}\n/plan\n/plan {saved}\n/plan {workspace.folder}/no/where\n"
    outcome = expertctl("chat", *QUIET, stdin=script.encode())
    assert outcome.code == 3
    assert "there is no plan yet" in outcome.err
    assert "acme/sorting@1.2.0: best of 1, score" in outcome.err
    assert "where cannot be written: No such file or directory" in outcome.err
    again = expertctl("run", PROMPT, "--plan", saved)
    assert again.code == 0, again.err
    assert again.out == outcome.out


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("/nonsense", 2, "/nonsense is not a command"),
        ("/experts nobody/there", 3, "nobody/there is not installed"),
        ("/experts acme/sorting:heavy", 2, "is not a weight"),
        ("/experts ./missing.expert", 3, "missing.expert"),
        ("/reset now", 2, "unexpected argument 'now'"),
        ("/exit now", 2, "unexpected argument 'now'"),
        ("/quit now", 2, "unexpected argument 'now'"),
        ("/quitting", 2, "/quitting is not a command"),
        ("y" * 600, 2, "the context of the base is 512"),
    ],
)
def test_what_goes_wrong_is_said_and_the_chat_goes_on(
    line: str, code: int, said: str, workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    failed, answered = turns(expertctl, said=f"{line}\n{PROMPT}\n", code=code)
    assert said in failed["error"]["message"]
    assert answered["text"]
    outcome = expertctl("chat", *QUIET, stdin=f"{line}\n{PROMPT}\n".encode())
    assert outcome.code == code
    assert f"error: {failed['error']['message']}" in outcome.err
    assert outcome.out.strip() == answered["text"].strip()


def test_blocks_and_commands_in_them_are_messages(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = '"""\nfirst\n\n/exit\n"""\none\\\ntwo\n/exit\nnever\n'
    assert [turn["prompt"] for turn in turns(expertctl, said=script)] == [
        "first\n\n/exit",
        "one\ntwo",
    ]


@pytest.mark.parametrize("word", ["/exit", "/quit", "  /quit "])
def test_a_word_leaves_but_not_as_a_message(
    word: str, workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = f'"""{word}"""\n{word}\nnever\n'
    assert [turn["prompt"] for turn in turns(expertctl, said=script)] == [word]


def test_input_that_ends_too_early_or_is_no_text_is_refused(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    assert expertctl("chat", *QUIET, stdin=b'"""\nno end').code == 2
    outcome = expertctl("chat", "--json", *QUIET, stdin=b"\xff\n")
    assert (outcome.code, outcome.document["turns"][0]["error"]["code"]) == (8, "invalid_package")


def test_options_hold_for_every_turn(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    body = workspace.folder / "body.txt"
    body.write_text("41, 7, 23")
    script = "one\ntwo\n"
    lengths = [
        [turn["tokens"]["prompt"] for turn in turns(expertctl, *words, said=script)]
        for words in (
            ("--no-experts",),
            ("--no-experts", "--template", "<{prompt}>"),
            ("--no-experts", "--body", body),
        )
    ]
    assert lengths[1][0] - lengths[0][0] == 2
    assert lengths[2][0] - lengths[0][0] == len("\n\n41, 7, 23")
    forced = turns(expertctl, "--expert", "acme/sorting", "--seed", "5", said=script)
    assert [(len(turn["plan"]["experts"]), turn["seed"]) for turn in forced] == [(1, 5), (1, 5)]
    for words, code in (
        (("--template", "{body}"), 2),
        (("--template", "{prompt}{prompt}"), 2),
        (("--body", "-"), 2),
        (("--expert", "nobody/there"), 3),
        (("--expert", "acme/sorting", "--no-experts"), 2),
        (("--max-tokens", "0"), 2),
        (("--memory-budget", "1MB"), 7),
    ):
        outcome = expertctl("chat", *words, stdin=b"x\n")
        assert outcome.code == code, (words, outcome.err)
        assert outcome.out == ""


def test_truncate_leaves_the_oldest_turns_out_and_says_so(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = "".join(f"{letter * 150}\n" for letter in "abcd")
    cut = turns(expertctl, "--truncate", said=script)
    assert len(cut) == 4
    assert any("did not fit into the context" in warning for warning in cut[-1]["warnings"])
    strict = turns(expertctl, said=script, code=2)
    assert "--truncate" in strict[-1]["error"]["hint"]


def test_a_warning_is_said_once_and_stays_in_the_documents(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    lora = write_lora(workspace.folder / "other-lora", workspace.base, seed=7, scale=0.4)
    path = workspace.folder / "other.expert"
    built = expertctl("build", lora, "-o", path, "--base", "my-base", "--name", "acme/other",
                      "--description", "x", "--license", "MIT")  # fmt: skip
    assert built.code == 0, built.err
    outcome = expertctl("chat", "--expert", path, *QUIET, stdin=b"x\ny\n")
    assert outcome.err.count("is unsigned") == 1
    for turn in turns(expertctl, "--expert", path, said="x\ny\n"):
        assert any("is unsigned" in warning for warning in turn["warnings"])


def test_stats_show_every_figure_of_a_turn(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    err = expertctl("chat", "--stats", *QUIET, stdin=b"x\n").err
    assert "kv_reused_tokens 0" in err
    assert "plan sha256:" in err


class ChatTerminal:
    """A chat at a terminal of its own, in another process."""

    def __init__(self, *words: str) -> None:
        self._master, child = pty.openpty()
        program = "import sys; from expertctl.cli.app import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "chat", *words],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**os.environ, "EXPERT_ENCODER": "lexical", "TERM": "dumb", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, *, limit_s: float = 180) -> str:
        """Read until this text comes; return what came before it since the last time."""
        end = time.monotonic() + limit_s
        while text not in self.seen:
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} did not come: {self.seen!r}"
            try:
                self.seen += os.read(self._master, 1 << 16).decode(errors="replace")
            except OSError as error:
                raise AssertionError(f"ended before {text!r}: {self.seen!r}") from error
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_at_the_prompt(self, answer: str) -> str:
        """Press Ctrl-C until it is heard: between the prompt and its waiting, Python is deaf."""
        for _ in range(12):
            self.interrupt()
            with suppress(AssertionError):
                return self.wait_for(answer, limit_s=5)
        raise AssertionError(f"{answer!r} did not come: {self.seen!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def talkative(tmp_path: Path, expertctl: Expertctl) -> None:
    """A base without an end token, so that its answers are as long as they may be."""
    base = write_base(tmp_path / "talk", tie=False, seed=3, max_position_embeddings=50_000)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    config = base / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": None}))
    assert expertctl("base", "add", base).code == 0


@pytest.fixture
def terminal(talkative: None) -> Iterator[ChatTerminal]:
    terminal = ChatTerminal("--greedy", "--max-tokens", "40000")
    yield terminal
    terminal.close()


def test_ctrl_c_ends_an_answer_and_twice_at_the_prompt_the_chat(terminal: ChatTerminal) -> None:
    terminal.wait_for("> ")
    terminal.type("tell me\n")
    terminal.wait_for("tell me")
    terminal.wait_for("\ufffd")
    terminal.interrupt()
    line = terminal.wait_for("> ")
    assert "(interrupted)" in line
    terminal.type("/plan\n")
    assert "the base answers alone" in terminal.wait_for("> ")
    terminal.interrupt_at_the_prompt("press Ctrl-C again to leave")
    terminal.wait_for("> ")
    with suppress(AssertionError):  # it ends, and then nothing comes
        terminal.interrupt_at_the_prompt("never said")
    assert terminal.process.wait(30) == 0


def test_lines_are_edited_recalled_and_continued(terminal: ChatTerminal) -> None:
    terminal.wait_for("/? lists the commands")
    terminal.wait_for("> ")
    terminal.type("/hexx\x7f\x7flp\n")
    assert "/experts auto" in terminal.wait_for("> ")
    terminal.type("/nothing\n")
    terminal.wait_for("is not a command")
    terminal.wait_for("> ")
    terminal.type("/exi\\\n")
    terminal.wait_for(". ")
    terminal.interrupt_at_the_prompt("press Ctrl-C again")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


def test_with_json_a_terminal_shows_prompts_and_stdout_the_document_alone(
    talkative: None,
) -> None:
    master, child = pty.openpty()
    program = "import sys; from expertctl.cli.app import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "chat", "--json", "--max-tokens", "3"],
        stdin=child,
        stdout=subprocess.PIPE,
        stderr=child,
        env={**os.environ, "EXPERT_ENCODER": "lexical", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.close(child)
    os.write(master, b"hello\n/exit\n")
    out, _ = process.communicate(timeout=60)
    os.close(master)
    assert [turn["prompt"] for turn in json.loads(out)["turns"]] == ["hello"]


class Typist:
    """Stands for a terminal's stdin: lines, or keys that interrupt."""

    closed = False

    def __init__(self, *typed: str | type[BaseException]) -> None:
        self.buffer, self._typed = self, list(typed)

    def isatty(self) -> bool:
        return True

    def readline(self, _limit: int) -> bytes:
        typed = self._typed.pop(0) if self._typed else ""
        if isinstance(typed, str):
            return typed.encode()
        raise typed


def test_ctrl_c_while_weights_are_read_ends_that_answer_alone(
    workspace: RunWorkspace, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = expertctl("run", PROMPT, *QUIET)
    plan, pressed = Planner.plan_with_inventory, iter([True, False])

    def press(self: Planner, *asked: Any, **options: Any) -> PlannedPrompt:
        if next(pressed):
            signal.raise_signal(signal.SIGINT)
        return plan(self, *asked, **options)

    monkeypatch.setattr(Planner, "plan_with_inventory", press)
    monkeypatch.setattr(sys, "stdin", Typist("one\n", f"{PROMPT}\n"))
    outcome = expertctl("chat", *QUIET)
    assert outcome.code == 0
    assert "[interrupted before the first word]" in outcome.err
    assert outcome.out == uninterrupted.out


def test_ctrl_c_twice_in_an_answer_is_the_end(
    workspace: RunWorkspace, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Planner, "plan_with_inventory", press)
    monkeypatch.setattr(sys, "stdin", Typist("one\n"))
    assert expertctl("chat", *QUIET).code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_with_json_a_chat_that_fails_whole_is_one_document(
    workspace: RunWorkspace, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Typist("/help\n", MemoryError))
    outcome = expertctl("chat", "--json", *QUIET)
    assert outcome.code == 7
    assert outcome.document["error"]["message"] == "there is not enough memory"


def test_ctrl_c_at_the_prompt_leaves_only_when_pressed_twice_in_a_row(
    workspace: RunWorkspace, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = KeyboardInterrupt
    monkeypatch.setattr(sys, "stdin", Typist(key, "/nonsense\n", key, '"""\n'))
    outcome = expertctl("chat", *QUIET)
    assert outcome.code == 0
    assert outcome.err.count("press Ctrl-C again to leave") == 2
    assert "/nonsense is not a command" in outcome.err
    assert "ends within a block" in outcome.err
    monkeypatch.setattr(sys, "stdin", Typist(key, key, "/nonsense\n"))
    outcome = expertctl("chat", *QUIET)
    assert (outcome.code, "no command" in outcome.err) == (0, False)


def test_an_answer_of_a_chat_is_judged_in_it(workspace: RunWorkspace, expertctl: Expertctl) -> None:
    script = f"{PROMPT}\n/feedback good\n/feedback bad\n"
    told = expertctl("chat", *QUIET, stdin=script.encode()).err
    rate = "acme/sorting@1.2.0: smoothed success rate at default"
    assert f" was rated good\n  {rate} 0.60, before unknown\n" in told
    assert f" was rated bad\n  {rate} 0.40, before 0.60\n" in told
    [job] = expertctl("stats", "--json").document["jobs"]
    assert (job["verdict"], job["experts"]) == ("bad", ["acme/sorting@1.2.0"])


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("/feedback good\n", 3, "there is no answer yet"),
        (f"{PROMPT}\n/feedback\n", 2, "an answer is good or bad"),
        (f"{PROMPT}\n/feedback good bad\n", 2, "an answer is good or bad"),
        (f"{PROMPT}\n/feedback fine\n", 2, "an answer is good or bad"),
    ],
)
def test_a_judgement_that_is_none_is_refused(
    script: str, code: int, told: str, workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    outcome = expertctl("chat", *QUIET, stdin=script.encode())
    assert outcome.code == code
    assert told in outcome.err
