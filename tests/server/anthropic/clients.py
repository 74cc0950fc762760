"""The official client, on a server in process or on a socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
from starlette.testclient import TestClient

from tests.server.served import URL, Served


@contextmanager
def a_client(served: Served, secret: str = "any") -> Iterator[anthropic.Anthropic]:
    """The client of a server in process; it tries nothing again."""
    inner: Any = served.client()
    assert isinstance(inner, TestClient)
    with anthropic.Anthropic(
        api_key=secret, base_url=URL, http_client=inner, max_retries=0
    ) as client:
        yield client
