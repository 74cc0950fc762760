"""Documents that are not made of types: those whose schemas are files, and events of our own.

The schemas of what `run --json`, `/v1/infer` and `/v1/route` answer are files in ``schemas``; each
contains a plan, as do answers of the other APIs.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.schema.validation import schema_path

REFERENCE = "#/components/schemas/{name}"


def reference(name: str) -> JsonObject:
    """Return a schema that refers to another one of the document."""
    return {"$ref": REFERENCE.format(name=name)}


PlanDocument = Annotated[dict[str, Any], Meta(extra_json_schema=reference("Plan"))]
"""A plan, as `Plan.to_json` writes it."""


class PromptTokensRead(Struct, frozen=True, kw_only=True):
    """Tokens of a prompt, and how many of them were read for an earlier one."""

    prompt: int
    reused: int


class StartedEvent(Struct, frozen=True, kw_only=True):
    """``started``: the plan is made and the prompt is being read."""

    job_id: str
    submitted_at: str
    plan: PlanDocument
    tokens: PromptTokensRead


class PieceEvent(Struct, frozen=True, kw_only=True):
    """``piece``: more of the text."""

    text: str


def documents() -> Mapping[str, JsonObject]:
    """Return the schemas of files by the names they have in the OpenAPI document."""
    infer, route = _read("infer"), _read("route")
    properties = infer["properties"]
    assert isinstance(properties, dict)
    plan = properties["plan"]
    assert isinstance(plan, dict)
    return {
        "InferAnswer": _described(infer, "An answer, and all that is known of how it came about."),
        "RouteAnswer": _described(route, "The plan that a prompt would have, and why."),
        "Plan": _described(plan, "Which experts answer, how they weigh, and how tokens are drawn."),
        **_activity(),
    }


def _activity() -> Mapping[str, JsonObject]:
    """Return the schema of the activity document, and that of its layers separately."""
    schema = _read("moe-activity")
    defs = schema.pop("$defs")
    assert isinstance(defs, dict)
    parts = {f"#/$defs/{name}": part for name, part in defs.items()}
    layer = _resolved(parts["#/$defs/layer"], parts)
    parts["#/$defs/layer"] = reference("MoeLayer")
    activity = _resolved(schema, parts)
    assert isinstance(layer, dict)
    assert isinstance(activity, dict)
    return {
        "MoeActivity": _described(
            activity,
            "What was counted of routed experts; where that is nothing it has `enabled`, `mode`, "
            "`schema` and `layers` alone.",
        ),
        "MoeLayer": _described(
            layer, "One layer. Hot is what was in memory; `cold` lanes wait for what was not."
        ),
    }


def _resolved(node: JsonValue, parts: Mapping[str, JsonValue]) -> JsonValue:
    """Replace references in a schema by the parts that they name, recursively."""
    match node:
        case {"$ref": str(name)} if name in parts:
            return _resolved(parts[name], parts)
        case dict():
            return {key: _resolved(value, parts) for key, value in node.items()}
        case list():
            return [_resolved(value, parts) for value in node]
        case _:
            return node


def _described(schema: JsonObject, words: str) -> JsonObject:
    """Describe a schema; where it contains a plan, refer to the shared schema of plans."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    shared: dict[str, JsonValue] = {"plan": reference("Plan")} if "plan" in properties else {}
    rest = {name: value for name, value in schema.items() if name not in {"$schema", "$id"}}
    return {**rest, "description": words, "properties": {**properties, **shared}}


def _read(name: str) -> JsonObject:
    schema: JsonObject = json.loads(schema_path(name).read_text(encoding="utf-8"))
    return schema
