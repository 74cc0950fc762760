"""Write docs/reference/registry-api.md from the OpenAPI document.

``python -m scripts.registry_api_page``, in the root of the checkout.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from registry_server.api.openapi import ALWAYS, openapi
from registry_server.api.routes import OPERATIONS

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "registry-api.md"
INTRODUCTION = """\
# The registry's API

What `/api/v1` of a registry understands. A running registry describes itself, in OpenAPI 3.1, at
`/api/v1/openapi.json`; this page is made from the same document. Blobs, manifests and tags are at
`/v2/`, as the OCI distribution specification says; the signed [index documents](index-document.md),
which are all that a client believes, at `/tuf/targets/index/NAMESPACE/NAME.json`.

Bodies and answers are JSON. Keys that are not named here are refused. Times are RFC 3339 in UTC,
sizes are bytes. A token comes as `Authorization: Bearer TOKEN`, or as the password of Basic, whose
user name is not looked at; never in the URL or in a cookie. Lists come in pages: `limit` says how
many, `next` in the answer is the `cursor` of the next page and null at the end.

An error is `{"error": {"code", "message", "hint"}}`. 429 and 503 say in `Retry-After` when to come
again. Whoever may not read a namespace gets the same answer for it as for one that does not exist.
Any request can get
%s.
"""


def page(document: dict[str, Any]) -> str:
    """Return the page about an OpenAPI document."""
    *some, last = map(str, ALWAYS)
    parts = [INTRODUCTION % f"{', '.join(some)} and {last}"]
    by_tag: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            text = "\n".join(_operation(method.upper(), path, operation))
            by_tag.setdefault(operation["tags"][0], []).append(text)
    for tag, texts in by_tag.items():
        parts += [f"\n## {tag.capitalize()}\n", *texts]
    parts.append("\n## Bodies and answers\n")
    schemas = document["components"]["schemas"]
    parts += ["\n".join(_schema(name, schemas[name])) for name in sorted(schemas)]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`\n"
    secret = "with or without a token" if {} in operation["security"] else "with a token"
    yield f"{operation['summary']} Asked {secret}."
    for parameter in operation["parameters"]:
        if parameter["in"] == "query":
            yield f"- `?{parameter['name']}=`: {_kind(parameter['schema'])}"
    if "requestBody" in operation:
        yield f"- body: {_kind(operation['requestBody']['content']['application/json']['schema'])}"
    own = [status for status in operation["responses"] if int(status) not in ALWAYS]
    good, *bad = own
    content = operation["responses"][good].get("content")
    answer = _kind(content["application/json"]["schema"]) if content else "no body"
    also = f"; also {', '.join(bad)}" if bad else ""
    yield f"- answers {good}: {answer}{also}\n"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n\n{schema['description']}\n\n| key | what it is |\n|---|---|"
    for key, value in schema["properties"].items():
        optional = "" if key in schema.get("required", ()) else "; may be left out"
        yield f"| `{key}` | {_kind(value)}{optional} |"
    yield ""


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"]) + _described(schema)
    if "enum" in schema:
        words = " or ".join(f"`{json.dumps(word)}`" for word in schema["enum"])
        return words + _described(schema)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_kind(schema['items'])}" if "items" in schema else "list"
    return f"{_format(schema, kind)}{_bounds(schema)}{_described(schema)}"


def _format(schema: dict[str, Any], kind: str) -> str:
    words = {"string": "text", "null": "null", "integer": "integer", "boolean": "true or false"}
    if schema.get("format") == "date-time":
        return "time"
    return "base64" if "contentEncoding" in schema else words.get(kind, kind)


def _bounds(schema: dict[str, Any]) -> str:
    low = schema.get("minimum", schema.get("minLength"))
    high = schema.get("maximum", schema.get("maxLength"))
    bounds = [f"from {low}"] if low is not None else []
    bounds += [f"to {high}"] if high is not None else []
    return f" {' '.join(bounds)}" if bounds else ""


def _described(schema: dict[str, Any]) -> str:
    examples = ", ".join(f"`{each}`" for each in schema.get("examples", ()))
    words = [schema["description"].rstrip(".")] if "description" in schema else []
    words += [f"such as {examples}"] if examples else []
    words += [f"`{schema['default']}` where it is left out"] if schema.get("default") else []
    return f": {'; '.join(words)}" if words else ""


if __name__ == "__main__":
    PAGE.write_text(page(openapi(OPERATIONS, url="")), encoding="utf-8")
