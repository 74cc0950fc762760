"""The official client, on a server in process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from tests.server.served import URL, Served

Client = openai.OpenAI


@contextmanager
def a_client(served: Served, secret: str = "any") -> Iterator[Client]:
    """The client of a server in process; it tries nothing again."""
    inner: Any = served.client()
    with openai.OpenAI(
        api_key=secret, base_url=f"{URL}/v1", http_client=inner, max_retries=0
    ) as client:
        yield client


def told(answer: Any) -> dict[str, Any]:
    """What an answer holds that the published API has no place for."""
    extra = answer.model_extra["expertctl"]
    assert isinstance(extra, dict)
    return extra
