"""An answer that is one JSON document, never stored by caches on the way."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from expertctl.schema.strict_json import JsonObject


def json_reply(
    document: JsonObject | msgspec.Struct,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a document as an answer."""
    own = {"Cache-Control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(document), status, own, media_type="application/json")
