"""The id of a request: in its answer, in the log, and in errors of the Anthropic API."""

import secrets

from starlette.types import Scope

PREFIX = "req_"


def new_request_id() -> str:
    """Return an id that cannot be guessed."""
    return PREFIX + secrets.token_hex(12)


def request_id_of(scope: Scope) -> str:
    """Return the id of a request; empty outside of the request log."""
    return str(scope.get("state", {}).get("request_id", ""))
