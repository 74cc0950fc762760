"""Error responses of the registry: OCI's form below ``/v2/``, ``{"error": …}`` elsewhere.

Errors below ``/v2/`` have the codes of the OCI distribution specification. Messages reach terminals
and logs, so they are made printable and bounded here.
"""

import json
import logging
import re
from collections.abc import Mapping
from enum import StrEnum

from starlette.responses import Response
from starlette.types import Scope

from expertctl.errors import (
    BudgetError,
    ExpertError,
    ForbiddenError,
    IncompatibleError,
    InvalidPackageError,
    RegistryError,
    TrustError,
    sanitise_error_text,
)
from expertctl.http.log import build_log_config
from expertctl.http.operation import find_retry_after, find_status
from registry_server.settings import ServerSettings


class OciCode(StrEnum):
    """The values of ``errors[].code``."""

    BLOB_UNKNOWN = "BLOB_UNKNOWN"
    BLOB_UPLOAD_INVALID = "BLOB_UPLOAD_INVALID"
    BLOB_UPLOAD_UNKNOWN = "BLOB_UPLOAD_UNKNOWN"
    DIGEST_INVALID = "DIGEST_INVALID"
    MANIFEST_BLOB_UNKNOWN = "MANIFEST_BLOB_UNKNOWN"
    MANIFEST_INVALID = "MANIFEST_INVALID"
    MANIFEST_UNKNOWN = "MANIFEST_UNKNOWN"
    NAME_INVALID = "NAME_INVALID"
    NAME_UNKNOWN = "NAME_UNKNOWN"
    RANGE_INVALID = "RANGE_INVALID"
    SIZE_INVALID = "SIZE_INVALID"
    TAG_INVALID = "TAG_INVALID"
    PAGE_INVALID = "PAGINATION_NUMBER_INVALID"
    UNAUTHORIZED = "UNAUTHORIZED"
    DENIED = "DENIED"
    UNSUPPORTED = "UNSUPPORTED"
    TOO_MANY_REQUESTS = "TOOMANYREQUESTS"
    UNAVAILABLE = "UNAVAILABLE"
    UPLOAD_BUSY = "BLOB_UPLOAD_BUSY"
    UNKNOWN = "UNKNOWN"


STATUS_BY_CODE: dict[OciCode, int] = {
    OciCode.BLOB_UNKNOWN: 404,
    OciCode.BLOB_UPLOAD_INVALID: 400,
    OciCode.BLOB_UPLOAD_UNKNOWN: 404,
    OciCode.DIGEST_INVALID: 400,
    OciCode.MANIFEST_BLOB_UNKNOWN: 404,
    OciCode.MANIFEST_INVALID: 400,
    OciCode.MANIFEST_UNKNOWN: 404,
    OciCode.NAME_INVALID: 400,
    OciCode.NAME_UNKNOWN: 404,
    OciCode.RANGE_INVALID: 416,
    OciCode.SIZE_INVALID: 400,
    OciCode.TAG_INVALID: 400,
    OciCode.PAGE_INVALID: 400,
    OciCode.UNAUTHORIZED: 401,
    OciCode.DENIED: 403,
    OciCode.UNSUPPORTED: 405,
    OciCode.TOO_MANY_REQUESTS: 429,
    OciCode.UNAVAILABLE: 503,
    OciCode.UPLOAD_BUSY: 409,
    OciCode.UNKNOWN: 500,
}
"""Code of an `OciError` → HTTP status."""

CODE_BY_STATUS: dict[int, OciCode] = {
    400: OciCode.MANIFEST_INVALID,
    401: OciCode.UNAUTHORIZED,
    403: OciCode.DENIED,
    404: OciCode.NAME_UNKNOWN,
    405: OciCode.UNSUPPORTED,
    408: OciCode.UNKNOWN,
    409: OciCode.DENIED,
    413: OciCode.SIZE_INVALID,
    414: OciCode.NAME_INVALID,
    415: OciCode.UNSUPPORTED,
    421: OciCode.UNSUPPORTED,
    429: OciCode.TOO_MANY_REQUESTS,
    431: OciCode.SIZE_INVALID,
    503: OciCode.UNAVAILABLE,
    507: OciCode.UNAVAILABLE,
}
"""HTTP status of any other error → code."""


class OciError(ExpertError):
    """An error for which the specification has a code; ``headers`` are added to the response."""

    def __init__(
        self,
        oci_code: OciCode,
        message: str,
        *,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store the code, the message, the hint and the headers."""
        super().__init__(message, hint=hint)
        self.oci_code = oci_code
        self.headers = dict(headers or {})


_OWN_STATUSES: dict[type[ExpertError], int] = {
    InvalidPackageError: 400,
    TrustError: 400,
    BudgetError: 403,
    IncompatibleError: 409,
    RegistryError: 502,
}


def get_status(error: ExpertError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, OciError):
        return STATUS_BY_CODE[error.oci_code]
    return find_status(error, _OWN_STATUSES)


def get_retry_after(error: ExpertError) -> int | None:
    """Return the seconds after which a retry may succeed; None if retrying is pointless."""
    return find_retry_after(error, get_status(error))


REQUEST_LOGGER = logging.getLogger("registry_server.requests")
LOG_CONFIG = build_log_config("registry_server")
SESSION_PREFIX = "xps_"
"""Begins the session token of a container client."""


API_PREFIXES = ("/v2", "/api", "/tuf", "/token")
"""Path prefixes of programs, whose errors are not pages and which ignore cookies."""


def is_program_path(path: str) -> bool:
    """Return whether programs, not browsers, use a path."""
    return any(path == start or path.startswith(f"{start}/") for start in API_PREFIXES)


_REPOSITORY_PATH = re.compile(r"/v2/([a-z0-9._/-]{1,255})/(?:blobs|manifests|tags|referrers)/")


def error_response(
    error: ExpertError, scope: Scope, settings: ServerSettings, *, status: int | None = None
) -> Response:
    """Return the response to a failed request, with the headers that its status needs.

    ``status`` overrides the status of the error's class.
    """
    status = status or get_status(error)
    path = str(scope.get("path", ""))
    body = _oci_error_body(error, status) if path.startswith("/v2") else _api_error_body(error)
    headers = {"Cache-Control": "no-store", **list_error_headers(error)}
    response = Response(json.dumps(body), status, headers, media_type="application/json")
    required = _required_scope(path, str(scope.get("method", "")))
    if status == 401:
        for challenge in build_challenges(settings, required):
            response.headers.append("WWW-Authenticate", challenge)
    elif required and isinstance(error, ForbiddenError) and _used_session_token(scope):
        _, bearer = build_challenges(settings, required)
        response.headers["WWW-Authenticate"] = f'{bearer},error="insufficient_scope"'
    return response


def build_challenges(settings: ServerSettings, scope: str = "") -> tuple[str, str]:
    """Return the values of ``WWW-Authenticate``: Basic, or a bearer token from ``/token``.

    Basic comes first: clients that support one scheme use the first header, and some parse both
    headers as one and use the last realm.
    """
    url = settings.public_url
    service = url.partition("://")[2]
    wanted = f',scope="{scope}"' if scope else ""
    bearer = f'Bearer realm="{url}/token",service="{service}"{wanted}'
    return 'Basic realm="expertctl registry"', bearer


def _used_session_token(scope: Scope) -> bool:
    """Return whether a session token was used: a new one may allow more (RFC 6750, 3.1)."""
    shown = dict(scope.get("headers", ())).get(b"authorization", b"")
    return bool(shown.lower().startswith(b"bearer " + SESSION_PREFIX.encode("ascii")))


def _oci_error_body(error: ExpertError, status: int) -> dict[str, object]:
    code = (
        error.oci_code
        if isinstance(error, OciError)
        else CODE_BY_STATUS.get(status, OciCode.UNKNOWN)
    )
    own = "" if isinstance(error, OciError) else error.code
    detail = {"code": own, "hint": sanitise_error_text(error.hint)}
    return {
        "errors": [{"code": code, "message": sanitise_error_text(error.message), "detail": detail}]
    }


def _api_error_body(error: ExpertError) -> dict[str, object]:
    code = error.oci_code if isinstance(error, OciError) else error.code
    shown = {
        "code": code,
        "message": sanitise_error_text(error.message),
        "hint": sanitise_error_text(error.hint),
    }
    return {"error": shown}


def list_error_headers(error: ExpertError) -> Mapping[str, str]:
    """Return the headers of an error itself, such as ``Allow`` and ``Retry-After``."""
    own = error.headers if isinstance(error, OciError) else {}
    seconds = get_retry_after(error)
    return own if seconds is None else {**own, "Retry-After": str(seconds)}


def _required_scope(path: str, method: str) -> str:
    match = _REPOSITORY_PATH.match(path)
    if match is None:
        return ""
    actions = "pull" if method in {"GET", "HEAD"} else "pull,push"
    if method == "DELETE" and "/blobs/uploads/" not in path:
        actions = "pull,delete"
    return f"repository:{match.group(1)}:{actions}"
