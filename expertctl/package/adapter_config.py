"""The allow-list reading of PEFT's ``adapter_config.json``, one schema for each type of adapter.

Every field that PEFT 0.21 writes has a place in ``schemas/adapter-config-*.schema.json``: it is
read, it is harmless, or it is accepted at its neutral values only (``x-refused`` says why). Nothing
that a configuration names is opened, imported or run.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from expertctl.errors import InvalidPackageError
from expertctl.package.ia3_config import Ia3Config, ia3_config_of
from expertctl.package.lora_config import LoraConfig, lora_config_of
from expertctl.package.soft_prompt_config import SoftPromptConfig, soft_prompt_config_of
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import problems_of, schema_path

MAX_CONFIG_BYTES = 1 << 20

AdapterConfig = LoraConfig | Ia3Config | SoftPromptConfig

_SCHEMAS = {
    "LORA": "adapter-config-lora",
    "IA3": "adapter-config-ia3",
    "PROMPT_TUNING": "adapter-config-prompt",
    "P_TUNING": "adapter-config-prompt",
}


def parse_config(data: bytes, *, what: str) -> AdapterConfig:
    """Read ``adapter_config.json``.

    Raises:
        InvalidPackageError: with every problem, each field named.
    """
    document = load_object(data, what=what, max_bytes=MAX_CONFIG_BYTES)
    kind = document.get("peft_type")
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        raise InvalidPackageError(what, [_other_type(kind)])
    problems = [*_refused(document, schema), *problems_of(document, schema)]
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
    return f"peft_type: {_shown(kind)} is not supported, only {', '.join(_SCHEMAS)} are"


def _refused(document: JsonObject, schema: str) -> list[str]:
    """Name the fields that change what the tensors mean in a way that is not supported."""
    problems = []
    for field, (neutral, why) in _neutral_fields(schema).items():
        if field in document and document[field] not in neutral:
            problems.append(f"{field} = {_shown(document[field])} is not supported: {why}")
    return problems


@cache
def _neutral_fields(schema: str) -> Mapping[str, tuple[list[Any], str]]:
    rows = json.loads(schema_path(schema).read_text(encoding="utf-8"))["properties"].items()
    return {name: (row["enum"], row["x-refused"]) for name, row in rows if "x-refused" in row}


def _shown(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
