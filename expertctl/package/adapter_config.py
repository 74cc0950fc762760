"""The allow-list reading of PEFT's ``adapter_config.json``, one schema for each type of adapter.

Every field that PEFT 0.21 writes has a place in ``schemas/adapter-config-*.schema.json``: it is
read, it is harmless, or it is accepted at its neutral values only (``x-refused`` says why). Nothing
that a configuration names is opened, imported or run. Packages hold nothing else; `find_config`
reads what lies in a directory, and leaves out what has no effect first.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from expertctl.errors import InvalidPackageError
from expertctl.package.config_cleaning import clean_config, without_paths
from expertctl.package.ia3_config import Ia3Config, ia3_config_of
from expertctl.package.lora_config import LoraConfig, lora_config_of
from expertctl.package.soft_prompt_config import SoftPromptConfig, soft_prompt_config_of
from expertctl.plain_text import one_line
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import problems_of, schema_path

MAX_CONFIG_BYTES = 1 << 20
_MAX_SHOWN = 10

AdapterConfig = LoraConfig | Ia3Config | SoftPromptConfig

_SCHEMAS = {
    "LORA": "adapter-config-lora",
    "IA3": "adapter-config-ia3",
    "PROMPT_TUNING": "adapter-config-prompt",
    "P_TUNING": "adapter-config-prompt",
}


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A configuration as it lies in a directory, read: what it means, and what will be packed."""

    config: AdapterConfig
    packed: bytes | None
    """What is left where fields were left out; ``None``: its own bytes."""
    notes: tuple[str, ...]


def parse_config(data: bytes, *, what: str) -> AdapterConfig:
    """Read the ``adapter_config.json`` of a package.

    Raises:
        InvalidPackageError: with every problem, each field named.
    """
    document = load_object(data, what=what, max_bytes=MAX_CONFIG_BYTES)
    return _config_of(document, _schema_of(document, what), what)


def find_config(data: bytes, *, what: str) -> FoundConfig:
    """Read an ``adapter_config.json`` that is to be packed, without what has no effect in it.

    Raises:
        InvalidPackageError: as `parse_config`.
    """
    document = load_object(data, what=what, max_bytes=MAX_CONFIG_BYTES)
    schema = _schema_of(document, what)
    clean = clean_config(document, schema)
    config = _config_of(clean.document, schema, what)
    public = without_paths(clean.document)
    notes = [*clean.notes, *(f"left out of the package: {name}, a path" for name in public.paths)]
    packed = None if public.document == document else encode_config(public.document)
    return FoundConfig(config, packed, tuple(notes))


def encode_config(document: JsonObject) -> bytes:
    """Return the text of a configuration as PEFT writes it: sorted, with two spaces."""
    return json.dumps(document, indent=2, sort_keys=True).encode()


def _schema_of(document: JsonObject, what: str) -> str:
    kind = document.get("peft_type")
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        raise InvalidPackageError(what, [_other_type(kind)])
    return schema


def _config_of(document: JsonObject, schema: str, what: str) -> AdapterConfig:
    problems = _refused(document, schema)
    if problems:
        raise InvalidPackageError(what, problems)
    match schema:
        case "adapter-config-lora":
            return lora_config_of(document, what=what)
        case "adapter-config-ia3":
            return ia3_config_of(document)
        case _:
            return soft_prompt_config_of(document)


def _other_type(kind: JsonValue) -> str:
    if kind is None:
        return "peft_type is missing: this is not the configuration of a PEFT adapter"
    return f"peft_type: {_shown(kind)} is not supported, only {', '.join(_SCHEMAS)} are"


def _refused(document: JsonObject, schema: str) -> list[str]:
    """Return what is wrong with a configuration, one line for each field."""
    known = _fields(schema)
    unknown = [field for field in document if field not in known]
    problems = [_unknown(document, unknown)] if unknown else []
    named = set(unknown)
    for field, (neutral, why) in _neutral_fields(schema).items():
        if field in document and document[field] not in neutral:
            problems.append(f"{field} = {_shown(document[field])} is not supported: {why}")
            named.add(field)
    rest = {field: value for field, value in document.items() if field not in named}
    return [*problems, *problems_of(rest, schema)]


def _unknown(document: JsonObject, unknown: list[str]) -> str:
    """Name the fields that the schema does not know, in one line."""
    named = ((one_line(name[:80]), _shown(document[name])) for name in unknown[:_MAX_SHOWN])
    shown = ", ".join(f"{name} = {value}" for name, value in named)
    more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
    return f"not known here, and not neutral: {shown}{more}; remove what the adapter does not need"


@cache
def _fields(schema: str) -> frozenset[str]:
    return frozenset(json.loads(schema_path(schema).read_text(encoding="utf-8"))["properties"])


@cache
def _neutral_fields(schema: str) -> Mapping[str, tuple[list[Any], str]]:
    rows = json.loads(schema_path(schema).read_text(encoding="utf-8"))["properties"].items()
    return {name: (row["enum"], row["x-refused"]) for name, row in rows if "x-refused" in row}


def _shown(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
