"""Settings: sizes, precedence of the environment over config.toml, clear refusals."""

from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, UsageError
from expertctl.settings import load_settings, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1 TiB", 2**40),
        ("3k", 3000),
        ("3KiB", 3072),
        ("42", 42),
        ("0", 0),
    ],
)
def test_a_size_is_read_in_the_units_of_the_contract(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5GB", "1e9", "MB", "1 XB", "9" * 20, "1m"])
def test_another_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_the_environment_wins_over_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('memory_budget = "1GB"\ndevice = "cpu"\n')
    environment = {"EXPERT_HOME": str(tmp_path), "EXPERT_MEMORY_BUDGET": "2GB"}
    settings = load_settings(environment)
    assert (settings.memory_budget, settings.device) == (2 * 10**9, "cpu")
    assert settings.home.store == tmp_path / "store"


def test_without_anything_the_home_is_below_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load_settings({}).home.root == Path("/home/someone/.expert")
    assert load_settings({}).memory_budget is None


@pytest.mark.parametrize("text", ["unknown = 1", "= broken", "device = 'a\x00'", "[trust]\nx = 1"])
def test_a_config_file_that_is_not_settings_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(InvalidPackageError):
        load_settings({"EXPERT_HOME": str(tmp_path)})


@pytest.mark.parametrize("text", ["= broken", f"a = {'[' * 100_000}", f"a = {'9' * 10_000}"])
def test_a_config_file_that_is_no_toml_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(InvalidPackageError, match="not valid TOML"):
        load_settings({"EXPERT_HOME": str(tmp_path)})


def test_a_home_that_nobody_has_is_named() -> None:
    with pytest.raises(UsageError, match=r"^~nosuchuser/x: there is no such home") as caught:
        load_settings({"EXPERT_HOME": "~nosuchuser/x"})
    assert "EXPERT_HOME" in caught.value.hint
