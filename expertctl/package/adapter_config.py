"""Reading PEFT's ``adapter_config.json`` with an allow-list: one schema for each type of adapter.

Every field that PEFT 0.21 writes has a place in ``schemas/adapter-config-*.schema.json``: it is
used, harmless, or accepted only at its neutral values (``x-refused`` says why). Nothing that a
configuration names is opened, imported or run.

PEFT adds fields with every release and writes their defaults into every adapter. So `clean_config`
drops what cannot change a tensor: a field unknown to the schema if its value is neutral (null,
false, 0 or empty); a known one if it is null and has a default, or if the schema calls the value a
label (``x-label``, ``x-labels``, ``x-dropped``) or neutral (``x-neutral``). The schema accepts or
refuses the rest. `parse_adapter_config` reads the cleaned form that packages hold,
`read_source_config` any configuration in a directory.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from expertctl.errors import InvalidPackageError, to_single_line
from expertctl.package.peft_config import (
    Ia3Config,
    LoraConfig,
    SoftPromptConfig,
    build_ia3_config,
    build_lora_config,
    build_soft_prompt_config,
)
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import find_problems, find_schema

MODULES_TO_SAVE = "modules_to_save"
EMBEDDING_NAMES = frozenset(
    {"embed_in", "embed_out", "embed_tokens", "lm_head", "output_layer", "word_embeddings", "wte"}
)
"""The names of token embeddings and output heads in all architectures."""
_LABEL_FIELDS = ("base_model_name_or_path", "tokenizer_name_or_path")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_MAX_SHOWN_FIELDS = 20
_LONGEST = 60


_QUANTISED = re.compile(r"(?P<base>.+?)(?:-unsloth)?-bnb-(?:4|8)bit", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CleanConfig:
    """A configuration without the fields that have no effect."""

    document: JsonObject
    dropped: tuple[str, ...]
    """The names of the dropped fields, each with its reason."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One line about all dropped fields; none if nothing was dropped."""
        if not self.dropped:
            return ()
        shown = ", ".join(self.dropped[:_MAX_SHOWN_FIELDS])
        rest = len(self.dropped) - _MAX_SHOWN_FIELDS
        more = f" and {rest} more" if rest > 0 else ""
        return (f"left out of the package, because they have no effect: {shown}{more}",)


def clean_config(document: JsonObject, schema: str) -> CleanConfig:
    """Drop the fields that have no effect on the tensors of an adapter."""
    rules = _read_schema(schema)
    rows, required, labels = rules["properties"], rules["required"], rules.get("x-dropped", ())
    kept: JsonObject = {}
    dropped: list[str] = []
    for field, value in document.items():
        row = {"x-label": ""} if field in labels else rows.get(field)
        why = _explain_drop(field, value, row, is_required=field in required)
        if why is None:
            kept[field] = value
        else:
            dropped.append(f"{to_single_line(field[:_LONGEST])} ({why})")
    return CleanConfig(kept, tuple(dropped))


def is_hub_name(label: str) -> bool:
    """Tell whether a label names a model rather than a path on a disk."""
    return _HUB_NAME.fullmatch(label) is not None


def find_full_precision_label(label: str) -> str | None:
    """Return the base that the label of a bitsandbytes copy stands for; None for other labels.

    Such a copy was quantised from the 16-bit weights only to load them, so an adapter trained on it
    is used with the base itself.
    """
    match = _QUANTISED.fullmatch(label)
    return match["base"] if match is not None else None


def is_neutral(value: JsonValue) -> bool:
    """Tell whether a value means "not used": null, false, zero or empty."""
    return not value


def _explain_drop(
    field: str, value: JsonValue, row: Mapping[str, Any] | None, *, is_required: bool
) -> str | None:
    if row is None:
        return f"unknown, {json.dumps(value)}" if is_neutral(value) else None
    if _is_among(value, row.get("enum", ())):
        return None
    if "x-label" in row or _is_among(value, row.get("x-labels", ())):
        return "a label"
    if _is_among(value, row.get("x-neutral", ())):
        return json.dumps(value)
    if value is None and not is_required and not _accepts_null(row):
        return "null"
    if field == MODULES_TO_SAVE and _names_embeddings(value):
        return "compared with the base"
    return None


def _is_path(value: JsonValue) -> bool:
    return isinstance(value, str) and value != "" and not is_hub_name(value)


def _is_among(value: JsonValue, values: Any) -> bool:
    """Tell whether a value is in a list; in JSON, false is not 0."""
    return any(value == other and type(value) is type(other) for other in values)


def _accepts_null(row: Mapping[str, Any]) -> bool:
    kinds = row.get("type", ())
    return (
        kinds == "null"
        or (isinstance(kinds, list) and "null" in kinds)
        or any(_accepts_null(option) for option in row.get("anyOf", ()))
    )


def _names_embeddings(value: JsonValue) -> bool:
    """Tell whether only embeddings and heads are saved whole; their tensors then decide."""
    return isinstance(value, list) and all(
        isinstance(name, str) and name.rpartition(".")[2] in EMBEDDING_NAMES for name in value
    )


@cache
def _read_schema(schema: str) -> Mapping[str, Any]:
    document: Mapping[str, Any] = json.loads(find_schema(schema).read_text(encoding="utf-8"))
    return document


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
class SourceConfig:
    """A configuration read from a directory, and the form in which it is packed."""

    config: AdapterConfig
    packed_bytes: bytes | None
    """The cleaned configuration, if anything was dropped; ``None``: the file as it is."""
    notes: tuple[str, ...]


def parse_adapter_config(data: bytes, *, what: str) -> AdapterConfig:
    """Parse the ``adapter_config.json`` of a package.

    Raises:
        InvalidPackageError: with every problem, naming the fields.
    """
    document = load_object(data, what=what, max_bytes=MAX_CONFIG_BYTES)
    return _build_config(document, _choose_schema(document, what), what)


def read_source_config(data: bytes, *, what: str) -> SourceConfig:
    """Parse an ``adapter_config.json`` to be packed; raises as `parse_adapter_config`."""
    document = load_object(data, what=what, max_bytes=MAX_CONFIG_BYTES)
    schema = _choose_schema(document, what)
    clean = clean_config(document, schema)
    config = _build_config(clean.document, schema, what)
    # Labels that are paths reveal a machine and mean nothing elsewhere.
    paths = [field for field in _LABEL_FIELDS if _is_path(clean.document.get(field))]
    public = {field: None if field in paths else v for field, v in clean.document.items()}
    notes = [*clean.notes, *(f"left out of the package: {name}, a path" for name in paths)]
    as_peft_does = json.dumps(public, indent=2, sort_keys=True).encode()
    return SourceConfig(config, None if public == document else as_peft_does, tuple(notes))


def _choose_schema(document: JsonObject, what: str) -> str:
    kind = document.get("peft_type")
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None:
        raise InvalidPackageError(what, [_describe_other_type(kind)])
    return schema


def _build_config(document: JsonObject, schema: str, what: str) -> AdapterConfig:
    problems = _find_problems(document, schema)
    if problems:
        raise InvalidPackageError(what, problems)
    match schema:
        case "adapter-config-lora":
            return build_lora_config(document, what=what)
        case "adapter-config-ia3":
            return build_ia3_config(document)
        case _:
            return build_soft_prompt_config(document)


def _describe_other_type(kind: JsonValue) -> str:
    if kind is None:
        return "peft_type is missing: this is not the configuration of a PEFT adapter"
    return f"peft_type: {_format_value(kind)} is not supported, only {', '.join(_SCHEMAS)} are"


def _find_problems(document: JsonObject, schema: str) -> list[str]:
    rows = _read_schema(schema)["properties"]
    unknown = [field for field in document if field not in rows]
    problems = [_describe_unknown_fields(document, unknown)] if unknown else []
    named = set(unknown)
    for field, row in rows.items():
        if "x-refused" in row and field in document and document[field] not in row["enum"]:
            value, why = _format_value(document[field]), row["x-refused"]
            problems.append(f"{field} = {value} is not supported: {why}")
            named.add(field)
    rest = {field: value for field, value in document.items() if field not in named}
    return [*problems, *find_problems(rest, schema)]


def _describe_unknown_fields(document: JsonObject, unknown: list[str]) -> str:
    named = (
        (to_single_line(name[:80]), _format_value(document[name])) for name in unknown[:_MAX_SHOWN]
    )
    shown = ", ".join(f"{name} = {value}" for name, value in named)
    more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
    return f"not known here, and not neutral: {shown}{more}; remove what the adapter does not need"


def _format_value(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
