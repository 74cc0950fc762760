"""Bodies of requests, as the published API has them.

The official client, on a server in process or on a socket.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2

from tests.server.harness import URL, ServerHarness

WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def make_text_block(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def make_body(**fields: Any) -> bytes:
    """A request that says little, and these fields; one of None is left out."""
    usual: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    given = {name: value for name, value in {**usual, **fields}.items() if value is not None}
    return json.dumps(given).encode()


_ROOT = Path(__file__).parents[3]
_PROGRAM = "tests.server.anthropic.socket_program"


@contextmanager
def make_client(served: ServerHarness, secret: str = "any") -> Iterator[anthropic.Anthropic]:
    """The client of a server in process; it tries nothing again."""
    inner: Any = served.client()
    with anthropic.Anthropic(
        api_key=secret, base_url=URL, http_client=inner, max_retries=0
    ) as client:
        yield client


@asynccontextmanager
async def make_async_client(served: ServerHarness) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The asynchronous client of a server in process."""
    transport = httpx2.ASGITransport(app=served.app)
    async with (
        httpx2.AsyncClient(transport=transport, base_url=URL) as inner,
        anthropic.AsyncAnthropic(
            api_key="any", base_url=URL, http_client=inner, max_retries=0
        ) as client,
    ):
        yield client


@contextmanager
def run_socket_program(home: Path, *, rows: int = 16, queue: int = 128) -> Iterator[str]:
    """Serve a home in a process of its own; give the address."""
    command = [sys.executable, "-m", _PROGRAM, str(home), str(rows), str(queue)]
    log = home.parent / f"{home.name}.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
    assert process.stdout
    try:
        port = process.stdout.readline().strip()
        assert port, log.read_text()
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
