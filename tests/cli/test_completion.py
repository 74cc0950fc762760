"""Completion in shells: what a shell asks for, and what it gets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.cli import completion
from expertctl.cli.app import COMMANDS
from expertctl.settings import CONFIG_KEYS, find_home
from expertctl.trust.trust_store import TrustStore
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

pytestmark = pytest.mark.all


def ask(words: str, shell: str = "bash") -> list[str]:
    """Return what a shell is told for a command line that the cursor stands at the end of."""
    asked = {"_EXPERTCTL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
    asked |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    asked |= {"_TYPER_COMPLETE_WORD_TO_COMPLETE": words.rpartition(" ")[2]}
    program = "import sys; from expertctl.cli.app import main; sys.argv[0] = 'expertctl'; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.splitlines() if done.stdout.strip() else []


@pytest.fixture
def published(expertctl: CommandRunner, alice: str, workspace: PackageWorkspace) -> Path:
    """A package in the registry."""
    expertctl("registry", "keys", "add", "me", "--namespace", "acme")
    package = workspace.package(description="Writes SQL.")
    expertctl("publish", package)
    return package


def test_names_of_what_there_is_are_completed(
    expertctl: CommandRunner, published: Path, live: LiveRegistry, workspace: PackageWorkspace
) -> None:
    assert ask("expertctl info ac") == ask("expertctl remove ac") == []
    fingerprint = live.served.registry.index_key.public.key_id
    expertctl("trust", "registry", "add", live.url, "--fingerprint", fingerprint)
    expertctl("install", "acme/sql")
    expertctl("remove", "acme/sql")
    assert ask("expertctl info ac") == ["acme/sql"]
    assert ask("expertctl install ac") == ["acme/sql"], "known, but not installed"
    assert ask("expertctl remove ac") == []
    expertctl("install", "acme/sql")
    expertctl("base", "add", workspace.base_dir)
    [base] = ask("expertctl base remove ")
    installed = ["acme/sql", "acme/sql@1.0.0"]
    for words in ("remove", "why", "stats", "export", "eval", "run -e", "chat --exclude"):
        assert ask(f"expertctl {words} acme/") == installed, words
    assert ask(f"expertctl run --base {base[:2]}") == [base]
    assert ask("expertctl sign x.expert --key ") == ["me"]
    assert ask("expertctl keys export m") == ["me"]
    [host] = ask("expertctl trust registry remove ")
    assert ask(f"expertctl search sql --registry {host[:3]}") == [host]


def test_commands_options_and_settings_are_completed_in_every_shell() -> None:
    assert sorted(ask("expertctl re")) == sorted(n for n in COMMANDS if n.startswith("re"))
    assert "--max-tokens" in ask("expertctl run --max-")
    assert ask("expertctl config set mem") == ["memory_budget"]
    assert ask("expertctl config set ") == sorted(CONFIG_KEYS)
    assert ask("expertctl run --dtype b") == ["bf16"]
    assert ask("expertctl trust re") != []
    assert ask("expertctl pull qwen2.5:1") == ["qwen2.5:1.5b"]
    for shell in ("zsh", "fish"):
        assert any("reindex" in line for line in ask("expertctl rein", shell))


BASH = """
set -e
eval "$(_EXPERTCTL_COMPLETE=source_bash {program})"
COMP_WORDS=({words}) COMP_CWORD={at}
_expertctl_completion {program}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def complete_in_bash(*words: str) -> list[str]:
    """What bash replaces the last word by; the words are split as it splits them."""
    program = Path(sys.executable).parent / "expertctl"
    quoted = " ".join(f"'{word}'" for word in words)
    script = BASH.format(program=program, words=quoted, at=len(words) - 1)
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.split()


def test_bash_completes_a_version_after_the_sign_at_which_it_splits_words(
    expertctl: CommandRunner, workspace: PackageWorkspace, trust: TrustStore
) -> None:
    expertctl("install", workspace.package("acme/sql"))
    assert complete_in_bash("expertctl", "run", "--expert", "acme/s") == [
        "acme/sql", "acme/sql@1.0.0",
    ]  # fmt: skip
    assert complete_in_bash("expertctl", "run", "--expert", "acme/sql", "@") == ["1.0.0"]
    assert complete_in_bash("expertctl", "run", "--expert", "acme/sql", "@", "1.") == ["1.0.0"]
    assert complete_in_bash("expertctl", "remove", "acme/sql@1") == ["acme/sql@1.0.0"]
    assert complete_in_bash("expertctl", "run", "--expert=", "acme/sql", "@", "2") == []
    after = ("expertctl", "run", "--expert", "acme/sql", "@", "1.0.0", ":", "0.5", "--dtype", "b")
    assert complete_in_bash(*after) == ["bf16"]


@pytest.mark.parametrize(
    ("sent", "at", "before", "last"),
    [
        ("x run", 2, ["x", "run"], ""),
        ("x run a @ 1 : 0.5 b", 7, ["x", "run", "a@1:0.5"], "b"),
        ("x run a @", 3, ["x", "run"], "a@"),
        ("x run a @", 4, ["x", "run", "a@"], ""),
        ("x login https : //h : 80", 6, ["x", "login"], "https://h:80"),
    ],
)
def test_words_that_bash_split_are_joined(sent: str, at: int, before: list[str], last: str) -> None:
    assert completion.join_split_words(sent.split(), at) == (before, last)


def test_powershell_gets_a_value_and_a_text_that_is_not_empty(expertctl: CommandRunner) -> None:
    """Its `CompletionResult` refuses empty texts; typer's script splits lines at ``:::``."""
    for words in ("expertctl ", "expertctl run --", "expertctl config get "):
        shown = [line.split(":::") for line in ask(words, "powershell")]
        assert shown
        assert all(len(parts) == 2 and all(parts) for parts in shown)


def test_a_home_that_is_damaged_or_not_there_completes_nothing() -> None:
    home = find_home()
    functions = [f for name, f in vars(completion).items() if name.startswith("complete_")]
    assert len(functions) == 8
    for complete in functions:
        assert complete("zzz") == []
    home.trust.parent.mkdir(parents=True, exist_ok=True)
    home.trust.write_text("damaged")
    home.bases.write_text("no folder")
    home.store.write_text("no folder")
    for complete in functions:
        assert complete("zzz") == []


def test_a_command_is_completed_without_the_libraries_of_others() -> None:
    program = (
        "import sys\nfrom expertctl.cli.app import main\nsys.argv = ['expertctl']\n"
        "try:\n    main()\nfinally:\n"
        "    left = {'numpy', 'httpx', 'cryptography', 'expertctl.cli.run'} & set(sys.modules)\n"
        "    print(sorted(left), file=sys.stderr)"
    )
    asked = {"_EXPERTCTL_COMPLETE": "complete_bash", "COMP_WORDS": "expertctl ru"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **asked, "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.split(), done.stderr.strip()) == (["run"], "[]")
