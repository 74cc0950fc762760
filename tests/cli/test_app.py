"""The entry point: lazy commands, errors as the contract says, nothing but exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl import __version__, errors
from expertctl.cli import app
from expertctl.cli.help import HELP_PAGES
from expertctl.cli.process import get_exit_code
from scripts.help_pages import build_pages

SUBCLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.ExpertError)
]
# contract.md, "Exit codes".
CONTRACT = {
    "error": 1,
    "store": 1,
    "device": 1,
    "usage": 2,
    "media_type": 2,
    "context_length_exceeded": 2,
    "misdirected": 2,
    "slow_body": 2,
    "not_found": 3,
    "unknown_url": 3,
    "missing_dependency": 3,
    "incompatible": 4,
    "base_mismatch": 4,
    "conflict": 4,
    "no_kernels": 4,
    "trust": 5,
    "signature": 5,
    "digest": 5,
    "changed": 5,
    "unsigned": 5,
    "revoked": 5,
    "registry": 6,
    "unauthenticated": 6,
    "forbidden": 6,
    "rate_limit": 6,
    "offline": 6,
    "unreachable": 6,
    "budget": 7,
    "too_large": 7,
    "disk_full": 7,
    "invalid_package": 8,
    "no_answer": 1,
    "timeout": 1,
    "cancelled": 1,
}


@pytest.mark.parametrize("cls", SUBCLASSES, ids=lambda cls: cls.__name__)
def test_every_error_has_the_exit_code_of_the_contract(cls: type[errors.ExpertError]) -> None:
    error = cls("what", ["why"]) if cls is errors.InvalidPackageError else cls("what")  # type: ignore[call-arg]
    assert get_exit_code(error) == CONTRACT[cls.code]


def test_error_codes_are_distinct() -> None:
    codes = [cls.code for cls in SUBCLASSES]
    assert sorted(codes) == sorted(set(codes))


def test_the_docstring_draws_every_error() -> None:
    drawing = errors.__doc__ or ""
    assert [cls.__name__ for cls in SUBCLASSES if cls.__name__ not in drawing] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["instal", "x"], "did you mean `expertctl install`"),
        (
            ["run", "x", "--on-budget", "less"],
            "'less' is not one of refuse, fewer, queue",
        ),
    ],
)
def test_a_slip_is_answered_with_what_may_be_meant(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "read"), [(["remove", "units"], True), (["remove", "acme/units"], False)]
)
def test_what_may_be_meant_is_looked_up_only_for_a_name_at_fault(
    words: list[str], read: bool, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setenv("EXPERT_HOME", str(home))
    monkeypatch.delitem(sys.modules, "expertctl.cli.suggestions", raising=False)
    assert app.run(words) in {2, 3}
    assert ("expertctl.cli.suggestions" in sys.modules) == read


def test_version_is_printed_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"expertctl {__version__}\n"


def test_the_help_lists_every_command_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line in {f"{title}:" for title in app.SECTIONS}]
    assert titles == ["Use:", "Get:", "Make:", "Share:", "Trust:", "Maintain:"]
    assert lines[lines.index("Use:") + 1].split()[0] == "run"
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in app.COMMANDS)


PAGES = json.loads(HELP_PAGES.read_text(encoding="utf-8"))


def test_no_help_imports_a_command_or_a_library_that_only_commands_need() -> None:
    code = (
        f"import sys; from expertctl.cli import app; names = {list(PAGES)}\n"
        "for name in names: assert app.run([*name.split(), '--help']) == 0\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    targets = {f"expertctl.cli.{target.partition(':')[0]}" for target in app.COMMANDS.values()}
    assert loaded & targets == set()
    heavy = {"numpy", "httpx2", "cryptography", "sqlite_utils", "jsonschema_rs", "msgspec", "rich"}
    assert loaded & heavy == set()


def test_the_help_pages_are_those_of_the_commands() -> None:
    """If not, run ``python -m scripts.help_pages``."""
    assert json.loads(json.dumps(build_pages())) == PAGES


@pytest.mark.parametrize("words", [["run"], ["registry"], ["trust", "registry", "add"], []])
def test_a_stored_help_page_reads_as_the_command_itself_prints_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert app.run([*words, "--help"]) == 0
    stored = capsys.readouterr().out
    assert app.run(["-q", *words, "--help"]) == 0
    assert stored == capsys.readouterr().out


def test_help_of_what_is_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["registry", "nothing", "--help"]) == 2
    assert app.run(["registry init", "--help"]) == 2
    assert app.run(["help", "nothing"]) == 2


@pytest.mark.parametrize("name", list(app.COMMANDS))
def test_the_line_of_a_command_is_the_first_sentence_of_its_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = {n: line for section in app.SECTIONS.values() for n, (_, line) in section.items()}
    assert app.run([name, "-h"]) == 0
    paragraph = capsys.readouterr().out.split("\n\n")[1]
    assert " ".join(paragraph.split()).startswith(lines[name])


def test_help_with_a_command_shows_the_help_of_that_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert app.run(["help", "registry", "init"]) == 0
    shown = capsys.readouterr().out
    assert app.run(["registry", "init", "--help"]) == 0
    assert shown == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["unpack"], "Usage: expertctl unpack [OPTIONS] FILE DIR"),
        (["install"], "Usage: expertctl install [OPTIONS] [REF|FILE|hf:ORG/NAME...]"),
        (["publish"], "Usage: expertctl publish [OPTIONS] FILE..."),
        (["run"], "Usage: expertctl run [OPTIONS] [PROMPT...]"),
    ],
)
def test_usage_shows_metavars_that_people_read(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*words, "-h"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == usage


def test_help_is_as_wide_as_the_terminal_up_to_a_hundred_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    widest = {}
    for columns in (80, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        app.run(["run", "--help"])
        widest[columns] = max(map(len, capsys.readouterr().out.splitlines()))
    assert widest[80] <= 80
    assert 80 < widest[100] <= 100
    assert widest[200] == widest[100]


def test_an_example_is_never_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    app.run(["registry", "init", "--help"])
    example = "  expertctl registry init /srv/registry --url https://experts.example.org"
    assert example in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["run", "chat", "serve"])
def test_options_of_routed_experts_are_advanced(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app.run([name, "-h"])
    before, advanced = capsys.readouterr().out.split("\nAdvanced:\n")
    assert "--moe-" not in before
    assert "--moe-miss" in advanced


@pytest.mark.parametrize("name", list(app.COMMANDS))
def test_every_command_has_help_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([name, "--help"]) == 0
    text = capsys.readouterr().out
    if app.COMMANDS[name].endswith("app"):
        assert "Commands" in text
    else:
        assert f"expertctl {name}" in text.split("Example")[1]
        assert "--json" in text
    assert text.startswith(f"Usage: expertctl {name}")


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["frobnicate"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "frobnicate" in err
    assert "\n\nhint: see `expertctl --help`\n" in err


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["keys"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: expertctl keys")


def test_with_json_an_error_is_one_document_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["inspect", "nowhere.expert", "--json"]) == 3
    out, err = capsys.readouterr()
    fields = json.loads(out)["error"]
    assert fields["code"] == "not_found"
    assert "nowhere.expert" in fields["message"]
    assert err.startswith("error: ")


def test_a_reader_that_closes_the_pipe_early_gets_no_traceback(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("expertctl")
    result = subprocess.run(
        ["bash", "-c", f"{program} --help | head -c 1"],
        env={**os.environ, "EXPERT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in result.stderr


def shell(command: str, home: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    program = Path(sys.executable).with_name("expertctl")
    return subprocess.run(
        ["bash", "-c", f"{program} {command}"],
        env={**os.environ, "EXPERT_HOME": str(home), **environment},
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_text_that_stdout_cannot_take_is_escaped(encoding: str, tmp_path: Path) -> None:
    for name in ("漢😀.expert", "\udcff.expert"):
        result = shell(f"verify '{name}' --json", tmp_path, PYTHONIOENCODING=encoding)
        assert result.returncode == 3, result.stderr
        assert json.loads(result.stdout)["error"]["message"] == f"{name}: no such file"
        assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("flag", ["", "--json"])
def test_a_full_stdout_is_an_error_without_a_traceback(flag: str, tmp_path: Path) -> None:
    result = shell(f"config list {flag} > /dev/full", tmp_path)
    assert (result.returncode, result.stderr.splitlines()[0]) == (
        7,
        b"error: the disk: no space left",
    )
    result = shell(f"verify nowhere.expert {flag} > /dev/full", tmp_path)
    assert (result.returncode, result.stderr.splitlines()[0]) == (
        3,
        b"error: nowhere.expert: no such file",
    )


def test_too_little_memory_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_memory() -> None:
        raise MemoryError

    monkeypatch.setattr("expertctl.cli.installed.load_settings", without_memory)
    assert app.run(["list"]) == 7
    assert capsys.readouterr().err.startswith("error: there is not enough memory\n\nhint: ")


def test_a_closed_stream_does_not_put_its_text_into_the_other(tmp_path: Path) -> None:
    result = shell("keys list --json 2>&-", tmp_path)
    assert (result.returncode, json.loads(result.stdout)) == (0, {"keys": []})
    result = shell("keys list --json >&-", tmp_path)
    assert (result.returncode, result.stdout) == (0, b"")
    assert result.stderr.startswith(b"no keys yet")
    result = shell("route - <&-", tmp_path)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"error: the prompt is empty")


def test_a_broken_config_file_is_an_error_that_names_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "config.toml").write_text("= broken")
    assert app.run(["list"]) == 8
    assert str(home / "config.toml") in capsys.readouterr().err


def test_a_home_that_is_a_file_is_an_error_with_a_way_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    home.write_text("not a folder")
    for words in (["list"], ["config", "set", "offline", "true"]):
        assert app.run(words) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: {home}")
        assert f"\n\nhint: EXPERT_HOME is {home}: set it to a writable folder" in err


GROUPS = [
    *(["keys"], ["trust"], ["trust", "registry"], ["config"], ["base"], ["token"]),
    *(["registry"], ["registry", "user"], ["registry", "namespace"], ["registry", "keys"]),
]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_summary_of_every_command_is_whole(
    group: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run([*group, "--help"]) == 0
    lines = capsys.readouterr().out.split("Commands:")[-1].splitlines()
    assert [line for line in lines if line.endswith("...")] == []


def test_the_package_runs_as_the_command() -> None:
    for words, code in ((["--version"], 0), (["frobnicate"], 2)):
        done = subprocess.run(
            [sys.executable, "-m", "expertctl", *words], capture_output=True, text=True
        )
        assert done.returncode == code
        assert done.stdout == (f"expertctl {__version__}\n" if code == 0 else "")
        assert ("hint: see `expertctl --help`" in done.stderr) == (code == 2)
