import json
from pathlib import Path

import pytest
from starlette.responses import Response

from expertctl import errors
from registry_server.errors import OciCode, OciError, error_response
from registry_server.settings import ServerSettings

SETTINGS = ServerSettings(data=Path("data"), url="https://registry.example")


def answer(error: errors.ExpertError, path: str, method: str = "GET") -> Response:
    return error_response(error, {"type": "http", "path": path, "method": method}, SETTINGS)


def body(response: Response) -> object:
    return json.loads(bytes(response.body))


def test_below_v2_an_error_is_as_oci_wants_it() -> None:
    error = errors.BudgetError("no room", hint="ask for more")
    response = answer(error, "/v2/acme/x/blobs/uploads/")
    assert response.status_code == 403
    detail = {"code": "budget", "hint": "ask for more"}
    assert body(response) == {
        "errors": [{"code": "DENIED", "message": "no room", "detail": detail}]
    }


@pytest.mark.parametrize("path", ["/api/v1/", "/tuf/targets/index/a/b.json", "/token", ""])
def test_elsewhere_an_error_is_an_object_of_ours(path: str) -> None:
    response = answer(errors.ConflictError("taken", hint="choose another"), path)
    shown = {"code": "conflict", "message": "taken", "hint": "choose another"}
    assert (response.status_code, body(response)) == (409, {"error": shown})


def test_an_error_with_a_code_of_oci_keeps_it_and_its_headers() -> None:
    error = OciError(OciCode.RANGE_INVALID, "no", headers={"Content-Range": "bytes */9"})
    response = answer(error, "/v2/acme/x/blobs/y")
    assert response.headers["Content-Range"] == "bytes */9"
    assert b"RANGE_INVALID" in bytes(response.body)
    assert b"RANGE_INVALID" in bytes(answer(error, "/elsewhere").body)


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v2/acme/x/manifests/v1", "repository:acme/x:pull"),
        ("HEAD", "/v2/acme/a/b/blobs/y", "repository:acme/a/b:pull"),
        ("POST", "/v2/acme/x/blobs/uploads/", "repository:acme/x:pull,push"),
        ("DELETE", "/v2/acme/x/blobs/uploads/7", "repository:acme/x:pull,push"),
        ("DELETE", "/v2/acme/x/manifests/v1", "repository:acme/x:pull,delete"),
        ("GET", "/v2/", ""),
        ("GET", '/v2/a"b/manifests/v1', ""),
    ],
)
def test_who_must_log_in_is_told_both_ways_at_the_address_of_the_settings(
    method: str, path: str, scope: str
) -> None:
    response = answer(errors.UnauthenticatedError("who?"), path, method)
    basic, bearer = response.headers.getlist("WWW-Authenticate")
    tail = f',scope="{scope}"' if scope else ""
    own = 'realm="https://registry.example/token",service="registry.example"'
    assert (response.status_code, basic) == (401, 'Basic realm="expertctl registry"')
    assert bearer == f"Bearer {own}{tail}"


def test_who_has_to_wait_is_told_how_long() -> None:
    response = answer(errors.RateLimitError("slow down", retry_after=9), "/v2/")
    assert (response.status_code, response.headers["Retry-After"]) == (429, "9")
    assert "Retry-After" in answer(errors.StoreError("down"), "/api/v1/").headers


def test_no_answer_to_an_error_is_kept_by_a_cache() -> None:
    assert answer(errors.NotFoundError("x"), "/v2/x").headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("secret", "error", "told"),
    [
        (b"Bearer xps_short", errors.ForbiddenError("not for push"), True),
        (b"Bearer xpt_long", errors.ForbiddenError("not for push"), False),
        (b"Basic eDp5", errors.ForbiddenError("not for push"), False),
        (b"Bearer xps_short", errors.BudgetError("no room"), False),
    ],
)
def test_a_session_that_is_too_narrow_is_told_what_to_ask_for(
    secret: bytes, error: errors.ExpertError, told: bool
) -> None:
    scope = {
        "type": "http",
        "path": "/v2/acme/x/blobs/uploads/",
        "method": "POST",
        "headers": [(b"authorization", secret)],
    }
    response = error_response(error, scope, SETTINGS)
    assert response.status_code == 403
    assert (
        response.headers.getlist("WWW-Authenticate")
        == [
            'Bearer realm="https://registry.example/token",service="registry.example",'
            'scope="repository:acme/x:pull,push",error="insufficient_scope"'
        ]
        * told
    )
