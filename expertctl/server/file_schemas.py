"""Documents of the generation server whose schemas are files in ``schemas``.

These are the answers of `run --json`, `/v1/infer` and `/v1/route`, the plan that each contains, as
do answers of the other APIs, and the counters of routed experts.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from expertctl.http.openapi import make_reference, refer_to_schema
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.schema.validation import find_schema

PlanDocument = Annotated[dict[str, Any], refer_to_schema("Plan")]
"""A plan in the form of `Plan.to_json`."""
InferAnswer = Annotated[dict[str, Any], refer_to_schema("InferAnswer")]
RouteAnswer = Annotated[dict[str, Any], refer_to_schema("RouteAnswer")]
MoeActivity = Annotated[dict[str, Any], refer_to_schema("MoeActivity")]


def load_file_schemas() -> Mapping[str, JsonObject]:
    """Return the schemas from files by their names in the OpenAPI document."""
    infer, route = _load_schema("infer"), _load_schema("route")
    properties = infer["properties"]
    assert isinstance(properties, dict)
    plan = properties["plan"]
    assert isinstance(plan, dict)
    return {
        "InferAnswer": _describe_schema(
            infer, "An answer, with everything known about how it was generated."
        ),
        "RouteAnswer": _describe_schema(route, "The plan for a prompt, and why."),
        "Plan": _describe_schema(
            plan, "Which experts answer, their weights, and the sampling parameters."
        ),
        **_load_activity_schemas(),
    }


def _load_activity_schemas() -> Mapping[str, JsonObject]:
    """Return the schema of the activity document, with the schema of its layers separate."""
    schema = _load_schema("moe-activity")
    defs = schema.pop("$defs")
    assert isinstance(defs, dict)
    parts = {f"#/$defs/{name}": part for name, part in defs.items()}
    layer = _inline_references(parts["#/$defs/layer"], parts)
    parts["#/$defs/layer"] = make_reference("MoeLayer")
    activity = _inline_references(schema, parts)
    assert isinstance(layer, dict)
    assert isinstance(activity, dict)
    return {
        "MoeActivity": _describe_schema(
            activity,
            "The routed-expert counters; with nothing counted, only `enabled`, `mode`, "
            "`schema` and `layers`.",
        ),
        "MoeLayer": _describe_schema(
            layer, "One layer. Hot experts were in memory; `cold` lanes wait for the others."
        ),
    }


def _inline_references(node: JsonValue, parts: Mapping[str, JsonValue]) -> JsonValue:
    """Replace references in a schema by the parts they name, recursively."""
    match node:
        case {"$ref": str(name)} if name in parts:
            return _inline_references(parts[name], parts)
        case dict():
            return {key: _inline_references(value, parts) for key, value in node.items()}
        case list():
            return [_inline_references(value, parts) for value in node]
        case _:
            return node


def _describe_schema(schema: JsonObject, words: str) -> JsonObject:
    """Add a description to a schema; replace a plan in it by the shared schema of plans."""
    properties = schema["properties"]
    assert isinstance(properties, dict)
    shared: dict[str, JsonValue] = {"plan": make_reference("Plan")} if "plan" in properties else {}
    rest = {name: value for name, value in schema.items() if name not in {"$schema", "$id"}}
    return {**rest, "description": words, "properties": {**properties, **shared}}


def _load_schema(name: str) -> JsonObject:
    schema: JsonObject = json.loads(find_schema(name).read_text(encoding="utf-8"))
    return schema
