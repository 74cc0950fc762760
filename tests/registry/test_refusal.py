"""What servers say when they refuse, read without believing any of it."""

import pytest

from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    RateLimitError,
    UnreachableError,
    sanitise_text,
)
from expertctl.registry.errors import (
    MAX_TEXT,
    RefusalReason,
    make_response_error,
    parse_error_body,
    parse_retry_after,
)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", RefusalReason()),
        (b"<html>", RefusalReason()),
        (b"[]", RefusalReason()),
        (b'{"errors": []}', RefusalReason()),
        (b'{"errors": ["x"]}', RefusalReason()),
        (b'{"errors": [{"code": "DENIED", "message": "no"}]}', RefusalReason("DENIED", "no")),
        (b'{"errors": [{"code": "X", "detail": {"code": "budget", "hint": "h"}}]}',
         RefusalReason("budget", "", "h")),
        (b'{"errors": [{"code": 5, "message": [], "detail": "text"}]}', RefusalReason()),
        (b'{"error": {"code": "c", "message": "m", "hint": "h"}}', RefusalReason("c", "m", "h")),
        (b'{"error": "text"}', RefusalReason()),
        (b'{"details": "incorrect username"}', RefusalReason("", "incorrect username")),
        (b'{"message": "m"}', RefusalReason("", "m")),
    ],
)  # fmt: skip
def test_the_known_forms_of_a_refusal_are_read(body: bytes, reason: RefusalReason) -> None:
    assert parse_error_body(body) == reason


@pytest.mark.parametrize(
    ("text", "clean"),
    [("plain", "plain"), ("two\nlines\r\n", "two lines"), ("\x1b[31mred\x1b[0m", "[31mred [0m"),
     ("\u202eback", "back"), ("", ""), ("x" * 600, "x" * 500 + "…")],
)  # fmt: skip
def test_a_text_is_bounded_and_harmless(text: str, clean: str) -> None:
    assert sanitise_text(text, MAX_TEXT) == clean


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5.0), (" 5 ", 5.0), ("-5", None), ("1.5", None), ("", None), ("٣", None),
     ("Wed, 21 Oct 2015 07:28:00 GMT", None), ("9" * 20, None)],
)  # fmt: skip
def test_a_pause_is_seconds_or_nothing(text: str, seconds: float | None) -> None:
    assert parse_retry_after({"retry-after": text}) == seconds


def test_words_of_our_own_registry_stand_without_the_request() -> None:
    body = b'{"error": {"code": "not_found", "message": "there is no acme/sql", "hint": ""}}'
    missing = make_response_error(
        404, {}, body, host="r.example", what="GET /api/v1/packages/acme/sql"
    )
    assert isinstance(missing, NotFoundError)
    assert missing.message == "r.example: there is no acme/sql"


def test_words_of_other_registries_stand_behind_the_request() -> None:
    body = b'{"errors": [{"code": "NAME_UNKNOWN", "message": "unknown"}]}'
    missing = make_response_error(404, {}, body, host="r.example", what="GET /v2/acme/sql")
    assert missing.message == "r.example: GET /v2/acme/sql: not found: unknown"


def test_who_must_log_in_is_told_where() -> None:
    body = b'{"error": {"code": "unauthenticated", "message": "needs a token", "hint": "other"}}'
    unknown = make_response_error(401, {}, body, host="r.example", what="GET /x")
    assert unknown.hint == "log in with `expertctl login r.example`"


def test_some_refusals_carry_more_than_a_text() -> None:
    limited = make_response_error(429, {}, b"", host="r.example", what="GET /x")
    assert isinstance(limited, RateLimitError)
    assert limited.retry_after == 1
    busy = make_response_error(503, {"retry-after": "3"}, b"", host="r.example", what="GET /x")
    assert isinstance(busy, UnreachableError)
    assert (busy.sent, busy.retry_after) == (False, 3.0)
    failed = make_response_error(500, {}, b"", host="r.example", what="GET /x")
    assert isinstance(failed, UnreachableError)
    assert failed.sent is True
    body = b'{"error": {"code": "invalid_package", "message": "", "hint": ""}}'
    invalid = make_response_error(422, {}, body, host="r.example", what="PUT /x")
    assert isinstance(invalid, InvalidPackageError)
    assert invalid.message == "r.example: PUT /x: refused"
