"""``expertctl config`` as a person types it, and the file it writes."""

import os
import re
import stat
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.cli.config import MEANINGS, Setting, read_settings, set_value, unset_value
from expertctl.engine.memory.host import MACHINE_SHARE
from expertctl.errors import InvalidPackageError, StoreError, UsageError
from expertctl.files import make_folders
from expertctl.server.settings import ServeSettings
from expertctl.settings import CONFIG_KEYS, find_home, load_settings, read_config
from tests.cli.command_runner import CommandRunner, expertctl

__all__ = ["expertctl"]


@pytest.mark.parametrize("command", ["get", "set", "unset", "list"])
def test_every_command_has_an_example(command: str, expertctl: CommandRunner) -> None:
    assert f"expertctl config {command}" in expertctl("config", command, "--help").out


def test_a_setting_is_written_read_and_taken_back(expertctl: CommandRunner, home: Path) -> None:
    assert expertctl("config", "set", "memory_budget", "512MiB").out == "memory_budget = 512MiB\n"
    assert load_settings().memory_budget == 512 << 20
    assert expertctl("config", "get", "memory_budget").out == "512MiB\n"
    assert stat.S_IMODE((home / "config.toml").stat().st_mode) == 0o600
    expertctl("config", "unset", "memory_budget")
    said = expertctl("config", "get", "memory_budget", "--json")
    wanted = {"key": "memory_budget", "value": None, "source": "default", "default": None}
    assert said.document == {**wanted, "meaning": MEANINGS["memory_budget"]}


def test_all_settings_are_listed_with_their_source(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expertctl("config", "set", "device", "cpu")
    monkeypatch.setenv("EXPERT_OFFLINE", "1")
    lines = expertctl("config", "list").out.splitlines()[1:]
    rows = [re.split(" {2,}", line)[:2] for line in lines]
    assert [row[0] for row in rows] == list(CONFIG_KEYS)
    assert ["device", "cpu"] in rows
    assert ["offline", "1 from environment"] in rows
    assert ["registry", "(none)"] in rows
    assert ["serve_rows", "(16)"] in rows
    documents = expertctl("config", "list", "--json").document["settings"]
    device = {"key": "device", "value": "cpu", "source": "file", "default": "cpu"}
    assert {**device, "meaning": MEANINGS["device"]} in documents
    rest = {"source": "default", "default": "8000", "meaning": MEANINGS["serve_port"]}
    assert {"key": "serve_port", "value": None, **rest} in documents


def test_a_setting_that_was_never_set_is_told_with_its_default(expertctl: CommandRunner) -> None:
    said = expertctl("config", "get", "serve_queue")
    assert (said.out, said.err) == ("", "serve_queue is not set; the default is 128\n")
    told = expertctl("config", "get", "memory_budget").err
    assert told == f"memory_budget is not set; the default is {MACHINE_SHARE:.0%} of the memory\n"


def test_the_listed_defaults_are_those_that_commands_use(expertctl: CommandRunner) -> None:
    listed = expertctl("config", "list", "--json").document["settings"]
    defaults = {each["key"]: each["default"] for each in listed if each["default"] is not None}
    unset = ServeSettings()
    assert defaults == {
        "offline": "no",
        "allow_http": "no",
        "minimum_release_age": "0",
        "device": "cpu",
        "adapter_dtype": unset.engine.adapter_dtype,
        "deterministic": "yes" if unset.engine.deterministic else "no",
        "moe_cold": unset.engine.moe_cold,
        "moe_warmup": unset.engine.moe.warmup,
        "moe_learn": "yes" if unset.engine.moe.learns else "no",
        "history": "yes" if load_settings().history else "no",
        "logs": "yes" if load_settings().logs else "no",
        "serve_host": unset.host,
        "serve_port": str(unset.port),
        "serve_rows": str(unset.engine.batching.rows),
        "serve_queue": str(unset.engine.batching.queue),
        "serve_behind": f"{unset.behind_seconds:g}",
        "serve_completions_special_tokens": "yes" if unset.completions_special_tokens else "no",
        "serve_json_instruction": "yes" if unset.json_instruction else "no",
        "serve_strict_fields": "yes" if unset.strict_fields else "no",
    }


def test_every_default_could_be_set(expertctl: CommandRunner) -> None:
    for each in expertctl("config", "list", "--json").document["settings"]:
        if each["default"] is not None:
            expertctl("config", "set", each["key"], each["default"])
    assert load_settings().serve.rows == ServeSettings().engine.batching.rows


def test_the_environment_wins_and_that_is_said(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERT_DEVICE", "cuda")
    said = expertctl("config", "set", "device", "cpu")
    assert "EXPERT_DEVICE is set in the environment and takes precedence" in said.err
    assert expertctl("config", "get", "device").out == "cuda\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("no_such_key", "1"),
        ("memory_budget", "much"),
        ("memory_budget", "-1"),
        ("offline", "perhaps"),
        ("allow_http", "perhaps"),
        ("device", ""),
        ("device", "tpu"),
        ("serve_port", "65536"),
        ("serve_rows", "0"),
        ("serve_behind", "soon"),
        ("serve_completions_special_tokens", "perhaps"),
        ("serve_json_instruction", "perhaps"),
        ("device", "a\nregistry = 'evil'"),
        ("device", "\x1b[31m"),
        ("registry", "x" * 1001),
    ],
)
def test_what_is_no_setting_is_refused(
    key: str, value: str, expertctl: CommandRunner, home: Path
) -> None:
    expertctl("config", "set", key, value, exit_code=2)
    assert not (home / "config.toml").exists()


def test_an_unknown_key_is_refused_everywhere(expertctl: CommandRunner) -> None:
    for words in (("get",), ("unset",)):
        assert "known: registry" in expertctl("config", *words, "nothing", exit_code=2).err


def test_what_is_no_address_of_a_registry_is_not_kept(expertctl: CommandRunner, home: Path) -> None:
    for value in ("https://me:pa55word@hub.example", "https://hub.example/path"):
        said = expertctl("config", "set", "registry", value, exit_code=2)
        assert "address of a registry" in said.err
        assert "pa55word" not in said.err
    assert not (home / "config.toml").exists()


def test_what_is_no_encoder_is_not_kept(expertctl: CommandRunner, home: Path) -> None:
    said = expertctl("config", "set", "encoder", "Mini-LM", exit_code=2)
    assert "'Mini-LM' is neither an encoder nor a directory" in said.err
    assert "minilm, static, lexical, or a directory" in said.err
    assert not (home / "config.toml").exists()


def test_the_directory_of_an_encoder_counts_in_any_folder(
    expertctl: CommandRunner, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bert").mkdir()
    monkeypatch.chdir(tmp_path)
    expertctl("config", "set", "encoder", "bert")
    assert read_config(home / "config.toml") == {"encoder": str(tmp_path / "bert")}


def test_comments_and_other_settings_stay(expertctl: CommandRunner, home: Path) -> None:
    make_folders(home)
    path = home / "config.toml"
    path.write_text('# mine\ndevice = "cuda"  # for now\n\n  offline=true\n# the end')
    expertctl("config", "set", "device", "cpu")
    expertctl("config", "set", "encoder", "lexical")
    assert path.read_text() == (
        '# mine\ndevice = "cpu"\n\n  offline=true\n# the end\nencoder = "lexical"\n'
    )
    expertctl("config", "unset", "offline")
    assert read_config(path) == {"device": "cpu", "encoder": "lexical"}


@pytest.mark.parametrize("text", ["device = [", 'device = """\nregistry = 1\n"""'])
def test_a_file_that_cannot_be_changed_safely_is_left_alone(
    text: str, expertctl: CommandRunner, home: Path
) -> None:
    make_folders(home)
    path = home / "config.toml"
    path.write_text(text)
    expertctl("config", "set", "registry", "https://example.com", exit_code=8)
    assert path.read_text() == text


PRINTABLE = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" "),
    min_size=1,
    max_size=40,
)


@given(values=st.lists(st.tuples(st.sampled_from(["registry", "encoder"]), PRINTABLE)))
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_printable_value_is_read_back(values: list[tuple[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.unlink(missing_ok=True)
    expected: dict[str, str] = {}
    for key, value in values:
        set_value(path, key, value)
        expected[key] = value
        assert read_config(path) == expected
    for key in list(expected):
        unset_value(path, key)
        del expected[key]
        assert read_config(path) == expected


def test_the_library_refuses_as_the_command_does(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    with pytest.raises(UsageError, match="'maybe' is not true or false"):
        set_value(path, "offline", "maybe")
    assert not path.exists()
    path.write_text("= broken")
    with pytest.raises(InvalidPackageError, match=r"config\.toml"):
        read_settings(path, {})


def test_a_file_that_another_process_is_changing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    monkeypatch.setattr("expertctl.cli.config.LOCK_SECONDS", 0.01)
    with FileLock(f"{path}.lock"), pytest.raises(StoreError, match="another process"):
        set_value(path, "device", "cpu")


def test_a_setting_that_means_nothing_is_replaced(expertctl: CommandRunner, home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text('memory_budget = "abc"\n')
    assert "abc" in expertctl("config", "list").out
    expertctl("config", "set", "memory_budget", "1GB")
    assert (home / "config.toml").read_text() == 'memory_budget = "1GB"\n'


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("dtype", "fp8", "float32, bf16, int8, int4, gguf"),
        ("dtype", "INT8", "float32, bf16, int8, int4, gguf"),
        ("adapter_dtype", "bf16", "published, fp16, int8"),
        ("deterministic", "perhaps", "true or false"),
        ("moe_cold", "mapped", "auto, read, map, direct"),
    ],
)
def test_how_numbers_are_held_is_checked_before_it_is_kept(
    expertctl: CommandRunner, key: str, value: str, known: str
) -> None:
    said = expertctl("config", "set", key, value, exit_code=2)
    assert known in said.err
    assert expertctl("config", "get", key, "--json").document["value"] is None


def test_a_setting_of_another_version_is_told_and_ignored(
    expertctl: CommandRunner, home: Path
) -> None:
    home.mkdir()
    path = home / "config.toml"
    path.write_text('# mine\nnew_thing = 3\nbase = "a"\n[table]\nx = 1\n')
    said = expertctl("config", "get", "base")
    assert said.out == "a\n"
    assert said.err.splitlines() == [
        f'warning: {path}: "{name}" is not a setting of this version, and is ignored'
        for name in ("new_thing", "table")
    ]
    assert "is not a setting" in expertctl("config", "set", "new_thing", "4", exit_code=2).err
    assert "is not a setting" in expertctl("config", "unset", "newer_thing", exit_code=2).err
    path.write_text('# mine\nnew_thing = 3\nbase = "a"\n')
    expertctl("config", "unset", "new_thing")
    assert path.read_text() == '# mine\nbase = "a"\n'
    path.write_text('# mine\nnew_thing = 3\nbase = "a"\n')
    expertctl("config", "set", "base", "b")
    assert path.read_text() == '# mine\nnew_thing = 3\nbase = "b"\n'
    expertctl("config", "unset", "base")
    assert path.read_text() == "# mine\nnew_thing = 3\n"


def test_every_setting_is_listed_with_its_meaning(expertctl: CommandRunner, home: Path) -> None:
    lines = expertctl("config", "list").out.splitlines()
    assert lines[0].split() == ["KEY", "VALUE", "(DEFAULT)", "MEANING"]
    for line, (key, meaning) in zip(lines[1:], MEANINGS.items(), strict=True):
        assert line.startswith(f"{key} ")
        assert line.endswith(f" {meaning}")


def test_a_narrow_terminal_gets_every_meaning_to_its_end(
    expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expertctl.cli.config.terminal_width", lambda _: 80)
    lines = expertctl("config", "list").out.splitlines()
    assert lines[::2] == [f"{each.key} = {each.describe_value()}" for each in read_settings_now()]
    assert [line.strip() for line in lines[1::2]] == list(MEANINGS.values())


def read_settings_now() -> list[Setting]:
    return read_settings(find_home().config, os.environ)
