"""Requests that are wrong on purpose, each with the status that it must get."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.soak.house import BASE

_JSON = {"Content-Type": "application/json"}
_TURNS = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Mistake:
    """One request that cannot be answered."""

    status: int
    method: str
    path: str
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: _JSON)


def _chat(status: int, **fields: object) -> Mistake:
    body = {"model": BASE, "messages": _TURNS, "max_tokens": 4, **fields}
    return Mistake(status, "POST", "/v1/chat/completions", json.dumps(body).encode())


def _post(status: int, path: str, **fields: object) -> Mistake:
    return Mistake(status, "POST", path, json.dumps(fields).encode())


MISTAKES = (
    _chat(400, messages=[]),
    _chat(400, n=0),
    _chat(400, n=129),
    _chat(400, temperature=3),
    _chat(400, nonsense=True),
    _chat(400, max_tokens="many"),
    _chat(400, priority=10),
    _chat(400, messages=[{"role": "user", "content": "long " * 1000}]),
    _chat(404, model="nobody/knows-this"),
    _chat(404, model="../../etc/passwd"),
    _post(400, "/v1/completions", model=BASE, prompt=[1, 2, 3]),
    _post(400, "/v1/messages", model=BASE, messages=_TURNS),
    _post(400, "/v1/infer", prompt=""),
    _post(400, "/v1/infer", prompt="Hello", force_experts=["/etc/passwd"]),
    _post(404, "/v1/infer", prompt="Hello", force_experts=["nobody/knows-this"]),
    _post(400, "/v1/jobs", prompt="Hello", stream=True),
    _post(400, "/v1/route", prompt="Hello", max_experts=0),
    Mistake(400, "POST", "/v1/infer", b'{"prompt": '),
    Mistake(400, "POST", "/v1/infer", b'{"prompt": "\xff\xfe"}'),
    Mistake(415, "POST", "/v1/infer", b'{"prompt": "Hello"}', {"Content-Type": "text/plain"}),
    Mistake(403, "POST", "/v1/infer", b"{}", {**_JSON, "Origin": "https://elsewhere.example"}),
    Mistake(421, "POST", "/v1/infer", b"{}", {**_JSON, "Host": "elsewhere.example"}),
    Mistake(404, "GET", "/v1/jobs/of-nobody", headers={}),
    Mistake(404, "DELETE", "/v1/jobs/of-nobody", headers={}),
    Mistake(404, "GET", "/v1/nothing", headers={}),
    Mistake(405, "GET", "/v1/infer", headers={}),
)
