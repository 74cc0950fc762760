"""Settings: sizes, precedence of the environment over config.toml, clear refusals."""

from datetime import timedelta
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, UsageError
from expertctl.settings import (
    CONFIG_KEYS,
    format_limit,
    load_settings,
    parse_age,
    parse_names,
    parse_size,
)


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


@pytest.mark.parametrize("text", ["= broken", "device = 'a\x00'"])
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


@pytest.mark.parametrize(
    ("text", "minutes"), [("0", 0), ("90m", 90), ("12h", 720), ("3d", 4320), ("2 w", 20160)]
)
def test_a_span_of_time_is_read(text: str, minutes: int) -> None:
    assert parse_age(text) == timedelta(minutes=minutes)


@pytest.mark.parametrize("text", ["", "3", "3 days", "-1d", "1.5d", "3D", "999999d", "\u0661d"])
def test_what_is_no_span_of_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="span of time"):
        parse_age(text)


@pytest.mark.parametrize("key", ["offline", "allow_http", "deterministic"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(key: str, home: Path) -> None:
    """Whoever writes EXPERT_OFFLINE=on must not be online."""
    name = CONFIG_KEYS[key]
    with pytest.raises(UsageError, match=f"{key}: 'on' is not true or false") as refused:
        load_settings({"EXPERT_HOME": str(home), name: "on"})
    assert refused.value.hint == f"{key} is true or false; {name} is 1 or 0"
    for text, meant in (("TRUE", True), ("yes", True), ("1", True), ("False", False), ("", False)):
        found = load_settings({"EXPERT_HOME": str(home), name: text})
        assert getattr(found, key) is meant


def test_who_need_not_wait_is_a_list_of_names(home: Path) -> None:
    home.mkdir()
    text = 'minimum_release_age = "3d"\nminimum_release_age_exclude = "acme, beta/sql"\n'
    (home / "config.toml").write_text(text)
    settings = load_settings()
    assert settings.minimum_release_age == timedelta(days=3)
    assert settings.minimum_release_age_exclude == ("acme", "beta/sql")
    with pytest.raises(UsageError, match="not a package name"):
        parse_names("acme/*")


def test_how_registries_are_reached_is_read(home: Path) -> None:
    home.mkdir()
    (home / "config.toml").write_text('ca_file = "~/ca.pem"\nallow_http = true\noffline = "yes"\n')
    settings = load_settings({"EXPERT_HOME": str(home)})
    assert settings.ca_file == Path("~/ca.pem").expanduser()
    assert (settings.allow_http, settings.offline) == (True, True)
    plain = load_settings({"EXPERT_HOME": str(home), "EXPERT_ALLOW_HTTP": "0"})
    assert plain.allow_http is False


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("512MiB", "512 MiB (536.9 MB)"), ("512MB", "512 MB"), ("2GB", "2 GB"), ("1.5", None),
        ("1500MB", "1500 MB"), ("900kB", "900 kB"), ("64KiB", "64 KiB (65.5 kB)"), ("0", "0 B"),
        ("1TiB", "1 TiB (1.1 TB)"), ("1234567890", "1.2 GB"), ("999", "999 B"),
    ],
)  # fmt: skip
def test_a_limit_is_shown_as_it_was_typed(typed: str, shown: str | None) -> None:
    if shown is None:
        with pytest.raises(UsageError):
            parse_size(typed)
    else:
        assert format_limit(parse_size(typed)) == shown


def test_how_a_server_answers_is_read(home: Path) -> None:
    home.mkdir()
    kept = "serve_port = 8080\nserve_rows = '4'\nserve_timeout = 1.5\nserve_tls_key = '~/k.pem'\n"
    (home / "config.toml").write_text(kept)
    serve = load_settings({"EXPERT_HOME": str(home), "EXPERT_SERVE_ROWS": "8"}).serve
    assert (serve.port, serve.rows, serve.timeout) == (8080, 8, 1.5)
    assert serve.tls_key == Path("~/k.pem").expanduser()
    assert (serve.base, serve.queue, serve.tls_cert) == (None, None, None)
    assert serve.prefix_cache_memory is None


def test_the_memory_for_keys_and_values_of_earlier_requests_is_a_size(home: Path) -> None:
    environment = {"EXPERT_HOME": str(home), "EXPERT_SERVE_PREFIX_CACHE_MEMORY": "300MB"}
    assert load_settings(environment).serve.prefix_cache_memory == 300_000_000
    with pytest.raises(UsageError, match="is not a size"):
        load_settings({**environment, "EXPERT_SERVE_PREFIX_CACHE_MEMORY": "a third"})


def test_lists_of_a_server_have_commas(home: Path) -> None:
    home.mkdir()
    kept = "serve_aliases = 'gpt=auto, haiku=tiny'\nserve_strict_fields = 'yes'\n"
    (home / "config.toml").write_text(kept)
    environment = {"EXPERT_HOME": str(home), "EXPERT_SERVE_ALLOWED_HOSTS": "host.docker.internal"}
    serve = load_settings(environment).serve
    assert serve.aliases == ("gpt=auto", "haiku=tiny")
    assert serve.allowed_hosts == ("host.docker.internal",)
    assert (serve.allowed_origins, serve.strict_fields) == ((), True)


@pytest.mark.parametrize(("text", "expected"), [("no", False), ("1", True), (None, None)])
def test_control_tokens_of_completions_are_text_where_a_team_has_settled_that(
    text: str | None, expected: bool | None, home: Path
) -> None:
    kept = {} if text is None else {"EXPERT_SERVE_COMPLETIONS_SPECIAL_TOKENS": text}
    serve = load_settings({"EXPERT_HOME": str(home), **kept}).serve
    assert serve.completions_special_tokens is expected


@pytest.mark.parametrize(("text", "expected"), [("no", False), ("1", True), (None, None)])
def test_models_are_not_told_the_form_of_json_where_a_team_has_settled_that(
    text: str | None, expected: bool | None, home: Path
) -> None:
    kept = {} if text is None else {"EXPERT_SERVE_JSON_INSTRUCTION": text}
    assert load_settings({"EXPERT_HOME": str(home), **kept}).serve.json_instruction is expected


@pytest.mark.parametrize("key", ["serve_port", "serve_rows", "serve_queue"])
@pytest.mark.parametrize("text", ["-1", "1.5", "many", "100001", "9" * 30, "\u0661"])
def test_what_is_no_count_is_refused(key: str, text: str, home: Path) -> None:
    with pytest.raises(UsageError, match=f"^{key}: .* is not a whole number from"):
        load_settings({"EXPERT_HOME": str(home), CONFIG_KEYS[key]: text})


@pytest.mark.parametrize("key", ["serve_timeout", "serve_behind"])
@pytest.mark.parametrize("text", ["0", "0.0", "-1", "1e3", "nan", "inf", "86401", "soon"])
def test_what_is_no_time_is_refused(key: str, text: str, home: Path) -> None:
    with pytest.raises(UsageError, match=f"^{key}: .* is not a number of seconds"):
        load_settings({"EXPERT_HOME": str(home), CONFIG_KEYS[key]: text})
