"""``-q`` and ``-v``: every command has them, before and after its name."""

import logging
import os
from pathlib import Path

import pytest

from expertctl.cli import app
from expertctl.cli.help import _remove_secrets
from expertctl.cli.output import VERBOSITY, has_colour, make_note_once, note, warn
from expertctl.cli.progress import show_counter
from tests.cli.command_runner import CommandRunner, expertctl
from tests.registry.live_registry import (
    LiveRegistry,
    PackageWorkspace,
    alice,
    live,
    tiny_base,
    trust,
    workspace,
)

__all__ = ["alice", "expertctl", "live", "tiny_base", "trust", "workspace"]

NO_KEYS = "no keys yet; make one with `expertctl keys new NAME`\n"


@pytest.fixture
def published(expertctl: CommandRunner, alice: str, workspace: PackageWorkspace) -> Path:
    """A package in the registry."""
    expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    package = workspace.package(description="Writes SQL.")
    expertctl("publish", package)
    return package


@pytest.mark.parametrize(
    "words",
    [
        ("-q", "keys", "list"),
        ("keys", "-q", "list"),
        ("keys", "list", "-q"),
        ("keys", "list", "--quiet"),
    ],
    ids=" ".join,
)
def test_quiet_hides_notes_wherever_it_is_given(
    words: tuple[str, ...], expertctl: CommandRunner
) -> None:
    assert expertctl("keys", "list").err == NO_KEYS
    said = expertctl(*words)
    assert (said.out, said.err) == ("", "")
    assert expertctl("keys", "list").err == NO_KEYS, "the next command prints notes again"


@pytest.mark.parametrize(
    "words",
    [
        ("-v", "keys", "list"),
        ("keys", "-v", "list"),
        ("keys", "list", "-v"),
        ("keys", "list", "--verbose"),
    ],
    ids=" ".join,
)
def test_verbose_prints_details_wherever_it_is_given(
    words: tuple[str, ...], expertctl: CommandRunner, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir()
    (home / "config.toml").write_text('base = "mine"\ndtype = "int8"\n')
    monkeypatch.setenv("EXPERT_DTYPE", "bf16")
    lines = expertctl(*words).err.splitlines()
    assert lines[:3] == [
        f"home: {home}",
        "setting: base = mine (config.toml)",
        "setting: dtype = bf16 (EXPERT_DTYPE)",
    ]
    assert lines[3] == NO_KEYS.rstrip()
    assert lines[4].startswith("finished after ")
    assert not logging.getLogger("expertctl").handlers
    assert expertctl("keys", "list").err == NO_KEYS


def test_both_at_once_are_refused(expertctl: CommandRunner) -> None:
    assert "exclude each other" in expertctl("-q", "keys", "list", "-v", exit_code=2).err


def test_errors_are_printed_in_any_case(expertctl: CommandRunner) -> None:
    loud = expertctl("verify", "nowhere.expert", exit_code=3).err
    assert loud.startswith("error: nowhere.expert: no such file\n")
    assert expertctl("-q", "verify", "nowhere.expert", exit_code=3).err == loud
    assert expertctl("-q", "frobnicate", exit_code=2).err.startswith("error: ")
    assert expertctl("-q", "keys", exit_code=2).err.startswith("Usage: expertctl keys")


def test_broken_settings_are_reported_once(expertctl: CommandRunner, home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text("= broken")
    assert expertctl("-v", "list", exit_code=8).err.count("config.toml") == 1


@pytest.mark.parametrize("name", list(app.COMMANDS))
def test_every_command_has_both_in_its_help(name: str, expertctl: CommandRunner) -> None:
    shown = expertctl(name, "-h").out
    assert "  -q, --quiet " in shown
    assert shown.count("  -v, --verbose ") == 1


def test_a_command_keeps_an_option_of_its_own(expertctl: CommandRunner) -> None:
    assert "List experts of other bases, too." in expertctl("route", "-h").out
    said = expertctl("route", "Sort: 2, 1", "-v", "-q")
    assert "home: " not in said.err
    assert "home: " in expertctl("-v", "route", "Sort: 2, 1").err


def test_the_version_and_the_help_take_them_too(expertctl: CommandRunner) -> None:
    assert expertctl("-q", "--version").out == expertctl("--version").out
    assert expertctl("-q", "help", "list").out == expertctl("list", "-h").out


def test_quiet_keeps_warnings_and_hides_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(VERBOSITY, "is_quiet", True)
    monkeypatch.setattr("expertctl.cli.progress.LINE_SECONDS", 0.0)
    with show_counter("measuring", 3, as_json=False) as report:
        report(1)
    note("a note")
    warn(["the key was revoked"])
    note("warning: the index is old")
    assert capsys.readouterr().err.splitlines() == [
        "warning: the key was revoked",
        "warning: the index is old",
    ]


def test_quiet_install_and_search_print_no_notes(
    expertctl: CommandRunner, live: LiveRegistry, published: Path
) -> None:
    assert expertctl("search", "sql", "-q").err == ""
    nothing = expertctl("-q", "search", "nothing-of-it")
    assert (nothing.out, nothing.err) == ("", "")
    said = expertctl("install", published, "-q")
    assert said.out.startswith("installed: acme/sql@1.0.0")
    assert [line for line in said.err.splitlines() if not line.startswith("warning: ")] == []


def test_verbose_prints_requests_without_secrets(
    expertctl: CommandRunner, live: LiveRegistry, alice: str, published: Path
) -> None:
    said = expertctl("search", "sql", "-v", "--json")
    assert said.document["results"]
    requests = [line for line in said.err.splitlines() if line.startswith("expertctl.registry: ")]
    assert len(requests) >= 1
    assert f"GET http://{live.host}/api/v1/search: status 200, " in requests[-1]
    assert alice not in said.err
    assert "xpt_" not in said.err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("setting: registry = https://me:secret@r.example (file)", "https://***@r.example"),
        ("Authorization: Bearer abcdef", "Bearer ***"),
        ("token xpt_0123456789", "xpt_***"),
    ],
)
def test_secrets_are_removed(text: str, shown: str) -> None:
    hidden = _remove_secrets(text)
    assert shown in hidden
    assert not any(secret in hidden for secret in ("secret@", "abcdef", "0123456789"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://user:pa/ss@host", "***@host"),
        ("https://user:p@ss@host", "***@host"),
        ("user:secret@host", "***@host"),
        ("https://host/x?X-Amz-Signature=secret&token=secret", "https://host/x?***"),
        ("https://host:8443/x", "https://host:8443/x"),
    ],
)
def test_verbose_prints_no_password_or_query_of_a_setting(
    value: str, shown: str, expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_REGISTRY", value)
    lines = expertctl("-v", "keys", "list").err.splitlines()
    assert f"setting: registry = {shown} (EXPERT_REGISTRY)" in lines


@pytest.mark.parametrize(
    ("command", "option"),
    [("run", "-q"), ("run", "--verbose"), ("run", "-v"), ("route", "-q"), ("route", "--quiet")],
)
def test_between_words_of_a_text_they_are_refused(
    command: str, option: str, expertctl: CommandRunner
) -> None:
    said = expertctl(command, "how", "does", "grep", option, "work", exit_code=2)
    assert f"error: {option} stands between words of the text\n" in said.err


def test_completion_prints_no_details(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_EXPERTCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "expertctl -v keys li")
    monkeypatch.setenv("COMP_CWORD", "3")
    with pytest.raises(SystemExit):
        app.run([])
    said = capsys.readouterr()
    assert (said.out.split(), said.err) == (["list"], "")


def test_what_is_shown_only_once_is_shown_to_the_quiet_too(
    expertctl: CommandRunner, tmp_path: Path
) -> None:
    said = expertctl("-q", "registry", "init", tmp_path / "r", "--url", "https://r.example.org")
    assert "fingerprint sha256:" in said.err
    key = expertctl("-q", "serve", "key", "new", "me")
    assert "not shown again" in key.err


def test_trust_that_changes_is_told_to_the_quiet_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VERBOSITY, "is_quiet", True)
    tell = make_note_once()
    for _ in range(2):
        tell("sha256:ab was revoked for acme/* of r.example: stolen")
    assert capsys.readouterr().err.count("was revoked") == 1


RED, YELLOW, CYAN, DIM, END = "\x1b[1;31m", "\x1b[1;33m", "\x1b[1;36m", "\x1b[2m", "\x1b[0m"


def test_beginnings_of_messages_are_coloured_where_that_is_wanted(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = expertctl("keys", "lst", exit_code=2).err
    assert "\x1b" not in plain
    for words in (("--color", "always", "keys", "lst"), ("keys", "--color=always", "lst")):
        shown = expertctl(*words, exit_code=2).err
        assert shown.startswith(f"{RED}error:{END} ")
        assert f"\n{CYAN}hint:{END} " in shown
        for code in (RED, CYAN, END):
            shown = shown.replace(code, "")
        assert shown == plain
    assert expertctl("keys", "lst", exit_code=2).err == plain, "the next command has its own"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert RED in expertctl("keys", "lst", exit_code=2).err
    assert "\x1b" not in expertctl("keys", "--color", "never", "lst", exit_code=2).err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in expertctl("keys", "lst", exit_code=2).err


def test_a_terminal_has_colour_unless_it_is_dumb(monkeypatch: pytest.MonkeyPatch) -> None:
    main, child = os.openpty()
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with os.fdopen(main, "rb"), os.fdopen(child, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm-256color")
        assert has_colour(terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert not has_colour(terminal)
        monkeypatch.delenv("TERM")
        assert not has_colour(terminal)


def test_status_is_dim_and_text_of_others_cannot_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(VERBOSITY, "colour", "always")
    note("  [a \x1b[31mstatus]", dim=True)
    warn(["careful"])
    shown = capsys.readouterr().err
    assert shown.startswith(f"{DIM}  [a ")
    assert "\x1b[31m" not in shown
    assert shown.endswith(f"{YELLOW}warning:{END} careful\n")
