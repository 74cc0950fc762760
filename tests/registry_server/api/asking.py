"""A client of the API that gives back statuses and JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.testclient import TestClient

Publish = Callable[..., None]


@dataclass(frozen=True)
class Asking:
    """A client of the API; each method returns the status and the JSON of the answer."""

    client: TestClient

    def __call__(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        answer = self.client.request(method, f"/api/v1/{path}", json=body)
        return answer.status_code, answer.json() if answer.content else {}
