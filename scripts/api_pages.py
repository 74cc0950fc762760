"""Write docs/reference/registry-api.md and serve-api.md from the OpenAPI documents.

Run ``python -m scripts.api_pages`` in the root of the checkout.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertctl.http.openapi import (
    Description,
    DescriptionPart,
    build_openapi,
    describe_answer,
    describe_fields,
    describe_type,
    title_group,
)
from expertctl.server import operations as server
from registry_server.api import routes as registry

Security = list[dict[str, Any]]
REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
_REGISTRY = """\
# The registry's API

This page describes `/api/v1` of a registry. It is generated from the OpenAPI 3.1 document that a
running registry serves at `/api/v1/openapi.json`. Blobs, manifests and tags are at `/v2/`, by the
OCI distribution specification; the signed [index documents](index-document.md), which are the only
source that clients trust, are at `/tuf/targets/index/NAMESPACE/NAME.json`.

Requests and responses are JSON. Unknown keys are refused. Times are RFC 3339 in UTC, sizes are in
bytes. Send a token as `Authorization: Bearer TOKEN`, or as the password of Basic authentication,
whose user name is ignored; tokens in URLs or cookies are ignored. Lists come in pages of at most
`limit` items: pass `next` of a page as `cursor` to get the following one; it is null on the last.

An error has the form `{"error": {"code", "message", "hint"}}`. With 429 and 503, `Retry-After` says
when to retry. Without the right to read a namespace, the response is the same as if it did not
exist. Any request can return
%s.
"""


_SERVE = """\
# The API of the generation server

This page describes the API of [`expertctl serve`](../how-to/serve.md). It is generated from the
OpenAPI 3.1 document that a running server serves at `/openapi.json`, and for people at `/docs`.
The endpoints of the OpenAI and Anthropic APIs follow their published documentation and accept
further fields; `/v1/infer` is native and returns everything that is known about an answer.

Requests and responses are JSON, and a request must have that content type. The endpoints of OpenAI
and Anthropic, `/v1/infer` and `/v1/jobs` ignore unknown fields: the header `x-expertctl-ignored`
names them, and so does a warning in `expertctl.warnings` (native API: `warnings`). Unknown fields
that would change the answer, such as `guided_json` or `images`, are refused by name. With
`--strict-fields`, all unknown fields are refused, as the other native endpoints always do. A
trailing slash in a path is ignored.

If there is an API key, every endpoint requires one, except those that are marked public. Send it as
`Authorization: Bearer KEY` or as `x-api-key`. Without keys, only the machine of the server has
access, without restrictions. With `"stream": true`, the answer is a stream of server-sent events;
an error during the stream is its last event.

An error has the form of the API of the endpoint; the native form is
`{"error": {"code", "message", "hint"}}`. A conversation that exceeds the context has the code
`context_length_exceeded`, with the wording of OpenAI or Anthropic. With 429 and 503, `Retry-After`
says when to retry. For keys with limits, responses contain `x-ratelimit-…`, or
`anthropic-ratelimit-…` from the endpoints of Anthropic. Jobs and cached prefixes are visible only
to the key that created them. Any request can return
%s.
"""


@dataclass(frozen=True, slots=True)
class ApiPage:
    """A reference page, built from an OpenAPI document."""

    name: str
    introduction: str
    document: dict[str, Any]
    always: Sequence[int]
    describe_security: Callable[[Security], str]
    """Describes the permissions that an operation requires."""

    @property
    def path(self) -> Path:
        """The path of the page."""
        return REFERENCE / self.name

    def text(self) -> str:
        """Return the text of the page."""
        *some, last = map(str, self.always)
        parts = [self.introduction % f"{', '.join(some)} and {last}", *_write_body(self)]
        return "\n".join(parts)


def list_pages() -> list[ApiPage]:
    """Return all reference pages."""
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
        yield f"\n## {title_group(tag)}\n"
        yield from texts
    yield "\n## Schemas\n"
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
            yield f"- `?{parameter['name']}=`: {_to_markdown(describe_type(parameter['schema']))}"
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        yield f"- body: {_to_markdown(describe_type(schema))}"
    own = [status for status in operation["responses"] if int(status) not in page.always]
    good, *bad = own
    answer = _to_markdown(describe_answer(operation["responses"][good].get("content", {})))
    also = f"; also {', '.join(bad)}" if bad else ""
    yield f"- returns {good}: {answer}{also}\n"


def _describe_token_security(security: Security) -> str:
    return " The token is optional." if {} in security else " Requires a token."


def _describe_key_security(security: Security) -> str:
    return " Public." if security == [{}] else ""


def _describe_schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}\n\n{schema['description']}\n\n| key | value |\n|---|---|"
    for field in describe_fields(schema):
        optional = "" if field.is_required else "; optional"
        yield f"| `{field.name}` | {_to_markdown(field.type)}{optional} |"
    yield ""


def _to_markdown(description: Description) -> str:
    return "".join(map(_mark_part, description))


def _mark_part(part: DescriptionPart) -> str:
    match part.kind:
        case "text":
            return part.text
        case "code":
            return f"`{part.text}`"
        case "schema":
            return f"[{part.text}](#{part.text.lower()})"


if __name__ == "__main__":
    for page in list_pages():
        page.path.write_text(page.text(), encoding="utf-8")
