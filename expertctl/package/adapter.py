"""Adapters: `AdapterSpec`, their parts, and the strict reading of PEFT's ``adapter_config.json``.

Each part changes one module or the prompt, and the kinds form a closed set. Tensor names are
PEFT's; `expertctl.package.adapter_spec` reads them.

Configurations are read with an allow-list, one schema for each type of adapter. Every field that
PEFT 0.21 writes has a place in ``schemas/adapter-config-*.schema.json``: it is used, harmless, or
accepted only at its neutral values (``x-refused`` says why). Nothing that a configuration names is
opened, imported or run.

PEFT adds fields with every release and writes their defaults into every adapter. So `clean_config`
drops what cannot change a tensor: a field unknown to the schema if its value is neutral (null,
false, 0 or empty); a known one if it is null and has a default, or if the schema calls the value a
label (``x-label``, ``x-labels``, ``x-dropped``) or neutral (``x-neutral``). The schema accepts or
refuses the rest. `parse_adapter_config` reads the cleaned form that packages hold,
`read_source_config` any configuration in a directory.
"""

import json
import re
from collections.abc import Iterable, Mapping
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
from expertctl.schema.manifest import AdapterKind, Dtype
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.schema.validation import find_problems, find_schema

PEFT_PREFIX = "base_model.model."
"""The prefix of a module name in PEFT's tensor names."""
KIND_NAMES: Mapping[AdapterKind, str] = {
    "lora": "LoRA",
    "dora": "DoRA",
    "ia3": "IA³",
    "soft_prompt": "soft prompt",
}
"""The display names of the kinds."""
_WRAPPERS = (
    ("_orig_mod.", "save the model that torch.compile was given, not the one that it returned"),
    ("_fsdp_wrapped_module.", "gather the model that FSDP wrapped, and save again"),
    ("_checkpoint_wrapped_module.", "save the model without the wrapper of its checkpoints"),
)
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class StackSlice:
    """The part of one expert in tensors that hold the LoRA of all experts of a layer."""

    expert: int
    experts: int
    first: int
    """The first of its outputs in a stack that holds several modules."""
    transposed: bool
    """Whether A is stored in the tensor of B and B in that of A, both transposed."""


@dataclass(frozen=True, slots=True)
class Lora:
    """``f + weight * scale * B A x`` on one linear layer; ``a`` and ``b`` are tensor names.

    Shapes are those of this module alone, even if its tensors are stacked.
    """

    module: str
    a: str
    b: str
    rank: int
    scale: float
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    stacked: StackSlice | None = None

    @property
    def inputs(self) -> int:
        """The input size of the layer."""
        return self.a_shape[1]

    @property
    def outputs(self) -> int:
        """The output size of the layer."""
        return self.b_shape[0]

    @property
    def module_after_stack(self) -> str | None:
        """For the last expert of a stack, the module that would follow; no fitting base has it."""
        if self.stacked is None or self.stacked.expert + 1 < self.stacked.experts:
            return None
        experts, _, name = self.module.rsplit(".", 2)
        return f"{experts}.{self.stacked.experts}.{name}"


@dataclass(frozen=True, slots=True)
class Dora:
    """``c (g + scale B A x)`` for ``g``, the layer without bias; ``c`` is magnitude over row norm.

    ``magnitude`` names a tensor [outputs].
    """

    module: str
    a: str
    b: str
    magnitude: str
    rank: int
    scale: float
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """The input size of the layer."""
        return self.a_shape[1]

    @property
    def outputs(self) -> int:
        """The output size of the layer."""
        return self.b_shape[0]


@dataclass(frozen=True, slots=True)
class Ia3:
    """One factor for each input, or each output, of a linear layer; ``vector`` names the tensor."""

    module: str
    vector: str
    on_input: bool
    """Whether it scales the input, as in feed-forward modules: [1, size]; else [size, 1]."""
    size: int


@dataclass(frozen=True, slots=True)
class SoftPrompt:
    """Virtual tokens before the prompt; ``embeddings`` names a tensor [tokens, width]."""

    embeddings: str
    tokens: int
    width: int


Part = Lora | Dora | Ia3 | SoftPrompt
"""One thing that an adapter changes."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter: its parts sorted by module name, and the expected contents of its files."""

    kind: AdapterKind
    parts: tuple[Part, ...]
    dtype: Dtype
    rank: int | None
    """For LoRA and DoRA, the rank of modules without a pattern."""
    tokens: int | None
    """For soft prompts, the number of virtual tokens."""
    tensors: int


def describe_wrapper(name: str) -> str | None:
    """Return which wrapper of a model a tensor name contains, which PEFT would not find."""
    if name.startswith(f"{PEFT_PREFIX}base_model."):
        return f"the prefix {PEFT_PREFIX!r} is doubled: an adapter was saved inside another one"
    for part, why in _WRAPPERS:
        if part in name:
            return f"{part!r} is in the name: {why}"
    return None


def truncate_problems(problems: Iterable[str]) -> list[str]:
    """Merge problems with the same cause into one line, and return the first `_MAX_PROBLEMS`.

    The text before the first colon of a problem is the thing, the text after it the cause.
    """
    by_cause: dict[str, list[str]] = {}
    for problem in problems:
        thing, colon, cause = problem.partition(": ")
        by_cause.setdefault(cause if colon else problem, []).append(thing)
    merged = [
        cause if things[0] == cause else f"{_format_several(things)}: {cause}"
        for cause, things in by_cause.items()
    ]
    rest = len(merged) - _MAX_PROBLEMS
    return [*merged[:_MAX_PROBLEMS], *([f"… and {rest} more"] if rest > 0 else [])]


def _format_several(things: list[str]) -> str:
    return things[0] if len(things) == 1 else f"{things[0]} and {len(things) - 1} more"


MODULES_TO_SAVE = "modules_to_save"
EMBEDDING_NAMES = frozenset(
    {"embed_in", "embed_out", "embed_tokens", "lm_head", "output_layer", "word_embeddings", "wte"}
)
"""The names of token embeddings and output heads in all architectures."""
_LABEL_FIELDS = ("base_model_name_or_path", "tokenizer_name_or_path")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_MAX_SHOWN_FIELDS = 20
_LONGEST = 60


_QUANTISED = re.compile(
    r"(?P<base>.+?)(?:-unsloth)?-bnb-(?:4|8)bit|(?P<mlx>mlx-community/.+?)-(?:[2-8]bit|bf16|fp16)",
    re.IGNORECASE,
)


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
    """Return the base that the label of a copy for bitsandbytes or MLX stands for, or None.

    Such a copy was quantised from the 16-bit weights only to load them, so an adapter trained on it
    is used with the base itself.
    """
    match = _QUANTISED.fullmatch(label)
    return (match["base"] or match["mlx"]) if match is not None else None


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
