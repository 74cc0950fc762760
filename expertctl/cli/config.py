"""``expertctl config``: read and change settings in ``config.toml``.

The file is edited one line at a time, so that the user's comments stay.
"""

import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.completion import complete_settings
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, format_table, print_message, terminal_width
from expertctl.engine_config import ADAPTER_DTYPES, DEVICES, DTYPES, MOE_COLDS, MOE_WARMUPS
from expertctl.errors import InvalidPackageError, UsageError
from expertctl.files import hold_lock, make_folders, write_atomic
from expertctl.registry.address import RegistryAddress
from expertctl.settings import (
    CONFIG_KEYS,
    find_home,
    parse_age,
    parse_count,
    parse_encoder,
    parse_names,
    parse_seconds,
    parse_size,
    parse_switch,
    read_config,
    read_config_file,
)

_BOOLEAN_KEYS = {
    "offline",
    "allow_http",
    "deterministic",
    "moe_learn",
    "history",
    "logs",
    "serve_completions_special_tokens",
    "serve_json_instruction",
    "serve_strict_fields",
}
_CHOICES = {
    "device": DEVICES,
    "dtype": DTYPES,
    "adapter_dtype": ADAPTER_DTYPES,
    "moe_cold": MOE_COLDS,
    "moe_warmup": MOE_WARMUPS,
}
_MAX_VALUE = 1000
_PARSERS: dict[str, Callable[[str], object]] = {
    "memory_budget": parse_size,
    "serve_prefix_cache_memory": parse_size,
    "minimum_release_age": parse_age,
    "minimum_release_age_exclude": parse_names,
    **{key: partial(parse_count, key) for key in ("serve_port", "serve_rows", "serve_queue")},
    **{key: partial(parse_seconds, key) for key in ("serve_timeout", "serve_behind")},
}
"""Parsers that raise for a value that is not valid for its setting."""
LOCK_SECONDS = 30.0
_DEFAULTS = {
    "offline": "no",
    "allow_http": "no",
    "minimum_release_age": "0",
    "device": "cpu",
    "adapter_dtype": "published",
    "deterministic": "no",
    "moe_cold": "auto",
    "moe_warmup": "hybrid",
    "moe_learn": "yes",
    "history": "yes",
    "logs": "no",
    "serve_host": "127.0.0.1",
    "serve_port": "8000",
    "serve_rows": "16",
    "serve_queue": "128",
    "serve_behind": "60",
    "serve_completions_special_tokens": "yes",
    "serve_json_instruction": "yes",
    "serve_strict_fields": "no",
}
"""Values of settings that are not set, written as they could be set."""
_DEFAULT_DESCRIPTIONS = {
    "base": "newest, the demo last",
    "memory_budget": "80% of the memory",
    "dtype": "as stored",
    "encoder": "minilm, else lexical",
    "serve_base": "as for run",
    "serve_url": "from host and port",
    "serve_prefix_cache_memory": "a quarter of the budget",
}
"""Defaults that depend on something else, described for people: short, for a table."""
_NO_DEFAULT = "none"
MEANINGS = {
    "registry": "the registry that commands use without --registry",
    "offline": "reach no registry and no hub",
    "base": "the base that answers if neither an option nor an expert decides",
    "ca_file": "certificates that are trusted in addition to those of the system",
    "allow_http": "reach registries on other machines without encryption",
    "minimum_release_age": "how old a version must be before it is installed",
    "minimum_release_age_exclude": "namespaces and packages that may be newer",
    "device": "where bases are computed",
    "memory_budget": "the most memory that the engine uses",
    "dtype": "the data type of base weights in memory",
    "adapter_dtype": "the data type of experts in memory",
    "deterministic": "bit-identical results, whatever the threads and other requests",
    "moe_cold": "how routed experts that do not fit are reached",
    "moe_warmup": "when routed experts are read",
    "moe_learn": "save which routed experts a base uses",
    "encoder": "what compares prompts with experts: minilm, static, lexical or a folder",
    "history": "keep lines of chats and the last conversation",
    "logs": "keep every prompt and answer of run and chat",
    "server": "the URL of the generation server that answers run and chat",
    "serve_base": "the base of serve",
    "serve_host": "the address that serve listens on",
    "serve_port": "its port",
    "serve_url": "the address that its clients use",
    "serve_rows": "the most sequences generated at the same time",
    "serve_queue": "the most requests that wait",
    "serve_prefix_cache_memory": "the most memory for cached prompts",
    "serve_timeout": "seconds after which a request ends",
    "serve_behind": "seconds after which a client that does not read is dropped",
    "serve_completions_special_tokens": "read control tokens in prompts of /v1/completions",
    "serve_aliases": "other names of models, ALIAS=MODEL, separated by commas",
    "serve_allowed_hosts": "names of this server in Host headers, separated by commas",
    "serve_allowed_origins": "web pages that may use it, separated by commas",
    "serve_strict_fields": "refuse fields of requests that are not supported",
    "serve_json_instruction": "tell the model about the wanted JSON format",
    "serve_tls_cert": "the certificate for https",
    "serve_tls_key": "its private key",
}
"""What each setting means, in a line."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a setting, and where it comes from."""

    key: str
    value: str | None
    source: str
    """``environment``, ``file`` or ``default``."""

    @property
    def default(self) -> str | None:
        """The default value; ``None`` where that depends on something else, or there is none."""
        return _DEFAULTS.get(self.key)

    def describe_default(self) -> str:
        """Return the default for people, described where it depends on something else."""
        return self.default or _DEFAULT_DESCRIPTIONS.get(self.key, _NO_DEFAULT)

    def describe_value(self) -> str:
        """Return the value for people, with its source unless that is the file."""
        if self.value is None:
            return f"({self.describe_default()})"
        return self.value + (" from environment" if self.source == "environment" else "")


def read_settings(path: Path, environment: Mapping[str, str]) -> list[Setting]:
    """Return every known setting.

    Raises:
        InvalidPackageError: when the file cannot be read as settings.
    """
    stored = read_config(path)
    return [_build_setting(key, stored, environment) for key in CONFIG_KEYS]


def set_value(path: Path, key: str, value: str) -> None:
    """Write one setting; everything else in the file stays as it is.

    Raises:
        UsageError: for an unknown key or an invalid value.
        InvalidPackageError: when the file cannot be read, or not be edited line by line.
    """
    check_key(key)
    _edit_file(path, key, _check_value(key, value))


def unset_value(path: Path, key: str) -> None:
    """Remove one setting from the file.

    Raises:
        UsageError: for an unknown key.
        InvalidPackageError: when the file cannot be read, or not be edited line by line.
    """
    if key not in read_config_file(path):  # one of another version may be in it
        check_key(key)
    _edit_file(path, key, None)


def check_key(key: str) -> None:
    """Raise `UsageError` for an unknown key, with the settings that may be meant."""
    if key not in CONFIG_KEYS:
        near = get_close_matches(key[:80], CONFIG_KEYS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(CONFIG_KEYS)}"
        raise UsageError(f"{key[:80]!r} is not a setting", hint=hint)


def _build_setting(key: str, stored: Mapping[str, str], environment: Mapping[str, str]) -> Setting:
    given = environment.get(CONFIG_KEYS[key])
    if given:
        return Setting(key, given, "environment")
    return Setting(key, stored.get(key), "file" if key in stored else "default")


def _edit_file(path: Path, key: str, value: str | None) -> None:
    make_folders(path.parent, mode=0o700)
    with hold_lock(path.with_name(f"{path.name}.lock"), guarded=path, seconds=LOCK_SECONDS):
        stored = read_config_file(path)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        changed = _replace_line(text, key, "" if value is None else f"{key} = {_quote(value)}\n")
        wanted = {k: v for k, v in stored.items() if k != key}
        _check_result(path, changed, wanted if value is None else {**wanted, key: value})
        write_atomic(path, changed.encode("utf-8"), mode=0o600)


def _replace_line(text: str, key: str, line: str) -> str:
    pattern = re.compile(rf"^[ \t]*{re.escape(key)}[ \t]*=.*(?:\n|\Z)", re.MULTILINE)
    if pattern.search(text):
        return pattern.sub(lambda _: line, text, count=1)
    end = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{end}{line}"


def _check_result(path: Path, text: str, wanted: Mapping[str, str]) -> None:
    """Check that a line-wise change did what it should and nothing else."""
    try:
        found = {key: str(value) for key, value in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError:
        found = {}
    if found != wanted:
        problems = ["it is written in a way that cannot be changed line by line"]
        raise InvalidPackageError(str(path), problems, hint="edit it by hand")


def _check_value(key: str, value: str) -> str:
    if not value.isprintable() or not 0 < len(value) <= _MAX_VALUE:
        raise UsageError(
            f"{value[:40]!r} cannot be the value of {key}",
            hint=f"one line of 1 to {_MAX_VALUE} characters",
        )
    if key in _CHOICES and value not in _CHOICES[key]:
        hint = f"supported: {', '.join(_CHOICES[key])}"
        raise UsageError(f"{key} {value[:40]!r} is not supported", hint=hint)
    if key in _PARSERS:
        _PARSERS[key](value)
    if key in _BOOLEAN_KEYS:
        parse_switch(key, value)
    return value


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


app = CommandGroup("Show and change settings.")
SettingKey = Annotated[
    str,
    typer.Argument(
        metavar="KEY", autocompletion=complete_settings, help=f"One of {', '.join(CONFIG_KEYS)}."
    ),
]


@app.command()
def get(key: SettingKey, as_json: JsonFlag = False) -> None:
    """Print one setting. The environment overrides config.toml.

    Example: expertctl config get memory_budget
    """
    check_key(key)
    found = next(setting for setting in _load_all_settings() if setting.key == key)
    if found.value is None:
        print_message(f"{key} is not set; the default is {found.describe_default()}")
    emit(_build_document(found), found.value or "", as_json=as_json)


@app.command("set")
def set_setting(
    key: SettingKey,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The new value.")],
    as_json: JsonFlag = False,
) -> None:
    """Write one setting to config.toml.

    Example: expertctl config set memory_budget 512MiB
    """
    if key == "registry":  # refuse what no command could use, or a password
        RegistryAddress.parse(value, allow_http=True)
    if key == "encoder":
        value = parse_encoder(value)
    set_value(find_home().config, key, value)
    found = next(setting for setting in _load_all_settings() if setting.key == key)
    if found.source == "environment":
        print_message(f"{CONFIG_KEYS[key]} is set in the environment and takes precedence")
    emit({"key": key, "value": value}, f"{key} = {value}", as_json=as_json)


@app.command()
def unset(key: SettingKey, as_json: JsonFlag = False) -> None:
    """Remove one setting from config.toml.

    Example: expertctl config unset memory_budget
    """
    unset_value(find_home().config, key)
    emit({"key": key, "value": None}, f"{key} is no longer set", as_json=as_json)


@app.command("list")
def list_settings(as_json: JsonFlag = False) -> None:
    """List all settings: the value, or the default in parentheses, and what it means.

    Example: expertctl config list
    """
    found = _load_all_settings()
    document = {"settings": [_build_document(setting) for setting in found]}
    emit(document, _format_settings(found, terminal_width(sys.stdout)), as_json=as_json)


def _format_settings(found: Sequence[Setting], width: int) -> str:
    """Return a table; where it is wider than the terminal, each meaning has a line of its own."""
    rows = [[each.key, each.describe_value(), MEANINGS[each.key]] for each in found]
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if not width or sum(columns) + 2 * len(columns) <= width:
        return format_table(["KEY", "VALUE (DEFAULT)", "MEANING"], rows)
    return "\n".join(f"{key} = {value}\n    {meaning}" for key, value, meaning in rows)


def _load_all_settings() -> list[Setting]:
    return read_settings(find_home().config, os.environ)


def _build_document(setting: Setting) -> dict[str, object]:
    return {
        "key": setting.key,
        "value": setting.value,
        "source": setting.source,
        "default": setting.default,
        "meaning": MEANINGS[setting.key],
    }
