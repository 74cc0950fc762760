"""What chats keep in the home: lines, and the last conversation; system messages and settings."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.cli.chat_settings import SETTINGS, change_sampling, format_sampling
from expertctl.cli.history import MAX_CONVERSATION_BYTES, MAX_LINES, complete_path
from expertctl.errors import UsageError
from expertctl.settings import find_home
from expertctl.user_request import SamplingOverrides
from tests.cli.test_chat import ChatTerminal, talkative, turns
from tests.cli.test_run import (
    PROMPT,
    QUIET,
    Expertctl,
    RunWorkspace,
    expertctl,
    made_once,
    workspace,
)
from tests.factories import decode_bytes, write_base

__all__ = ["expertctl", "made_once", "talkative", "workspace"]

pytestmark = pytest.mark.all

SYSTEM, FIRST, SECOND = "Be brief.", "Good morning", "And what now, please?"
ALONE = ("--no-experts", *QUIET)


def answer(workspace: RunWorkspace, messages: list[dict[str, str]], *, tokens: int = 12) -> str:
    """Return what transformers generates greedily after these messages."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(workspace.base)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        workspace.base, dtype=torch.float32
    )
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    new = model.generate(input_ids=ids, max_new_tokens=tokens, do_sample=False)
    new = new[0, ids.shape[1] :].tolist()
    ends = set(model.generation_config.eos_token_id)
    return decode_bytes(new[: next((i for i, t in enumerate(new) if t in ends), len(new))])


def role(name: str, content: str) -> dict[str, str]:
    return {"role": name, "content": content}


def last_conversation() -> list[dict[str, str]]:
    path = find_home().last_conversation
    assert path.stat().st_mode & 0o777 == 0o600
    found: list[dict[str, str]] = json.loads(path.read_bytes())["messages"]
    return found


def test_a_run_continues_the_last_one_with_its_system_message(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    said = [role("system", SYSTEM), role("user", FIRST)]
    first = expertctl("run", FIRST, "-s", SYSTEM, "--json", *ALONE).document["text"]
    assert first == answer(workspace, said)
    said += [role("assistant", first), role("user", SECOND)]
    second = expertctl("run", SECOND, "-c", "--json", *ALONE).document["text"]
    assert second == answer(workspace, said)
    assert last_conversation() == [*said, role("assistant", second)]
    other = expertctl("run", "More", "-c", "-s", "Be long.", "--json", *ALONE).document["text"]
    assert last_conversation()[0] == role("system", "Be long.")
    assert other == answer(workspace, last_conversation()[:-1])
    without = expertctl("run", "More", "-c", "-s", "", "--json", *ALONE)
    assert without.code == 0
    assert [each["role"] for each in last_conversation()] == ["user", "assistant"] * 4
    expertctl("run", FIRST, *ALONE)
    assert len(last_conversation()) == 2, "a run without --continue starts anew"


def test_a_chat_is_saved_loaded_and_continued(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    saved = workspace.folder / "my chat.json"
    script = f"/system {SYSTEM}\n{FIRST}\n/save {saved}\n{SECOND}\n"
    first, second = turns(expertctl, "--no-experts", said=script)
    said = [role("system", SYSTEM), role("user", FIRST), role("assistant", first["text"])]
    assert json.loads(saved.read_bytes())["messages"] == said
    assert saved.stat().st_mode & 0o777 == 0o600
    assert second["text"] == answer(workspace, [*said, role("user", SECOND)])
    assert last_conversation() == [*said, role("user", SECOND), role("assistant", second["text"])]

    script = f"Something else\n/load {saved}\n{SECOND}\n"
    _, again = turns(expertctl, "--no-experts", said=script)
    assert again["text"] == second["text"]
    [further] = turns(expertctl, "-c", "--no-experts", said="More\n")
    assert further["text"] == answer(workspace, last_conversation()[:-1])
    assert [each["role"] for each in last_conversation()].count("assistant") == 3


def test_a_system_message_is_shown_changed_and_taken_back(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = f"/system\n/system Be quick.\n/system none\n{FIRST}\n"
    told = expertctl("chat", "-s", SYSTEM, *ALONE, stdin=script.encode())
    assert [line for line in told.err.splitlines() if "system message" in line] == [
        f"system message: {SYSTEM}",
        "system message: Be quick.",
        "there is no system message",
    ]
    assert [each["role"] for each in last_conversation()] == ["user", "assistant"]


def test_an_answer_is_given_again_with_another_seed(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = f"{FIRST}\n/retry\n/set temperature 1.5\n/retry\n{SECOND}\n"
    first, same, other, last = turns(expertctl, "--no-experts", said=script)
    assert first["text"] == same["text"], "greedy"
    assert other["text"] != first["text"]
    assert other["seed"] != first["seed"]
    kept = [role("user", FIRST), role("assistant", other["text"]), role("user", SECOND)]
    assert last_conversation() == [*kept, role("assistant", last["text"])]
    [failed] = turns(expertctl, said="/retry\n", code=3)
    assert failed["error"]["message"] == "there is no answer of this chat yet"


def test_settings_of_a_chat_are_those_of_a_run(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = f"/set max_tokens 3\n{FIRST}\n/set stop o\n/set\n"
    [turn] = turns(expertctl, "--no-experts", said=script)
    run = expertctl("run", FIRST, "--no-experts", "--greedy", "-n", "3", "--json").document
    assert turn["tokens"]["ids"] == run["tokens"]["ids"]
    told = expertctl("chat", "--greedy", stdin=script.encode()).err.splitlines()
    assert told[0] == "max_tokens 3; greedy yes"
    assert told[-1] == 'max_tokens 3; greedy yes; stop "o"'


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("/set colour red", 2, "'colour' is not a setting of a chat"),
        ("/set top_k", 2, "top_k needs a value"),
        ("/set top_k 2.5", 2, "top_k: '2.5' is not a whole number"),
        ("/set temperature warm", 2, "temperature: 'warm' is not a number"),
        ('/set stop "a', 2, "stop: '\"a' is not a text"),
        ("/save ~nobody-here/x", 2, "is not a file name"),
        ("/load a\0b", 2, "is not a file name"),
        ("/set greedy perhaps", 2, "greedy: 'perhaps' is not yes or no"),
        ("/set temperature 9", 2, "temperature 9.0 is outside 0 to 2"),
        ("/set seed -1", 2, "seed -1 is outside"),
        ("/save", 2, "there is no file name"),
        ("/load", 2, "there is no file name"),
        ("/load nowhere.json", 3, "nowhere.json: no such file"),
        ("/save no/such/folder.json", 3, "cannot be written"),
        ("/retry now", 2, "unexpected argument"),
    ],
)
def test_what_goes_wrong_is_said_and_nothing_changes(
    line: str, code: int, said: str, workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    script = f"{FIRST}\n{line}\n{SECOND}\n"
    first, failed, second = turns(expertctl, "--no-experts", said=script, code=code)
    assert said in failed["error"]["message"]
    assert len(last_conversation()) == 4
    assert second["text"] == answer(workspace, last_conversation()[:-1])
    assert first["text"] == last_conversation()[1]["content"]


BAD = (
    b"",
    b"{}",
    b"[]",
    b"\xff",
    b'{"messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "tool", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]}',
    b'{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "x"}]}',
    b'{"messages": ' + b"[" * 100_000,
)


@pytest.mark.parametrize("data", BAD)
def test_a_file_that_is_no_conversation_is_refused(
    data: bytes, workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    path = find_home().last_conversation
    path.write_bytes(data)
    outcome = expertctl("run", FIRST, "-c", *ALONE)
    assert (outcome.code, outcome.out) == (8, "")
    assert str(path) in outcome.err
    assert path.read_bytes() == data
    path.write_bytes(b" " * (MAX_CONVERSATION_BYTES + 1))
    assert expertctl("run", FIRST, "-c", *ALONE).code == 8


def test_nothing_is_kept_where_that_is_switched_off(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    assert expertctl("run", FIRST, "-c", *ALONE).code == 3
    assert expertctl("config", "set", "history", "no").code == 0
    assert expertctl("run", FIRST, *ALONE).code == 0
    turns(expertctl, said=f"{FIRST}\n")
    home = find_home()
    assert not home.last_conversation.exists()
    assert not home.chat_history.exists()
    outcome = expertctl("run", FIRST, "-c", *ALONE)
    assert outcome.code == 2
    assert "the setting `history` is off" in outcome.err


def test_a_home_that_cannot_be_written_loses_only_the_history(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    find_home().last_conversation.mkdir()
    outcome = expertctl("run", FIRST, *ALONE)
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_set_shown_and_taken_back(name: str) -> None:
    texts = {"greedy": "yes", "stop": "end", "seed": "7", "top_k": "0"}
    text = texts.get(name, "1")
    changed, seed = change_sampling(SamplingOverrides(), None, name, text)
    assert format_sampling(changed, seed) == f"{name} {texts.get(name, text)}".replace(
        "end", '"end"'
    )
    before, none = change_sampling(changed, seed, name, "default")
    assert (before, none) == (SamplingOverrides(), None)


def test_a_temperature_ends_greedy_decoding_and_the_other_way_round() -> None:
    greedy, _ = change_sampling(SamplingOverrides(temperature=0.5), None, "greedy", "yes")
    assert greedy == SamplingOverrides(greedy=True)
    warm, _ = change_sampling(greedy, None, "temperature", "0.7")
    assert warm == SamplingOverrides(temperature=0.7)
    with pytest.raises(UsageError, match="not a setting"):
        change_sampling(warm, None, "temperatur", "1")


def test_paths_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plans").mkdir()
    for name in ("plan.json", ".hidden", "other"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert complete_path("pl") == ["plan.json ", "plans/"]
    assert complete_path("") == ["other ", "plan.json ", "plans/"]
    assert complete_path(f"{tmp_path}/.h") == [f"{tmp_path}/.hidden "]
    assert complete_path("no/where/") == []


@contextmanager
def open_chat(*words: str) -> Iterator[ChatTerminal]:
    """Start a chat at a terminal of its own, and wait for its prompt."""
    terminal = ChatTerminal(*words)
    try:
        terminal.wait_for("/? lists the commands, /bye leaves")
        terminal.wait_for("> ")
        yield terminal
    finally:
        terminal.close()


def leave(terminal: ChatTerminal) -> None:
    terminal.type("/bye\n")
    assert terminal.process.wait(60) == 0


def test_lines_are_completed_and_recalled_in_the_next_chat(talkative: None) -> None:
    path = find_home().chat_history
    with open_chat() as terminal:
        terminal.type("/exp\tau\t\n")
        terminal.wait_for("experts are chosen for each message from now on")
        terminal.wait_for("> ")
        terminal.type("/system Grüße\n")
        terminal.wait_for("system message: Grüße")
        terminal.wait_for("> ")
        leave(terminal)
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert lines == ["/experts auto ", "/system Grüße", "/bye"]

    path.write_text("".join(f'"line {number}"\n' for number in range(2 * MAX_LINES)))
    with open_chat("--greedy", "--max-tokens", "3") as again:
        again.type("\x10\n")  # Ctrl-P: the line before
        again.wait_for(f"line {2 * MAX_LINES - 1}")
        again.wait_for("written")
        again.wait_for("> ")
        leave(again)
    assert len(path.read_bytes().splitlines()) == MAX_LINES


def test_the_first_line_names_the_base_and_counts_its_experts(talkative: None) -> None:
    terminal = ChatTerminal()
    try:
        assert "talk, 0 experts; " in terminal.wait_for("/? lists the commands")
    finally:
        terminal.close()


DAMAGED = (b"\xff\n", b"[" * 100_000, b"5\n{}\n", b"not json\n", b'"\\u0000"\n"\\ud800"\n')


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_history_is_begun_anew(data: bytes, talkative: None) -> None:
    path = find_home().chat_history
    path.write_bytes(data)
    with open_chat() as terminal:
        leave(terminal)
    assert path.read_bytes().splitlines()[-1] == b'"/bye"'


def test_a_pipe_in_place_of_a_file_does_not_block(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    os.mkfifo(find_home().last_conversation)
    assert expertctl("run", FIRST, "-c", *ALONE).code == 8
    assert expertctl("chat", *ALONE, stdin=f"/load {find_home().last_conversation}\n".encode()).code


def test_with_history_off_no_line_is_kept(
    talkative: None, expertctl: Expertctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "EXPERT_HISTORY", "0")
    with open_chat() as terminal:
        leave(terminal)
    assert not find_home().chat_history.exists()


def test_a_follow_up_keeps_the_experts_of_the_last_run(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    first = expertctl("run", PROMPT, "--json", *QUIET).document["plan"]["experts"]
    follow_up = expertctl("run", "-c", "And 9, 8, 7", "--json", *QUIET).document["plan"]["experts"]
    assert [e["ref"] for e in follow_up] == [e["ref"] for e in first] == ["acme/sorting@1.2.0"]
    path = find_home().last_conversation
    saved = json.loads(path.read_bytes())
    for plan in (None, {"experts": 5}, {**saved["plan"], "later": 1}):
        path.write_text(json.dumps({**saved, "plan": plan}))
        outcome = expertctl("run", "-c", "And 9, 8, 7", "--json", *QUIET)
        assert outcome.document["plan"]["experts"] == [], "a plan that cannot be read is left out"
    expertctl("run", PROMPT, *QUIET)
    [turn] = turns(expertctl, "-c", said="And 9, 8, 7\n")
    assert [e["reason"] for e in turn["plan"]["experts"]] == ["kept from the previous turn"]


def test_a_body_belongs_to_the_first_message_of_a_continued_chat(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    body = workspace.folder / "body.txt"
    body.write_text("41, 7")
    expertctl("run", FIRST, *ALONE)
    turns(expertctl, "-c", "--body", body, "--no-experts", said=f"{SECOND}\nMore\n")
    asked = [each["content"] for each in last_conversation() if each["role"] == "user"]
    assert asked == [FIRST, f"{SECOND}\n\n41, 7", "More"]


def test_the_base_that_answered_last_answers_again(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    other = write_base(workspace.folder / "other", seed=9)
    expertctl("run", FIRST, "--base", "my-base", *ALONE)
    assert expertctl("base", "add", other).code == 0
    assert expertctl("run", FIRST, "--json", *ALONE).document["plan"]["base"] == "other"
    expertctl("run", FIRST, "--base", "my-base", *ALONE)
    for words in ((), ("--base", "other"), ()):
        base = expertctl("run", "-c", SECOND, *words, "--json", *ALONE).document["plan"]["base"]
        assert base == ("other" if words else base)
    assert base == "other", "the last answer was its"
    expertctl("run", FIRST, "--base", "my-base", *ALONE)
    [turn] = turns(expertctl, "-c", "--no-experts", said=f"{SECOND}\n")
    assert turn["plan"]["base"] == "my-base"
    expertctl("base", "remove", "my-base", "--force")
    assert expertctl("run", "-c", SECOND, "--json", *ALONE).document["plan"]["base"] == "other"


def test_no_expert_of_a_file_is_kept_and_a_blank_system_message_is_none(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    expertctl("run", FIRST, "-s", " ", "-e", workspace.package, *QUIET)
    assert [each["role"] for each in last_conversation()] == ["user", "assistant"]
    outcome = expertctl("run", "-c", "And 9, 8, 7", *QUIET)
    assert outcome.code == 0, outcome.err


def test_named_experts_and_a_plan_bring_their_own_base(
    workspace: RunWorkspace, expertctl: Expertctl
) -> None:
    other = write_base(workspace.folder / "other", seed=9)
    assert expertctl("base", "add", other).code == 0
    plan = workspace.folder / "plan.json"
    plan.write_text(expertctl("run", PROMPT, "-e", "acme/sorting", "--json", *QUIET).out)
    for words in (("-e", "acme/sorting"), ("--plan", plan)):
        expertctl("run", FIRST, "--base", "other", *ALONE)
        outcome = expertctl("run", "-c", PROMPT, *words, "--json", *QUIET)
        assert outcome.code == 0, outcome.err
        assert outcome.document["plan"]["base"] == "my-base"
    expertctl("run", FIRST, "--base", "other", *ALONE)
    [turn] = turns(expertctl, "-c", "-e", "acme/sorting", said=f"{PROMPT}\n")
    assert turn["plan"]["base"] == "my-base"
