"""Types of the API: kinds of text and number in bodies and answers, the context of handlers.

Input types refuse unknown keys. Times are RFC 3339 in UTC, sizes are bytes. The same types check
requests and make the OpenAPI document.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from expertctl.registry.index_document import format_timestamp
from registry_server.access.rights import Identity
from registry_server.registry import Registry

MAX_PAGE = 100
MAX_BYTES = 2**53 - 1
_WORD = r"[a-z0-9]+(-[a-z0-9]+)*"
_REST = r"[a-z0-9]+([._/-]+[a-z0-9]+)*"
_NUMBER = r"(0|[1-9][0-9]{0,8})"
_IDENTIFIER = r"(0|[1-9][0-9]{0,8}|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)"

Name = Annotated[str, Meta(pattern=f"^{_WORD}$", max_length=64, examples=["acme"])]
VersionText = Annotated[
    str,
    Meta(
        pattern=rf"^{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_IDENTIFIER}(\.{_IDENTIFIER})*)?$",
        max_length=128,
        examples=["1.2.0"],
    ),
]
KeyId = Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]
TokenId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
ScopeText = Annotated[
    str,
    Meta(
        pattern=rf"^(admin|(read|push|delete|yank|manage)(:{_WORD}(/{_REST})?)?)$",
        max_length=200,
        examples=["read", "push:acme/sql"],
    ),
]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
Line = Annotated[str, Meta(min_length=1, max_length=100, description="A printable line.")]
Reason = Annotated[str, Meta(min_length=1, max_length=500, description="A printable line.")]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE, description="Maximum number of items.")]
Cursor = Annotated[
    str, Meta(max_length=100, description="`next` of the previous page; empty for the first page.")
]
Offset = Annotated[
    str,
    Meta(
        pattern="^([1-9][0-9]{0,14})?$",
        description="`next` of the previous page; empty for the first page.",
    ),
]
Quota = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Read = Literal["public", "token"]
Kind = Literal["expert", "oci"]
Role = Literal["owner", "publisher"]


class ApiInput(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the types that clients send."""


class ApiOutput(Struct, frozen=True):
    """Base of the types that the server returns."""


class ListQuery(ApiInput, frozen=True):
    """Selects a page of a list."""

    limit: Limit = MAX_PAGE
    cursor: Cursor = ""


class AuditQuery(ApiInput, frozen=True):
    """Selects a page of the audit log."""

    limit: Limit = MAX_PAGE
    cursor: Offset = ""


class ErrorDetail(ApiOutput, frozen=True):
    """What went wrong: a stable code, a message, and a hint, which may be empty."""

    code: str
    message: str
    hint: str


class ErrorBody(ApiOutput, frozen=True):
    """The answer to a failed request."""

    error: ErrorDetail


def format_optional_time(seconds: float | None) -> str | None:
    """Format a time like `format_timestamp`; None stays None."""
    return None if seconds is None else format_timestamp(seconds)


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What every handler may use: the registry, and who made the request."""

    registry: Registry
    identity: Identity
