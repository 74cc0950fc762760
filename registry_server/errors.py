"""How an error is answered: as OCI wants it below ``/v2/``, as ``{"error": …}`` elsewhere.

Messages reach terminals and logs, so they are printable and bounded here, whatever is in them.
"""

import json
import re
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Scope

from expertctl.errors import ExpertError, ForbiddenError
from expertctl.http.printable import printable
from registry_server.access.sessions import PREFIX as SESSION_PREFIX
from registry_server.oci.errors import CODE_OF_STATUS, OciCode, OciError
from registry_server.settings import ServerSettings
from registry_server.statuses import retry_after, status_of

_REPOSITORY = re.compile(r"/v2/([a-z0-9._/-]{1,255})/(?:blobs|manifests|tags|referrers)/")


def error_response(
    error: ExpertError, scope: Scope, settings: ServerSettings, *, status: int | None = None
) -> Response:
    """Return the answer to a request that failed, with the headers that its status needs.

    ``status`` is another one than that of the error's class.
    """
    status = status or status_of(error)
    path = str(scope.get("path", ""))
    body = _oci_body(error, status) if path.startswith("/v2") else _plain_body(error)
    headers = {"Cache-Control": "no-store", **_headers(error)}
    response = Response(json.dumps(body), status, headers, media_type="application/json")
    asked = _asked_scope(path, str(scope.get("method", "")))
    if status == 401:
        for challenge in challenges(settings, asked):
            response.headers.append("WWW-Authenticate", challenge)
    elif asked and isinstance(error, ForbiddenError) and _shows_session(scope):
        _, bearer = challenges(settings, asked)
        response.headers["WWW-Authenticate"] = f'{bearer},error="insufficient_scope"'
    return response


def challenges(settings: ServerSettings, scope: str = "") -> tuple[str, str]:
    """Return the values of ``WWW-Authenticate``: Basic, or a bearer token from ``/token``.

    Basic comes first: clients that know one scheme take the first header, and some take them both
    for one, whose last realm counts.
    """
    url = settings.public_url
    service = url.partition("://")[2]
    wanted = f',scope="{scope}"' if scope else ""
    bearer = f'Bearer realm="{url}/token",service="{service}"{wanted}'
    return 'Basic realm="expertctl registry"', bearer


def _shows_session(scope: Scope) -> bool:
    """Tell whether a token from ``/token`` was shown: another may allow more (RFC 6750, 3.1)."""
    shown = dict(scope.get("headers", ())).get(b"authorization", b"")
    return bool(shown.lower().startswith(b"bearer " + SESSION_PREFIX.encode("ascii")))


def _oci_body(error: ExpertError, status: int) -> dict[str, object]:
    code = (
        error.oci_code
        if isinstance(error, OciError)
        else CODE_OF_STATUS.get(status, OciCode.UNKNOWN)
    )
    own = "" if isinstance(error, OciError) else error.code
    detail = {"code": own, "hint": printable(error.hint)}
    return {"errors": [{"code": code, "message": printable(error.message), "detail": detail}]}


def _plain_body(error: ExpertError) -> dict[str, object]:
    code = error.oci_code if isinstance(error, OciError) else error.code
    shown = {"code": code, "message": printable(error.message), "hint": printable(error.hint)}
    return {"error": shown}


def _headers(error: ExpertError) -> Mapping[str, str]:
    own = error.headers if isinstance(error, OciError) else {}
    seconds = retry_after(error)
    return own if seconds is None else {**own, "Retry-After": str(seconds)}


def _asked_scope(path: str, method: str) -> str:
    match = _REPOSITORY.match(path)
    if match is None:
        return ""
    actions = "pull" if method in {"GET", "HEAD"} else "pull,push"
    if method == "DELETE" and "/blobs/uploads/" not in path:
        actions = "pull,delete"
    return f"repository:{match.group(1)}:{actions}"
