"""Write docs/reference/registry-api.md and serve-api.md from the OpenAPI documents.

``python -m scripts.api_pages``, in the root of the checkout.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertctl.http.openapi import EVENT_STREAM, build_openapi
from expertctl.server import operations as server
from registry_server.api import routes as registry

Security = list[dict[str, Any]]
TITLES = {"openai": "OpenAI", "native": "Our own"}
REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
_REGISTRY = """\
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


_SERVE = """\
# The API of the generation server

What [`expertctl serve`](../how-to/serve.md) understands. A running server describes itself, in
OpenAPI 3.1, at `/openapi.json`; this page is made from the same document. The addresses of OpenAI
and Anthropic are as those publish them, and take further fields of ours; `/v1/infer` is our own and
tells all.

Bodies and answers are JSON, and a body must say so. In the calls of OpenAI and Anthropic,
and in `/v1/infer` and `/v1/jobs`, fields that are not named here are ignored: `x-expertctl-ignored`
names them, and so does a warning in `expertctl.warnings`, of our own calls in `warnings`. Fields
that would change what the answer is, such as `guided_json` or `images`, are refused by name.
`--strict-fields` refuses all unknown fields, as our other calls always do. A slash at the end of a
path changes nothing. As soon as there is an API key, every call demands one but those that anybody
may ask; it comes as `Authorization: Bearer KEY` or as `x-api-key`. Without keys, anybody on the
server's own machine may ask all. With `"stream": true` an answer comes as server-sent events; an
error on the way is the last of them.

An error has the form of the API that was asked: ours is `{"error": {"code", "message", "hint"}}`.
A conversation that is longer than the context has the code `context_length_exceeded`, with
OpenAI's or Anthropic's words. 429 and 503 say in `Retry-After` when to come again; keys with limits
are told what is left in `x-ratelimit-…`, for Anthropic's calls `anthropic-ratelimit-…`. Jobs, and
what is kept for the next turn, are known to the key alone that made them. Any request can get
%s.
"""


@dataclass(frozen=True, slots=True)
class ApiPage:
    """One page: where it is, what it begins with, what it is made from."""

    name: str
    introduction: str
    document: dict[str, Any]
    always: Sequence[int]
    describe_security: Callable[[Security], str]
    """How it says who may ask."""

    @property
    def path(self) -> Path:
        """Where it is."""
        return REFERENCE / self.name

    def text(self) -> str:
        """Return it."""
        *some, last = map(str, self.always)
        parts = [self.introduction % f"{', '.join(some)} and {last}", *_write_body(self)]
        return "\n".join(parts)


def list_pages() -> list[ApiPage]:
    """Return all of them."""
    serve = server.describe_api(keyed=True)
    return [
        ApiPage(
            "registry-api.md",
            _REGISTRY,
            build_openapi(registry.API, registry.OPERATIONS, url=""),
            registry.API.common_statuses,
            _describe_token_security,
        ),
        ApiPage(
            "serve-api.md",
            _SERVE,
            build_openapi(serve, server.OPERATIONS, url="", strict=False),
            serve.common_statuses,
            _describe_key_security,
        ),
    ]


def _write_body(page: ApiPage) -> Iterator[str]:
    document = page.document
    by_tag: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            text = "\n".join(_write_operation(page, method.upper(), path, operation))
            by_tag.setdefault(operation["tags"][0], []).append(text)
    for tag, texts in by_tag.items():
        yield f"\n## {TITLES.get(tag, tag.capitalize())}\n"
        yield from texts
    yield "\n## Bodies and answers\n"
    schemas = document["components"]["schemas"]
    for name in sorted(schemas):
        yield "\n".join(_describe_schema(name, schemas[name]))


def _write_operation(
    page: ApiPage, method: str, path: str, operation: dict[str, Any]
) -> Iterator[str]:
    yield f"### `{method} {path}`\n"
    yield f"{operation['summary']}{page.describe_security(operation['security'])}"
    for parameter in operation["parameters"]:
        if parameter["in"] == "query":
            yield f"- `?{parameter['name']}=`: {_describe_type(parameter['schema'])}"
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        yield f"- body: {_describe_type(schema)}"
    own = [status for status in operation["responses"] if int(status) not in page.always]
    good, *bad = own
    answer = _describe_response(operation["responses"][good].get("content", {}))
    also = f"; also {', '.join(bad)}" if bad else ""
    yield f"- answers {good}: {answer}{also}\n"


def _describe_token_security(security: Security) -> str:
    return f" Asked with{' or without' if {} in security else ''} a token."


def _describe_key_security(security: Security) -> str:
    return " Anybody may ask." if security == [{}] else ""


def _describe_response(content: dict[str, Any]) -> str:
    kinds = [
        _describe_type(each["schema"]) for media, each in content.items() if media != EVENT_STREAM
    ]
    events = (
        f", or events: {_describe_type(content[EVENT_STREAM]['schema'])}"
        if EVENT_STREAM in content
        else ""
    )
    return f"{' or '.join(kinds) or 'no body'}{events}"


def _describe_schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n\n{schema['description']}\n\n| key | what it is |\n|---|---|"
    for key, value in schema["properties"].items():
        optional = "" if key in schema.get("required", ()) else "; may be left out"
        yield f"| `{key}` | {_describe_type(value)}{optional} |"
    yield ""


def _describe_type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_describe_type(each) for each in schema[several]) + _list_schemas(
                schema
            )
    if isinstance(schema.get("type"), list):
        return " or ".join(_describe_type({**schema, "type": kind}) for kind in schema["type"])
    if "enum" in schema:
        words = " or ".join(f"`{json.dumps(word)}`" for word in schema["enum"])
        return words + _list_schemas(schema)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return f"list of {_describe_type(schema['items'])}" if "items" in schema else "list"
    return f"{_describe_format(schema, kind)}{_describe_bounds(schema)}{_list_schemas(schema)}"


def _describe_format(schema: dict[str, Any], kind: str) -> str:
    words = {"string": "text", "null": "null", "integer": "integer", "boolean": "true or false"}
    if schema.get("format") == "date-time":
        return "time"
    return "base64" if "contentEncoding" in schema else words.get(kind, kind)


def _describe_bounds(schema: dict[str, Any]) -> str:
    low = schema.get("minimum", schema.get("minLength"))
    high = schema.get("maximum", schema.get("maxLength"))
    bounds = [f"from {low}"] if low is not None else []
    bounds += [f"to {high}"] if high is not None else []
    return f" {' '.join(bounds)}" if bounds else ""


def _list_schemas(schema: dict[str, Any]) -> str:
    examples = ", ".join(f"`{each}`" for each in schema.get("examples", ()))
    words = [schema["description"].rstrip(".")] if "description" in schema else []
    words += [f"such as {examples}"] if examples else []
    words += [f"`{schema['default']}` where it is left out"] if schema.get("default") else []
    return f": {'; '.join(words)}" if words else ""


if __name__ == "__main__":
    for page in list_pages():
        page.path.write_text(page.text(), encoding="utf-8")
