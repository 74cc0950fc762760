"""``expertctl logs``: nothing is kept until the user says so, and then every answer is."""

import pytest

from expertctl.cli import logs as module
from expertctl.settings import find_home, load_settings
from tests.cli.command_runner import CommandRunner, expertctl

__all__ = ["expertctl"]


def saved(*texts: str, system: str | None = None) -> dict[str, object]:
    """The document of a conversation of these prompts and answers."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant") * (len(texts) // 2)
    return {
        "messages": [
            *first,
            *({"role": r, "content": t} for r, t in zip(roles, texts, strict=True)),
        ]
    }


PLAN = {"base": "starter/tiny", "experts": [{"ref": "starter/sql@1.0.0", "weight": 1.0}]}


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERT_LOGS", "yes")


def add(*texts: str, system: str | None = None) -> None:
    module.log_answer(load_settings(), saved(*texts, system=system), PLAN)


def test_nothing_is_kept_unless_it_is_switched_on(expertctl: CommandRunner) -> None:
    add("a secret", "an answer")
    assert not find_home().logs.exists()
    shown = expertctl("logs")
    assert shown.out == ""
    assert "expertctl config set logs yes" in shown.err


@pytest.mark.usefixtures("switched_on")
def test_the_newest_answers_are_shown_last(expertctl: CommandRunner) -> None:
    for number in range(5):
        add(f"question {number}", f"answer {number}")
    path = find_home().logs
    assert path.stat().st_mode & 0o777 == 0o600
    shown = expertctl("logs", "-n", "2").out
    assert shown.index("> question 3") < shown.index("> question 4")
    assert "starter/tiny  starter/sql@1.0.0" in shown
    assert "question 2" not in shown
    [only] = expertctl("logs", "ANSWER 1", "--json").document["logs"]
    assert (only["prompt"], only["experts"]) == ("question 1", ["starter/sql@1.0.0"])


@pytest.mark.usefixtures("switched_on")
def test_the_last_turn_of_a_conversation_is_kept_with_its_system_message(
    expertctl: CommandRunner,
) -> None:
    add("first", "one", "second", "two" * 300, system="Be brief.")
    shown = expertctl("logs").out
    assert "system: Be brief." in shown
    assert "first" not in shown
    assert "…" in shown
    assert "two" * 300 in expertctl("logs", "--full").out.replace("\n", "")


@pytest.mark.usefixtures("switched_on")
def test_a_damaged_line_costs_only_itself(expertctl: CommandRunner) -> None:
    add("before", "yes")
    with find_home().logs.open("ab") as stream:
        stream.write(b'{"time": "2026-')  # a process was killed here
    add("after", "yes")
    shown = expertctl("logs").out
    assert "> before" in shown
    assert "> after" in shown


@pytest.mark.usefixtures("switched_on")
def test_a_full_file_is_replaced_and_the_one_before_is_read_too(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 400)
    for number in range(6):
        add(f"question {number}", "answer")
    home = find_home()
    kept = [path.stat().st_size for path in home.root.glob("logs.jsonl*") if path.suffix != ".lock"]
    assert len(kept) == 2
    assert max(kept) <= 400
    shown = expertctl("logs", "-n", "9").out
    assert shown.index("> question 4") < shown.index("> question 5")
    assert expertctl("logs", "--clear").out.startswith("deleted ")
    assert not list(home.root.glob("logs.jsonl*[!k]"))


@pytest.mark.usefixtures("switched_on")
def test_a_link_in_place_of_the_file_is_not_followed(expertctl: CommandRunner) -> None:
    home = find_home()
    home.root.mkdir(parents=True, exist_ok=True)
    victim = home.root / "victim"
    victim.write_text("mine\n")
    home.logs.symlink_to(victim)
    add("question", "answer")
    assert victim.read_text() == "mine\n"
    assert expertctl("logs").out == ""
