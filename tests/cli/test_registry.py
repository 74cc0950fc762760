"""``expertctl registry``: what a person sees who runs one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.cli import registry as command
from expertctl.errors import format_install_command
from registry_server.settings import read_settings
from tests.cli.command_runner import CommandRunner, expertctl  # noqa: F401  # a fixture
from tests.registry_server.operation.server_process import run_server

FINGERPRINT_LENGTH = len("sha256:") + 64


def test_init_prints_the_token_alone_and_says_what_comes_next(
    expertctl: CommandRunner,  # noqa: F811
    tmp_path: Path,
) -> None:
    said = expertctl("registry", "init", tmp_path / "registry")
    assert said.out.strip().startswith("xpt_")
    assert said.out.count("\n") == 1
    assert said.out.strip() not in said.err
    trust = "expertctl trust registry add http://127.0.0.1:8080 --fingerprint sha256:"
    assert trust in said.err
    assert f"expertctl registry serve {tmp_path / 'registry'}" in said.err


def test_init_tells_programs_the_same(expertctl: CommandRunner, tmp_path: Path) -> None:  # noqa: F811
    words = ("registry", "init", tmp_path / "registry", "--url", "https://experts.example.org")
    document = expertctl(*words, "--read", "public", "--json").document
    assert document["url"] == "https://experts.example.org"
    assert len(document["fingerprint"]) == FINGERPRINT_LENGTH
    assert document["trust"].endswith(document["fingerprint"])
    assert (document["user"], document["token"][:4]) == ("admin", "xpt_")
    assert 'read = "public"' in (tmp_path / "registry" / "registry.toml").read_text()


@pytest.mark.parametrize(("days", "code"), [("30", 0), ("0", 8), ("4000", 8)])
def test_init_takes_the_interval_of_index_documents(
    expertctl: CommandRunner,  # noqa: F811
    tmp_path: Path,
    days: str,
    code: int,
) -> None:
    data = tmp_path / "shop"
    expertctl("registry", "init", data, "--index-interval-days", days, exit_code=code)
    assert (data / "registry.toml").exists() == (code == 0)
    if code == 0:
        assert read_settings(data).index_interval_days == int(days)


def test_a_second_init_is_refused_and_says_how_to_get_a_token(
    expertctl: CommandRunner,  # noqa: F811
    tmp_path: Path,
) -> None:
    first = expertctl("registry", "init", tmp_path / "registry").out
    said = expertctl("registry", "init", tmp_path / "registry", exit_code=2)
    assert "hint: " in said.err
    assert "--new-admin-token" in said.err
    again = expertctl("registry", "init", tmp_path / "registry", "--new-admin-token").out
    assert again.startswith("xpt_")
    assert again != first


@pytest.mark.parametrize(
    ("words", "code", "fact"),
    [
        (("init", "{}", "--read", "everybody"), 2, "everybody"),
        (("init", "{}", "--url", "nonsense"), 8, "url 'nonsense' is not"),
        (("init", "{}", "--port", "99999"), 8, "port 99999 is not a port"),
        (("init", "{}", "--new-admin-token"), 3, "there is no registry here"),
        (("serve", "{}"), 3, "there is no registry here"),
        (("backup", "{}", "{}-backup"), 3, "there is no registry here"),
        (("restore", "{}", "{}-again"), 3, "there is no finished backup here"),
        (("gc", "{}"), 3, "there is no registry here"),
    ],
)
def test_a_slip_is_told(
    words: tuple[str, ...],
    code: int,
    fact: str,
    expertctl: CommandRunner,  # noqa: F811
    tmp_path: Path,
) -> None:
    said = expertctl(
        "registry", *(word.format(tmp_path / "registry") for word in words), exit_code=code
    )
    assert fact in said.err


def test_serving_others_in_clear_text_is_refused(
    expertctl: CommandRunner,  # noqa: F811
    tmp_path: Path,
) -> None:
    expertctl("registry", "init", tmp_path / "registry")
    words = ("registry", "serve", tmp_path / "registry", "--host", "0.0.0.0", "--port", "0")
    said = expertctl(*words, exit_code=2)
    assert "tokens would travel in clear text" in said.err
    assert "--insecure-http" in said.err


def test_serve_says_where_and_ends_when_told(tmp_path: Path, expertctl: CommandRunner) -> None:  # noqa: F811
    expertctl("registry", "init", tmp_path / "registry")
    with run_server(tmp_path / "registry") as server:
        assert server.get("/healthz")[0] == 200
        assert server.stop() == 0
    assert f"listening on http://127.0.0.1:{server.port}\n" in server.log.read_text()


def test_serve_in_this_process_too(
    tmp_path: Path,
    expertctl: CommandRunner,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address is told once it answers; then somebody ends it."""
    expertctl("registry", "init", tmp_path / "registry")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    print_message = command.print_message

    def then_end(text: str) -> None:
        print_message(text)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "print_message", then_end)
    try:
        said = expertctl("registry", "serve", tmp_path / "registry", "--port", "0", "--json")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert said.document["url"] == f"http://127.0.0.1:{said.document['port']}"


def test_a_backup_is_restored(tmp_path: Path, expertctl: CommandRunner) -> None:  # noqa: F811
    data, backup, again = (tmp_path / name for name in ("registry", "backup", "again"))
    expertctl("registry", "init", data)
    assert expertctl("registry", "backup", data, backup).out == "0 blobs, 0 B; 0 new, 0 B\n"
    assert expertctl("registry", "restore", backup, again).out == "0 blobs, 0 B\n"
    same = (data / "keys" / "index.pem").read_bytes() == (again / "keys" / "index.pem").read_bytes()
    assert same
    document = expertctl("registry", "backup", again, backup, "--json").document
    assert document == {
        "target": str(backup), "blobs": 0, "bytes": 0, "new_blobs": 0, "new_bytes": 0
    }  # fmt: skip


def test_gc_says_what_it_does_and_what_it_would(tmp_path: Path, expertctl: CommandRunner) -> None:  # noqa: F811
    expertctl("registry", "init", tmp_path / "registry")
    stray = tmp_path / "registry" / "uploads" / ("a" * 32)
    stray.write_bytes(b"left")
    os.utime(stray, (0, 0))
    would = expertctl("registry", "gc", tmp_path / "registry", "--dry-run", "--json").document
    assert would == {"blobs": 0, "bytes": 0, "uploads": 1, "removed": False}
    assert stray.exists()
    assert expertctl("registry", "gc", tmp_path / "registry").out.startswith("removed: 0 blobs")
    assert not stray.exists()


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['starlette'] = None; sys.modules['sqlalchemy'] = None\n"
        "from expertctl.cli.app import main\n"
        f"main(['registry', 'init', {str(tmp_path / 'registry')!r}])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "the registry server is not installed" in result.stderr
    assert format_install_command("registry") in result.stderr


def test_help_shows_an_example(expertctl: CommandRunner) -> None:  # noqa: F811
    for name in ("init", "serve", "backup", "restore", "gc"):
        assert f"expertctl registry {name}" in expertctl("registry", name, "--help").out


def test_errors_are_json_where_that_is_asked(expertctl: CommandRunner, tmp_path: Path) -> None:  # noqa: F811
    said = expertctl("registry", "serve", tmp_path / "none", "--json", exit_code=3)
    assert json.loads(said.out)["error"]["code"] == "not_found"
