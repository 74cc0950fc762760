"""What ``build`` leaves out of an ``adapter_config.json``: fields that cannot change a tensor.

PEFT adds fields with every release, and writes their defaults into every adapter. A field that the
schema does not know is left out where its value is neutral (null, false, 0 or empty), a known one
where it is null and has a default, or where the schema calls the value a label (``x-label``,
``x-labels``, ``x-dropped``) or neutral (``x-neutral``). All else stays, for the schema to accept or
to refuse: packages hold only configurations that the strict reader takes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from expertctl.plain_text import one_line
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.schema.validation import schema_path

MODULES_TO_SAVE = "modules_to_save"
EMBEDDING_NAMES = frozenset(
    {
        "embed_in",
        "embed_out",
        "embed_tokens",
        "lm_head",
        "output_layer",
        "word_embeddings",
        "wte",
    }
)
"""What architectures call the embedding of tokens, and the layer that gives their scores."""
_LABELS = ("base_model_name_or_path", "tokenizer_name_or_path")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_SHOWN = 20
_LONGEST = 60


_QUANTISED = re.compile(r"(?P<base>.+?)(?:-unsloth)?-bnb-(?:4|8)bit", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CleanConfig:
    """A configuration without the fields that have no effect."""

    document: JsonObject
    dropped: tuple[str, ...]
    """The names of the fields that were left out, with their reason."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One line about everything that was left out; none when nothing was."""
        if not self.dropped:
            return ()
        shown = ", ".join(self.dropped[:_SHOWN])
        rest = len(self.dropped) - _SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return (f"left out of the package, because they have no effect: {shown}{more}",)


def clean_config(document: JsonObject, schema: str) -> CleanConfig:
    """Leave out what has no effect on the tensors of an adapter."""
    rows, required, labels = _rows(schema)
    kept: JsonObject = {}
    dropped: list[str] = []
    for field, value in document.items():
        row = {"x-label": ""} if field in labels else rows.get(field)
        why = _why_dropped(field, value, row, is_required=field in required)
        if why is None:
            kept[field] = value
        else:
            dropped.append(f"{one_line(field[:_LONGEST])} ({why})")
    return CleanConfig(kept, tuple(dropped))


@dataclass(frozen=True, slots=True)
class PublicConfig:
    """A configuration that names no path of the machine that it was made on."""

    document: JsonObject
    paths: tuple[str, ...]
    """The fields that held one."""


def without_paths(document: JsonObject) -> PublicConfig:
    """Leave out labels that are paths: they tell of a machine, and mean nothing elsewhere."""
    paths = [field for field in _LABELS if _is_path(document.get(field))]
    kept = {field: None if field in paths else value for field, value in document.items()}
    return PublicConfig(kept, tuple(paths))


def is_hub_name(label: str) -> bool:
    """Tell whether a label names a model rather than a path on a disk."""
    return _HUB_NAME.fullmatch(label) is not None


def full_precision_label(label: str) -> str | None:
    """Return the base that a label of bitsandbytes' quantised copy stands for.

    Such a copy was quantised from the 16-bit weights and is only a way to load them, so an adapter
    trained on it is used with the base itself.
    """
    match = _QUANTISED.fullmatch(label)
    return match["base"] if match is not None else None


def is_neutral(value: JsonValue) -> bool:
    """Tell whether a value means that something is not used: null, false, zero or empty."""
    return not value


def _why_dropped(
    field: str, value: JsonValue, row: Mapping[str, Any] | None, *, is_required: bool
) -> str | None:
    if row is None:
        return f"unknown, {json.dumps(value)}" if is_neutral(value) else None
    if _same(value, row.get("enum", ())):
        return None
    if "x-label" in row or _same(value, row.get("x-labels", ())):
        return "a label"
    if _same(value, row.get("x-neutral", ())):
        return json.dumps(value)
    if value is None and not is_required and not _takes_null(row):
        return "null"
    if field == MODULES_TO_SAVE and _names_embeddings(value):
        return "compared with the base"
    return None


def _is_path(value: JsonValue) -> bool:
    return isinstance(value, str) and value != "" and not is_hub_name(value)


def _same(value: JsonValue, values: Any) -> bool:
    """Tell whether a value is in a list; for JSON, false is not 0."""
    return any(value == other and type(value) is type(other) for other in values)


def _takes_null(row: Mapping[str, Any]) -> bool:
    kinds = row.get("type", ())
    return (
        kinds == "null"
        or (isinstance(kinds, list) and "null" in kinds)
        or any(_takes_null(option) for option in row.get("anyOf", ()))
    )


def _names_embeddings(value: JsonValue) -> bool:
    """Tell whether only embeddings and heads are saved whole; their tensors then show the rest."""
    return isinstance(value, list) and all(
        isinstance(name, str) and name.rpartition(".")[2] in EMBEDDING_NAMES for name in value
    )


@cache
def _rows(
    schema: str,
) -> tuple[Mapping[str, Mapping[str, Any]], frozenset[str], frozenset[str]]:
    """Return the fields of a schema, those that must be there, and those never packed."""
    document = json.loads(schema_path(schema).read_text(encoding="utf-8"))
    dropped = document.get("x-dropped", ())
    return document["properties"], frozenset(document["required"]), frozenset(dropped)
