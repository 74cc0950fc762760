"""``expertctl config``: settings that stay, in ``config.toml``."""

import os
from typing import Annotated

import typer

from expertctl.cli.help import CommandGroup
from expertctl.cli.output import JsonFlag, emit, note, table
from expertctl.config_file import Setting, check_key, read_settings, set_value, unset_value
from expertctl.registry.address import RegistryAddress
from expertctl.settings import CONFIG_KEYS, find_home, parse_encoder

app = CommandGroup("Show and change settings.")
Key = Annotated[str, typer.Argument(metavar="KEY", help=f"One of {', '.join(CONFIG_KEYS)}.")]


@app.command()
def get(key: Key, as_json: JsonFlag = False) -> None:
    """Print one setting. The environment counts before config.toml.

    Example: expertctl config get memory_budget
    """
    check_key(key)
    found = next(setting for setting in _settings() if setting.key == key)
    if found.value is None:
        note(f"{key} is not set; the default is {found.describe_default()}")
    emit(_document(found), found.value or "", as_json=as_json)


@app.command("set")
def set_(
    key: Key,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="What it shall be.")],
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
    found = next(setting for setting in _settings() if setting.key == key)
    if found.source == "environment":
        note(f"{CONFIG_KEYS[key]} is set in the environment and wins")
    emit({"key": key, "value": value}, f"{key} = {value}", as_json=as_json)


@app.command()
def unset(key: Key, as_json: JsonFlag = False) -> None:
    """Take one setting out of config.toml.

    Example: expertctl config unset memory_budget
    """
    unset_value(find_home().config, key)
    emit({"key": key, "value": None}, f"{key} is not set any more", as_json=as_json)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """List all settings, with where each comes from or its default.

    Example: expertctl config list
    """
    found = _settings()
    rows = [[s.key, s.describe(), "-" if s.source == "default" else s.source] for s in found]
    document = {"settings": [_document(setting) for setting in found]}
    emit(document, table(["KEY", "VALUE", "SOURCE"], rows), as_json=as_json)


def _settings() -> list[Setting]:
    return read_settings(find_home().config, os.environ)


def _document(setting: Setting) -> dict[str, object]:
    return {
        "key": setting.key,
        "value": setting.value,
        "source": setting.source,
        "default": setting.default,
    }
